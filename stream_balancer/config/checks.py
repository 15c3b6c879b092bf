"""Which knobs, and which combinations of them, are refused.

A knob that could deadlock, or never fire, is refused here with what, why, and what to do, so that a run fails in its
first second and not in its tenth hour. ``KINDS`` has what each knob may be by itself, :func:`combinations` what does
not go together. Nothing is changed and nothing derived: that is ``config``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta

from stream_balancer.config.knobs import Knobs, MicroBatchOrder, OnStale, Policy
from stream_balancer.cost import CalibratedCost, CostModel
from stream_balancer.errors import ConfigError
from stream_balancer.planning.arrays import Counts, Oversize, Sync
from stream_balancer.planning.plan import Groups, step_multiple

__all__ = ["KINDS", "automatic_windows", "check_values", "combinations"]

_COUNT = Annotated[int, Meta(ge=1)]
_COUNT_OR_AUTO = _COUNT | Literal["auto"] | None
_NOT_NEGATIVE = Annotated[int, Meta(ge=0)] | None
_FINITE = sys.float_info.max
_WORK = Annotated[float, Meta(ge=0, le=_FINITE)]
_SECONDS = Annotated[float, Meta(gt=0, le=_FINITE)] | None
_SHARES = dict[str, Annotated[float, Meta(gt=0, le=1)]]

KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("dp_size", "micro_batch_multiple", "mini_batches", "cp_min_tokens"), (_COUNT, "an int >= 1")),
    **dict.fromkeys(("batch_size", "batch_tokens", "window_tokens", "group_size"), (_COUNT | None, "an int >= 1")),
    **dict.fromkeys(
        ("capacity", "capacity_tokens", "capacity_bytes", "min_batch_size"), (_COUNT | None, "an int >= 1")
    ),
    "max_tokens_per_micro_batch": (_COUNT | None, "an int >= 1"),
    **dict.fromkeys(("window", "max_skips"), (_COUNT_OR_AUTO, 'an int >= 1 or "auto"')),
    **dict.fromkeys(("max_staleness", "remember_ids"), (_NOT_NEGATIVE, "an int >= 0")),
    **{
        name: (kind, "one of " + ", ".join(map(repr, get_args(kind))))
        for name, kind in {
            "counts": Counts,
            "micro_batch_counts": Counts,
            "sync": Sync,
            "oversize": Oversize,
            "micro_batch_order": MicroBatchOrder,
            "groups": Groups,
            "on_stale": OnStale,
            "policy": Policy,
        }.items()
    },
    "batch_size_range": (tuple[_COUNT, _COUNT] | None, "two ints >= 1, the least and the most rollouts"),
    "deadline_s": (_SECONDS, "a finite number of seconds > 0, or None to wait for the window"),
    "micro_batch_overhead_cost": (
        _WORK | None,
        "a finite number >= 0 in the cost model's unit, or None for what is learned",
    ),
    "cp_sizes": (
        tuple[_COUNT, ...],
        "powers of two in ascending order, beginning with 1, (1, 2, 4, 8) for example: a shared rollout goes to an "
        "aligned block of ranks, and most of them to one rank",
    ),
    "cp_overhead": (
        _WORK,
        "a finite number >= 0, the part of the work that each doubling of ranks adds, 0.15 for example",
    ),
    "share_prefixes": (bool, "True or False"),
    "stratum_shares": (
        _SHARES | None,
        "a dict from the name of a stratum to a share above 0, at most 1 all together",
    ),
}
"""Values that a knob may have, as msgspec judges them, and in words. Other knobs are judged by :func:`_odd_values`."""


def check_values(c: Knobs, given: Mapping[str, Any]) -> None:
    """Knobs by themselves, before any is derived; ``given``: those that the user set. Raises ConfigError."""
    for name, (kind, _) in KINDS.items():
        try:
            msgspec.convert(getattr(c, name), kind)
        except msgspec.ValidationError:
            raise ConfigError(_wrong(c, name)) from None
    for problem in _odd_values(c, given):
        raise ConfigError(problem)


def _wrong(c: Knobs, name: str) -> str:
    return f"{name} must be {KINDS[name][1]}, not {getattr(c, name)!r}"


def _odd_values(c: Knobs, given: Mapping[str, Any]) -> Iterator[str]:
    """Faults of knobs of no simple kind, and with how a step's size is given."""
    if "batch_size" not in given and c.batch_tokens is None:
        yield "give batch_size (rollouts per step) or batch_tokens (tokens per step)"
    if "batch_size" in given and c.batch_tokens is not None:
        yield (
            f"batch_size ({c.batch_size}) and batch_tokens ({c.batch_tokens}) exclude one another: a step has a fixed "
            "number of rollouts, or about a fixed number of tokens. Leave one out"
        )
    if c.window_tokens is not None and c.batch_tokens is None:
        yield (
            f"window_tokens ({c.window_tokens}) needs batch_tokens: a batch of batch_size rollouts might not be among "
            "so many tokens. Give window, in rollouts, or batch_tokens instead of batch_size"
        )
    if c.window_tokens is not None and "window" in given:
        yield (
            f"window ({c.window}) and window_tokens ({c.window_tokens}) exclude one another: a dispatch waits for "
            "rollouts or for tokens. Leave one out"
        )
    if c.group_size is None and c.groups != "same_batch":
        yield f"groups={c.groups!r} needs group_size, the siblings of a group: without it groups play no part. Give it"
    if any(size & (size - 1) for size in c.cp_sizes) or list(c.cp_sizes) != sorted({1, *c.cp_sizes}):
        yield _wrong(c, "cp_sizes")
    if c.stratum_shares is not None and sum(c.stratum_shares.values()) > 1 + 1e-9:
        yield _wrong(c, "stratum_shares")
    column: object = c.loss_mask_column
    if column is not None and (not isinstance(column, str) or column in ("", "input_ids", "labels")):
        also = ". Labels are no mask, -100 is not zero: give a column labels != -100" if column == "labels" else ""
        yield f"loss_mask_column must be the name of a column of masks, or None, not {column!r}{also}"
    cost: object = c.cost
    if not isinstance(cost, CostModel):
        yield (
            "cost must be a cost model (TokenCost(), QuadraticCost(), ... or a callable with a 'padded' "
            f"attribute), not {cost!r}"
        )
    # Two lengths show a model that returns one number for all, NaN, or a negative one; before the first put does.
    probe = np.asarray(c.cost(np.array([1, 1000], dtype=np.int64)), dtype=np.float64)
    if probe.shape != (2,) or not np.all(np.isfinite(probe)) or np.any(probe < 0):
        yield f"cost({[1, 1000]}) must give two finite numbers >= 0, not {probe.tolist()!r}"
    if c.speeds is not None and (len(c.speeds) != c.dp_size or not all(math.isfinite(s) and s > 0 for s in c.speeds)):
        yield f"speeds must be {c.dp_size} finite numbers > 0 (one per rank), not {c.speeds!r}"


def automatic_windows(c: Knobs) -> Iterator[str]:
    """Knobs that the estimate behind ``window="auto"`` does not cover."""
    if c.policy != "window":
        yield f"window='auto' needs policy='window': {c.policy!r} sends the oldest. Leave window out"
    if c.batch_tokens is not None:
        yield (
            "window='auto' does not work with batch_tokens: it compares windows by batches of one size. Leave window "
            "out, or give window_tokens; `stream-balancer tune` finds one"
        )
    number = "Give a number; `stream-balancer tune` finds one"
    if len(c.cp_sizes) > 1:
        yield (
            f"window='auto' does not work with cp_sizes={c.cp_sizes}: it foresees steps in which no rollout is shared. "
            + number
        )
    if (what := _no_sums(c)) is not None:
        yield (
            f"window='auto' does not work with {what}: it foresees steps that are as long as the heaviest rank's sum. "
            + number
        )


def _no_sums(c: Knobs) -> str | None:
    """The knob for which a step is not as long as the heaviest rank's sum; None where it is."""
    knobs = {
        "a padded cost": c.cost.padded,
        f"mini_batches={c.mini_batches}": c.mini_batches > 1,
        "share_prefixes": c.share_prefixes,
        f"sync={c.sync!r}": c.sync != "step",
    }
    return next((name for name, given in knobs.items() if given), None)


_ASCENDING = (
    ("dp_size", "batch_size", "some ranks would get nothing in every step. Raise batch_size"),
    ("batch_size", "window", "it would fill before a batch is there. Raise window, or lower batch_size"),
    (
        "batch_tokens",
        "window_tokens",
        "it would fill before a batch is there. Raise window_tokens, or lower batch_tokens",
    ),
    ("window_tokens", "capacity_tokens", "so many could never wait. Raise capacity_tokens or lower window_tokens"),
    ("batch_tokens", "capacity_tokens", "so many could never wait. Raise capacity_tokens or lower batch_tokens"),
)
"""Knobs of which the second must be at least the first, and what happens else."""


def combinations(c: Knobs) -> Iterator[str]:
    """Knobs together: what could deadlock, or never fire, the first of them first."""
    for name, larger, why in _ASCENDING:
        least, value = getattr(c, name), getattr(c, larger)
        if least is not None and value is not None and value < least:
            yield f"{larger} ({value}) must be >= {name} ({least}): {why}"
    if c.window > c.capacity:
        then = "every batch would wait for deadline_s" if c.deadline_s is not None else "no batch would ever leave"
        yield (
            f"window ({c.window}) must be <= capacity ({c.capacity}): it could never fill, and {then}. "
            "Raise capacity or lower window"
        )
    if not c.dp_size <= c.min_batch_size <= (c.batch_size if c.batch_tokens is None else c.capacity):
        yield (
            f"min_batch_size ({c.min_batch_size}) must be between dp_size ({c.dp_size}) and "
            + (f"batch_size ({c.batch_size})" if c.batch_tokens is None else f"capacity ({c.capacity})")
            + ": below, ranks would run padding only; above, a deadline could not be kept"
        )
    for unit in ("_tokens", ""):
        window, batch = "window" + unit, "batch" + (unit or "_size")
        in_force, one = getattr(c, window), getattr(c, batch)
        if c.policy != "window" and in_force is not None and in_force != one:
            oldest = batch if unit else "batch_size rollouts"
            yield (
                f"policy {c.policy!r} sends the oldest {oldest}, so {window} ({in_force}) must equal {batch} "
                f"({one}). Leave {window} out"
            )
    if c.max_skips is not None and c.max_skips < c.least_max_skips:
        names = ("batch_size", "window", "capacity")
        if c.window_tokens is not None:
            names = ("batch_tokens", "window_tokens", "capacity_tokens")
        batch, window, capacity = (f"{name} ({getattr(c, name)})" for name in names)
        yield (
            f"max_skips ({c.max_skips}) is too small for {window} and {capacity} at {batch}: every rollout would "
            f"always be due, or a full buffer could not leave in time. Use max_skips >= {c.least_max_skips}, or a "
            "smaller window or capacity"
        )
    if c.group_size is not None:
        yield from _groups(c, c.group_size)
    if c.batch_size_range is not None:
        yield from _range(c, *c.batch_size_range)
    yield from _parts_of_a_step(c)
    yield from _shared(c)


def _groups(c: Knobs, size: int) -> Iterator[str]:
    held = c.batch_size // size
    if size > c.batch_size:
        yield (
            f"group_size ({size}) must be <= batch_size ({c.batch_size}): a group could not leave in one "
            "batch. Raise batch_size, or leave group_size out"
        )
    if c.groups != "free" and c.batch_size % size:
        yield (
            f"batch_size ({c.batch_size}) must be a multiple of group_size ({size}) while groups={c.groups!r}: "
            "whole groups could not make a full batch. Change batch_size, or use groups='free'"
        )
    if c.groups != "free" and c.window > c.capacity // size * size:
        yield (
            f"window ({c.window}) is more than the {c.capacity // size} whole groups of {size} that "
            f"fit into capacity ({c.capacity}): it could never fill. Raise capacity or lower window"
        )
    if c.groups != "same_rank":
        return
    if held < c.dp_size:
        yield (
            f"groups='same_rank' needs a group for every rank: batch_size ({c.batch_size}) holds {held} groups of "
            f"{size}, and dp_size is {c.dp_size}. Raise batch_size"
        )
    if c.counts == "equal" and held % c.dp_size:
        yield (
            f"groups='same_rank' with counts='equal' needs batch_size / group_size ({held}) to be a multiple of "
            f"dp_size ({c.dp_size}). Change batch_size"
        )
    if c.policy == "round_robin":
        yield (
            "groups='same_rank' does not work with policy='round_robin': it gives siblings to the ranks in turn. Use "
            "policy='fifo', or groups='same_batch'"
        )


def _range(c: Knobs, least: int, most: int) -> Iterator[str]:
    """A number of rollouts per step that varies."""
    given = f"batch_size_range ({least}, {most})"
    if c.batch_tokens is not None:
        yield (
            f"{given} and batch_tokens ({c.batch_tokens}) exclude one another: under batch_tokens a step has as many "
            "rollouts as its tokens ask for. Leave one out"
        )
    if c.policy != "window":
        yield f"{given} needs policy='window': {c.policy!r} sends the oldest batch_size. Leave it out"
    if (what := _no_sums(c)) is not None:
        yield (
            f"{given} does not work with {what}: it looks for steps that are as long as the heaviest rank's sum. Leave "
            "batch_size_range out"
        )
    if not least <= c.batch_size <= most or least == most:
        yield (
            f"batch_size ({c.batch_size}) is the mean of {given}: it must lie in it, and the range must be one. Widen "
            "batch_size_range, or leave it out for batch_size rollouts every time"
        )
    if most > c.capacity:
        yield (
            f"{given} reaches above capacity ({c.capacity}): so many rollouts could never wait. Raise capacity, or "
            "lower batch_size_range"
        )
    if least < c.dp_size * c.micro_batch_multiple:
        yield (
            f"{given} begins below dp_size ({c.dp_size}) x micro_batch_multiple ({c.micro_batch_multiple}): some "
            "micro-batches would be empty. Raise its least"
        )
    if c.min_batch_size > least:
        yield (
            f"min_batch_size ({c.min_batch_size}) must be <= the least of {given}: a step that gives back what others "
            "took beyond batch_size has so few. Lower min_batch_size, or raise the least"
        )
    multiple = step_multiple(c.dp_size, c.counts, c.groups, c.group_size)
    if odd := [number for number in (least, c.batch_size, most) if number % multiple]:
        yield (
            f"{given} and batch_size ({c.batch_size}) must be multiples of {multiple} with counts={c.counts!r}, "
            f"dp_size {c.dp_size} and group_size {c.group_size}: whole groups leave, and as many on every rank where "
            f"counts are equal. Change {' and '.join(map(str, odd))}"
        )
    if c.groups == "same_rank" and c.group_size is not None and least // c.group_size < c.dp_size:
        yield (
            f"groups='same_rank' needs a group for every rank: {given} begins with {least // c.group_size} groups of "
            f"{c.group_size}, and dp_size is {c.dp_size}. Raise its least"
        )


def _parts_of_a_step(c: Knobs) -> Iterator[str]:
    """Strata, micro-batches and mini-batches: each has something for every rank."""
    shares, whole = dict(c.stratum_shares or {}), c.tracked_group_size or 1
    least = sum(max(int(share * c.least_batch_size) // whole, 1) * whole for share in shares.values())
    if least > c.least_batch_size:
        yield (
            f"stratum_shares {shares} do not fit into a step of {c.least_batch_size} rollouts: each takes at least one "
            f"rollout, or group, of every step, {least} together. Leave some out, or raise batch_size"
        )
    if c.micro_batch_counts == "free" and c.sync == "micro_batch":
        yield (
            "micro_batch_counts='free' needs sync='step': ranks that meet at every micro-batch would wait for ever for "
            "one that has fewer. Leave micro_batch_counts out"
        )
    if c.micro_batch_multiple > 1 and c.batch_size < c.dp_size * c.micro_batch_multiple:
        yield (
            f"micro_batch_multiple ({c.micro_batch_multiple}) x dp_size ({c.dp_size}) is more than batch_size "
            f"({c.batch_size}): some micro-batches would be empty. Lower micro_batch_multiple or raise batch_size"
        )
    least = c.dp_size * max(c.micro_batch_multiple, c.group_size or 1 if c.groups == "same_rank" else 1)
    if c.mini_batches > 1 and c.batch_size < c.mini_batches * least:
        yield (
            f"mini_batches ({c.mini_batches}) x {least} rollouts, the fewest of which every rank gets its part, is "
            f"more than batch_size ({c.batch_size}): some would be nothing but padding. Lower mini_batches or raise "
            "batch_size"
        )


def _shared(c: Knobs) -> Iterator[str]:
    """Knobs that do not go together with rollouts that ranks share, and with prefixes that siblings share."""
    if len(c.cp_sizes) > 1:
        yield from _apart(
            f"cp_sizes={c.cp_sizes}",
            {
                "counts='equal' (a shared rollout is on several ranks, so they cannot be counted alike)": (
                    c.counts == "equal"
                ),
                "groups='same_rank' (a shared rollout is not on one rank)": c.groups == "same_rank",
                "a padded cost (what a slice of a padded row costs is not known)": c.cost.padded,
                "speeds (ranks of unlike speed would wait for each other within a shared rollout)": bool(c.speeds),
                f"mini_batches={c.mini_batches} (they are made of whole rollouts)": c.mini_batches > 1,
                "share_prefixes (a shared prefix lies on one rank)": c.share_prefixes,
            },
        )
    if c.share_prefixes:
        torn = "siblings would be torn apart"
        yield from _apart(
            "share_prefixes",
            {
                "a padded cost (a shared prefix is not padded)": c.cost.padded,
                "CalibratedCost (it learns from seconds what whole lengths cost)": isinstance(c.cost, CalibratedCost),
                f"sync={c.sync!r} (it evens out ranks, not micro-batches)": c.sync != "step",
                f"counts={c.counts!r} (siblings on one rank are worth more than even counts)": c.counts != "free",
                "speeds (all ranks count as alike)": bool(c.speeds),
                f"mini_batches={c.mini_batches} ({torn})": c.mini_batches > 1,
                f"micro_batch_multiple={c.micro_batch_multiple} ({torn})": c.micro_batch_multiple > 1,
            },
        )


def _apart(knob: str, others: Mapping[str, bool]) -> Iterator[str]:
    if what := [other for other, given in others.items() if given]:
        yield f"{knob} does not work with {' and '.join(what)}. Leave one of the two out"
