"""Certificate of a stream: a time that no schedule of it undercuts, not even one that knows the future. numpy only.

Every rollout gets a price. Total time is at least the sum of prices and, step by step, the least of time minus prices
over what the step may take. Any prices are valid; a search finds good ones in floats, the last check is in integers.
Statement, assumptions and proof: bench/results/certificates.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stream_balancer.planning.arrays import Bools, Floats, Ints

Singles: TypeAlias = NDArray[np.float32]

SHARES = 1024
"""The check takes the share of work in a row as a multiple of 1 / SHARES."""
RATIO = 1.05
"""Levels that differ by less are one, as low as its lowest."""
TALL = 0.6
"""Levels below this part of the mean step are one."""
CHUNK = 200_000
"""Numbers in an array at a time."""

# how the search goes: none of these can make a certificate wrong
RATE, LEAST_RATE, MOMENTUM, BASE, STEEP, WIDTH, MOST_TAKEN, SETTLE = 0.15, 0.01, 0.9, 0.05, 0.1, 0.2, 3, 50
# of the rate: how soft a step's choice between levels is, and that between rollouts (of one in a batch)
LEVELS_SOFT, CHOICE_SOFT = 0.05, 0.1


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
    tokens: Ints | None = None,
    max_tokens: int = 1,
    rounds: int = 400,
    prices: Floats | None = None,
) -> Certificate:
    """Lower bound on the total time of every schedule of these rollouts. O(rounds x steps x waiting).

    :param costs: [n] in order of arrival, >= 0.
    :param arrived: [n] the step from which on each one waits, never decreasing.
    :param max_skips: steps that a rollout may be passed over; None = no bound.
    :param equal_counts: the ranks of a step take equally many.
    :param tokens: [n] where ranks meet at every micro-batch; it holds ``max_tokens`` of these, or a single rollout.
    :param rounds: of the search for prices; 0: those given are checked as they are.
    :param prices: [n] to begin with, in the costs' unit; None = the fair share, cost / ranks.

    Raises ValueError for costs or sizes that no stream has, and where ``arrived`` and ``max_skips`` allow no schedule.
    """
    given = np.asarray(costs, dtype=np.float64)
    if not (given.size and np.isfinite(given).all() and given.min() >= 0 and given.max() > 0):
        raise ValueError("costs must be finite and >= 0, and one of them above 0")
    if ranks < 1 or batch_size < 1:
        raise ValueError(f"ranks ({ranks}) and batch_size ({batch_size}) must be >= 1")
    if len(arrived) != given.size or (np.diff(arrived) < 0).any():
        raise ValueError("arrived must be a step for each cost, and never decrease")
    if tokens is not None and (len(tokens) != given.size or max_tokens < 1):
        raise ValueError(f"tokens must be a number for each cost, and max_tokens ({max_tokens}) >= 1")
    # by a power of two and down: what is proven for less work holds for more
    scale = 2.0 ** min(np.floor(32 - np.log2(given.max())), 1000.0)
    steps = -(-given.size // batch_size)
    # the last step is filled up with rollouts of no cost, which come with it
    spare = batch_size * steps - given.size
    whole = np.append(np.floor(given * scale).astype(np.int64), np.zeros(spare, np.int64))
    first = np.append(np.clip(arrived, 0, steps - 1), np.full(spare, steps - 1))
    last = np.minimum(first + (steps if max_skips is None else max_skips), steps - 1)
    others = batch_size // ranks - 1 if equal_counts and tokens is None else 0
    rows = _Rows(whole, first, last, batch_size, ranks, others=max(others, 0))
    if tokens is not None:
        rows.tokens, rows.max_tokens = np.append(np.minimum(tokens, max_tokens), np.zeros(spare, np.int64)), max_tokens
    start = whole / ranks if prices is None else np.append(np.asarray(prices) * scale, np.zeros(spare))
    found, weights = _Search(rows, whole, first, last, start / rows.unit).run(rounds)
    # the fair share proves work / ranks
    proven = max(rows.proven(found, weights) / SHARES, float(whole.sum())) / ranks
    # one division after the integers
    total, work = float(proven * (1 - 1e-12) / scale), float(given.sum())
    return Certificate(total_time=total, idle=max(0.0, 1 - work / (ranks * total)), work=work, num_steps=steps)


class _Rows:
    """Rollouts that each step may take, and its rows, one for each level: those up to a cost, and how long the step
    takes at least if it takes one of the costliest of these."""

    def __init__(self, costs: Ints, first: Ints, last: Ints, batch_size: int, ranks: int, *, others: int) -> None:
        """``others``: so many has the costliest of a step beside it on its rank."""
        self.batch_size, self.ranks, self.steps = batch_size, ranks, costs.size // batch_size
        self.unit = max(float(costs.sum()) / ranks / self.steps, 1.0)
        self.tokens: Ints | None = None
        self.max_tokens = 1
        self.tall: Bools = costs > TALL * self.unit
        index, have = waiting(first, last, self.steps)
        if have.min() < batch_size:
            raise ValueError(
                "no schedule exists: some step has fewer than batch_size rollouts that have come and are not overdue. "
                "Raise max_skips"
            )
        order = np.argsort(np.append(costs, np.iinfo(np.int64).max)[index], axis=1, kind="stable")
        self.index = np.take_along_axis(index, order, 1)
        """[steps, waiting] rollouts that the step may take, the cheapest first."""
        self.cost = np.append(costs, 0)[self.index]
        found = [self._levels(line[:num], others) for line, num in zip(self.cost, have, strict=True)]
        most = max(ends.size for ends, _ in found)
        # where a step has fewer levels, its last counts several times
        self.end, self.height = (
            np.stack([np.pad(line, (0, most - line.size), mode="edge") for line in column])
            for column in zip(*found, strict=True)
        )

    def _levels(self, line: Ints, others: int) -> tuple[Ints, Ints]:
        """How many of the cheapest each level allows, and the least that the costliest of a step then costs."""
        ends = np.flatnonzero(np.append(line[1:] != line[:-1], True)) + 1
        low = TALL * self.unit
        ends = ends[(ends >= self.batch_size) & ((line[ends - 1] > low) | (ends == line.size))]
        below = np.searchsorted(line, low, side="right")
        if self.batch_size <= below < line.size:
            ends = np.append(below, ends)
        level = np.floor(np.log(np.maximum(line[ends - 1], 1)) / np.log(RATIO))
        ends = ends[np.append(level[1:] != level[:-1], True)]
        begins = np.maximum(np.append(0, ends[:-1]), self.batch_size - 1)
        return ends, line[begins] + line[:others].sum()

    def proven(self, prices: Floats, weights: Singles) -> int:
        """The bound of these prices and weights, times SHARES x ranks: integers only."""
        whole = np.rint(prices * self.ranks * self.unit).astype(np.int64)
        share, room = np.clip(np.rint(weights * SHARES), 0, SHARES).astype(np.int64)
        # a token counts as no more work than that
        dense = room * self.height // self.max_tokens
        most = int(self.cost.max()) + int(np.abs(whole).max())
        if SHARES * (most * self.batch_size + self.ranks * int(self.height.max())) >= 2**62:
            raise ValueError("prices are too large to be checked in integers")
        priced = SHARES * np.append(whole, 0)
        bound, places = int(sum(priced.tolist())), np.arange(self.cost.shape[1])
        for at in chunks(self.steps, self.end.shape[1] * places.size):
            cost = self.cost[at, None]
            value = share[at, :, None] * cost
            if self.tokens is not None:
                tokens = np.append(self.tokens, 0)[self.index[at], None].swapaxes(1, 2)
                value += np.minimum((SHARES - share[at, :, None]) * cost, dense[at, :, None] * tokens)
            value -= priced[self.index[at], None].swapaxes(1, 2)
            value[places >= self.end[at, :, None]] = 2**62
            least = np.partition(value, self.batch_size - 1, axis=2)[..., : self.batch_size].sum(axis=2)
            least += self.ranks * ((SHARES - share[at]) * self.height[at] - dense[at] * self.max_tokens)
            # Python's integers: the sum over steps may pass 2^63
            bound += int(sum(least.min(axis=1).tolist()))
        return bound


class _Search:
    """Ascent of the prices in floats of 32 bits, in mean steps. Rollouts that come at the same step and cost about the
    same are a crowd, which has one price."""

    def __init__(self, rows: _Rows, costs: Ints, first: Ints, last: Ints, prices: Floats) -> None:
        self.rows = rows
        order = np.lexsort((costs, first))
        fair = costs / (rows.ranks * rows.unit)
        alike = np.where(rows.tall, -1 - np.arange(costs.size), fair * rows.batch_size // WIDTH)[order]
        starts = np.flatnonzero(np.append(True, (np.diff(first[order]) != 0) | (np.diff(alike) != 0)))
        self.size = np.diff(np.append(starts, costs.size))
        self.crowd = np.repeat(np.arange(starts.size), self.size)[np.argsort(order)]
        """[n] of each rollout."""
        self.work, self.prices = (np.bincount(self.crowd, column) / self.size for column in (fair, prices))
        self.given = prices
        self.rest = fair - self.work[self.crowd]
        """[n] what a rollout costs beyond its crowd's mean."""
        self.index, _ = waiting(first[order[starts]], last[order[starts]], rows.steps)
        # [steps, 1, crowds]
        self.fair, self.many = (
            np.append(column, 0).astype(np.float32)[self.index][:, None] for column in (self.work, self.size)
        )
        self.most = np.take_along_axis(rows.cost, rows.end - 1, 1) / (rows.ranks * rows.unit)
        """[steps, levels] the work of the costliest that a row allows, and a little more."""
        self.most = (self.most * (1 + 1e-6)).astype(np.float32)
        self.tokens: Singles | None = None
        if rows.tokens is not None:
            part = np.bincount(self.crowd, rows.tokens / (rows.ranks * rows.max_tokens)) / self.size
            self.tokens = np.append(part, 0).astype(np.float32)[self.index][:, None]
        self.time = (rows.height / rows.unit).astype(np.float32)
        self.edge = np.zeros_like(self.time)
        self.weights = np.stack((np.ones_like(self.time), np.zeros_like(self.time)))
        """[2, steps, levels] the share of work, and the height of a lockstep that is full."""
        self.pace, self.before = np.full_like(self.weights, 0.05), np.zeros_like(self.weights)
        self.taken, self.slope = (np.zeros(self.index.shape, np.float32) for _ in range(2))

    def run(self, rounds: int) -> tuple[Floats, Singles]:
        """Prices [n], and weights of the rows."""
        prices, speed = self.prices.copy(), np.zeros(self.size.size)
        scale = self.work + BASE / self.rows.batch_size + STEEP * np.maximum(self.work * self.rows.ranks - 1, 0)
        best = -np.inf
        # prices that are given settle nothing but shares
        last = rounds or SETTLE
        parts = chunks(self.rows.steps, self.time.shape[1] * self.index.shape[1])
        # one memory for all rounds: asked for anew, it is given back and mapped again each time
        self.scratch = np.empty((6, parts[0].stop, self.time.shape[1], self.index.shape[1]), np.float32)
        for done in range(last + 1):
            rate = RATE * (1 - done / (last + 1) + LEAST_RATE)
            offer, weights = np.append(prices, 0).astype(np.float32)[self.index], self.weights.copy()
            bound = float(prices @ self.size) + sum(self._step(at, offer[at], np.float32(rate)) for at in parts)
            taken = self._sums(self.taken)
            if bound > best:
                slope = self._sums(self.slope) / np.maximum(taken, 1e-9)
                each = prices[self.crowd] + slope[self.crowd] * self.rest if rounds else self.given
                best, found = bound, (each, weights)
            wanted = np.maximum(1 - taken / self.size, 1 - MOST_TAKEN)
            speed = MOMENTUM * speed + (1 - MOMENTUM) * wanted
            prices += rate * scale * speed * (rounds > 0)
        return found

    def _sums(self, each: Singles) -> Floats:
        """[crowds] over the steps."""
        return np.bincount(self.index.ravel(), each.ravel(), self.size.size + 1)[:-1].astype(np.float64)

    def _step(self, at: slice, offer: Singles, rate: np.float32) -> float:
        """Least of time minus prices at these prices, over some steps; what they take; weights move."""
        fair, many, time, edge = (column[at] for column in (self.fair, self.many, self.time, self.edge))
        share, full = self.weights[:, at]
        part, above, taken, rest, most, there = self.scratch[:, : len(time)]
        many = np.multiply(many, fair <= self.most[at][..., None], out=there)
        batch, soft = self.rows.batch_size, CHOICE_SOFT * rate / self.rows.batch_size
        # a row takes what lies below its edge, a part of a crowd whose value lies within soft of it
        if self.tokens is None:
            np.multiply(fair, (-share / soft)[..., None], out=above)
        else:
            tokens = self.tokens[at]
            np.multiply(fair, (1 - share)[..., None], out=rest)
            np.multiply(tokens, (full * time)[..., None], out=most)
            np.minimum(rest, most, out=above)
            above += np.multiply(fair, share[..., None], out=part)
            above *= -1 / soft
        above += (offer / soft + np.float32(0.5))[:, None]
        for _ in range(2):
            last = edge
            np.add(above, (last / soft)[..., None], out=part)
            np.clip(part, 0, 1, out=part)
            np.multiply(part, many, out=taken)
            count = np.vecdot(part, many)
            torn = count - np.vecdot(taken, part)
            # Newton's method, or less
            edge = last + soft * (batch - count) / np.maximum(6 * torn, batch)
        self.edge[at] = edge
        value = soft * (count / 2 - np.vecdot(taken, above) - torn / 2)
        value += last * (batch - count) + (1 - share - full) * time
        # not the best row alone: between rows as good as each other the prices would swing
        least = value.min(axis=1)
        close = np.exp((least[:, None] - value) / (LEVELS_SOFT * rate))
        close /= close.sum(axis=1, keepdims=True)
        self.taken[at] = np.matmul(close[:, None], taken)[:, 0]
        # a weight moves to where it gains nothing: for the share, work and height last equally long
        dense = taken if self.tokens is None else np.multiply(taken, rest > most, out=part)
        self.slope[at] = self.taken[at] - np.matmul((close - close * share)[:, None], dense)[:, 0]
        gain = np.zeros_like(self.weights[:, at])
        gain[0] = np.matmul(dense, fair.swapaxes(1, 2))[..., 0] - time
        if self.tokens is not None:
            gain[1] = np.matmul(dense, tokens.swapaxes(1, 2))[..., 0] - 1
        gain = np.sign(gain)
        turned = gain * self.before[:, at] < 0
        pace = np.clip(self.pace[:, at] * np.where(turned, np.float32(0.6), np.float32(1.1)), 0.002, 0.25)
        self.pace[:, at], self.before[:, at] = pace, gain
        self.weights[:, at] = np.clip(self.weights[:, at] + gain * pace, 0, 1)
        return float(least.sum(dtype=np.float64))


def waiting(first: Ints, last: Ints, steps: int) -> tuple[Ints, Ints]:
    """[steps, waiting] which ones wait at each step, filled up with their number; [steps] how many. Neither first nor
    last decreases."""
    low, high = (
        np.searchsorted(last, np.arange(steps)),
        np.searchsorted(first, np.arange(steps), side="right"),
    )
    index = low[:, None] + np.arange((high - low).max())
    return np.where(index < high[:, None], index, first.size), high - low


def chunks(steps: int, each: int) -> list[slice]:
    """Some steps at a time, of so many numbers each."""
    size = max(1, CHUNK // each)
    return [slice(at, at + size) for at in range(0, steps, size)]
