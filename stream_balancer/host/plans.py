"""A step as it was planned, and its items: one for each micro-batch of each rank.

Example, two ranks, two micro-batches each, a role ``ref``::

    id   0 4 | 2 6      the trainer's ranks 0 | 1; each needs the columns of the role's item with its rollouts
    id   1 5 | 3 7      the role's

An id follows from the micro-batch's place among those of its rank and from the rank's place in the step. What is laid
out later gets ids from the ledger.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec

from stream_balancer.core.batching import lay_out
from stream_balancer.core.executions import denominators_of, execution_of, sizes_of
from stream_balancer.core.state import BalancerState
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.state import TRAIN, Item, Piece, RankId
from stream_balancer.host.records import mini_batches_of
from stream_balancer.net.messages import ResizedExecution, Seal
from stream_balancer.rollouts import Batch, Denominators, MicroBatch, RankBatch, Rollout, SharedRollout
from stream_balancer.rollouts.shared import whole_rollouts
from stream_balancer.wire.remote import remote_of


@dataclass(eq=False, slots=True)
class StepPlan:
    """A step in flight."""

    ranks: tuple[RankId, ...]
    """The trainer's, by their place in the batch."""
    batch: Batch
    uid: int
    planned_at: float
    """On the event loop's clock."""
    ready_s: Mapping[RankId, float] = field(default_factory=dict)
    """Seconds for which each rank had been ready when the last one was."""
    begun_at: dict[RankId, float] = field(default_factory=dict)
    """Time at which each rank was first sent something."""
    is_remote: bool = False
    """Payloads of some of it lie elsewhere."""
    num_padding: int = 0
    """Padding copies so far: those of parts that are laid out anew are numbered behind them."""

    @property
    def rollouts(self) -> Iterator[Rollout]:
        """Whole rollouts of the step, each once, without padding copies."""
        return (rollout for rollout in self.batch.rollouts if not rollout.is_padding)

    def place_of(self, one: RankId) -> int | None:
        """Number of a rank among those of the batch; of a role's, that of the trainer's rank in its place."""
        place = one.number if one.role else self.ranks.index(one) if one in self.ranks else len(self.ranks)
        return place if place < len(self.ranks) else None

    def worked_on(self, place: int, items: Sequence[Item]) -> RankBatch | None:
        """Rank batch that a rank has trained on in the end; None if the one that was planned for it."""
        planned, mine = self.batch.ranks[place], tuple(item.payload for item in items)
        return None if mine == planned.micro_batches else replace(planned, micro_batches=mine)


def uid_of(batch: Batch, ranks: Sequence[RankId]) -> int:
    """The same for the same plan, also in another process."""
    # not the order of a set, not hash(): both differ from process to process
    plan = batch.step, [one.number for one in ranks], [*map(mini_batches_of, batch.ranks)]
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(plan), digest_size=7).digest(), "big")


def items_of(plan: StepPlan, roles: Mapping[str, Sequence[RankId]], *, share: bool, lockstep: bool) -> list[Item]:
    """Items of the batch. ``roles``: the ranks of each. ``share``: what several ranks run together has
    one group; ``lockstep``: so have the micro-batches of one index."""
    cut: list[tuple[int, int, int, MicroBatch]] = []
    for place, rank_batch in enumerate(plan.batch.ranks):
        for index, mb in enumerate(rank_batch.micro_batches):
            cut.append((index * len(plan.ranks) + place, place, index, mb))
    made: list[Item] = []
    of_roles: dict[str, list[int]] = {}
    groups: dict[object, int] = {}
    # roles first: the trainer's items name those that they need
    for kind, (role, ranks) in enumerate([*roles.items(), (TRAIN, plan.ranks)], 1):
        for number, place, index, mb in cut:
            # a role may have lost ranks: those that are left do their places, too
            owner = ranks[place % len(ranks)] if ranks else None
            item = _item(number * (len(roles) + 1) + kind % (len(roles) + 1), owner, mb, role, of_roles)
            if lockstep and not role:
                item.group = groups.setdefault(index, item.id)
            # in plain runs every rank gets its own part again by itself, so no group is needed
            elif mb.cp_group and (share or item.remote):
                item.group = groups.setdefault((role, mb.cp_group, mb.rollouts[0].rollout_id), item.id)
            made.append(item)
    _agree(made)
    plan.is_remote = any(item.remote for item in made)
    plan.num_padding = plan.batch.num_padding
    return made


def _agree(items: Sequence[Item]) -> None:
    """Items of a group are all remote, or none: those who compute it together begin together."""
    remote = {item.group for item in items if item.remote and item.group is not None}
    for item in items:
        item.remote = item.remote or item.group in remote


def _item(id_: int, owner: RankId | None, mb: MicroBatch, role: str, of_roles: dict[str, list[int]]) -> Item:
    """``of_roles``: by rollout, the ids of roles' items, which this one joins or needs."""
    pieces = tuple(
        Piece(rollout.rollout_id, rollout.cp_rank if isinstance(rollout, SharedRollout) else 0)
        for rollout in mb.rollouts
        if not rollout.is_padding
    )
    item = Item(id_, owner, pieces, role, remote=any(map(remote_of, mb.rollouts)), payload=mb)
    if role:
        _note(item, of_roles)
    else:
        item.needs = tuple(sorted({needed for one in mb.rollouts for needed in of_roles.get(one.rollout_id, ())}))
    return item


def _note(item: Item, of_roles: dict[str, list[int]]) -> None:
    for rollout in item.payload.rollouts:
        of_roles.setdefault(rollout.rollout_id, []).append(item.id)


def laid_out_anew(
    plan: StepPlan,
    old: Sequence[Item],
    over: Sequence[RankId],
    ledger: Ledger,
    state: BalancerState,
    speeds: Mapping[int, float],
    *,
    lockstep: bool,
) -> list[Item]:
    """Items without an owner, over other ranks. The trainer's are planned anew; a role's keep their ids, since others
    wait for them. As fast as a plan of so many rollouts."""
    if old[0].role:
        # Each computes whole what it had a part of: twice, but it needs nobody, and any rank can be the last.
        return [
            Item(it.id, over[place % len(over)], it.pieces, it.role, remote=it.remote, payload=_whole_of(it.payload))
            for place, it in enumerate(old)
        ]
    # whole again: other ranks than those that shared a rollout cannot compute its parts
    wholes = [one for item in old for one in _whole_of(item.payload).rollouts if not one.is_padding]
    # each once, though several of its parts may be among the items
    rollouts = list({one.rollout_id: one for one in wholes}.values())
    if not rollouts:
        return []
    of_roles: dict[str, list[int]] = {}
    for item in ledger.steps[plan.batch.step].items.values():
        if item.role:
            _note(item, of_roles)
    parts = lay_out(
        state, rollouts, plan.rollouts, step=plan.batch.step, dp_size=len(over), lockstep=lockstep,
        speeds=[speeds.get(one.number, 1.0) for one in over] if speeds else None, had=plan.num_padding,
    )  # fmt: skip
    plan.num_padding += sum(mb.rollouts[0].is_padding for of_rank in parts for mb in of_rank)
    groups = {index: ledger.new_id() for index in range(len(parts[0]))} if lockstep else {}
    made: list[Item] = []
    for one, of_rank in zip(over, parts, strict=True):
        for index, mb in enumerate(of_rank):
            made.append(_item(ledger.new_id(), one, mb, TRAIN, of_roles))
            made[-1].group = groups.get(index)
    _agree(made)
    return made


def _whole_of(mb: MicroBatch) -> MicroBatch:
    rollouts = [(isinstance(one, SharedRollout) and one.whole) or one for one in mb.rollouts]
    return MicroBatch.of(rollouts, execution_sizes=mb.execution_sizes) if mb.cp_group else mb


def seal_of(plan: StepPlan, number: int, ranks: Sequence[int], gone: Collection[str]) -> Seal:
    """The seal of a step: by what every rank divides once the rollouts that are ``gone`` are masked. The same
    for the same plan and masks, on whichever controller. O(1) where none is, else O(rollouts)."""
    batch = plan.batch
    # a rollout whose payload is gone takes part as a padding copy of weight 0, so the plan stays
    parts = [one.mini_batches for one in batch.ranks] if batch.ranks[0].mini_batch_sizes else []
    lost = {execution_of(rollout) for rollout in plan.rollouts if rollout.rollout_id in gone} if gone else set()
    # an execution may be lost in part: what is left of it is divided by what is left
    left = sizes_of(rollout for rollout in plan.rollouts if rollout.rollout_id not in gone) if lost else {}
    return Seal(
        step=batch.step,
        number=number,
        ranks=tuple(ranks),
        sizes=_less(batch.ranks[0].denominators or (), plan.rollouts, gone),
        mini_batches=tuple(
            _less(of[0].denominators or (), chain.from_iterable(part.rollouts for part in of), gone)
            for of in zip(*parts, strict=True)
        ),
        resized=tuple(
            ResizedExecution(*key, *left[key]) for key in left if key in lost and not isinstance(key, str)
        ),
        gone=tuple(sorted(gone)),
    )  # fmt: skip


def _less(planned: Sequence[int], rollouts: Iterable[Rollout], gone: Collection[str]) -> Denominators:
    """Sizes of what is left of these rollouts. Of a shared one no rank trains on its part when another has none."""
    # nearly always: only then do denominators follow from the plan
    if not gone:
        return Denominators(*planned)
    left = [one for one in whole_rollouts(rollouts) if not one.is_padding and one.rollout_id not in gone]
    # at least 1: where everything is gone the sums are 0, and 0 / 0 would put NaN into every weight
    return Denominators(*(max(now, min(was, 1)) for now, was in zip(denominators_of(left), planned, strict=True)))


_generation = 0
_YEAR_2020 = 1_577_836_800  # seconds since the epoch: ids count in the bits above these seconds


def new_generation() -> int:
    """Larger than all before it, in this process and, as long as clocks go forward, in those before."""
    global _generation
    _generation = max(_generation + 1, int(time.time()) - _YEAR_2020)
    return _generation
