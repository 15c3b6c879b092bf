"""Ranks that meet at every micro-batch (FSDP, ZeRO-3): which micro-batches run together.

A *lockstep* is the micro-batches of one index, one per rank: all ranks run them at the same time, and the costliest
one sets the time. The step takes the sum of these, so what counts is that the bins of one lockstep are alike. Pure and
deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .bounds import lockstep_bound
from .partition import TOLERANCE

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .arrays import Ints
    from .packing import Bins, Packer

_SEARCH_WORK = 800_000
"""Elementary operations that the search for swaps may spend from one start (measured: four times as many, 0.00-0.06
points of idle time less)."""

_TRY_WORK = 4_000
"""What one try costs beside that: its fixed part, in the same unit."""


def assign_lockstep(
    packer: Packer, bins: Bins, num_ranks: int, number: int, speeds: ArrayLike | None, rotation: int
) -> list[Bins]:
    """[num_ranks * number] bins -> [rank][micro-batch]; bins of one lockstep are alike."""
    if not packer.padded and len(bins) == num_ranks * number and number > 1 and num_ranks > 1:
        bins = _searched(packer, bins, num_ranks, number)
    bins = _by_cost(packer, bins)
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    fastest_first = None if speeds is None else np.argsort(-np.asarray(speeds, dtype=np.float64), kind="stable")
    for index, start in enumerate(range(0, len(bins), num_ranks)):
        for place, one in enumerate(bins[start : start + num_ranks]):
            if fastest_first is not None:
                rank = int(fastest_first[place])
            else:  # there and back: who has the heaviest of this lockstep has the lightest of the next
                rank = (place if index % 2 == 0 else num_ranks - 1 - place) + rotation
            ranks[rank % num_ranks].append(one)
    return ranks


def step_time(packer: Packer, ranks: list[Bins], speeds: ArrayLike | None) -> float:
    """Sum over locksteps of the rank that is done last with its micro-batch; every rank has as many, or fewer."""
    rate = np.ones(len(ranks)) if speeds is None else np.asarray(speeds, dtype=np.float64)
    # [locksteps, ranks]; 0.0 where a rank has none
    took = np.zeros((max(map(len, ranks)), len(ranks)))
    for rank, share in enumerate(ranks):
        took[: len(share), rank] = [packer.cost(one) for one in share]
    return float((took / rate).max(axis=1).sum())


def _searched(packer: Packer, bins: Bins, num_ranks: int, number: int) -> Bins:
    """Alike within each lockstep, from several starts, for none is best everywhere; `bins` where there is no other."""
    good_enough = lockstep_bound(packer.work, packer.tokens, num_ranks, packer.cap) * (1.0 + TOLERANCE)
    best = None
    for fullest_first in (False, True):
        start = _level_by_level(packer, num_ranks, number, fullest_first=fullest_first)
        if start is not None:
            found = _Search(packer, start, num_ranks).run()
            best = found if best is None else min(best, found, key=lambda one: _time_of_bins(packer, one, num_ranks))
            if _time_of_bins(packer, best, num_ranks) <= good_enough:
                break
    return _Search(packer, _by_cost(packer, bins), num_ranks).run() if best is None else best


def _by_cost(packer: Packer, bins: Bins) -> Bins:
    return sorted(bins, key=packer.cost, reverse=True)


def _time_of_bins(packer: Packer, bins: Bins, num_ranks: int) -> float:
    """Sum over locksteps of the costliest bin: what the step takes if ranks meet at every micro-batch."""
    return sum(packer.cost(one) for one in _by_cost(packer, bins)[::num_ranks])


def _level_by_level(packer: Packer, num_ranks: int, number: int, *, fullest_first: bool) -> Bins | None:
    """Lockstep after lockstep: as long as its heaviest rollout or its fair share of what is left, filled up to that.

    One with an outlier takes as long as the outlier whatever else is in it, so it takes all it can. Costliest first,
    each to the bin that is furthest from that level, or to the fullest one that has room. None if what is left does not
    fit the last one. O(n * num_ranks * number), vectorised.
    """
    tokens, work = packer.token_list, packer.work_list
    left = np.argsort(-packer.work, kind="stable").tolist()
    result: Bins = []
    for index in range(number - 1):
        level = max(work[left[0]], sum(work[i] for i in left) / (num_ranks * (number - index)))
        room = np.full(num_ranks, packer.cap, dtype=np.int64)
        # a little more than the level: a sum of floats that equals it must fit
        free = np.full(num_ranks, level * (1.0 + 1e-9))
        bins: Bins = [[] for _ in range(num_ranks)]
        rest = []
        spare = len(left) - num_ranks * (number - index - 1)  # those to come need one rollout per bin at least
        for i in left:
            fits = (room >= tokens[i]) & (free >= work[i]) if spare > 0 else np.zeros(1, dtype=np.bool_)
            if fits.any():
                one = int(np.where(fits, -room if fullest_first else free, -np.inf).argmax())
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


class _Search:
    """Lowers the costliest bin of one lockstep after the other, by the move or swap that saves most over all of them.

    Which bins form a lockstep stays as it is. A move is a swap with a dummy of no cost and no tokens.
    """

    def __init__(self, packer: Packer, bins: Bins, num_ranks: int) -> None:
        self._n = n = packer.tokens.size
        self._num_ranks = num_ranks
        no_cost, no_tokens = np.zeros(len(bins)), np.zeros(len(bins), dtype=np.int64)  # of one dummy per bin
        self._work = np.concatenate((packer.work, no_cost))  # [n + bins]
        self._tokens = np.concatenate((np.minimum(packer.tokens, packer.cap), no_tokens))  # [n + bins]
        self._bin_of = np.zeros(n + len(bins), dtype=np.int64)
        for number, members in enumerate(bins):
            self._bin_of[members] = number
        # one dummy in every bin: a swap with it is a move into that bin
        self._bin_of[n:] = np.arange(len(bins))
        self._load = np.array([packer.cost(one) for one in bins])  # [bins]
        self._room = packer.cap - np.array([sum(packer.token_list[i] for i in one) for one in bins], dtype=np.int64)
        self._held = np.array([len(one) for one in bins])

    def run(self) -> Bins:
        """The bins, once no swap saves anything or the work budget is spent. Each try compares all rollouts of one bin
        with all others."""
        number = self._load.size // self._num_ranks
        budget = _SEARCH_WORK
        idle = index = 0
        while budget > 0 and idle < number:
            # [ranks] of the lockstep whose turn it is
            of_lockstep = self._load.reshape(number, self._num_ranks)[index]
            heaviest = index * self._num_ranks + int(of_lockstep.argmax())
            # rollouts of the costliest bin, and its dummy
            mine = np.flatnonzero(self._bin_of == heaviest)
            budget -= mine.size * self._bin_of.size + _TRY_WORK
            swap = self._best_swap(mine, heaviest, runner_up=float(np.partition(of_lockstep, -2)[-2]))
            idle = 0 if swap else idle + 1
            if swap:
                self._swap(*swap)
            index = (index + 1) % number
        result: Bins = [[] for _ in range(self._load.size)]
        for i, one in enumerate(self._bin_of[: self._n].tolist()):
            result[one].append(i)
        return result

    def _best_swap(self, mine: Ints, heaviest: int, runner_up: float) -> tuple[int, int] | None:
        """The pair (i in the heaviest bin of its lockstep, j anywhere else) whose swap shortens the step most; None if
        none does."""
        load, room, num_ranks = self._load, self._room, self._num_ranks
        peaks = load.reshape(-1, num_ranks).max(axis=1)  # [locksteps] the time of each
        other = self._bin_of[None, :]
        shift = self._work[mine][:, None] - self._work[None, :]  # [mine, n + bins] what leaves the heaviest bin
        grow = self._tokens[mine][:, None] - self._tokens[None, :]
        real_i, real_j = (mine < self._n)[:, None], (np.arange(self._bin_of.size) < self._n)[None, :]
        allowed = (other != heaviest) & (shift > 0.0) & (grow <= room[other]) & (-grow <= room[heaviest])
        allowed &= real_j | (self._held[heaviest] > 1)  # a move may not empty the bin
        allowed &= real_i
        lockstep = heaviest // num_ranks
        # [mine, n + bins] both bins after the swap
        new_heaviest = load[heaviest] - shift
        new_other = load[other] + shift
        same = other // num_ranks == lockstep
        # the time of this lockstep afterwards; what another one loses by the swap is taken off below
        own = np.maximum(runner_up, new_heaviest)
        saved = peaks[lockstep] - np.where(same, np.maximum(own, new_other), own)
        saved -= np.where(same, 0.0, np.maximum(new_other - peaks[other // num_ranks], 0.0))
        # if several bins share the peak nothing is saved yet, but one fewer does: count lowering this one a little
        saved += 1e-6 * (load[heaviest] - np.maximum(new_heaviest, np.where(same, new_other, 0.0)))
        saved = np.where(allowed, saved, -np.inf)
        best = int(saved.argmax())
        i, j = divmod(best, self._bin_of.size)
        return (int(mine[i]), j) if saved[i, j] > 1e-9 * float(load[heaviest]) else None

    def _swap(self, i: int, j: int) -> None:
        here, there = int(self._bin_of[i]), int(self._bin_of[j])
        shift, grow = self._work[i] - self._work[j], self._tokens[i] - self._tokens[j]
        rollouts = int(i < self._n) - int(j < self._n)  # 1 for a move
        for one, sign in ((here, -1), (there, 1)):
            self._load[one] += sign * shift
            self._room[one] -= sign * grow
            self._held[one] += sign * rollouts
        self._bin_of[i], self._bin_of[j] = there, here
