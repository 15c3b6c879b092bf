"""What of ``serve``'s options may be asked for together, and of which balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.open_steps import Source
from stream_balancer.errors import ConfigError

__all__ = ["check_may_move_late", "check_may_open", "check_may_replan"]


def check_may_open(balancer: Source, others: Mapping[str, object]) -> None:
    if not isinstance(balancer, StreamBalancer):
        raise ValueError(f"open=True is for a StreamBalancer, which plans; not for {balancer!r}")
    for name, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"open=True with {name}: that goes by whole steps, and ranks begin with a part of one. Leave one of "
                "them out"
            )


def check_may_move_late(balancer: Source, roles: Mapping[str, Sequence[str]]) -> None:
    if not isinstance(balancer, StreamBalancer):
        raise ValueError(f"move_late=True is for a StreamBalancer, which plans; not for {balancer!r}")
    if roles:
        raise ConfigError(
            f"move_late=True with roles {list(roles)}: what they compute for a rank cannot go to another one. Leave "
            "one of them out"
        )
    config = balancer.config
    if len(config.cp_sizes) > 1:
        raise ConfigError(
            f"move_late=True with cp_sizes={config.cp_sizes}: ranks that share a rollout must run it together, so none "
            "of them can give it away. Leave one of them out"
        )
    if config.micro_batch_counts != "free":
        raise ConfigError(
            f"move_late=True with sync={config.sync!r} and micro_batch_counts={config.micro_batch_counts!r}: ranks "
            "must meet once a step, and each may do its own number of micro-batches. Give BalancerConfig(sync='step', "
            "micro_batch_counts='free'), or leave move_late out"
        )
    if config.mini_batches > 1:
        raise ConfigError(
            f"move_late=True with mini_batches={config.mini_batches}: ranks meet several times in a step. Leave one of "
            "them out"
        )
    if config.micro_batch_multiple > 1:
        raise ConfigError(
            f"move_late=True with micro_batch_multiple={config.micro_batch_multiple}: a rank that some are moved from "
            "is left with any number. Leave one of them out"
        )
    if config.group_size is not None and config.groups == "same_rank":
        raise ConfigError(
            "move_late=True with groups='same_rank': a micro-batch that is moved takes part of a group away. Leave one "
            "of them out"
        )


def check_may_replan(balancer: Source) -> None:
    if not isinstance(balancer, StreamBalancer):
        raise ValueError(f"on_rank_loss='replan' is for a StreamBalancer, which plans; not for {balancer!r}")
    if balancer.config.sync == "micro_batch":
        raise ConfigError(
            "on_rank_loss='replan' with sync='micro_batch': ranks that meet at every micro-batch hold each other's "
            "weights and cannot go on without one. Leave on_rank_loss out, and give a rejoin_timeout_s"
        )
    if len(balancer.config.cp_sizes) > 1:
        raise ConfigError(
            f"on_rank_loss='replan' with cp_sizes={balancer.config.cp_sizes}: ranks that share a rollout with a lost "
            "one cannot go on within it, and what they have done of it would count twice. Leave one out; with a "
            "rejoin_timeout_s the lost rank may come back"
        )
    if balancer.config.mini_batches > 1:
        raise ConfigError(
            f"on_rank_loss='replan' with mini_batches={balancer.config.mini_batches}: ranks meet several times in a "
            "step, and what a lost rank owed cannot join those that are over. Leave one of them out"
        )
