"""Which of the waiting units make a step without waste: outliers wait, fillers wait for them, then both go together.

In the long run everything is dispatched, so the work is fixed and the trainer's time is the sum over steps of the
slowest rank. A step wastes time only if one rollout is heavier than a rank's fair share of the step (an outlier), that
is if `ranks * heaviest > work`. The window is there to prevent that, in three ways, tried in this order:

    first in, first out   the oldest balance, and no outlier waits behind them: nothing to do
    without outliers      outliers stay behind, and with them as many of the heaviest others as will have to fill their
                          step on the day they go (by a forecast); the oldest of the rest go
    outlier batch         an outlier must go: its step is long in any case, so it is filled up with the heaviest that
                          wait

Plain arrays, oldest first, nothing of rollouts or groups here. Pure and deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .bounds import pigeonhole_bound, running_sums

if TYPE_CHECKING:
    from .arrays import Bools, Floats, Ints

_BALANCED = 1.02
"""A step whose heaviest rollout is within 2 % of the fair share counts as balanced: chasing less costs more delay than
it saves idle time (measured: 1.05 costs 0.2-1 points of idle time and saves no delay)."""

_SUPPLY = 0.7
"""How much of the arrivals still to come is trusted to fill an outlier's step. 0.25-1 all work; less means more is
held back, hence more delay for heavy rollouts and 1-3 points less idle time on the heaviest tails."""

_LEVEL_SLACK = 0.2
"""An outlier batch goes at the highest level that wastes at most this share more than the best one: a level left unused
now returns later. Measured, idle time of lognormal lengths, 64 rollouts on 32 ranks: 0 gives 14.8 %, 0.2 gives 11.5 %,
1 gives 18.5 %."""

_RESERVE_STEPS = 6
"""Sizes of the reserve that are tried, from none to the whole window."""

_FIXPOINT_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Candidates:
    """The units to choose from, oldest first, and what a step has to be like."""

    costs: Floats
    """[U] work of each unit."""
    parts: Floats
    """[U] the heaviest indivisible part of each; equals costs where a unit is one rollout."""
    must: Bools
    """[U] goes in any case."""
    remaining: Ints
    """[U] dispatches that may still pass it over; the units with the most are the new ones."""
    num_more: int
    """How many others go; at most the number of others."""
    ranks: float
    """Number of ranks (with speeds: their sum over the fastest)."""
    filler: float = 0.0
    """The least work that must lie beside a part on its rank (equal counts)."""

    @property
    def peaks(self) -> Floats:
        """[U] work of the rank that gets the heaviest part of each, at least."""
        return self.parts + self.filler

    def fair_share(self, go: Bools) -> float:
        """Work of a rank if those that go were spread evenly, and 2 % more: no rollout above it, no waste."""
        return _BALANCED * float(self.costs[go].sum()) / self.ranks


def choose(units: Candidates) -> Bools:
    """-> [U] mask of the units that go: all of `must` and `num_more` others. O(U log U), few passes.

    Examples:
        >>> costs = np.array([500.0, 400.0, 2400.0, 300.0, 450.0, 350.0, 420.0, 380.0])  # oldest first
        >>> nothing, outlier = np.zeros(8, dtype=np.bool_), costs == 2400.0
        >>> units = Candidates(costs, costs, must=nothing, remaining=np.full(8, 8), num_more=4, ranks=2.0)
        >>> np.flatnonzero(choose(units))  # the outlier stays, and so does the 500 that will fill its step
        array([1, 3, 4, 5])
        >>> units = Candidates(costs, costs, must=outlier, remaining=np.full(8, 8), num_more=3, ranks=2.0)
        >>> np.flatnonzero(choose(units))  # it must go: 500 + 450 + 420 lie on the other rank
        array([0, 2, 4, 6])
    """
    must, num_more = units.must, units.num_more
    others = np.flatnonzero(~must)
    go = must.copy()
    if num_more >= others.size:
        go[others] = True
        return go
    if num_more == 0:
        return go
    go[others[:num_more]] = True
    fair = units.fair_share(go)
    peaks = units.peaks
    if float(peaks.max()) <= fair and _crowding(units.parts[go], units.ranks) <= fair:
        return go  # most steps end here: a window must not reorder what balances anyway
    by_peak = others[np.argsort(peaks[others], kind="stable")]
    lightest = must.copy()
    lightest[by_peak[:num_more]] = True
    must_peak = float(peaks[must].max(initial=0.0))
    if must_peak <= max(units.fair_share(lightest), float(peaks[by_peak[num_more - 1]])):
        without = _without_outliers(units, by_peak, fair)
        return lightest if without is None else without
    return _outlier_batch(units, by_peak, must_peak)


def _without_outliers(units: Candidates, by_peak: Ints, fair: float) -> Bools | None:
    """A step without the outliers: the oldest that balance, and enough heavy ones left behind to fill the outliers'
    step. None if no such step balances.

    Without that reserve the fillers leave first, and every outlier later goes alone: measured, 18 % idle instead of
    12 % on the heaviest recorded tail.
    """
    peaks = units.peaks
    outliers = peaks > fair
    patience = max(1, int(units.remaining[outliers].min())) if outliers.any() else 1
    needed = units.ranks * float(peaks.max())
    forecast = _Forecast(units, patience)
    spare = by_peak.size - units.num_more
    best = None
    # the smallest reserve that suffices: all beyond it would only delay heavy rollouts
    for size in sorted({spare * attempt // _RESERVE_STEPS for attempt in range(_RESERVE_STEPS + 1)}):
        reserve = by_peak[by_peak.size - size :]
        go = _oldest_balanced(units, reserve)
        if go is None:
            continue
        best = go
        if forecast(go, reserve) >= needed:
            return go
    return best


def _oldest_balanced(units: Candidates, reserve: Ints) -> Bools | None:
    """`must` and the oldest others outside the reserve, below the highest level at which such a step balances.

    The level falls until it is a fixed point: work of the oldest below it >= ranks * level. None if there is none.
    """
    costs, peaks, must, num_more = units.costs, units.peaks, units.must, units.num_more
    open_to = ~must
    open_to[reserve] = False
    pool = np.flatnonzero(open_to)
    must_work = float(costs[must].sum())
    must_peak = float(peaks[must].max(initial=0.0))
    for _ in range(_FIXPOINT_ROUNDS):
        if pool.size < num_more:
            return None
        taken = pool[:num_more]
        level = _BALANCED * (must_work + float(costs[taken].sum())) / units.ranks
        if must_peak > level:
            return None
        if float(peaks[taken].max()) <= level:
            go = must.copy()
            go[taken] = True
            if _crowding(peaks[go] - units.filler, units.ranks) <= level:
                return go
            pool = _thinned(units, peaks - units.filler, pool, level)
        pool = pool[peaks[pool] <= level]
    return None


def _crowding(parts: Floats, ranks: float) -> float:
    """No step with these parts is shorter than this, since some of the heaviest share a rank. O(n log n)."""
    return pigeonhole_bound(running_sums(-np.sort(-parts)), max(round(ranks), 1))


def _thinned(units: Candidates, parts: Floats, pool: Ints, level: float) -> Ints:
    """The pool without the newest of those too many: at most i * ranks parts above an (i+1)-th of the level fit."""
    num_ranks = max(round(units.ranks), 1)
    for i in range(1, (units.num_more + int(units.must.sum()) - 1) // num_ranks + 1):
        heavy = parts > level / (i + 1)
        in_pool = np.flatnonzero(heavy[pool])
        pool = np.delete(pool, in_pool[max(i * num_ranks - int(heavy[units.must].sum()), 0) :])
    return pool


class _Forecast:
    """Forecast of the work in the heaviest units of a later step: of what stays, and of what is still to arrive.

    Arrivals are foreseen to be like the newest units (those never passed over), `patience` dispatches of them,
    discounted. What stays without being reserved is counted less the longer the wait, for first in, first out takes it
    before.
    """

    def __init__(self, units: Candidates, patience: int) -> None:
        costs, remaining = units.costs, units.remaining
        new = np.flatnonzero(remaining == remaining.max())
        self._size = units.num_more + int(units.must.sum())
        self._num_units = costs.size
        self._kept_weight = 1.0 / patience
        self._arrival_weight = _SUPPLY * patience * units.num_more / new.size
        pool = np.concatenate((costs, costs[new]))  # [U + new] what stays, then what is to arrive
        self._order = np.argsort(-pool, kind="stable")
        self._pool = pool[self._order]

    def __call__(self, go: Bools, reserve: Ints) -> float:
        weight = np.full(self._pool.size, self._arrival_weight)  # [U + new] how many of each there will be
        weight[: self._num_units] = self._kept_weight
        weight[reserve] = 1.0
        weight[: self._num_units][go] = 0.0
        weight = weight[self._order]
        taken = np.minimum(np.cumsum(weight), self._size)
        return float(np.diff(taken, prepend=0.0) @ self._pool)


def _outlier_batch(units: Candidates, by_peak: Ints, must_peak: float) -> Bools:
    """A step as long as its heaviest `must`, or longer where that wastes little more, filled up to that level."""
    costs, peaks, must, num_more = units.costs, units.peaks, units.must, units.num_more
    prefix = running_sums(costs[by_peak])
    below = np.arange(num_more, by_peak.size + 1)  # level j: the num_more heaviest of the `below[j]` lightest
    levels = np.maximum(must_peak, peaks[by_peak][below - 1])  # ascending
    most_work = float(costs[must].sum()) + prefix[below] - prefix[below - num_more]
    waste = np.maximum(1.0 - most_work / (units.ranks * levels), 0.0)
    level = float(levels[np.flatnonzero(waste <= waste.min() + _LEVEL_SLACK)[-1]])
    pool = np.flatnonzero(~must & (peaks <= level))
    taken, left = pool[:num_more], pool[num_more:]
    go = must.copy()
    go[taken] = True
    missing = units.ranks * level - float(costs[go].sum())
    if missing > 0.0 and left.size:  # the oldest do not fill the step: swap the shortest of them for the longest left
        shortest = taken[np.argsort(costs[taken], kind="stable")]
        longest = left[np.argsort(-costs[left], kind="stable")]
        count = min(shortest.size, longest.size)
        gain = np.maximum(costs[longest[:count]] - costs[shortest[:count]], 0.0)
        swaps = min(int(np.searchsorted(np.cumsum(gain), missing)) + 1, int((gain > 0.0).sum()))
        go[shortest[:swaps]] = False
        go[longest[:swaps]] = True
    return go
