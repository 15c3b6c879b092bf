"""Figures that follow from the knobs of a config: what the core keeps to, and what ``checks`` compares."""

from __future__ import annotations

from stream_balancer.config.knobs import Knobs
from stream_balancer.planning import smallest_max_skips
from stream_balancer.planning.selection import most_for_max_skips

USUAL_MAX_SKIPS = 16
"""The value of "auto" unless more are needed; measured in bench/results/planning_measured.md."""


def least_max_skips(c: Knobs) -> int:
    """Smallest ``max_skips`` that works with the window and the capacity of the config, in rollouts.

    Below ``3 * (window / batch_size - 1)`` every rollout would always be due and the window could choose nothing;
    below ``ceil(capacity / batch_size) - 1`` a full buffer could not leave in time, whatever the order (with groups
    kept whole a batch may be up to ``groups.size - 1`` short, so a little more is needed).
    """
    return max(smallest_max_skips(c.window, c.batch_size, c.capacity, c.groups.size or 1), 1)


def most_waiting(c: Knobs) -> int:
    """Rollouts that may wait at once, together with the siblings that their groups lack: ``capacity``, or where
    siblings leave together as many as ``max_skips`` (None: as 16) is a guarantee for."""
    if c.groups.size is None:
        return c.capacity
    # incomplete groups hold no place of capacity, so this is what bounds memory
    skips = USUAL_MAX_SKIPS if c.max_skips is None else c.max_skips
    return max(c.capacity, most_for_max_skips(skips, c.batch_size, c.groups.size))


def longest_rollout(c: Knobs) -> int | None:
    """Tokens that a rollout may have to stay within ``micro_batches.max_tokens``, shared by as many ranks as may (two
    equal chunks a rank); None = no cap."""
    # a part is two chunks of equal length, so an odd cap loses a token
    cap = c.micro_batches.max_tokens
    if cap is None:
        return None
    return max(cap, *(2 * size * (cap // 2) for size in c.context_parallel.sizes if size <= c.dp_size))
