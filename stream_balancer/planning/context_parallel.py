"""Which rollouts are shared, by how many ranks, and by which: ranks that meet once a step.

    unsplit layout --> heaviest first, each at the least degree at which it is done by a finish near the bound
                   --> rollouts that nobody shares are moved and exchanged between the ranks (cells.py)
                   --> the best of some such finishes, or the unsplit layout if none is better

Every rank runs its micro-batches by descending degree, and a block its own in one order. Then nobody waits within the
step, so a rank is done after the sum of its parts: bench/results/planning_proofs.md. Pure and deterministic; a work
budget instead of a clock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .arrays import Floats, Ints
from .cells import Cells, slots_of
from .shareable import Shareable

_TOLERANCE = 0.002
"""How far (relatively) above the bound a search may stop."""

_ROOMS = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Finishes that are tried, as multiples of the bound: each rollout is shared by as few ranks as have room up to it."""

_EACH_RANK = 4
"""For so many rollouts a rank a degree is chosen by the room that is left; all others stay whole."""

_BUDGET = 100_000
"""Elementary operations that the exchanges of a placement may spend."""

_LESS = 1e-9
"""A gain within rounding is no gain."""


@dataclass(slots=True)
class Placement:
    """By how many ranks each rollout is shared, and by which."""

    rows: Ints
    """[n] rows of the degrees in `Shareable.sizes`."""
    blocks: Ints
    """[n] the block of each; its ranks are ``[block * degree, (block + 1) * degree)``."""
    loads: Floats
    """[dp_size]"""

    @property
    def finish(self) -> float:
        """When the last rank is done."""
        return float(self.loads.max())


def place(step: Shareable, finish: float) -> Placement | None:
    """A placement that is done before ``finish``, as early as one is found; None if none is found. O(n log n) for each
    of some levels, and exchanges within a fixed work budget.

    Examples:
        >>> from stream_balancer.planning.plan import PlanKnobs
        >>> from stream_balancer.planning.shareable import Shareable
        >>> knobs = PlanKnobs(4, 5, None, cp_sizes=(1, 2, 4), cp_overhead=0.0, cp_min_tokens=1)
        >>> costs = np.array([800.0, 300.0, 100.0, 200.0, 200.0])
        >>> found = place(Shareable.of(costs, costs.astype(np.int64), knobs), finish=800.0)
        >>> found.rows, found.blocks, found.loads  # the 800 on ranks 0 and 1, 400 each
        (array([1, 0, 0, 0, 0]), array([0, 2, 2, 3, 3]), array([400., 400., 400., 400.]))
    """
    bound = step.bound()
    best, enough = None, bound * (1.0 + _TOLERANCE)
    for room in _ROOMS:
        if finish <= enough:
            break
        # a sum of floats that equals the bound must fit
        found = _exchanged(step, _heaviest_first(step, bound * room * (1.0 + _LESS)), enough)
        if found.finish < finish * (1.0 - _LESS):
            best, finish = found, found.finish
    return best


def _heaviest_first(step: Shareable, level: float) -> Placement:
    """Heaviest first, each at the least degree at which some block has room for its part up to the level, there on the
    block that would be done first; at the degree that ends lowest, if there is none. O(n dp_size) at the most."""
    loads, dp_size = np.zeros(step.dp_size), step.dp_size
    number = step.lengths.size
    rows, blocks = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    # a rollout above the token cap has no whole part: it has the least choice, so it chooses first
    whole = np.isfinite(step.parts[0])
    by_cost = np.lexsort((-(step.parts * step.sizes[:, None]).min(axis=0), whole))  # who must be shared, then the rest
    first = max(_EACH_RANK * dp_size, number - int(np.count_nonzero(whole)))
    sizes, parts = step.sizes.tolist(), step.parts.T.tolist()
    for one in by_cost[:first].tolist():
        least = np.inf
        for row, (size, part) in enumerate(zip(sizes, parts[one], strict=True)):
            if part >= least:
                continue
            of_block = loads if size == 1 else loads[: dp_size // size * size].reshape(-1, size).max(axis=1)
            block = int(of_block.argmin())
            if (done := float(of_block[block]) + part) < least:
                least, rows[one], blocks[one] = done, row, block
            if done <= level:
                break
        size, block = sizes[rows[one]], int(blocks[one])
        loads[block * size : (block + 1) * size] += parts[one][rows[one]]
    # the many light ones, whole: with a heap, for at 512 ranks a search for the least each would be most of the plan
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for one in by_cost[first:].tolist():
        load, blocks[one] = heap[0]
        heapq.heapreplace(heap, (load + parts[one][0], heap[0][1]))
    for load, rank in heap:
        loads[rank] = load
    return Placement(rows, blocks, loads)


def _exchanged(step: Shareable, found: Placement, target: float) -> Placement:
    """The placement with rollouts that nobody shares moved and exchanged between ranks, until the target, or nothing
    helps."""
    # only these can move without moving another rank's work
    own = np.flatnonzero(found.rows == 0)
    if not own.size:
        return found
    parts, ranks = step.parts[0, own], found.blocks[own]
    # what is shared stays where it is: moved, it would move on every rank of its block
    shared = found.loads - np.bincount(ranks, weights=parts, minlength=step.dp_size)
    cells = Cells(parts, slots_of(ranks, step.dp_size), step.dp_size, base=shared)
    cells.improve(target, _BUDGET)
    blocks = found.blocks.copy()
    blocks[own] = cells.cell_of()
    return Placement(found.rows, blocks, cells.finish)
