"""On which rank: costs onto ranks, so that the last rank finishes as early as possible.

Pure: numpy in, index arrays out; a work budget instead of a clock, so the same input always gives the same answer.

    costs --> lower_bound          no partition can finish before this (bounds.py)
          --> greedy start         largest first onto the rank that would finish first (LPT, Graham 1969)
          --> exchanges            until the bound, or until the work budget is spent (cells.py)
"""

from __future__ import annotations

import heapq
from functools import cache, partial

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Bools, Counts, Floats, Ints, check_ranks, checked_costs, split_by_label
from .bounds import lower_bound_of
from .cells import Cells, Limit, slots_of

TOLERANCE = 1e-4
"""How far (relatively) above the lower bound a search may stop."""

_BUDGET, _BUDGET_EACH = 30_000, 400
"""Elementary operations that a search may spend: so many, and so many more for every rollout."""

_SMALL, _SMALL_BUDGET = 48, 45_000
"""Up to so many rollouts one descent often ends in a poor partition, and many are affordable side by side: so many
operations for all of them together."""

_COPIES_WORK = 6_000
"""Places in all the copies that descend side by side, times ranks."""


def split(
    costs: ArrayLike,
    dp_size: int,
    counts: Counts = "free",
    *,
    rotation: int = 0,
    tolerance: float = TOLERANCE,
) -> list[Ints]:
    """Split `costs` over `dp_size` ranks, minimising the latest finish.

    Args:
        costs: [n] work of each rollout, finite and >= 0, in any unit.
        dp_size: number of ranks, >= 1.
        counts: "free", or "equal": the number of rollouts per rank differs by at most one.
        rotation: rotates the rank labels (pass the step), so that no rank is always the one with the heaviest rollout.
        tolerance: stop this far (relatively) above the lower bound. 0.01 % is 0.1 ms in a step of a second; 1e-6 takes
            up to five times as long.

    Returns:
        One int64 array of ascending positions into `costs` per rank; every position is in exactly one of them.
        No rank is empty if n >= dp_size; with fewer rollouts than ranks, n ranks get one each.

    Raises:
        ValueError: a cost is negative or not finite, or dp_size < 1.

    Complexity: O(n log n) plus exchanges bounded by a fixed budget of elementary operations.

    Examples:
        >>> costs = [900, 700, 500, 400, 300, 200]
        >>> split(costs, dp_size=2)  # 900 + 400 + 200 and 700 + 500 + 300: both 1500
        [array([0, 3, 5]), array([1, 2, 4])]
        >>> split([1800, 500, 300, 200, 200, 100], dp_size=2)  # an outlier: 1800 and 1300, and rank 1 waits
        [array([0]), array([1, 2, 3, 4, 5])]
    """
    work = checked_costs(costs)
    check_ranks(dp_size, counts)
    # The greedy start puts the heaviest rollout on the first rank. Unrotated, one and the same rank would hold the
    # longest rollout in every step, and be the one near its memory limit.
    label_of = (np.arange(dp_size) + rotation) % dp_size  # [dp_size] working rank -> rank of the answer
    labels = _assign(work, dp_size, counts, tolerance)
    return split_by_label(label_of[labels], dp_size)


_NOTHING = 1e-9
"""Rollouts that weigh nothing: the lightest, which have this share of the work together."""


def _assign(work: Floats, dp_size: int, counts: Counts, tolerance: float) -> Ints:
    """The partition as [n] working-rank labels; the arguments are taken as checked."""
    # Scaled to about 1, so that no sum overflows and no difference underflows. A power of two: every mantissa stays as
    # it is, and integral costs stay exact.
    work = work * 2.0 ** -np.ceil(np.log2(max(float(work.max(initial=0.0)), 1e-300)))
    heavy = _not_negligible(work)
    if counts == "equal" or heavy.all():
        return _search(work, dp_size, counts, tolerance)
    # In the search they would be in the way: whoever is done first would get them all.
    labels = np.empty(work.size, dtype=np.int64)
    labels[heavy] = _search(work[heavy], dp_size, counts, tolerance)
    # each of the others to a rank that has the fewest
    held = np.bincount(labels[heavy], minlength=dp_size).tolist()
    fewest = sorted(zip(held, range(dp_size), strict=True))
    for one in np.flatnonzero(~heavy).tolist():
        number, labels[one] = fewest[0]
        heapq.heapreplace(fewest, (number + 1, fewest[0][1]))
    return labels


def _not_negligible(work: Floats) -> Bools:
    """[n] rollouts that weigh something; all of them, if none does."""
    # zero costs, and what is so small beside the rest that moving it changes no finish
    nothing = _NOTHING * float(work.sum())
    if not nothing or float(work.min()) > nothing:
        return np.ones(work.size, dtype=np.bool_)
    ascending = np.sort(work)
    heaviest = float(ascending[np.searchsorted(np.cumsum(ascending), nothing, side="right") - 1])
    return work > heaviest


def _search(work: Floats, dp_size: int, counts: Counts, tolerance: float) -> Ints:
    """The same, whatever they weigh."""
    if dp_size == 1 or work.size == 0:
        return np.zeros(work.size, dtype=np.int64)
    # one each is the best there is: nothing to search
    if work.size <= dp_size:
        return _largest_first(work, dp_size, "equal")
    # Not Karmarkar-Karp: with equal counts every rank keeps one of each dp_size neighbours in sorted order, so the
    # spread of the largest ones never cancels (12-22 % above the bound at 4 to 8 rollouts a rank; this: below 0.2 %).
    labels = _largest_first(work, dp_size, counts)
    bound = lower_bound_of(work, dp_size, counts)
    return _improved(labels, work, dp_size, counts, bound * (1.0 + tolerance)) if bound > 0.0 else labels


def _improved(labels: Ints, work: Floats, dp_size: int, counts: Counts, target: float) -> Ints:
    """Labels after exchanges between ranks, until the latest finish is at the target or the work budget is spent."""
    even, ones = counts == "equal", np.ones(work.size, dtype=np.int64)
    least, most = work.size // dp_size, -(-work.size // dp_size)
    # no exchange that helps leaves a rank empty; nor is a count changed if all have as many
    limits = [] if not even or least == most else [Limit(ones, least, most)]
    slots, search = slots_of(labels, dp_size), partial(Cells, even=even, limits=limits)
    if work.size <= _SMALL:
        copies = search(work, _shuffled(slots, dp_size), dp_size)
        copies.improve(target, _SMALL_BUDGET)
        slots = copies.best()
    cells = search(work, slots, dp_size)
    cells.improve(target, _BUDGET + _BUDGET_EACH * work.size)
    return cells.cell_of()


def _shuffled(slots: Ints, dp_size: int) -> Ints:
    """[copies * dp_size, width] copies that start unlike: each column of slots is shuffled over the ranks, so counts
    stay as they are."""
    copies = max(_COPIES_WORK // (slots.size * dp_size), 1)
    return np.take_along_axis(slots[None], _shuffles(copies, *slots.shape), axis=1).reshape(-1, slots.shape[1])


@cache
def _shuffles(copies: int, dp_size: int, width: int) -> Ints:
    """[copies, dp_size, width] from where each place comes. The generator is seeded: the same input gives the same
    answer."""
    shuffle = np.random.default_rng(0).random((copies, dp_size, width)).argsort(axis=1)
    # the first stays as it is: shuffling never makes the answer worse
    shuffle[0] = np.arange(dp_size)[:, None]
    return shuffle


def _largest_first(work: Floats, dp_size: int, counts: Counts) -> Ints:
    """LPT with a heap: each to the rank with least work; under equal counts a full
    rank leaves the heap. No rank is empty if there are rollouts enough. O(n log dp_size).

    Every rollout counts a little more than its cost, so that ties (zero costs above all) go to the rank with fewer.
    """
    n = work.size
    order = np.argsort(-work, kind="stable")
    # far below any cost, far above the rounding of the sums
    tie_breaker = (float(work.sum()) or 1.0) * 1e-9 / n
    quota, extra = divmod(n, dp_size) if counts == "equal" else (n, 0)
    heap = [(0.0, rank) for rank in range(dp_size)]
    held, chosen = [0] * dp_size, []
    for cost in (work[order] + tie_breaker).tolist():
        done, rank = heap[0]
        while held[rank] >= quota + (extra > 0):  # a rank at the quota waits for the spare places to run out
            heapq.heappop(heap)
            done, rank = heap[0]
        held[rank] += 1
        if held[rank] > quota:
            extra -= 1
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (done + cost, rank))
        chosen.append(rank)
    labels = np.empty(n, dtype=np.int64)
    labels[order] = chosen
    return labels
