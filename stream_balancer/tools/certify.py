"""Certificate of a stream: a time that no schedule of it undercuts, not even one that knows the future. numpy only.

Every rollout gets a price. Total time is at least the sum of prices and, step by step, the least of time minus prices
over what the step may take. Any prices are valid; a search finds good ones in floats, the last check is in integers.
Statement, assumptions and proof: bench/results/certificates.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_balancer.planning.arrays import Floats, Ints

Singles: TypeAlias = NDArray[np.float32]

SHARES = 1024
"""The check takes the share of work in a row as a multiple of 1 / SHARES."""
RATIO = 1.01
"""Levels that differ by less are one, as low as its lowest."""
LEAST_LEVEL = 0.5
"""Levels below this part of the mean step are one."""
EVERY = 20
"""Rounds between two looks at all levels; in between a step has its BEST."""
BEST = 4
CHUNK = 1_000_000
"""Numbers in an array at a time."""

# how the search goes: none of these can make a certificate wrong
MOMENTUM, RATE, LEAST_RATE, BASE, NEAR = 0.7, 0.05, 0.01, 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proven bound of a stream, drain included."""

    total_time: float
    """No schedule takes less, in the cost model's unit."""
    idle: float
    """No schedule idles less: 1 - work / (ranks x ``total_time``)."""
    work: float
    """Sum of the costs."""
    num_steps: int
    """Steps that the stream takes."""


def certify(
    costs: Floats,
    arrived: Ints,
    *,
    batch_size: int,
    ranks: int,
    max_skips: int | None,
    equal_counts: bool = False,
    rounds: int = 400,
    prices: Floats | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Lower bound on the total time of every schedule of these rollouts. O(rounds x steps x waiting).

    :param costs: [n] in order of arrival, >= 0.
    :param arrived: [n] the step from which on each one waits, never decreasing.
    :param max_skips: steps that a rollout may be passed over; None = no bound.
    :param equal_counts: the ranks of a step take equally many.
    :param rounds: of the search for prices; 0: those given are checked as they are.
    :param prices: [n] to begin with, in the costs' unit; None = the fair share, cost / ranks.
    :param progress: called with the rounds done and their number.

    Raises ValueError for costs or sizes that no stream has, and where ``arrived`` and ``max_skips`` allow no schedule.
    """
    given = np.asarray(costs, dtype=np.float64)
    if not (given.size and np.isfinite(given).all() and given.min() >= 0 and given.max() > 0):
        raise ValueError("costs must be finite and >= 0, and one of them above 0")
    if ranks < 1 or batch_size < 1:
        raise ValueError(f"ranks ({ranks}) and batch_size ({batch_size}) must be >= 1")
    if len(arrived) != given.size or (np.diff(arrived) < 0).any():
        raise ValueError("arrived must be a step for each cost, and never decrease")
    # by a power of two and down: what is proven for less work holds for more
    scale = 2.0 ** min(np.floor(32 - np.log2(given.max())), 1000.0)
    steps = -(-given.size // batch_size)
    # the last step is filled up with rollouts of no cost, which come with it
    spare = batch_size * steps - given.size
    whole = np.append(np.floor(given * scale).astype(np.int64), np.zeros(spare, np.int64))
    first = np.append(np.clip(arrived, 0, steps - 1), np.full(spare, steps - 1))
    last = np.minimum(first + (steps if max_skips is None else max_skips), steps - 1)
    rows = _Rows(whole, first, last, batch_size, ranks, equal_counts=equal_counts)
    start = whole / ranks if prices is None else np.append(np.asarray(prices) * scale, np.zeros(spare))
    found = rows.search(start / rows.unit, rounds, progress)
    # the fair share proves work / ranks
    proven = max(rows.proven(*found) / SHARES, float(whole.sum())) / ranks
    # one division after the integers
    total, work = float(proven * (1 - 1e-12) / scale), float(given.sum())
    return Certificate(total_time=total, idle=max(0.0, 1 - work / (ranks * total)), work=work, num_steps=steps)


class _Rows:
    """Rows (step, level): the rollouts that a step may take up to a cost, and how long it takes at least if it takes
    one of the costliest of these."""

    def __init__(
        self, costs: Ints, first: Ints, last: Ints, batch_size: int, ranks: int, *, equal_counts: bool
    ) -> None:
        self.batch_size, self.ranks, self.steps = batch_size, ranks, costs.size // batch_size
        self.unit = max(float(costs.sum()) / ranks / self.steps, 1.0)
        steps = np.arange(self.steps)
        # both never decrease in order of arrival
        low, high = np.searchsorted(last, steps), np.searchsorted(first, steps, side="right")
        if (high - low).min() < batch_size:
            raise ValueError(
                "no schedule exists: some step has fewer than batch_size rollouts that have come and are not overdue. "
                "Raise max_skips"
            )
        self.places = np.arange((high - low).max())
        index = low[:, None] + self.places
        index = np.where(index < high[:, None], index, costs.size)
        order = np.argsort(np.append(costs, np.iinfo(np.int64).max)[index], axis=1, kind="stable")
        self.index = np.take_along_axis(index, order, 1)
        """[steps, waiting] rollouts that the step may take, the cheapest first."""
        self.cost = np.append(costs, 0)[self.index]
        others = batch_size // ranks - 1 if equal_counts else 0
        found = [self._levels(line, have, max(others, 0)) for line, have in zip(self.cost, high - low, strict=True)]
        self.step = np.repeat(steps, [ends.size for ends, _ in found])
        self.end, self.height = (np.concatenate(column) for column in zip(*found, strict=True))
        # for the search, in mean steps
        self.work = (self.cost / (ranks * self.unit)).astype(np.float32)
        self.time = (self.height / self.unit).astype(np.float32)

    def _levels(self, line: Ints, have: int, others: int) -> tuple[Ints, Ints]:
        """How many of the cheapest each level allows, and the least that the costliest of a step then costs."""
        line = line[:have]
        ends = np.flatnonzero(np.append(line[1:] != line[:-1], True)) + 1
        ends = ends[(ends >= self.batch_size) & ((line[ends - 1] > LEAST_LEVEL * self.unit) | (ends == have))]
        below = np.searchsorted(line, LEAST_LEVEL * self.unit, side="right")
        if self.batch_size <= below < have:
            ends = np.append(below, ends)
        level = np.floor(np.log(np.maximum(line[ends - 1], 1)) / np.log(RATIO))
        ends = ends[np.append(level[1:] != level[:-1], True)]
        begins = np.maximum(np.append(0, ends[:-1]), self.batch_size - 1)
        # under equal counts the costliest has so many beside it on its rank
        return ends, line[begins] + line[:others].sum()

    def proven(self, prices: Floats, shares: Singles) -> int:
        """The bound of these prices and shares, times SHARES x ranks: integers only."""
        whole = np.rint(prices * self.ranks * self.unit).astype(np.int64)
        share = np.clip(np.rint(shares * SHARES), 0, SHARES).astype(np.int64)
        most = int(self.cost.max()) + int(np.abs(whole).max())
        if SHARES * (most * self.batch_size + self.ranks * int(self.height.max())) >= 2**62:
            raise ValueError("prices are too large to be checked in integers")
        priced = SHARES * np.append(whole, 0)
        best = np.full(self.steps, np.iinfo(np.int64).max)
        for rows in self._chunks(np.arange(self.step.size)):
            value = share[rows, None] * self.cost[self.step[rows]] - priced[self.index[self.step[rows]]]
            value[self.places >= self.end[rows, None]] = 2**62
            least = np.partition(value, self.batch_size - 1, axis=1)[:, : self.batch_size].sum(axis=1)
            np.minimum.at(best, self.step[rows], least + (SHARES - share[rows]) * self.ranks * self.height[rows])
        # Python's integers: the sum over steps may pass 2^63
        return int(sum(priced.tolist()) + sum(best.tolist()))

    def _chunks(self, rows: NDArray[Any]) -> list[Any]:
        return np.array_split(rows, max(1, rows.size * self.places.size // CHUNK))

    def _values(self, rows: Ints, prices: Singles, shares: Singles) -> Singles:
        """[2, rows] the least of time minus prices, and the work of what it takes."""
        found = []
        for some, share in zip(self._chunks(rows), self._chunks(shares), strict=True):
            value, taken = self._least(some, prices, share)
            found.append(np.stack((value, (taken * self.work[self.step[some]]).sum(axis=1))))
        return np.concatenate(found, axis=1)

    def _least(self, rows: Ints, prices: Singles, share: Singles) -> tuple[Singles, Singles]:
        value = share[:, None] * self.work[self.step[rows]] - prices[self.index[self.step[rows]]]
        value[self.places >= self.end[rows, None]] = np.inf
        least = np.partition(value, self.batch_size - 1, axis=1)[:, : self.batch_size]
        taken = (value <= least[:, -1:]).astype(np.float32)
        # several of the same value share the places that are left
        taken *= self.batch_size / taken.sum(axis=1, keepdims=True)
        return least.sum(axis=1) + (1 - share) * self.time[rows], taken

    def _settle(self, prices: Singles, shares: Singles, rounds: int) -> Singles:
        """Values of all rows, after shares of those that might be the best of their step moved to where they prove
        more."""
        found = self._values(np.arange(shares.size), prices, shares)
        pace = np.full(shares.size, 0.25, dtype=np.float32)
        for _ in range(rounds):
            best = np.full(self.steps, np.inf, dtype=np.float32)
            np.minimum.at(best, self.step, found[0])
            rows = np.flatnonzero(found[0] <= best[self.step] + NEAR)
            moved = np.clip(shares[rows] + np.sign(found[1, rows] - self.time[rows]) * pace[rows], 0, 1)
            tried = self._values(rows, prices, moved)
            better = tried[0] > found[0, rows]
            shares[rows[better]], found[:, rows[better]] = moved[better], tried[:, better]
            pace[rows[~better]] *= 0.4
        value: Singles = found[0]
        return value

    def search(self, start: Floats, rounds: int, progress: Callable[[int, int], None] | None) -> tuple[Floats, Singles]:
        """Prices [n] in mean steps, and the share of work in each row: ascent along what is taken too seldom."""
        num = start.size
        prices, speed = start.copy(), np.zeros(num)
        shares, pace, before = (np.full(self.step.size, one, dtype=np.float32) for one in (1.0, 0.05, 0.0))
        weight = np.zeros(num + 1)
        weight[self.index] = self.work
        scale = weight[:num] + BASE * weight[:num].mean()
        best, found = -np.inf, (start, shares.copy())
        for done in range(0, rounds + 1, EVERY):
            now = np.append(prices, 0).astype(np.float32)
            values = self._settle(now, shares, 9 if done + EVERY > rounds else 4)
            order = np.lexsort((values, self.step))
            begin, end = (
                np.searchsorted(self.step[order], np.arange(self.steps), side=side) for side in ("left", "right")
            )
            bound = prices.sum() + values[order[begin]].sum()
            if bound > best:
                best, found = bound, (prices.copy(), shares.copy())
            if progress is not None:
                progress(done, rounds)
            place = begin[:, None] + np.arange(BEST)
            rows = order[place[place < end[:, None]]]
            rows.sort()
            starts = np.searchsorted(self.step[rows], np.arange(self.steps))
            for one in range(done, min(done + EVERY, rounds)):
                rate = RATE * ((1 - one / rounds) ** 2 + LEAST_RATE)
                now = np.append(prices, 0).astype(np.float32)
                value, taken = self._least(rows, now, shares[rows])
                # not the best row alone: between rows as good as each other the prices would swing
                close = np.exp((np.minimum.reduceat(value, starts)[self.step[rows]] - value) / rate)
                close /= np.add.reduceat(close, starts)[self.step[rows]]
                # a share moves to where work and height last equally long
                sign = np.sign((taken * self.work[self.step[rows]]).sum(axis=1) - self.time[rows])
                pace[rows] = np.clip(pace[rows] * np.where(sign * before[rows] < 0, 0.6, 1.1), 0.002, 0.25)
                before[rows] = sign
                shares[rows] = np.clip(shares[rows] + sign * pace[rows], 0, 1)
                often = np.add.reduceat(taken * close[:, None], starts)
                wanted = 1 - np.bincount(self.index.ravel(), often.ravel(), num + 1)[:num]
                speed = MOMENTUM * speed + (1 - MOMENTUM) * wanted
                prices += rate * scale * speed
        return found
