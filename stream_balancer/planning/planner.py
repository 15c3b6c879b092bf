"""Choice of the rollouts that go now, on which rank, in which micro-batch: the plan of a batch, from the parts that
decide each question.

    Waiting, PlanKnobs --> selection.py       who goes: what must, then who makes a step without waste
                       --> partition.py       on which rank, or
                           micro_batches.py   on which rank and in which micro-batch, under a token cap
                       --> swaps.py           the last percent: chosen against waiting rollouts
                       --> Plan

Pure: numpy in, positions out. bench/results/planning_proofs.md has the rules and the proofs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from .arrays import Bools, Ints, positions_in
from .bins_on_ranks import least_finish_bound
from .bounds import lockstep_bound, lower_bound
from .cost_order import CostOrder
from .micro_batches import form_micro_batches, in_order
from .packing import Packer
from .partition import split
from .plan import Plan, PlanKnobs, Times, Waiting, has_micro_batches
from .selection import Units, select
from .swaps import EVEN, swap_with_waiting, swaps_of_groups

_TRIED = 2
"""Choices of other groups that are laid out on ranks."""


def plan_batch(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan:
    """Choose `batch_size` of the waiting rollouts and lay them out on ranks and micro-batches.

    Fewer are chosen if `num_rollouts` are fewer, if whole groups do not add up to that number, or if the rest waits for
    siblings.
    With fewer chosen than ranks, the last ranks stay empty: the caller adds padding copies.

    Args:
        waiting: the columns; nothing is changed in them.
        knobs: taken as checked.
        num_rollouts: how many could go: a deadline or the drain may have fewer than `batch_size`.
        step: counts the batches; rotates which rank gets the heaviest share.

    Raises:
        OversizeError: a rollout is above the token cap and oversize="refuse".

    Complexity: O(n log W) with `waiting.order`, and O(W) in a few vector operations; else O(W log W). Refinement within
    a fixed work budget. Deterministic.

    Examples:
        >>> costs = np.array([500.0, 400.0, 2400.0, 300.0, 450.0, 350.0, 420.0, 380.0])  # oldest first
        >>> waiting = Waiting.of(costs)
        >>> knobs = PlanKnobs(dp_size=2, batch_size=4, max_skips=8)
        >>> plan = plan_batch(waiting, knobs, num_rollouts=4, step=0)  # the 2400 waits, and what fills its step
        >>> plan.ranks, plan.loads  # [rank][micro_batch] -> positions, [rank]
        ([[array([3, 6])], [array([5, 7])]], array([720., 730.]))
        >>> waiting.skips[2] = 8  # now it must go: a step as long as it is, filled up with the oldest
        >>> plan = plan_batch(waiting, knobs, num_rollouts=4, step=0)
        >>> plan.ranks, plan.loads
        ([[array([2])], [array([0, 4, 6])]], array([2400., 1370.]))
    """
    units = Units.of(waiting, knobs)
    fixed, go = select(waiting, units, knobs, min(knobs.batch_size, num_rollouts))
    picked = np.flatnonzero(units.of_rollouts(go))
    shares = _swapped(waiting, knobs, units, fixed, go, step)
    picked = np.unique(positions_in(shares))
    return finished(waiting, knobs, shares, earliest_finish(waiting, knobs, picked))


def _shares(waiting: Waiting, knobs: PlanKnobs, units: Units, go: Bools, step: int) -> list[list[Ints]]:
    """[rank][micro_batch] -> positions of those that go."""
    picked = np.flatnonzero(units.of_rollouts(go))
    costs = waiting.costs[picked]
    if not has_micro_batches(knobs):
        parts = split(costs, knobs.dp_size, knobs.counts, rotation=step, tolerance=knobs.tolerance)
        return [[picked[part]] if part.size else [] for part in parts]
    formed = form_micro_batches(
        waiting.lengths[picked],
        costs,
        knobs.dp_size,
        max_tokens=knobs.max_tokens_per_micro_batch,
        sync=knobs.sync,
        counts=knobs.counts,
        padded=knobs.padded,
        micro_batch_counts=knobs.micro_batch_counts,
        overhead_cost=knobs.overhead_cost,
        multiple_of=knobs.micro_batch_multiple,
        order=knobs.order,
        oversize=knobs.oversize,
        rotation=step,
    )
    return [[picked[one] for one in share] for share in formed]


def _swapped(waiting: Waiting, knobs: PlanKnobs, units: Units, fixed: Bools, go: Bools, step: int) -> list[list[Ints]]:
    """[rank][micro_batch] -> positions, after the swaps with the window."""
    shares = _shares(waiting, knobs, units, go, step)
    if knobs.padded or not all(shares):
        return shares
    sums_decide = _sums_decide(knobs, shares)
    if units.unit_of is not None:
        return _groups_swapped(waiting, knobs, units, fixed, go, step, shares) if sums_decide else shares
    order = waiting.order or CostOrder(waiting.costs)
    cap = knobs.max_tokens_per_micro_batch
    if not sums_decide:
        return _locksteps_swapped(waiting, knobs, fixed, order, shares)
    swapped = swap_with_waiting(waiting.costs, shares, fixed, order, waiting.lengths, cap)
    # the same object: no swap helped, and what follows would only say so again
    if swapped is shares:
        return shares
    swapped = [in_order(share, lambda one: float(waiting.costs[one].sum()), knobs.order) for share in swapped]
    # what evens out the work alone may not pay where ranks run different numbers of micro-batches
    return min(shares, swapped, key=lambda one: Times.of(waiting, knobs, one).idle)


def _locksteps_swapped(
    waiting: Waiting, knobs: PlanKnobs, fixed: Bools, order: CostOrder, shares: list[list[Ints]]
) -> list[list[Ints]]:
    """The same swaps in one lockstep after the other, where every rank has a micro-batch in it: each takes no longer
    than before, and wastes less."""
    shares, cap = [list(share) for share in shares], knobs.max_tokens_per_micro_batch
    for index in range(min(map(len, shares))):
        row = [[share[index]] for share in shares]
        elsewhere = np.zeros_like(fixed)
        elsewhere[positions_in(shares)] = True
        elsewhere[positions_in(row)] = False
        swapped = swap_with_waiting(waiting.costs, row, fixed, order, waiting.lengths, cap, elsewhere)
        for share, (one,) in zip(shares, swapped, strict=True):
            share[index] = one
    return shares


def _sums_decide(knobs: PlanKnobs, shares: list[list[Ints]]) -> bool:
    """True if the work of each rank, which a swap evens out, decides when the step is over: not where the peaks of
    micro-batches do, or where a rank is empty."""
    # one micro-batch a rank: meeting at every one is meeting once
    in_rows = knobs.sync == "micro_batch" and max(map(len, shares)) > 1
    return not (knobs.padded or in_rows) and all(shares)


def _groups_swapped(
    waiting: Waiting, knobs: PlanKnobs, units: Units, fixed: Bools, go: Bools, step: int, shares: list[list[Ints]]
) -> list[list[Ints]]:
    """The shares, or those of another choice of groups that wastes less."""
    # idle time, not the finish: groups differ in work, and a lighter step is no better one
    best, least = shares, Times.of(waiting, knobs, shares).idle
    # Only which choice wins is asked here, and a choice that is even enough ends the search: a finer partition would
    # cost more than it shows.
    rough = replace(knobs, tolerance=max(knobs.tolerance, EVEN - 1.0))
    swaps = swaps_of_groups(units, waiting.costs, fixed, go, knobs.dp_size, knobs.counts)
    for choice, later in islice(swaps, _TRIED):
        if least <= EVEN - 1.0:
            break
        other = _shares(waiting, rough, units, choice, step)
        times = Times.of(waiting, knobs, other)
        idle = times.idle + later / times.finish if times.finish else 0.0
        if idle < least and _sums_decide(knobs, other):
            best, least = other, idle
    return best


def earliest_finish(waiting: Waiting, knobs: PlanKnobs, picked: Ints) -> float:
    """No plan of the rollouts ``picked`` is done before this. O(n log n)."""
    costs, lengths = waiting.costs[picked], waiting.lengths[picked]
    bound = lower_bound(costs, knobs.dp_size, knobs.counts)
    cap = knobs.max_tokens_per_micro_batch
    if knobs.sync == "micro_batch" and cap is not None and not knobs.padded:
        bound = max(bound, lockstep_bound(costs, lengths, knobs.dp_size, cap))
    if not knobs.overhead_cost or not has_micro_batches(knobs):
        return bound
    packer = Packer(lengths, costs, cap, knobs.padded)
    return least_finish_bound(
        packer,
        knobs.dp_size,
        counts=knobs.micro_batch_counts,
        overhead=knobs.overhead_cost,
        multiple_of=knobs.micro_batch_multiple,
        work_bound=bound,
    )


def finished(waiting: Waiting, knobs: PlanKnobs, shares: list[list[Ints]], bound: float) -> Plan:
    """The plan with its figures; ``bound``: no plan of these rollouts is done before."""
    picked = np.unique(positions_in(shares))
    times = Times.of(waiting, knobs, shares)
    # labels of groups that leave before all their siblings have come
    flagged = waiting.groups[picked][~waiting.group_complete[picked]]
    if knobs.whole_groups:  # so are the pieces of a group that no batch can hold
        left = np.delete(waiting.groups, picked)
        flagged = np.concatenate((flagged, np.intersect1d(waiting.groups[picked], left)))
    return Plan(
        ranks=shares,
        loads=times.work + times.overheads,
        finish=times.finish,
        lower_bound=bound,
        incomplete_groups=tuple(int(label) for label in np.unique(flagged) if label >= 0),
    )
