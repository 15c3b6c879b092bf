"""Options of ``serve``, and which of them a balancer's knobs rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ConfigError
from stream_balancer.host.balancer import StreamBalancer

__all__ = ["Care", "check_plans"]


class Care(NamedTuple):
    """Options of :func:`serve`."""

    rejoin_timeout_s: float
    replan: bool
    move_late: bool
    open: bool
    report_after_s: float
    roles: Mapping[str, Sequence[str]]


def check_plans(balancer: object, care: Care) -> None:
    """Raise ValueError for a balancer that does not plan, ConfigError for knobs that rule an option out."""
    wanted = {"on_rank_loss='replan'": care.replan, "move_late=True": care.move_late, "open=True": care.open}
    for name in (name for name, is_given in wanted.items() if is_given):
        if not isinstance(balancer, StreamBalancer):
            raise ValueError(f"{name} is for a StreamBalancer, which plans; not for {balancer!r}")
        config = balancer.config
        if config.mini_batches > 1 and name != "open=True":
            raise ConfigError(
                f"{name} with mini_batches={config.mini_batches}: ranks meet several times in a step, and what changes "
                "hands in between cannot join the meetings that are over. Leave one of them out"
            )
        if name == "move_late=True":
            _check_may_move(config)


def _check_may_move(config: BalancerConfig) -> None:
    """Raise ConfigError for knobs under which nothing could ever be moved."""
    counts = f"sync={config.sync!r} and micro_batch_counts={config.micro_batch_counts!r}"
    for name, is_given, why in (
        (counts, config.micro_batch_counts != "free", "each rank must run its number, and nobody can take one over"),
        (
            f"micro_batch_multiple={config.micro_batch_multiple}",
            config.micro_batch_multiple > 1,
            "a rank that some are moved from is left with any number",
        ),
        (
            f"groups={config.groups!r}",
            config.group_size is not None and config.groups == "same_rank",
            "a micro-batch that is moved takes part of a group away",
        ),
    ):
        if is_given:
            raise ConfigError(f"move_late=True with {name}: {why}. Leave one of them out")
