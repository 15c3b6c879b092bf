"""Figures that follow from the knobs of a config: what the core keeps to, and what ``checks`` compares."""

from __future__ import annotations

from stream_balancer.config.knobs import Knobs
from stream_balancer.planning import smallest_max_skips
from stream_balancer.planning.selection import most_for_max_skips

USUAL_MAX_SKIPS = 16
"""The value of "auto" unless more are needed; measured in bench/results/planning_measured.md."""


def least_batch_size(c: Knobs) -> int:
    """Rollouts that every full batch has at least."""
    return c.batch_size if c.step_size.rollouts is None else c.step_size.rollouts[0]


def least_max_skips(c: Knobs, window: int | None = None, capacity: int | None = None) -> int:
    """Smallest ``max_skips`` that works with the window and the capacity of the config, or with others, in rollouts.

    Below ``3 * (window / batch_size - 1)`` every rollout would always be due and the window could choose nothing;
    below ``ceil(capacity / batch_size) - 1`` a full buffer could not leave in time, whatever the order (with groups
    kept whole a batch may be up to ``groups.size - 1`` short, so a little more is needed). With ``step_size.rollouts``
    the second is of its least. Under ``step_size.tokens`` the same of ``window_tokens`` and ``limits.tokens``; there
    it is the steps that would have too many tokens.
    """
    # counted in what steps are made of: tokens there, rollouts else
    tokens = c.step_size.tokens
    if tokens is not None:
        in_force = c.step_size.window_tokens or tokens
        most = (c.limits.tokens or in_force) + tokens  # the last put may pass the limit
        return max(smallest_max_skips(in_force, tokens, most), 1)
    # the widest that may be in force decides
    window = max(c.auto_windows, default=c.window) if window is None else window
    capacity = c.capacity if capacity is None else capacity
    return max(smallest_max_skips(window, c.batch_size, capacity, c.groups.kept or 1, least_batch_size(c)), 1)


def most_waiting(c: Knobs) -> int:
    """Rollouts that may wait at once, together with the siblings that their groups lack: ``capacity``, or where
    siblings leave together as many as ``max_skips`` (None: as 16) is a guarantee for."""
    if c.groups.kept is None or c.step_size.tokens is not None:
        return c.capacity
    # incomplete groups hold no place of capacity, so this is what bounds memory
    skips = USUAL_MAX_SKIPS if c.max_skips is None else c.max_skips
    return max(c.capacity, most_for_max_skips(skips, least_batch_size(c), c.groups.kept))


def most_waiting_tokens(c: Knobs) -> int | None:
    """Tokens from which on nothing more is let in but siblings of what waits: ``limits.tokens``, or where siblings
    leave together as many as ``max_skips`` (None: as 16) is a guarantee for; None = no such limit."""
    if c.limits.tokens is None or c.groups.kept is None:
        return c.limits.tokens
    if c.step_size.tokens is None:
        return None  # the guarantee counts rollouts: see most_waiting
    return max(c.limits.tokens, (c.max_skips or USUAL_MAX_SKIPS) * c.step_size.tokens)
