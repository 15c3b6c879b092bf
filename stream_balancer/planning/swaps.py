"""The last few percent: swap what is chosen with what waits, so that every rank finishes at the same time.

With few rollouts per rank no partition of a given batch is even, yet the window holds many a rollout that would fit
better.

    swap_with_waiting    rollouts, rank by rank
    swaps_of_groups      groups with rollouts on any ranks: one group for one, all pairs side by side

Pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import Bools, Counts, Floats, Ints
from .cost_order import CostOrder
from .selection import Units

EVEN = 1.003
"""Ranks within 0.3 % of each other are left alone: the partition alone gets there from about 8 rollouts per rank on."""

_LOOKED_AT = 16
"""Waiting rollouts of the nearest costs that are looked at for each place: the costliest that is not taken and fits
under the token cap comes in."""


def swap_with_waiting(
    costs: Floats,
    shares: list[list[Ints]],
    fixed: Bools,
    order: CostOrder,
    lengths: Ints | None = None,
    max_tokens: int | None = None,
    elsewhere: Bools | None = None,
) -> list[list[Ints]]:
    """Bring every rank to the same finish by one-for-one swaps with the candidates; micro-batches keep their counts.

    Args:
        costs: [W] work of each waiting rollout.
        shares: [rank][micro-batch] -> positions chosen; no rank is empty.
        fixed: [W] may not be swapped away (due, or forced by the skip guarantee).
        order: of all W by cost; whoever is not chosen may be.
        lengths: [W] tokens of each; only with max_tokens.
        max_tokens: what comes in must leave its micro-batch within it. None = no cap.
        elsewhere: [W] may not come in: goes in another lockstep. None = nobody.

    Returns:
        The shares, positions ascending; the same object if the finishes were even already, or if no swap made the
        ranks idle less.

    Complexity: O(1) where the finishes are even; else O(W) once, to set those not chosen side by side, and O(n log W)
    for n chosen rollouts, in at most two passes over the ranks.

    Examples:
        >>> from stream_balancer.planning.cost_order import CostOrder
        >>> costs = np.array([900.0, 700.0, 450.0, 300.0, 200.0, 400.0])
        >>> chosen = [[np.array([0, 2])], [np.array([1, 3])]]  # [rank][micro_batch]: 1350, 1000
        >>> fixed = np.zeros(6, dtype=np.bool_)
        >>> swap_with_waiting(costs, chosen, fixed, CostOrder(costs))  # 1100 and 1100
        [[array([0, 4])], [array([1, 5])]]
    """
    step = _StepLayout(costs, shares, fixed, None if lengths is None or max_tokens is None else (lengths, max_tokens))
    loads, chosen = step.loads(), step.positions
    if chosen.size == costs.size:
        return shares
    # no choice of the same work ends earlier than its mean, or than its heaviest rollout
    level = max(float(loads.mean()), float(costs[chosen].max()))
    if float(loads.max()) <= level * EVEN:
        return shares
    idle_before = 1.0 - float(loads.mean() / loads.max())
    # by cost, so that each place's best answer is found by bisection; heavier ones would make some rank later than all
    # are now
    pool = order.ascending()
    pool = pool[costs[pool] <= level]
    if elsewhere is not None:
        pool = pool[~elsewhere[pool]]
    # the latest first: they give back what the early ones lack
    latest_first = np.argsort(-loads, kind="stable")
    step.fit(latest_first[loads[latest_first] > level], pool, level)
    loads = step.loads()
    highest, earliest_first = float(loads.max()), np.argsort(loads, kind="stable")
    step.fit(earliest_first[loads[earliest_first] * EVEN < highest], pool, highest)
    loads = step.loads()
    if 1.0 - float(loads.mean() / loads.max()) >= idle_before:
        return shares  # bringing several late ranks down can starve the others: then the batch was better as it was
    return step.shares()


class _StepLayout:
    """Rollouts of a step side by side, rank by rank, and their micro-batches."""

    def __init__(self, costs: Floats, shares: list[list[Ints]], fixed: Bools, cap: tuple[Ints, int] | None) -> None:
        """``cap``: ([W] tokens, most of a micro-batch); None: any number."""
        self._costs, self._fixed, self._cap = costs, fixed, cap
        sizes = [one.size for share in shares for one in share]
        self.positions: Ints = np.concatenate([one for share in shares for one in share])
        self._numbers = [len(share) for share in shares]
        self._ends, self._bin_of = np.cumsum(sizes), np.repeat(np.arange(len(sizes)), sizes)
        self._rank_of = np.repeat(np.arange(len(shares)), [sum(map(len, share)) for share in shares])

    def loads(self) -> Floats:
        """[dp_size]"""
        loads = np.bincount(self._rank_of, weights=self._costs[self.positions], minlength=len(self._numbers))
        return loads.astype(np.float64)

    def shares(self) -> list[list[Ints]]:
        """[rank][micro-batch] -> ascending positions."""
        bins = iter([np.sort(one) for one in np.split(self.positions, self._ends[:-1])])
        return [[next(bins) for _ in range(number)] for number in self._numbers]

    def fit(self, ranks: Ints, pool: Ints, level: float) -> None:
        """Bring each of these ranks in turn as close to the level from below as one swap with the rollouts that wait
        can. ``pool``: whoever may come in, by cost, and those that go already, who are passed by until they are given
        away."""
        waits = np.ones(self._costs.size, dtype=np.bool_)
        waits[self.positions] = False
        loads, costs, rank_of = self.loads(), self._costs[self.positions], self._rank_of
        without = loads[rank_of] - costs  # [n]
        # [n, looked at] what may come in where each goes, at most up to the level, and what the rank has then
        place = np.searchsorted(self._costs[pool], level - without, side="right")[:, None]
        place = place - 1 - np.arange(_LOOKED_AT)
        incoming = pool[np.maximum(place, 0)]
        load = np.where(
            (place >= 0) & ~self._fixed[self.positions][:, None], without[:, None] + self._costs[incoming], -1
        )
        if self._cap is not None:
            lengths, most = self._cap
            held = np.bincount(self._bin_of, weights=lengths[self.positions])[self._bin_of]
            load[(held - lengths[self.positions])[:, None] + lengths[incoming] > most] = -1.0
        ends = np.searchsorted(rank_of, ranks, side="right").tolist()
        for rank, first, end in zip(ranks.tolist(), np.searchsorted(rank_of, ranks).tolist(), ends, strict=True):
            after = np.where(waits[incoming[first:end]], load[first:end], -1.0)
            row, column = divmod(int(after.argmax()), _LOOKED_AT)
            # a rank above the level must come down, whatever it then reaches
            if after[row, column] > (loads[rank] if loads[rank] <= level else -1.0):
                taken = incoming[first + row, column]
                waits[self.positions[first + row]], waits[taken] = True, False
                self.positions[first + row] = taken


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
    units: Units, costs: Floats, fixed: Bools, go: Bools, dp_size: int, counts: Counts
) -> Iterator[tuple[Bools, float]]:
    """Swaps of a chosen group for a waiting group of the same size, the most promising swap first.

    A swap is worth what the ranks idle less, by a partition largest first, and by what the next step, taken from the
    oldest that stay, will wait for its heaviest rollout.

    Args:
        units: the groups; a rollout without one is a group of its own.
        costs: [W] work of each waiting rollout.
        fixed: [U] may not be swapped away (due, or forced by the skip guarantee).
        go: [U] those chosen.
        dp_size: ranks.
        counts: as for `partition`.

    Yields:
        ([U] those that go then, time that it costs the next step or, negative, saves it).

    Complexity: O(U log U), and a fixed number of rollouts in the batches that are compared.

    Examples:
        >>> from dataclasses import replace
        >>> from stream_balancer.planning import PlanKnobs, Waiting
        >>> from stream_balancer.planning.selection import Units
        >>> costs = np.array([900.0, 100.0, 500.0, 100.0, 700.0, 100.0])  # three groups of two
        >>> waiting = replace(Waiting.of(costs), groups=np.repeat([0, 1, 2], 2))
        >>> units = Units.of(waiting, PlanKnobs(dp_size=2, batch_size=4, max_skips=8, whole_groups=True))
        >>> fixed, go = np.zeros(3, dtype=np.bool_), np.array([True, True, False])  # 900, and 500 + 100 + 100
        >>> choice, _ = next(swaps_of_groups(units, costs, fixed, go, 2, "free"))
        >>> np.flatnonzero(choice)  # 900, and 700 + 100 + 100
        array([0, 2])
    """
    # all pairs of two short lists, by their sums first: a partition of each would cost more than it finds
    stays = np.flatnonzero(units.ready & ~go)
    gives, takes = _spread(np.flatnonzero(go & ~fixed), units.costs), _spread(stays, units.costs)
    # [gives, takes] -> the pairs of one size: a swap of unlike sizes would change the number of rollouts
    alike = np.nonzero(units.sizes[gives][:, None] == units.sizes[takes])
    give, take = gives[alike[0]], takes[alike[1]]  # [pairs]
    num_rollouts = int(units.sizes[go].sum())
    later = _NEXT_STEP * (
        _waste_of_next(units, _without(stays, take, give), num_rollouts, dp_size)
        - _waste_of_next(units, stays[None], num_rollouts, dp_size)
    )
    # [pairs] work of the step after each swap
    work = float(units.costs[go].sum()) - units.costs[give] + units.costs[take]
    waste = np.maximum(_peaks(units, go, give, take) - work / dp_size, 0.0) + later
    if num_rollouts < _MANY_A_RANK * dp_size:
        few = np.argsort(waste, kind="stable")[: max(_TABLE // num_rollouts, 1)]
        give, take, later, work = give[few], take[few], later[few], work[few]
        waste = _finish(_batches(units, costs, go, give, take), dp_size, counts) - work / dp_size + later
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


def _waste_of_next(units: Units, stays: Ints, num_rollouts: int, dp_size: int) -> Floats:
    """[pairs] by how much the heaviest of the oldest `num_rollouts` is above the fair share; `stays`: [pairs, m]."""
    near = stays[:, :num_rollouts]
    # [pairs, near] the oldest whole units that make a batch
    goes = np.cumsum(units.sizes[near], axis=1) <= num_rollouts
    heaviest, work = (units.peaks[near] * goes).max(axis=1, initial=0.0), (units.costs[near] * goes).sum(axis=1)
    waste: Floats = np.maximum(heaviest - work / dp_size, 0.0)
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


def _finish(batches: Floats, dp_size: int, counts: Counts) -> Floats:
    """[pairs, n] -> [pairs] when the last rank is done, largest first onto the rank that is done first with it."""
    num_batches, n = batches.shape
    most = n if counts == "free" else -(-n // dp_size)
    loads, held = np.zeros((num_batches, dp_size)), np.zeros((num_batches, dp_size), dtype=np.int64)
    each = np.arange(num_batches)
    for cost in -np.sort(-batches, axis=1).T:
        # [pairs] the rank that is done first with the next rollout, in each batch; a rank that is full takes no more
        rank = np.where(held < most, loads + cost[:, None], np.inf).argmin(axis=1)
        loads[each, rank] += cost
        held[each, rank] += 1
    finish: Floats = loads.max(axis=1)
    return finish
