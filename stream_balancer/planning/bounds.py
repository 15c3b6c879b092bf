"""How early can the last rank finish at best? Lower bounds that hold for every partition.

Proofs in bench/results/planning_proofs.md.

A search that has reached the bound stops, and what a batch idles beyond it is called avoidable. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Counts, Floats, Ints, check_ranks, checked_costs


def lower_bound(costs: ArrayLike, dp_size: int, counts: Counts = "free") -> float:
    """A finish time that no partition of `costs` can beat. O(n log n).

    The largest of: the mean load; for every i the i+1 smallest of the i*dp_size+1 largest rollouts (pigeonhole
    principle), under equal counts with the smallest ones that must lie beside them.
    Integral costs make it integral.

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
    check_ranks(dp_size, counts)
    return lower_bound_of(work, dp_size, counts)


def lower_bound_of(work: Floats, dp_size: int, counts: Counts) -> float:
    """`lower_bound` for arguments taken as checked."""
    n = work.size
    if n == 0:
        return 0.0
    descending = np.sort(work)[::-1]
    prefix = running_sums(descending)
    bound = max(float(descending.sum()) / dp_size, _pigeonhole_bound(prefix, dp_size, counts))
    return _below_any_finish(bound, work)


def _below_any_finish(bound: float, work: Floats) -> float:
    """The bound, rounded so that it is one in floating point, too."""
    # float64 holds integers exactly up to 2**52: the finish of integral costs is integral, so round up
    if float(work.sum()) < 2.0**52 and bool((work == np.floor(work)).all()):
        return float(np.ceil(bound * (1.0 - 1e-14)))
    return bound * (1.0 - 4e-16 * work.size)  # sums of n floats are off by at most n units in the last place


def running_sums(costs: Floats) -> Floats:
    """[n] -> [n+1]: entry j is the sum of the first j. O(n)."""
    return np.concatenate(([0.0], np.cumsum(costs)))


def _pigeonhole_bound(prefix: Floats, dp_size: int, counts: Counts) -> float:
    """Pigeonholes: of the i * dp_size + 1 largest rollouts, i + 1 share a rank, so no step is shorter than the
    lightest i + 1 of them; the heaviest alone is i = 0. With equal counts every rank has q rollouts at least, and the
    others beside these weigh no less than the smallest of all. O(n / dp_size).

    ``prefix``: `running_sums` of the costs, largest first.
    """
    n = prefix.size - 1
    i = np.arange((n - 1) // dp_size + 1)
    # entries of `prefix` that bracket the lightest i + 1 of the i * dp_size + 1 largest
    together = prefix[i * dp_size + 1] - prefix[i * dp_size - i]
    if counts == "equal":
        together += prefix[-1] - prefix[n - np.maximum(n // dp_size - 1 - i, 0)]
    return float(together.max())


def lockstep_bound(costs: ArrayLike, lengths: ArrayLike, dp_size: int, max_tokens: int) -> float:
    """A time that no step can beat whose ranks meet at every micro-batch, under a token cap. O(n log n).

    For every j the sum of: the costliest rollout, the (dp_size + 1)-th, ..., of j in all, as long as those down to it
    cannot share micro-batches, for each is the time of another lockstep (the micro-batches of one index); and the mean
    time of what the tokens of j locksteps cannot hold, even if they hold the densest work. And `lower_bound`.

    Args:
        costs: [n] work of each rollout.
        lengths: [n] tokens of each; one longer than max_tokens counts as max_tokens.
        dp_size: number of ranks.
        max_tokens: no micro-batch holds more tokens.

    Raises:
        ValueError: as for `partition`.

    Examples:
        >>> costs, lengths = [10.0] * 4 + [1.0] * 10, [100] * 4 + [20] * 10
        >>> lockstep_bound(costs, lengths, dp_size=2, max_tokens=100)  # 10 and 10 twice, then 5 and 5
        25.0
        >>> lockstep_bound(costs[1:], lengths[1:], dp_size=2, max_tokens=100)  # 10 and 10, 10 and 5, then 3 and 2
        23.0
    """
    work = checked_costs(costs)
    check_ranks(dp_size, "free")
    if work.size == 0:
        return 0.0
    tokens = np.minimum(np.asarray(lengths, dtype=np.int64), max_tokens)
    costliest = np.argsort(-work, kind="stable")
    bounds = lockstep_bounds(work[costliest][None], tokens[costliest][None], dp_size, max_tokens)
    return max(_below_any_finish(float(bounds[0]), work), lower_bound_of(work, dp_size, "free"))


def lockstep_bounds(costs: Floats, tokens: Ints, dp_size: int, max_tokens: int) -> Floats:
    """[k] `lockstep_bound` of k batches of n rollouts. ``costs``, ``tokens``: [k, n], costliest first, tokens at most
    max_tokens. O(k n log n), and O(k n) for each lockstep that counts."""
    # a lockstep's tokens bound its work only if they hold the work that is densest
    densest = np.argsort(-costs / tokens, axis=1, kind="stable")
    dense_costs, dense_tokens = np.take_along_axis(costs, densest, 1), np.take_along_axis(tokens, densest, 1)
    before = np.cumsum(dense_tokens, axis=1) - dense_tokens  # [k, n]
    work = costs.sum(axis=1)  # [k]
    bounds: Floats = work / dp_size
    least = np.zeros(work.size)  # [k] time of the locksteps so far
    apart = np.ones(work.size, dtype=np.bool_)  # [k] no two of the rollouts so far fit into one micro-batch
    for first in range(0, costs.shape[1], dp_size):
        if first:
            two_shortest = np.partition(tokens[:, : first + 1], 1, axis=1)[:, :2].sum(axis=1)
            apart &= two_shortest > max_tokens
            if not apart.any():
                break
        least += costs[:, first]
        # tokens that the locksteps up to this one hold at most
        room = (first + dp_size) * max_tokens
        held = (np.clip((room - before) / dense_tokens, 0.0, 1.0) * dense_costs).sum(axis=1)  # [k] at most
        bounds = np.where(apart, np.maximum(bounds, least + (work - held) / dp_size), bounds)
    return bounds
