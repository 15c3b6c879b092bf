"""The last percent: swaps between rollouts that go and rollouts that wait, so that all ranks finish together.

With few rollouts per rank no partition of a given step is even, but the window holds rollouts that fit better.

    swap_rollouts   Rank by rank: late ranks come down to the mean load, then early ranks rise to the latest.
    swap_groups     One whole group for one: all pairs are laid out side by side, largest first.

Example: ranks with 900 + 450 and 700 + 300, while 200 and 400 wait. 450 for 200 and 300 for 400 give 1100 and 1100.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import Bools, Floats, Ints, Layout, order_of, positions_in, sorted_by
from .choice import Units

EVEN = 1.003
"""Ranks within 0.3 % of each other are left alone."""

# Candidates per slot. Also a limit on greed: without it, swaps take the heavy rollouts that the step of the next
# outlier needs (measured: 5 -> 10 % idle, equal rollout counts, one trace).
_LOOKED_AT = 16
# Weight of the next step's waste against this step's. With 0, swaps spend the rollouts that the next step needs.
_NEXT_STEP = 0.25
# Pairs of groups that are laid out side by side, and pairs that are offered as other choices.
_PAIRS, _TRIED = 512, 2


def swap_rollouts(costs: Floats, ranks: Layout, fixed: Bools, may_come: Bools, cap: tuple[Ints, int]) -> Layout:
    """The ranks after one-for-one swaps with waiting rollouts; counts stay. The same list if no swap helps.

    ``fixed``: [W] the rollout must go. ``may_come``: [W] the rollout waits, and is in no other lockstep. ``cap``: [W]
    tokens, and the most tokens of a micro-batch.
    """
    chosen = positions_in(ranks)
    sizes = [one.size for share in ranks for one in share]
    bin_of = np.repeat(np.arange(len(sizes)), sizes)
    rank = np.repeat(np.arange(len(ranks)), list(map(len, ranks)))[bin_of]
    load = np.bincount(rank, weights=costs[chosen])
    mean = load.mean()
    level = max(mean, costs[chosen].max())
    pool = np.flatnonzero(may_come & (costs <= level))
    # Where one rollout sets the time, a swap spends heavy rollouts that the next outlier's step needs.
    if load.max() <= level * EVEN or not pool.size or level > EVEN * mean:
        return ranks
    before = mean / load.max()
    pool = sorted_by(pool, costs)
    prices = costs[pool]
    tokens, most = cap
    held = np.bincount(bin_of, weights=tokens[chosen])
    loose = np.flatnonzero(~fixed[chosen])
    slots = np.split(loose, np.searchsorted(rank[loose], np.arange(1, len(ranks))))

    def fit(one: int, top: float) -> None:
        """Make the swap that brings this rank nearest to the top from below."""
        nonlocal pool, prices
        mine = slots[one]
        if not mine.size or not pool.size:
            return
        without = load[one] - costs[chosen[mine]]
        place = np.searchsorted(prices, top - without, side="right")[:, None] - 1 - np.arange(_LOOKED_AT)
        come = pool[np.maximum(place, 0)]
        here = bin_of[mine]
        fits = (place >= 0) & ((held[here] - tokens[chosen[mine]])[:, None] + tokens[come] <= most)
        after = np.where(fits, without[:, None] + costs[come], -1.0)
        i, j = divmod(int(after.argmax()), _LOOKED_AT)
        # A rank above the top comes down, whatever load it reaches.
        if after[i, j] > (load[one] if load[one] <= top else -1.0):
            held[here[i]] += tokens[come[i, j]] - tokens[chosen[mine[i]]]
            pool, prices = np.delete(pool, place[i, j]), np.delete(prices, place[i, j])
            load[one], chosen[mine[i]] = after[i, j], come[i, j]

    for one in order_of(-load).tolist():
        if load[one] > level:
            fit(one, level)
    top = load.max()
    for one in order_of(load).tolist():
        if load[one] * EVEN < top:
            fit(one, top)
    # Several late ranks that come down can starve the early ones.
    if load.mean() / load.max() <= before:
        return ranks
    bins = iter(np.split(chosen, np.cumsum(sizes)[:-1]))
    return [[np.sort(next(bins)) for _ in share] for share in ranks]


def swap_groups(
    units: Units, costs: Floats, fixed: Bools, go: Bools, ranks: int, most: int
) -> Iterator[tuple[Bools, float]]:
    """Swaps of one group for a group of the same size, best first: ([U] units that go, waste added to the next step).

    A swap is rated by the time that ranks wait in a largest-first partition, plus the time that the next step (of the
    oldest groups that stay) waits for its heaviest rollout. ``most``: rollouts of a rank.
    """
    stays = np.flatnonzero(units.ready & ~go)
    give, take = np.nonzero((go & ~fixed)[:, None] & (units.ready & ~go) & (units.sizes[:, None] == units.sizes))
    rows = units.rows(go)
    work = units.costs[go].sum() - units.costs[give] + units.costs[take]
    later = _NEXT_STEP * _next_waste(units, stays, give, take, rows.size, ranks)
    # The heaviest rollout tells which swaps may help; the layout tells which do.
    two = np.sort(units.peaks[go])[-2:]
    peak = np.maximum(np.where(units.peaks[give] == two[-1], two[0], two[-1]), units.peaks[take])
    some = order_of(np.maximum(peak - work / ranks, 0.0) + later)[:_PAIRS]
    give, take, later, work = give[some], take[some], later[some], work[some]
    table = np.tile(costs[rows], (give.size, 1))
    for batch, out, into in zip(table, give.tolist(), take.tolist(), strict=True):
        batch[units.unit_of[rows] == out] = costs[units.unit_of == into]
    waste = _finish(table, ranks, most) - work / ranks + later
    for pair in order_of(waste)[:_TRIED].tolist():
        after = go.copy()
        after[[give[pair], take[pair]]] = False, True
        yield after, float(later[pair])


def _next_waste(units: Units, stays: Ints, give: Ints, take: Ints, number: int, ranks: int) -> Floats:
    """[pairs] additional time that the next step waits for its heaviest rollout after each swap."""

    def waste(rows: Ints) -> Floats:
        near = rows[:, :number]
        goes = np.cumsum(units.sizes[near], axis=1) <= number
        mean = (units.costs[near] * goes).sum(axis=1) / ranks
        waits: Floats = np.maximum((units.peaks[near] * goes).max(axis=1, initial=0.0) - mean, 0.0)
        return waits

    return waste(np.sort(np.where(stays == take[:, None], give[:, None], stays), axis=1)) - waste(stays[None])


def _finish(batches: Floats, ranks: int, most: int) -> Floats:
    """[pairs, n] costs -> [pairs] finish of the last rank, largest first, in all batches side by side."""
    each = np.arange(batches.shape[0])
    loads, held = np.zeros((each.size, ranks)), np.zeros((each.size, ranks), np.int64)
    for cost in -np.sort(-batches, axis=1).T:
        rank = np.where(held < most, loads, np.inf).argmin(axis=1)
        loads[each, rank] += cost
        held[each, rank] += 1
    finish: Floats = loads.max(axis=1)
    return finish
