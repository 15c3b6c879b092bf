"""On which rank, and in how many micro-batches, under a token cap: so that the step is over as early as possible.

    sync="step"         ranks meet once: one is done after ``work + overhead x its micro-batches``. A cell of
                        the search (cells.py) is what a rank has, and has to be packed
    sync="micro_batch"  ranks meet at every micro-batch: those of one index, one per rank, are a *lockstep*, which takes
                        as long as its costliest. A cell is a micro-batch, a row a lockstep

Fewer micro-batches cost less overhead, more of them leave more ways to balance, so every number that may win is tried:

    balanced shares    a partition that ignores the cap, each share packed by itself: best, where the number suffices
    all bins at once   packed tightly and dealt out to the ranks
    level by level     one lockstep after the other, filled up to what it has to take at least

Pure and deterministic: the exchanges have a budget of elementary operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .arrays import Counts, Sync, rounded_up, split_by_label
from .bounds import lockstep_bound, lower_bound
from .cells import Cells, Limit, slots_of
from .packing import Bins, Packer
from .partition import TOLERANCE, split

_WORTH = 1e-3
"""How much earlier (relatively) the step must be over for another number of micro-batches."""

_LOCKSTEP = 0.02
"""A lockstep more costs something (FSDP gathers the parameters once more) even where nobody has said how much: this
part of the step, beside its overhead."""

_BUDGET, _BUDGET_LOCKSTEPS = 60_000, 300_000
"""Elementary operations that the exchanges of a layout may spend: a few milliseconds."""


class _RankBins(NamedTuple):
    ranks: list[Bins]
    numbers: list[int]
    """[rank] how many micro-batches it runs."""
    finish: float
    """When the last one is done."""


def least_finish(
    packer: Packer,
    dp_size: int,
    sync: Sync,
    counts: Counts,
    overhead: float,
    multiple_of: int,
    *,
    rotation: int,
) -> list[Bins]:
    """``[rank][micro-batch]`` -> positions. A rank with fewer rollouts than micro-batches has a shorter list.

    Args:
        packer: the rollouts and the cap; not padded.
        dp_size: number of ranks.
        sync: when ranks meet.
        counts: "equal": every rank has as many micro-batches; "free": each its own number, where ranks meet once.
        overhead: what a micro-batch costs whatever is in it, in the unit of the costs.
        multiple_of: the number of micro-batches is a multiple of this.
        rotation: rotates rank labels.

    Complexity: a partition, O(n log n) per number of micro-batches tried (in locksteps O(n ranks number)), and
    exchanges within a fixed work budget.

    Examples:
        >>> from stream_balancer.planning.packing import Packer
        >>> sizes = np.array([600, 600, 600, 300, 300])
        >>> packer = Packer(sizes, sizes.astype(float), max_tokens=1000, padded=False)
        >>> least_finish(packer, 2, "step", "equal", 0.0, multiple_of=1, rotation=0)  # both done after 1200
        [[[0], [2]], [[1], [3, 4]]]
    """
    if sync == "step":
        bound = lower_bound(packer.work, dp_size, "free")
    else:
        bound = lockstep_bound(packer.work, packer.tokens, dp_size, packer.cap)
    search = _Search(packer, dp_size, sync, overhead, multiple_of, bound, rotation)
    best = search.with_one_number()
    if sync == "micro_batch":
        return best.ranks
    if counts == "free":
        # the best with one number for all is one of those compared, so the freedom never makes it worse
        fewest = [packer.fewest([i for one in bins for i in one]) for bins in best.ranks]
        numbers = [[rounded_up(max(len(one), 1), multiple_of) for one in bins] for bins in (fewest, search.balanced)]
        free = map(search.exchanged, (fewest, search.balanced), numbers)
        best = min((*free, best), key=attrgetter("finish"))  # of equal ones fewer micro-batches
    return [packer.spread(bins, number) if bins else [] for bins, number in zip(best.ranks, best.numbers, strict=True)]


def least_finish_bound(
    packer: Packer, dp_size: int, *, counts: Counts, overhead: float, multiple_of: int, work_bound: float
) -> float:
    """No layout is done before this; ``work_bound``: the same, micro-batches not counted."""
    search = _Search(packer, dp_size, "step", overhead, multiple_of, work_bound, rotation=0)
    return search.bound(None if counts == "free" else search.least_number)


def bins_to_ranks(packer: Packer, bins: Bins, dp_size: int, rotation: int) -> list[Bins]:
    """The same number of bins to every rank, rank totals balanced."""
    costs = np.array([packer.cost(one) for one in bins])
    shares = split(costs, dp_size, "equal", rotation=rotation)
    return [[bins[one] for one in share] for share in shares]


def bins_in_rows(packer: Packer, bins: Bins, dp_size: int, rotation: int) -> list[Bins]:
    """The costliest bins into the first lockstep, the next into the next: no other rows of them take less."""
    bins = sorted(bins, key=packer.cost, reverse=True)
    ranks: list[Bins] = [[] for _ in range(dp_size)]
    for index, start in enumerate(range(0, len(bins), dp_size)):
        for place, one in enumerate(bins[start : start + dp_size]):
            # there and back: who has the heaviest of this lockstep has the lightest of the next
            rank = (place if index % 2 == 0 else dp_size - 1 - place) + rotation
            ranks[rank % dp_size].append(one)
    return ranks


def rows_alike(packer: Packer, ranks: list[Bins]) -> list[Bins]:
    """Micro-batches of one index alike, by exchanges that leave every rank as many rollouts as it has."""
    dp_size, number = len(ranks), max(map(len, ranks))
    bound = lockstep_bound(packer.work, packer.tokens, dp_size, packer.cap)
    search = _Search(packer, dp_size, "micro_batch", 0.0, 1, bound, rotation=0)
    costliest_first = [sorted(bins, key=packer.cost, reverse=True) for bins in ranks]
    rows = [bins[index] if index < len(bins) else [] for index in range(number) for bins in costliest_first]
    found = search.exchanged_in_rows(rows, number, bound, keep=True)
    return [[one for one in found[rank::dp_size] if one] for rank in range(dp_size)]


@dataclass(frozen=True)
class _Search:
    """The layouts of some rollouts, by their numbers of micro-batches."""

    packer: Packer
    dp_size: int
    sync: Sync
    overhead: float
    """Cost of a micro-batch whatever is in it."""
    multiple_of: int
    work_bound: float
    """No layout is done before this, micro-batches not counted."""
    rotation: int

    @cached_property
    def later(self) -> float:
        """How much later a rank is done for a micro-batch more."""
        if self.sync == "micro_batch":
            return self.overhead + _LOCKSTEP * self.work_bound / self.multiple_of
        return self.overhead

    @cached_property
    def least_bins(self) -> int:
        """No layout has fewer."""
        return self.packer.least_bins(np.arange(self.packer.tokens.size))

    @property
    def least_number(self) -> int:
        """Micro-batches that a rank has at least, if all have as many."""
        return rounded_up(self.least_bins, self.dp_size * self.multiple_of) // self.dp_size

    def bound(self, number: int | None) -> float:
        """No layout is done before this, if every rank has so many micro-batches; None: each its own number."""
        if number is not None:
            return self.work_bound + self.later * number
        mean = (float(self.packer.work.sum()) + self.later * self.least_bins) / self.dp_size
        return max(self.work_bound + self.later * self.multiple_of, mean)

    @cached_property
    def balanced(self) -> list[Bins]:
        """The partition that ignores the cap, each share packed by itself. Where the cap does not bind these are the
        answer, and no layout under a cap can be better balanced."""
        shares = split(self.packer.work, self.dp_size, "free", rotation=self.rotation)
        return [self.packer.fewest(share.tolist()) for share in shares]

    def with_one_number(self) -> _RankBins:
        """The same number of micro-batches on every rank: each number from the least that may hold all rollouts, until
        no more can win."""
        found: list[_RankBins] = []
        number = self.least_number
        while self._may_win(found, number):
            for layout in self._layouts(number):
                found.append(layout)
                if not self._may_win(found, number):
                    break
            if found and self._enough(found[0].numbers[0], number):
                break
            # more micro-batches leave more ways to balance, and cost their overhead on every rank
            number += self.multiple_of
        return min(found, key=attrgetter("finish"))

    def _may_win(self, found: list[_RankBins], number: int) -> bool:
        """A layout of so many micro-batches a rank may be better by enough than those that are found."""
        return min((one.finish for one in found), default=np.inf) * (1.0 - _WORTH) > self.bound(number)

    def _enough(self, first: int, number: int) -> bool:
        """More than so many micro-batches are not tried; with ``first`` of them a layout was found."""
        if self.sync == "step":  # the balanced shares fit, and more cannot balance better than they do
            return number >= rounded_up(max(map(len, self.balanced)), self.multiple_of)
        # with bins that are nearly full of tokens there is no way to make them alike, with one lockstep more there is
        return number > first or self.packer.tokens.size < self.dp_size * (number + self.multiple_of)

    def _layouts(self, number: int) -> Iterator[_RankBins]:
        """Layouts with so many micro-batches on every rank."""
        packer, numbers = self.packer, [number] * self.dp_size
        in_rows = self.sync == "micro_batch" and number > 1  # with one it does not matter how often ranks meet
        if not in_rows and max(map(len, self.balanced)) <= number:
            # no exchange: the partition has ended where none helps
            work = np.array([sum(map(packer.cost, bins)) for bins in self.balanced])
            yield _RankBins(self.balanced, numbers, float(work.max()) + self.later * number)
            return
        bins = packer.pack(np.arange(packer.tokens.size), self.dp_size * number)
        if bins is None:
            return
        if not in_rows:
            yield self.exchanged(bins_to_ranks(packer, bins, self.dp_size, self.rotation), numbers)
            return
        # with fewer bins each rollout is alone in its own
        if len(bins) == self.dp_size * number:
            bins = self._locksteps(bins, number)
        ranks = bins_in_rows(packer, bins, self.dp_size, self.rotation)
        yield _RankBins(ranks, numbers, self._time_of(ranks) + self.later * number)

    def exchanged(self, ranks: list[Bins], numbers: list[int]) -> _RankBins:
        """Bins with rollouts exchanged, each rank's in so many micro-batches, until nothing is left to gain, nothing
        helps, or the budget is spent. Ranks meet once a step."""
        packer, later = self.packer, self.later * np.array(numbers)
        cells = self._cells(
            [[i for one in bins for i in one] for bins in ranks],
            np.array(numbers) * packer.cap,
            base=later,
            pack=(lambda items, rank: packer.tight(items, numbers[rank])) if max(numbers) > 1 else None,
        )
        cells.improve(self.bound(None if min(numbers) < max(numbers) else numbers[0]) * (1.0 + TOLERANCE), _BUDGET)
        shares = [share.tolist() for share in split_by_label(cells.cell_of(), self.dp_size)]
        # what was not exchanged need not be packed tightly
        packed = [packer.tight(*one) or bins for *one, bins in zip(shares, numbers, ranks, strict=True)]
        return _RankBins(packed, numbers, float(cells.times[0]))

    def _locksteps(self, bins: Bins, number: int) -> Bins:
        """Alike within each lockstep, from a start level by level, or from ``bins`` where there is none."""
        packer = self.packer
        # of two locksteps the second may be nearly empty after the one, the first be unlike after the other
        ways = (True, False) if number == 2 else (True,)
        starts = (_level_by_level(packer, self.dp_size, number, fullest=fullest) for fullest in ways)
        start = min((one for one in starts if one), key=self._time_of_rows, default=bins)
        return self.exchanged_in_rows(sorted(start, key=packer.cost, reverse=True), number, self.work_bound)

    def exchanged_in_rows(self, start: Bins, number: int, bound: float, **more: Any) -> Bins:
        """Bins of so many locksteps, row after row, with rollouts exchanged; no step is over before the bound."""
        cells = self._cells(start, self.packer.cap, rows=number, **more)
        cells.improve(bound * (1.0 + TOLERANCE), _BUDGET_LOCKSTEPS)
        return [one.tolist() for one in split_by_label(cells.cell_of(), self.dp_size * number)]

    def _cells(self, cells: Bins, most: Any, **more: Any) -> Cells:
        """The search from these cells; ``most``: tokens of each."""
        tokens = np.array(self.packer.token_list, dtype=np.int64)
        cell_of = np.empty(tokens.size, dtype=np.int64)
        for cell, one in enumerate(cells):
            cell_of[one] = cell
        slots = slots_of(cell_of, len(cells))
        # at least one rollout each: a micro-batch that is empty would be a padding copy
        limits = Limit(np.ones_like(tokens), 1, tokens.size), Limit(tokens, 0, most)
        return Cells(self.packer.work, slots, self.dp_size, limits=limits, **more)

    def _time_of_rows(self, bins: Bins) -> float:
        """The same for bins whose costliest form the first lockstep, the next the next."""
        return sum(sorted(map(self.packer.cost, bins), reverse=True)[:: self.dp_size])

    def _time_of(self, ranks: list[Bins]) -> float:
        """Sum over locksteps of the rank that is done last with its micro-batch."""
        took = np.zeros((max(map(len, ranks)), len(ranks)))
        for rank, share in enumerate(ranks):
            took[: len(share), rank] = [self.packer.cost(one) for one in share]
        return float(took.max(axis=1).sum())


def _level_by_level(packer: Packer, dp_size: int, number: int, *, fullest: bool) -> Bins | None:
    """Lockstep after lockstep: as long as its heaviest rollout or its fair share of what is left, filled up to that.

    One with an outlier takes as long as the outlier whatever else is in it, so it takes all it can. Costliest first,
    each to the fullest bin that has room, or to the one furthest from that level. None if what is left does not fit
    the last one. O(n * dp_size * number), vectorised.
    """
    tokens, work = packer.token_list, packer.work_list
    left = np.argsort(-packer.work, kind="stable").tolist()
    result: Bins = []
    for index in range(number - 1):
        # nobody can make it shorter than its heaviest, or than what is left needs in the mean
        level = max(work[left[0]], sum(work[i] for i in left) / (dp_size * (number - index)))
        held, room = np.zeros(dp_size), np.full(dp_size, packer.cap, dtype=np.int64)
        # a little more than the level: a sum of floats that equals it must fit
        free = np.full(dp_size, level * (1.0 + 1e-9))
        bins: Bins = [[] for _ in range(dp_size)]
        rest = []
        spare = len(left) - dp_size * (number - index - 1)  # those to come need one rollout per bin at least
        for i in left:
            fits = (room >= tokens[i]) & (free >= work[i])
            one = int(np.where(fits, held if fullest else free, -1.0).argmax())
            if spare > 0 and fits[one]:
                held[one] += tokens[i]
                room[one] -= tokens[i]
                free[one] -= work[i]
                bins[one].append(i)
                spare -= 1
            else:
                rest.append(i)
        if not all(bins):
            return None
        result += bins
        left = rest
    last = packer.pack(np.array(left, dtype=np.int64), dp_size)
    return None if last is None or len(last) < dp_size or not all(last) else result + last
