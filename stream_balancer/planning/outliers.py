"""Which of the waiting units make a step without waste: outliers wait, fillers wait for them, then both go together.

In the long run everything is dispatched, so the work is fixed and the trainer's time is the sum over steps of the
slowest rank. A step wastes time only if one rollout is heavier than a rank's fair share of the step (an outlier), that
is if `ranks * heaviest > work`. The window is there to prevent that, in three ways, tried in this order:

    first in, first out   the oldest balance, and no outlier waits behind them: nothing to do
    without outliers      outliers stay behind, and with them the heaviest others, as many as fill their step on the
                          day they go
    outlier batch         an outlier must go: its step is long in any case, so it is filled up with the heaviest that
                          wait

Plain arrays, oldest first, nothing of rollouts or groups here. Pure and deterministic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .arrays import Bools, Floats, Ints
from .bounds import running_sums
from .cost_order import CostOrder

_BALANCED = 1.02
"""A step whose heaviest rollout is within 2 % of the fair share counts as balanced: chasing less costs more delay than
it saves idle time (measured: 1.05 costs 0.2-1 points of idle time and saves no delay)."""

_MAY_GO = 0.25
"""How much of what stays behind while outliers wait is free to go for its age at least: a quarter of it, the lightest.
With none light tails idle a third more; half of it sends the fillers of the outliers (heavy tails: 1-2 points more)."""

_CHOICES = 32
"""So many numbers of light rollouts are compared for an outlier's step."""

_ROUNDING = 1e-9
"""Scores of levels this near to each other (as a part of the highest level) are equal."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The units to choose from, oldest first, and what a step has to be like."""

    order: CostOrder
    """Order of the units by cost."""
    parts: Floats
    """[U] the heaviest indivisible part of each; equals costs where a unit is one rollout."""
    must: Bools
    """[U] goes in any case."""
    remaining: Ints
    """[U] steps that may still pass it over; the units with the most are the new ones."""
    num_more: int
    """How many others go; at most the number of others."""
    ranks: int
    """Number of ranks."""
    beside: float = 0.0
    """So many units' work must lie beside a part on its rank (equal counts)."""
    tokens: Ints | None = None
    """[U] of each, where ranks meet at every micro-batch; None: they do not matter."""
    room: float = 0.0
    """Tokens of a step that runs as one micro-batch a rank: a second one would have few rollouts to even out."""

    @property
    def costs(self) -> Floats:
        """[U] work of each unit."""
        return self.order.costs

    @property
    def number(self) -> int:
        """How many go, with `must`."""
        return self.num_more + int(np.count_nonzero(self.must))

    def filler(self, go: Bools) -> float:
        """The least work of those that go that may lie beside a part on its rank."""
        if not self.beside:
            return 0.0
        return self.beside * float(np.sort(self.costs[go])[: math.ceil(self.beside)].mean())

    def fair_share(self, go: Bools) -> float:
        """Work of a rank if those that go were spread evenly, and 2 % more: no rollout above it, no waste."""
        return _BALANCED * float(self.costs[go].sum()) / self.ranks

    def balances(self, go: Bools, heaviest: float) -> bool:
        """No rollout is above the fair share, ``heaviest`` and what lies beside it being the longest on its rank; and
        all run as one micro-batch a rank."""
        fits = self.tokens is None or int(self.tokens[go].sum()) <= self.room
        return fits and heaviest + self.filler(go) <= self.fair_share(go)


def choose(units: Candidates) -> Bools:
    """-> [U] mask of the units that go: all of `must` and `num_more` others.

    Complexity, for n that go: O(n log n), and a few vector operations of O(U); where no order is given, O(U log U).

    Examples:
        >>> from stream_balancer.planning.cost_order import CostOrder
        >>> costs = np.array([500.0, 400.0, 2400.0, 300.0, 450.0, 350.0, 420.0, 380.0])  # oldest first
        >>> nothing, outlier = np.zeros(8, dtype=np.bool_), costs == 2400.0
        >>> units = Candidates(CostOrder(costs), costs, must=nothing, remaining=np.full(8, 8), num_more=4, ranks=2)
        >>> np.flatnonzero(choose(units))  # light ones: the outlier stays, and 500 and 450 for it
        array([1, 3, 5, 6])
        >>> units = Candidates(CostOrder(costs), costs, must=outlier, remaining=np.full(8, 8), num_more=3, ranks=2)
        >>> np.flatnonzero(choose(units))  # it must go: 500 + 450 + 420 lie on the other rank
        array([0, 2, 4, 6])
    """
    must, num_more = units.must, units.num_more
    num_others = must.size - int(np.count_nonzero(must))
    if num_more >= num_others:
        return np.ones_like(must)
    go = must.copy()
    if num_more == 0:
        return go
    go[np.flatnonzero(~must)[:num_more]] = True
    # all that follows is measured against the step that first in, first out would send
    by_part = units.order if units.parts is units.costs else CostOrder(units.parts)
    if units.balances(go, by_part.heaviest):
        # most steps end here: a window must not reorder what balances anyway
        return _uncrowded(units, go)
    # [others] units, ascending by part: so the first num_more are the lightest step there is, which says whether any
    # step beside what must go can balance
    others, must_peak = by_part.ascending(), 0.0  # those that need not go, in the order of their heaviest parts
    if num_others < must.size:
        others, must_peak = others[~must[others]], float(units.parts[must].max())
    lightest = must.copy()
    lightest[others[:num_more]] = True
    filler = units.filler(lightest)
    if must_peak <= float(units.parts[others[num_more - 1]]) or must_peak + filler <= units.fair_share(lightest):
        spare = int(_MAY_GO * (num_others - num_more))
        # the oldest of the light ones: what is heavier waits, and fills the step of the outliers
        light = np.zeros_like(must)
        light[others[: max(num_others - _num_fillers(units, others, filler), num_more + spare)]] = True
        oldest, go = np.flatnonzero(light)[:num_more], must.copy()
        go[oldest] = True
        heaviest = max(float(units.parts[oldest].max()), must_peak)
        return _uncrowded(units, go if units.balances(go, heaviest) else lightest)
    return _outlier_batch(units, others, must_peak + filler, filler)


def _uncrowded(units: Candidates, go: Bools) -> Bools:
    """Rollouts that go, with light ones in place of the newest of more heavy ones than ranks: two heavy ones are more
    than a fair share."""
    heavy = units.parts * 2.0 > units.fair_share(go)
    surplus = int(np.count_nonzero(go & heavy) - units.ranks)
    if surplus > 0:
        newest, oldest = np.flatnonzero(go & heavy & ~units.must)[::-1], np.flatnonzero(~go & ~heavy)
        number = min(surplus, newest.size, oldest.size)
        go[newest[:number]], go[oldest[:number]] = False, True
    return go


def _num_fillers(units: Candidates, others: Ints, filler: float) -> int:
    """How many of the heaviest fill the ranks for as long as the heaviest of them takes, in one micro-batch each."""
    # no more than leave in one step
    heaviest_first = others[: -units.number - 1 : -1]
    needed = units.ranks * (float(units.parts[heaviest_first[0]]) + filler)
    number = int(np.searchsorted(np.cumsum(units.costs[heaviest_first]), needed)) + 1
    if units.tokens is None:
        return number
    return min(number, int(np.searchsorted(np.cumsum(units.tokens[heaviest_first]), units.room, side="right")))


def _best_level(units: Candidates, others: Ints, must_peak: float, filler: float) -> float:
    """How long the step should be: least is to be wasted, by this step and by those of the outliers that it leaves.

    Each outlier left will need a step as long as itself, the more surely the fewer steps it may still wait. Such a
    step serves all that are lower: so one adds only its height above the next lower one left (above the fair share, if
    it is the lowest), times the greatest urgency of itself and those above. O(n) for n others, which are sorted.
    """
    costs, num_more = units.costs, units.num_more
    heights = units.parts[others] + filler  # ascending
    # under equal counts the lightest go beside the heaviest
    light = min(math.ceil(units.beside), num_more)
    # from the lowest level with all that fit below it; each later one takes in one outlier more
    first = max(num_more, int(np.searchsorted(heights, must_peak, side="right")))
    # [levels] how many others lie below each level
    below = np.arange(first, others.size + 1)
    levels = np.maximum(heights[below - 1], must_peak)

    def most(amounts: Floats) -> Floats:
        """[levels] what the step holds at most: what must go, and the heaviest below the level."""
        # [others + 1]; a difference of two entries is what the units between have
        sums = running_sums(amounts[others])
        held: Floats = float(amounts[units.must].sum()) + sums[light] + sums[below] - sums[below - num_more + light]
        return held

    most_work = most(costs)
    if units.tokens is not None:
        # what one micro-batch a rank cannot hold does not run beside the heaviest
        most_work *= np.minimum(1.0, units.room / most(units.tokens.astype(np.float64)))
    wasted = np.maximum(levels - most_work / units.ranks, 0.0)
    fair = float(costs.mean()) * units.number / units.ranks
    # [outliers above the first level]
    left = np.maximum(heights[first:], fair)
    urgency = 1.0 - units.remaining[others[first:]] / (float(units.remaining.max()) + 1.0)
    # of each and those above it: a step for a higher one serves the lower ones
    urgency = np.maximum.accumulate(urgency[::-1])[::-1]
    later = running_sums((np.diff(left, prepend=fair) * urgency)[::-1])[::-1]  # by level; the last leaves nobody
    later[1:-1] += (left[:-1] - fair) * urgency[1:]  # where it is the lowest left, a rise begins at the fair share
    score = wasted + later
    return float(levels[np.flatnonzero(score <= score.min() + _ROUNDING * levels[-1])[-1]])  # of equal ones the highest


def _outlier_batch(units: Candidates, others: Ints, must_peak: float, filler: float) -> Bools:
    """A step as long as its heaviest `must`, or longer where that wastes little more, filled up to that level."""
    costs, parts, must = units.costs, units.parts, units.must
    level = _best_level(units, others, must_peak, filler)
    # nothing above the level: it would make the step longer still
    open_to = ~must & (parts + filler <= level)
    go = must.copy()
    if units.beside:
        go[_lightest_beside(units, open_to | must, level)] = True
        open_to &= ~go
    # the oldest first: the step is long in any case, so it may serve age before it serves balance
    taken = np.flatnonzero(open_to)[: units.number - int(np.count_nonzero(go))]
    go[taken] = True
    # work that a step of this length could hold besides
    missing = units.ranks * level - float(costs[go].sum())
    open_to[taken] = False
    left = others[open_to[others]]
    if missing > 0.0 and left.size:  # the oldest do not fill the step: swap the shortest of them for the longest left
        shortest = taken[np.argsort(costs[taken], kind="stable")]
        longest = _heaviest_first(costs, left, min(shortest.size, left.size))
        # [swaps] shortest with longest, second with second: descending, so its running sum says how many are needed
        gain = np.maximum(costs[longest] - costs[shortest[: longest.size]], 0.0)
        swaps = min(int(np.searchsorted(np.cumsum(gain), missing)) + 1, int((gain > 0.0).sum()))
        go[shortest[:swaps]] = False
        go[longest[:swaps]] = True
    return go


def _lightest_beside(units: Candidates, open_to: Bools, level: float) -> Ints:
    """The lightest of these, as many as should go to lie beside the heaviest under equal counts: the more, the shorter
    is the step, and the less work is in it. O(n log n + ranks)."""
    ascending = np.flatnonzero(open_to)
    ascending = ascending[np.argsort(units.parts[ascending], kind="stable")]
    work, parts = running_sums(units.costs[ascending]), running_sums(units.parts[ascending])
    # [choices, 1] so many of the lightest go, and the others are the heaviest, which begin there
    lightest = np.linspace(0, units.num_more - 1, min(units.num_more, _CHOICES)).astype(np.int64)[:, None]
    heaviest = ascending.size - units.number + lightest
    # [ranks] if the heaviest lie on so many ranks, so many others lie beside them
    ranks = np.arange(1, max(min(units.ranks, units.number), 2))
    beside = np.minimum(np.ceil(ranks * units.beside).astype(np.int64), units.number)
    light = np.minimum(beside, lightest)
    # [choices, ranks] these ranks have to do, each
    finish = work[light] + work[heaviest + beside - light] - work[heaviest] + parts[-1] - parts[-1 - ranks]
    step = np.maximum((finish / ranks).max(axis=1), level)
    filled = (work[lightest] + work[-1] - work[heaviest])[:, 0] / units.ranks
    return ascending[: lightest[np.argmin(step - np.minimum(filled, level)), 0]]


def _heaviest_first(costs: Floats, units: Ints, count: int) -> Ints:
    """[count] of these units that cost most, heaviest first; of equal ones the older first. O(n), and a sort of
    those."""
    cost = costs[units]
    least = np.partition(cost, -count)[-count]
    top = np.sort(units[cost >= least])  # all that cost as much as the last one taken, so that the older are taken
    return top[np.argsort(-costs[top], kind="stable")][:count]
