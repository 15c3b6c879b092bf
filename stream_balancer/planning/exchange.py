"""Exchanges of rollouts between cells, until the last cell finishes early.

A cell is a rank, or a micro-batch of a lockstep. All cells have the same number of slots. An empty slot has cost 0, so
a move is an exchange with an empty slot, and count limits and token caps are masks of one table.

    even_out    All cells run in parallel, so the latest cell decides. Late cells pair with early ones, and one numpy
                table [pairs, slots, slots] holds the exchanges of all pairs.
    even_rows   Rows of cells run one after another (locksteps), so the sum of the rows' latest cells decides.

Example: cells [700, 300] and [500, 400], loads 1000 and 900. The exchange of 700 for 500 gives 800 and 1100, and no
other exchange helps. Cells [700, 300, 100] and [500, 400]: the 100 moves to an empty slot, which gives 1000 and 1000.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from .arrays import Bools, Floats, Ints, order_of

# A search compares 200,000 exchanges, plus 400 per rollout; a round costs as much as 5,000. 1,000,000 take about 10 ms.
_BUDGET, _EACH, _ROUND = 200_000, 400, 5_000
# Slots of a cell that a table compares. With more rollouts per rank, largest first leaves next to nothing to gain.
_WIDE = 40
# Pairings in a row that may fail, and rows whose latest cells exchange.
_TURNS, _WORST = 7, 3
# Cells that the latest cell of a row is compared with.
_PARTNERS = 48
# Slots of all copies x cells.
_COPIES = 1_500
# A gain below this part of the latest cell is rounding error.
_GAIN = 1e-9


@dataclass
class Cells:
    """Rollouts in cells."""

    work: Floats  # [n + 1] cost of each rollout; 0 for the empty slot
    slots: Ints  # [copies * cells, slots] rollout in each slot; n = the slot is empty
    cap: tuple[Ints, int] | None = None  # [n + 1] tokens of each rollout, and the most tokens of a cell
    least: int = 0  # fewest rollouts of a cell
    most: int = 2**62  # most rollouts of a cell
    copies: int = 1
    load: Floats = field(init=False)  # [copies * cells] work of each cell

    @classmethod
    def of(
        cls, work: Floats, labels: Ints, cells: int, cap: tuple[Ints, int] | None, least: int = 0, most: int = 2**62
    ) -> Cells:
        """Cells from [n] labels."""
        n, held = work.size, np.bincount(labels, minlength=cells)
        order = np.lexsort((-work, labels))
        slots = np.full((cells, held.max() + (least < most)), n)
        slots[labels[order], np.arange(n) - np.repeat(np.cumsum(held) - held, held)] = order
        return cls(np.append(work, 0.0), slots, cap and (np.append(cap[0], 0), cap[1]), least, most)

    def __post_init__(self) -> None:
        self.load = self.work[self.slots].sum(axis=1)

    def shuffle(self) -> None:
        """Add copies that descend side by side: each shuffles the columns of slots over the cells, so that counts stay.

        The first copy keeps the given start, and copies above the token cap are dropped.
        """
        cells, width = self.slots.shape
        copies = max(_COPIES // (cells**2 * width), 1)
        slots = np.take_along_axis(self.slots[None], _shuffles(copies, cells, width), axis=1)
        if self.cap is not None:
            slots = slots[(self.cap[0][slots].sum(axis=2) <= self.cap[1]).all(axis=1)]
        self.copies, self.slots = slots.shape[0], slots.reshape(-1, width)
        self.__post_init__()

    def labels(self) -> Ints:
        """[n] cell of each rollout, in the copy whose latest cell is earliest."""
        best = int(self.load.reshape(self.copies, -1).max(axis=1).argmin())
        slots = self.slots.reshape(self.copies, -1, self.slots.shape[1])[best]
        labels = np.empty(self.work.size, np.int64)
        labels[slots] = np.arange(slots.shape[0])[:, None]
        return labels[:-1]

    def even_out(self, target: float) -> None:
        """Exchange until a copy's latest cell meets the target, all pairings fail, or the budget is spent.

        Cells pair as in a tournament: first the latest with the earliest, the second latest with the second earliest,
        and so on. Then all cells but the latest move on by one place, so that the latest meets every cell.
        """
        cells, budget = self.load.size // self.copies, _BUDGET + _EACH * self.work.size
        turn = failed = 0
        while failed < min(_TURNS, cells - 1) and budget > 0:
            load = self.load.reshape(self.copies, -1)
            if float(load.max(axis=1).min()) <= target:
                return
            order = order_of(load) + np.arange(self.copies)[:, None] * cells
            place = np.append((np.arange(cells - 1) + turn) % (cells - 1), cells - 1)
            one, other = place[: cells // 2], place[::-1][: cells // 2]
            late, early = order[:, np.maximum(one, other)].ravel(), order[:, np.minimum(one, other)].ravel()
            open_to = self.load[late] > target
            late, early = late[open_to], early[open_to]
            d, bad, look = self._differences(late, early)
            after = np.maximum(self.load[late][:, None, None] - d, self.load[early][:, None, None] + d)
            after[bad] = np.inf
            i, j = np.divmod(after.reshape(late.size, -1).argmin(axis=1), after.shape[2])
            better = np.flatnonzero(after[np.arange(late.size), i, j] < self.load[late] * (1.0 - _GAIN))
            self._exchange(late[better], early[better], look[i[better]], look[j[better]])
            failed, turn, budget = 0 if better.size else failed + 1, turn + 1, budget - after.size - _ROUND

    def even_rows(self, rows: int, keep: int = 0) -> None:
        """Exchange between the latest cells of the worst rows and all cells, until the sum of latest cells stays.

        ``keep``: the counts of that many ranks stay (a cell's rank is its number modulo ``keep``); 0 = counts change.
        """
        load, cells, budget = self.load, self.load.size, 4 * _BUDGET + _EACH * self.work.size
        row_of = np.arange(cells) // (cells // rows)
        while budget > 0:
            table = load.reshape(rows, -1)
            peak, second = table.max(axis=1), np.sort(table, axis=1)[:, -2:][:, 0]
            where = order_of(table.mean(axis=1) - peak)[:_WORST]
            last = where * table.shape[1] + table[where].argmax(axis=1)
            # Cells far below the latest of their row take most.
            near = order_of(load - peak[row_of])[:_PARTNERS]
            a, b = np.repeat(last, near.size), np.tile(near, last.size)
            d, bad, look = self._differences(a, b, keep)
            bad[a == b] = True
            late, other = a[:, None, None], b[:, None, None]
            same, after = row_of[late] == row_of[other], load[other] + d
            pair_peak = np.maximum(load[late] - d, np.where(same, after, 0.0))
            rise = np.where(same, 0.0, np.maximum(after - peak[row_of[other]], 0.0))
            # The exchange that leaves a pair most alike wins ties, because it opens the next exchange.
            gain = load[late] - np.maximum(pair_peak, second[row_of[late]]) - rise + 1e-6 * (load[late] - pair_peak)
            gain[bad] = -np.inf
            pair, i, j = np.unravel_index(int(gain.argmax()), gain.shape)
            if gain[pair, i, j] <= _GAIN * peak.max():
                return
            self._exchange(a[[pair]], b[[pair]], look[[i]], look[[j]])
            budget -= gain.size + _ROUND

    def _differences(self, a: Ints, b: Ints, keep: int = 0) -> tuple[Floats, Bools, Ints]:
        """Exchanges between cells ``a`` and ``b`` ([pairs] each), as [pairs, slots of a, slots of b].

        Returns (cost that a gives minus cost that a takes, exchanges that a limit forbids, slots that are compared).
        """
        width, nothing = self.slots.shape[1], self.work.size - 1
        look = np.arange(width) if width <= _WIDE else np.linspace(0, width - 1, _WIDE).astype(np.int64)
        give, take = self.slots[a][:, look][:, :, None], self.slots[b][:, look][:, None, :]
        bad = (give == nothing) & (take == nothing)
        a, b = a[:, None, None], b[:, None, None]
        if self.cap is not None:
            tokens, most = self.cap
            room = most - tokens[self.slots].sum(axis=1)
            dt = tokens[give] - tokens[take]
            bad = bad | (dt > room[b]) | (-dt > room[a])
        if self.least or self.most < width or keep:
            count = (self.slots < nothing).sum(axis=1)
            loses, gains = count > self.least, count < self.most
            fixed = (a - b) % keep != 0 if keep else np.zeros_like(a, bool)
            bad = bad | ((take == nothing) & (fixed | ~(loses[a] & gains[b])))
            bad = bad | ((give == nothing) & (fixed | ~(loses[b] & gains[a])))
        return self.work[give] - self.work[take], bad, look

    def _exchange(self, a: Ints, b: Ints, i: Ints, j: Ints) -> None:
        self.slots[a, i], self.slots[b, j] = self.slots[b, j], self.slots[a, i]
        for cell in (a, b):
            self.load[cell] = self.work[self.slots[cell]].sum(axis=1)


@cache
def _shuffles(copies: int, cells: int, width: int) -> Ints:
    """[copies, cells, slots] cell from which each slot's rollout comes. Seeded: equal inputs give equal plans."""
    shuffle = np.random.default_rng(0).random((copies, cells, width)).argsort(axis=1)
    shuffle[0] = np.arange(cells)[:, None]
    return shuffle
