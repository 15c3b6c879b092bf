"""On which rank and in which micro-batch, under a token cap.

    ranks meet once per step           A partition with at most number x cap tokens per rank, then each share is packed.
                                       The number rises from the least until one more gains nothing.
    ranks meet at every micro-batch    lockstep.py. With equal rollout counts: a partition, packed shares, exchanges.
    padded                             padded.py

Example: 600, 600, 600, 300, 300 tokens on two ranks under a cap of 1,000. Two micro-batches per rank hold the 2,400
tokens: [600] [600] and [600] [300 300], and both ranks finish after 1,200.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Floats, Ints, Layout, Oversize, Sync, checked_costs, order_of, rounded_up, split_by_label
from .exchange import Cells
from .lockstep import in_locksteps
from .padded import runs_of
from .partition import assign, largest_first, shares_of
from .plan import PlanKnobs, Waiting

# Relative time that fewer micro-batches may cost.
_WORTH = 1e-3
# Numbers of micro-batches that are tried below the number that the balanced shares need.
_TRIED = 4


class OversizeError(ValueError):
    """A rollout is longer than the token cap."""


def form_micro_batches(
    lengths: ArrayLike,
    costs: ArrayLike,
    dp_size: int,
    *,
    max_tokens: int | None = None,
    sync: Sync = "step",
    equal_rollouts: bool = False,
    padded: bool = False,
    equal_number: bool = True,
    overhead_cost: float = 0.0,
    multiple_of: int = 1,
    oversize: Oversize = "refuse",
    rotation: int = 0,
) -> Layout:
    """Lay rollouts out as ``[rank][micro_batch]`` -> ascending positions. No micro-batch is empty.

    `PlanKnobs` explains the parameters that are not listed. With ``equal_number``, a rank with fewer rollouts than
    micro-batches has a shorter list; the caller completes it with padding copies.

    Args:
        lengths: [n] tokens, >= 1.
        costs: [n] work, finite and >= 0.
        dp_size: number of ranks.
        oversize: "refuse" a rollout above the cap, or run it "alone" in a micro-batch.
        rotation: rotates the rank labels. Pass the step.

    Raises:
        OversizeError: a rollout is above the cap and ``oversize`` is "refuse".
        ValueError: columns of different sizes, a length below 1, or a cost that `split` refuses.

    Examples:
        >>> lengths = [600, 600, 600, 300, 300]
        >>> form_micro_batches(lengths, lengths, dp_size=2, max_tokens=1000)
        [[array([0]), array([2])], [array([1]), array([3, 4])]]
    """
    tokens, work = np.asarray(lengths, np.int64), checked_costs(costs, dp_size)
    if tokens.shape != work.shape or (tokens.size and tokens.min() < 1):
        raise ValueError(f"lengths {tokens.shape} must be tokens >= 1, one for each of the costs {work.shape}.")
    if multiple_of < 1:
        raise ValueError(f"multiple_of ({multiple_of}) must be >= 1.")
    if max_tokens is not None and oversize == "refuse" and int(tokens.max(initial=0)) > max_tokens:
        raise OversizeError(
            f"a rollout of {int(tokens.max())} tokens is longer than max_tokens ({max_tokens}): no micro-batch can "
            "hold it. Raise max_tokens, truncate the rollout, or choose oversize='alone'."
        )
    limits = max_tokens, equal_number, multiple_of, overhead_cost, padded
    knobs = PlanKnobs(dp_size, tokens.size, None, sync, equal_rollouts, False, None, *limits)
    return laid_out(Waiting.of(work, tokens), knobs, np.arange(tokens.size), rotation)


def laid_out(waiting: Waiting, knobs: PlanKnobs, rows: Ints, rotation: int) -> Layout:
    """``[rank][micro_batch]`` -> positions of the rows. A rollout above the cap runs alone."""
    work, dp_size = waiting.costs[rows], knobs.dp_size
    if not rows.size:
        return [[] for _ in range(dp_size)]
    if knobs.has_micro_batches:
        ranks = Packer(waiting.lengths[rows], work, knobs).layout()
    else:
        shares = shares_of(work, dp_size, knobs.equal_rollouts, knobs.tolerance)
        ranks = [[share] if share.size else [] for share in shares]
    first = -rotation % dp_size
    return [[rows[one] for one in share] for share in ranks[first:] + ranks[:first]]


class Packer:
    """Layouts of some rollouts in micro-batches."""

    def __init__(self, lengths: Ints, work: Floats, knobs: PlanKnobs) -> None:
        self._knobs, self._work = knobs, work
        self._cap = int(lengths.sum()) * lengths.size + 1 if knobs.max_tokens is None else knobs.max_tokens
        # A rollout above the cap counts as exactly full, so that it runs alone.
        self._tokens = np.minimum(lengths, self._cap)

    def layout(self) -> Layout:
        """``[rank][micro_batch]`` -> ascending positions, in running order."""
        in_rows = self._knobs.sync == "micro_batch"
        ranks = self._padded() if self._knobs.padded else self._locksteps() if in_rows else self._steps()
        return [[np.sort(one) for one in self._heaviest_first(share)] for share in ranks]

    def _heaviest_first(self, bins: list[Ints]) -> list[Ints]:
        return sorted(bins, key=self._cost, reverse=True)

    def _split(self, work: Floats) -> list[Ints]:
        return shares_of(work, self._knobs.dp_size, self._knobs.equal_rollouts, self._knobs.tolerance)

    def _cost(self, one: Ints) -> float:
        """Work of a micro-batch."""
        work = self._work[one]
        return one.size * float(work.max()) if self._knobs.padded else float(work.sum())

    def packed(self, shares: list[Ints]) -> Layout:
        """Each rank's rollouts in the fewest micro-batches that the rank (``equal_number``: every rank) can have."""
        fewest = [self._fewest(share) for share in shares]
        if self._knobs.equal_number:
            fewest = [max(fewest)] * len(shares)
        return [self._spread(share, number) for share, number in zip(shares, fewest, strict=True)]

    def _steps(self) -> Layout:
        """Ranks meet once per step."""
        knobs, overhead = self._knobs, self._knobs.overhead_cost
        if not knobs.equal_number:
            # The overhead of a micro-batch, spread over its tokens.
            even = self._work + overhead * self._tokens / self._cap
            return self.packed(self._split(even))
        free = self._split(self._work)
        last = max(map(self._fewest, free))
        limit = (self._latest(free) + last * overhead) * (1.0 + _WORTH)
        # [number of micro-batches] from the least that holds the tokens; `free` ignores the cap.
        least = rounded_up(-(-int(self._tokens.sum()) // (knobs.dp_size * self._cap)), knobs.multiple_of)
        for number in range(max(least, last - _TRIED * knobs.multiple_of), last, knobs.multiple_of):
            cap = self._tokens, number * self._cap
            labels = assign(self._work, knobs.dp_size, knobs.equal_rollouts, knobs.tolerance, cap)
            if labels is not None:
                shares = split_by_label(labels, knobs.dp_size)
                fits = max(map(self._fewest, shares)) <= number
                if fits and self._latest(shares) + number * overhead <= limit:
                    return [self._spread(share, number) for share in shares]
        return [self._spread(share, last) for share in free]

    def _latest(self, shares: list[Ints]) -> float:
        return max(float(self._work[share].sum()) for share in shares)

    def _locksteps(self) -> Layout:
        """Ranks meet at every micro-batch."""
        knobs, ranks = self._knobs, self._knobs.dp_size
        if not knobs.equal_rollouts:
            step = self._work, self._tokens, ranks, self._cap
            return _dealt(in_locksteps(*step, knobs.multiple_of, knobs.overhead_cost), ranks)
        layout = [self._heaviest_first(share) for share in self.packed(self._split(self._work))]
        number = max(map(len, layout))
        if number == 1 or min(map(len, layout)) < number:
            return layout
        # One-for-one exchanges keep the counts of the ranks; a move stays on its rank.
        labels = np.empty(self._work.size, np.int64)
        for rank, bins in enumerate(layout):
            for index, one in enumerate(bins):
                labels[one] = index * ranks + rank
        cells = Cells.of(self._work, labels, ranks * number, (self._tokens, self._cap), least=1)
        cells.even_rows(number, keep=ranks)
        found = split_by_label(cells.labels(), ranks * number)
        return [found[rank::ranks] for rank in range(ranks)]

    def _padded(self) -> Layout:
        """Neighbours in length share a micro-batch; with equal rollout counts, neighbours of one rank."""
        knobs, ranks = self._knobs, self._knobs.dp_size
        if knobs.equal_rollouts:
            return self.packed(self._split(self._work))
        everything = np.arange(self._work.size)
        number = rounded_up(-(-len(self._runs(everything, 1)) // ranks), knobs.multiple_of)
        bins = self._runs(everything, ranks * number)
        weight = np.array([self._cost(one) for one in bins])
        if knobs.sync == "step":
            return [[bins[one] for one in share] for share in shares_of(weight, ranks, True)]
        return _dealt([bins[one] for one in order_of(-weight)], ranks)

    def _runs(self, share: Ints, number: int) -> list[Ints]:
        return [share[one] for one in runs_of(self._tokens[share], self._work[share], number, self._cap)]

    def _fewest(self, share: Ints) -> int:
        """Fewest micro-batches that were found for a share, as a multiple."""
        bins = self._runs(share, 1) if self._knobs.padded else _best_fit(self._tokens[share].tolist(), self._cap)
        return rounded_up(max(len(bins), 1), self._knobs.multiple_of)

    def _spread(self, share: Ints, number: int) -> list[Ints]:
        """Exactly ``number`` micro-batches, as even as possible; one rollout each where rollouts are fewer."""
        if share.size <= number:
            return [share[i : i + 1] for i in range(share.size)]
        if self._knobs.padded:
            return self._runs(share, number)
        tokens = self._tokens[share]
        labels = largest_first(self._work[share], number, False, (tokens, self._cap))
        if labels is None:
            bins = _best_fit(tokens.tolist(), self._cap)
        else:
            bins = [one.tolist() for one in split_by_label(labels, number)]
        while len(bins) < number:  # part of a micro-batch fits wherever the whole did
            largest = max(range(len(bins)), key=lambda one: len(bins[one]))
            bins.append([bins[largest].pop() for _ in range(len(bins[largest]) // 2)])
        return [share[one] for one in bins]


def _best_fit(tokens: list[int], cap: int) -> list[list[int]]:
    """Best-fit decreasing: each rollout goes into the fullest bin with room. O(n log n)."""
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    bins: list[list[int]] = []
    for i in sorted(range(len(tokens)), key=lambda one: -tokens[one]):
        place = bisect_left(room, (tokens[i], -1))
        if place == len(room):
            bins.append([])
        left, one = (cap, len(bins) - 1) if place == len(room) else room.pop(place)
        bins[one].append(i)
        insort(room, (left - tokens[i], one))
    return bins


def _dealt(bins: list[Ints], ranks: int) -> Layout:
    """Sorted micro-batches -> ``[rank][micro_batch]``, back and forth: no rank has the heaviest of every lockstep."""
    dealt: Layout = [[] for _ in range(ranks)]
    for place, one in enumerate(bins):
        row, rank = divmod(place, ranks)
        dealt[ranks - 1 - rank if row % 2 else rank].append(one)
    return dealt
