"""Ranks that meet at every micro-batch, and share rollouts: which are shared, by which ranks, and in which lockstep.

In a lockstep every rank runs one micro-batch, alone or with the others of its block, and the longest sets the time.

    numbers of locksteps, and longest parts, that are tried:
    rollouts --> parts no longer than that; a shared one is a micro-batch by itself
             --> the others packed into the places that are left
             --> the longest into one lockstep, the next into the next

Pure and deterministic.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from .arrays import rounded_up
from .packing import Packer
from .plan import PlanKnobs
from .shareable import Shareable

_LEVELS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0)
"""Longest parts that are tried, as multiples of the bound of so many locksteps."""

_MORE = 3
"""Locksteps beyond the fewest that hold everything."""

_WORTH = 0.02
"""By how much a lockstep more must shorten the step, beside its overhead."""


class _Bin(NamedTuple):
    """A micro-batch."""

    took: float
    degree: int
    items: list[int]


Locksteps = list[list[_Bin]]


def in_locksteps(
    step: Shareable, packer: Packer, knobs: PlanKnobs, finish: float
) -> list[list[tuple[list[int], int]]] | None:
    """[rank][micro_batch] (rollouts, degree) that is done before ``finish``, as early as one is found; None if none is
    found. A micro-batch of several ranks has the same place on all of them.

    Complexity: O(n log n) for each of some levels of some numbers of locksteps.
    """
    overhead, multiple = knobs.overhead_cost, knobs.micro_batch_multiple
    best, least = None, finish
    fewest, most = -(-_least_places(step, packer) // step.dp_size), None
    for number in count(fewest):
        found = _packed(step, packer, number * step.dp_size)
        if found and most is None:  # in fewer they may not fit, though their tokens would
            most = number + _MORE
        # padding copies take no time of their own, but the collectives of their lockstep do
        run = rounded_up(number, multiple)
        for bins in found:
            locksteps = _in_rows(bins, step.dp_size)
            took = sum(max(one.took for one in bins) for bins in locksteps) + overhead * run
            # a lockstep more gathers the parameters once more, on all ranks, even where nobody has said what that costs
            more = best is not None and len(locksteps) > len(best)
            if took < least * (1.0 - _WORTH if more else 1.0):
                best, least = locksteps, took
        if most is not None and number >= most:
            break
    return None if best is None else _on_ranks(best, step.dp_size)


def _least_places(step: Shareable, packer: Packer) -> int:
    """Micro-batches, each counted as often as ranks share it, that all rollouts take at least."""
    rows = np.isfinite(step.parts).argmax(axis=0)
    own = np.flatnonzero(rows == 0)
    return int(step.sizes[rows[rows > 0]].sum()) + (packer.least_bins(own) if own.size else 0)


def _packed(step: Shareable, packer: Packer, places: int) -> list[list[_Bin]]:
    """Rollouts in micro-batches that take no more than so many places, for each level at which that is possible."""
    found, tried = [], set()
    bound = step.bound(places)
    for level in _LEVELS:
        rows = step.fitting(bound * level * (1.0 + 1e-9))
        # near levels often share the same rollouts: packed once
        if (key := rows.tobytes()) in tried:
            continue
        tried.add(key)
        shared, own = np.flatnonzero(rows), np.flatnonzero(rows == 0)
        degrees = step.sizes[rows[shared]]
        left = places - int(degrees.sum())
        bins = packer.pack(own, left) if left > 0 and own.size else []
        if bins is None or left < 0 or (own.size and not bins):
            continue
        parts = step.parts[rows[shared], shared].tolist()
        alone = [_Bin(part, by, [one]) for part, by, one in zip(parts, degrees.tolist(), shared.tolist(), strict=True)]
        found.append(alone + [_Bin(packer.cost(one), 1, one) for one in bins])
    return found


def _in_rows(bins: list[_Bin], dp_size: int) -> Locksteps:
    """The longest into one lockstep, as far as there are ranks, the next into the next."""
    # greedy by time: a lockstep is as long as its first, so the next longest cost nothing in it
    left = sorted(bins, key=lambda one: -one.took)
    rows = []
    while left:
        room, taken, rest = dp_size, [], []
        for one in left:
            if one.degree <= room:
                taken.append(one)
                room -= one.degree
            else:
                rest.append(one)
        rows.append(taken)
        left = rest
    return rows


def _on_ranks(locksteps: Locksteps, dp_size: int) -> list[list[tuple[list[int], int]]]:
    """[rank][micro_batch] (rollouts, degree). Locksteps in which all ranks have something come first; what is in the
    others is laid out by descending degree, so that the members of a block have as many before it and none is missing
    in between."""
    ranks: list[list[tuple[list[int], int]]] = [[] for _ in range(dp_size)]
    # a collective of a lockstep needs all ranks: one that lacks some must not come between two that do not
    full = [bins for bins in locksteps if sum(one.degree for one in bins) == dp_size]
    for bins in sorted(full, key=lambda some: -max(one.took for one in some)):
        first = 0
        for one in sorted(bins, key=lambda some: (-some.degree, -some.took)):
            for rank in range(first, first + one.degree):
                ranks[rank].append((one.items, one.degree))
            first += one.degree
    rest = [one for bins in locksteps if sum(one.degree for one in bins) < dp_size for one in bins]
    for one in sorted(rest, key=lambda some: (-some.degree, -some.took)):
        first = min(range(0, dp_size // one.degree * one.degree, one.degree), key=lambda rank: len(ranks[rank]))
        for rank in range(first, first + one.degree):
            ranks[rank].append((one.items, one.degree))
    return ranks
