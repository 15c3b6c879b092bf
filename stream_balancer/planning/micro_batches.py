"""In which micro-batch: rollouts into bins under a hard token cap, the same number of bins on every rank.

    sync="step"         ranks meet once per step: rank totals first (partition.py), then each rank packs its share
    sync="micro_batch"  ranks meet at every micro-batch: all ranks x number bins are packed at once, sorted by cost;
                        `num_ranks` neighbours make one row, the micro-batches of one index; then a row search
    padded              a bin costs rows x longest: neighbours in length share a bin, and the cuts are such that the
                        costliest bin is as cheap as can be

Everything fails towards one more micro-batch, never over the cap. Pure and deterministic.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from .partition import partition, partition_together

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from .partition import Counts, Floats, Ints

    Bins = list[list[int]]

Order = Literal["heaviest_first", "pipeline"]

_Bin = TypeVar("_Bin")

_ROW_SEARCH_WORK = 3_200_000
"""Elementary operations the row search may spend: about 5 ms."""


_TRY_WORK = 4_000
"""What one try costs beside that: its fixed part, in the same unit."""


class OversizeError(ValueError):
    """A rollout is longer than the token cap and the policy is to refuse it."""


def form_micro_batches(
    lengths: ArrayLike,
    costs: ArrayLike,
    num_ranks: int,
    *,
    max_tokens: int | None = None,
    sync: Literal["step", "micro_batch"] = "step",
    counts: Counts = "free",
    padded: bool = False,
    multiple_of: int = 1,
    order: Order = "heaviest_first",
    speeds: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    oversize: Literal["refuse", "alone"] = "refuse",
    rotation: int = 0,
) -> list[list[Ints]]:
    """Lay rollouts out as ``[rank][micro_batch]`` -> ascending positions.

    Args:
        lengths: [n] tokens, >= 1.
        costs: [n] work, finite and >= 0.
        num_ranks: number of ranks.
        max_tokens: no micro-batch holds more tokens than this (rows x longest if `padded`); None = no cap.
        sync: "step": ranks meet once per step, so rank totals are balanced; "micro_batch": they meet at every
            micro-batch, so micro-batches of the same index are made alike.
        counts: "equal": rollouts per rank differ by at most one.
        padded: a micro-batch costs rows x its costliest rollout, and the cap counts the padding.
        multiple_of: the number of micro-batches is a multiple of this (virtual pipelines).
        order: "heaviest_first", or "pipeline": the smaller ones at both ends, where the pipeline is filling or
            draining.
        speeds: [num_ranks] relative speeds.
        keep_together: [n] labels; rollouts of one label go to one rank.
        oversize: a rollout longer than max_tokens is refused, or sits alone in its micro-batch.
        rotation: rotates rank labels (pass the step).

    Returns:
        Every rank has the same number of micro-batches, none is empty, and the number is the least that was found, if
        there are rollouts enough for it. With fewer rollouts than ranks x micro-batches (or, with keep_together or
        equal counts, on one rank), some lists are shorter: the caller completes them with zero-weight padding copies.

    Raises:
        OversizeError: a rollout is longer than max_tokens and oversize="refuse".
        ValueError: lengths and costs differ in shape, or multiple_of < 1; and as for `partition`.

    Complexity: O(n log n) per number of micro-batches tried; the row search has a fixed work budget.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(costs, dtype=np.float64)
    if tokens.shape != work.shape or tokens.ndim != 1:
        raise ValueError(f"lengths {tokens.shape} and costs {work.shape} must be one-dimensional and alike.")
    if multiple_of < 1:
        raise ValueError(f"multiple_of ({multiple_of}) must be >= 1.")
    if tokens.size == 0:
        return [[] for _ in range(num_ranks)]
    if max_tokens is not None and oversize == "refuse" and int(tokens.max()) > max_tokens:
        raise OversizeError(
            f"a rollout of {int(tokens.max())} tokens is longer than max_tokens ({max_tokens}): no micro-batch can "
            "hold it. Raise max_tokens, truncate the rollout, or choose oversize='alone'."
        )
    packer = _Packer(tokens, work, max_tokens, padded)
    if keep_together is not None:
        shares = partition_together(work, keep_together, num_ranks, counts, speeds, rotation=rotation)
        ranks = _packed_shares(packer, shares, multiple_of, limit=None)
    elif counts == "equal":
        shares = partition(work, num_ranks, counts, speeds, rotation=rotation)
        ranks = _packed_shares(packer, shares, multiple_of, limit=None)
    else:
        ranks = _least_number(packer, num_ranks, sync, multiple_of, speeds, rotation)
    assert ranks is not None  # only a limit can make packing fail
    return [[np.array(sorted(one), dtype=np.int64) for one in in_order(bins, packer.cost, order)] for bins in ranks]


def _least_number(
    packer: _Packer,
    num_ranks: int,
    sync: Literal["step", "micro_batch"],
    multiple_of: int,
    speeds: ArrayLike | None,
    rotation: int,
) -> list[Bins]:
    """Try numbers of micro-batches from the lower bound up; ends at one rollout per bin at the latest."""
    everything = np.arange(packer.tokens.size)
    number = _round_up(-(-packer.least_bins(everything) // num_ranks), multiple_of)
    shares = None
    if sync == "step" and not packer.padded:
        shares = partition(packer.work, num_ranks, "free", speeds, rotation=rotation)
    while True:
        if shares is not None:
            ranks = _packed_shares(packer, shares, multiple_of, limit=number)
            if ranks is not None:
                return ranks
        bins = packer.pack(everything, num_ranks * number)
        if bins is not None:
            if sync == "step":
                return _bins_to_ranks(packer, bins, num_ranks, speeds, rotation)
            return _rows(packer, bins, num_ranks, number, speeds, rotation)
        number += multiple_of


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _packed_shares(packer: _Packer, shares: list[Ints], multiple_of: int, limit: int | None) -> list[Bins] | None:
    """Every rank packs its own share, all into the same number of bins. None if that takes more than `limit`."""
    number = _round_up(max(packer.least_bins(share) for share in shares), multiple_of)
    while limit is None or number <= limit:
        if limit is not None and any(share.size < number for share in shares) and packer.tokens.size >= number:
            return None  # some rank could not fill its micro-batches: pack over all ranks instead
        packed = [packer.pack(share, number) for share in shares]
        if all(bins is not None for bins in packed):
            return [bins for bins in packed if bins is not None]
        number += multiple_of
    return None


def _bins_to_ranks(packer: _Packer, bins: Bins, num_ranks: int, speeds: ArrayLike | None, rotation: int) -> list[Bins]:
    """The same number of bins to every rank, rank totals balanced."""
    costs = np.array([packer.cost(one) for one in bins])
    shares = partition(costs, num_ranks, "equal", speeds, rotation=rotation)
    return [[bins[one] for one in share] for share in shares]


def in_order(bins: list[_Bin], cost: Callable[[_Bin], float], order: Order) -> list[_Bin]:
    """A rank's micro-batches in the order they run in."""
    heaviest_first = sorted(bins, key=cost, reverse=True)
    if order == "pipeline":  # ..., 5th, 3rd, 1st, 2nd, 4th, ...: the heaviest in the middle
        heaviest_first = heaviest_first[::2][::-1] + heaviest_first[1::2]
    return heaviest_first


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


class _Packer:
    """Rollouts into a given number of bins, never over the cap; a rollout over the cap sits alone."""

    def __init__(self, tokens: Ints, work: Floats, max_tokens: int | None, padded: bool) -> None:
        self.tokens = tokens
        self.work = work
        self.padded = padded
        self.cap: int = max_tokens if max_tokens is not None else int(tokens.sum()) * max(tokens.size, 1) + 1
        self._token_list: list[int] = np.minimum(tokens, self.cap).tolist()  # alone over the cap = exactly full
        self._work_list: list[float] = work.tolist()

    def cost(self, one: list[int]) -> float:
        """Work of a bin."""
        if self.padded:
            return len(one) * max(self._work_list[i] for i in one)
        return float(sum(self._work_list[i] for i in one))

    def least_bins(self, share: Ints) -> int:
        """No packing of this share needs fewer bins than this."""
        held: int = sum(self._token_list[i] for i in share.tolist())
        return max(1, -(-held // self.cap))

    def pack(self, share: Ints, number: int) -> Bins | None:
        """`number` bins, all of them used if there are rollouts enough; None if no way was found."""
        if share.size <= number:
            return [[i] for i in share.tolist()]
        if self.padded:
            return self._pack_neighbours(share, number)
        by_work = share[np.lexsort((-self.tokens[share], -self.work[share]))].tolist()
        bins = self._pack_lightest(by_work, number, self._work_list)
        if bins is None:
            by_tokens = share[np.lexsort((-self.work[share], -self.tokens[share]))].tolist()
            bins = self._pack_lightest(by_tokens, number, self._token_list) or self._pack_best_fit(by_tokens, number)
        return bins

    def _pack_lightest(self, order: list[int], number: int, weight: list[float] | list[int]) -> Bins | None:
        """Each to the lightest bin that has room (LPT with a second, hard dimension). O(n log n), rarely more."""
        tie_breaker = (sum(weight[i] for i in order) or 1.0) * 1e-9 / len(order)
        heap: list[tuple[float, int]] = [(0.0, one) for one in range(number)]
        room = [self.cap] * number
        bins: Bins = [[] for _ in range(number)]
        for i in order:
            size = self._token_list[i]
            full: list[tuple[float, int]] = []
            while heap and room[heap[0][1]] < size:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            load, one = heap[0]
            heapq.heapreplace(heap, (load + weight[i] + tie_breaker, one))
            room[one] -= size
            bins[one].append(i)
            for entry in full:
                if room[entry[1]] > 0:
                    heapq.heappush(heap, entry)
        return bins

    def _pack_best_fit(self, order: list[int], number: int) -> Bins | None:
        """Best-fit decreasing: each to the fullest bin that has room. O(n * number), vectorised."""
        room = np.full(number, self.cap, dtype=np.int64)
        bins: Bins = [[] for _ in range(number)]
        for i in order:
            left = room - self._token_list[i]
            one = int(np.where(left >= 0, left, np.iinfo(np.int64).max).argmin())
            if left[one] < 0:
                return None
            room[one] = left[one]
            bins[one].append(i)
        return self._fill_empty(bins)

    def _pack_neighbours(self, share: Ints, number: int) -> Bins | None:
        """Padded: runs of neighbours in length, cut so that the costliest run is as cheap as can be (bisection)."""
        order = share[np.lexsort((-self.work[share], -self.tokens[share]))].tolist()
        if self._runs(order, float("inf"), number) is None:
            return None
        high = float(len(order)) * max(self._work_list[i] for i in order)
        low = 0.0
        best = self._runs(order, high, number)
        for _ in range(24):
            middle = (low + high) / 2.0
            runs = self._runs(order, middle, number)
            if runs is None:
                low = middle
            else:
                best, high = runs, middle
        return None if best is None else self._fill_empty(best + [[] for _ in range(number - len(best))])

    def _runs(self, order: list[int], level: float, number: int) -> Bins | None:
        runs: Bins = []
        longest, costliest = 0, 0.0
        for i in order:
            grown = len(runs[-1]) + 1 if runs else 0
            costliest_here = max(costliest, self._work_list[i])
            if runs and grown * longest <= self.cap and grown * costliest_here <= level:
                runs[-1].append(i)
                costliest = costliest_here
            else:
                if len(runs) == number:
                    return None
                runs.append([i])
                longest, costliest = self._token_list[i], self._work_list[i]
        return runs

    def _fill_empty(self, bins: Bins) -> Bins:
        """No bin stays empty: the heaviest that can be is split (what it gives away fits anywhere it fitted before)."""
        heap = [(-self.cost(one), number) for number, one in enumerate(bins) if len(one) > 1]
        heapq.heapify(heap)
        for number, target in enumerate(bins):
            if target:
                continue
            _, heaviest = heapq.heappop(heap)
            source = sorted(bins[heaviest], key=self._work_list.__getitem__)
            half = len(source) // 2
            if self.padded:
                target[:], bins[heaviest][:] = source[:half], source[half:]
            else:
                target[:], bins[heaviest][:] = source[::2][-half:], source[1::2] + source[::2][:-half]
            for one in (heaviest, number):
                if len(bins[one]) > 1:
                    heapq.heappush(heap, (-self.cost(bins[one]), one))
        return bins


# ---------------------------------------------------------------------------------------------------------------------
# Rows: ranks that meet at every micro-batch
# ---------------------------------------------------------------------------------------------------------------------


def _rows(
    packer: _Packer, bins: Bins, num_ranks: int, number: int, speeds: ArrayLike | None, rotation: int
) -> list[Bins]:
    """[num_ranks * number] bins -> [rank][row]; bins of one row are alike."""
    if not packer.padded and len(bins) == num_ranks * number and number > 1 and num_ranks > 1:
        best = _by_cost(packer, bins)
        levelled = _level_rows(packer, num_ranks, number)
        candidates = [best] if levelled is None else [best, levelled]
        searched = [_search_rows(packer, one, num_ranks) for one in candidates]
        bins = min(searched, key=lambda one: _row_time(packer, one, num_ranks))
    bins = _by_cost(packer, bins)
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    fastest_first = None if speeds is None else np.argsort(-np.asarray(speeds, dtype=np.float64), kind="stable")
    for row, start in enumerate(range(0, len(bins), num_ranks)):
        for place, one in enumerate(bins[start : start + num_ranks]):
            if fastest_first is not None:
                rank = int(fastest_first[place])
            else:  # fold: who has the heaviest of this row has the lightest of the next
                rank = (place if row % 2 == 0 else num_ranks - 1 - place) + rotation
            ranks[rank % num_ranks].append(one)
    return ranks


def _by_cost(packer: _Packer, bins: Bins) -> Bins:
    return sorted(bins, key=packer.cost, reverse=True)


def _row_time(packer: _Packer, bins: Bins, num_ranks: int) -> float:
    """Sum over rows of the costliest bin: what the step takes if ranks meet at every micro-batch."""
    return sum(packer.cost(one) for one in _by_cost(packer, bins)[::num_ranks])


def _level_rows(packer: _Packer, num_ranks: int, number: int) -> Bins | None:
    """Row after row: as long as its heaviest rollout or its fair share of what is left, filled up to that.

    A row with an outlier takes as long as the outlier whatever else is in it, so it takes all it can.
    First-fit decreasing by cost. None if what is left does not fit the last row. O(n * num_ranks * number), vectorised.
    """
    tokens, work = packer._token_list, packer._work_list
    left = np.argsort(-packer.work, kind="stable").tolist()
    result: Bins = []
    for row in range(number - 1):
        level = max(work[left[0]], sum(work[i] for i in left) / (num_ranks * (number - row)))
        room = np.full(num_ranks, packer.cap, dtype=np.int64)
        free = np.full(num_ranks, level * (1.0 + 1e-9))
        bins: Bins = [[] for _ in range(num_ranks)]
        rest = []
        spare = len(left) - num_ranks * (number - row - 1)  # the rows to come need one rollout per bin at least
        for i in left:
            fits = (room >= tokens[i]) & (free >= work[i]) if spare > 0 else np.zeros(1, dtype=np.bool_)
            if fits.any():
                one = int(np.where(fits, free, -np.inf).argmax())
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
    last = packer.pack(np.array(left, dtype=np.int64), num_ranks)
    return None if last is None or len(last) < num_ranks or not all(last) else result + last


def _search_rows(packer: _Packer, bins: Bins, num_ranks: int) -> Bins:
    """Lower the costliest bin of one row after the other by the move or exchange that saves most over all rows.

    Rows stay what they are during the search. Each try compares all rollouts of that bin with all others. O(work
    budget).
    """
    n = packer.tokens.size
    where = np.zeros(n + len(bins), dtype=np.int64)  # the last len(bins) are dummies: a move is an exchange with one
    tokens = np.concatenate((np.minimum(packer.tokens, packer.cap), np.zeros(len(bins), dtype=np.int64)))
    work = np.concatenate((packer.work, np.zeros(len(bins))))
    for one, members in enumerate(bins):
        where[members] = one
    where[n:] = np.arange(len(bins))
    load = np.array([packer.cost(one) for one in bins])
    room = packer.cap - np.array([sum(packer._token_list[i] for i in one) for one in bins], dtype=np.int64)
    held = np.array([len(one) for one in bins])
    num_rows = len(bins) // num_ranks
    budget = _ROW_SEARCH_WORK
    idle_rows = 0
    row = 0
    while budget > 0 and idle_rows < num_rows:
        rows = load.reshape(num_rows, num_ranks)
        peaks = rows.max(axis=1)
        hot = row * num_ranks + int(rows[row].argmax())
        runner_up = float(np.partition(rows[row], -2)[-2])
        mine = np.flatnonzero(where == hot)
        budget -= mine.size * where.size + _TRY_WORK
        gained = _best_exchange(work, tokens, where, load, room, held, peaks, mine, hot, runner_up, num_ranks, n)
        if gained is None:
            idle_rows += 1
        else:
            idle_rows = 0
            i, j = gained
            other = int(where[j])
            shift, grow = work[i] - work[j], tokens[i] - tokens[j]
            load[hot] -= shift
            load[other] += shift
            room[hot] += grow
            room[other] -= grow
            held[hot] -= int(i < n) - int(j < n)
            held[other] += int(i < n) - int(j < n)
            where[i], where[j] = other, hot
        row = (row + 1) % num_rows
    result: Bins = [[] for _ in bins]
    for i, one in enumerate(where[:n].tolist()):
        result[one].append(i)
    return result


def _best_exchange(
    work: Floats,
    tokens: Ints,
    where: Ints,
    load: Floats,
    room: Ints,
    held: Ints,
    peaks: Floats,
    mine: Ints,
    hot: int,
    runner_up: float,
    num_ranks: int,
    n: int,
) -> tuple[int, int] | None:
    """The pair (i in the hot bin, j anywhere else) whose exchange lowers the sum of row peaks most; None if none
    does."""
    other = where[None, :]
    shift = work[mine][:, None] - work[None, :]
    grow = tokens[mine][:, None] - tokens[None, :]
    real_i, real_j = (mine < n)[:, None], (np.arange(where.size) < n)[None, :]
    allowed = (other != hot) & (shift > 0.0) & (grow <= room[other]) & (-grow <= room[hot])
    allowed &= real_j | (held[hot] > 1)  # a move may not empty the bin
    allowed &= real_i
    row = hot // num_ranks
    new_hot = load[hot] - shift
    new_other = load[other] + shift
    same_row = other // num_ranks == row
    own = np.maximum(runner_up, new_hot)
    saved = peaks[row] - np.where(same_row, np.maximum(own, new_other), own)
    saved -= np.where(same_row, 0.0, np.maximum(new_other - peaks[other // num_ranks], 0.0))
    # if several bins share the peak nothing is saved yet, but one fewer does: count lowering the hot bin a little
    saved += 1e-6 * (load[hot] - np.maximum(new_hot, np.where(same_row, new_other, 0.0)))
    saved = np.where(allowed, saved, -np.inf)
    best = int(saved.argmax())
    i, j = divmod(best, where.size)
    return (int(mine[i]), j) if saved[i, j] > 1e-9 * float(load[hot]) else None
