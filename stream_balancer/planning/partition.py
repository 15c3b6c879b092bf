"""On which rank each rollout runs, so that the last rank finishes early.

    largest first   Each rollout goes to the rank that finishes first and has room (LPT, Graham 1969).
    exchanges       One rollout for one, or a move, between two ranks (exchange.py), down to the lower bound.

Example: 900, 700, 500, 400, 300, 200 on two ranks. Largest first gives 900 + 400 + 200 and 700 + 500 + 300: both 1500.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Floats, Ints, checked_costs, order_of, split_by_label
from .bounds import bound_of
from .exchange import Cells
from .plan import TOLERANCE

# Most rollouts for which several starts descend side by side. With 4 rollouts per rank one descent ends 0.7 % above the
# bound, several end 0.2 % above.
_SMALL = 48
# The lightest rollouts with this part of the total work decide no finish. Their counts are evened out.
_NOTHING = 1e-9


def split(
    costs: ArrayLike, dp_size: int, *, equal_rollouts: bool = False, rotation: int = 0, tolerance: float = TOLERANCE
) -> list[Ints]:
    """Split rollouts over ranks so that the last rank finishes early.

    Returns the ascending positions of each rank. Every position is on exactly one rank. No rank is empty if there are
    at least ``dp_size`` rollouts. Deterministic. O(n log n), plus exchanges within a fixed budget.

    Args:
        costs: [n] work of each rollout, in any unit.
        dp_size: number of ranks.
        equal_rollouts: the rollout counts of two ranks differ by at most 1.
        rotation: rotates the rank labels. Pass the step, so that no rank always has the heaviest rollout.
        tolerance: relative distance from the lower bound at which the partition is final.

    Raises:
        ValueError: a cost is negative or not finite, or there is no rank.

    Examples:
        >>> split([900, 700, 500, 400, 300, 200], dp_size=2)
        [array([0, 3, 5]), array([1, 2, 4])]
    """
    shares = shares_of(checked_costs(costs, dp_size), dp_size, equal_rollouts, tolerance)
    first = -rotation % dp_size
    return shares[first:] + shares[:first]


def shares_of(work: Floats, ranks: int, equal: bool, tolerance: float = TOLERANCE) -> list[Ints]:
    """`split` of checked costs."""
    labels = assign(work, ranks, equal, tolerance)
    assert labels is not None  # without a cap every rollout finds room
    return split_by_label(labels, ranks)


def assign(work: Floats, ranks: int, equal: bool, tolerance: float, cap: tuple[Ints, int] | None = None) -> Ints | None:
    """[n] rank of each rollout. ``cap``: [n] tokens, and the most tokens of a rank. Returns None without room."""
    n = work.size
    if ranks == 1 or not n:
        return np.zeros(n, np.int64) if cap is None or cap[0].sum() <= cap[1] else None
    # A power of two keeps every mantissa, and no sum of scaled costs overflows.
    work = work * 2.0 ** -np.ceil(np.log2(max(work.max(), 1e-300)))
    labels = largest_first(work, ranks, equal, cap)
    if labels is None or n <= ranks or not work.any():
        return labels
    least, most = (n // ranks, -(-n // ranks)) if equal else (0, n)
    cells = Cells.of(work, labels, ranks, cap, least, most)
    if n <= _SMALL:
        cells.shuffle()
    # Above 10 ranks 0.001 % per rank are enough, at most 0.05 %: 10 ms of a step of 20 s.
    cells.even_out(bound_of(work, ranks, equal) * (1.0 + max(tolerance, min(1e-5 * ranks, 5e-4))))
    return cells.labels()


def largest_first(work: Floats, bins: int, equal: bool, cap: tuple[Ints, int] | None = None) -> Ints | None:
    """[n] bin of each rollout: the least loaded bin with room, or the bin with the fewest rollouts for next to no work;
    None without room. O(n log bins) where bins have room."""
    n = work.size
    quota, extra = divmod(n, bins) if equal else (n, 0)
    order = order_of(-work)
    light = n - int(np.searchsorted(np.cumsum(work[order[::-1]]), _NOTHING * work.sum(), side="right"))
    cost, size = work.tolist(), [0] * n if cap is None else cap[0].tolist()
    room, held, labels = [0 if cap is None else cap[1]] * bins, [0] * bins, np.zeros(n, np.int64)
    # Ties go to the bin with fewer rollouts: far below any cost, far above the rounding error of the sums.
    tie = work.sum() * 1e-9 / n
    heap = [(0.0, one) for one in range(bins)]
    for place, i in enumerate(order.tolist()):
        if place == light:
            heap = [(float(held[one]), one) for _, one in heap]
            heapq.heapify(heap)
        full = []
        while heap:
            load, one = heap[0]
            if held[one] >= quota + (extra > 0):
                heapq.heappop(heap)  # the bin takes no more
            elif size[i] > room[one]:
                full.append(heapq.heappop(heap))  # a smaller rollout may still fit
            else:
                break
        if not heap:
            return None
        heapq.heapreplace(heap, (load + (cost[i] + tie if place < light else 1.0), one))
        held[one] += 1
        extra -= held[one] > quota
        room[one] -= size[i]
        labels[i] = one
        for entry in full:
            heapq.heappush(heap, entry)
    return labels
