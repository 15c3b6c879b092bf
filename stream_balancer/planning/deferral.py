"""Which of the waiting units make a step without waste: defer the outliers, keep them company, then gather.

In the long run everything is dispatched, so the work is fixed and the trainer's time is the sum over steps of the
slowest rank. A step wastes time only if one rollout is heavier than a rank's fair share of the step, that is if
`ranks * heaviest > work`. The window is there to prevent that, in three ways, tried in this order:

    fifo      the oldest balance, and no outlier waits behind them: nothing to do
    light     outliers stay behind, and with them as many of the heaviest others as the outliers will need for company
              on the day they go (a forecast tells); the oldest of the rest go
    gather    an outlier must go: its step is long in any case, so it is filled up with the heaviest that wait

Plain arrays in age order, nothing of rollouts or groups here. Pure and deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .partition import Floats, Ints

    Bools = NDArray[np.bool_]

_BALANCED = 1.02
"""A step whose heaviest rollout is within 2 % of the fair share counts as balanced: chasing less costs more delay than
it saves idle time (measured: 1.05 costs 0.2-1 points of idle time and saves no delay)."""

_SUPPLY = 0.7
"""How much of the arrivals still to come is trusted to keep an outlier company. 0.25-1 all work; less means more is
held back, hence more delay for heavy rollouts and 1-3 points less idle time on the heaviest tails."""

_GATHER_SLACK = 0.2
"""Gather at the highest level that wastes at most this share more than the best one: a level left unused now returns
later."""

_RESERVE_STEPS = 6
"""Sizes of the reserve that are tried, from none to the whole window."""

_FIXPOINT_ROUNDS = 24


def choose(
    costs: Floats, parts: Floats, must: Bools, remaining: Ints, num_more: int, ranks: float, company: float = 0.0
) -> Bools:
    """-> [U] mask of the units that go: all of `must` and `num_more` others.

    Args:
        costs: [U] work of each unit, oldest first.
        parts: [U] the heaviest indivisible part of each; equals costs where a unit is one rollout.
        must: [U] goes in any case.
        remaining: [U] dispatches that may still pass it over; the units with the most are the new ones.
        num_more: how many others go; at most the number of others.
        ranks: number of ranks (with speeds: their sum over the fastest).
        company: the least work that must lie beside a part on its rank (equal counts).

    Complexity: O(U log U), with a fixed number of passes.
    """
    others = np.flatnonzero(~must)
    peaks = parts + company
    go = must.copy()
    if num_more >= others.size:
        go[others] = True
        return go
    if num_more == 0:
        return go
    go[others[:num_more]] = True
    fair = _BALANCED * float(costs[go].sum()) / ranks
    if float(peaks.max()) <= fair and crowding(parts[go], ranks) <= fair:
        return go
    by_peak = others[np.argsort(peaks[others], kind="stable")]
    lightest = must.copy()
    lightest[by_peak[:num_more]] = True
    must_peak = float(peaks[must].max(initial=0.0))
    if must_peak <= max(_BALANCED * float(costs[lightest].sum()) / ranks, float(peaks[by_peak[num_more - 1]])):
        return _light(costs, peaks, must, remaining, num_more, ranks, company, by_peak, fair, lightest)
    return _gather(costs, peaks, must, num_more, ranks, by_peak, must_peak)


def _light(
    costs: Floats,
    peaks: Floats,
    must: Bools,
    remaining: Ints,
    num_more: int,
    ranks: float,
    company: float,
    by_peak: Ints,
    fair: float,
    lightest: Bools,
) -> Bools:
    """A step without the outliers: the oldest that balance, and enough heavy ones left behind for the gathering to
    come."""
    outliers = peaks > fair
    patience = max(1, int(remaining[outliers].min())) if outliers.any() else 1
    needed = ranks * float(peaks.max())
    forecast = _Forecast(costs, must, remaining, num_more + int(must.sum()), patience)
    spare = by_peak.size - num_more
    best = None
    tried = -1
    for attempt in range(_RESERVE_STEPS + 1):
        size = spare * attempt // _RESERVE_STEPS
        if size == tried:
            continue
        tried = size
        reserve = by_peak[by_peak.size - size :]
        go = _oldest_balanced(costs, peaks, must, reserve, num_more, ranks, company)
        if go is None:
            continue
        best = go
        if forecast(go, reserve) >= needed:
            return go
    return lightest if best is None else best


def _oldest_balanced(
    costs: Floats, peaks: Floats, must: Bools, reserve: Ints, num_more: int, ranks: float, company: float
) -> Bools | None:
    """`must` and the oldest others outside the reserve, below the highest level at which such a step balances.

    The level falls until it is a fixed point: work of the oldest below it >= ranks * level. None if there is none.
    """
    open_to = ~must
    open_to[reserve] = False
    pool = np.flatnonzero(open_to)
    must_work = float(costs[must].sum())
    must_peak = float(peaks[must].max(initial=0.0))
    for _ in range(_FIXPOINT_ROUNDS):
        if pool.size < num_more:
            return None
        taken = pool[:num_more]
        level = _BALANCED * (must_work + float(costs[taken].sum())) / ranks
        if must_peak > level:
            return None
        if float(peaks[taken].max()) <= level:
            go = must.copy()
            go[taken] = True
            if crowding(peaks[go] - company, ranks) <= level:
                return go
            pool = _thinned(peaks - company, must, pool, num_more, level, ranks)
        pool = pool[peaks[pool] <= level]
    return None


def crowding(parts: Floats, ranks: float) -> float:
    """No step with these parts is shorter: of the i * ranks + 1 largest, i + 1 share a rank (two pigeons in one hole).
    O(n log n)."""
    num_ranks = max(round(ranks), 1)
    i = np.arange(1, (parts.size - 1) // num_ranks + 1)
    if not i.size:
        return 0.0
    prefix = np.concatenate(([0.0], np.cumsum(-np.sort(-parts))))
    return float((prefix[i * num_ranks + 1] - prefix[i * num_ranks - i]).max())


def _thinned(parts: Floats, must: Bools, pool: Ints, num_more: int, level: float, ranks: float) -> Ints:
    """The pool without the youngest of those too many: at most i * ranks parts above an (i+1)-th of the level fit."""
    num_ranks = max(round(ranks), 1)
    for i in range(1, (num_more + int(must.sum()) - 1) // num_ranks + 1):
        heavy = parts > level / (i + 1)
        in_pool = np.flatnonzero(heavy[pool])
        pool = np.delete(pool, in_pool[max(i * num_ranks - int(heavy[must].sum()), 0) :])
    return pool


class _Forecast:
    """How much work the heaviest `size` units of a later step will hold: of what stays, and of what is still to arrive.

    Arrivals are foreseen to be like the newest units (those never passed over), `patience` dispatches of them,
    discounted. What stays without being reserved is counted less the longer the wait, for first in, first out takes it
    before.
    """

    def __init__(self, costs: Floats, must: Bools, remaining: Ints, size: int, patience: int) -> None:
        new = np.flatnonzero(remaining == remaining.max())
        self._size = size
        self._num_units = costs.size
        self._kept_weight = 1.0 / patience
        self._arrival_weight = _SUPPLY * patience * (size - int(must.sum())) / new.size
        pool = np.concatenate((costs, costs[new]))
        self._order = np.argsort(-pool, kind="stable")
        self._pool = pool[self._order]

    def __call__(self, go: Bools, reserve: Ints) -> float:
        weight = np.full(self._pool.size, self._arrival_weight)
        weight[: self._num_units] = self._kept_weight
        weight[reserve] = 1.0
        weight[: self._num_units][go] = 0.0
        weight = weight[self._order]
        taken = np.minimum(np.cumsum(weight), self._size)
        return float(np.diff(taken, prepend=0.0) @ self._pool)


def _gather(
    costs: Floats, peaks: Floats, must: Bools, num_more: int, ranks: float, by_peak: Ints, must_peak: float
) -> Bools:
    """A step as long as its heaviest `must`, or longer where that wastes little more, filled up to that level."""
    sorted_peaks = peaks[by_peak]
    prefix = np.concatenate(([0.0], np.cumsum(costs[by_peak])))
    below = np.arange(num_more, by_peak.size + 1)  # level j: the num_more heaviest of the `below[j]` lightest
    levels = np.maximum(must_peak, sorted_peaks[below - 1])
    most_work = float(costs[must].sum()) + prefix[below] - prefix[below - num_more]
    waste = np.maximum(1.0 - most_work / (ranks * levels), 0.0)
    level = float(levels[np.flatnonzero(waste <= waste.min() + _GATHER_SLACK)[-1]])
    pool = np.flatnonzero(~must & (peaks <= level))
    taken, left = pool[:num_more], pool[num_more:]
    go = must.copy()
    go[taken] = True
    missing = ranks * level - float(costs[go].sum())
    if missing > 0.0 and left.size:
        shortest = taken[np.argsort(costs[taken], kind="stable")]
        longest = left[np.argsort(-costs[left], kind="stable")]
        count = min(shortest.size, longest.size)
        gain = np.maximum(costs[longest[:count]] - costs[shortest[:count]], 0.0)
        swaps = min(int(np.searchsorted(np.cumsum(gain), missing)) + 1, int((gain > 0.0).sum()))
        go[shortest[:swaps]] = False
        go[longest[:swaps]] = True
    return go
