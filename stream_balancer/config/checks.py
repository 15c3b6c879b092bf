"""Which knobs, and which combinations of them, are refused.

A knob that could deadlock, or never fire, is refused here with what, why, and what to do, so that a run fails in its
first second and not in its tenth hour. Nothing is changed and nothing derived: that is ``config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from stream_balancer.config.check_cp import check_cp, check_cp_combinations
from stream_balancer.config.check_prefixes import check_sharing, check_sharing_combinations
from stream_balancer.config.knobs import Knobs, MicroBatchOrder, OnStale, Policy
from stream_balancer.cost import CostModel
from stream_balancer.errors import ConfigError
from stream_balancer.planning.arrays import Counts, Oversize, Sync
from stream_balancer.planning.plan import Groups, step_multiple

__all__ = ["check_auto", "check_combinations", "check_values"]

_POSITIVE_INTS = ("dp_size", "micro_batch_multiple", "mini_batches", "cp_min_tokens")
_OPTIONAL_INTS = (
    "batch_size",
    "batch_tokens",
    "window",
    "window_tokens",
    "max_skips",
    "capacity",
    "capacity_tokens",
    "capacity_bytes",
    "min_batch_size",
    "max_tokens_per_micro_batch",
    "group_size",
)
_MAY_BE_AUTO = ("window", "max_skips")
_CHOICES = {
    "counts": get_args(Counts),
    "micro_batch_counts": get_args(Counts),
    "sync": get_args(Sync),
    "oversize": get_args(Oversize),
    "micro_batch_order": get_args(MicroBatchOrder),
    "groups": get_args(Groups),
    "on_stale": get_args(OnStale),
    "policy": get_args(Policy),
}


def _check_int(name: str, value: object, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        also = ' or "auto"' if name in _MAY_BE_AUTO else ""
        raise ConfigError(f"{name} must be an int >= {least}{also}, not {value!r}")


def _check_pair(value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"batch_size_range must be two ints, the least and the most rollouts, not {value!r}")
    for number in value:
        _check_int("batch_size_range", number)


def check_values(c: Knobs, given: Mapping[str, Any]) -> None:
    """Each knob by itself, before any is derived; ``given``: those that the user set."""
    for name in _POSITIVE_INTS:
        _check_int(name, getattr(c, name))
    for name in _OPTIONAL_INTS:
        auto = name in _MAY_BE_AUTO and getattr(c, name) == "auto"
        if getattr(c, name) is not None and not auto:
            _check_int(name, getattr(c, name))
    if c.batch_size_range is not None:
        _check_pair(c.batch_size_range)
    for name in ("max_staleness", "remember_ids"):
        if getattr(c, name) is not None:
            _check_int(name, getattr(c, name), least=0)
    for name, choices in _CHOICES.items():
        if getattr(c, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, not {getattr(c, name)!r}")
    deadline = c.deadline_s
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < math.inf
    ):
        raise ConfigError(
            f"deadline_s must be a finite number of seconds > 0, or None to wait for the window, not {deadline!r}"
        )
    overhead = c.micro_batch_overhead_cost
    if overhead is not None and (
        isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 <= overhead < math.inf
    ):
        raise ConfigError(
            "micro_batch_overhead_cost must be a finite number >= 0 in the cost model's unit, or None for what is "
            f"learned, not {overhead!r}"
        )
    check_cp(c)
    check_sharing(c)
    _check_batch(c, given)
    _check_shares(c.stratum_shares)
    _check_loss_mask(c.loss_mask_column)
    _check_cost(c.cost)
    _check_speeds(c)


def _check_shares(shares: object) -> None:
    if shares is None:
        return
    good = isinstance(shares, Mapping) and all(
        isinstance(name, str) and not isinstance(share, bool) and isinstance(share, (int, float)) and 0 < share <= 1
        for name, share in shares.items()
    )
    if not isinstance(shares, Mapping) or not good or sum(shares.values()) > 1 + 1e-9:
        raise ConfigError(
            "stratum_shares must be a dict from the name of a stratum to a share above 0, at most 1 all together, not "
            f"{shares!r}"
        )


def _check_batch(c: Knobs, given: Mapping[str, Any]) -> None:
    """How much a step takes, and what it waits for, is given in rollouts or in tokens."""
    if "batch_size" not in given and c.batch_tokens is None:
        raise ConfigError("give batch_size (rollouts per step) or batch_tokens (tokens per step)")
    if "batch_size" in given and c.batch_tokens is not None:
        raise ConfigError(
            f"batch_size ({c.batch_size}) and batch_tokens ({c.batch_tokens}) exclude one another: a step has a fixed "
            "number of rollouts, or about a fixed number of tokens. Leave one out"
        )
    if c.window_tokens is not None and c.batch_tokens is None:
        raise ConfigError(
            f"window_tokens ({c.window_tokens}) needs batch_tokens: a batch of batch_size rollouts might not be among "
            "so many tokens. Give window, in rollouts, or batch_tokens instead of batch_size"
        )
    if c.window_tokens is not None and "window" in given:
        raise ConfigError(
            f"window ({c.window}) and window_tokens ({c.window_tokens}) exclude one another: a dispatch waits for "
            "rollouts or for tokens. Leave one out"
        )


def _check_loss_mask(column: object) -> None:
    if column is not None and (not isinstance(column, str) or column in ("", "input_ids", "labels")):
        also = ". Labels are no mask, -100 is not zero: give a column labels != -100" if column == "labels" else ""
        raise ConfigError(f"loss_mask_column must be the name of a column of masks, or None, not {column!r}{also}")


def _check_cost(cost: object) -> None:
    if not isinstance(cost, CostModel):
        raise ConfigError(
            "cost must be a cost model (TokenCost(), QuadraticCost(), ... or a callable with a 'padded' "
            f"attribute), not {cost!r}"
        )
    # Two lengths show a model that returns one number for all, NaN, or a negative one; before the first put does.
    probe = np.asarray(cost(np.array([1, 1000], dtype=np.int64)), dtype=np.float64)
    if probe.shape != (2,) or not np.all(np.isfinite(probe)) or np.any(probe < 0):
        raise ConfigError(f"cost({[1, 1000]}) must give two finite numbers >= 0, not {probe.tolist()!r}")


def _check_speeds(c: Knobs) -> None:
    speeds = c.speeds
    if speeds is None:
        return
    if len(speeds) != c.dp_size or not all(math.isfinite(s) and s > 0 for s in speeds):
        raise ConfigError(f"speeds must be {c.dp_size} finite numbers > 0 (one per rank), not {speeds!r}")


def check_auto(c: Knobs) -> None:
    """Knobs that the estimate behind ``window="auto"`` does not cover."""
    if c.policy != "window":
        raise ConfigError(f"window='auto' needs policy='window': {c.policy!r} sends the oldest. Leave window out")
    if c.batch_tokens is not None:
        raise ConfigError(
            "window='auto' does not work with batch_tokens: it compares windows by batches of one size. Leave window "
            "out, or give window_tokens; `stream-balancer tune` finds one"
        )
    if len(c.cp_sizes) > 1:
        raise ConfigError(
            f"window='auto' does not work with cp_sizes={c.cp_sizes}: it foresees steps in which no rollout is shared. "
            "Give a number; `stream-balancer tune` finds one"
        )
    if (what := _no_sums(c)) is not None:
        raise ConfigError(
            f"window='auto' does not work with {what}: it foresees steps that are as long as the heaviest rank's sum. "
            "Give a number; `stream-balancer tune` finds one"
        )


def _no_sums(c: Knobs) -> str | None:
    """The knob for which a step is not as long as the heaviest rank's sum; None where it is."""
    if c.cost.padded:
        return "a padded cost"
    if c.mini_batches > 1:
        return f"mini_batches={c.mini_batches}"
    if c.share_prefixes:
        return "share_prefixes"
    return f"sync={c.sync!r}" if c.sync != "step" else None


def check_combinations(c: Knobs) -> None:
    """Knobs together: what could deadlock, or never fire."""
    if c.batch_size < c.dp_size:
        raise ConfigError(
            f"batch_size ({c.batch_size}) must be >= dp_size ({c.dp_size}): some ranks would get nothing in every "
            "step. Raise batch_size"
        )
    if c.window < c.batch_size:
        raise ConfigError(
            f"window ({c.window}) must be >= batch_size ({c.batch_size}): it would fill before a batch is there. "
            "Raise window, or lower batch_size"
        )
    if c.window > c.capacity:
        then = "every batch would wait for deadline_s" if c.deadline_s is not None else "no batch would ever leave"
        raise ConfigError(
            f"window ({c.window}) must be <= capacity ({c.capacity}): it could never fill, and {then}. "
            "Raise capacity or lower window"
        )
    _check_tokens(c)
    if not c.dp_size <= c.min_batch_size <= (c.batch_size if c.batch_tokens is None else c.capacity):
        raise ConfigError(
            f"min_batch_size ({c.min_batch_size}) must be between dp_size ({c.dp_size}) and "
            + (f"batch_size ({c.batch_size})" if c.batch_tokens is None else f"capacity ({c.capacity})")
            + ": below, ranks would run padding only; above, a deadline could not be kept"
        )
    if c.policy != "window" and c.window_tokens is not None and c.window_tokens != c.batch_tokens:
        raise ConfigError(
            f"policy {c.policy!r} sends the oldest batch_tokens, so window_tokens ({c.window_tokens}) must equal "
            f"batch_tokens ({c.batch_tokens}). Leave window_tokens out"
        )
    if c.policy != "window" and c.window != c.batch_size:
        raise ConfigError(
            f"policy {c.policy!r} sends the oldest batch_size rollouts, so window ({c.window}) must equal batch_size "
            f"({c.batch_size}). Leave window out"
        )
    if c.max_skips is not None and c.max_skips < c.least_max_skips:
        tokens = "" if c.window_tokens is None else "_tokens"
        batch, window, capacity = (
            f"{name} ({getattr(c, name)})"
            for name in ("batch" + (tokens or "_size"), "window" + tokens, "capacity" + tokens)
        )
        raise ConfigError(
            f"max_skips ({c.max_skips}) is too small for {window} and {capacity} at {batch}: every rollout would "
            f"always be due, or a full buffer could not leave in time. Use max_skips >= {c.least_max_skips}, or a "
            "smaller window or capacity"
        )
    _check_groups(c)
    if c.batch_size_range is not None:
        _check_range(c, *c.batch_size_range)
    _check_shares_fit(c)
    if c.micro_batch_counts == "free" and c.sync == "micro_batch":
        raise ConfigError(
            "micro_batch_counts='free' needs sync='step': ranks that meet at every micro-batch would wait for ever for "
            "one that has fewer. Leave micro_batch_counts out"
        )
    if c.micro_batch_multiple > 1 and c.batch_size < c.dp_size * c.micro_batch_multiple:
        raise ConfigError(
            f"micro_batch_multiple ({c.micro_batch_multiple}) x dp_size ({c.dp_size}) is more than batch_size "
            f"({c.batch_size}): some micro-batches would be empty. Lower micro_batch_multiple or raise batch_size"
        )
    _check_mini_batches(c)
    check_cp_combinations(c)
    check_sharing_combinations(c)


def _check_mini_batches(c: Knobs) -> None:
    """Every one has something for every rank."""
    whole = c.group_size if c.group_size is not None and c.groups == "same_rank" else 1
    least = c.dp_size * max(c.micro_batch_multiple, whole)
    if c.mini_batches > 1 and c.batch_size < c.mini_batches * least:
        raise ConfigError(
            f"mini_batches ({c.mini_batches}) x {least} rollouts, the fewest of which every rank gets its part, is "
            f"more than batch_size ({c.batch_size}): some would be nothing but padding. Lower mini_batches or raise "
            "batch_size"
        )


def _check_shares_fit(c: Knobs) -> None:
    smallest = c.batch_size if c.batch_size_range is None else c.batch_size_range[0]
    shares, whole = dict(c.stratum_shares or {}), c.tracked_group_size or 1
    least = sum(max(int(share * smallest) // whole, 1) * whole for share in shares.values())
    if least > smallest:
        raise ConfigError(
            f"stratum_shares {shares} do not fit into a step of {smallest} rollouts: each takes at least one rollout, "
            f"or group, of every step, {least} together. Leave some out, or raise batch_size"
        )


def _check_tokens(c: Knobs) -> None:
    """Limits in tokens: each at least what must fit into it."""
    if c.window_tokens is not None and c.batch_tokens is not None and c.window_tokens < c.batch_tokens:
        raise ConfigError(
            f"window_tokens ({c.window_tokens}) must be >= batch_tokens ({c.batch_tokens}): it would fill before a "
            "batch is there. Raise window_tokens, or lower batch_tokens"
        )
    least = c.batch_tokens if c.window_tokens is None else c.window_tokens
    if least is not None and c.capacity_tokens is not None and c.capacity_tokens < least:
        name = "batch_tokens" if c.window_tokens is None else "window_tokens"
        raise ConfigError(
            f"capacity_tokens ({c.capacity_tokens}) must be >= {name} ({least}): so many could never wait. Raise "
            f"capacity_tokens or lower {name}"
        )


def _check_range(c: Knobs, least: int, most: int) -> None:
    """A number of rollouts per step that varies."""
    given = f"batch_size_range ({least}, {most})"
    if c.batch_tokens is not None:
        raise ConfigError(
            f"{given} and batch_tokens ({c.batch_tokens}) exclude one another: under batch_tokens a step has as many "
            "rollouts as its tokens ask for. Leave one out"
        )
    if c.policy != "window":
        raise ConfigError(f"{given} needs policy='window': {c.policy!r} sends the oldest batch_size. Leave it out")
    if (what := _no_sums(c)) is not None:
        raise ConfigError(
            f"{given} does not work with {what}: it looks for steps that are as long as the heaviest rank's sum. Leave "
            "batch_size_range out"
        )
    if not least <= c.batch_size <= most or least == most:
        raise ConfigError(
            f"batch_size ({c.batch_size}) is the mean of {given}: it must lie in it, and the range must be one. Widen "
            "batch_size_range, or leave it out for batch_size rollouts every time"
        )
    if most > c.capacity:
        raise ConfigError(
            f"{given} reaches above capacity ({c.capacity}): so many rollouts could never wait. Raise capacity, or "
            "lower batch_size_range"
        )
    if least < c.dp_size * c.micro_batch_multiple:
        raise ConfigError(
            f"{given} begins below dp_size ({c.dp_size}) x micro_batch_multiple ({c.micro_batch_multiple}): some "
            "micro-batches would be empty. Raise its least"
        )
    if c.min_batch_size > least:
        raise ConfigError(
            f"min_batch_size ({c.min_batch_size}) must be <= the least of {given}: a step that gives back what others "
            "took beyond batch_size has so few. Lower min_batch_size, or raise the least"
        )
    multiple = step_multiple(c.dp_size, c.counts, c.groups, c.group_size)
    if odd := [number for number in (least, c.batch_size, most) if number % multiple]:
        raise ConfigError(
            f"{given} and batch_size ({c.batch_size}) must be multiples of {multiple} with counts={c.counts!r}, "
            f"dp_size {c.dp_size} and group_size {c.group_size}: whole groups leave, and as many on every rank where "
            f"counts are equal. Change {' and '.join(map(str, odd))}"
        )
    if c.groups == "same_rank" and c.group_size is not None and least // c.group_size < c.dp_size:
        raise ConfigError(
            f"groups='same_rank' needs a group for every rank: {given} begins with {least // c.group_size} groups of "
            f"{c.group_size}, and dp_size is {c.dp_size}. Raise its least"
        )


def _check_groups(c: Knobs) -> None:
    if c.group_size is None:
        return
    if c.group_size > c.batch_size:
        raise ConfigError(
            f"group_size ({c.group_size}) must be <= batch_size ({c.batch_size}): a group could not leave in one "
            "batch. Raise batch_size, or leave group_size out"
        )
    if c.groups != "free" and c.batch_size % c.group_size:
        raise ConfigError(
            f"batch_size ({c.batch_size}) must be a multiple of group_size ({c.group_size}) while groups={c.groups!r}: "
            "whole groups could not make a full batch. Change batch_size, or use groups='free'"
        )
    if c.groups != "free" and c.window > c.capacity // c.group_size * c.group_size:
        raise ConfigError(
            f"window ({c.window}) is more than the {c.capacity // c.group_size} whole groups of {c.group_size} that "
            f"fit into capacity ({c.capacity}): it could never fill. Raise capacity or lower window"
        )
    if c.groups == "same_rank" and c.batch_size // c.group_size < c.dp_size:
        raise ConfigError(
            f"groups='same_rank' needs a group for every rank: batch_size ({c.batch_size}) holds "
            f"{c.batch_size // c.group_size} groups of {c.group_size}, and dp_size is {c.dp_size}. Raise batch_size"
        )
    if c.groups == "same_rank" and c.counts == "equal" and (c.batch_size // c.group_size) % c.dp_size:
        raise ConfigError(
            f"groups='same_rank' with counts='equal' needs batch_size / group_size ({c.batch_size // c.group_size}) to "
            f"be a multiple of dp_size ({c.dp_size})"
        )
