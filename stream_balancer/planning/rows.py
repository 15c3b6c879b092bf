"""Which of the waiting rollouts make rows without waste, for ranks that meet at every micro-batch (FSDP, ZeRO-3).

There the step takes the sum over rows of the costliest micro-batch, so what counts is that the rollouts of one row are
alike: a row is a run of neighbours in the sorted window. Which runs go now is chosen by dynamic programming over the
sorted window: least waste, less a reward for age. Pure and deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .partition import Floats, Ints

    Bools = NDArray[np.bool_]

_AGE_REWARD = 1.0
"""A rollout at the end of its patience is worth this many rollouts of its row's level: dispatched a little early, at
some waste, rather than late as a must. It grows with the fourth power of the wait (1, 2, 3: worse at one of the
ends)."""

_MUST_REWARD = 2.0
"""A rollout that must go pulls its neighbours along rather than going alone."""


def choose_rows(costs: Floats, must: Bools, remaining: Ints, num_rollouts: int, num_ranks: int, num_rows: int) -> Bools:
    """-> [W] mask of `num_rollouts` rollouts that go: all of `must`, in `num_rows` runs of neighbours as far as
    possible.

    Args:
        costs: [W] work of each, oldest first.
        must: [W] goes in any case; at most num_rollouts of them.
        remaining: [W] dispatches that may still pass it over.
        num_rollouts: how many go, < W.
        num_ranks: micro-batches in a row.
        num_rows: micro-batches per rank.

    Complexity: O(W log W + W * num_rows), vectorised over W.
    """
    length = num_rollouts // num_rows
    order = np.argsort(costs, kind="stable")
    sorted_costs = costs[order]
    longest_wait = max(1, int(remaining.max()))
    wait = 1.0 - remaining[order] / longest_wait
    work = np.concatenate(([0.0], np.cumsum(sorted_costs)))
    ends = np.arange(length, costs.size + 1)
    peak = sorted_costs[ends - 1]
    # `length / num_ranks` rollouts share a micro-batch, which evens them out: only an outlier among them wastes time
    waste = np.maximum(num_ranks * peak - (work[ends] - work[ends - length]), 0.0)
    reward = np.concatenate(([0.0], np.cumsum(_AGE_REWARD * wait**4 + _MUST_REWARD * must[order])))
    value = (reward[ends] - reward[ends - length]) * (num_ranks / length) * peak - waste
    go = np.zeros(costs.size, dtype=np.bool_)
    go[order[_best_runs(value, length, costs.size, num_rows)]] = True
    missing = num_rollouts - int(go.sum())
    if missing:
        go[np.flatnonzero(~go)[:missing]] = True
    return _with_must(sorted_costs, order, go, must)


def _best_runs(value: Floats, length: int, size: int, num_rows: int) -> Ints:
    """Sorted places covered by the `num_rows` disjoint runs of greatest total value; value[e] is of the run that ends
    before place `length + e`."""
    best = np.zeros(size + 1)
    taken = []
    for _ in range(num_rows):
        with_run = np.full(size + 1, -np.inf)
        with_run[length:] = best[: size + 1 - length] + value
        after = np.maximum.accumulate(with_run)
        taken.append(with_run == after)  # the best for this prefix ends with a run here
        best = after
    places = []
    end = size
    for ends_here in reversed(taken):
        candidates = np.flatnonzero(ends_here[: end + 1])
        end = int(candidates[-1])
        places.append(np.arange(end - length, end))
        end -= length
    return np.concatenate(places)


def _with_must(sorted_costs: Floats, order: Ints, go: Bools, must: Bools) -> Bools:
    """Whoever must go and was not chosen takes the place of the chosen one nearest to it in cost. O(must * W)."""
    place_of = np.empty(order.size, dtype=np.int64)
    place_of[order] = np.arange(order.size)
    for one in np.flatnonzero(must & ~go).tolist():
        free = np.flatnonzero(go & ~must)
        nearest = free[np.abs(sorted_costs[place_of[free]] - sorted_costs[place_of[one]]).argmin()]
        go[nearest] = False
        go[one] = True
    return go
