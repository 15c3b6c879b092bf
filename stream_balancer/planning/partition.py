"""Who goes where: costs onto ranks, so that the last rank finishes as early as possible.

Pure: numpy in, index arrays out; a work budget instead of a clock, so the same input always gives the same answer.

    costs --> lower_bound          no partition can finish before this
          --> greedy start         largest first onto the rank that would finish first (LPT, Graham 1969)
          --> exchange rounds      hottest rank with coldest, next with next: for all pairs at once the exchange of one
                                   (later: two) rollouts that comes closest to making both finish together
          --> stop                 at the bound, or when the work budget is spent

"Free" counts are made the same problem as "equal" counts by dummies of zero cost: a move is an exchange with a dummy.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

Counts = Literal["free", "equal"]

_BUDGET = 6_000
_BUDGET_EACH = 250
"""Elementary operations that a refinement may spend: so many, and so many more per rollout."""

_ROUND_WORK = 2_000
"""What a round costs beside the exchanges it compares, in the same unit."""

_SINGLE_ROUNDS = 8
"""Rounds of one-for-one exchanges; two for two cost more and help when the loads are nearly alike."""

_QUIET_ROUNDS = 2
"""Rounds without a move after which the hottest rank is tried with everybody."""

_SMALL = 64
"""Up to so many rollouts one descent often ends in a poor place, and many are affordable side by side."""

_SMALL_COPIES = 50_000
"""Slots in all the copies, times rollouts, that descend side by side."""

_SMALL_ROUNDS = 18

TOLERANCE = 1e-4
"""How far (relatively) above the lower bound a search may stop."""

_MAX_COLUMNS = 48
"""Rollouts of one rank that take part in one exchange round; more would not make a better exchange, only a slower
one."""


def partition(
    costs: ArrayLike,
    num_ranks: int,
    counts: Counts = "free",
    speeds: ArrayLike | None = None,
    *,
    rotation: int = 0,
    tolerance: float = TOLERANCE,
) -> list[Ints]:
    """Split `costs` over `num_ranks` ranks, minimising the latest finish.

    Args:
        costs: [n] work of each rollout, finite and >= 0, in any unit.
        num_ranks: number of ranks, >= 1.
        counts: "free", or "equal": the number of rollouts per rank differs by at most one.
        speeds: [num_ranks] relative speeds > 0 (work per unit of time); None means all alike.
        rotation: rotates the rank labels (pass the step), so that no rank is always the one with the heaviest rollout.

        tolerance: stop this far (relatively) above the lower bound. 0.01 % is 0.1 ms in a step of a second; 1e-6 takes
            up to five times as long.

    Returns:
        One int64 array of ascending positions into `costs` per rank; every position is in exactly one of them.
        No rank is empty if n >= num_ranks; with fewer rollouts than ranks, n ranks get one each.

    Raises:
        ValueError: a cost is negative or not finite, a speed is not positive, or num_ranks < 1.

    Complexity: O(n log n) plus a refinement bounded by a fixed budget of elementary operations.
    """
    work = _checked_costs(costs)
    _check_ranks(num_ranks, counts)
    rate = _checked_speeds(speeds, num_ranks)
    label_of = (np.arange(num_ranks) + rotation) % num_ranks  # working rank -> rank of the answer
    labels = _assign(work, num_ranks, counts, None if rate is None else rate[label_of], tolerance)
    return split_by_label(label_of[labels], num_ranks)


def partition_together(
    costs: ArrayLike,
    labels: ArrayLike,
    num_ranks: int,
    counts: Counts = "free",
    speeds: ArrayLike | None = None,
    *,
    rotation: int = 0,
) -> list[Ints]:
    """`partition` that keeps rollouts of one label on one rank; "equal" then counts labels, not rollouts."""
    _, inverse = np.unique(np.asarray(labels), return_inverse=True)
    sums = np.bincount(inverse, weights=np.asarray(costs, dtype=np.float64))
    rank_of = np.empty(sums.size, dtype=np.int64)
    for rank, share in enumerate(partition(sums, num_ranks, counts, speeds, rotation=rotation)):
        rank_of[share] = rank
    return split_by_label(rank_of[inverse], num_ranks)


def _assign(work: Floats, num_ranks: int, counts: Counts, rate: Floats | None, tolerance: float) -> Ints:
    """The partition as [n] working-rank labels; the arguments are taken as checked."""
    if num_ranks == 1 or work.size == 0:
        return np.zeros(work.size, dtype=np.int64)
    if work.size <= num_ranks:
        return _one_each(work, rate)
    work = work * 2.0 ** -np.ceil(
        np.log2(max(float(work.max()), 1e-300))
    )  # about 1, so that nothing over- or underflows
    if rate is None:
        labels = _largest_first(work, num_ranks, counts)
    else:
        labels = _largest_first_with_speeds(work, num_ranks, counts, rate)
    bound = lower_bound_of(work, num_ranks, counts, rate)
    if bound > 0.0:
        _refine(labels, work, num_ranks, counts, rate, bound * (1.0 + tolerance))
    return labels


def split_by_label(labels: Ints, num_ranks: int) -> list[Ints]:
    """[n] labels -> one ascending index array per label. O(n log n)."""
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(labels, minlength=num_ranks)).tolist()
    starts = [0, *ends[:-1]]
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]


def loads_of(costs: Floats, shares: list[list[Ints]]) -> Floats:
    """[rank] summed cost of [rank][micro-batch] -> positions. O(n)."""
    sizes = [sum(map(len, share)) for share in shares]
    picked = np.concatenate([one for share in shares for one in share] or [np.empty(0, dtype=np.int64)])
    rank_of = np.repeat(np.arange(len(shares)), sizes)
    return np.bincount(rank_of, weights=costs[picked], minlength=len(shares)).astype(np.float64)


# ---------------------------------------------------------------------------------------------------------------------
# The lower bound
# ---------------------------------------------------------------------------------------------------------------------


def lower_bound(costs: ArrayLike, num_ranks: int, counts: Counts = "free", speeds: ArrayLike | None = None) -> float:
    """A finish time that no partition of `costs` can beat; proofs in docs/planning.md. O(n log n).

    The largest of: the mean load; for every i the i+1 smallest of the i*num_ranks+1 largest rollouts (two pigeons in
    one hole); with speeds, the j largest rollouts over the j fastest ranks; with equal counts, the j largest rollouts
    together with the smallest ones that must keep them company. Integral costs make it integral.

    Raises:
        ValueError: as for `partition`.
    """
    work = _checked_costs(costs)
    _check_ranks(num_ranks, counts)
    return lower_bound_of(work, num_ranks, counts, _checked_speeds(speeds, num_ranks))


def lower_bound_of(work: Floats, num_ranks: int, counts: Counts, rate: Floats | None) -> float:
    """`lower_bound` for arguments taken as checked."""
    n = work.size
    if n == 0:
        return 0.0
    descending = np.sort(work)[::-1]
    total = float(descending.sum())
    prefix = np.concatenate(([0.0], np.cumsum(descending)))  # prefix[j]: the j largest together
    if rate is None:
        bound = max(total / num_ranks, float(descending[0]))
        i = np.arange(1, (n - 1) // num_ranks + 1)
        if i.size:
            bound = max(bound, float((prefix[i * num_ranks + 1] - prefix[i * num_ranks - i]).max()))
        if counts == "equal" and n >= num_ranks:
            bound = max(bound, _company_bound(prefix, num_ranks))
        if total < 2.0**52 and bool((work == np.floor(work)).all()):
            return float(np.ceil(bound * (1.0 - 1e-14)))
    else:
        fastest = np.cumsum(np.sort(rate)[::-1])
        j = np.arange(1, min(n, num_ranks) + 1)
        bound = max(total / float(fastest[-1]), float((prefix[j] / fastest[j - 1]).max()))
    return bound * (1.0 - 4e-16 * n)  # sums of n floats are off by at most n units in the last place


def _company_bound(prefix: Floats, num_ranks: int) -> float:
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


# ---------------------------------------------------------------------------------------------------------------------
# The greedy start
# ---------------------------------------------------------------------------------------------------------------------


def _one_each(work: Floats, rate: Floats | None) -> Ints:
    """No more rollouts than ranks: the heaviest to the fastest."""
    labels = np.empty(work.size, dtype=np.int64)
    by_cost = np.argsort(-work, kind="stable")
    labels[by_cost] = np.arange(work.size) if rate is None else np.argsort(-rate, kind="stable")[: work.size]
    return labels


def _largest_first(work: Floats, num_ranks: int, counts: Counts) -> Ints:
    """LPT with a heap; under equal counts a full rank leaves the heap. O(n log num_ranks).

    Every rollout counts a little more than its cost, so that ties (zero costs above all) go to the rank with fewer.
    """
    n = work.size
    order = np.argsort(-work, kind="stable")
    tie_breaker = (float(work.sum()) or 1.0) * 1e-9 / n
    sorted_work = (work[order] + tie_breaker).tolist()
    heap = [(load, rank) for rank, load in enumerate(sorted_work[:num_ranks])]
    heap.reverse()  # ascending, so it is a heap
    chosen = list(range(num_ranks))
    if counts == "free":
        for cost in sorted_work[num_ranks:]:
            load, rank = heap[0]
            chosen.append(rank)
            heapq.heapreplace(heap, (load + cost, rank))
    else:
        quota, extra = divmod(n, num_ranks)
        held = [1] * num_ranks
        for cost in sorted_work[num_ranks:]:
            load, rank = heap[0]
            while held[rank] >= quota + (extra > 0):  # a rank at the quota waits for the spare places to run out
                heapq.heappop(heap)
                load, rank = heap[0]
            held[rank] += 1
            if held[rank] > quota:
                extra -= 1
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (load + cost, rank))
            chosen.append(rank)
    labels = np.empty(n, dtype=np.int64)
    labels[order] = chosen
    return labels


def _largest_first_with_speeds(work: Floats, num_ranks: int, counts: Counts, rate: Floats) -> Ints:
    """LPT for uniform machines: each rollout to the rank that would finish it first. O(n * num_ranks), vectorised."""
    n = work.size
    order = np.argsort(-work, kind="stable")
    tie_breaker = (float(work.sum()) or 1.0) * 1e-9 / n
    quota, extra = divmod(n, num_ranks) if counts == "equal" else (n, 0)
    busy = np.zeros(num_ranks)
    held = np.zeros(num_ranks, dtype=np.int64)
    labels = np.empty(n, dtype=np.int64)
    for position in order.tolist():
        finish = (busy + (work[position] + tie_breaker)) / rate
        rank = int(finish.argmin())
        if counts == "equal":
            rank = int(np.where(held < quota + (extra > 0), finish, np.inf).argmin())
            extra -= int(held[rank] == quota)
        busy[rank] += work[position] + tie_breaker
        held[rank] += 1
        labels[position] = rank
    # a very slow rank still gets the lightest rollout of the fullest one
    for rank in np.flatnonzero(held == 0).tolist():
        donor = int(held.argmax())
        mine = np.flatnonzero(labels == donor)
        labels[mine[work[mine].argmin()]] = rank
        held[donor] -= 1
        held[rank] += 1
    return labels


# ---------------------------------------------------------------------------------------------------------------------
# The refinement
# ---------------------------------------------------------------------------------------------------------------------


def _refine(labels: Ints, work: Floats, num_ranks: int, counts: Counts, rate: Floats | None, target: float) -> None:
    """Exchange rollouts between ranks until the latest finish is at the target or the work budget is spent."""
    slots = _slots(labels, num_ranks, counts, work.size)
    table = _Table(slots, work, np.ones(num_ranks) if rate is None else rate, counts)
    if not _descend(table, target, _BUDGET + _BUDGET_EACH * work.size) and work.size <= _SMALL:
        table = _best_of_many(table, num_ranks, target)
    real = table.slots < work.size
    owner = np.broadcast_to(np.arange(num_ranks)[:, None], table.slots.shape)
    labels[table.slots[real]] = owner[real]


def _descend(table: _Table, target: float, budget: int) -> bool:
    """Exchange until the target, the end of the budget, or a place that no exchange of one or two leaves.
    -> at the target.

    In turn: rounds of exchanges, hottest rank with coldest, next with next, other pairs while nothing moves; then the
    hottest with everybody, one for one and at last two for two.
    """
    num_ranks = table.loads.size
    half = num_ranks // 2
    quiet = rounds = 0
    moved_since = False  # since the last fold round
    while budget > 0:
        finish = table.loads / table.speed
        order = np.argsort(finish, kind="stable")
        if finish[order[-1]] <= target:
            return True
        folding = quiet <= _QUIET_ROUNDS
        if folding:
            hot = order[::-1][:half]
            cold = np.roll(order[: num_ranks - half], -quiet)[:half]
            late = finish[hot] > target
            hot, cold = hot[late], cold[late]
            size = 2 if rounds > _SINGLE_ROUNDS or quiet else 1
        else:
            hot, cold = np.full(num_ranks - 1, order[-1]), order[:-1]
            size = 1 if quiet == _QUIET_ROUNDS + 1 else 2
        moved, spent = table.exchange(hot, cold, size, rounds, only_best=not folding)
        budget -= spent
        rounds += 1
        if folding:
            moved_since = False
            quiet = 0 if moved else quiet + 1
        elif moved:
            moved_since = True
            quiet = _QUIET_ROUNDS + 1
        elif size == 1:
            quiet += 1
        elif moved_since:
            quiet = 0
        else:
            break
    return False


def _best_of_many(table: _Table, num_ranks: int, target: float) -> _Table:
    """Many shuffled copies descend side by side in the same few array operations; the best one wins.

    A shuffle permutes each column of slots over the ranks, so counts stay as they are. The generator is seeded: the
    same input gives the same answer.
    """
    work = table.values[:-1]
    copies = max(2, _SMALL_COPIES // (table.slots.size * work.size))
    start = table.slots
    if table.counts == "equal" and table._has_dummies:  # they are strewn about; in one column, no rank gets two
        start = np.sort(start, axis=1)
    shuffle = np.random.default_rng(0).random((copies, *start.shape)).argsort(axis=1)
    shuffle[0] = np.arange(num_ranks)[:, None]
    slots = np.take_along_axis(np.broadcast_to(start, shuffle.shape), shuffle, axis=1)
    slots = slots.reshape(copies * num_ranks, -1)
    many = _Table(slots, work, np.tile(table.speed, copies), table.counts)
    base = (np.arange(copies) * num_ranks)[:, None]
    half = num_ranks // 2
    for rounds in range(min(_SMALL_ROUNDS, 512 // work.size)):
        order = (many.loads / many.speed).reshape(copies, num_ranks).argsort(axis=1)
        if rounds % 3 == 2:  # the hottest with another one in turn
            hot = (base[:, 0] + order[:, -1])[:, None]
            cold = base + order[:, rounds // 3 % (num_ranks - 1)][:, None]
        else:
            hot = base + order[:, ::-1][:, :half]
            cold = base + np.roll(order[:, : num_ranks - half], -(rounds % 3 + rounds // 6), axis=1)[:, :half]
        many.exchange(hot.ravel(), cold.ravel(), 1 if rounds < 2 else 2, rounds, only_best=False)
        if rounds % 4 == 3 and float((many.loads / many.speed).reshape(copies, -1).max(axis=1).min()) <= target:
            break
    finish = (many.loads / many.speed).reshape(copies, num_ranks).max(axis=1)
    idle = (slots == work.size).all(axis=1).reshape(copies, num_ranks).any(axis=1)  # a shuffle may leave a rank nothing
    best = int(np.where(idle, np.inf, finish).argmin())
    if finish[best] >= (table.loads / table.speed).max():
        return table
    return _Table(slots.reshape(copies, num_ranks, -1)[best], work, table.speed, table.counts)


def _slots(labels: Ints, num_ranks: int, counts: Counts, n: int) -> Ints:
    """[num_ranks, width] positions, each rank's rollouts side by side, filled up with the dummy n."""
    held = np.bincount(labels, minlength=num_ranks)
    width = int(held.max()) + (2 if counts == "free" else 0)
    slots = np.full((num_ranks, width), n, dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    starts = np.cumsum(held) - held
    slots[labels[order], np.arange(n) - starts[labels[order]]] = order
    return slots


class _Table:
    """Rollouts in slots, one row per rank, and what they weigh."""

    def __init__(self, slots: Ints, work: Floats, speed: Floats, counts: Counts) -> None:
        self.slots = slots
        """[rows, width] position of a rollout, or of the dummy (the last)."""
        self.values = np.concatenate((work, [0.0]))
        self.speed = speed
        self.counts: Counts = counts
        self.loads = self.values[slots].sum(axis=1)
        self._dummy = work.size
        self._all_alike = bool((speed == speed[0]).all())
        self._has_dummies = bool((slots == self._dummy).any())

    def exchange(self, hot: Ints, cold: Ints, size: int, rounds: int, *, only_best: bool) -> tuple[bool, int]:
        """For each pair (hot[p], cold[p]) the best exchange of `size` slots; done where it helps.

        An exchange shifts d = (what hot gives) - (what cold gives); d = ideal lets both finish together.
        No row may be in two pairs, unless `only_best`. -> (any done, work spent).
        """
        if not hot.size:
            return False, _ROUND_WORK
        columns = self._columns(rounds, _MAX_COLUMNS if size == 1 else _MAX_COLUMNS // 2)
        sides = (columns,) if size == 1 else tuple(columns[side] for side in np.triu_indices(columns.size, 1))
        gives, takes = self._sums(hot, sides), self._sums(cold, sides)
        if self.counts == "equal" and self._has_dummies:
            self._keep_one_dummy(hot, cold, sides, gives, takes)
        loads, speed = self.loads, self.speed
        ideal = (loads[hot] * speed[cold] - loads[cold] * speed[hot]) / (speed[hot] + speed[cold])
        i, j, shifted = _closest(gives, takes, ideal)
        after = np.maximum((loads[hot] - shifted) / speed[hot], (loads[cold] + shifted) / speed[cold])
        helps = (after < loads[hot] / speed[hot] * (1.0 - 1e-12)) & np.isfinite(shifted)
        if not self._all_alike:  # only then can it pay to leave a rank without any rollout, which is not allowed
            helps &= self._leaves_no_rank_empty(hot, cold, sides, i, j)
        if only_best and helps.any():
            best = int(np.where(helps, after, np.inf).argmin())
            helps = np.arange(helps.size) == best
        pairs = np.flatnonzero(helps)
        for side in sides:
            here, there = (hot[pairs], side[i[pairs]]), (cold[pairs], side[j[pairs]])
            self.slots[here], self.slots[there] = self.slots[there], self.slots[here]
        loads[hot[pairs]] -= shifted[pairs]
        loads[cold[pairs]] += shifted[pairs]
        return bool(pairs.size), gives.size + _ROUND_WORK

    def _columns(self, rounds: int, limit: int) -> Ints:
        """The slots that take part in this round; another stretch of them every round."""
        width = self.slots.shape[1]
        columns: Ints = np.arange(min(width, limit), dtype=np.int64)
        return columns if width <= limit else (columns * (width // limit) + rounds * 7) % width

    def _sums(self, rows: Ints, sides: tuple[Ints, ...]) -> Floats:
        sums: Floats = self.values[self.slots[rows[:, None], sides[0]]]
        for side in sides[1:]:
            sums = sums + self.values[self.slots[rows[:, None], side]]
        return sums

    def _keep_one_dummy(self, hot: Ints, cold: Ints, sides: tuple[Ints, ...], gives: Floats, takes: Floats) -> None:
        """Equal counts: a rank has at most one dummy, so where both of a pair have one, neither may give it away."""
        has = (self.slots == self._dummy).any(axis=1)
        both = (has[hot] & has[cold])[:, None]
        for rows, sums in ((hot, gives), (cold, takes)):
            for side in sides:
                sums[(self.slots[rows[:, None], side] == self._dummy) & both] = np.inf

    def _leaves_no_rank_empty(self, hot: Ints, cold: Ints, sides: tuple[Ints, ...], i: Ints, j: Ints) -> Bools:
        held = (self.slots != self._dummy).sum(axis=1)
        moved = np.zeros(hot.size, dtype=np.int64)
        for side in sides:
            moved += self.slots[hot, side[i]] != self._dummy
            moved -= self.slots[cold, side[j]] != self._dummy
        keeps: Bools = (held[hot] - moved > 0) & (held[cold] + moved > 0)
        return keeps


def _closest(gives: Floats, takes: Floats, ideal: Floats) -> tuple[Ints, Ints, Floats]:
    """Per row p the (i, j) whose gives[p, i] - takes[p, j] is closest to ideal[p]. O(size log size).

    All rows are searched by one searchsorted: each row is lifted above the one before it.
    """
    num_pairs, width = gives.shape
    rank = np.argsort(takes, axis=1, kind="stable")
    ladder = np.take_along_axis(takes, rank, axis=1)
    wanted = gives - ideal[:, None]
    highest = float(ladder[np.isfinite(ladder)].max(initial=0.0))
    reach = 1.0 + 2.0 * max(highest, float(np.abs(np.where(np.isfinite(wanted), wanted, 0.0)).max()))
    lift = (np.arange(num_pairs) * (3.0 * reach))[:, None]
    flat = (np.minimum(ladder, reach) + lift).ravel()
    place = np.searchsorted(flat, (np.minimum(wanted, reach) + lift).ravel()).reshape(num_pairs, width)
    start = (np.arange(num_pairs) * width)[:, None]
    above = np.clip(place - start, 0, width - 1)
    below = np.clip(place - start - 1, 0, width - 1)
    with np.errstate(invalid="ignore"):
        miss_above = np.abs(np.take_along_axis(ladder, above, axis=1) - wanted)
        miss_below = np.abs(np.take_along_axis(ladder, below, axis=1) - wanted)
    miss_above[np.isnan(miss_above)] = np.inf
    miss_below[np.isnan(miss_below)] = np.inf
    miss = np.minimum(miss_above, miss_below)
    i = miss.argmin(axis=1)
    row = np.arange(num_pairs)
    use_above = miss_above[row, i] <= miss_below[row, i]
    step = np.where(use_above, above[row, i], below[row, i])
    j = rank[row, step]
    with np.errstate(invalid="ignore"):
        shifted = gives[row, i] - takes[row, j]
    return i, j, shifted


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def _checked_costs(costs: ArrayLike) -> Floats:
    work = np.asarray(costs, dtype=np.float64)
    if work.ndim != 1:
        raise ValueError(f"costs must be one-dimensional, not of shape {work.shape}: one number per rollout.")
    if not (np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError("costs must be finite and >= 0: a cost is an amount of work. Look at the cost model.")
    return work


def _check_ranks(num_ranks: int, counts: str) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be >= 1: there is nowhere to put a rollout.")
    if counts not in ("free", "equal"):
        raise ValueError(f"counts must be 'free' or 'equal', not {counts!r}.")


def _checked_speeds(speeds: ArrayLike | Sequence[float] | None, num_ranks: int) -> Floats | None:
    if speeds is None:
        return None
    rate = np.asarray(speeds, dtype=np.float64)
    if rate.shape != (num_ranks,):
        raise ValueError(f"speeds must hold one number per rank ({num_ranks}), not shape {rate.shape}.")
    if not (np.isfinite(rate).all() and (rate > 0.0).all()):
        raise ValueError("speeds must be finite and > 0: a rank of speed 0 never finishes. Leave it out of num_ranks.")
    return None if bool((rate == rate[0]).all()) and rate[0] == 1.0 else rate
