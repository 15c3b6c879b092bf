"""When the ranks of a layout finish, and how early they could.

Example: two ranks, rollouts of 9, 1, 3 and 7. The layout [[9], [1]] and [[3], [7]] finishes after 10 where ranks meet
once per step, and after 9 + 7 = 16 where ranks meet at every micro-batch.
"""

from __future__ import annotations

import numpy as np

from .arrays import Floats, Ints, Layout, positions_in, rounded_up
from .bounds import bound_of, lockstep_bound
from .plan import Plan, PlanKnobs, Waiting


def times(waiting: Waiting, knobs: PlanKnobs, ranks: Layout) -> tuple[Floats, float]:
    """([dp_size] work of each rank, time at which the last rank finishes). O(n).

    Examples:
        >>> waiting, ranks = Waiting.of([9, 1, 3, 7]), [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
        >>> times(waiting, PlanKnobs(2, 4), ranks)[1], times(waiting, PlanKnobs(2, 4, sync="micro_batch"), ranks)[1]
        (10.0, 16.0)
    """
    numbers = np.array([len(share) for share in ranks])
    bins = [one for share in ranks for one in share]
    bin_of = np.repeat(np.arange(len(bins)), [one.size for one in bins])
    costs = waiting.costs[positions_in(ranks)]
    work = np.bincount(bin_of, weights=costs, minlength=len(bins)).astype(np.float64)
    if knobs.padded:
        peaks = np.zeros(len(bins))
        np.maximum.at(peaks, bin_of, costs)
        work = peaks * np.bincount(bin_of, minlength=len(bins))
    table = np.zeros((max(int(numbers.max()), 1), numbers.size))  # [micro_batches, ranks]
    index = np.arange(len(bins)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    table[index, np.repeat(np.arange(numbers.size), numbers)] = work
    # A rank without rollouts runs a padding copy.
    run = np.maximum(numbers, 1) * knobs.has_micro_batches
    if knobs.equal_number:
        run[:] = run.max()
    overhead = knobs.overhead_cost * (-(-run // knobs.multiple_of) * knobs.multiple_of)
    loads = table.sum(axis=0) + overhead
    rows = float(table.max(axis=1).sum() + overhead.max())
    return loads, rows if knobs.sync == "micro_batch" else float(loads.max())


def idle_part(waiting: Waiting, knobs: PlanKnobs, ranks: Layout) -> float:
    """Part of the step's rank time that is not work."""
    loads, finish = times(waiting, knobs, ranks)
    return 1.0 - float(loads.mean()) / finish if finish else 0.0


def planned(waiting: Waiting, knobs: PlanKnobs, ranks: Layout) -> Plan:
    """The plan of this layout."""
    rows = np.sort(positions_in(ranks))
    loads, finish = times(waiting, knobs, ranks)
    torn = np.unique(waiting.groups[rows][~waiting.group_complete[rows]])
    return Plan(ranks, loads, finish, earliest(waiting, knobs, rows), tuple(torn[torn >= 0].tolist()))


def earliest(waiting: Waiting, knobs: PlanKnobs, rows: Ints) -> float:
    """Lower bound on the finish of every plan of these rows. O(n log n)."""
    costs, cap, ranks = waiting.costs[rows], knobs.max_tokens, knobs.dp_size
    bound = bound_of(costs, ranks, knobs.equal_rollouts)
    if knobs.sync == "micro_batch" and cap is not None and not knobs.padded:
        bound = max(bound, lockstep_bound(costs, waiting.lengths[rows], ranks, cap))
    if not (knobs.overhead_cost and knobs.has_micro_batches and rows.size):
        return bound
    number = 1
    if knobs.equal_number and cap is not None:
        number = -(-int(np.minimum(waiting.lengths[rows], cap).sum()) // (cap * ranks))
    return bound + rounded_up(number, knobs.multiple_of) * knobs.overhead_cost
