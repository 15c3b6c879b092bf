"""A balancer's state as rows, the one format of journals and checkpoints; and what rows add up to. Pure.

::

    snapshot --Records.of--> Records --facts(), held--> rows    a checkpoint: all rows at once
    event ------------------------------fact----------> row     the journal: each as it changes
    rows --hold(), read()--> Records --snapshot()--> snapshot   both

A row is bytes under a key, behind a checksum of both. Rollouts are written by the wire's codec, facts as msgpack:
nothing is unpickled, and sizes are checked before memory is taken.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import msgspec
import numpy as np

from stream_balancer.core.executions import execution_of
from stream_balancer.core.groups import Declared
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import WireError
from stream_balancer.host.plan_rows import Plan, batch_of, plan_of
from stream_balancer.types import EvictReason, Rollout
from stream_balancer.wire import codec
from stream_balancer.wire.payload import Memory

__all__ = [
    "FORMAT", "Acked", "Came", "Done", "Ended", "Fact", "Group", "Held", "Records", "State", "group_of", "read_fact",
    "read_rollouts", "write_fact", "write_rollouts",
]  # fmt: skip

FORMAT = 6
"""Version of all that is written here."""
_IDS_A_ROW = 1000
_ALIGNMENT = 64  # of the codec's memory in a row
_PREFIX = struct.Struct("<IIQ")  # of rollouts: checksums of what is before the columns and of them, bytes of the head
_CRC = struct.Struct("<I")

# --- facts -----------------------------------------------------------------------------------------------------------


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Ids that are refused: their rollouts were trained on, or evicted."""

    number: int
    """In the order in which they were done."""
    ids: list[str]
    next_step: int
    """As in :class:`State`."""

    @property
    def key(self) -> str:
        return f"done {self.number}"


class Group(msgspec.Struct, array_like=True, tag="group"):
    """Declaration of a group."""

    group_id: str
    size: int | None
    """Siblings of the group; None: as many as have come."""
    state: Literal["open", "closed", "abandoned"]
    """The group takes more siblings, or no more, or they are not wanted."""

    @property
    def key(self) -> str:
        return f"group {self.group_id}"


class State(msgspec.Struct, array_like=True, tag="state"):
    """How things stand."""

    next_step: int = 0
    """Number of the next new batch."""
    version: int | None = None
    counts: dict[str, Any] = msgspec.field(default_factory=dict)
    """Running totals behind ``Statistics``, at the last dispatch."""
    departed: dict[str, int] = msgspec.field(default_factory=dict)
    """Siblings that have left, of groups that are not done."""
    acknowledged: int = 0
    evicted: dict[EvictReason, int] = msgspec.field(default_factory=dict)

    key = "state"


class Acked(msgspec.Struct, array_like=True, tag="acked", frozen=True):
    """Reports of ranks on a step in flight."""

    step: int
    uid: int
    """Checksum of the plan: the reports say nothing of another one."""
    ranks: list[int] = []
    """Trainer's ranks that have acknowledged it."""
    gone: list[str] = []
    """Rollouts that are masked on all ranks."""
    planned_for: list[int] = []
    """Trainer's ranks of the plan; empty where they are those from 0 on."""
    lost: list[int] = []
    """Ranks of the plan that were given up: others have their work."""

    @property
    def key(self) -> str:
        return f"acked {self.step}"


class Came(msgspec.Struct, array_like=True, tag="came", frozen=True):
    """A rank that has come at some time."""

    role: str
    rank: int
    incarnation: int
    """The last incarnation."""
    is_fenced: bool = False
    """The rank was given up, and others have its work."""
    sessions: list[bytes] = []
    """Sessions of feeds that must not come back: their processes were given up."""
    is_ended: bool = False
    """The rank was told of the end: once it has acknowledged everything, nobody need wait for it."""

    @property
    def key(self) -> str:
        return f"came {self.rank} {self.role}"


class Ended(msgspec.Struct, array_like=True, tag="ended", frozen=True):
    """Producers in other processes that put no more."""

    sessions: list[bytes] = []
    all: bool = False
    """The end waits for no other producer."""

    key = "ended"


Fact: TypeAlias = Plan | Done | Group | State | Acked | Came | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fact)


def write_fact(fact: Fact) -> bytes:
    """The row of ``fact.key``."""
    data = _encoder.encode(fact)
    return _CRC.pack(_checksum(fact.key, data)) + data


def read_fact(key: str, written: bytes) -> Fact:
    """The fact of a row. Raises WireError for damaged bytes."""
    # the key is in the checksum: a row that lies under another one's key is damage, too
    if written[: _CRC.size] != _CRC.pack(_checksum(key, written[_CRC.size :])):
        raise WireError("its bytes were damaged")
    try:
        fact: Fact = _decoder.decode(written[_CRC.size :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"it cannot be read: {error}") from None
    return fact


def _checksum(key: str, data: Any) -> int:
    return zlib.crc32(data, zlib.crc32(key.encode()))


# --- rollouts --------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A rollout that waits, or is in flight."""

    rollout: Rollout
    arrived_at: float
    """Seconds; since the epoch in a journal, since the snapshot (below zero) in a checkpoint."""
    step: int
    """Number of the next dispatch when it came: how many have passed it over follows."""


class _Head(msgspec.Struct, array_like=True):
    arrived_at: list[float]
    steps: list[int]
    header: msgspec.Raw
    """The codec's."""


_head_decoder = msgspec.msgpack.Decoder(_Head)


def write_rollouts(number: int, held: Sequence[Held], *, sealed: bool = True) -> bytearray:
    """The row of this number: some rollouts. ``sealed``: with a checksum of their columns, too. Raises RolloutError,
    naming it, for one that was changed after it was made. O(bytes)."""
    encoded = codec.encode_rollouts([one.rollout for one in held])
    head = _encoder.encode(_Head([one.arrived_at for one in held], [one.step for one in held], encoded.header))
    # columns begin at a multiple, as the codec writes them, so that views of them are aligned
    start = _PREFIX.size + len(head)
    gap = bytes(-start % _ALIGNMENT)
    row = bytearray(b"".join([bytes(_PREFIX.size), head, gap, *encoded.payload.pieces]))
    inside = memoryview(row)
    crc = zlib.crc32(inside[start:]) if sealed else 0
    _PREFIX.pack_into(row, 0, 0, crc, len(head))
    _CRC.pack_into(row, 0, _checksum(f"rollouts {number}", inside[_CRC.size : start]))
    return row


def read_rollouts(number: int, row: Memory, owners: codec.Owners | None = None) -> list[Held]:
    """The rollouts of a row, as views of it; ``owners``: of payloads that lie elsewhere. Raises WireError for damaged
    bytes, and where they hold what no Rollout may be."""
    inside = row.data
    crc, crc_of_columns, head_bytes = _PREFIX.unpack_from(inside) if row.size >= _PREFIX.size else (0, 0, 0)
    start = _PREFIX.size + head_bytes
    if crc != _checksum(f"rollouts {number}", inside[_CRC.size : start]):
        raise WireError("its bytes were damaged")
    # 0: not sealed, where who keeps the bytes has a checksum
    if crc_of_columns and crc_of_columns != zlib.crc32(inside[start:]):
        raise WireError("the bytes of its columns were damaged")
    try:
        head = _head_decoder.decode(inside[_PREFIX.size : start])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"its bytes were damaged: {error}") from None
    rollouts = codec.decode_rollouts(head.header, row[start + -start % _ALIGNMENT :], leases=owners)
    return [Held(*one) for one in zip(rollouts, head.arrived_at, head.steps, strict=True)]


# --- what rows add up to ---------------------------------------------------------------------------------------------


@dataclass
class Records:
    """All that rows say."""

    held: dict[str, Held] = field(default_factory=dict)
    """By id, oldest first."""
    plans: list[Plan] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    """Oldest first."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Groups of which something was declared, oldest first."""
    acked: dict[int, Acked] = field(default_factory=dict)
    """By step."""
    came: list[Came] = field(default_factory=list)
    ended: Ended = field(default_factory=Ended)
    state: State = field(default_factory=State)
    owners: codec.Owners = field(default_factory=codec.Owners)
    """Owners of payloads that lie elsewhere, and what is needed of them."""
    damage: dict[str | int, str] = field(default_factory=dict)
    """By key of a fact's row, or number of a row of rollouts, that cannot be used: a sentence."""

    @classmethod
    def of(cls, snapshot: Snapshot, now: float) -> Self:
        """Records of a snapshot; ``now`` in the seconds of :attr:`Held.arrived_at`. O(rollouts)."""
        departed = Counter(snapshot.group_arrivals)
        # arrived less waiting: these have left, and their siblings must know
        departed.subtract(_groups_of(snapshot.waiting))
        past, step = snapshot.past_ids, snapshot.next_step
        closed = {name: group_of(name, Declared(size, closed=True)) for name, size in snapshot.closed_groups.items()}
        sizes = {name: group_of(name, Declared(size, closed=False)) for name, size in snapshot.group_sizes.items()}
        state = State(
            next_step=step,
            version=snapshot.version,
            counts=dict(snapshot.counts),
            departed={name: n for name, n in departed.items() if n > 0},
            acknowledged=snapshot.counts["acknowledged"],
            evicted=dict(snapshot.counts["evicted"]),
        )
        return cls(
            held={one.rollout.rollout_id: one for one in _held(snapshot, now)},
            plans=[plan_of(batch) for batch in snapshot.in_flight],
            done=[Done(at, list(past[at : at + _IDS_A_ROW]), step) for at in range(0, len(past), _IDS_A_ROW)],
            groups=closed | sizes,
            state=state,
        )

    def facts(self) -> Iterator[Fact]:
        """All but the rollouts."""
        return chain(self.plans, self.done, self.groups.values(), [self.state])

    def read(self, key: str, written: bytes) -> None:
        """Take in a fact's row, or note its damage."""
        try:
            self.add(read_fact(key, written))
        except Exception as error:  # noqa: BLE001 - one bad row never prevents the others from being read
            self.damage[key] = f"{key}: {error}"

    def add(self, fact: Fact) -> None:
        """Take in a fact. Most know a least number of the next step, so that a damaged one does not turn it back."""
        state = self.state
        match fact:
            case Plan():
                self.plans.append(fact)
                state.next_step = max(state.next_step, fact.step + 1)
            case Done():
                self.done.append(fact)
                state.next_step = max(state.next_step, fact.next_step)
            case Group():
                self.groups[fact.group_id] = fact
            case Acked():
                self.acked[fact.step] = fact
            case Came():
                self.came.append(fact)
            case Ended():
                self.ended = fact
            case State():
                fact.next_step = max(state.next_step, fact.next_step)
                self.state = fact

    def hold(self, number: int, row: Any, name: str) -> None:
        """Take in a row of rollouts, views of it if it is an array; or note its damage under this name."""
        try:
            # A column of a database may hold a value of any type.
            memory = row if isinstance(row, np.ndarray) else np.frombuffer(bytearray(memoryview(row)), dtype=np.uint8)
            held = read_rollouts(number, memory, self.owners)
        except Exception as error:  # noqa: BLE001 - as above
            self.damage[number] = f"{name}: {error}"
            return
        for one in held:
            # A second one of an id was about to be refused.
            self.held.setdefault(one.rollout.rollout_id, one)
            self.state.next_step = max(self.state.next_step, one.step)

    def snapshot(self, now: float, calibration: Any = None, auto_window: Any = None) -> Snapshot:
        """All that the balancer held, and what it had learned. A plan that cannot be kept, for want of a rollout most
        likely, is noted as damaged. O(rollouts)."""
        rollouts = {name: held.rollout for name, held in self.held.items()}
        flying = []
        for plan in sorted(self.plans, key=lambda plan: plan.step):
            try:
                flying.append(batch_of(plan, rollouts))
            except Exception:  # noqa: BLE001 - a rollout is missing, or the plan makes no sense
                self.damage[plan.key] = f"step {plan.step}: its plan names rollouts that are lost"
        planned = {r.rollout_id for batch in flying for r in batch.rollouts if not r.is_padding}
        waiting = [held for name, held in self.held.items() if name not in planned]
        state = self.state
        # A wall clock may have stepped back.
        arrived = np.maximum.accumulate(np.array([held.arrived_at for held in waiting], dtype=np.float64))
        closed = {name: one for name, one in self.groups.items() if one.state != "open"}
        groups = Counter(_groups_of(held.rollout for held in waiting))
        # A group that was closed after its last sibling had left is done; unless one was lost, and may come again.
        done = {
            name
            for name, one in closed.items()
            if name not in groups and state.departed.get(name, 0) >= (one.size or 0)
        }
        groups.update({name: n for name, n in state.departed.items() if name not in done})
        came = groups.copy()  # of those that are done, too
        came.update(name for name in _groups_of(rollouts[name] for name in planned) if name not in groups)
        return Snapshot(
            waiting=tuple(held.rollout for held in waiting),
            waited_s=np.maximum(now - arrived, 0.0),
            skips=np.array([max(state.next_step - held.step, 0) for held in waiting], dtype=np.int64),
            in_flight=tuple(flying),
            group_arrivals=groups,
            group_sizes={name: one.size for name, one in self.groups.items() if one.state == "open" and one.size},
            closed_groups={
                name: None if one.state == "abandoned" else came[name] if one.size is None else one.size
                for name, one in closed.items()
            },
            past_ids=tuple(chain.from_iterable(one.ids for one in self.done)),
            version=state.version,
            next_step=state.next_step,
            # What was set aside was never accepted here, or the totals would not add up again.
            counts=dict(state.counts)
            | {
                "acknowledged": state.acknowledged,
                "evicted": dict.fromkeys(get_args(EvictReason), 0) | state.evicted,
                "accepted": len(waiting) + len(planned) + state.acknowledged + sum(state.evicted.values()),
            },
            calibration=calibration,
            auto_window=auto_window,
            set_aside=tuple(self.damage.values()),
        )


def _groups_of(rollouts: Iterable[Rollout]) -> list[str]:
    """The group of each execution."""
    executions = {execution_of(rollout): rollout.group_id for rollout in rollouts}
    return [group_id for group_id in executions.values() if group_id is not None]


def _held(snapshot: Snapshot, now: float) -> Iterator[Held]:
    """Rollouts in flight, then those that wait."""
    oldest = now - float(snapshot.waited_s.max(initial=0.0))
    for batch in snapshot.in_flight:
        yield from (Held(r, oldest, snapshot.next_step) for r in batch.rollouts if not r.is_padding)
    for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
        yield Held(rollout, now - float(waited_s), snapshot.next_step - int(skips))


def group_of(group_id: str, declared: Declared) -> Group:
    """Declaration of a group, as a fact."""
    size, closed = declared
    return Group(group_id, size, "open" if not closed else "abandoned" if size is None else "closed")
