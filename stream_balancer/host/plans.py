"""A step as it was planned, and its items: one for each micro-batch of each rank.

Example, two ranks, two micro-batches each::

    id   0 2 | 1 3      ranks 0 | 1

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
from stream_balancer.core.steps.state import Item
from stream_balancer.host.records import mini_batches_of
from stream_balancer.net.messages import ResizedExecution, Seal
from stream_balancer.rollouts import Batch, Denominators, MicroBatch, RankBatch, Rollout
from stream_balancer.wire.remote import RemoteRollout


@dataclass(eq=False, slots=True)
class StepPlan:
    """A step in flight."""

    ranks: tuple[int, ...]
    """By their place in the batch."""
    batch: Batch
    uid: int
    ready_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which each rank had been ready when the last one was."""
    is_remote: bool = False
    """Payloads of some of it lie elsewhere."""
    num_padding: int = 0
    """Padding copies so far: those of parts that are laid out anew are numbered behind them."""

    @property
    def rollouts(self) -> Iterator[Rollout]:
        """Rollouts of the step, without padding copies."""
        return (rollout for rollout in self.batch.rollouts if not rollout.is_padding)

    def place_of(self, one: int) -> int | None:
        """Number of a rank among those of the batch."""
        return self.ranks.index(one) if one in self.ranks else None

    def worked_on(self, place: int, items: Sequence[Item]) -> RankBatch | None:
        """Rank batch that a rank has trained on in the end; None if the one that was planned for it."""
        planned, mine = self.batch.ranks[place], tuple(item.payload for item in items)
        return None if mine == planned.micro_batches else replace(planned, micro_batches=mine)


def uid_of(batch: Batch, ranks: Sequence[int]) -> int:
    """The same for the same plan, also in another process."""
    # not the order of a set, not hash(): both differ from process to process
    plan = batch.step, [*ranks], [*map(mini_batches_of, batch.ranks)]
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(plan), digest_size=7).digest(), "big")


def items_of(plan: StepPlan, *, lockstep: bool) -> list[Item]:
    """Items of the batch. ``lockstep``: the micro-batches of one index have one group."""
    made: list[Item] = []
    groups: dict[int, int] = {}
    for place, (owner, rank_batch) in enumerate(zip(plan.ranks, plan.batch.ranks, strict=True)):
        for index, mb in enumerate(rank_batch.micro_batches):
            item = _item(index * len(plan.ranks) + place, owner, mb)
            if lockstep:
                item.group = groups.setdefault(index, item.id)
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


def _item(id_: int, owner: int, mb: MicroBatch) -> Item:
    rollouts = tuple(rollout.rollout_id for rollout in mb.rollouts if not rollout.is_padding)
    remote = any(isinstance(rollout, RemoteRollout) for rollout in mb.rollouts)
    return Item(id_, owner, rollouts, remote=remote, payload=mb)


def laid_out_anew(
    plan: StepPlan,
    old: Sequence[Item],
    over: Sequence[int],
    ledger: Ledger,
    state: BalancerState,
    *,
    lockstep: bool,
) -> list[Item]:
    """Items without an owner, planned anew over other ranks. As fast as a plan of so many rollouts."""
    rollouts = [one for item in old for one in item.payload.rollouts if not one.is_padding]
    if not rollouts:
        return []
    parts = lay_out(
        state, rollouts, plan.rollouts, step=plan.batch.step, dp_size=len(over), lockstep=lockstep,
        had=plan.num_padding,
    )  # fmt: skip
    plan.num_padding += sum(mb.rollouts[0].is_padding for of_rank in parts for mb in of_rank)
    groups = {index: ledger.new_id() for index in range(len(parts[0]))} if lockstep else {}
    made: list[Item] = []
    for one, of_rank in zip(over, parts, strict=True):
        for index, mb in enumerate(of_rank):
            made.append(_item(ledger.new_id(), one, mb))
            made[-1].group = groups.get(index)
    _agree(made)
    return made


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
        sizes=_less(batch.ranks[0].denominators, plan.rollouts, gone),
        mini_batches=tuple(
            _less(of[0].denominators, chain.from_iterable(part.rollouts for part in of), gone)
            for of in zip(*parts, strict=True)
        ),
        resized=tuple(
            ResizedExecution(*key, *left[key]) for key in left if key in lost and not isinstance(key, str)
        ),
        gone=tuple(sorted(gone)),
    )  # fmt: skip


def _less(planned: Denominators, rollouts: Iterable[Rollout], gone: Collection[str]) -> Denominators:
    """Sizes of what is left of these rollouts."""
    # nearly always: only then do denominators follow from the plan
    if not gone:
        return planned
    left = [one for one in rollouts if not one.is_padding and one.rollout_id not in gone]
    # at least 1: where everything is gone the sums are 0, and 0 / 0 would put NaN into every weight
    return Denominators(*(max(now, min(was, 1)) for now, was in zip(denominators_of(left), planned, strict=True)))


_generation = 0
_YEAR_2020 = 1_577_836_800  # seconds since the epoch: ids count in the bits above these seconds


def new_generation() -> int:
    """Larger than all before it, in this process and, as long as clocks go forward, in those before."""
    global _generation
    _generation = max(_generation + 1, int(time.time()) - _YEAR_2020)
    return _generation
