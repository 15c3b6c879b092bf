"""When the ranks of a layout finish, and how early they could.

Example: two ranks, rollouts of 9, 1, 3 and 7. The layout [[9], [1]] and [[3], [7]] finishes after 10 where ranks meet
once per step, and after 9 + 7 = 16 where ranks meet at every micro-batch. No layout finishes before the mean load 10.
With 900, 700 and 500, two of the three share a rank, and no layout finishes before 700 + 500 = 1200.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Floats, Ints, Layout, checked_costs, order_of, positions_in, rounded_up
from .plan import Plan, PlanKnobs, Waiting


def lower_bound(costs: ArrayLike, dp_size: int, *, equal_rollouts: bool = False) -> float:
    """The finish that no partition of the costs beats, up to rounding. O(n log n).

    The bound is the largest of the mean load and, for every i, the i + 1 lightest of the i * dp_size + 1 heaviest
    rollouts: some rank has i + 1 such rollouts. With ``equal_rollouts`` the lightest rollouts complete that rank.

    Raises:
        ValueError: a cost is negative or not finite, or there is no rank.

    Examples:
        >>> lower_bound([900, 700, 500], 2)
        1200.0
        >>> lower_bound([900, 100, 100, 100], 2, equal_rollouts=True)  # the rank of the 900 has a second rollout
        1000.0
    """
    return bound_of(checked_costs(costs, dp_size), dp_size, equal_rollouts)


def bound_of(work: Floats, dp_size: int, equal_rollouts: bool) -> float:
    """`lower_bound` of checked costs."""
    n = work.size
    sums = np.concatenate(([0.0], np.cumsum(np.sort(work)[::-1])))
    i = np.arange((n - 1) // dp_size + 1)
    together = sums[i * dp_size + 1] - sums[i * dp_size - i]
    if equal_rollouts:
        together += sums[-1] - sums[n - np.maximum(n // dp_size - 1 - i, 0)]
    return max(float(sums[-1]) / dp_size, float(together.max(initial=0.0)))


def lockstep_bound(costs: Floats, tokens: Ints, dp_size: int, max_tokens: int) -> float:
    """Time that no step beats whose ranks meet at every micro-batch, under a token cap. O(n log n).

    The bound adds, for each number j of locksteps, the costs of the 1st, the (dp_size + 1)-th, ... costliest rollout (j
    in all, while no two of the rollouts down to there fit into one micro-batch) and the mean time of the work that j
    locksteps cannot hold. The largest j-th sum is the bound.

    Examples:
        >>> costs, tokens = np.array([10.0] * 4 + [1.0] * 10), np.array([100] * 4 + [20] * 10)
        >>> lockstep_bound(costs, tokens, dp_size=2, max_tokens=100)  # 10 and 10 twice, then 5 and 5
        25.0
    """
    total = float(costs.sum())
    tokens = np.minimum(tokens, max_tokens)
    heavy = order_of(-costs)
    dense = order_of(-costs / tokens)
    dense_costs, dense_tokens = costs[dense], tokens[dense]
    before = np.cumsum(dense_tokens) - dense_tokens
    best, least = total / dp_size, 0.0
    for first in range(0, costs.size, dp_size):
        if first and np.partition(tokens[heavy[: first + 1]], 1)[:2].sum() <= max_tokens:
            break
        least += float(costs[heavy[first]])
        # j locksteps hold dp_size * max_tokens tokens each: at most the densest work.
        held = (np.clip(((first + dp_size) * max_tokens - before) / dense_tokens, 0.0, 1.0) * dense_costs).sum()
        best = max(best, least + (total - float(held)) / dp_size)
    return max(best, bound_of(costs, dp_size, False))


def times(waiting: Waiting, knobs: PlanKnobs, ranks: Layout) -> tuple[Floats, float]:
    """([dp_size] work of each rank, time at which the last rank finishes). O(n)."""
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


def planned(waiting: Waiting, knobs: PlanKnobs, ranks: Layout) -> Plan:
    """The plan of this layout."""
    rows = np.sort(positions_in(ranks))
    loads, finish = times(waiting, knobs, ranks)
    torn = np.unique(waiting.groups[rows][~waiting.group_complete[rows]])
    return Plan(ranks, loads, finish, earliest(waiting, knobs, rows), tuple(torn[torn >= 0].tolist()))


def earliest(waiting: Waiting, knobs: PlanKnobs, rows: Ints) -> float:
    """Lower bound on the finish of every plan with these rows. O(n log n)."""
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
