"""The last few percent: swap chosen rollouts with waiting ones until every rank finishes at the same time.

With few rollouts per rank no partition of a given batch is even, yet the window holds many a rollout that would fit
better. Pure and deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np

from .arrays import loads_of

if TYPE_CHECKING:
    from .arrays import Bools, Floats, Ints

_EVEN = 1.003
"""Ranks within 0.3 % of each other are left alone: the partition alone gets there from about 8 rollouts per rank on."""

_TOO_LONG = 8
"""Rollouts passed by because they would not fit under the token cap, before the next place is tried."""


def swap_with_waiting(
    costs: Floats,
    shares: list[list[Ints]],
    fixed: Bools,
    candidates: Ints,
    speeds: Floats | None = None,
    lengths: Ints | None = None,
    max_tokens: int | None = None,
) -> list[list[Ints]]:
    """Bring every rank to the same finish by one-for-one swaps with the candidates; micro-batches keep their counts.

    Args:
        costs: [W] work of each waiting rollout.
        shares: [rank][micro-batch] -> positions chosen; no rank is empty.
        fixed: [W] may not be swapped away (due, or forced by the skip guarantee).
        candidates: positions not chosen that may be.
        speeds: [ranks] relative speeds; None means all alike.
        lengths: [W] tokens of each; only with max_tokens.
        max_tokens: what comes in must leave its micro-batch within it. None = no cap.

    Returns:
        The shares, positions ascending; the same object if the finishes were even already, or if no swap made the
        ranks idle less.

    Complexity: O(n log W) for n chosen rollouts, in at most two passes over the ranks.

    Examples:
        >>> costs = np.array([900.0, 700.0, 450.0, 300.0, 200.0, 400.0])
        >>> chosen = [[np.array([0, 2])], [np.array([1, 3])]]  # [rank][micro_batch]: 1350, 1000
        >>> fixed = np.zeros(6, dtype=np.bool_)
        >>> swap_with_waiting(costs, chosen, fixed, candidates=np.array([4, 5]))  # 1100 and 1100
        [[array([0, 4])], [array([1, 5])]]
    """
    rate = [1.0] * len(shares) if speeds is None else speeds.tolist()
    chosen = np.concatenate([one for share in shares for one in share])
    if not candidates.size:
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
    usable = candidates[costs[candidates] <= level * max(rate)]
    usable = usable[np.argsort(costs[usable], kind="stable")]
    by_cost = list(zip(costs[usable].tolist(), usable.tolist(), strict=True))
    ranks = [_Rank(costs, share, load, lengths, max_tokens) for share, load in zip(shares, loads, strict=True)]

    def finish(rank: int) -> float:
        return ranks[rank].load / rate[rank]

    by_finish = sorted(range(len(ranks)), key=finish)
    for rank in reversed(by_finish):  # the latest first: they give back what the early ones lack
        if finish(rank) > level:
            ranks[rank].fit(fixed, by_cost, level * rate[rank])
    highest = max(map(finish, by_finish))
    for rank in sorted(by_finish, key=finish):
        if finish(rank) * _EVEN < highest:
            ranks[rank].fit(fixed, by_cost, highest * rate[rank])
    work = sum(rank.load for rank in ranks)
    if 1.0 - work / total_rate / max(map(finish, by_finish)) >= idle_before:
        return shares  # bringing several late ranks down can starve the others: then the batch was better as it was
    return [rank.micro_batches() for rank in ranks]


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

    def fit(self, fixed: Bools, by_cost: list[tuple[float, int]], level: float) -> None:
        """The one swap that brings this rank closest to `level` from below, if there is one."""
        costs, load = self._costs, self.load
        # a rank above the level must come down, whatever it then reaches
        best = (load if load <= level else -1.0, -1, -1)
        for place, position in enumerate(self._positions):
            if fixed[position]:
                continue
            without = load - float(costs[position])
            # costs.size is above every position, so candidates of exactly this cost are included
            at = bisect_right(by_cost, (level - without, costs.size)) - 1
            for candidate in range(at, max(at - _TOO_LONG, -1), -1):
                if without + by_cost[candidate][0] <= best[0]:
                    break
                if self._fits(place, by_cost[candidate][1]):
                    best = (without + by_cost[candidate][0], place, candidate)
                    break
        reached, place, at = best
        if place < 0:
            return
        given, taken = self._positions[place], by_cost.pop(at)[1]
        if self._room and self._lengths is not None:
            self._room[self._bins[place]] += int(self._lengths[given]) - int(self._lengths[taken])
        self._positions[place] = taken
        insort(by_cost, (float(costs[given]), given))
        self.load = reached

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
