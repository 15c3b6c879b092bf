"""The last few percent: exchange chosen rollouts with waiting ones until every rank carries the same.

With few rollouts per rank no partition of a given batch is even, yet the window holds many a rollout that would fit
better. Pure and deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .partition import Floats, Ints

    Bools = NDArray[np.bool_]

_EVEN = 1.003
"""Ranks within 0.3 % of each other are left alone: the partition alone gets there from about 8 rollouts per rank on."""


def exchange_with_waiting(costs: Floats, shares: list[Ints], fixed: Bools, pool: Ints) -> list[Ints]:
    """Bring every rank to the same load by one-for-one exchanges with the pool; counts per rank stay as they are.

    Args:
        costs: [W] work of each waiting rollout.
        shares: per rank the positions chosen.
        fixed: [W] may not be exchanged away (due, or forced by the skip guarantee).
        pool: positions not chosen that may be.

    Returns:
        The shares, ascending; the same objects if they were even already, or if no exchange made the ranks idle less.

    Complexity: O(n log W) for n chosen rollouts, in at most two passes over the ranks.
    """
    loads = [float(costs[share].sum()) for share in shares]
    chosen = np.concatenate(shares)
    if not chosen.size or not pool.size:
        return shares
    level = max(sum(loads) / len(loads), float(costs[chosen].max()))
    if max(loads) <= level * _EVEN:
        return shares
    idle_before = 1.0 - sum(loads) / len(loads) / max(loads)
    usable = pool[costs[pool] <= level]
    usable = usable[np.argsort(costs[usable], kind="stable")]
    shelf = list(zip(costs[usable].tolist(), usable.tolist(), strict=True))
    new = [share.tolist() for share in shares]
    for rank in np.argsort(loads)[::-1].tolist():
        if loads[rank] > level:
            loads[rank] = _fit(costs, new[rank], fixed, shelf, loads[rank], level)
    highest = max(loads)
    for rank in np.argsort(loads).tolist():
        if loads[rank] * _EVEN < highest:
            loads[rank] = _fit(costs, new[rank], fixed, shelf, loads[rank], highest)
    if 1.0 - sum(loads) / len(loads) / max(loads) >= idle_before:
        return shares  # bringing several hot ranks down can starve the others: then the batch was better as it was
    return [np.array(sorted(one), dtype=np.int64) for one in new]


def _fit(
    costs: Floats, share: list[int], fixed: Bools, shelf: list[tuple[float, int]], load: float, level: float
) -> float:
    """The one exchange that brings this rank closest to `level` from below; in place. -> its load."""
    best = (load if load <= level else -1.0, -1, -1)
    for place, position in enumerate(share):
        if fixed[position]:
            continue
        without = load - float(costs[position])
        at = bisect_right(shelf, (level - without, costs.size)) - 1
        if at >= 0 and without + shelf[at][0] > best[0]:
            best = (without + shelf[at][0], place, at)
    reached, place, at = best
    if place < 0:
        return load
    given = share[place]
    share[place] = shelf.pop(at)[1]
    insort(shelf, (float(costs[given]), given))
    return reached
