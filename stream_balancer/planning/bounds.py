"""How early can the last rank finish at best? Lower bounds that hold for every partition.

Proofs in bench/results/planning_proofs.md.

A search that has reached the bound stops, and what a batch idles beyond it is called avoidable. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays import check_ranks, checked_costs, checked_speeds

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .arrays import Counts, Floats, Ints


def lower_bound(costs: ArrayLike, num_ranks: int, counts: Counts = "free", speeds: ArrayLike | None = None) -> float:
    """A finish time that no partition of `costs` can beat. O(n log n).

    The largest of: the mean load; for every i the i+1 smallest of the i*num_ranks+1 largest rollouts (pigeonhole
    principle); with speeds, the j largest rollouts over the j fastest ranks. Equal counts: the same i+1, and the j
    largest, together with the smallest ones that must lie beside them; with speeds, the smallest ones on the slowest
    rank. Integral costs make it integral.

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
    else:
        # [ranks] the j fastest together
        fastest = np.cumsum(np.sort(rate)[::-1])
        j = np.arange(1, min(n, num_ranks) + 1)
        bound = max(total / float(fastest[-1]), float((prefix[j] / fastest[j - 1]).max()))
        if counts == "equal" and n >= num_ranks:
            bound = max(bound, _equal_counts_bound_with_speeds(prefix, rate))
    return _below_any_finish(bound, work, rate)


def _below_any_finish(bound: float, work: Floats, rate: Floats | None) -> float:
    """The bound, rounded so that it is one in floating point, too."""
    # float64 holds integers exactly up to 2**52: the finish of integral costs is integral, so round up
    if rate is None and float(work.sum()) < 2.0**52 and bool((work == np.floor(work)).all()):
        return float(np.ceil(bound * (1.0 - 1e-14)))
    return bound * (1.0 - 4e-16 * work.size)  # sums of n floats are off by at most n units in the last place


def _equal_counts_bound_with_speeds(prefix: Floats, rate: Floats) -> float:
    """The slowest rank has q rollouts at least, and whoever has the heaviest has q - 1 others."""
    # rollouts that every rank has at least
    q = (prefix.size - 1) // rate.size
    smallest = prefix[-1] - prefix[::-1]
    return max(float(smallest[q] / rate.min()), float((prefix[1] + smallest[q - 1]) / rate.max()))


def running_sums(costs: Floats) -> Floats:
    """[n] -> [n+1]: entry j is the sum of the first j. O(n)."""
    return np.concatenate(([0.0], np.cumsum(costs)))


def pigeonhole_bound(prefix: Floats, num_ranks: int, beside: Floats | None = None) -> float:
    """Bound by pigeonholes: of the i * num_ranks + 1 largest rollouts, i + 1 share a rank, so no step is shorter than
    the lightest i + 1.

    `prefix`: `running_sums` of the costs, largest first. `beside`: [q] the least that lies beside 1, 2, ... rollouts on
    their rank; None: nothing. O(n / num_ranks).
    """
    # [i] for every whole number of ranks: entries of `prefix` that bracket the lightest i + 1 of the i * num_ranks + 1
    # largest
    i = np.arange(1, (prefix.size - 2) // num_ranks + 1)
    together = prefix[i * num_ranks + 1] - prefix[i * num_ranks - i]
    if beside is not None:
        together += beside[np.minimum(i, beside.size - 1)]
    return float(together.max(initial=0.0))


def _equal_counts_bound(prefix: Floats, num_ranks: int) -> float:
    """Equal counts: every rank has q rollouts at least, so whoever holds some has others too, which weigh no less than
    the smallest.

    The j largest sit on m <= j ranks, with m*q - j others at least. Those m ranks together carry
    `top(j) + smallest(m*q - j)`, so one of them carries an m-th of it; which m is unknown, so the least over m counts.
    Any j gives a valid bound; all up to 32 and then a geometric sample are tried. O(n / num_ranks + num_ranks).
    """
    n = prefix.size - 1
    q = n // num_ranks
    smallest = prefix[-1] - prefix[::-1]  # smallest[s]: the s smallest together
    best = pigeonhole_bound(prefix, num_ranks, beside=smallest[q - 1 :: -1])
    tries = sorted({*range(1, min(num_ranks, 32) + 1), *(min(num_ranks, int(1.3**e)) for e in range(13, 30))})
    ranks = np.arange(1, num_ranks + 1)
    for j in tries:
        m = ranks[-(-j // (q + 1)) - 1 : j]  # fewer ranks than this cannot hold j rollouts
        carried = (prefix[j] + smallest[np.maximum(m * q - j, 0)]) / m
        best = max(best, float(carried.min()))
    return best


def lockstep_bound(
    costs: ArrayLike, lengths: ArrayLike, num_ranks: int, max_tokens: int, speeds: ArrayLike | None = None
) -> float:
    """A time that no step can beat whose ranks meet at every micro-batch, under a token cap. O(n log n).

    For every j the sum of: the costliest rollout, the (num_ranks + 1)-th, ..., of j in all, as long as those down to it
    cannot share micro-batches, for each is the time of another lockstep (the micro-batches of one index); and the mean
    time of what the tokens of j locksteps cannot hold, even if they hold the densest work. And `lower_bound`.

    Args:
        costs: [n] work of each rollout.
        lengths: [n] tokens of each; one longer than max_tokens counts as max_tokens.
        num_ranks: number of ranks.
        max_tokens: no micro-batch holds more tokens.
        speeds: [num_ranks] relative speeds.

    Raises:
        ValueError: as for `partition`.

    Examples:
        >>> costs, lengths = [10.0] * 4 + [1.0] * 10, [100] * 4 + [20] * 10
        >>> lockstep_bound(costs, lengths, num_ranks=2, max_tokens=100)  # 10 and 10 twice, then 5 and 5
        25.0
        >>> lockstep_bound(costs[1:], lengths[1:], num_ranks=2, max_tokens=100)  # 10 and 10, 10 and 5, then 3 and 2
        23.0
    """
    work = checked_costs(costs)
    check_ranks(num_ranks, "free")
    rate = checked_speeds(speeds, num_ranks)
    if work.size == 0:
        return 0.0
    tokens = np.minimum(np.asarray(lengths, dtype=np.int64), max_tokens)
    costliest, densest = np.argsort(-work, kind="stable"), np.argsort(-work / tokens, kind="stable")
    bounds = lockstep_bounds(
        work[costliest][None],
        tokens[costliest][None],
        num_ranks,
        max_tokens,
        rate,
        by_density=(work[densest][None], tokens[densest][None]),
    )
    return max(_below_any_finish(float(bounds[0]), work, rate), lower_bound_of(work, num_ranks, "free", rate))


def lockstep_bounds(
    costs: Floats,
    tokens: Ints,
    num_ranks: int,
    max_tokens: int,
    rate: Floats | None,
    by_density: tuple[Floats, Ints] | None = None,
) -> Floats:
    """[k] `lockstep_bound` of k batches of n rollouts. ``costs``, ``tokens``: [k, n], costliest first, tokens at most
    max_tokens. ``by_density``: both in descending order of costs / tokens; None: the costliest are the densest, as
    with every model by which a token more costs more the longer the rollout. O(k n) for each lockstep that counts."""
    fastest, together = (1.0, float(num_ranks)) if rate is None else (float(rate.max()), float(rate.sum()))
    dense_costs, dense_tokens = (costs, tokens) if by_density is None else by_density
    before = np.cumsum(dense_tokens, axis=1) - dense_tokens  # [k, n]
    work = costs.sum(axis=1)  # [k]
    bounds: Floats = work / together
    least = np.zeros(work.size)  # [k] time of the locksteps so far
    apart = np.ones(work.size, dtype=np.bool_)  # [k] no two of the rollouts so far fit into one micro-batch
    for first in range(0, costs.shape[1], num_ranks):
        if first:
            two_shortest = np.partition(tokens[:, : first + 1], 1, axis=1)[:, :2].sum(axis=1)
            apart &= two_shortest > max_tokens
            if not apart.any():
                break
        least += costs[:, first] / fastest
        # tokens that the locksteps up to this one hold at most
        room = (first + num_ranks) * max_tokens
        held = (np.clip((room - before) / dense_tokens, 0.0, 1.0) * dense_costs).sum(axis=1)  # [k] at most
        bounds = np.where(apart, np.maximum(bounds, least + (work - held) / together), bounds)
    return bounds
