"""A balancer's state as rows, the one format of journals and checkpoints; and what rows add up to. Pure.

::

    snapshot --facts_of, held_of--> all rows at once        a checkpoint
    event    --------fact---------> the row that changes    the journal
    rows     --Records.take-------> Records --snapshot()--> snapshot

A row is some facts in msgpack, and behind them the columns of the rollouts among them, as the wire's codec writes them.
In front is a checksum of all of it and of the row's name. Nothing is unpickled, and sizes are checked before memory is
taken.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np

from stream_balancer.core.batching import assembled, micro_batch_of
from stream_balancer.core.counters import Counts
from stream_balancer.core.executions import execution_of, sizes_of
from stream_balancer.core.groups import Declared
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import WireError
from stream_balancer.rollouts import Batch, RankBatch, Reason, Rollout, cheapest_to_copy
from stream_balancer.wire import codec
from stream_balancer.wire.payload import Memory

FORMAT = 10
"""Version of all that is written here."""
_ALIGNMENT = 64  # of the codec's memory in a row
_PREFIX = struct.Struct("<II")  # checksum of the row's name and of what follows; bytes of the facts
_CRC = struct.Struct("<I")

# --- facts -----------------------------------------------------------------------------------------------------------


class Rollouts(msgspec.Struct, array_like=True, tag="rollouts"):
    """Rollouts that wait, or are in flight; their columns are behind the facts of the row."""

    arrived_at: list[float]
    steps: list[int]
    header: msgspec.Raw
    """The codec's."""


class Fact(msgspec.Struct, array_like=True):
    """A fact, of which the journal keeps one row for each key."""

    is_single: ClassVar[bool] = False
    """Facts of this kind have one row; else the first field is in the key."""

    @property
    def key(self) -> str:
        """Kind of fact, and what it is about."""
        kind = str(self.__struct_config__.tag)
        return kind if self.is_single else f"{kind} {getattr(self, self.__struct_fields__[0])}"


class PlanRow(Fact, tag="plan"):
    """A batch in flight, without its rollouts' contents."""

    step: int
    reason: Reason
    ranks: list[list[tuple[float, list[list[str]]]]]
    """``[rank][mini_batch]`` load, and of each micro-batch the ids of its rollouts."""
    padding: list[str]
    """Ids that are padding copies."""
    finish: float
    lower_bound: float
    incomplete_groups: list[str]
    left_out: list[str] = []
    """Ids of rollouts without a payload, which the step was planned again without."""


class Done(Fact, tag="done"):
    """Ids that are refused: their rollouts were trained on, or evicted."""

    number: int
    """In the order in which they were done."""
    ids: list[str]


class Group(Fact, tag="group"):
    """Declaration of a group."""

    group_id: str
    size: int | None
    """Siblings of the group. None: it was abandoned; or, where it is not closed, as many as have come."""
    closed: bool
    """The group takes no more."""
    late: bool = False
    """Siblings that still come are too late."""


class Totals(Fact, tag="totals"):
    """Numbers of the whole balancer."""

    is_single = True
    next_step: int = 0
    """Number of the next new batch."""
    version: int | None = None
    counts: dict[str, Any] = {}
    """Running totals behind ``Statistics``."""
    departed: dict[str, int] = {}
    """Siblings that have left, of groups that are not done."""


class Attempt(Fact, tag="attempt"):
    """Newest attempt of a step in flight: which ranks have the parts of its plan."""

    step: int
    attempt: int
    ranks: list[int]
    """Number of each rank, in the order of the plan's parts."""


class PeerFact(Fact, tag="peer"):
    """A rank that has joined at some time."""

    rank: int
    incarnation: int
    """The newest incarnation."""
    seats: int
    """Processes of the rank."""
    fenced: int = -1
    """Incarnations up to this one are refused: the rank was given up, or replaced them."""
    ended: bool = False
    """The rank was told of the end."""


class Ended(Fact, tag="ended"):
    """Producers in other processes that put no more."""

    is_single = True
    sessions: list[bytes] = []
    all: bool = False
    """The end waits for no other producer."""


class HeldRollout(NamedTuple):
    """A rollout that waits, or is in flight."""

    rollout: Rollout
    arrived_at: float
    """Seconds; since the epoch in a journal, since the snapshot (below zero) in a checkpoint."""
    step: int
    """Number of the next step when it came: how many have passed it over follows."""

    @property
    def key(self) -> str:
        return rollout_key(self.rollout.rollout_id)


Kind = TypeVar("Kind", bound=Fact)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Rollouts | PlanRow | Done | Group | Totals | Attempt | PeerFact | Ended])


def rollout_key(rollout_id: str) -> str:
    """The key of a rollout's row in the journal."""
    return f"rollout {rollout_id!r}"


# --- rows ------------------------------------------------------------------------------------------------------------


def row_name(number: int, key: str) -> str:
    """The name of a journal's row, which is in its checksum and in what is said of its damage."""
    return f"row {number}: {key}"


def write_row(name: str, rows: Sequence[Fact | HeldRollout], *, sealed: bool = True) -> bytearray:
    """The row of this name. ``sealed``: the checksum is of the columns, too. Raises RolloutError, naming it, for a
    rollout that was changed after it was made. O(bytes)."""
    held = [one for one in rows if isinstance(one, HeldRollout)]
    facts: list[Rollouts | Fact] = [one for one in rows if not isinstance(one, HeldRollout)]
    columns: Sequence[Any] = ()
    if held:
        encoded = codec.encode_rollouts([one.rollout for one in held])
        facts.append(Rollouts([one.arrived_at for one in held], [one.step for one in held], encoded.header))
        columns = encoded.payload.views()
    written = _encoder.encode(facts)
    start = _PREFIX.size + len(written)
    # columns begin at a multiple, as the codec writes them, so that views of them are aligned
    gap = bytes(-start % _ALIGNMENT if columns else 0)
    row = bytearray(b"".join([bytes(_PREFIX.size), written, gap, *columns]))
    _PREFIX.pack_into(row, 0, 0, len(written))
    _CRC.pack_into(row, 0, _checksum(name, memoryview(row)[: None if sealed else start]))
    return row


def read_row(name: str, row: Memory, *, sealed: bool = True) -> tuple[Sequence[Rollouts | Fact], Memory]:
    """The facts of a row, and a view of its columns. Raises WireError for damaged bytes."""
    inside = row.data
    crc, size = _PREFIX.unpack_from(inside) if row.size >= _PREFIX.size else (0, 0)
    start = _PREFIX.size + size
    # the name is in the checksum: a row that lies in another one's place is damage, too
    if crc != _checksum(name, inside[: None if sealed else start]):
        raise WireError("its bytes were damaged")
    try:
        return _decoder.decode(inside[_PREFIX.size : start]), row[start + -start % _ALIGNMENT :]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"its bytes were damaged: {error}") from None


def _checksum(name: str, row: memoryview) -> int:
    return zlib.crc32(row[_CRC.size :], zlib.crc32(name.encode()))


# --- a plan as a row --------------------------------------------------------------------------------------------------


def plan_of(batch: Batch, left_out: Iterable[Rollout] = ()) -> PlanRow:
    """A batch without its rollouts' contents. ``left_out``: rollouts that the step was planned again without."""
    return PlanRow(
        step=batch.step,
        reason=batch.reason,
        ranks=[mini_batches_of(rank_batch) for rank_batch in batch.ranks],
        padding=[r.rollout_id for r in batch.rollouts if r.is_padding],
        finish=batch.finish,
        lower_bound=batch.lower_bound,
        incomplete_groups=list(batch.incomplete_groups),
        left_out=[one.rollout_id for one in left_out],
    )


def mini_batches_of(rank_batch: RankBatch) -> list[tuple[float, list[list[str]]]]:
    """A rank's part of a :attr:`PlanRow.ranks`."""
    micro_batches = iter(rank_batch.micro_batches)
    # one mini-batch is written like several: what is read is one format
    sizes = [size[:2] for size in rank_batch.mini_batch_sizes] or [(len(rank_batch.micro_batches), rank_batch.load)]
    return [
        (load, [[r.rollout_id for r in mb.rollouts] for mb in islice(micro_batches, number)]) for number, load in sizes
    ]


def batch_of(plan: PlanRow, rollouts: Mapping[str, Rollout]) -> Batch:
    """The batch again, from its rollouts. Raises KeyError for one that is missing."""
    names = [name for rank in plan.ranks for _, its in rank for names in its for name in names]
    # in the order of the plan: which is copied for padding depends on it
    real = [rollouts[name] for name in names if name not in plan.padding]
    found = {rollout.rollout_id: rollout for rollout in real}
    for name in plan.padding:
        found[name] = cheapest_to_copy(real).padding_copy(name)  # as the core chose it
    executions = sizes_of(real)

    # denominators are those of a mini-batch over all ranks, so they are made from its columns
    mini_batches = list(zip(*plan.ranks, strict=True))
    return assembled(
        plan.step,
        [
            [[micro_batch_of([found[name] for name in names], executions) for names in its] for _, its in of]
            for of in mini_batches
        ],
        [[load for load, _ in of] for of in mini_batches],
        reason=plan.reason,
        finish=plan.finish,
        lower_bound=plan.lower_bound,
        num_padding=len(plan.padding),
        incomplete_groups=tuple(plan.incomplete_groups),
    )


# --- what rows add up to ---------------------------------------------------------------------------------------------


class Records:
    """All that rows say."""

    def __init__(self, leases: defaultdict[codec.Owner, codec.Leases] | None = None) -> None:
        """``leases``: what is needed of the payloads that owners keep; by owner."""
        self._leases = defaultdict(codec.Leases) if leases is None else leases
        self.held: dict[str, HeldRollout] = {}
        """By id, oldest first."""
        self.damage: dict[str, str] = {}
        """By name of a row, or key of a plan, that cannot be used: a sentence."""
        self.facts: list[Fact] = []
        """Oldest first."""

    def all_of(self, kind: type[Kind]) -> list[Kind]:
        """Facts of a kind, oldest first. O(facts)."""
        return [one for one in self.facts if isinstance(one, kind)]

    def take(self, name: str, row: Any, *, sealed: bool = True) -> None:
        """Take in a row, views of it if it is an array; or note its damage under its name."""
        try:
            # A column of a database may hold a value of any type.
            memory = row if isinstance(row, np.ndarray) else np.frombuffer(bytearray(memoryview(row)), dtype=np.uint8)
            facts, columns = read_row(name, memory, sealed=sealed)
            for fact in facts:
                self.add(fact, columns)
        except Exception as error:  # noqa: BLE001 - one bad row never prevents the others from being read
            self.damage[name] = f"{name}: {error}"

    def add(self, fact: Rollouts | Fact, columns: Memory | None = None) -> None:
        """Take in a fact."""
        if not isinstance(fact, Rollouts):
            self.facts.append(fact)
            return
        rollouts = codec.decode_rollouts(fact.header, columns, self._leases.__getitem__)
        for one in map(HeldRollout, rollouts, fact.arrived_at, fact.steps):
            # A second one of an id was about to be refused.
            self.held.setdefault(one.rollout.rollout_id, one)

    def snapshot(self, now: float, calibration: Any = None) -> Snapshot:
        """All that the balancer held, and what it had learned. A plan that cannot be kept, for want of a rollout most
        likely, is noted as damaged. O(rollouts)."""
        rollouts = {name: held.rollout for name, held in self.held.items()}
        # steps are delivered again in their order, whichever row was written last
        plans = sorted(self.all_of(PlanRow), key=lambda plan: plan.step)
        flying, left_out = [], {}
        for plan in plans:
            try:
                flying.append(batch_of(plan, rollouts))
                if gone := tuple(rollouts[name] for name in plan.left_out if name in rollouts):
                    left_out[plan.step] = gone
            except Exception:  # noqa: BLE001 - a rollout is missing, or the plan makes no sense
                self.damage[plan.key] = f"step {plan.step}: its plan names rollouts that are lost"
        planned = {r.rollout_id for batch in flying for r in batch.rollouts if not r.is_padding}
        planned |= {one.rollout_id for gone in left_out.values() for one in gone}
        waiting = [held for name, held in self.held.items() if name not in planned]
        totals, waits = (self.all_of(Totals) or [Totals()])[-1], Counter(_groups_of(held.rollout for held in waiting))
        # Damage must not turn it back: ranks would take a number that comes twice for the same step. So it is at least
        # what plans and rollouts know.
        known = (*(plan.step + 1 for plan in plans), *(held.step for held in self.held.values()))
        next_step = max(totals.next_step, *known, 0)
        # A wall clock may have stepped back.
        arrived = np.maximum.accumulate(np.array([held.arrived_at for held in waiting], dtype=np.float64))
        declared = {one.group_id: one for one in self.all_of(Group)}
        closed = {name: one for name, one in declared.items() if one.closed or one.size is None}
        # A group that was closed after its last sibling had left is done; unless one was lost, and may come again.
        left = totals.departed
        done = {name for name, one in closed.items() if name not in waits and left.get(name, 0) >= (one.size or 0)}
        left = {name: number for name, number in left.items() if name not in done}
        came = waits + Counter(left)  # of those that are done, too
        came.update([name for name in _groups_of(rollouts[name] for name in planned) if name not in came])
        counts = Counts().totals() | totals.counts
        # What was set aside was never accepted here, or the totals would not add up again.
        gone = counts["acknowledged"] + sum(counts["evicted"].values())
        return Snapshot(
            waiting=tuple(held.rollout for held in waiting),
            waited_s=np.maximum(now - arrived, 0.0),
            skips=np.array([max(next_step - held.step, 0) for held in waiting], dtype=np.int64),
            in_flight=tuple(flying),
            left_out=left_out,
            group_departures=left,
            groups={
                name: Declared(one.size if one.closed or one.size else came[name], name in closed, one.late)
                for name, one in declared.items()
            },
            past_ids=tuple(chain.from_iterable(one.ids for one in self.all_of(Done))),
            version=totals.version,
            next_step=next_step,
            counts=counts | {"accepted": len(waiting) + len(planned) + gone},
            calibration=calibration,
            set_aside=tuple(self.damage.values()),
        )


def facts_of(snapshot: Snapshot) -> list[Fact]:
    """All that a snapshot says but its rollouts and what was learned. O(groups + rollouts)."""
    return [
        *(plan_of(batch, snapshot.left_out.get(batch.step, ())) for batch in snapshot.in_flight),
        Done(0, list(snapshot.past_ids)),
        *(Group(name, *declared) for name, declared in snapshot.groups.items()),
        Totals(snapshot.next_step, snapshot.version, dict(snapshot.counts), dict(snapshot.group_departures)),
    ]


def held_of(snapshot: Snapshot, now: float) -> Iterator[HeldRollout]:
    """Rollouts in flight, then those that wait; ``now`` in the seconds of :attr:`HeldRollout.arrived_at`."""
    oldest = now - float(snapshot.waited_s.max(initial=0.0))
    for batch in snapshot.in_flight:
        flying = (*batch.rollouts, *snapshot.left_out.get(batch.step, ()))
        yield from (HeldRollout(r, oldest, snapshot.next_step) for r in flying if not r.is_padding)
    for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
        yield HeldRollout(rollout, now - float(waited_s), snapshot.next_step - int(skips))


def _groups_of(rollouts: Iterable[Rollout]) -> list[str]:
    """The group of each execution."""
    executions = {execution_of(rollout): rollout.group_id for rollout in rollouts}
    return [group_id for group_id in executions.values() if group_id is not None]
