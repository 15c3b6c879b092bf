"""A step as it was planned, and its items: one for each micro-batch of each rank.

Example, two ranks, two micro-batches each, a role ``ref``::

    id   0 1 | 2 3      the trainer's ranks 0 | 1; each needs the columns of the role's item with its rollouts
    id   4 5 | 6 7      the role's

Ids count in the order of the plan, so they are the same after a restart of the controller. What is laid out later gets
ids from the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from stream_balancer.core.batching import lay_out
from stream_balancer.core.state import BalancerState
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import Replan as ReplanOrder
from stream_balancer.core.steps.state import TRAIN, Item, Piece, RankId
from stream_balancer.types import Batch, MicroBatch, RankBatch, Rollout, SharedRollout
from stream_balancer.wire.remote import remote_of

__all__ = ["Plan", "cut_again", "items_of", "laid_out_anew", "uid_of"]


@dataclass(eq=False, slots=True)
class Plan:
    """A step in flight."""

    ranks: tuple[RankId, ...]
    """The trainer's, by their place in the batch."""
    batches: list[Batch]
    """The batch; of an open step its rows so far."""
    uid: int
    planned_at: float
    """On the event loop's clock."""
    ready_s: Mapping[RankId, float] = field(default_factory=dict)
    """How long each rank had been ready when the last one was."""
    begun_at: dict[RankId, float] = field(default_factory=dict)
    """When each rank was first sent something."""
    finished: set[RankId] = field(default_factory=set)
    is_complete: bool = True
    """All of it is planned. False: more rows of it come."""
    is_remote: bool = False
    """Payloads of some of it lie elsewhere."""
    num_items: int = 0
    num_padding: int = 0
    """Padding copies so far: those of parts that are laid out anew are numbered behind them."""

    @property
    def batch(self) -> Batch:
        """The latest row, which knows what to divide by once the step is complete."""
        return self.batches[-1]

    @property
    def rollouts(self) -> Iterator[Rollout]:
        """Whole rollouts of the step, each once, without padding copies."""
        for batch in self.batches:
            yield from (rollout for rollout in batch.rollouts if not rollout.is_padding)

    def rank_batch(self, one: RankId) -> RankBatch | None:
        """Rank batch that was planned for a rank; of a role's, for the trainer's rank in its place."""
        place = self.place_of(one)
        return None if place is None else self.batches[0].ranks[place]

    def worked_on(self, one: RankId, items: Sequence[Item]) -> tuple[RankBatch, ...] | None:
        """Rank batches that a rank has trained on in the end; None if those that were planned for it."""
        planned = self.rank_batch(one)
        mine = tuple(item.payload for item in items)
        # of an open step nobody has planned the whole for it
        if planned is None or len(self.batches) > 1 or mine == planned.micro_batches:
            return None
        return (replace(planned, micro_batches=mine),)

    def place_of(self, one: RankId) -> int | None:
        """Number of a rank among those of the batch."""
        place = one.number if one.role else self.ranks.index(one) if one in self.ranks else len(self.ranks)
        return place if place < len(self.ranks) else None


def uid_of(batch: Batch, ranks: Sequence[RankId], salt: int = 0) -> int:
    """The same for the same plan, also in another process. ``salt``: of an open step, which no restart goes on with."""
    # not the order of a set, not hash(): both differ from process to process
    cut = [[[r.rollout_id for r in mb.rollouts] for mb in rank_batch.micro_batches] for rank_batch in batch.ranks]
    text = repr((batch.step, [one.number for one in ranks], cut, salt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def items_of(
    plan: Plan, batch: Batch, roles: Mapping[str, Sequence[RankId]], *, share: bool, lockstep: bool
) -> list[Item]:
    """Items of a batch, or of a row. ``roles``: the ranks of each. ``share``: what several ranks run together has one
    group; ``lockstep``: so have the micro-batches of one index."""
    first = plan.num_items
    cut = [(place, index, mb) for place, one in enumerate(batch.ranks) for index, mb in enumerate(one.micro_batches)]
    made: list[Item] = []
    of_roles: dict[str, list[int]] = {}
    for number, (role, ranks) in enumerate(roles.items(), 1):
        for id_, (place, _, mb) in enumerate(cut, first + number * len(cut)):
            # a role may have lost ranks: those that are left do their places, too
            owner = ranks[place % len(ranks)] if ranks else None
            made.append(_item(id_, owner, mb, role=role))
            for rollout in mb.rollouts:
                of_roles.setdefault(rollout.rollout_id, []).append(id_)
    for id_, (place, _, mb) in enumerate(cut, first):
        made.append(_item(id_, plan.ranks[place], mb, needs=_needs(mb, of_roles)))
    _group(made, cut, first, share=share, lockstep=lockstep)
    plan.num_items = first + len(made)
    plan.is_remote = plan.is_remote or any(item.remote for item in made)
    plan.num_padding += batch.num_padding
    return made


def cut_again(whole: Batch, rows: Sequence[Sequence[int]]) -> list[Batch]:
    """The rows of a step that was open, by the number of micro-batches of each rank; or all of it, if they are not
    of this plan."""
    lengths = [len(one.micro_batches) for one in whole.ranks]
    if not rows or [sum(of_rank) for of_rank in zip(*rows, strict=True)] != lengths:
        return [whole]
    left = [iter(one.micro_batches) for one in whole.ranks]
    cut = [[tuple(islice(its, number)) for its, number in zip(left, row, strict=True)] for row in rows]
    return [
        replace(
            whole,
            ranks=tuple(replace(one, micro_batches=its) for one, its in zip(whole.ranks, row, strict=True)),
            # counted once: new copies are numbered behind all of them
            num_padding=0 if number else whole.num_padding,
        )
        for number, row in enumerate(cut)
    ]


def _group(
    made: Sequence[Item], cut: Sequence[tuple[int, int, MicroBatch]], first: int, *, share: bool, lockstep: bool
) -> None:
    names: dict[object, int] = {}
    for item in made:
        _, index, mb = cut[(item.id - first) % len(cut)]
        if lockstep and not item.role:
            item.group = names.setdefault(index, item.id)
        # in plain runs every rank gets its own part again by itself, so no group is needed
        elif mb.cp_group and (share or item.remote):
            item.group = names.setdefault((item.role, mb.cp_group, mb.rollouts[0].rollout_id), item.id)
    _agree(made)


def _agree(items: Sequence[Item]) -> None:
    """Items of a group are all remote, or none: those who compute it together begin together."""
    remote = {item.group for item in items if item.remote and item.group is not None}
    for item in items:
        item.remote = item.remote or item.group in remote


def _item(id_: int, owner: RankId | None, mb: MicroBatch, *, role: str = TRAIN, needs: tuple[int, ...] = ()) -> Item:
    pieces = tuple(
        Piece(rollout.rollout_id, rollout.cp_rank if isinstance(rollout, SharedRollout) else 0)
        for rollout in mb.rollouts
        if not rollout.is_padding
    )
    return Item(id_, owner, pieces, role, needs, remote=any(map(remote_of, mb.rollouts)), payload=mb)


def _needs(mb: MicroBatch, of_roles: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({id_ for rollout in mb.rollouts for id_ in of_roles.get(rollout.rollout_id, ())}))


def laid_out_anew(
    plan: Plan, order: ReplanOrder, ledger: Ledger, state: BalancerState, speeds: Mapping[int, float], *, lockstep: bool
) -> list[Item]:
    """Items without an owner, over other ranks. The trainer's are planned anew; a role's keep their ids, since others
    wait for them. As fast as a plan of so many rollouts."""
    old, over = order.items, order.over
    if old[0].role:
        return [
            Item(one.id, over[place % len(over)], one.pieces, one.role, remote=one.remote, payload=one.payload)
            for place, one in enumerate(old)
        ]
    # whole again: other ranks than those that shared a rollout cannot compute its parts
    wholes = [one for item in old for one in map(_whole, item.payload.rollouts) if not one.is_padding]
    # each once, though several of its parts may be among the items
    rollouts = list({one.rollout_id: one for one in wholes}.values())
    if not rollouts:
        return []
    of_roles: dict[str, list[int]] = {}
    for item in ledger.steps[order.step].items.values():
        for rollout in item.payload.rollouts if item.role else ():
            of_roles.setdefault(rollout.rollout_id, []).append(item.id)
    parts = lay_out(
        state, rollouts, plan.rollouts, step=order.step, num_ranks=len(over), lockstep=lockstep, had=plan.num_padding,
        speeds=[speeds.get(one.number, 1.0) for one in over] if speeds else None,
    )  # fmt: skip
    plan.num_padding += sum(mb.rollouts[0].is_padding for of_rank in parts for mb in of_rank)
    groups = {index: ledger.new_id() for index in range(len(parts[0]))} if lockstep else {}
    made: list[Item] = []
    for one, of_rank in zip(over, parts, strict=True):
        for index, mb in enumerate(of_rank):
            made.append(_item(ledger.new_id(), one, mb, needs=_needs(mb, of_roles)))
            made[-1].group = groups.get(index)
    _agree(made)
    return made


def _whole(rollout: Rollout) -> Rollout:
    whole = rollout.whole if isinstance(rollout, SharedRollout) else None
    return rollout if whole is None else whole
