"""From the ranks' shares, in which nobody shares a rollout, to a layout in which some do, if that is done earlier.

    shares --> shareable.py            by how many ranks each may be shared; the bound
           --> context_parallel.py     ranks that meet once a step: who is shared, and by which ranks
               shared_locksteps.py     ranks that meet at every micro-batch: the same, and in which lockstep
           --> [rank][micro-batch] -> positions, and the degree of each

The unsplit shares are always a candidate: no layout is done later than they are. Pure and deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import Ints, positions_in
from .context_parallel import place
from .micro_batches import in_order
from .packing import Packer
from .plan import PlanKnobs, Times, Waiting
from .shareable import Shareable
from .shared_locksteps import in_locksteps


class RankLayout(NamedTuple):
    """``[rank][micro_batch]``; see `Plan`."""

    ranks: list[list[Ints]]
    """Positions."""
    degrees: list[list[int]]
    """By how many ranks each micro-batch is shared, the shared ones first; empty: none is."""


def shared_layout(waiting: Waiting, knobs: PlanKnobs, shares: list[list[Ints]], step: int) -> RankLayout:
    """The layout that is done first of those tried, the shares among them unless a rollout must be shared for the token
    cap.

    Args:
        waiting: the columns.
        knobs: with ``degrees`` beyond 1.
        shares: [rank][micro_batch] -> positions of the step's rollouts.
        step: its number; rotates which ranks get what.

    Raises:
        OversizeError: a rollout is above the token cap at every degree, and the knobs refuse it.

    Complexity: O(n log n), and a search within a fixed work budget.
    """
    picked = np.sort(positions_in(shares))
    rollouts = Shareable.of(waiting.costs[picked], waiting.lengths[picked], knobs)
    unsplit = Times.of(waiting, knobs, shares).finish if rollouts.may_stay_whole else np.inf
    packer = Packer(waiting.lengths[picked], waiting.costs[picked], knobs.max_tokens_per_micro_batch, padded=False)
    if not picked.size:
        return RankLayout(shares, [])
    found = (
        in_locksteps(rollouts, packer, knobs, unsplit)
        if knobs.sync == "micro_batch"
        else _in_any_order(rollouts, packer, knobs, unsplit)
    )
    if found is None:
        return RankLayout(shares, [])
    ranks = [[picked[np.array(sorted(one), dtype=np.int64)] for one, _ in of_rank] for of_rank in found]
    degrees = [[degree for _, degree in of_rank] for of_rank in found]
    ranks, degrees = _rotated(ranks, degrees, step)
    # counted as the step will run it: overheads and order may eat what the placement saved
    if Times.of(waiting, knobs, ranks, degrees).finish >= unsplit:
        return RankLayout(shares, [])
    return RankLayout(ranks, degrees)


def _in_any_order(
    rollouts: Shareable, packer: Packer, knobs: PlanKnobs, unsplit: float
) -> list[list[tuple[list[int], int]]] | None:
    """[rank][micro_batch] (rollouts, degree) of ranks that meet once a step; None if no better placement is found."""
    # the least that the overheads add: a placement within it may still win
    least = -(-packer.least_bins(np.arange(packer.tokens.size)) // knobs.dp_size)
    found = place(rollouts, unsplit - knobs.overhead_cost * least)
    if found is None:
        return None
    degrees = rollouts.sizes[found.rows]
    shared = np.flatnonzero(degrees > 1)
    parts = rollouts.parts[found.rows, np.arange(degrees.size)]
    # by descending degree, and the members of a block all in one order: then nobody waits
    shared = shared[np.lexsort((-parts[shared], -degrees[shared]))]
    ranks: list[list[tuple[list[int], int]]] = [[] for _ in range(knobs.dp_size)]
    for one in shared.tolist():
        size = int(degrees[one])
        for rank in range(int(found.blocks[one]) * size, (int(found.blocks[one]) + 1) * size):
            ranks[rank].append(([one], size))
    own = [np.flatnonzero((degrees == 1) & (found.blocks == rank)).tolist() for rank in range(knobs.dp_size)]
    packed = packer.evened(own, list(map(len, ranks)), knobs.micro_batch_multiple, knobs.micro_batch_counts)
    for done, bins in zip(ranks, packed, strict=True):
        done += [(one, 1) for one in in_order(bins, packer.cost, knobs.order)]
    return ranks


def _rotated(ranks: list[list[Ints]], degrees: list[list[int]], step: int) -> tuple[list[list[Ints]], list[list[int]]]:
    """The same on other ranks, so that no rank always has the heaviest. Aligned blocks become aligned blocks: ranks
    change places within the largest ones, and these among each other, where they cover all ranks.

    Examples:
        >>> _rotated([[0], [1], [2], [3]], [[2], [2], [1], [1]], step=3)[0]
        [[3], [2], [1], [0]]
    """
    # rotated in units of the largest block: then every smaller one stays aligned, too
    number, largest = len(ranks), max(degree for of_rank in degrees for degree in of_rank)
    # some ranks are in no block of the largest size: to exchange blocks would tear one
    if number % largest:
        return ranks, degrees
    within, among = step % largest, step // largest * largest
    source = [((rank - among) % number) ^ within for rank in range(number)]
    return [ranks[rank] for rank in source], [degrees[rank] for rank in source]
