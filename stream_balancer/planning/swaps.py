"""The last few percent: swap what is chosen with what waits, so that every rank finishes at the same time.

With few rollouts per rank no partition of a given batch is even, yet the window holds many a rollout that would fit
better.

    swap_with_waiting    what lies on one rank (a rollout, or a group that stays on one): rank by rank
    swaps_of_groups      groups whose rollouts lie on any ranks: one group for one, all pairs side by side

Pure and deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from .arrays import loads_of
from .cost_order import CostOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrays import Bools, Counts, Floats, Ints
    from .selection import Units

EVEN = 1.003
"""Ranks within 0.3 % of each other are left alone: the partition alone gets there from about 8 rollouts per rank on."""

_TOO_LONG = 8
"""Rollouts passed by because they would not fit under the token cap, before the next place is tried."""


def swap_with_waiting(
    costs: Floats,
    shares: list[list[Ints]],
    fixed: Bools,
    order: CostOrder,
    speeds: Floats | None = None,
    lengths: Ints | None = None,
    max_tokens: int | None = None,
) -> list[list[Ints]]:
    """Bring every rank to the same finish by one-for-one swaps with the candidates; micro-batches keep their counts.

    Args:
        costs: [W] work of each waiting rollout.
        shares: [rank][micro-batch] -> positions chosen; no rank is empty.
        fixed: [W] may not be swapped away (due, or forced by the skip guarantee).
        order: of all W by cost; whoever is not chosen may be.
        speeds: [ranks] relative speeds; None means all alike.
        lengths: [W] tokens of each; only with max_tokens.
        max_tokens: what comes in must leave its micro-batch within it. None = no cap.

    Returns:
        The shares, positions ascending; the same object if the finishes were even already, or if no swap made the
        ranks idle less.

    Complexity: O(1) where the finishes are even; else O(W) once, to set those not chosen side by side, and O(n log W)
    for n chosen rollouts, in at most two passes over the ranks.

    Examples:
        >>> costs = np.array([900.0, 700.0, 450.0, 300.0, 200.0, 400.0])
        >>> chosen = [[np.array([0, 2])], [np.array([1, 3])]]  # [rank][micro_batch]: 1350, 1000
        >>> fixed = np.zeros(6, dtype=np.bool_)
        >>> swap_with_waiting(costs, chosen, fixed, CostOrder(costs))  # 1100 and 1100
        [[array([0, 4])], [array([1, 5])]]
    """
    rate = [1.0] * len(shares) if speeds is None else speeds.tolist()
    chosen = np.concatenate([one for share in shares for one in share])
    if chosen.size == costs.size:
        return shares
    loads = loads_of(costs, shares).tolist()
    total_rate = sum(rate)
    # no choice of the same work ends earlier than its mean, or than its heaviest rollout on the fastest rank
    level = max(sum(loads) / total_rate, float(costs[chosen].max()) / max(rate))
    before = max(load / speed for load, speed in zip(loads, rate, strict=True))
    if before <= level * EVEN:
        return shares
    idle_before = 1.0 - sum(loads) / total_rate / before
    # heavier ones would make some rank later than all are now
    candidates = _Candidates(costs, order, chosen, heaviest=level * max(rate))
    ranks = [_Rank(costs, share, load, lengths, max_tokens) for share, load in zip(shares, loads, strict=True)]

    def finish(rank: int) -> float:
        return ranks[rank].load / rate[rank]

    by_finish = sorted(range(len(ranks)), key=finish)
    for rank in reversed(by_finish):  # the latest first: they give back what the early ones lack
        if finish(rank) > level:
            ranks[rank].fit(fixed, candidates, level * rate[rank])
    highest = max(map(finish, by_finish))
    for rank in sorted(by_finish, key=finish):
        if finish(rank) * EVEN < highest:
            ranks[rank].fit(fixed, candidates, highest * rate[rank])
    work = sum(rank.load for rank in ranks)
    if 1.0 - work / total_rate / max(map(finish, by_finish)) >= idle_before:
        return shares  # bringing several late ranks down can starve the others: then the batch was better as it was
    return [rank.micro_batches() for rank in ranks]


class _Candidates:
    """Rollouts that may come in, by cost; of equal ones the older first.

    An array that stays as it is, what was taken from it, and the few that came back: no swap moves the others.
    """

    def __init__(self, costs: Floats, order: CostOrder, chosen: Ints, heaviest: float) -> None:
        may = costs <= heaviest  # [W]
        # who is chosen comes back through swap() only, once it was given away
        may[chosen] = False
        ascending = order.ascending()
        # [candidates], lightest first
        self._positions = ascending[may[ascending]]  # [candidates]
        self._costs = costs[self._positions]
        self._num_waiting = costs.size
        self._below_taken: dict[int, int] = {}  # place that was taken from -> a lower one to look at instead
        self._returned: list[tuple[float, int]] = []  # (cost, position), ascending

    def tops(self, costs: Floats) -> list[int]:
        """For each cost the highest place that costs no more; -1 if none does."""
        places: list[int] = (np.searchsorted(self._costs, costs, side="right") - 1).tolist()
        return places

    def down_from(self, top: int, cost: float) -> Iterator[tuple[float, int]]:
        """(cost, position) of what is there at a cost and below, the costliest first; `top` as of `tops`."""
        # _num_waiting is above every position, so those of exactly this cost are included
        place, returned = self._untaken(top), bisect_right(self._returned, (cost, self._num_waiting)) - 1
        while place >= 0 or returned >= 0:
            here = (float(self._costs[place]), int(self._positions[place])) if place >= 0 else (-1.0, -1)
            if returned >= 0 and self._returned[returned] > here:
                yield self._returned[returned]
                returned -= 1
            else:
                yield here
                place = self._untaken(place - 1)

    def swap(self, taken: tuple[float, int], given: tuple[float, int]) -> None:
        """One goes, another comes back; (cost, position) each."""
        at = bisect_left(self._returned, taken)
        if self._returned[at : at + 1] == [taken]:
            self._returned.pop(at)
        else:
            first, end = np.searchsorted(self._costs, taken[0]), np.searchsorted(self._costs, taken[0], side="right")
            place = int(first + np.searchsorted(self._positions[first:end], taken[1]))  # equal costs lie by position
            self._below_taken[place] = place - 1
        insort(self._returned, given)

    def _untaken(self, place: int) -> int:
        """The first place from here downwards that nothing was taken from; -1 if there is none."""
        below = self._below_taken
        while place in below:
            lower = below[place]
            below[place] = below.get(lower, lower)  # a shorter way for the next one
            place = lower
        return place


class _Rank:
    """One rank's share, as a list of places that can be given another rollout."""

    def __init__(
        self, costs: Floats, share: list[Ints], load: float, lengths: Ints | None, max_tokens: int | None
    ) -> None:
        self.load = load
        self._costs = costs
        self._lengths = lengths
        self._positions = [position for one in share for position in one.tolist()]
        self._bins = [number for number, one in enumerate(share) for _ in range(one.size)]
        self._room = (
            []  # tokens that each micro-batch could still take
            if lengths is None or max_tokens is None
            else [max_tokens - int(lengths[one].sum()) for one in share]
        )

    def fit(self, fixed: Bools, candidates: _Candidates, level: float) -> None:
        """The one swap that brings this rank closest to `level` from below, if there is one."""
        costs = self._costs[self._positions]
        without = self.load - costs  # [places] of this rank
        # [places] what may come in where this one goes, at most
        gaps = level - without
        # a rank above the level must come down, whatever it then reaches
        best, swap = self.load if self.load <= level else -1.0, None
        places = zip(self._positions, without.tolist(), gaps.tolist(), candidates.tops(gaps), strict=True)
        for place, (position, rest, gap, top) in enumerate(places):
            if fixed[position]:
                continue
            for cost, candidate in islice(candidates.down_from(top, gap), _TOO_LONG):
                # The costliest that still fits comes first: whatever follows at this place is worse than what was
                # found.
                if rest + cost <= best:
                    break
                if self._fits(place, candidate):
                    best, swap = rest + cost, (place, (cost, candidate))
                    break
        if swap is None:
            return
        place, taken = swap
        given = self._positions[place]
        if self._room and self._lengths is not None:
            self._room[self._bins[place]] += int(self._lengths[given]) - int(self._lengths[taken[1]])
        self._positions[place] = taken[1]
        candidates.swap(taken, (float(self._costs[given]), given))
        self.load = best

    def _fits(self, place: int, incoming: int) -> bool:
        if not self._room or self._lengths is None:
            return True
        more = int(self._lengths[incoming]) - int(self._lengths[self._positions[place]])
        return more <= self._room[self._bins[place]]

    def micro_batches(self) -> list[Ints]:
        """[micro-batch] -> ascending positions."""
        found: list[list[int]] = [[] for _ in range(self._bins[-1] + 1)]
        for number, position in zip(self._bins, self._positions, strict=True):
            found[number].append(position)
        return [np.array(sorted(one), dtype=np.int64) for one in found]


_NEXT_STEP = 0.25
"""Weight of the next step's waste against this one's. Measured on groups of 8, 32 rollouts on 8 ranks: with 0 the swap
spends what the next step needs, and heavy tails idle more than without any; with 1 it swaps too little."""

_MANY_A_RANK = 8
"""From so many rollouts a rank on the partition reaches its bound, so the bound says what a swap is worth."""

_TABLE = 16_384
"""Rollouts in all the batches that are compared side by side."""

_TO_SWAP = 32
"""Groups of a side that are compared, spread over their costs, where there are more."""


def swaps_of_groups(
    units: Units, costs: Floats, fixed: Bools, go: Bools, rate: Floats, counts: Counts
) -> Iterator[tuple[Bools, float]]:
    """One chosen group for one waiting group of the same size, the most promising swap first.

    A swap is worth what the ranks idle less, by a partition largest first, and by what the next step, taken from the
    oldest that stay, will wait for its heaviest rollout.

    Args:
        units: the groups; a rollout without one is a group of its own.
        costs: [W] work of each waiting rollout.
        fixed: [U] may not be swapped away (due, or forced by the skip guarantee).
        go: [U] those chosen.
        rate: [ranks] relative speeds.
        counts: as for `partition`.

    Yields:
        ([U] those that go then, work per rate that it costs the next step or, negative, saves it).

    Complexity: O(U log U), and a fixed number of rollouts in the batches that are compared.

    Examples:
        >>> from dataclasses import replace
        >>> from stream_balancer.planning import PlanKnobs, Waiting
        >>> from stream_balancer.planning.selection import Units
        >>> costs = np.array([900.0, 100.0, 500.0, 100.0, 700.0, 100.0])  # three groups of two
        >>> waiting = replace(Waiting.of(costs), groups=np.repeat([0, 1, 2], 2))
        >>> units = Units.of(waiting, PlanKnobs(num_ranks=2, batch_size=4, max_skips=8, groups="same_batch"))
        >>> fixed, go = np.zeros(3, dtype=np.bool_), np.array([True, True, False])  # 900, and 500 + 100 + 100
        >>> choice, _ = next(swaps_of_groups(units, costs, fixed, go, np.ones(2), "free"))
        >>> np.flatnonzero(choice)  # 900, and 700 + 100 + 100
        array([0, 2])
    """
    stays = np.flatnonzero(units.ready & ~go)
    gives, takes = _spread(np.flatnonzero(go & ~fixed), units.costs), _spread(stays, units.costs)
    # [gives, takes] -> the pairs of one size: a swap of unlike sizes would change the number of rollouts
    alike = np.nonzero(units.sizes[gives][:, None] == units.sizes[takes])
    give, take = gives[alike[0]], takes[alike[1]]  # [pairs]
    num_rollouts = int(units.sizes[go].sum())
    later = _NEXT_STEP * (
        _waste_of_next(units, _without(stays, take, give), num_rollouts, rate)
        - _waste_of_next(units, stays[None], num_rollouts, rate)
    )
    # [pairs] work of the step after each swap
    work = float(units.costs[go].sum()) - units.costs[give] + units.costs[take]
    waste = np.maximum(_peaks(units, go, give, take) / rate.max() - work / rate.sum(), 0.0) + later
    if num_rollouts < _MANY_A_RANK * rate.size:
        few = np.argsort(waste, kind="stable")[: max(_TABLE // num_rollouts, 1)]
        give, take, later, work = give[few], take[few], later[few], work[few]
        waste = _finish(_batches(units, costs, go, give, take), rate, counts) - work / rate.sum() + later
    for pair in np.argsort(waste, kind="stable").tolist():
        after = go.copy()
        after[[give[pair], take[pair]]] = False, True
        yield after, float(later[pair])


def _spread(units: Ints, costs: Floats) -> Ints:
    """Not too many of them, spread over their costs; ascending."""
    if units.size <= _TO_SWAP:
        return units
    by_cost = units[np.argsort(costs[units], kind="stable")]
    return np.sort(by_cost[np.linspace(0, units.size - 1, _TO_SWAP).round().astype(np.int64)])


def _without(stays: Ints, take: Ints, give: Ints) -> Ints:
    """[pairs, stays] who stays after each swap, oldest first."""
    after: Ints = np.sort(np.where(stays == take[:, None], give[:, None], stays), axis=1)
    return after


def _waste_of_next(units: Units, stays: Ints, num_rollouts: int, rate: Floats) -> Floats:
    """[pairs] by how much the heaviest of the oldest `num_rollouts` is above the fair share; `stays`: [pairs, m]."""
    near = stays[:, :num_rollouts]
    # [pairs, near] the oldest whole units that make a batch
    goes = np.cumsum(units.sizes[near], axis=1) <= num_rollouts
    heaviest, work = (units.peaks[near] * goes).max(axis=1, initial=0.0), (units.costs[near] * goes).sum(axis=1)
    waste: Floats = np.maximum(heaviest / rate.max() - work / rate.sum(), 0.0)
    return waste


def _peaks(units: Units, go: Bools, give: Ints, take: Ints) -> Floats:
    """[pairs] the heaviest rollout of the batch after each swap."""
    peaks = np.where(go, units.peaks, 0.0)
    heaviest = int(peaks.argmax())
    second = float(np.delete(peaks, heaviest).max(initial=0.0))
    left: Floats = np.where(give == heaviest, second, peaks[heaviest])
    return np.maximum(left, units.peaks[take])


def _batches(units: Units, costs: Floats, go: Bools, give: Ints, take: Ints) -> Floats:
    """[pairs, n] costs of the batch after each swap."""
    unit_of = np.arange(go.size) if units.unit_of is None else units.unit_of
    by_unit = np.argsort(unit_of, kind="stable")
    ends = np.cumsum(units.sizes)
    chosen = by_unit[go[unit_of[by_unit]]]
    first = np.cumsum(np.where(go, units.sizes, 0)) - units.sizes  # [U] column of its first rollout, if it goes
    table: Floats = np.tile(costs[chosen], (give.size, 1))
    for batch, out, into, size in zip(table, first[give], ends[take], units.sizes[give], strict=True):
        batch[out : out + size] = costs[by_unit[into - size : into]]
    return table


def _finish(batches: Floats, rate: Floats, counts: Counts) -> Floats:
    """[pairs, n] -> [pairs] when the last rank is done, largest first onto the rank that is done first with it."""
    num_batches, n = batches.shape
    most = n if counts == "free" else -(-n // rate.size)
    loads, held = np.zeros((num_batches, rate.size)), np.zeros((num_batches, rate.size), dtype=np.int64)
    each = np.arange(num_batches)
    for cost in -np.sort(-batches, axis=1).T:
        # [pairs] the rank that is done first with the next rollout, in each batch; a rank that is full takes no more
        rank = np.where(held < most, (loads + cost[:, None]) / rate, np.inf).argmin(axis=1)
        loads[each, rank] += cost
        held[each, rank] += 1
    finish: Floats = (loads / rate).max(axis=1)
    return finish
