"""Ranks that meet at every micro-batch (FSDP, ZeRO-3): which micro-batches run together.

A *lockstep* is the micro-batches of one index, one per rank: all ranks run them at the same time, and the costliest
one sets the time. The step takes the sum of these, so what counts is that the bins of one lockstep are alike. Pure and
deterministic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import split_by_label
from .bounds import lockstep_bound
from .cells import Cells, Limit
from .packing import Bins, Packer
from .partition import TOLERANCE

_BUDGET = 300_000
"""Elementary operations that the search may spend from one start."""


def assign_lockstep(
    packer: Packer, bins: Bins, num_ranks: int, number: int, speeds: ArrayLike | None, rotation: int
) -> list[Bins]:
    """[num_ranks * number] bins -> [rank][micro-batch]; bins of one lockstep are alike."""
    if not packer.padded and len(bins) == num_ranks * number and number > 1 and num_ranks > 1:
        bins = _searched(packer, bins, num_ranks, number)
    bins = sorted(bins, key=packer.cost, reverse=True)
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
    """Alike within each lockstep, from the better of two starts, or from `bins` where there is no other."""
    # which of the two is better depends on the lengths, and either costs little beside the search
    starts = [_level_by_level(packer, num_ranks, number, fullest_first=fullest) for fullest in (False, True)]
    found = [one for one in starts if one is not None] or [sorted(bins, key=packer.cost, reverse=True)]
    start = min(found, key=lambda one: _time_of(packer, one, num_ranks))
    cell_of = np.empty(packer.tokens.size, dtype=np.int64)
    for cell, one in enumerate(start):
        cell_of[one] = cell
    tokens = np.array(packer.token_list, dtype=np.int64)
    # at least one rollout each: a micro-batch that is empty would be a padding copy
    limits = Limit(np.ones_like(tokens), 1, tokens.size), Limit(tokens, 0, packer.cap)
    cells = Cells.of(cell_of, packer.work, num_ranks, rows=number, limits=limits)
    bound = lockstep_bound(packer.work, packer.tokens, num_ranks, packer.cap)
    cells.improve(bound * (1.0 + TOLERANCE), _BUDGET)
    return [one.tolist() for one in split_by_label(cells.cell_of(), num_ranks * number)]


def _time_of(packer: Packer, bins: Bins, num_ranks: int) -> float:
    """Sum over locksteps of the costliest bin: what the step takes if ranks meet at every micro-batch."""
    return sum(sorted(map(packer.cost, bins), reverse=True)[::num_ranks])


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
        # nobody can make it shorter than its heaviest, or than what is left needs in the mean
        level = max(work[left[0]], sum(work[i] for i in left) / (num_ranks * (number - index)))
        room = np.full(num_ranks, packer.cap, dtype=np.int64)
        # a little more than the level: a sum of floats that equals it must fit
        free = np.full(num_ranks, level * (1.0 + 1e-9))
        bins: Bins = [[] for _ in range(num_ranks)]
        rest = []
        spare = len(left) - num_ranks * (number - index - 1)  # those to come need one rollout per bin at least
        for i in left:
            fits = (room >= tokens[i]) & (free >= work[i]) if spare > 0 else np.zeros(1, dtype=np.bool_)
            # neither suffices: by level tokens may run out, fullest first the work may be unlike
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
