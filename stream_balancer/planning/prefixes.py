"""On which rank siblings go that share a prefix: so that the last rank is done as early as possible.

A group on one rank pays its prefix once, but is a lump; spread over the ranks it balances, and pays it on every one.

    partition of whole costs ---> counted with sharing: on every rank at most what it was
    groups whole, and cut where a rank would pass 1, 1.02, 1.05, 1.1 times the bound
                             ---> parts and single siblings exchanged with the rank that is done last
    the best of them all     ---> under a cap, every part whole into a micro-batch

The plan without sharing is always among those compared, so none is worse. Pure and deterministic.
"""

from __future__ import annotations

import math
from operator import itemgetter

import numpy as np

from .arrays import Floats, Ints, positions_in
from .bounds import lower_bound
from .micro_batches import in_order
from .packing import Bins, Packer
from .plan import PlanKnobs, Times, Waiting, work_in
from .shared_layout import RankLayout
from .siblings import Siblings

_NEAR = 0.005
"""A plan this near to its bound (relatively) is good enough."""

_LEVELS = (math.inf, 1.0, 1.02, 1.05, 1.1)
"""Up to which work a rank takes whole groups in the starts that are tried, in bounds."""

_ROUNDS = 80
"""Exchanges of a descent, at most."""

_WITH = 12
"""Ranks that the one that is done last is compared with: those that are done first."""


def with_shared_prefixes(waiting: Waiting, knobs: PlanKnobs, dense: RankLayout, step: int) -> RankLayout:
    """The rollouts of ``dense``, a layout that knows nothing of prefixes, with siblings side by side. Never done later
    than that one, where a micro-batch pays a prefix once. A rollout that several ranks share stays where it is: it pays
    its whole prefix.

    Args:
        waiting: with prefixes.
        knobs: ranks meet once a step.
        dense: of those that go.
        step: rotates which rank is the heaviest.

    Complexity: as of `place_siblings`, and packing the parts under the cap.
    """
    ranks, cap = knobs.dp_size, knobs.max_tokens_per_micro_batch
    numbers = [sum(degree > 1 for degree in of_rank) for of_rank in dense.degrees] or [0] * ranks
    # shared micro-batches stand in front on every rank, in one order: nothing may come between them
    shared = [share[:number] for share, number in zip(dense.ranks, numbers, strict=True)]
    own = [share[number:] for share, number in zip(dense.ranks, numbers, strict=True)]
    degrees = dense.degrees and [of_rank[:number] for of_rank, number in zip(dense.degrees, numbers, strict=True)]
    picked = np.sort(positions_in(own))
    siblings = waiting.sets(picked)
    parts = siblings if cap is None else siblings.cut_to(cap)
    rank_of = np.empty(waiting.costs.size, dtype=np.int64)
    for rank, share in enumerate(own):
        rank_of[positions_in([share])] = rank
    places = place_siblings(
        parts, ranks, rank_of[picked], base=Times.of(waiting, knobs, shared, degrees).work, rotation=step
    )
    packed = pack_siblings(parts, places, numbers, knobs)

    def layout(own: list[list[Ints]]) -> RankLayout:
        its_degrees = degrees and [by + [1] * len(rest) for by, rest in zip(degrees, own, strict=True)]
        return RankLayout([mine + rest for mine, rest in zip(shared, own, strict=True)], its_degrees)

    planned = [[picked[one] for one in share] for share in packed]
    best = min((own, planned), key=lambda one: Times.of(waiting, knobs, *layout(one)).finish)
    each = [
        in_order(list(zip(work_in(waiting, share).tolist(), share, strict=True)), itemgetter(0), knobs.order)
        for share in best
    ]
    # parts that were cut apart may have come together again
    return layout([[one[np.argsort(waiting.sets(one).set_of, kind="stable")] for _, one in pairs] for pairs in each])


def prefix_bound(siblings: Siblings, dp_size: int) -> float:
    """No plan of these is done before this. O(n log n)."""
    return max(lower_bound(siblings.apart()[0], dp_size), siblings.heaviest_alone())


def place_siblings(siblings: Siblings, dp_size: int, dense: Ints, *, base: Floats, rotation: int = 0) -> Ints:
    """[n] the rank of each, never later than with the ranks ``dense`` ([n]), of a partition of the whole costs.
    ``base``: [dp_size] work that each rank has beside them.

    Complexity: O(n ranks) for each of five starts at most, and a fixed number of exchanges, each O(n + S) times what a
    rank holds.

    Examples:
        >>> from stream_balancer.planning.siblings import Siblings
        >>> added, group, tokens = np.array([5.0, 4.0, 3.0, 2.0, 2.0, 2.0]), np.array([0, 0, 0, 1, 1, 1]), np.ones(6)
        >>> siblings = Siblings(added, group, np.array([4.0, 4.0]), tokens, tokens[:2])
        >>> dense = np.array([0, 1, 0, 1, 0, 1])
        >>> place_siblings(siblings, 2, dense, base=np.zeros(2))  # 16 and 10, as whole groups
        array([0, 0, 0, 1, 1, 1])
    """
    mean = float(base.sum() + siblings.added.sum() + siblings.prefixes.sum()) / dp_size
    bound = max(prefix_bound(siblings, dp_size), mean, float(base.max()))
    enough = bound * (1.0 + _NEAR)
    best, least = dense, float((base + siblings.loads(dense, dp_size)).max())
    for level in _LEVELS:
        if least <= enough:
            break
        rank_of = _whole_sets(siblings, base, level * bound, rotation)
        for _ in range(_ROUNDS):
            after = _exchanged(siblings, base, rank_of, enough)
            if after is None:
                break
            rank_of = after
        finish = float((base + siblings.loads(rank_of, dp_size)).max())
        if finish < least:
            best, least = rank_of, finish
    return best


def _whole_sets(siblings: Siblings, base: Floats, level: float, rotation: int) -> Ints:
    """[n] ranks: the sets by weight, each whole on the least loaded rank, or where that would pass the level sibling by
    sibling, each where it adds least below it."""
    rank_of = np.empty(siblings.added.size, dtype=np.int64)
    by_set = np.argsort(siblings.set_of, kind="stable")
    sizes = np.bincount(siblings.set_of, minlength=siblings.prefixes.size)
    ends = np.cumsum(sizes)
    totals = np.bincount(siblings.set_of, weights=siblings.added, minlength=sizes.size) + siblings.prefixes
    # rank 0 of the loop is rank `rotation` of the answer
    dp_size, load = base.size, np.roll(base, -rotation)
    for one in np.argsort(-totals, kind="stable").tolist():
        members = by_set[ends[one] - sizes[one] : ends[one]]
        rank = int(load.argmin())
        if load[rank] + totals[one] <= level:
            rank_of[members] = rank
            load[rank] += totals[one]
            continue
        # too heavy to lie on one rank: its siblings one by one, together as long as that stays below the level
        prefix = np.full(dp_size, siblings.prefixes[one])  # what the first sibling on a rank adds
        for member in members[np.argsort(-siblings.added[members], kind="stable")].tolist():
            after = load + siblings.added[member] + prefix
            fits = after <= level
            here = fits & (prefix == 0.0)
            if here.any():
                fits = here
            rank = int(np.where(fits, after, np.inf).argmin()) if fits.any() else int(after.argmin())
            rank_of[member], load[rank], prefix[rank] = rank, after[rank], 0.0
    return (rank_of + rotation) % dp_size


def _exchanged(siblings: Siblings, base: Floats, rank_of: Ints, enough: float) -> Ints | None:
    """[n] ranks after the best exchange of a piece of the last rank for one of another rank, or for nothing; None if
    that rank is done early enough, or nothing helps. A piece is all that a rank has of a set, or a single sibling.
    ``enough``: no less than any base, so a rank that is late has something to give."""
    prefixes, set_of, loads = siblings.prefixes, siblings.set_of, base + siblings.loads(rank_of, base.size)
    last = int(loads.argmax())
    if loads[last] <= enough:
        return None
    parts, part_of, sizes = np.unique(rank_of * prefixes.size + set_of, return_inverse=True, return_counts=True)
    single = np.flatnonzero(sizes[part_of] > 1)  # of a part of one it is the part
    # those that are done first have most room for what it gives
    others = np.argsort(loads, kind="stable")[:_WITH]
    others = others[others != last]
    # [pieces] parts, then single siblings; at last nothing, which is a piece of every rank, and of no set
    none = np.zeros(others.size)
    rank = np.concatenate((parts // prefixes.size, rank_of[single], others))
    sets = np.concatenate((parts % prefixes.size, set_of[single], np.full(others.size, -1)))
    added = np.concatenate((np.bincount(part_of, siblings.added), siblings.added[single], none))
    freed = np.concatenate((prefixes[parts % prefixes.size], np.zeros(single.size), none))
    give = np.flatnonzero((rank == last) & (sets >= 0))
    take = np.flatnonzero(np.isin(rank, others))
    # [give, take] what the prefix costs where a piece comes in, unless some of its set are there, and frees where all
    # of them go
    there = np.zeros((prefixes.size, base.size), dtype=np.bool_)
    there[set_of, rank_of] = True
    same = sets[give][:, None] == sets[take]
    comes = np.where((sets[take] >= 0) & ~there[sets[take], last], prefixes[sets[take]], 0.0)
    goes = np.where(there[sets[give]][:, rank[take]], 0.0, prefixes[sets[give]][:, None])
    shift = added[give][:, None] - added[take]
    mine = loads[last] - shift + np.where(same, 0.0, comes - freed[give][:, None])
    other = loads[rank[take]] + shift + np.where(same, 0.0, goes - freed[take])
    latest = np.maximum(mine, other)
    # of equal ones what costs less work in all: that leaves room for the exchanges to come
    best = divmod(int((latest + 1e-6 * (mine + other)).argmin()), take.size)
    if not latest[best] < loads[last] * (1.0 - 1e-9):
        return None
    after = rank_of.copy()
    gone, come = int(give[best[0]]), int(take[best[1]])
    for piece, target in ((gone, rank[come]), (come, last)):
        if piece < parts.size:
            after[part_of == piece] = target
        elif piece < parts.size + single.size:
            after[single[piece - parts.size]] = target
    return after


def pack_siblings(siblings: Siblings, rank_of: Ints, others: list[int], knobs: PlanKnobs) -> list[Bins]:
    """``[rank][micro-batch]`` -> positions, siblings side by side; what a rank has of a set lies in one micro-batch.
    No more unique tokens than the cap in any, given sets that are cut to it. ``others``: [dp_size] micro-batches that
    each has beside these."""
    dp_size = len(others)
    parts, part_of = np.unique(siblings.set_of * dp_size + rank_of, return_inverse=True)
    of_part = siblings.prefix_tokens[parts // dp_size] + np.bincount(part_of, weights=siblings.tokens).astype(np.int64)
    packer = Packer(of_part, siblings.loads(part_of, parts.size), knobs.max_tokens_per_micro_batch, padded=False)
    held = [np.flatnonzero(parts % dp_size == rank).tolist() for rank in range(dp_size)]
    packed = packer.evened(held, others, knobs.micro_batch_multiple, knobs.micro_batch_counts)
    by_part = np.argsort(part_of, kind="stable")
    members = np.split(by_part, np.cumsum(np.bincount(part_of))[:-1])
    return [[[i for part in one for i in members[part].tolist()] for one in bins] for bins in packed]
