"""Options of ``serve``, and which of them a balancer's knobs rule out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ConfigError

__all__ = ["Care", "check_knobs"]


class Care(NamedTuple):
    """Options of :func:`serve`."""

    rejoin_timeout_s: float
    replan: bool
    move_late: bool
    open: bool
    report_after_s: float
    roles: Mapping[str, Sequence[str]]


def check_knobs(config: BalancerConfig, care: Care) -> None:
    """Raise ConfigError for knobs that rule an option out."""
    replan, late = (care.replan, "on_rank_loss='replan'"), (care.move_late, "move_late=True")
    often = (
        (config.step_size.mini_batches > 1, f"step_size.mini_batches={config.step_size.mini_batches}"),
        "ranks meet several times in a step, and what changes hands in between cannot join the meetings that are over",
    )
    # the constructor of the balancer cannot check these: options of serve() are not known there
    for (is_wanted, option), (is_set, knob), why in (
        (replan, *often),
        (late, *often),
        (
            late,
            (
                config.micro_batches.counts != "free",
                f"sync={config.sync!r} and micro_batches.counts={config.micro_batches.counts!r}",
            ),
            "each rank must run its number, and nobody can take one over",
        ),
        (
            late,
            (config.micro_batches.multiple_of > 1, f"micro_batches.multiple_of={config.micro_batches.multiple_of}"),
            "a rank that some are moved from is left with any number",
        ),
        (
            late,
            (config.groups.keep == "same_rank", "groups.keep='same_rank'"),
            "a micro-batch that is moved takes part of a group away",
        ),
    ):
        if is_wanted and is_set:
            raise ConfigError(f"{option} with {knob}: {why}. Leave one of them out")
