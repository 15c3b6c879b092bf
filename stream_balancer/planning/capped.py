"""On which rank, and in how many micro-batches, under a token cap: so that the last rank is done as early as possible.

Ranks meet once a step; one is done after ``work / rate + overhead x its micro-batches``. Fewer micro-batches cost less
overhead, more of them leave more ways to balance, so every number that may win is tried:

    balanced shares    a partition that ignores the cap, each share packed by itself: best, where the number suffices
    all bins at once   packed tightly and dealt out to the ranks; then rollouts are exchanged, up to two for two,
                       between the rank that is done last and another, as long as both can be packed

Pure and deterministic: the exchanges have a budget of elementary operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .arrays import checked_speeds
from .bounds import lower_bound
from .partition import TOLERANCE, partition

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .arrays import Counts, Floats, Ints
    from .packing import Bins, Packer

_WORTH = 1e-3
"""How much earlier (relatively) the last rank must be done for another number of micro-batches."""

_BUDGET = 200_000
"""Elementary operations that the exchanges of a plan may spend: a few milliseconds."""

_ROUND_WORK = 2_000
"""What comparing with some ranks costs beside the exchanges it compares, and what packing two ranks costs, in the same
unit."""

_PACKED = 24
"""Exchanges of a round that are packed for real, the best first."""

_NEAR, _FAR = 4, 12
"""The last rank is compared with the first 4 to be done; only if that fails with the next 8, then with all."""

_PAIRS_UP_TO = 24
"""Up to so many rollouts on a rank they are exchanged in pairs, too."""


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
    rate = checked_speeds(speeds, num_ranks)
    rates = np.ones(num_ranks) if rate is None else rate
    later = overhead * num_ranks / float(rates.sum())
    task = _Task(
        packer,
        rates,
        later,
        multiple_of,
        work_bound=lower_bound(packer.work, num_ranks, "free", speeds),
        least_bins=packer.least_bins_of_all(),
    )
    shares = partition(packer.work, num_ranks, "free", speeds, rotation=rotation)
    balanced = [packer.fewest(share.tolist()) for share in shares]
    best = _of_one_number(task, balanced, speeds, rotation)
    if counts == "free":
        # the best with one number for all is a start, so the freedom never makes it worse
        starts = (best.ranks, balanced)
        best = min((_Layout(task, start, None).improved(_BUDGET // 2) for start in starts), key=_finish)
    return best.micro_batches()


def one_micro_batch_each(
    packer: Packer, num_ranks: int, *, speeds: ArrayLike | None, rotation: int
) -> list[Bins] | None:
    """`least_finish` with a micro-batch a rank; None if no way is found to fit everything into so many. O(n log n), and
    exchanges within a fixed work budget where the partition that ignores the cap does not fit."""
    rate = checked_speeds(speeds, num_ranks)
    shares = partition(packer.work, num_ranks, "free", speeds, rotation=rotation)
    if all(packer.least_bins(share) == 1 for share in shares):
        return [[share.tolist()] if share.size else [] for share in shares]
    bins = packer.pack(np.arange(packer.tokens.size), num_ranks)
    if bins is None:
        return None
    task = _Task(
        packer,
        np.ones(num_ranks) if rate is None else rate,
        overhead=0.0,
        multiple_of=1,
        work_bound=lower_bound(packer.work, num_ranks, "free", speeds),
        least_bins=num_ranks,
    )
    return _Layout(task, bins_to_ranks(packer, bins, num_ranks, speeds, rotation), 1).improved(_BUDGET).ranks


def least_finish_bound(
    packer: Packer, num_ranks: int, *, counts: Counts, overhead: float, multiple_of: int, work_bound: float
) -> float:
    """No layout is done before this, on ranks of one speed; ``work_bound``: the same, micro-batches not counted."""
    task = _Task(packer, np.ones(num_ranks), overhead, multiple_of, work_bound, packer.least_bins_of_all())
    return task.bound(None if counts == "free" else task.rounded(-(-task.least_bins // num_ranks)))


def bins_to_ranks(packer: Packer, bins: Bins, num_ranks: int, speeds: ArrayLike | None, rotation: int) -> list[Bins]:
    """The same number of bins to every rank, rank totals balanced."""
    costs = np.array([packer.cost(one) for one in bins])
    shares = partition(costs, num_ranks, "equal", speeds, rotation=rotation)
    return [[bins[one] for one in share] for share in shares]


@dataclass(frozen=True, slots=True)
class _Task:
    packer: Packer
    rates: Floats
    """[num_ranks] work per time."""
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
        least = float(self.rates.min()) * self.overhead * self.least_bins
        mean = (float(self.packer.work.sum()) + least) / float(self.rates.sum())
        return max(self.work_bound + self.overhead * self.multiple_of, mean)

    def rounded(self, number: int) -> int:
        """Micro-batches that are run for so many."""
        return -(-number // self.multiple_of) * self.multiple_of


def _of_one_number(task: _Task, balanced: list[Bins], speeds: ArrayLike | None, rotation: int) -> _Layout:
    """The same number of micro-batches on every rank: each number from the least that may hold all rollouts, until the
    balanced shares fit, or no more can win."""
    packer, num_ranks = task.packer, task.rates.size
    need = task.rounded(max(map(len, balanced)))
    number = task.rounded(-(-task.least_bins // num_ranks))
    found: list[_Layout] = []
    while _worth(task, found, number):
        if number >= need:
            found.append(_Layout(task, balanced, number).improved(_BUDGET))
        bins = packer.pack(np.arange(packer.tokens.size), num_ranks * number) if _worth(task, found, number) else None
        if bins is not None:
            dealt = bins_to_ranks(packer, bins, num_ranks, speeds, rotation)
            found.append(_Layout(task, dealt, number).improved(_BUDGET))
            if number >= need:
                break
        number += task.multiple_of
    return min(found, key=_finish)


def _worth(task: _Task, found: list[_Layout], number: int) -> bool:
    """A layout of so many micro-batches a rank may be better by enough than those that are found."""
    return min(map(_finish, found), default=np.inf) * (1.0 - _WORTH) > task.bound(number)


class _Share:
    """What one rank holds: in bins, and as everything that it could give away at once."""

    __slots__ = ("bins", "held", "items", "pairs", "sizes", "tokens", "work", "works")

    def __init__(self, packer: Packer, bins: Bins) -> None:
        self.bins = bins
        self.items = [i for one in bins for i in one]
        # place 0 is nobody: one who gives nothing back is in a pair with it
        works = np.array([0.0, *(packer.work_list[i] for i in self.items)])
        sizes = np.array([0, *(packer.token_list[i] for i in self.items)], dtype=np.int64)
        self.work, self.tokens = float(works.sum()), int(sizes.sum())
        self.pairs = first, second = _subsets(len(self.items))
        self.works: Floats = works[first] + works[second]
        """[subsets] work of each."""
        self.sizes: Ints = sizes[first] + sizes[second]
        """[subsets] tokens."""
        self.held: Ints = (first > 0).astype(np.int64) + (second > 0)
        """[subsets] rollouts."""

    def subset(self, number: int) -> list[int]:
        """Its rollouts."""
        return [self.items[place - 1] for one in self.pairs if (place := int(one[number]))]


@lru_cache(maxsize=256)
def _subsets(size: int) -> tuple[Ints, Ints]:
    """Every subset of none, one or two of so many, as two places counted from 1; 0 is nobody."""
    if size > _PAIRS_UP_TO:
        return np.arange(size + 1), np.zeros(size + 1, dtype=np.int64)
    first, second = np.triu_indices(size + 1, 1)
    return np.concatenate(([0], first)), np.concatenate(([0], second))


class _Layout:
    """Bins on ranks, and when each rank is done."""

    def __init__(self, task: _Task, ranks: list[Bins], number: int | None) -> None:
        """``number``: every rank has so many micro-batches; None: each as few as it needs."""
        self._task, self._number = task, number
        if number is None:
            ranks = [task.packer.fewest([i for one in bins for i in one]) for bins in ranks]
        self._shares = [_Share(task.packer, bins) for bins in ranks]
        self._done = np.array([self._done_at(rank, share) for rank, share in enumerate(self._shares)])

    @property
    def ranks(self) -> list[Bins]:
        """[rank][bin] -> positions."""
        return [share.bins for share in self._shares]

    @property
    def finish(self) -> float:
        """When the last rank is done."""
        return float(self._done.max())

    def micro_batches(self) -> list[Bins]:
        """[rank][micro-batch] -> positions: the bins, as many as the rank runs, evened out."""
        return [
            self._task.packer.spread(bins, self._number or self._task.rounded(len(bins))) if bins else []
            for bins in self.ranks
        ]

    def improved(self, budget: int) -> _Layout:
        """Itself, with rollouts exchanged until nothing is left to gain, no exchange helps, or the budget is spent."""
        target = self._task.bound(self._number) * (1.0 + TOLERANCE)
        while budget > 0 and self.finish > target:
            last = int(self._done.argmax())
            first_done = np.argsort(self._done, kind="stable")[:-1].tolist()
            for others in (first_done[:_NEAR], first_done[_NEAR:_FAR], first_done[_FAR:]):
                exchanged, spent = self._exchange(last, others) if others else (False, 0)
                budget -= spent
                if exchanged:
                    break
            else:
                break
        return self

    def _exchange(self, last: int, others: list[int]) -> tuple[bool, int]:
        """The best exchange of the last rank with one of these that leaves both packed; -> (done, work spent)."""
        mine, theirs = self._shares[last], [self._shares[rank] for rank in others]
        sizes = [share.works.size for share in theirs]
        place = np.repeat(np.arange(len(others)), sizes)  # [subsets of all of them] whose
        works, tokens, held = (
            np.concatenate([getattr(share, name) for share in theirs]) for name in ("works", "sizes", "held")
        )
        # [theirs] the same figures of the whole rank that each subset belongs to
        their_work, their_tokens, their_number = (
            np.array(column)[place] for column in zip(*((s.work, s.tokens, len(s.items)) for s in theirs), strict=True)
        )
        shift = mine.works[:, None] - works  # [mine, theirs] what leaves the last rank
        grow = mine.sizes[:, None] - tokens
        more = mine.held[:, None] - held
        done = np.maximum(
            self._earliest(mine.work - shift, mine.tokens - grow, self._task.rates[last]),
            self._earliest(their_work + shift, their_tokens + grow, self._task.rates[others][place]),
        )
        helps = (done < self._earlier) & (more < len(mine.items)) & (more > -their_number)
        found = np.flatnonzero(helps)
        spent = shift.size + _ROUND_WORK
        # Whether both ranks can be packed then is the dear question: it is asked of the few best only.
        if found.size > _PACKED:
            found = found[np.argpartition(done.ravel()[found], _PACKED)[:_PACKED]]
        for one in found[np.argsort(done.ravel()[found], kind="stable")].tolist():
            # row and column in [mine, theirs]
            gives, takes = divmod(one, works.size)
            at = int(place[takes])
            spent += _ROUND_WORK
            taken = theirs[at].subset(takes - sum(sizes[:at]))
            if self._packs(last, others[at], mine.subset(gives), taken):
                return True, spent
        return False, spent

    @property
    def _earlier(self) -> float:
        """A gain within rounding is no gain: two ranks could exchange the same rollouts to and fro."""
        return self.finish * (1.0 - 1e-9)

    def _earliest(self, work: Floats, tokens: Ints, rates: Floats) -> Floats:
        """[...] when ranks with so much work and so many tokens are done, if they can be packed at best; never, if they
        cannot."""
        bins = -(-tokens // self._task.packer.cap)
        if self._number is None:
            run = -(-bins // self._task.multiple_of) * self._task.multiple_of
            done: Floats = work / rates + self._task.overhead * run
            return done
        return np.where(bins <= self._number, work / rates + self._task.overhead * self._number, np.inf)

    def _packs(self, last: int, other: int, gives: list[int], takes: list[int]) -> bool:
        """Exchange these, if both ranks can be packed then, and are done earlier than the last one is now."""
        changed = []
        for rank, out, into in ((last, gives, takes), (other, takes, gives)):
            items = [i for i in self._shares[rank].items if i not in out] + into
            bins = self._task.packer.tight(items, self._number)
            if bins is None:
                return False
            changed.append((rank, _Share(self._task.packer, bins)))
        done = [self._done_at(rank, share) for rank, share in changed]
        if max(done) >= self._earlier:
            return False
        for (rank, share), when in zip(changed, done, strict=True):
            self._shares[rank], self._done[rank] = share, when
        return True

    def _done_at(self, rank: int, share: _Share) -> float:
        number = self._number or self._task.rounded(len(share.bins))
        return share.work / float(self._task.rates[rank]) + self._task.overhead * number


def _finish(layout: _Layout) -> float:
    return layout.finish
