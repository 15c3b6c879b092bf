"""Rollouts whose tokens stay with their producer until a rank fetches them: what they are, and what travels. Pure.

::

    producer    encode_rollout(kept)   --> controller   decode_kept(): all but the tokens; see ``rollouts``
    controller  encode_skeleton(batch) --> rank         read_skeleton() -> Skeleton: what to fetch, from whom
    producer    payload(rollout)       --> rank         the buffer that the controller would have sent, and its frame

A RemoteRollout's columns are tensors on torch's meta device: name, dtype and shape without a byte behind them, so that
planning, limits and checks see no difference. Late columns, which were computed on the way, are here and travel with
the skeleton. Its ``lease`` is what keeps the payload alive: once nobody on the
controller holds the rollout any more (acknowledged, evicted, refused), the lease dies and the producer is notified.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.types import RankBatch, Rollout, SharedRollout
from stream_balancer.values import plain_tensor
from stream_balancer.wire.buffer_layout import Layout, align, lay_out
from stream_balancer.wire.description import (
    Description,
    check_members,
    encode_description,
    execution_id,
    read_description,
)
from stream_balancer.wire.messages import Batch, Denominators, Owner, PartialBatch
from stream_balancer.wire.rank_batch import bytes_of, encode
from stream_balancer.wire.slices import Slice

__all__ = [
    "Lease",
    "RemoteRollout",
    "Skeleton",
    "WantedPayload",
    "encode_skeleton",
    "is_remote",
    "payload",
    "read_skeleton",
]


class Lease:
    """Lives as long as the payload is needed. Padding copies share their original's."""

    __slots__ = ("__weakref__",)

    reference: object = None
    """What a rank needs to fetch the payload, besides owner and key, where only a channel's own kind of handle does
    (an object of Ray's store)."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RemoteRollout(Rollout):
    """A rollout whose tokens and tensors lie with ``owner``; here they are on the meta device."""

    owner: Owner = field(repr=False)
    """Who has the payload."""
    key: int = field(repr=False)
    """Which of the owner's payloads it is."""
    lease: Lease = field(repr=False)
    """Must live as long as the payload is needed."""
    loss_tokens: int = field(repr=False)
    """``num_loss_tokens``, as the producer counted them."""
    gone: str = field(default="", repr=False)
    """Why no rank is to fetch it: a rank that computed late columns could not."""

    @staticmethod
    def _plain_tensor(value: object) -> Tensor:
        return plain_tensor(value, elsewhere=True)

    def with_loss_mask(self, column: str) -> Rollout:
        """Not here: the mask is to be counted, and has its place in the payload by its name."""
        raise RolloutError(
            f"rollout {self.rollout_id!r} stays with its producer, which must know that {column!r} says which tokens "
            f"are trained on: connect(..., hand_over='direct', loss_mask_column={column!r})"
        )

    def _count_loss_tokens(self) -> int:
        return 0 if self.is_padding else self.loss_tokens


def payload(rollout: Rollout) -> list[Tensor]:
    """``[n]`` uint8 each: every column's bytes, then every tensor's, by name. Not copied where they lie contiguous
    on the CPU. Of a part, behind each column the rows behind its chunks."""
    parts = [rows for name in sorted(rollout.tokens) for rows in _held(rollout, name)]
    parts += [rollout.tensors[name] for name in sorted(rollout.tensors)]
    return [bytes_of(part) for part in parts if part.numel()]


def _held(rollout: Rollout, name: str) -> list[Tensor]:
    behind = [rollout.behind[name]] if isinstance(rollout, SharedRollout) else []
    return [rollout.tokens[name], *behind]


# --- controller to rank ----------------------------------------------------------------------------------------------


class _Skeleton(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    description: bytes
    """The description of the whole rank batch, as at the start of a BATCH buffer."""
    owners: list[Owner]
    sources: list[tuple[int, int, int]]
    """Per rollout: (index of the owner, key, index of the reference); owner -1: its payload follows this; reference
    -1: it has none."""
    late: list[str] = []
    """Columns that come along of all rollouts, behind the payloads that do."""
    gone: list[tuple[int, str]] = []
    """Rollouts that are not to be fetched, and why."""


_DECODER = msgspec.msgpack.Decoder(_Skeleton)


def _late_columns(rollout: RemoteRollout) -> list[str]:
    return sorted(name for name, column in rollout.tokens.items() if not column.is_meta)


def _remote(rollout: Rollout) -> RemoteRollout | None:
    """Itself, or what it is a part of, if a producer holds that."""
    whole = rollout.whole if isinstance(rollout, SharedRollout) else rollout
    return whole if isinstance(whole, RemoteRollout) else None


def is_remote(batch: RankBatch) -> bool:
    """Whether a producer holds any of its rollouts."""
    return any(_remote(r) is not None for mb in batch.micro_batches for r in mb.rollouts)


class WantedPayload(NamedTuple):
    """A payload that did not come with its batch."""

    place: int
    """Of its rollout in the rank batch."""
    owner: Owner
    key: int
    """What its owner calls it."""
    pieces: Sequence[Tensor]
    """Where it belongs, ``[n]`` uint8 each, in the order of :func:`payload`."""
    reference: object = None
    """The handle that came with the batch, where its owner's kind of channel has such (Ray)."""
    part: Slice | None = None
    """What is wanted of it; None: all."""


class EncodedSkeleton:
    """A rank batch without what producers hold; used like :class:`stream_balancer.wire.rank_batch.Encoded`."""

    def __init__(self, batch: RankBatch, max_bytes: int) -> None:
        encoded = encode(batch, max_bytes=max_bytes, narrow=False)
        owners: dict[Owner, int] = {}
        references: dict[object, int] = {}
        sources = []
        self._here: list[Rollout] = []
        late: list[list[Tensor]] = []
        gone = []
        for place, rollout in enumerate(batch.rollouts):
            remote = _remote(rollout)
            if remote is not None:
                reference = remote.lease.reference
                number = -1 if reference is None else references.setdefault(reference, len(references))
                sources.append((owners.setdefault(remote.owner, len(owners)), remote.key, number))
                late.append([bytes_of(rows) for name in _late_columns(remote) for rows in _held(rollout, name)])
                if remote.gone:
                    gone.append((place, remote.gone))
            else:
                sources.append((-1, 0, -1))
                self._here.append(rollout)
        self.references = list(references)
        """What goes with it, for the rank to fetch with."""
        names = next((_late_columns(r) for r in map(_remote, batch.rollouts) if r is not None), [])
        self._packed = msgspec.msgpack.encode(_Skeleton(encoded._meta, list(owners), sources, names, gone))
        self._parts = [payload(rollout) for rollout in self._here] + late
        size = len(self._packed) + sum(part.numel() for parts in self._parts for part in parts)
        self.message = PartialBatch(
            batch.step,
            batch.rank,
            batch.dp_size,
            meta_bytes=len(self._packed),
            meta_crc=zlib.crc32(self._packed),
            wire_bytes=size,
            num_elsewhere=len(sources) - len(self._here),
        )
        """What goes before the buffer."""

    def fill(self, buffer: Tensor) -> Iterator[int]:
        """Write everything into ``buffer``; yields how many leading bytes are final."""
        at = len(self._packed)
        buffer[:at] = torch.frombuffer(bytearray(self._packed), dtype=torch.uint8)
        for parts in self._parts:
            yield at
            for part in parts:
                buffer[at : at + part.numel()] = part
                at += part.numel()
        yield at


def encode_skeleton(batch: RankBatch, *, max_bytes: int) -> EncodedSkeleton:
    """Describe a rank batch some of whose rollouts producers hold. Raises as :func:`.rank_batch.encode` does."""
    return EncodedSkeleton(batch, max_bytes)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A received skeleton: what is missing, and where in the buffer of the whole rank batch it belongs."""

    batch: Batch
    """The message of the whole rank batch; the buffer needs its ``total_bytes``."""
    _here: Tensor
    """Payloads that came with the skeleton."""
    _described: _Skeleton
    _meta: Description
    _plan: Layout

    def wanted(self, buffer: Tensor, references: Sequence[object] = ()) -> list[WantedPayload]:
        """What did not come along, and where in ``buffer`` (``[batch.total_bytes]``) it belongs. ``references``: those
        that came with the skeleton."""
        owners = self._described.owners
        members = {one.index: one for one in self._meta.shared}
        return [
            WantedPayload(
                place,
                owners[owner],
                key,
                self._pieces(buffer, place, late=False),
                None if number < 0 else references[number],
                None if member is None else Slice(len(member.cp_group), member.cp_rank, self._meta.lengths[place]),
            )
            for place, (owner, key, number) in enumerate(self._described.sources)
            for member in [members.get(self._plan.rows[place].micro_batch)]
            if owner >= 0 and place not in self.gone
        ]

    @property
    def gone(self) -> dict[int, str]:
        """Places of rollouts that are not to be fetched, and why."""
        return dict(self._described.gone)

    def owner(self, place: int) -> Owner:
        """Who has the payload of this rollout."""
        return self._described.owners[self._described.sources[place][0]]

    def name(self, place: int) -> str:
        """``rollout_id`` of the rollout at this place."""
        return self._meta.ids[place]

    def targets(self, buffer: Tensor, places: Sequence[int]) -> list[Tensor]:
        """Where in ``buffer`` the payloads of these rollouts belong, piece by piece, as :func:`payload` gives them."""
        return [piece for place in places for piece in self._pieces(buffer, place)]

    def finish(self, buffer: Tensor) -> None:
        """Write the rest, once all that is :meth:`wanted` was written to its places: the description, what came
        with the skeleton, and what padding copies differ in. Raises WireError if the sizes do not fit."""
        packed = self._described.description
        buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        sources = self._described.sources
        targets = self.targets(buffer, [place for place, (owner, *_) in enumerate(sources) if owner < 0])
        for place, (owner, *_) in enumerate(sources):
            if owner >= 0:
                targets += self._pieces(buffer, place, late=True)
        if sum(target.numel() for target in targets) != self._here.numel():
            raise WireError(f"step {self.batch.step}: the payload that came with the description has another size")
        at = 0
        for target in targets:
            target.copy_(self._here[at : at + target.numel()])
            at += target.numel()
        self._mask_padding(buffer)

    def amend(
        self, buffer: Tensor, missing: Sequence[int], divisors: Denominators, lend: Callable[[int], Tensor]
    ) -> tuple[Batch, Tensor]:
        """Turn the rollouts at these places, and those that ``divisors`` names, into padding copies of zeros, and have
        the step divide by ``divisors``: the message and the buffer of what is to be trained on. O(1) where nothing is
        ``missing`` anywhere.

        Call it once, after :meth:`finish`. A description that grew or shrank past an alignment moves the columns, into
        a buffer that ``lend`` gives.
        """
        meta = self._meta
        if divisors.gone:
            gone = set(divisors.gone)
            missing = sorted({*missing, *(place for place, name in enumerate(meta.ids) if name in gone)})
        for target in self.targets(buffer, missing):
            target.zero_()
        meta.padding = sorted({*meta.padding, *missing})
        for place in missing:
            meta.loss_tokens[place] = 0
            if meta.prefixes:
                meta.prefixes[place] = 0  # zeros are nobody's prompt
        meta.global_num_rollouts, meta.global_num_tokens = divisors.rollouts, divisors.tokens
        meta.global_num_loss_tokens, meta.global_num_executions = divisors.loss_tokens, divisors.executions
        if len(divisors.mini_batches) != len(meta.mini_batches):
            raise WireError(
                f"step {self.batch.step}: the denominators are of {len(divisors.mini_batches)} mini-batches"
            )
        meta.mini_batches = [
            (number, load, *msgspec.structs.astuple(left))
            for (number, load, *_), left in zip(meta.mini_batches, divisors.mini_batches, strict=True)
        ]
        resized = {(one.group_id, one.execution_id): (one.samples, one.loss_tokens) for one in divisors.resized}
        for place, size in enumerate(meta.execution_sizes if resized else ()):
            meta.execution_sizes[place] = resized.get((meta.group_ids[place], execution_id(meta, place) or ""), size)
        packed = encode_description(meta)
        if packed == self._described.description:
            return self.batch, buffer
        plan = lay_out(meta, len(packed), 2**62)
        before, start = align(self.batch.meta_bytes), align(len(packed))
        if start != before:
            moved = lend(plan.total_bytes)
            moved[start : plan.wire_bytes] = buffer[before : self.batch.wire_bytes]
            buffer = moved
        buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        batch = msgspec.structs.replace(
            self.batch,
            meta_bytes=len(packed),
            meta_crc=zlib.crc32(packed),
            wire_bytes=plan.wire_bytes,
            total_bytes=plan.total_bytes,
        )
        return batch, buffer

    def _pieces(self, buffer: Tensor, place: int, *, late: bool | None = None) -> list[Tensor]:
        """``late``: only the columns that came along; or all but these."""
        rows = self._plan.rows[place]
        spans = [
            (piece.start + first * piece.what.row_bytes, count * piece.what.row_bytes)
            for name, piece in sorted(self._plan.columns[rows.micro_batch].items())
            if late is None or (name in self._described.late) is late
            for first, count in rows.spans
        ]
        if not late:
            spans += [(piece.start, piece.what.row_bytes) for _, piece in sorted(self._plan.tensors[place].items())]
        return [buffer[start : start + size] for start, size in spans if size]

    def _mask_padding(self, buffer: Tensor) -> None:
        for place in self._meta.padding:
            rows = self._plan.rows[place]
            mask = self._plan.columns[rows.micro_batch].get("loss_mask")
            if mask is not None:
                first, size = mask.start + rows.start * mask.what.row_bytes, mask.what.row_bytes
                buffer[first : first + self._meta.lengths[place] * size] = 0


def read_skeleton(message: PartialBatch, body: Tensor, *, max_bytes: int, num_references: int = 0) -> Skeleton:
    """What :func:`encode_skeleton` made. Raises WireError for anything else, and for a batch above ``max_bytes``."""
    packed = body[: message.meta_bytes].numpy().tobytes()
    if zlib.crc32(packed) != message.meta_crc:
        raise WireError(f"step {message.step}: the checksum of the batch's description is wrong: damaged on its way")
    try:
        described = _DECODER.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"step {message.step}: the batch's description cannot be read: {error}") from None
    crc = zlib.crc32(described.description)
    batch = Batch(message.step, message.rank, message.dp_size, len(described.description), crc, 0, 0)
    meta = read_description(described.description, crc, f"step {message.step}")
    check_members(meta, message.rank, message.dp_size)
    if len(described.sources) != len(meta.ids) or any(
        not -1 <= owner < len(described.owners) or key < 0 or not -1 <= number < num_references
        for owner, key, number in described.sources
    ):
        raise WireError(f"step {message.step}: the list of who holds what is wrong")
    if not {column.name for column in meta.columns}.issuperset(described.late) or any(
        not 0 <= place < len(described.sources) or described.sources[place][0] < 0 for place, _ in described.gone
    ):
        raise WireError(f"step {message.step}: the list of what came along or is gone is wrong")
    if any(column.dtype != column.wire_dtype for column in meta.columns):
        raise WireError(f"step {message.step}: what producers hold is not narrowed")
    plan = lay_out(meta, len(described.description), max_bytes)
    batch = msgspec.structs.replace(batch, wire_bytes=plan.wire_bytes, total_bytes=plan.total_bytes)
    return Skeleton(batch, body[message.meta_bytes : message.wire_bytes], described, meta, plan)
