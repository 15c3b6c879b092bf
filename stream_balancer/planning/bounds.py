"""How early can the last rank finish at best? Lower bounds that hold for every partition.

Proofs in docs/planning_proofs.md.

A search that has reached the bound stops, and what a batch idles beyond it is called avoidable. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays import check_ranks, checked_costs, checked_speeds

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .arrays import Counts, Floats


def lower_bound(costs: ArrayLike, num_ranks: int, counts: Counts = "free", speeds: ArrayLike | None = None) -> float:
    """A finish time that no partition of `costs` can beat. O(n log n).

    The largest of: the mean load; for every i the i+1 smallest of the i*num_ranks+1 largest rollouts (pigeonhole
    principle); with speeds, the j largest rollouts over the j fastest ranks; with equal counts, the j largest rollouts
    together with the smallest ones that must lie beside them. Integral costs make it integral.

    Raises:
        ValueError: as for `partition`.

    Examples:
        >>> lower_bound([900, 700, 500, 500, 300, 100], 2)  # the mean load: 3000 / 2
        1500.0
        >>> lower_bound([1800, 700, 500, 500, 300, 100], 2)  # 3900 / 2, for all of them are needed to match the longest
        1950.0
        >>> lower_bound([900, 700, 500], 2)  # two of three share a rank: 700 + 500 at least
        1200.0
        >>> lower_bound([900, 100, 100, 100], 2, counts="equal")  # the longest and one more
        1000.0
    """
    work = checked_costs(costs)
    check_ranks(num_ranks, counts)
    return lower_bound_of(work, num_ranks, counts, checked_speeds(speeds, num_ranks))


def lower_bound_of(work: Floats, num_ranks: int, counts: Counts, rate: Floats | None) -> float:
    """`lower_bound` for arguments taken as checked."""
    n = work.size
    if n == 0:
        return 0.0
    descending = np.sort(work)[::-1]
    prefix = running_sums(descending)
    total = float(descending.sum())
    if rate is None:
        bound = max(total / num_ranks, float(prefix[1]), pigeonhole_bound(prefix, num_ranks))
        if counts == "equal" and n >= num_ranks:
            bound = max(bound, _equal_counts_bound(prefix, num_ranks))
        # float64 holds integers exactly up to 2**52: the finish of integral costs is integral, so round up
        if total < 2.0**52 and bool((work == np.floor(work)).all()):
            return float(np.ceil(bound * (1.0 - 1e-14)))
    else:
        fastest = np.cumsum(np.sort(rate)[::-1])
        j = np.arange(1, min(n, num_ranks) + 1)
        bound = max(total / float(fastest[-1]), float((prefix[j] / fastest[j - 1]).max()))
    return bound * (1.0 - 4e-16 * n)  # sums of n floats are off by at most n units in the last place


def running_sums(costs: Floats) -> Floats:
    """[n] -> [n+1]: entry j is the sum of the first j. O(n)."""
    return np.concatenate(([0.0], np.cumsum(costs)))


def pigeonhole_bound(prefix: Floats, num_ranks: int) -> float:
    """Of the i * num_ranks + 1 largest rollouts, i + 1 share a rank: no step is shorter than the lightest i + 1.

    `prefix`: `running_sums` of the costs, largest first. O(n / num_ranks).
    """
    i = np.arange(1, (prefix.size - 2) // num_ranks + 1)
    return float((prefix[i * num_ranks + 1] - prefix[i * num_ranks - i]).max(initial=0.0))


def _equal_counts_bound(prefix: Floats, num_ranks: int) -> float:
    """Equal counts: the j largest sit on m <= j ranks, with m*q - j others at least, which weigh no less than the
    smallest.

    Those m ranks together carry `top(j) + smallest(m*q - j)`, so one of them carries an m-th of it; which m is unknown,
    so the least over m counts. Any j gives a valid bound; all up to 32 and then a geometric sample are tried.
    O(num_ranks).
    """
    n = prefix.size - 1
    q = n // num_ranks
    smallest = prefix[-1] - prefix[::-1]  # smallest[s]: the s smallest together
    best = 0.0
    tries = sorted({*range(1, min(num_ranks, 32) + 1), *(min(num_ranks, int(1.3**e)) for e in range(13, 30))})
    ranks = np.arange(1, num_ranks + 1)
    for j in tries:
        m = ranks[-(-j // (q + 1)) - 1 : j]  # fewer ranks than this cannot hold j rollouts
        carried = (prefix[j] + smallest[np.maximum(m * q - j, 0)]) / m
        best = max(best, float(carried.min()))
    return best
