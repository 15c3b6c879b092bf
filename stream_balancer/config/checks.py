"""Combinations of knobs that are refused, with what, why, and what to do.

A knob that could deadlock, or never fire, is refused here, so that a run fails in its first second and not in its
tenth hour. Each function yields the reasons that hold, of which the first is raised. Values by themselves are checked
by :mod:`~stream_balancer.config.values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stream_balancer.config.figures import least_max_skips
from stream_balancer.config.groups import Groups
from stream_balancer.config.knobs import Knobs
from stream_balancer.cost import CalibratedCost, CostModel
from stream_balancer.errors import ConfigError


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
def _not_powers(sizes: tuple[int, ...]) -> bool:
    return any(size & (size - 1) for size in sizes) or list(sizes) != sorted({1, *sizes})


# types know the knobs as they are read, when none of these is None any more
def given(c: Any) -> Iterator[str]:
    """Knobs before any is derived."""
    if c.groups.min_size is not None and not (c.groups.size or 0) / 2 <= c.groups.min_size < (c.groups.size or 0):
        yield (
            f"groups.min_size ({c.groups.min_size}) must be at least half of groups.size ({c.groups.size}), and below "
            "it: half of a group says how long the others may take. Change it, or leave it out"
        )
    if c.groups.min_size is None and c.groups.patience != Groups.patience:
        yield (
            f"groups.patience ({c.groups.patience}) needs groups.min_size, how many siblings must have come: without "
            "it a group waits for all. Give it, or leave patience out"
        )
    if _not_powers(c.context_parallel.sizes):
        yield (
            "context_parallel.sizes must be powers of two in ascending order, beginning with 1, as in (1, 2, 4, 8), "
            f"not {c.context_parallel.sizes}: a shared rollout goes to an aligned block of ranks, and most of them to "
            "one rank"
        )
    if c.loss_mask_column in ("input_ids", "labels"):
        yield (
            f"loss_mask_column must be the name of a column of masks, not {c.loss_mask_column!r}: tokens and labels "
            "are no mask, -100 is not zero. Give a column labels != -100"
        )


def combinations(c: Knobs) -> Iterator[str]:
    """Knobs together: what could deadlock, or never fire."""
    if c.batch_size < c.dp_size * c.micro_batches.multiple_of:
        yield (
            f"batch_size ({c.batch_size}) must be >= dp_size ({c.dp_size}) x micro_batches.multiple_of "
            f"({c.micro_batches.multiple_of}): some micro-batches would be empty. Raise it, or lower multiple_of"
        )
    if c.window < c.batch_size:
        yield (
            f"window ({c.window}) must be >= batch_size ({c.batch_size}): it would fill before a batch is there. Raise "
            "window, or lower batch_size"
        )
    if c.window > (room := c.capacity - c.capacity % (c.groups.size or 1)):
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
    if c.min_batch_size > c.batch_size:
        yield (
            f"min_batch_size ({c.min_batch_size}) must be <= batch_size ({c.batch_size}): a deadline could not be "
            "kept. Lower it"
        )
    if c.policy != "window" and c.window != c.batch_size:
        yield (
            f"policy {c.policy!r} sends the oldest, as many as a step has, so window ({c.window}) must equal "
            f"batch_size ({c.batch_size}). Leave window out"
        )
    if c.max_skips is not None and c.max_skips < (least := least_max_skips(c)):
        yield (
            f"max_skips ({c.max_skips}) is too small for this window and capacity at steps of this size: every rollout "
            "would always be due, or a full buffer could not leave in time. Use max_skips >= "
            f"{least}, or a smaller window or capacity"
        )
    if c.batch_size % (c.groups.size or 1):
        yield (
            f"batch_size ({c.batch_size}) must be a multiple of groups.size ({c.groups.size}): whole groups could not "
            "make a full batch. Change batch_size"
        )
    if c.micro_batches.counts == "free" and c.sync == "micro_batch":
        yield (
            "micro_batches.counts='free' needs sync='step': ranks that meet at every micro-batch would wait for ever "
            "for one that has fewer. Leave micro_batches.counts out"
        )
    if c.mini_batches > 1 and c.batch_size < c.mini_batches * (fewest := c.dp_size * c.micro_batches.multiple_of):
        yield (
            f"mini_batches ({c.mini_batches}) x {fewest} rollouts, the fewest of which every rank "
            f"gets its part, is more than batch_size ({c.batch_size}): some would be nothing but padding. Lower "
            "mini_batches or raise batch_size"
        )
    if len(c.context_parallel.sizes) > 1 and (others := _not_shared(c)):
        yield f"context_parallel.sizes={c.context_parallel.sizes} does not work with {others}. Leave one of the two out"
    if c.groups.share_prefixes and (others := _not_with_prefixes(c)):
        yield f"groups.share_prefixes does not work with {others}. Leave one of the two out"


def _not_shared(c: Knobs) -> str:
    """Knobs that do not go together with rollouts that ranks share."""
    return _those(
        {
            "counts='equal' (a shared rollout is on several ranks, so they cannot be counted alike)": (
                c.counts == "equal"
            ),
            "a padded cost (what a slice of a padded row costs is not known)": c.cost.padded,
        }
    )


def _not_with_prefixes(c: Knobs) -> str:
    """Knobs that do not go together with prefixes that siblings share."""
    return _those(
        {
            "a padded cost (a shared prefix is not padded)": c.cost.padded,
            "CalibratedCost (it learns from seconds what whole lengths cost)": isinstance(c.cost, CalibratedCost),
            "sync='micro_batch' (it evens out ranks, not micro-batches)": c.sync != "step",
            "counts='equal' (siblings on one rank are worth more than even counts)": c.counts != "free",
        }
    )
