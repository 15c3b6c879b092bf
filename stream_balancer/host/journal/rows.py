"""What the journal's rows say, and their bytes: rollouts, plans, ids that are done, how things stood. Pure.

Every row has a checksum of all its values, its number included. A rollout's bytes are the wire's codec's: nothing is
unpickled, every size is checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from stream_balancer.core.batching import micro_batch_of, rank_batches
from stream_balancer.core.executions import sizes_in, sizes_of
from stream_balancer.core.groups import Declared
from stream_balancer.errors import RolloutError, WireError
from stream_balancer.host.checkpoint import bytes_of_rollout, read_rollouts
from stream_balancer.types import Batch, EvictReason, MicroBatch, Reason, Rollout, cheapest_to_copy

__all__ = [
    "Acked", "Came", "Done", "Fact", "FactRow", "Group", "Plan", "RolloutRow", "State", "batch_of", "fact_of",
    "fact_row", "group_of", "plan_of", "rollout_of", "rollout_row",
]  # fmt: skip


class RolloutRow(NamedTuple):
    """A rollout that waits, or is in flight."""

    number: int
    """In the order of the puts."""
    rollout_id: str
    arrived_at: float
    """Seconds since the epoch."""
    step: int
    """Number of the next dispatch when it came: how many have passed it over follows."""
    data: bytes
    crc: int


class FactRow(NamedTuple):
    """Anything else."""

    kind: str
    key: int
    data: bytes
    crc: int


class Plan(msgspec.Struct, array_like=True, tag="plan"):
    """A batch in flight: what every rank gets. Its key is the step."""

    step: int
    reason: Reason
    ranks: list[list[list[str]]]
    """``[rank][micro_batch][place]`` rollout ids."""
    padding: list[str]
    """Those of the ids that are padding copies."""
    loads: list[float]
    finish: float
    lower_bound: float
    incomplete_groups: list[str]
    mini_batches: list[list[tuple[int, float]]] = []
    """``[rank][mini_batch]`` number of micro-batches and load; empty where the step is in one piece."""
    degrees: list[list[int]] = []
    """``[rank][micro_batch]`` by how many ranks its rollouts are shared; empty where all are 1."""

    @property
    def ids(self) -> list[str]:
        """Rollouts of the step, each once, padding copies left out."""
        padding = set(self.padding)
        return list(dict.fromkeys(n for rank in self.ranks for mb in rank for n in mb if n not in padding))


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Ids that are refused: their rollouts were trained on, or evicted. Keys count up."""

    ids: list[str]
    next_step: int
    """As in :class:`State`."""


class Group(msgspec.Struct, array_like=True, tag="group"):
    """What was declared of a group. Keys count up."""

    group_id: str
    size: int | None
    """Its siblings; None: as many as have come."""
    state: Literal["open", "closed", "abandoned"]
    """It takes more siblings, or no more, or they are not wanted."""


class State(msgspec.Struct, array_like=True, tag="state"):
    """How things stand. One row, key 0."""

    next_step: int = 0
    """Number of the next new batch."""
    version: int | None = None
    counts: dict[str, Any] = msgspec.field(default_factory=dict)
    """Running totals behind ``Statistics``, at the last dispatch."""
    departed: dict[str, int] = msgspec.field(default_factory=dict)
    """Siblings that have left, of groups that are not done."""
    acknowledged: int = 0
    evicted: dict[EvictReason, int] = msgspec.field(default_factory=dict)


class Acked(msgspec.Struct, array_like=True, tag="acked", frozen=True):
    """What ranks have said of a step in flight. Its key is the step."""

    step: int
    uid: int
    """Of the plan: of another one it says nothing."""
    ranks: list[int] = []
    """Trainer's ranks that have acknowledged it."""
    gone: list[str] = []
    """Rollouts that are masked on all ranks."""
    planned_for: list[int] = []
    rows: list[list[int]] = []
    lost: list[int] = []
    """Trainer's ranks of the plan; empty where they are those from 0 on."""


class Came(msgspec.Struct, array_like=True, tag="came", frozen=True):
    """A rank that has come at some time. Keys count up."""

    role: str
    rank: int
    incarnation: int
    """Its last."""
    is_fenced: bool = False
    """It was given up, and others have its work."""
    sessions: list[bytes] = []
    """Of feeds that must not come back: their processes were given up."""
    is_ended: bool = False
    """It was told of the end: once it has acknowledged everything, nobody need wait for it."""


Fact: TypeAlias = Plan | Done | Group | State | Acked | Came

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fact)


def rollout_row(number: int, rollout: Rollout, arrived_at: float, step: int) -> RolloutRow:
    """A rollout as a row. O(bytes). Raises RolloutError for one that was changed after it was made."""
    data = bytes_of_rollout(rollout)
    values = number, rollout.rollout_id, arrived_at, step
    return RolloutRow(*values, data, _crc(values, data))


def rollout_of(row: object) -> Rollout:
    """The way back, copied. Raises WireError for damaged bytes, RolloutError for what no Rollout may be."""
    number, rollout_id, arrived_at, step, data, crc = _typed(row, RolloutRow)
    if crc != _crc((number, rollout_id, arrived_at, step), data):
        raise WireError("its bytes were damaged")
    one = read_rollouts(np.frombuffer(bytearray(data), dtype=np.uint8)).get(rollout_id)
    if not isinstance(one, Rollout):
        raise RolloutError(one or "it holds another rollout")
    return one


def fact_row(fact: Fact, key: int) -> FactRow:
    """Anything else as a row."""
    data, kind = _encoder.encode(fact), type(fact).__name__.lower()
    return FactRow(kind, key, data, _crc((kind, key), data))


def fact_of(row: object) -> Fact:
    """The way back. Raises WireError for damaged bytes."""
    kind, key, data, crc = _typed(row, FactRow)
    if crc != _crc((kind, key), data):
        raise WireError("its bytes were damaged")
    try:
        fact: Fact = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"it cannot be read: {error}") from None
    return fact


R = TypeVar("R", RolloutRow, FactRow)


def _typed(row: object, kind: type[R]) -> R:
    """A column of a database may hold a value of any type."""
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"its bytes were damaged: {error}") from None


def _crc(values: tuple[object, ...], data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_encoder.encode(values)))


def group_of(group_id: str, declared: Declared) -> Group:
    """What was declared of a group, as a row."""
    size, closed = declared
    return Group(group_id, size, "open" if not closed else "abandoned" if size is None else "closed")


def plan_of(batch: Batch) -> Plan:
    """A batch without its rollouts' contents."""
    return Plan(
        step=batch.step,
        reason=batch.reason,
        ranks=[[[r.rollout_id for r in mb.rollouts] for mb in rank_batch.micro_batches] for rank_batch in batch.ranks],
        padding=[r.rollout_id for r in batch.rollouts if r.is_padding],
        loads=list(batch.loads),
        finish=batch.finish,
        lower_bound=batch.lower_bound,
        incomplete_groups=list(batch.incomplete_groups),
        mini_batches=[[size[:2] for size in one.mini_batch_sizes] for one in batch.ranks if one.mini_batch_sizes],
        degrees=[[max(len(mb.cp_group), 1) for mb in one.micro_batches] for one in batch.ranks]
        if batch.has_shared
        else [],
    )


def batch_of(plan: Plan, rollouts: Mapping[str, Rollout]) -> Batch:
    """The batch again, from its rollouts. Raises KeyError for one that is missing."""
    real = [rollouts[name] for name in plan.ids]
    found = dict(rollouts)
    if plan.padding:
        original = cheapest_to_copy(real)  # as the core chose it
        found |= {name: original.padding_copy(name) for name in plan.padding}
    executions = sizes_of(real)

    def micro_batch(names: list[str], rank: int, degree: int) -> MicroBatch:
        its = [found[name] for name in names]
        return micro_batch_of(its, rank, degree, sizes_in(executions, its))

    sizes = plan.mini_batches or [[(len(of_rank), load)] for of_rank, load in zip(plan.ranks, plan.loads, strict=True)]
    degrees = plan.degrees or [[1] * len(of_rank) for of_rank in plan.ranks]
    micro_batches = [
        iter([micro_batch(names, rank, degree) for names, degree in zip(of_rank, its, strict=True)])
        for rank, (of_rank, its) in enumerate(zip(plan.ranks, degrees, strict=True))
    ]
    ranks = rank_batches(
        plan.step,
        [
            [list(islice(going, number)) for going, (number, _) in zip(micro_batches, of_ranks, strict=True)]
            for of_ranks in zip(*sizes, strict=True)
        ],
        [[load for _, load in of_ranks] for of_ranks in zip(*sizes, strict=True)],
    )
    return Batch(
        step=plan.step,
        reason=plan.reason,
        ranks=ranks,
        num_rollouts=ranks[0].global_num_rollouts,
        num_tokens=ranks[0].global_num_tokens,
        loads=tuple(plan.loads),
        finish=plan.finish,
        lower_bound=plan.lower_bound,
        num_padding=len(plan.padding),
        incomplete_groups=tuple(plan.incomplete_groups),
    )
