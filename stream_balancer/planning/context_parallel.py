"""Which rollouts are shared, by how many ranks, and by which: ranks that meet once a step.

    unsplit layout --> every rollout gets a degree: the least at which its part is no longer than a level near the bound
                   --> largest degree first, heaviest first, each onto the block that would be done first
                   --> rollouts of one rank are moved and exchanged between the rank that is done last and the others
                   --> the best of all these, or the unsplit layout if none is better

Every rank runs its micro-batches by descending degree, and a block its own in one order. Then nobody waits within the
step, so a rank is done after the sum of its parts: bench/results/planning_proofs.md. Pure and deterministic; a work
budget instead of a clock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .arrays import Floats, Ints
    from .shareable import Shareable

_TOLERANCE = 0.002
"""How far (relatively) above the bound a search may stop."""

_LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 1.05, 1.15, 1.3, 1.6)
"""Longest parts that are tried, as multiples of the bound. Shorter ones than the bound: what is short is placed more
evenly, though sharing costs more."""

_ROOMS = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Finishes that are tried, as multiples of the bound: each rollout is shared by as few ranks as have room up to it."""

_EACH_RANK = 4
"""For so many rollouts a rank a degree is chosen by the room that is left; all others stay whole."""

_BUDGET = 1_500_000
"""Elementary operations that the placements of a plan may spend."""

_EACH, _ROUND_WORK = 200, 4_000
"""Work of placing a rollout, and a round of exchanges beside what it compares, cost in the same unit."""

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
    """[num_ranks]"""

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
    return _Search(step, finish).run()


class _Search:
    """The best placement so far, what was tried, and what may still be spent."""

    def __init__(self, step: Shareable, finish: float) -> None:
        self._step, self._finish = step, finish
        self._bound = step.bound()
        self._budget = _BUDGET
        self._best: Placement | None = None

    def run(self) -> Placement | None:
        """Levels first, then finishes."""
        tried: set[bytes] = set()
        for level in _LEVELS:
            rows = self._step.fitting(self._bound * level * (1.0 + _LESS))
            # nobody shared: that is the unsplit layout
            if not self._done and rows.any() and (key := rows.tobytes()) not in tried:
                tried.add(key)
                self._improve(_largest_degree_first(self._step, rows))
        for room in _ROOMS:
            if not self._done:
                self._improve(_heaviest_first(self._step, self._bound * room))
        return self._best

    @property
    def _done(self) -> bool:
        return self._finish <= self._bound * (1.0 + _TOLERANCE) or self._budget <= 0

    def _improve(self, found: Placement) -> None:
        self._budget -= _EACH * found.rows.size
        self._budget -= _exchanged(self._step, found, self._bound * (1.0 + _TOLERANCE), self._budget)
        if found.finish < self._finish * (1.0 - _LESS):
            self._best, self._finish = found, found.finish


def _largest_degree_first(step: Shareable, rows: Ints) -> Placement:
    """Largest degree first, heaviest first, each onto the block that would be done first (LPT by levels). At a degree
    all ranks of a block are equally loaded, for what they hold is shared by all of them. O(n log num_ranks)."""
    loads = np.zeros(step.num_ranks)
    blocks = np.zeros(rows.size, dtype=np.int64)
    parts = step.parts[rows, np.arange(rows.size)]
    for row in range(step.sizes.size - 1, -1, -1):
        chosen = np.flatnonzero(rows == row)
        if not chosen.size:
            continue
        chosen = chosen[np.argsort(-parts[chosen], kind="stable")]
        blocks[chosen] = _onto_least(loads, int(step.sizes[row]), parts[chosen])
    return Placement(rows, blocks, loads)


def _heaviest_first(step: Shareable, level: float) -> Placement:
    """Heaviest first, each at the least degree at which some block has room for its part up to the level, there on the
    block that would be done first; at the degree that ends lowest, if there is none. O(n num_ranks) at the most."""
    loads, num_ranks = np.zeros(step.num_ranks), step.num_ranks
    number = step.lengths.size
    rows, blocks = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    whole = np.isfinite(step.parts[0])
    by_cost = np.lexsort((-(step.parts * step.sizes[:, None]).min(axis=0), whole))  # who must be shared, then the rest
    first = max(_EACH_RANK * num_ranks, number - int(np.count_nonzero(whole)))
    sizes, parts = step.sizes.tolist(), step.parts.T.tolist()
    for one in by_cost[:first].tolist():
        least = np.inf
        for row, (size, part) in enumerate(zip(sizes, parts[one], strict=True)):
            if part >= least:
                continue
            of_block = loads if size == 1 else loads[: num_ranks // size * size].reshape(-1, size).max(axis=1)
            block = int(of_block.argmin())
            if (done := float(of_block[block]) + part) < least:
                least, rows[one], blocks[one] = done, row, block
            if done <= level:
                break
        size, block = sizes[rows[one]], int(blocks[one])
        loads[block * size : (block + 1) * size] += parts[one][rows[one]]
    rest = by_cost[first:]
    blocks[rest] = _onto_least(loads, 1, step.parts[0, rest])
    return Placement(rows, blocks, loads)


def _onto_least(loads: Floats, size: int, parts: Floats) -> list[int]:
    """[m] the block of each part in turn: the one of ``size`` ranks that would be done first; adds them to ``loads``.
    All ranks of a block are equally loaded."""
    num_blocks = loads.size // size
    heap = [(load, block) for block, load in enumerate(loads[: num_blocks * size : size].tolist())]
    heapq.heapify(heap)
    blocks = []
    for part in parts.tolist():
        load, block = heap[0]
        blocks.append(block)
        heapq.heapreplace(heap, (load + part, block))
    for load, block in heap:
        loads[block * size : (block + 1) * size] = load
    return blocks


def _exchanged(step: Shareable, found: Placement, target: float, budget: int) -> int:
    """Move and exchange rollouts that nobody shares between the last rank and all others, in place, until the target,
    or nothing helps. -> work spent."""
    own = np.flatnonzero(found.rows == 0)
    parts, loads, num_ranks = step.parts[0, own], found.loads, step.num_ranks
    ranks = np.concatenate((found.blocks[own], np.arange(num_ranks)))  # nothing, on every rank: a move
    costs = np.concatenate((parts, np.zeros(num_ranks)))
    spent = 0
    while spent < budget:
        last = int(loads.argmax())
        finish = float(loads[last])
        mine = np.flatnonzero(ranks[: own.size] == last)
        if finish <= target or not mine.size:
            break
        others = np.flatnonzero(ranks != last)
        spent += mine.size * others.size + _ROUND_WORK
        shift = costs[mine][:, None] - costs[others]  # [mine, others] what leaves the last rank
        later = np.maximum(finish - shift, loads[ranks[others]] + shift)
        gives, takes = divmod(int(later.argmin()), others.size)
        if later[gives, takes] >= finish * (1.0 - _LESS):
            break
        give, take, moved = mine[gives], others[takes], float(shift[gives, takes])
        other = int(ranks[take])
        loads[last] -= moved
        loads[other] += moved
        ranks[give] = other
        if take < own.size:
            ranks[take] = last
    found.blocks[own] = ranks[: own.size]
    return spent
