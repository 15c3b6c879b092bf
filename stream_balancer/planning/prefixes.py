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
from typing import NamedTuple

import numpy as np

from .arrays import Floats, Ints
from .bounds import lower_bound
from .micro_batches import Order, in_order
from .packing import Bins, Packer
from .partition import partition_together
from .plan import PlanKnobs, Waiting, finish_of, work_in, work_of
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


def with_shared_prefixes(
    waiting: Waiting, knobs: PlanKnobs, dense: RankLayout, whole: Ints | None, order: Order, step: int
) -> RankLayout:
    """The rollouts of ``dense``, a layout that knows nothing of prefixes, with siblings side by side. Never done later
    than that one, where a micro-batch pays a prefix once. A rollout that several ranks share stays where it is: it pays
    its whole prefix.

    Args:
        waiting: with prefixes.
        knobs: ranks meet once a step, and are alike.
        dense: of those that go.
        whole: [W] numbers of those that go to one rank together; None: siblings may be parted.
        order: of a rank's micro-batches that nobody shares.
        step: rotates which rank is the heaviest.

    Complexity: as of `place_siblings`, and packing the parts under the cap.
    """
    ranks, cap = knobs.num_ranks, knobs.max_tokens_per_micro_batch
    numbers = [sum(degree > 1 for degree in of_rank) for of_rank in dense.degrees] or [0] * ranks
    # shared micro-batches stand in front on every rank, in one order: nothing may come between them
    shared = [share[:number] for share, number in zip(dense.ranks, numbers, strict=True)]
    own = [share[number:] for share, number in zip(dense.ranks, numbers, strict=True)]
    degrees = dense.degrees and [of_rank[:number] for of_rank, number in zip(dense.degrees, numbers, strict=True)]
    picked = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *(one for share in own for one in share)]))
    siblings = waiting.sets(picked)
    parts = siblings if cap is None else siblings.cut_to(cap)
    if whole is None:
        rank_of = np.empty(waiting.costs.size, dtype=np.int64)
        for rank, share in enumerate(own):
            rank_of[np.concatenate([*share, picked[:0]])] = rank
        places = place_siblings(
            parts, ranks, rank_of[picked], base=work_of(waiting, knobs, shared, degrees), rotation=step
        )
    else:
        places = np.empty(picked.size, dtype=np.int64)
        for rank, those in enumerate(partition_together(parts.even_costs(), whole[picked], ranks, rotation=step)):
            places[those] = rank
    even = knobs.micro_batch_counts == "equal"
    packed = pack_siblings(parts, places, numbers, cap, knobs.micro_batch_multiple, even)

    def layout(own: list[list[Ints]]) -> RankLayout:
        its_degrees = degrees and [by + [1] * len(rest) for by, rest in zip(degrees, own, strict=True)]
        return RankLayout([mine + rest for mine, rest in zip(shared, own, strict=True)], its_degrees)

    planned = [[picked[one] for one in share] for share in packed]
    best = min((own, planned), key=lambda one: finish_of(waiting, knobs, *layout(one)))
    works = work_in(waiting, best)
    each = [in_order(list(zip(*pair, strict=True)), itemgetter(0), order) for pair in zip(works, best, strict=True)]
    # parts that were cut apart may have come together again
    return layout([[one[np.argsort(waiting.sets(one).set_of, kind="stable")] for _, one in pairs] for pairs in each])


def prefix_bound(siblings: Siblings, num_ranks: int, whole: Ints | None = None) -> float:
    """No plan of these is done before this; ``whole``: [n] numbers of those that go to one rank. O(n log n)."""
    if whole is not None:
        return lower_bound(np.bincount(whole, weights=siblings.even_costs()), num_ranks)
    return max(lower_bound(siblings.apart()[0], num_ranks), siblings.heaviest_alone())


def place_siblings(siblings: Siblings, num_ranks: int, dense: Ints, *, base: Floats, rotation: int = 0) -> Ints:
    """[n] the rank of each, never later than with the ranks ``dense`` ([n]), of a partition of the whole costs.
    ``base``: [num_ranks] work that each rank has beside them.

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
    mean = float(base.sum() + siblings.added.sum() + siblings.prefixes.sum()) / num_ranks
    bound = max(prefix_bound(siblings, num_ranks), mean, float(base.max()))
    enough = bound * (1.0 + _NEAR)
    best, least = dense, float((base + siblings.loads(dense, num_ranks)).max())
    for level in _LEVELS:
        if least <= enough:
            break
        layout = _Descent(siblings, base, _whole_sets(siblings, base, level * bound, rotation))
        layout.improve(enough)
        if layout.finish < least:
            best, least = layout.rank_of, layout.finish
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
    num_ranks, load = base.size, np.roll(base, -rotation)
    for one in np.argsort(-totals, kind="stable").tolist():
        members = by_set[ends[one] - sizes[one] : ends[one]]
        rank = int(load.argmin())
        if load[rank] + totals[one] <= level:
            rank_of[members] = rank
            load[rank] += totals[one]
            continue
        # too heavy to lie on one rank: its siblings one by one, together as long as that stays below the level
        prefix = np.full(num_ranks, siblings.prefixes[one])  # what the first sibling on a rank adds
        for member in members[np.argsort(-siblings.added[members], kind="stable")].tolist():
            after = load + siblings.added[member] + prefix
            fits = after <= level
            here = fits & (prefix == 0.0)
            if here.any():
                fits = here
            rank = int(np.where(fits, after, np.inf).argmin()) if fits.any() else int(after.argmin())
            rank_of[member], load[rank], prefix[rank] = rank, after[rank], 0.0
    return (rank_of + rotation) % num_ranks


class _Pieces(NamedTuple):
    """Pieces that a rank could give away at once: parts (all that it has of a set), and single siblings."""

    held: Ints
    """All that it has, set by set, the heaviest sibling first."""
    slices: Ints
    """[pieces, 2] where each piece lies in it: start, stop."""
    sets: Ints
    """[pieces] whose siblings they are."""
    added: Floats
    """[pieces] their work without the prefix."""
    freed: Floats
    """[pieces] work of the prefix, which leaves with a whole part."""

    @staticmethod
    def of(siblings: Siblings, held: Ints) -> _Pieces:
        held = held[np.lexsort((-siblings.added[held], siblings.set_of[held]))]
        work, sets = siblings.added[held], siblings.set_of[held]
        first = np.flatnonzero(np.diff(sets, prepend=-1))  # of each part
        ends = np.append(first, held.size)[1:]
        sizes = ends - first
        one = np.flatnonzero(np.repeat(sizes > 1, sizes))  # of a part of one it is the part
        sums = np.add.reduceat(work, first) if held.size else work
        start = np.concatenate((first, one))
        return _Pieces(
            held,
            np.stack((start, np.concatenate((ends, one + 1))), axis=1),
            sets[start],
            np.concatenate((sums, work[one])),
            np.concatenate((siblings.prefixes[sets[first]], np.zeros(one.size))),
        )

    def rollouts(self, piece: int) -> Ints:
        """Rollouts of one piece."""
        start, stop = self.slices[piece].tolist()
        return self.held[start:stop]


class _Descent:
    """Siblings on ranks, and when each rank is done."""

    def __init__(self, siblings: Siblings, base: Floats, rank_of: Ints) -> None:
        self._siblings = siblings
        self.rank_of = rank_of.copy()
        self._there = np.zeros((siblings.prefixes.size, base.size), dtype=np.int64)
        np.add.at(self._there, (siblings.set_of, rank_of), 1)
        self._loads = base + siblings.loads(rank_of, base.size)
        self._pieces: dict[int, _Pieces] = {}

    @property
    def finish(self) -> float:
        """When the last rank is done."""
        return float(self._loads.max())

    def improve(self, enough: float) -> None:
        """Exchange pieces with the rank that is done last, until that is early enough, or nothing helps."""
        for _ in range(_ROUNDS):
            last = int(self._loads.argmax())
            if self._loads[last] <= enough or not self._exchange(last):
                return

    def _exchange(self, last: int) -> bool:
        """The best exchange of a piece of the last rank for one of another rank, or for nothing; False: none helps."""
        # those that are done first have most room for what it gives
        others = [rank for rank in np.argsort(self._loads, kind="stable")[:_WITH].tolist() if rank != last]
        give = self._pieces_of(last)
        theirs = [self._pieces_of(rank) for rank in others]
        # nothing is a piece, too: of no set, and of every rank
        nothing = np.zeros(len(others))
        sets = np.concatenate([np.full(len(others), -1), *(one.sets for one in theirs)])
        added = np.concatenate([nothing, *(one.added for one in theirs)])
        freed = np.concatenate([nothing, *(one.freed for one in theirs)])
        number = [one.sets.size for one in theirs]
        rank = np.concatenate((others, np.repeat(others, number)))
        # [give, take] what the prefix costs where a piece comes in, and frees where it goes
        prefixes, same = self._siblings.prefixes, give.sets[:, None] == sets
        comes = np.where((sets >= 0) & (self._there[sets, last] == 0), prefixes[sets], 0.0)
        goes = np.where(self._there[give.sets][:, rank] == 0, prefixes[give.sets][:, None], 0.0)
        mine = np.where(same, 0.0, comes - give.freed[:, None])
        other = np.where(same, 0.0, goes - freed)
        shift = give.added[:, None] - added
        mine += self._loads[last] - shift
        other += self._loads[rank] + shift
        latest = np.maximum(mine, other)
        # of equal ones what costs less work in all: that leaves room for the exchanges to come
        best = int((latest + 1e-6 * (mine + other)).argmin())
        gives, takes = divmod(best, rank.size)
        if not latest[gives, takes] < self._loads[last] * (1.0 - 1e-9):
            return False
        there = int(rank[takes])
        self._move(give.rollouts(gives), last, there)
        if takes >= len(others):
            place = others.index(there)
            self._move(theirs[place].rollouts(takes - len(others) - sum(number[:place])), there, last)
        self._loads[[last, there]] = mine[gives, takes], other[gives, takes]
        return True

    def _move(self, rollouts: Ints, source: int, target: int) -> None:
        self.rank_of[rollouts] = target
        one = self._siblings.set_of[rollouts[0]]
        self._there[one, source] -= rollouts.size
        self._there[one, target] += rollouts.size
        self._pieces.pop(source, None)
        self._pieces.pop(target, None)

    def _pieces_of(self, rank: int) -> _Pieces:
        if rank not in self._pieces:
            self._pieces[rank] = _Pieces.of(self._siblings, np.flatnonzero(self.rank_of == rank))
        return self._pieces[rank]


def pack_siblings(
    siblings: Siblings, rank_of: Ints, others: list[int], max_tokens: int | None, multiple_of: int, even: bool
) -> list[Bins]:
    """``[rank][micro-batch]`` -> positions, siblings side by side; what a rank has of a set lies in one micro-batch.
    No more unique tokens than ``max_tokens`` in any, given sets that are cut to it. ``even``: a rank that could do with
    fewer micro-batches than another fills as many. ``others``: [num_ranks] micro-batches that each has beside these;
    with them a multiple of ``multiple_of`` is filled."""
    num_ranks = len(others)
    parts, part_of = np.unique(siblings.set_of * num_ranks + rank_of, return_inverse=True)
    of_part = siblings.prefix_tokens[parts // num_ranks] + np.bincount(part_of, weights=siblings.tokens).astype(
        np.int64
    )
    packer = Packer(of_part, siblings.loads(part_of, parts.size), max_tokens, padded=False)
    held = [np.flatnonzero(parts % num_ranks == rank).tolist() for rank in range(num_ranks)]
    packed = [packer.fewest(items) if items else [] for items in held]
    # a rank's shared micro-batches count towards the number that all ranks run
    numbers = [number + len(bins) for number, bins in zip(others, packed, strict=True)]
    wanted = [-(-(max(numbers) if even else number) // multiple_of) * multiple_of for number in numbers]
    by_part = np.argsort(part_of, kind="stable")
    members = np.split(by_part, np.cumsum(np.bincount(part_of))[:-1])
    return [
        [
            [i for part in one for i in members[part].tolist()]
            for one in (packer.spread(bins, number - beside) if bins and (even or multiple_of > 1) else bins)
        ]
        for number, beside, bins in zip(wanted, others, packed, strict=True)
    ]
