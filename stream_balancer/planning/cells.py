"""The search for every layout: exchanges of up to two rollouts for two, between cells that have to be alike.

A *cell* is what one rank runs between two meetings of all ranks; the cells that run at the same time are a *row*, which
takes as long as its last cell. Ranks that meet once a step have one row; ranks that meet at every micro-batch have a
row for every index.

    late with early   one row: the last cell with the first, the next with the next, all pairs at once
    last with others  the last cell of every row with all others

What an exchange must not break (tokens, counts) is a limit; whether a cell of several micro-batches can be packed is
asked of the best few. Layouts stand below one another in one table, so many starts descend side by side. Pure and
deterministic: a budget of elementary operations instead of a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .packing import Bins

_ROUND_WORK, _PACK_WORK = 4_000, 6_000
"""Work of a round beside the exchanges it compares, and packing two cells, in the same unit."""

_SINGLE_ROUNDS = 8
"""Rounds of one-for-one exchanges; two for two cost more and help when the cells are nearly alike."""

_PAIRINGS = 3
"""Rounds without an exchange, each with other pairs, after which the last cell is tried with the others."""

_COLUMNS = (0, 48, 24)
"""Rollouts of a cell that take part in a round of one for one, of two for two; more would not make a better exchange,
only a slower one."""

_TABLE = 40_000
"""Up to so many exchanges of a round are all compared."""

_NEAREST, _NEAREST_THAT_MAY = 2, 12
"""Else the answers to each choice that are compared: those that come nearest to the ideal; more where some may not be
given."""

_SMALL = 64
"""Up to so many rollouts are few: in several rows, too, two are exchanged for two."""

_OTHERS = 64
"""Cells that the last one takes from at most: at 4,096 on 512 ranks all of them took 12 of the 45 ms of a step."""

_PACKED = 24
"""Exchanges of a round that are packed for real, the best first."""

_LITTLE = 1e-6
"""Where several cells share the peak of a row nothing is saved yet, but one fewer does: what lowering it counts."""

_LEAST_GAIN = 1e-9
"""A gain within rounding is no gain: two cells could exchange the same rollouts to and fro until the budget is spent.
"""


class Limit(NamedTuple):
    """Bounds on what the rollouts of a cell are together: on their number, or their tokens."""

    amounts: Ints
    """[n] of each rollout."""
    least: int
    most: int | Ints
    """Limit of every cell, or [dp_size]."""


class _Side(NamedTuple):
    """Rollouts that one cell of each pair could give away."""

    cells: Ints
    """[pairs]"""
    slots: Ints
    """[pairs, columns] positions."""
    columns: Ints
    """[columns] where in a cell each lies."""
    choices: tuple[Ints, ...]
    """[choices] of the columns, one array for each rollout in a choice."""

    def sums(self, values: Any) -> Any:
        """[pairs, choices]"""
        columns = values.take(self.slots)
        sums = columns.take(self.choices[0], axis=1)
        for side in self.choices[1:]:
            sums += columns.take(side, axis=1)
        return sums

    def rollouts(self, pair: int, choice: int) -> list[int]:
        """Positions of one choice."""
        return [int(self.slots[pair, side[choice]]) for side in self.choices]


class Cells:
    """Layouts below one another, [layouts * rows * ranks] cells, and what lies in each."""

    def __init__(
        self,
        work: Floats,
        slots: Ints,
        dp_size: int,
        *,
        rows: int = 1,
        even: bool = False,
        keep: bool = False,
        limits: Sequence[Limit] = (),
        base: Floats | None = None,
        pack: Callable[[list[int], int], Bins | None] | None = None,
    ) -> None:
        """
        Args:
            work: [n] of each rollout.
            slots: [cells, width] positions of the rollouts in each, n where there is none.
            dp_size: cells of a row.
            rows: of a layout.
            even: as many rollouts are exchanged as come back, a free place counted.
            keep: each rank keeps its number of rollouts over all rows.
            limits: what no exchange may break.
            base: [dp_size] work that each has beside its rollouts.
            pack: what a cell of a rank has into its micro-batches, None if no way is found; None: nothing has to be
                packed.
        """
        self._none, self._dp_size, self._rows, self._even, self._pack = work.size, dp_size, rows, even, pack
        self._keep, self._ones = keep, np.append(np.ones(work.size, dtype=np.int64), 0)
        number = slots.shape[0]
        self._row_of = np.arange(number) // dp_size
        self._first = np.arange(0, number, dp_size)[:, None]  # [all rows, 1]
        self._base = None if base is None else np.tile(base, number // dp_size)
        # nobody weighs nothing: an exchange with nobody is a move
        self._work = np.append(work, 0.0)
        self._limits = [
            (limit._replace(amounts=np.append(limit.amounts, 0)), np.zeros(number, int)) for limit in limits
        ]
        self.slots, self._load = slots.copy(), np.zeros(number)
        self.finish = np.zeros(number)
        """[cells] when each is done."""
        self._weigh(np.arange(number))

    def _weigh(self, cells: Ints) -> None:
        """Content of these cells now, and their finish."""
        rows = self.slots[cells]
        rows.sort(axis=1)
        self.slots[cells] = rows
        load = self._work[rows].sum(axis=1)
        if self._base is not None:
            load += self._base[cells]
        self._load[cells] = load
        self.finish[cells] = load
        for limit, held in self._limits:
            held[cells] = limit.amounts[rows].sum(axis=1)
        # room for two more in every cell
        if not self._even and bool((rows[:, -2:] < self._none).any()):
            more = np.full((self.slots.shape[0], 2), self._none)
            self.slots = np.concatenate((self.slots, more), axis=1)

    @property
    def times(self) -> Floats:
        """[layouts] of the step: the sum over rows of their last cells."""
        last: Floats = np.maximum.reduce(self.finish.reshape(-1, self._dp_size), axis=1)
        return last if self._rows == 1 else last.reshape(-1, self._rows).sum(axis=1)

    def best(self) -> Ints:
        """[cells, width] slots of the layout that is over first."""
        size = self._rows * self._dp_size
        slots: Ints = self.slots.reshape(-1, size, self.slots.shape[1])[int(self.times.argmin())]
        return slots

    def cell_of(self) -> Ints:
        """[n] the cell of each rollout in the layout that is over first."""
        cells: Ints = np.empty(self._none + 1, dtype=np.int64)
        cells[self.best()] = np.arange(self._rows * self._dp_size)[:, None]
        return cells[:-1]

    # ---- a round

    def exchange(self, a: Ints, b: Ints, size: int, turn: int, *, last: bool) -> tuple[bool, int]:
        """For each pair of cells (a[p], b[p]) the best exchange of up to ``size`` rollouts for as many; done where it
        helps. -> (any done, work spent).

        ``last``: a is the last cell of its row, the time of the rows is to fall, and at most one exchange changes a
        row; else both cells are to be done earlier, and each is in one pair only.
        """
        mine, theirs = self._side(a, size, turn), self._side(b, size, turn)
        gives, takes = mine.sums(self._work), theirs.sums(self._work)
        # a limit that no choice of this round can reach is not looked at: nearly always, and its tables are the dearest
        binding = []
        for limit, held in self._limits:
            out, into, has = mine.sums(limit.amounts), theirs.sums(limit.amounts), held[np.concatenate((a, b))]
            change = max(int(out.max()), int(into.max()))
            if has.min() - change < limit.least or has.max() + change > np.min(limit.most):
                binding.append((limit, held, out, into))
        # a small table costs less than to find what is nearest; of the nearest few none might be allowed
        small, look = gives.size * takes.shape[1] <= _TABLE, _NEAREST_THAT_MAY if binding or self._keep else _NEAREST
        ideal = self._ideal(a, b)
        wanted = gives - ideal[:, None]  # [pairs, choices] what each should be answered with
        near = None if small else _nearest(wanted, takes, look)
        after = self._after(a, b, ideal, _change(wanted, takes, near), of_rows=last and self._rows > 1)
        for limit, held, out, into in binding:
            change = _change(out, into, near)
            has_a, has_b = _column(held[a]) - change, _column(held[b]) + change
            most = np.broadcast_to(limit.most, self._dp_size)
            too_much = (has_a > _column(most[a % self._dp_size])) | (has_b > _column(most[b % self._dp_size]))
            after[too_much | (np.minimum(has_a, has_b) < limit.least)] = np.inf
        if self._keep:
            fewer = _change(mine.sums(self._ones), theirs.sums(self._ones), near)
            after[(fewer != 0) & _column((a - b) % self._dp_size != 0)] = np.inf
        pairs, gave, answer = self._best(after, self.finish[a])
        took = answer if near is None else near[pairs, gave, answer] % takes.shape[1]
        # counted, not timed: the same input gives the same answer on every machine
        spent = (after.size if binding else _NEAREST * gives.size) + _ROUND_WORK
        if last:
            best_first = np.argsort(after[pairs, gave, answer] - self.finish[a[pairs]], kind="stable")
            kept, tried = self._one_a_row(best_first, mine, theirs, pairs, gave, took)
            pairs, gave, took = pairs[kept], gave[kept], took[kept]
            spent += tried * _PACK_WORK
        if not pairs.size:
            return False, spent
        for give, take in zip(mine.choices, theirs.choices, strict=True):
            # one rollout of a choice at a time, for all pairs at once: no cell is in two of them
            here, there = (a[pairs], mine.columns[give[gave]]), (b[pairs], theirs.columns[take[took]])
            self.slots[here], self.slots[there] = self.slots[there], self.slots[here]
        self._weigh(np.concatenate((a[pairs], b[pairs])))
        return True, spent

    def _side(self, cells: Ints, size: int, turn: int) -> _Side:
        """Rollouts that these cells could give: of a long one another stretch every round; and nobody."""
        width = self.slots.shape[1]
        # a table for what these hold, not for what any cell does: of few rollouts in one row that is as much
        if self._rows > 1 or (self._none > _SMALL and not self._even):
            width = min(int((self.slots[cells] < self._none).sum(axis=1).max()) + size, width)
        # the stretch moves with the round, so in the end every rollout of a long cell has taken part
        columns = _columns(width, _COLUMNS[size], turn if width > _COLUMNS[size] else 0, 0 if self._even else size)
        slots = self.slots.take(cells, axis=0).take(columns, axis=1)
        return _Side(cells, slots, columns, _choices(columns.size, size))

    def _ideal(self, a: Ints, b: Ints) -> Floats:
        """[pairs] the work that a should give away: then both are done at the same time."""
        ideal: Floats = (self._load[a] - self._load[b]) / 2.0
        return ideal

    def _after(self, a: Ints, b: Ints, ideal: Floats, beyond: Floats, *, of_rows: bool) -> Floats:
        """[pairs, choices, answers] what is to fall, if so much work beyond the ideal leaves a for b: the later of both
        cells; of two rows the time of a's, and by how much b's takes longer."""
        load_a, load_b = self._load[a] - ideal, self._load[b] + ideal
        if not of_rows:  # both are done at the same time, but for what is beyond it
            np.abs(beyond, out=beyond)
            beyond += _column(load_b)
            return beyond
        done_a, done_b = _column(load_a) - beyond, _column(load_b) + beyond
        later: Floats = np.maximum(done_a, done_b)
        row_a, row_b = self._row_of[a], self._row_of[b]
        ranked, apart = np.sort(self.finish.reshape(-1, self._dp_size), axis=1), _column(row_a != row_b)
        # the last but one of a's row sets its time when a no longer does; the last of b's row until b does
        own = np.maximum(done_a, _column(ranked[row_a, -2]))
        times: Floats = own + np.maximum(done_b - np.where(apart, _column(ranked[row_b, -1]), own), 0.0)
        times += _LITTLE * (np.where(apart, done_a, later) - _column(self.finish[a]))
        return times

    def _best(self, after: Floats, before: Floats) -> tuple[Ints, ...]:
        """(pairs, choices, answers) of exchanges that help: of each pair the best; where they must be packed, the best
        few of all."""
        # a gain within rounding would be exchanged back and forth
        flat, most = after.reshape(before.size, -1), before * (1.0 - _LEAST_GAIN)
        if self._pack is None:
            best = flat.argmin(axis=1)
            pairs = np.flatnonzero(flat[np.arange(before.size), best] < most)
            return pairs, *np.divmod(best[pairs], after.shape[2])
        gain = (flat - most[:, None]).ravel()
        few = np.argpartition(gain, _PACKED)[:_PACKED] if gain.size > _PACKED else np.arange(gain.size)
        return np.unravel_index(few[gain[few] < 0.0], after.shape)

    def _one_a_row(
        self, best_first: Ints, mine: _Side, theirs: _Side, pairs: Ints, gave: Ints, took: Ints
    ) -> tuple[list[int], int]:
        """-> (exchanges whose rows no better one changes, for what they save was counted with the rows as they are, and
        after which both cells can be packed; how many were packed for that)."""
        used: set[int] = set()
        kept, tried = [], 0
        for one in best_first.tolist():
            pair = int(pairs[one])
            a, b = int(mine.cells[pair]), int(theirs.cells[pair])
            rows = {a // self._dp_size, b // self._dp_size}
            if not used.isdisjoint(rows):
                continue
            if self._pack is not None:
                tried += 1
                out, into = mine.rollouts(pair, int(gave[one])), theirs.rollouts(pair, int(took[one]))
                if not (self._packs(a, out, into) and self._packs(b, into, out)):
                    continue
            used |= rows
            kept.append(one)
            # every row has its exchange: none that is left may be done
            if len(used) > self._row_of[-1]:
                break
        return kept, tried

    def _packs(self, cell: int, out: list[int], into: list[int]) -> bool:
        items = [i for i in self.slots[cell].tolist() if i not in out] + into
        rank = cell % self._dp_size
        return self._pack is None or self._pack([i for i in items if i < self._none], rank) is not None

    # ---- descent

    def improve(self, target: float, budget: int) -> None:
        """Exchange until a layout is at the target, nothing helps, or the budget is spent."""
        pairings, sizes = _PAIRINGS, [1, 2]
        if self._rows > 1 or self._pack is not None:
            pairings, sizes = 0, [1 if self._pack is None and self._none > _SMALL else 2]
        stage = turn = 0
        moved = False  # since the stages began anew
        done = True
        # without an exchange the times are as they were
        while budget > 0 and not (done and float(self.times.min()) <= target):
            if stage < pairings:
                a, b = self._late_with_early(stage, target)
                size = 2 if turn > _SINGLE_ROUNDS or stage else 1
            else:
                a, b = self._last_with_others()
                size = sizes[stage - pairings]
            done, spent = self.exchange(a, b, size, turn, last=stage >= pairings)
            budget -= spent
            turn += 1
            # an exchange changes who is last, so the cheap pairings are tried again before the expensive ones
            if done:
                moved = stage >= pairings
                stage = stage if moved else 0
            elif stage + 1 < pairings + len(sizes):
                stage += 1
            elif moved:
                stage, moved = 0, False
            else:
                break

    def _late_with_early(self, shifted: int, target: float) -> tuple[Ints, Ints]:
        """Pairs of cells: the last with the first, the next with the next; ``shifted``: others meet."""
        order = self.finish.reshape(-1, self._dp_size).argsort(axis=1, kind="stable") + self._first
        late, early = (order.take(columns, axis=1).ravel() for columns in _meeting(self._dp_size, shifted))
        above = self.finish[late] > target
        return late[above], early[above]

    def _last_with_others(self) -> tuple[Ints, Ints]:
        """Pairs of cells: the last of every row with every other of the layout; of many, with the first ones."""
        size, rows = self._rows * self._dp_size, self._rows
        finish = self.finish.reshape(-1, rows, self._dp_size)
        base = np.arange(len(finish))[:, None] * size
        last = base + np.arange(rows) * self._dp_size + finish.argmax(axis=2)  # [layouts, rows]
        others = base + np.arange(size)
        # not under equal counts: what a heavy rollout needs beside it may lie anywhere
        if rows == 1 and size > _OTHERS and not self._even:
            others = base + np.argpartition(finish[:, 0], _OTHERS, axis=1)[:, :_OTHERS]
        a, b = np.repeat(last.ravel(), others.shape[1]), np.repeat(others[:, None], rows, axis=1).ravel()
        return a[a != b], b[a != b]


def slots_of(cell_of: Ints, number: int) -> Ints:
    """[number, width] positions of the rollouts in each of so many cells, n where there is none; ``cell_of``: [n] the
    cell of each."""
    held = np.bincount(cell_of, minlength=number)
    slots = np.full((number, int(held.max())), cell_of.size)
    order = np.argsort(cell_of, kind="stable")
    # sorted by cell, the place within one is the place in the order less the start of that cell
    slots[cell_of[order], np.arange(order.size) - (np.cumsum(held) - held)[cell_of[order]]] = order
    return slots


def _column(values: Any) -> Any:
    return values[:, None, None]


@lru_cache(maxsize=256)
def _columns(width: int, limit: int, turn: int, free: int) -> Ints:
    """Columns of a round: all of so many, or another stretch every turn, and so many free places at the end."""
    columns = np.arange(width)
    if width > limit:
        return np.concatenate(((np.arange(limit) * (width // limit) + turn * 7) % width, -1 - np.arange(free)))
    return columns


@cache
def _meeting(dp_size: int, shifted: int) -> tuple[Ints, Ints]:
    """Places of the pairs among ranks by their finish: of the late ones the last first, and whom each meets."""
    half = dp_size // 2
    return dp_size - 1 - np.arange(half), (np.arange(half) + shifted) % (dp_size - half)


@cache
def _choices(width: int, size: int) -> tuple[Ints, ...]:
    """Columns of every choice of ``size`` of so many."""
    return (np.arange(width),) if size == 1 or width == 1 else np.triu_indices(width, 1)


def _nearest(wanted: Floats, takes: Floats, look: int) -> Ints:
    """[pairs, choices, look] for each choice of a cell those of the other, half of them above it, that come nearest to
    what is wanted for it, as places in the flat table of them. O(size log size).

    All pairs are searched by one searchsorted: each row is lifted above the one before it.
    """
    num_pairs, width = takes.shape
    start = (np.arange(num_pairs) * width)[:, None]
    rank = np.argsort(takes, axis=1, kind="stable") + start
    ladder = takes.ravel()[rank]  # [pairs, width] ascending
    reach = 3.0 + 6.0 * max(float(ladder.max(initial=0.0)), float(np.abs(wanted).max(initial=0.0)))
    lift = np.arange(num_pairs)[:, None] * reach
    place = np.searchsorted((ladder + lift).ravel(), (wanted + lift).ravel()).reshape(wanted.shape)
    at = place[:, :, None] + np.arange(-(look // 2), look - look // 2)
    near: Ints = rank.ravel()[np.minimum(np.maximum(at, start[:, :, None]), start[:, :, None] + (width - 1))]
    return near


def _change(gives: Any, takes: Any, near: Ints | None) -> Any:
    """[pairs, choices, answers] what leaves the one cell of a pair for the other."""
    return gives[:, :, None] - (takes[:, None] if near is None else takes.ravel()[near])
