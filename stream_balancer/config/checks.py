"""Combinations of knobs that are refused, with what, why, and what to do.

A knob that could deadlock, or never fire, is refused here, so that a run fails in its first second and not in its
tenth hour. Each function yields the reasons that hold, of which the first is raised. Values by themselves are checked
by :mod:`~stream_balancer.config.values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stream_balancer.config.figures import least_batch_size, least_max_skips
from stream_balancer.config.groups import Groups
from stream_balancer.config.knobs import Knobs
from stream_balancer.cost import CostModel
from stream_balancer.errors import ConfigError
from stream_balancer.planning import check_shares
from stream_balancer.planning.plan import step_multiple


def refuse(reasons: Iterator[str]) -> None:
    """Raise ConfigError for the first of these."""
    # the first reason is enough: the next ones often follow from it
    for reason in reasons:
        raise ConfigError(reason)


def check_cost(cost: CostModel) -> None:
    # isinstance() of a protocol asks the same, at ten times the price
    if isinstance(cost, type) or not (callable(cost) and hasattr(cost, "padded")):
        raise ConfigError(
            "cost must be a cost model (TokenCost(), QuadraticCost(), ... or a callable with a 'padded' "
            f"attribute), not {cost!r}"
        )
    # two lengths show a model that returns one number for all, NaN, or a negative one, before the first put does
    probe = np.asarray(cost(np.array([1, 1000], dtype=np.int64)), dtype=np.float64)
    if probe.shape != (2,) or not np.all(np.isfinite(probe)) or np.any(probe < 0):
        raise ConfigError(f"cost({[1, 1000]}) must give two finite numbers >= 0, not {probe.tolist()!r}")


def _those(knobs: Mapping[str, object]) -> str:
    return " and ".join(knob for knob, given in knobs.items() if given)


# blocks of ranks are aligned: only powers of two nest within each other
# types know the knobs as they are read, when none of these is None any more
def given(c: Any) -> Iterator[str]:
    """Knobs before any is derived."""
    if c.step_size.tokens is None and c.batch_size is None:
        yield "give batch_size (rollouts per step) or step_size.tokens (tokens per step)"
    if c.batch_size is not None and c.step_size.tokens is not None:
        yield (
            f"batch_size ({c.batch_size}) and step_size.tokens ({c.step_size.tokens}) exclude one another: a step has "
            "a fixed number of rollouts, or about a fixed number of tokens. Leave one out"
        )
    if c.step_size.window_tokens is not None and c.step_size.tokens is None:
        yield (
            f"step_size.window_tokens ({c.step_size.window_tokens}) needs step_size.tokens: a batch of batch_size "
            "rollouts might not be among so many tokens. Give window, in rollouts, or step_size.tokens instead of "
            "batch_size"
        )
    if c.step_size.window_tokens is not None and c.window is not None:
        yield (
            f"window ({c.window}) and step_size.window_tokens ({c.step_size.window_tokens}) exclude one another: a "
            "dispatch waits for rollouts or for tokens. Leave one out"
        )
    if c.groups.size is None and c.groups.keep != "same_batch":
        yield (
            f"groups.keep={c.groups.keep!r} needs groups.size, the siblings of a group: without it groups play no "
            "part. Give it"
        )
    if c.groups.min_size is not None and not (c.groups.kept or 0) / 2 <= c.groups.min_size < (c.groups.kept or 0):
        yield (
            f"groups.min_size ({c.groups.min_size}) must be at least half of groups.size ({c.groups.size}), and below "
            "it, and groups.keep not 'free': half of a group says how long the others may take. Change it, or leave "
            "it out"
        )
    if c.groups.min_size is None and c.groups.patience != Groups.patience:
        yield (
            f"groups.patience ({c.groups.patience}) needs groups.min_size, how many siblings must have come: without "
            "it a group waits for all. Give it, or leave patience out"
        )
    try:
        check_shares(c.stratum_shares or {})
    except ValueError as error:
        yield str(error)
    if c.loss_mask_column in ("input_ids", "labels"):
        yield (
            f"loss_mask_column must be the name of a column of masks, not {c.loss_mask_column!r}: tokens and labels "
            "are no mask, -100 is not zero. Give a column labels != -100"
        )
    if c.speeds is not None and len(c.speeds) != c.dp_size:
        yield f"speeds must be {c.dp_size} finite numbers > 0 (one per rank), not {c.speeds}"


def _foreseen(knob: str, c: Knobs) -> Iterator[str]:
    """Reasons against a knob that looks ahead to steps as long as the heaviest rank's sum, chosen from a window."""
    if c.policy != "window":
        yield f"{knob} needs policy='window': {c.policy!r} sends the oldest. Leave it out"
    others = {
        "a padded cost": c.cost.padded,
        "step_size.mini_batches > 1": c.step_size.mini_batches > 1,
        "sync='micro_batch'": c.sync != "step",
    }
    if any(others.values()):
        yield (
            f"{knob} does not work with {_those(others)}: it foresees steps that are as long as the heaviest rank's "
            "sum. Leave it out; `stream-balancer tune` finds a window"
        )


def auto_window(c: Knobs) -> Iterator[str]:
    """Knobs that the estimate behind ``window="auto"`` does not cover."""
    yield from _foreseen("window='auto'", c)
    if c.step_size.tokens is not None:
        yield (
            "window='auto' does not work with step_size.tokens: it compares windows by batches of one size. Leave "
            "window out, or give step_size.window_tokens; `stream-balancer tune` finds one"
        )


def combinations(c: Knobs) -> Iterator[str]:
    """Knobs together: what could deadlock, or never fire."""
    if least_batch_size(c) < c.dp_size * c.micro_batches.multiple_of:
        yield (
            f"batch_size ({c.batch_size}), or the least of step_size.rollouts {c.step_size.rollouts}, must be >= "
            f"dp_size ({c.dp_size}) x micro_batches.multiple_of ({c.micro_batches.multiple_of}): some micro-batches "
            "would be empty. Raise it, or lower multiple_of"
        )
    if c.window < c.batch_size:
        yield (
            f"window ({c.window}) must be >= batch_size ({c.batch_size}): it would fill before a batch is there. Raise "
            "window, or lower batch_size"
        )
    if _above(c.step_size.tokens, c.step_size.window_tokens):
        yield (
            f"step_size.window_tokens ({c.step_size.window_tokens}) must be >= step_size.tokens "
            f"({c.step_size.tokens}): it would fill before a batch is there. Raise window_tokens, or lower tokens"
        )
    if _above(wanted := c.step_size.window_tokens or c.step_size.tokens, c.limits.tokens):
        yield (
            f"limits.tokens ({c.limits.tokens}) must be >= step_size.window_tokens ({wanted}), or tokens where the "
            "window is in rollouts: so many could never wait. Raise limits.tokens, or lower that"
        )
    if c.window > (room := c.capacity - c.capacity % (c.groups.kept or 1)):
        then = "no batch would ever leave" if c.deadline_s is None else "every batch would wait for deadline_s"
        yield (
            f"window ({c.window}) must be <= {room}, the whole groups that fit into capacity ({c.capacity}): it could "
            f"never fill, and {then}. Raise capacity or lower window"
        )
    if c.min_batch_size < c.dp_size:
        yield (
            f"min_batch_size ({c.min_batch_size}) must be >= dp_size ({c.dp_size}): ranks would run padding only. "
            "Raise it"
        )
    if c.min_batch_size > (most := least_batch_size(c) if c.step_size.tokens is None else c.capacity):
        yield (
            f"min_batch_size ({c.min_batch_size}) must be <= {most}: batch_size or the least of step_size.rollouts, "
            "which a step may have, or under step_size.tokens capacity. A deadline could not be kept. Lower it"
        )
    if c.policy != "window" and not (
        c.window == c.batch_size and c.step_size.window_tokens in (None, c.step_size.tokens)
    ):
        yield (
            f"policy {c.policy!r} sends the oldest, as many as a step has, so window ({c.window}) must equal "
            f"batch_size ({c.batch_size}), and window_tokens ({c.step_size.window_tokens}) step_size.tokens "
            f"({c.step_size.tokens}). Leave window and window_tokens out"
        )
    if c.max_skips is not None and c.max_skips < (least := least_max_skips(c)):
        yield (
            f"max_skips ({c.max_skips}) is too small for this window, capacity and limits.tokens at steps of this "
            "size: every rollout would always be due, or a full buffer could not leave in time. Use max_skips >= "
            f"{least}, or a smaller window or capacity"
        )
    # groups
    if c.batch_size % (c.groups.kept or 1):
        yield (
            f"batch_size ({c.batch_size}) must be a multiple of groups.size ({c.groups.size}) while "
            f"groups.keep={c.groups.keep!r}: whole groups could not make a full batch. Change batch_size, or use "
            "groups.keep='free'"
        )
    if c.groups.keep == "same_rank" and least_batch_size(c) < c.dp_size * (c.groups.size or 1):
        yield (
            f"groups.keep='same_rank' needs a group for every rank: batch_size ({c.batch_size}), or the least of "
            f"step_size.rollouts, holds fewer than {c.dp_size} groups of {c.groups.size}. Raise it"
        )
    if c.groups.keep == "same_rank" and c.equal_rollouts and c.batch_size % (c.dp_size * (c.groups.size or 1)):
        yield (
            f"groups.keep='same_rank' with equal_rollouts=True needs batch_size ({c.batch_size}) / groups.size "
            f"({c.groups.size}) to be a multiple of dp_size ({c.dp_size}). Change batch_size"
        )
    if c.groups.keep == "same_rank" and c.policy == "round_robin":
        yield (
            "groups.keep='same_rank' does not work with policy='round_robin': it gives siblings to the ranks in turn. "
            "Use policy='fifo', or groups.keep='same_batch'"
        )
    # strata, micro-batches and mini-batches: each has something for every rank
    if (of_strata := _rollouts_of_strata(c)) > least_batch_size(c):
        yield (
            f"stratum_shares {c.stratum_shares} do not fit into a step of batch_size ({c.batch_size}) rollouts, or the "
            f"least of step_size.rollouts: each takes at least one rollout, or group, of every step, {of_strata} "
            "together. Leave some out, or raise batch_size"
        )
    if not c.micro_batches.equal_number and c.sync == "micro_batch":
        yield (
            "micro_batches.equal_number=False needs sync='step': ranks that meet at every micro-batch would wait "
            "forever for a rank that has fewer. Leave micro_batches.equal_number out"
        )
    if c.step_size.mini_batches > 1 and c.batch_size < c.step_size.mini_batches * (fewest := _least_of_mini_batch(c)):
        yield (
            f"step_size.mini_batches ({c.step_size.mini_batches}) x {fewest} rollouts, the fewest of which every rank "
            f"gets its part, is more than batch_size ({c.batch_size}): some would be nothing but padding. Lower "
            "mini_batches or raise batch_size"
        )


def varying(c: Knobs) -> Iterator[str]:
    """Knobs with a number of rollouts per step that varies."""
    if c.step_size.tokens is not None:
        yield (
            f"step_size.rollouts {c.step_size.rollouts} and step_size.tokens ({c.step_size.tokens}) exclude one "
            "another: under tokens a step has as many rollouts as its tokens ask for. Leave one out"
        )
    yield from _foreseen(f"step_size.rollouts {c.step_size.rollouts}", c)
    least, most = c.step_size.rollouts or (0, 0)
    if not least <= c.batch_size <= most or least == most:
        yield (
            f"batch_size ({c.batch_size}) is the mean of step_size.rollouts {c.step_size.rollouts}: it must lie in it, "
            "and the range must be one. Widen step_size.rollouts, or leave it out for batch_size rollouts every time"
        )
    if most > c.capacity:
        yield (
            f"step_size.rollouts {c.step_size.rollouts} reaches above capacity ({c.capacity}): so many rollouts could "
            "never wait. Raise capacity, or lower step_size.rollouts"
        )
    multiple = step_multiple(c.dp_size, "equal" if c.equal_rollouts else "free", c.groups.keep, c.groups.size)
    if odd := [one for one in (least, c.batch_size, most) if one % multiple]:
        yield (
            f"step_size.rollouts {c.step_size.rollouts} and batch_size ({c.batch_size}) must be multiples of "
            f"{multiple} with equal_rollouts={c.equal_rollouts}, dp_size {c.dp_size} and groups.size {c.groups.size}: whole groups "
            f"leave, and as many on every rank where counts are equal. Change {' and '.join(map(str, odd))}"
        )


def _above(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one > other


# of whole groups, and at least one of them: as the planner rounds them
def _rollouts_of_strata(c: Knobs) -> int:
    whole, step = c.groups.kept or 1, least_batch_size(c)
    return sum(max(int(share * step) // whole, 1) * whole for share in (c.stratum_shares or {}).values())


# every rank runs so many micro-batches in each, and none may be nothing but padding
def _least_of_mini_batch(c: Knobs) -> int:
    of_a_rank = c.groups.size or 1 if c.groups.keep == "same_rank" else 1
    return c.dp_size * max(c.micro_batches.multiple_of, of_a_rank)
