"""A partition made better by swaps between ranks, until the latest finish is at the target or the work budget is spent.

    swap rounds       the latest rank with the earliest, next with next: for all pairs at once the swap of one (later:
                      two) rollouts that comes closest to making both finish together
    one against all   once those are quiet: the latest rank with every other
    many copies       of a small batch, shuffled, descend side by side; the best one wins

"Free" counts are made the same problem as "equal" counts by dummies of zero cost: a move is a swap with a dummy.
Pure and deterministic: a budget of elementary operations, and a seeded generator.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .arrays import Bools, Counts, Floats, Ints

_BUDGET = 6_000
_BUDGET_EACH = 250
"""Elementary operations that a refinement may spend: so many, and so many more per rollout."""

_ROUND_WORK = 2_000
"""What a round costs beside the swaps it compares, in the same unit."""

_SINGLE_ROUNDS = 8
"""Rounds of one-for-one swaps; two for two cost more and help when the loads are nearly alike."""

_QUIET_ROUNDS = 2
"""Rounds without a move after which the latest rank is tried with every other."""

_SMALL = 64
"""Up to so many rollouts one descent often ends in a poor partition, and many are affordable side by side."""

_SMALL_COPIES = 50_000
"""Slots in all the copies, times rollouts, that descend side by side."""

_SMALL_ROUNDS = 18

_MAX_COLUMNS = 48
"""Rollouts of one rank that take part in one round; more would not make a better swap, only a slower
one."""


def refine(labels: Ints, work: Floats, num_ranks: int, counts: Counts, rate: Floats | None, target: float) -> None:
    """Swap rollouts between ranks until the latest finish is at the target or the work budget is spent."""
    slots = _in_slots(labels, num_ranks, counts, work.size)  # [num_ranks, width]
    # The dummy is position n, behind all rollouts: it weighs 0.0, so a swap with it is a move.
    table = _Slots(slots, work, np.ones(num_ranks) if rate is None else rate, counts)
    if not _descend(table, target, _BUDGET + _BUDGET_EACH * work.size) and work.size <= _SMALL:
        table = _best_of_many(table, num_ranks, target)
    # [num_ranks, width] which slots hold a rollout and not a dummy
    real = table.slots < work.size
    owner = np.broadcast_to(np.arange(num_ranks)[:, None], table.slots.shape)
    labels[table.slots[real]] = owner[real]


def _descend(table: _Slots, target: float, budget: int) -> bool:
    """Swap until the target, the end of the budget, or a partition that no swap of one or two makes better.
    -> at the target.

    In turn: rounds of swaps, the latest rank with the earliest, next with next, other pairs while nothing moves; then
    the latest with every other, one for one and at last two for two.
    """
    num_ranks = table.loads.size
    half = num_ranks // 2
    quiet = rounds = 0
    moved_since = False  # since the last round of pairs
    while budget > 0:
        finish = table.loads / table.speed
        order = np.argsort(finish, kind="stable")
        if finish[order[-1]] <= target:
            return True
        pairing = quiet <= _QUIET_ROUNDS
        if pairing:
            # [pairs] the latest rank with the earliest, the second latest with the second earliest; each quiet round
            # shifts the partners by one, so that other pairs meet
            late = order[::-1][:half]
            early = np.roll(order[: num_ranks - half], -quiet)[:half]
            above = finish[late] > target
            late, early = late[above], early[above]
            size = 2 if rounds > _SINGLE_ROUNDS or quiet else 1
        else:
            late, early = np.full(num_ranks - 1, order[-1]), order[:-1]
            size = 1 if quiet == _QUIET_ROUNDS + 1 else 2
        moved, spent = table.swap(late, early, size, rounds, only_best=not pairing)
        budget -= spent
        rounds += 1
        if pairing:
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


def _best_of_many(table: _Slots, num_ranks: int, target: float) -> _Slots:
    """Many shuffled copies descend side by side in the same few array operations; the best one wins.

    A shuffle permutes each column of slots over the ranks, so counts stay as they are. The generator is seeded: the
    same input gives the same answer.
    """
    work = table.values[:-1]
    # of a handful of rollouts there are fewer partitions than that (but for the names of ranks)
    copies = max(2, min(_SMALL_COPIES // (table.slots.size * work.size), num_ranks ** (work.size - 1)))
    start = table.slots
    if table.counts == "equal" and table._has_dummies:  # they are strewn about; in one column, no rank gets two
        start = np.sort(start, axis=1)
    # [copies, num_ranks, width] for each copy and column: which rank gets which slot
    shuffle = np.random.default_rng(0).random((copies, *start.shape)).argsort(axis=1)
    shuffle[0] = np.arange(num_ranks)[:, None]
    slots = np.take_along_axis(np.broadcast_to(start, shuffle.shape), shuffle, axis=1)
    # Copies stand below one another as if they were more ranks: one swap() moves pairs in all of them.
    slots = slots.reshape(copies * num_ranks, -1)
    many = _Slots(slots, work, np.tile(table.speed, copies), table.counts)
    # [copies, 1] the first row of each copy
    base = (np.arange(copies) * num_ranks)[:, None]
    half = num_ranks // 2
    for rounds in range(min(_SMALL_ROUNDS, 512 // work.size)):
        # [copies, num_ranks] ranks of each copy, the earliest to finish first
        order = (many.loads / many.speed).reshape(copies, num_ranks).argsort(axis=1)
        if rounds % 3 == 2:  # the latest with another one in turn
            late = (base[:, 0] + order[:, -1])[:, None]
            early = base + order[:, rounds // 3 % (num_ranks - 1)][:, None]
        else:
            late = base + order[:, ::-1][:, :half]
            early = base + np.roll(order[:, : num_ranks - half], -(rounds % 3 + rounds // 6), axis=1)[:, :half]
        many.swap(late.ravel(), early.ravel(), 1 if rounds < 2 else 2, rounds, only_best=False)
        if rounds % 4 == 3 and float((many.loads / many.speed).reshape(copies, -1).max(axis=1).min()) <= target:
            break
    finish = (many.loads / many.speed).reshape(copies, num_ranks).max(axis=1)
    idle = (slots == work.size).all(axis=1).reshape(copies, num_ranks).any(axis=1)  # a shuffle may leave a rank nothing
    best = int(np.where(idle, np.inf, finish).argmin())
    if finish[best] >= (table.loads / table.speed).max():
        return table
    return _Slots(slots.reshape(copies, num_ranks, -1)[best], work, table.speed, table.counts)


def _in_slots(labels: Ints, num_ranks: int, counts: Counts, n: int) -> Ints:
    """[num_ranks, width] positions, each rank's rollouts side by side, filled up with the dummy n."""
    held = np.bincount(labels, minlength=num_ranks)
    # two free slots even on the fullest rank: a swap of two for two may move two rollouts there
    width = int(held.max()) + (2 if counts == "free" else 0)
    slots = np.full((num_ranks, width), n, dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    starts = np.cumsum(held) - held
    # sorted by rank, the place within a rank is the place in the order less the start of that rank
    slots[labels[order], np.arange(n) - starts[labels[order]]] = order
    return slots


class _Slots:
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

    def swap(self, late: Ints, early: Ints, size: int, rounds: int, *, only_best: bool) -> tuple[bool, int]:
        """For each pair (late[p], early[p]) the best swap of `size` slots; done where it helps.

        A swap shifts d = (what late gives) - (what early gives); d = ideal lets both finish together.
        No row may be in two pairs, unless `only_best`. -> (any done, work spent).
        """
        if not late.size:
            return False, _ROUND_WORK
        # two for two compares pairs of columns: half the columns keep the work of a round about the same
        columns = self._columns(rounds, _MAX_COLUMNS if size == 1 else _MAX_COLUMNS // 2)
        # one array of columns per swapped slot; of two, every pair once
        sides = (columns,) if size == 1 else tuple(columns[side] for side in _pairs_of(columns.size))
        gives, takes = self._sums(late, sides), self._sums(early, sides)  # [pairs, choices] each
        if self.counts == "equal" and self._has_dummies:
            self._keep_one_dummy(late, early, sides, gives, takes)
        loads, speed = self.loads, self.speed
        # [pairs] the shift d at which (load - d) / speed is the same on both: solved for d
        ideal = (loads[late] * speed[early] - loads[early] * speed[late]) / (speed[late] + speed[early])
        # [pairs] the choice that the late rank gives, the one that the early rank gives, and the work that this shifts
        i, j, shifted = _closest(gives, takes, ideal)
        after = np.maximum((loads[late] - shifted) / speed[late], (loads[early] + shifted) / speed[early])
        # a gain within rounding is no gain: two ranks could swap the same rollouts to and fro until the budget is spent
        helps = (after < loads[late] / speed[late] * (1.0 - 1e-12)) & np.isfinite(shifted)
        if not self._all_alike:  # only then can it pay to leave a rank without any rollout, which is not allowed
            helps &= self._leaves_no_rank_empty(late, early, sides, i, j)
        if only_best and helps.any():
            best = int(np.where(helps, after, np.inf).argmin())
            helps = np.arange(helps.size) == best
        pairs = np.flatnonzero(helps)
        for side in sides:
            # one slot of a choice at a time, for all pairs at once: no rank is in two of them
            here, there = (late[pairs], side[i[pairs]]), (early[pairs], side[j[pairs]])
            self.slots[here], self.slots[there] = self.slots[there], self.slots[here]
        loads[late[pairs]] -= shifted[pairs]
        loads[early[pairs]] += shifted[pairs]
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

    def _keep_one_dummy(self, late: Ints, early: Ints, sides: tuple[Ints, ...], gives: Floats, takes: Floats) -> None:
        """Equal counts: a rank has at most one dummy, so where both of a pair have one, neither may give it away."""
        has = (self.slots == self._dummy).any(axis=1)
        both = (has[late] & has[early])[:, None]
        for rows, sums in ((late, gives), (early, takes)):
            for side in sides:
                sums[(self.slots[rows[:, None], side] == self._dummy) & both] = np.inf

    def _leaves_no_rank_empty(self, late: Ints, early: Ints, sides: tuple[Ints, ...], i: Ints, j: Ints) -> Bools:
        held = (self.slots != self._dummy).sum(axis=1)
        moved = np.zeros(late.size, dtype=np.int64)
        for side in sides:
            moved += self.slots[late, side[i]] != self._dummy
            moved -= self.slots[early, side[j]] != self._dummy
        keeps: Bools = (held[late] - moved > 0) & (held[early] + moved > 0)
        return keeps


@cache
def _pairs_of(size: int) -> tuple[Ints, Ints]:
    """Every pair of so many once; small, and asked for in every round."""
    return np.triu_indices(size, 1)


def _closest(gives: Floats, takes: Floats, ideal: Floats) -> tuple[Ints, Ints, Floats]:
    """Per row p the (i, j) whose gives[p, i] - takes[p, j] is closest to ideal[p]. O(size log size).

    All rows are searched by one searchsorted: each row is lifted above the one before it.
    """
    num_pairs, width = gives.shape
    start = (np.arange(num_pairs) * width)[:, None]  # of each row, in one flat array of all
    # [pairs, choices] what the early rank may give, lightest first
    rank = np.argsort(takes, axis=1, kind="stable")
    ladder = takes.ravel()[rank + start]  # [pairs, width] ascending; inf = may not be taken
    wanted = gives - ideal[:, None]  # [pairs, width] what each gift should be answered with
    highest, most = float(ladder.max()), float(np.abs(wanted).max())
    finite = highest + most < np.inf
    if not finite:
        highest = float(ladder[np.isfinite(ladder)].max(initial=0.0))
        most = float(np.abs(np.where(np.isfinite(wanted), wanted, 0.0)).max())
    reach = 1.0 + 2.0 * max(highest, most)
    lift = (np.arange(num_pairs) * (3.0 * reach))[:, None]
    # Lifted by more than any row spans, the rows make one ascending array: one binary search for all pairs.
    flat = (np.minimum(ladder, reach) + lift).ravel()
    # [pairs, choices] where in the ladder the answer to each gift would be; the nearest is there or one below
    place = np.searchsorted(flat, (np.minimum(wanted, reach) + lift).ravel()).reshape(num_pairs, width)
    above = np.minimum(np.maximum(place, start), start + (width - 1))
    below = np.minimum(np.maximum(place - 1, start), start + (width - 1))
    steps = ladder.ravel()
    with np.errstate(invalid="ignore"):
        miss_above, miss_below = np.abs(steps[above] - wanted), np.abs(steps[below] - wanted)
    if not finite:
        miss_above[np.isnan(miss_above)] = np.inf
        miss_below[np.isnan(miss_below)] = np.inf
    # [pairs, choices] how far the best answer to each gift is from the ideal
    miss = np.minimum(miss_above, miss_below)
    # [pairs] the gift whose answer comes nearest
    i = miss.argmin(axis=1)
    row = np.arange(num_pairs)
    use_above = miss_above[row, i] <= miss_below[row, i]
    step = np.where(use_above, above[row, i], below[row, i])
    j = rank.ravel()[step]
    with np.errstate(invalid="ignore"):
        shifted = gives[row, i] - takes[row, j]
    return i, j, shifted
