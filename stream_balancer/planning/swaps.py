"""The last few percent: swap chosen rollouts with waiting ones until every rank finishes at the same time.

With few rollouts per rank no partition of a given batch is even, yet the window holds many a rollout that would fit
better. Pure and deterministic.
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

    from .arrays import Bools, Floats, Ints

_EVEN = 1.003
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
    if before <= level * _EVEN:
        return shares
    idle_before = 1.0 - sum(loads) / total_rate / before
    # heavier ones would make some rank later than all are now
    shelf = _Shelf(costs, order, chosen, heaviest=level * max(rate))
    ranks = [_Rank(costs, share, load, lengths, max_tokens) for share, load in zip(shares, loads, strict=True)]

    def finish(rank: int) -> float:
        return ranks[rank].load / rate[rank]

    by_finish = sorted(range(len(ranks)), key=finish)
    for rank in reversed(by_finish):  # the latest first: they give back what the early ones lack
        if finish(rank) > level:
            ranks[rank].fit(fixed, shelf, level * rate[rank])
    highest = max(map(finish, by_finish))
    for rank in sorted(by_finish, key=finish):
        if finish(rank) * _EVEN < highest:
            ranks[rank].fit(fixed, shelf, highest * rate[rank])
    work = sum(rank.load for rank in ranks)
    if 1.0 - work / total_rate / max(map(finish, by_finish)) >= idle_before:
        return shares  # bringing several late ranks down can starve the others: then the batch was better as it was
    return [rank.micro_batches() for rank in ranks]


class _Shelf:
    """Rollouts that may come in, by cost; of equal ones the older first.

    An array that stays as it is, what was taken from it, and the few that came back: no swap moves the others.
    """

    def __init__(self, costs: Floats, order: CostOrder, chosen: Ints, heaviest: float) -> None:
        may = costs <= heaviest  # [W]
        may[chosen] = False
        ascending = order.ascending()
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
        self._max_tokens = max_tokens
        self._positions = [position for one in share for position in one.tolist()]
        self._bins = [number for number, one in enumerate(share) for _ in range(one.size)]
        self._room = (
            []  # tokens that each micro-batch could still take
            if lengths is None or max_tokens is None
            else [max_tokens - int(lengths[one].sum()) for one in share]
        )

    def fit(self, fixed: Bools, shelf: _Shelf, level: float) -> None:
        """The one swap that brings this rank closest to `level` from below, if there is one."""
        costs = self._costs[self._positions]
        without = self.load - costs  # [places] of this rank
        gaps = level - without
        # a rank above the level must come down, whatever it then reaches
        best, swap = self.load if self.load <= level else -1.0, None
        places = zip(self._positions, without.tolist(), gaps.tolist(), shelf.tops(gaps), strict=True)
        for place, (position, rest, gap, top) in enumerate(places):
            if fixed[position]:
                continue
            for cost, candidate in islice(shelf.down_from(top, gap), _TOO_LONG):
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
        shelf.swap(taken, (float(self._costs[given]), given))
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
