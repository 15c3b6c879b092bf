"""What a journal says, and its bytes: one record per event, each with a checksum of its own. Pure.

A record::

    | magic 4 | crc32 4 | body size 8 |  body: | head size 4 | head (msgpack) | rollouts: wire frame 128 | buffer |

The checksum covers the size and the body, and starts from the segment's number, so that a stale block of another
segment is not taken for a record of this one. Rollouts are in the wire's own format: nothing is unpickled, every size
is checked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from stream_balancer.controller.checkpoint import read_rollouts, write_rollouts
from stream_balancer.errors import WireError
from stream_balancer.types import Batch, EvictReason, MicroBatch, RankBatch, Reason, Rollout, cheapest_to_copy
from stream_balancer.wire.share import FRAME_BYTES

__all__ = [
    "HEADER_BYTES", "MAGIC", "Dispatched", "Done", "Evicted", "Found", "Head", "Plan", "Put", "Retracted", "Returned",
    "State", "Versioned", "batch_of", "pack", "payload_of", "plan_of", "read", "rollouts_of",
]  # fmt: skip

MAGIC = b"SBJ1"
_HEADER = struct.Struct("<4sIQ")
HEADER_BYTES = _HEADER.size
_HEAD_SIZE = struct.Struct("<I")


class _Record(msgspec.Struct, array_like=True, tag=True):
    pass


class Put(_Record):
    """Rollouts that were put together; their bytes follow."""

    number: int
    """Of the put, from 0, ever."""
    ids: list[str]
    arrived_at: float
    """Seconds since the epoch."""
    step: int
    """Number of the next dispatch when it came: how many have passed it over follows."""


class Retracted(_Record):
    """A put that was written and then not accepted: cancelled, or refused."""

    number: int


class Plan(_Record):
    """A batch left: what every rank gets."""

    step: int
    reason: Reason
    ranks: list[list[list[str]]]
    """``[rank][micro_batch][place]`` rollout ids."""
    padding: list[str]
    """Those of the ids that are padding copies."""
    loads: list[float]
    lower_bound: float
    incomplete_groups: list[str]

    @property
    def ids(self) -> list[str]:
        """Rollouts of the step, padding copies left out."""
        padding = set(self.padding)
        return [name for rank in self.ranks for mb in rank for name in mb if name not in padding]


class Dispatched(_Record):
    """A batch left, and how things stood then."""

    plan: Plan
    counts: dict[str, Any]
    """Running totals behind ``Statistics``."""
    departed: dict[str, int]
    """Siblings that have left, of groups that are not done."""


class Done(_Record):
    """Rollouts that need not be kept: their step was acknowledged."""

    step: int
    ids: list[str]


class Evicted(_Record):
    """Rollouts that were given up."""

    reason: EvictReason
    ids: list[str]
    departed: dict[str, int]
    """As in :class:`Dispatched`."""


class Returned(_Record):
    """A step's plan is void; its rollouts wait again."""

    step: int


class Versioned(_Record):
    """The policy moved on."""

    version: int


class State(_Record):
    """All but the puts, at the start of a segment: earlier segments need not be kept for it."""

    next_put: int
    next_step: int
    version: int | None
    plans: list[Plan]
    past_ids: list[str]
    counts: dict[str, Any]
    departed: dict[str, int]
    acknowledged: int
    evicted: dict[EvictReason, int]


Head: TypeAlias = Put | Retracted | Dispatched | Done | Evicted | Returned | Versioned | State

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


class Found(NamedTuple):
    """A record in a segment."""

    head: Head
    size: int
    """Bytes of the whole record."""
    payload: memoryview
    """Its rollouts' bytes."""


def pack(salt: int, head: Head, payload: Sequence[memoryview | bytes] = ()) -> list[memoryview | bytes]:
    """A record as pieces to be written one after the other. O(bytes), for the checksum."""
    packed = _encoder.encode(head)
    parts = [_HEAD_SIZE.pack(len(packed)) + packed, *payload]
    size = sum(len(part) for part in parts)
    crc = zlib.crc32(size.to_bytes(8, "little"), salt)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_HEADER.pack(MAGIC, crc, size), *parts]


def read(salt: int, data: memoryview, at: int) -> Found | None:
    """The record that starts at ``at``, or None if none does, or not an undamaged one. O(bytes)."""
    if len(data) - at < HEADER_BYTES:
        return None
    magic, crc, size = _HEADER.unpack_from(data, at)
    start = at + HEADER_BYTES
    if magic != MAGIC or not _HEAD_SIZE.size <= size <= len(data) - start:
        return None
    body = data[start : start + size]
    if zlib.crc32(body, zlib.crc32(size.to_bytes(8, "little"), salt)) != crc:
        return None
    (head_size,) = _HEAD_SIZE.unpack_from(body)
    try:
        head = _decoder.decode(body[_HEAD_SIZE.size : _HEAD_SIZE.size + head_size])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Found(head, HEADER_BYTES + size, body[_HEAD_SIZE.size + head_size :])


def payload_of(rollouts: Sequence[Rollout]) -> list[memoryview | bytes]:
    """Rollouts as bytes, to follow a :class:`Put`. O(bytes)."""
    return [tensor.numpy().view(np.uint8).data for tensor in write_rollouts(rollouts)]


def rollouts_of(payload: memoryview) -> dict[str, Rollout | str]:
    """What :func:`payload_of` wrote, by id, copied; instead of what no Rollout may be, a sentence. Raises WireError
    where the bytes are damaged."""
    if len(payload) <= FRAME_BYTES:
        raise WireError("a put in the journal holds no rollouts")
    frame = torch.frombuffer(bytearray(payload[:FRAME_BYTES]), dtype=torch.int64)
    buffer = torch.frombuffer(bytearray(payload[FRAME_BYTES:]), dtype=torch.uint8)  # a copy: the segment may go
    return read_rollouts([frame, buffer])


def plan_of(batch: Batch) -> Plan:
    """A batch without its rollouts' contents."""
    return Plan(
        step=batch.step,
        reason=batch.reason,
        ranks=[[[r.rollout_id for r in mb.rollouts] for mb in rank_batch.micro_batches] for rank_batch in batch.ranks],
        padding=[r.rollout_id for r in batch.rollouts if r.is_padding],
        loads=list(batch.loads),
        lower_bound=batch.lower_bound,
        incomplete_groups=list(batch.incomplete_groups),
    )


def batch_of(plan: Plan, rollouts: Mapping[str, Rollout]) -> Batch:
    """The batch again, from its rollouts. Raises KeyError for one that is missing."""
    real = [rollouts[name] for name in plan.ids]
    found = dict(rollouts)
    if plan.padding:
        original = cheapest_to_copy(real)  # as the core chose it
        found |= {name: original.padding_copy(name) for name in plan.padding}
    tokens, loss_tokens = sum(r.num_tokens for r in real), sum(r.num_loss_tokens for r in real)
    return Batch(
        step=plan.step,
        reason=plan.reason,
        ranks=tuple(
            RankBatch(
                step=plan.step,
                rank=rank,
                dp_size=len(plan.ranks),
                micro_batches=tuple(MicroBatch.of([found[name] for name in mb]) for mb in micro_batches),
                load=plan.loads[rank],
                global_num_rollouts=len(real),
                global_num_tokens=tokens,
                global_num_loss_tokens=loss_tokens,
            )
            for rank, micro_batches in enumerate(plan.ranks)
        ),
        num_rollouts=len(real),
        num_tokens=tokens,
        loads=tuple(plan.loads),
        lower_bound=plan.lower_bound,
        num_padding=len(plan.padding),
        incomplete_groups=tuple(plan.incomplete_groups),
    )
