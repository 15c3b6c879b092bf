"""Choice of the rollouts that go now where ranks meet at every micro-batch (FSDP, ZeRO-3).

A *lockstep* is the micro-batches of one index: it takes as long as its costliest one.

    choose_lockstep      under a token cap: outliers wait, and go as many as ranks at a time
    choose_neighbours    padded, or one rollout in a micro-batch: runs of neighbours in cost, one run a lockstep

Under a cap a lockstep holds ranks x cap tokens at most. Work is denser in long rollouts, so an *outlier* is a rollout
that costs more than a micro-batch full of ordinary ones does: nothing in its lockstep can be as costly but another
outlier. As many of them as ranks waste little; one alone wastes a lockstep. Candidates are what must go, outliers for
one, two or three locksteps, and the oldest ordinary ones up to a batch; the one is taken that wastes least now (by the
bound of bounds.py) and later (of the outliers that it leaves).

Plain arrays, oldest first; nothing of groups here, and nothing of where a rollout goes (bins_on_ranks.py). Pure and
deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Bools, Floats, Ints
from .bounds import lockstep_bounds
from .cost_order import CostOrder

_SUPPLY = 0.7
"""How much of the arrivals still to come is trusted to complete a lockstep of outliers."""

_AS_HEAVY = 0.8
"""An arrival of this share of an outlier's cost can go beside it. Counting lighter ones, too: 0.05-0.2 points worse."""

_SPIKE = 0.9
"""A rollout of more than this share of the heaviest is an outlier in any case: where many were cut at the longest
length they would else be taken for ordinary, and every step would have some (lrm, a fifth cut, 128 on 8 ranks: 0.60 %
idle instead of 0.26; 256 on 32: 1.97 instead of 0.73)."""

_MOST_LOCKSTEPS = 3
"""Locksteps of outliers that one step may take."""

_STARTS = 13
"""Which outliers are tried as the costliest to go: so many over all of them."""

_LEVEL_ROUNDS = 8

_AGE_REWARD = 1.0
"""A rollout at the end of its patience is worth this many rollouts of its lockstep's level: dispatched a little early,
at some waste, rather than late as a must. It grows with the fourth power of the wait (1, 2, 3: worse at one of the
ends)."""

_MUST_REWARD = 2.0
"""A rollout that must go pulls its neighbours along rather than going alone."""


@dataclass(frozen=True, slots=True)
class CappedStep:
    """The rollouts to choose from, oldest first, and what a step has to be like."""

    order: CostOrder
    """Order of all W by their costs."""
    tokens: Ints
    """[W] of each, at most max_tokens."""
    must: Bools
    """[W] goes in any case; at most num_rollouts of them."""
    remaining: Ints
    """[W] steps that may still pass it over; those with the most are the new ones."""
    num_rollouts: int
    """How many go, < W."""
    dp_size: int
    max_tokens: int
    """Token cap of a micro-batch."""


def choose_lockstep(step: CappedStep) -> Bools:
    """-> [W] mask of the `num_rollouts` rollouts that go: all of `must`, and others that make a step without waste.

    Complexity: O(k B) for k candidates of B rollouts, k at most some dozen; and a few vector operations of O(W).

    Examples:
        >>> from stream_balancer.planning.cost_order import CostOrder
        >>> tokens = np.array([100, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20])  # oldest first
        >>> costs, must, remaining = tokens**2.0, tokens < 0, np.full(14, 8)
        >>> knobs = {"num_rollouts": 11, "dp_size": 2, "max_tokens": 100}
        >>> step = CappedStep(CostOrder(costs), tokens, must, remaining, **knobs)
        >>> np.flatnonzero(choose_lockstep(step))  # 100 tokens at once cost five times as much as 20 x 5: it waits
        array([ 1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
        >>> tokens[3] = 100
        >>> step = CappedStep(CostOrder(tokens**2.0), tokens, must, remaining, **knobs)
        >>> np.flatnonzero(choose_lockstep(step))  # two are a lockstep of their own
        array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10])
    """
    costs = step.order.costs
    level = min(ordinary_level(step), _SPIKE * step.order.heaviest)
    # denser than what fills a micro-batch: only another one can run beside it without waiting
    outlier = costs > level  # [W]
    oldest = step.must.copy()
    oldest[np.flatnonzero(~step.must)[: step.num_rollouts - int(np.count_nonzero(step.must))]] = True
    # nothing needs company: first in, first out wastes as little as any choice, and delays nobody
    if not outlier.any():
        return oldest
    pool = _CandidatePool(step, level, outlier, oldest)
    batches = pool.batches()  # [k, P]
    members = np.nonzero(batches)[1].reshape(-1, step.num_rollouts)  # [k, B], costliest first
    chosen_costs = pool.costs[members]
    bounds = lockstep_bounds(chosen_costs, pool.tokens[members], step.dp_size, step.max_tokens)
    waste = bounds - chosen_costs.sum(axis=1) / step.dp_size
    # now and later in one unit: time of a rank
    best = int((waste + pool.future(~batches[:, : pool.num_outliers])).argmin())
    go = np.zeros(costs.size, dtype=np.bool_)
    go[pool.positions[members[best]]] = True
    return go


def ordinary_level(step: CappedStep) -> float:
    """The most that a micro-batch of ordinary rollouts costs; ordinary is what costs no more than that.

    A fixed point, found from above: the cap, at the density of the longest of them that fill a lockstep. O(W).
    """
    order = step.order.ascending()
    costs = step.order.costs[order]  # [W] ascending
    work = np.concatenate(([0.0], np.cumsum(costs)))
    tokens = np.concatenate(([0], np.cumsum(step.tokens[order])))
    share = step.num_rollouts / costs.size
    held = step.dp_size * step.max_tokens / share  # tokens of a lockstep in every batch of the window
    level, end = np.inf, costs.size
    for _ in range(_LEVEL_ROUNDS):
        start = min(int(np.searchsorted(tokens, tokens[end] - held)), end - 1)
        full = min(float(step.max_tokens), float(tokens[end]) * share / step.dp_size)
        density = float(work[end] - work[start]) / float(tokens[end] - tokens[start])
        # the level only falls, since what is left below it is less dense: so it ends at a fixed point
        if full * density >= level * (1.0 - 1e-9):
            break
        level = full * density
        end = int(np.searchsorted(costs, level, side="right"))
        if not end:
            break
    return level


class _CandidatePool:
    """The rollouts that some candidate may take, costliest first (the outliers are in front); of equal ones the older
    first."""

    def __init__(self, step: CappedStep, level: float, outlier: Bools, oldest: Bools) -> None:
        self._step, self._level = step, level
        must, dp_size = step.must, step.dp_size
        self.num_outliers = int(np.count_nonzero(outlier))
        in_pool = must | outlier | oldest
        in_pool[np.flatnonzero(~outlier)[: step.num_rollouts]] = True
        ordinary = step.order.ascending()[: outlier.size - self.num_outliers]
        # the longest ordinary ones complete a lockstep that lacks outliers
        in_pool[ordinary[-(_MOST_LOCKSTEPS * dp_size + int(np.count_nonzero(must))) :]] = True
        positions = np.flatnonzero(in_pool)
        costs = step.order.costs[positions]
        by_cost = np.argsort(-costs, kind="stable")
        self.positions: Ints = positions[by_cost]
        """[P] of each in the window."""
        self.costs: Floats = costs[by_cost]
        self.tokens: Ints = step.tokens[self.positions]
        self._must, self._oldest = must[self.positions], oldest[self.positions]
        new = step.remaining == step.remaining.max()
        self._arrivals = _SUPPLY * step.num_rollouts / int(np.count_nonzero(new))  # a step, for each new one
        self._new_costs = np.sort(step.order.costs[new & outlier])

    def batches(self) -> Bools:
        """[k, P] candidates of `num_rollouts` each: the oldest; `must`, some outliers, and the oldest ordinary ones."""
        extras = self._extras()
        going = np.repeat(self._must[None], len(extras), axis=0)
        for number, extra in enumerate(extras):
            going[number, extra] = True
        missing = self._step.num_rollouts - going.sum(axis=1)
        going, missing = going[missing >= 0], missing[missing >= 0]
        oldest = self.num_outliers + np.argsort(self.positions[self.num_outliers :], kind="stable")
        # outliers fill up only where there are no others left, the lightest first
        fill = np.concatenate((oldest, np.arange(self.num_outliers)[::-1]))
        free = ~going[:, fill]
        going[:, fill] |= free & (np.cumsum(free, axis=1) <= missing[:, None])
        return np.concatenate((self._oldest[None], going))  # of equal ones the first is taken

    def _extras(self) -> list[Ints]:
        """Which go beside `must` and the oldest ordinary ones: runs of outliers that make whole locksteps with those
        that must go, completed by the longest ordinary ones where too few are left."""
        outliers = np.flatnonzero(~self._must[: self.num_outliers])
        longest = self.num_outliers + np.flatnonzero(~self._must[self.num_outliers :])
        num_must = self.num_outliers - outliers.size
        wanted = [number * self._step.dp_size - num_must for number in range(1, _MOST_LOCKSTEPS + 1)]
        extras = [outliers[:0]]
        for start in np.unique(np.linspace(0, outliers.size, _STARTS).astype(np.int64)).tolist():
            for number in wanted:
                if number > 0:
                    run = outliers[start : start + number]
                    extras.append(run)
                    if run.size < number:
                        extras.append(np.concatenate((run, longest[: number - run.size])))
                        break
        return extras

    def future(self, left: Bools) -> Floats:
        """[k] time that the outliers left behind ([k, outliers]) will waste if they go in locksteps, costliest first:
        what one lacks beside its costliest; the more, the sooner it must go."""
        step = self._step
        number = -(-left.shape[1] // step.dp_size)
        places = np.argsort(~left, axis=1, kind="stable")  # those that are left in front, costliest first
        spare = ((0, 0), (0, number * step.dp_size - left.shape[1]))
        places = np.pad(places, spare).reshape(-1, number, step.dp_size)  # [k, locksteps, ranks]
        there = np.arange(number * step.dp_size).reshape(number, -1) < left.sum(axis=1)[:, None, None]
        peak = self.costs[places[..., 0]]
        patience = int(step.remaining.max())
        still = np.where(there, step.remaining[self.positions[places]] - 1, patience).min(axis=2)
        as_heavy = self._new_costs.size - np.searchsorted(self._new_costs, _AS_HEAVY * peak)
        coming = self._arrivals * as_heavy * np.maximum(still, 0)
        missing = np.where(there[..., 0], np.maximum(step.dp_size - there.sum(axis=2) - coming, 0.0), 0.0)
        wasted: Floats = (missing * (peak - self._level) * (1.0 - still / (patience + 1.0))).sum(axis=1)
        return wasted / step.dp_size


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours in cost: padded micro-batches, or of one rollout each
# ---------------------------------------------------------------------------------------------------------------------


def choose_neighbours(
    by_cost: CostOrder, must: Bools, remaining: Ints, num_rollouts: int, dp_size: int, number: int
) -> Bools:
    """-> [W] mask of `num_rollouts` rollouts that go: all of `must`, as far as possible in `number` runs of neighbours.

    Least waste, less a reward for the wait, by dynamic programming over the sorted window.

    Args:
        by_cost: the order of all W by their work; positions are oldest first.
        must: [W] goes in any case; at most num_rollouts of them.
        remaining: [W] steps that may still pass it over.
        num_rollouts: how many go, < W.
        dp_size: micro-batches in a lockstep.
        number: micro-batches per rank, so the number of locksteps.

    Complexity: O(W * number), vectorised over W.

    Examples:
        >>> from stream_balancer.planning.cost_order import CostOrder
        >>> costs = np.array([100.0, 900.0, 120.0, 880.0, 110.0, 300.0, 910.0, 90.0])  # oldest first
        >>> must, remaining = np.zeros(8, dtype=np.bool_), np.full(8, 8)
        >>> go = choose_neighbours(CostOrder(costs), must, remaining, num_rollouts=4, dp_size=2, number=2)
        >>> np.flatnonzero(go)  # two locksteps of two ranks: 120 beside 110, 900 beside 910
        array([1, 2, 4, 6])
    """
    length = num_rollouts // number
    costs, order = by_cost.costs, by_cost.ascending()
    sorted_costs = costs[order]
    longest_wait = max(1, int(remaining.max()))
    # relative to the longest wait, so that the reward means the same under any max_skips
    wait = 1.0 - remaining[order] / longest_wait  # [W] 0.0 = new, 1.0 = must go now
    work = np.concatenate(([0.0], np.cumsum(sorted_costs)))  # [W+1]
    ends = np.arange(length, costs.size + 1)  # every run of `length` neighbours, by the place after its last
    peak = sorted_costs[ends - 1]  # [W-length+1] its costliest, for the order ascends
    # `length / dp_size` rollouts share a micro-batch, which evens them out: only an outlier among them wastes time
    waste = np.maximum(dp_size * peak - (work[ends] - work[ends - length]), 0.0)
    reward = np.concatenate(([0.0], np.cumsum(_AGE_REWARD * wait**4 + _MUST_REWARD * must[order])))
    # waste is time on all ranks; a rollout fills dp_size / length of a micro-batch of that level
    value = (reward[ends] - reward[ends - length]) * (dp_size / length) * peak - waste
    go = np.zeros(costs.size, dtype=np.bool_)
    go[order[_best_runs(value, length, costs.size, number)]] = True
    missing = num_rollouts - int(go.sum())  # where `number` does not divide it
    if missing:
        go[np.flatnonzero(~go)[:missing]] = True
    return _with_must(sorted_costs, order, go, must)


def _best_runs(value: Floats, length: int, size: int, number: int) -> Ints:
    """Sorted places covered by the `number` disjoint runs of greatest total value; value[e] is of the run that ends
    before place `length + e`."""
    best = np.zeros(size + 1)  # best[e]: the greatest value of the runs so far within the first e places
    taken = []
    for _ in range(number):
        with_run = np.full(size + 1, -np.inf)
        with_run[length:] = best[: size + 1 - length] + value
        after = np.maximum.accumulate(with_run)
        # kept for the way back: which prefixes the best runs end at
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
    """A rollout that must go and was not chosen takes the place of the chosen one nearest to it in cost. O(must * W).

    Pulling a whole run of neighbours along was measured: one lone rollout wastes less than a bad run.
    """
    place_of = np.empty(order.size, dtype=np.int64)
    place_of[order] = np.arange(order.size)
    for one in np.flatnonzero(must & ~go).tolist():
        free = np.flatnonzero(go & ~must)
        nearest = free[np.abs(sorted_costs[place_of[free]] - sorted_costs[place_of[one]]).argmin()]
        go[nearest] = False
        go[one] = True
    return go
