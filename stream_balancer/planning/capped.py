"""On which rank, and in how many micro-batches, under a token cap: so that the last rank is done as early as possible.

Ranks meet once a step; one is done after ``work / rate + overhead x its micro-batches``. Fewer micro-batches cost less
overhead, more of them leave more ways to balance, so every number that may win is tried:

    balanced shares    a partition that ignores the cap, each share packed by itself: best, where the number suffices
    all bins at once   packed tightly and dealt out to the ranks; then rollouts are exchanged (cells.py)

Pure and deterministic: the exchanges have a budget of elementary operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Counts, Floats, checked_speeds, split_by_label
from .bounds import lower_bound
from .cells import Cells, Limit
from .packing import Bins, Packer
from .partition import TOLERANCE, partition

_WORTH = 1e-3
"""How much earlier (relatively) the last rank must be done for another number of micro-batches."""

_BUDGET = 60_000
"""Elementary operations that the exchanges of a layout may spend: a few milliseconds."""


def least_finish(
    packer: Packer,
    num_ranks: int,
    *,
    counts: Counts,
    overhead: float,
    multiple_of: int,
    speeds: ArrayLike | None,
    rotation: int,
) -> list[Bins]:
    """``[rank][micro-batch]`` -> positions. A rank with fewer rollouts than micro-batches has a shorter list.

    Args:
        packer: the rollouts and the cap; not padded.
        num_ranks: number of ranks.
        counts: "equal": every rank has as many micro-batches; "free": each its own number.
        overhead: what a micro-batch costs whatever is in it, in the unit of the costs.
        multiple_of: the number of micro-batches is a multiple of this.
        speeds: [num_ranks] relative speeds.
        rotation: rotates rank labels.

    Complexity: a partition, O(n log n) per number of micro-batches tried, and exchanges within a fixed work budget.

    Examples:
        >>> from stream_balancer.planning.packing import Packer
        >>> sizes = np.array([600, 600, 600, 300, 300])
        >>> packer = Packer(sizes, sizes.astype(float), max_tokens=1000, padded=False)
        >>> knobs = {"multiple_of": 1, "speeds": None, "rotation": 0}
        >>> least_finish(packer, 2, counts="equal", overhead=0.0, **knobs)  # both done after 1200
        [[[0], [3, 4]], [[1], [2]]]
    """
    task = _task(packer, num_ranks, overhead, multiple_of, speeds)
    # where the cap does not bind these are the answer, and no layout under a cap can be better balanced
    shares = partition(packer.work, num_ranks, "free", speeds, rotation=rotation)
    balanced = [packer.fewest(share.tolist()) for share in shares]
    best = _of_one_number(task, balanced, speeds, rotation)
    if counts == "free":
        # the best with one number for all is one of those compared, so the freedom never makes it worse
        fewest = [packer.fewest([i for one in bins for i in one]) for bins in best[0]]
        free = [task.improved(bins, [task.rounded(max(len(one), 1)) for one in bins]) for bins in (fewest, balanced)]
        best = min((*free, best), key=itemgetter(2))  # of equal ones fewer micro-batches
    return [packer.spread(bins, number) if bins else [] for bins, number in zip(*best[:2], strict=True)]


def one_micro_batch_each(
    packer: Packer, num_ranks: int, *, speeds: ArrayLike | None, rotation: int
) -> list[Bins] | None:
    """`least_finish` with a micro-batch a rank; None if no way is found to fit everything into so many. O(n log n), and
    exchanges within a fixed work budget where the partition that ignores the cap does not fit."""
    # the cap often does not bind: then the best partition is the answer
    shares = partition(packer.work, num_ranks, "free", speeds, rotation=rotation)
    if all(packer.least_bins(share) == 1 for share in shares):
        return [[share.tolist()] if share.size else [] for share in shares]
    bins = packer.pack(np.arange(packer.tokens.size), num_ranks)
    if bins is None:
        return None
    task = _task(packer, num_ranks, 0.0, 1, speeds)
    ranks, _, _ = task.improved(bins_to_ranks(packer, bins, num_ranks, speeds, rotation), [1] * num_ranks)
    return ranks


def least_finish_bound(
    packer: Packer, num_ranks: int, *, counts: Counts, overhead: float, multiple_of: int, work_bound: float
) -> float:
    """No layout is done before this, on ranks of one speed; ``work_bound``: the same, micro-batches not counted."""
    task = _Task(packer, None, num_ranks, overhead, multiple_of, work_bound, packer.least_bins_of_all())
    return task.bound(None if counts == "free" else task.rounded(-(-task.least_bins // num_ranks)))


def bins_to_ranks(packer: Packer, bins: Bins, num_ranks: int, speeds: ArrayLike | None, rotation: int) -> list[Bins]:
    """The same number of bins to every rank, rank totals balanced."""
    costs = np.array([packer.cost(one) for one in bins])
    shares = partition(costs, num_ranks, "equal", speeds, rotation=rotation)
    return [[bins[one] for one in share] for share in shares]


_Layout: TypeAlias = "tuple[list[Bins], list[int], float]"
"""``[rank]`` bins, [rank] how many micro-batches it runs, and when the last one is done."""


@dataclass(frozen=True, slots=True)
class _Task:
    packer: Packer
    rate: Floats | None
    """[num_ranks] work per time; None: all alike."""
    num_ranks: int
    overhead: float
    """How much later a rank is done for a micro-batch more."""
    multiple_of: int
    work_bound: float
    """No layout is done before this, micro-batches not counted."""
    least_bins: int
    """No layout has fewer."""

    def bound(self, number: int | None) -> float:
        """No layout is done before this, if every rank has so many micro-batches; None: each its own number."""
        if number is not None:
            return self.work_bound + self.overhead * number
        slowest, together = (1.0, self.num_ranks) if self.rate is None else (self.rate.min(), self.rate.sum())
        mean = (float(self.packer.work.sum()) + slowest * self.overhead * self.least_bins) / together
        return float(max(self.work_bound + self.overhead * self.multiple_of, mean))

    def rounded(self, number: int) -> int:
        """Micro-batches that are run for so many."""
        return -(-number // self.multiple_of) * self.multiple_of

    def improved(self, ranks: list[Bins], numbers: list[int]) -> _Layout:
        """Bins with rollouts exchanged, each rank's in so many micro-batches, until nothing is left to gain, nothing
        helps, or the budget is spent."""
        packer, tokens = self.packer, np.array(self.packer.token_list, dtype=np.int64)
        rank_of = np.empty(tokens.size, dtype=np.int64)
        for rank, bins in enumerate(ranks):
            rank_of[[i for one in bins for i in one]] = rank
        later = self.overhead * np.array(numbers)
        most = np.array(numbers) * packer.cap
        cells = Cells.of(
            rank_of,
            packer.work,
            self.num_ranks,
            speed=self.rate,
            base=later if self.rate is None else later * self.rate,
            limits=(Limit(np.ones_like(tokens), 1, tokens.size), Limit(tokens, 0, most)),
            pack=(lambda items, rank: packer.tight(items, numbers[rank])) if max(numbers) > 1 else None,
        )
        number = None if min(numbers) < max(numbers) else numbers[0]
        cells.improve(self.bound(number) * (1.0 + TOLERANCE), _BUDGET)
        shares = [share.tolist() for share in split_by_label(cells.cell_of(), self.num_ranks)]
        # what was not exchanged need not be packed tightly
        packed = [packer.tight(*one) or bins for *one, bins in zip(shares, numbers, ranks, strict=True)]
        return packed, numbers, float(cells.times[0])


def _task(packer: Packer, num_ranks: int, overhead: float, multiple_of: int, speeds: ArrayLike | None) -> _Task:
    rate = checked_speeds(speeds, num_ranks)
    # an overhead is work that every rank has, at its own speed: as time it counts for the mean speed
    later = overhead * num_ranks / (num_ranks if rate is None else float(rate.sum()))
    bound = lower_bound(packer.work, num_ranks, "free", speeds)
    return _Task(packer, rate, num_ranks, later, multiple_of, bound, packer.least_bins_of_all())


def _of_one_number(task: _Task, balanced: list[Bins], speeds: ArrayLike | None, rotation: int) -> _Layout:
    """The same number of micro-batches on every rank: each number from the least that may hold all rollouts, until the
    balanced shares fit, or no more can win."""
    packer, num_ranks = task.packer, task.num_ranks
    # from this number on the balanced shares fit, and more micro-batches cannot balance better than they do
    need = task.rounded(max(map(len, balanced)))
    number = task.rounded(-(-task.least_bins // num_ranks))
    found: list[_Layout] = []
    while _worth(task, found, number):
        if number >= need:
            found.append(task.improved(balanced, [number] * num_ranks))
        bins = packer.pack(np.arange(packer.tokens.size), num_ranks * number) if _worth(task, found, number) else None
        if bins is not None:
            found.append(task.improved(bins_to_ranks(packer, bins, num_ranks, speeds, rotation), [number] * num_ranks))
            if number >= need:
                break
        # more micro-batches leave more ways to balance, and cost their overhead on every rank
        number += task.multiple_of
    return min(found, key=itemgetter(2))


def _worth(task: _Task, found: list[_Layout], number: int) -> bool:
    """A layout of so many micro-batches a rank may be better by enough than those that are found."""
    return min((finish for _, _, finish in found), default=np.inf) * (1.0 - _WORTH) > task.bound(number)
