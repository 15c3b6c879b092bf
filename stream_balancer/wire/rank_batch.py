"""RankBatch <-> one flat buffer. Pure; no pickle anywhere.

What crosses a channel behind a Batch message, and what lies on a disk behind a frame (:mod:`.frame`): a description
(:mod:`.description`), then the columns, laid out by :mod:`.buffer_layout`. On the rank a
:class:`~stream_balancer.types.MicroBatch` is a set of views of that buffer, and ``packed()`` copies no token. A
receiver checks the message before it allocates, and the description before it makes a view.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, overload

import torch
from torch import Tensor

from stream_balancer import tensors as layout
from stream_balancer.errors import WireError
from stream_balancer.shared_columns import SharedColumns
from stream_balancer.types import (
    Denominators,
    ExecutionSize,
    MicroBatch,
    MiniBatchSize,
    RankBatch,
    Rollout,
    SharedRollout,
)
from stream_balancer.types.shared import loss_tokens_of, rows_behind, rows_of
from stream_balancer.values import Version
from stream_balancer.wire.buffer_layout import Layout, Piece, lay_out, user_view, wire_view
from stream_balancer.wire.description import (
    Description,
    SharedMicroBatch,
    check_members,
    denominators,
    description_of,
    execution_id,
    pack_description,
    prefix,
    read_description,
)
from stream_balancer.wire.frame import FORMAT, FRAME_BYTES, FRAME_WORDS, OtherProtocolError, pack_frame, read_frame
from stream_balancer.wire.messages import Batch

__all__ = [
    "FORMAT",
    "FRAME_BYTES",
    "FRAME_WORDS",
    "Encoded",
    "OtherProtocolError",
    "batch_of",
    "checked",
    "checksum",
    "decode",
    "encode",
    "pack_frame",
    "read_frame",
]

# --- sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """A rank batch, ready to be written into a buffer of ``message.wire_bytes`` bytes."""

    message: Batch
    """What goes before the buffer."""
    _batch: RankBatch
    _meta: bytes
    _layout: Layout

    def fill(self, buffer: Tensor) -> Iterator[int]:
        """Write piece by piece into ``buffer`` (``[>= wire_bytes]`` uint8); yields how many leading bytes are final.
        O(bytes)."""
        buffer[: len(self._meta)] = torch.frombuffer(bytearray(self._meta), dtype=torch.uint8)
        for piece, parts in self._pieces():
            # Everything before this piece is final now: the channel may send it while this piece is being copied.
            yield piece.start
            _concatenate(parts, wire_view(buffer, piece))
        yield self._layout.wire_bytes

    def to_bytes(self) -> bytes:
        """What :meth:`fill` writes, for a disk: the rest is 0. In one copy. Not of what is narrowed."""
        written: list[bytes | memoryview] = [self._meta]
        at = len(self._meta)
        for piece, parts in self._pieces():
            views = [_memory_of(part) for part in parts]
            written += [bytes(piece.start - at), *views]
            at = piece.start + sum(view.nbytes for view in views)
        written.append(bytes(self._layout.wire_bytes - at))
        return b"".join(written)

    def _pieces(self) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Where each column and each tensor lies, and of what it is made."""
        for micro_batch, pieces in zip(self._batch.micro_batches, self._layout.columns, strict=True):
            its = micro_batch.rollouts
            parts = [r for r in its if isinstance(r, SharedRollout)]
            for name, piece in pieces.items():
                if not parts:
                    yield piece, [r.tokens[name] for r in its]
                    continue
                own = [rows for r in its for rows in rows_of(r, name)]
                yield piece, own + [rows for part in parts for rows in rows_behind(part, name)]
        rollouts = self._batch.rollouts if any(self._layout.tensors) else ()
        for rollout, pieces in zip(rollouts, self._layout.tensors, strict=False):
            for name, piece in pieces.items():
                yield piece, [rollout.tensors[name]]


def bytes_of(tensor: Tensor) -> Tensor:
    """``[nbytes]`` uint8. Not copied if it lies contiguous on the CPU."""
    flat = tensor.cpu().contiguous()
    count = flat.numel()
    return flat.as_strided((count,), (1,)).view(torch.uint8)  # one element is contiguous at any stride; view asks for 1


def _memory_of(tensor: Tensor) -> memoryview:
    """Its bytes, contiguous. Not copied if they lie so on the CPU."""
    if tensor.is_contiguous():
        with suppress(TypeError):  # bfloat16, or another device
            return tensor.numpy().data
    return bytes_of(tensor).numpy().data


def _concatenate(parts: list[Tensor], out: Tensor) -> None:
    if any(part.device != out.device for part in parts):
        parts = [part.to(out.device) for part in parts]
    if len(parts) == 1:
        out.copy_(parts[0])  # half the time of cat
    elif out.numel():
        torch.cat(parts, out=out)


def encode(batch: RankBatch, *, max_bytes: int = 2**62, narrow: bool = True) -> Encoded:
    """Describe ``batch`` for the wire. Copies no token yet (:meth:`Encoded.fill` does).

    ``narrow``: int64 columns whose values fit travel as int32 and are widened again on the rank. Raises RolloutError,
    naming the rollout, if the rollouts do not share one set of columns, and ValueError if more than ``max_bytes``
    would be needed.
    """
    rollouts = batch.rollouts
    meta = description_of(
        rollouts,
        [len(mb.rollouts) for mb in batch.micro_batches],
        narrow=narrow,
        load=float(batch.load),
        denominators=batch.denominators,
        execution_sizes=_execution_sizes(batch),
        mini_batches=batch.mini_batch_sizes,
        shared=[
            SharedMicroBatch(i, mb.cp_group, mb.cp_rank) for i, mb in enumerate(batch.micro_batches) if mb.cp_group
        ],
    )
    packed = pack_description(meta, rollouts)
    try:
        plan = lay_out(meta, len(packed), max_bytes)
    except WireError as error:
        raise ValueError(
            f"rank {batch.rank}, step {batch.step}: {batch.num_tokens} tokens do not fit: {error}. "
            "Raise max_batch_bytes of RankFeed, or lower batch_size"
        ) from None
    message = Batch(
        step=batch.step,
        rank=batch.rank,
        dp_size=batch.dp_size,
        meta_bytes=len(packed),
        wire_bytes=plan.wire_bytes,
        total_bytes=plan.total_bytes,
        meta_crc=zlib.crc32(packed),
    )
    return Encoded(message, batch, packed, plan)


def batch_of(rollouts: Sequence[Rollout]) -> RankBatch:
    """Rollouts as one rank batch that nobody trains on: to be written, or put, together."""
    return RankBatch(
        step=0,
        rank=0,
        dp_size=1,
        micro_batches=(MicroBatch.of(rollouts),),
        load=0.0,
        denominators=Denominators(len(rollouts), 0, 0, 0),
    )


def _execution_sizes(batch: RankBatch) -> list[ExecutionSize]:
    if all(micro_batch.execution_sizes is None for micro_batch in batch.micro_batches):
        return []
    return [
        size
        for mb in batch.micro_batches
        for size in mb.execution_sizes or [ExecutionSize(1, loss_tokens_of(r)) for r in mb.rollouts]
    ]


# --- receiving -------------------------------------------------------------------------------------------------------


def decode(
    message: Batch,
    buffer: Tensor,
    *,
    on_device: Callable[[Tensor], Tensor] | None = None,
    check_rollouts: bool = True,
) -> RankBatch:
    """A received buffer (``[total_bytes]`` uint8 on the CPU, the first ``wire_bytes`` filled) -> the rank batch,
    as views of it.

    Nothing is copied but columns that travelled narrowed. ``on_device`` moves the whole buffer once, for accelerators.
    ``check_rollouts`` False: only what they share is checked; :func:`checked` must follow for each, so that one bad
    rollout does not spoil the others. Raises WireError for anything :func:`encode` would not have made. O(rollouts +
    pieces).
    """
    packed = buffer[: message.meta_bytes].numpy().tobytes()  # a copy: in shared memory it could change
    meta = read_description(packed, message.meta_crc, f"step {message.step}", check_rollouts=check_rollouts)
    check_members(meta, message.rank, message.dp_size)
    plan = lay_out(meta, message.meta_bytes, message.total_bytes)
    if (plan.wire_bytes, plan.total_bytes) != (
        message.wire_bytes,
        message.total_bytes,
    ) or buffer.numel() < plan.total_bytes:
        raise WireError(
            f"step {message.step}: the description needs {plan.wire_bytes} ({plan.total_bytes}) bytes, "
            f"but {message.wire_bytes} ({message.total_bytes}) came"
        )
    # One copy of the whole buffer instead of one for each column.
    if on_device is not None:
        buffer = on_device(buffer)
    for pieces in plan.columns:
        for piece in pieces.values():
            # It travelled narrowed, and there is room behind for what it was: widened here, so that views show its own
            # dtype.
            if piece.restored != piece.start:
                user_view(buffer, piece).copy_(wire_view(buffer, piece))
    return _rank_batch(message, meta, plan, buffer)


def checked(rollout: Rollout) -> Rollout:
    """A decoded rollout, made anew, with every check there is. Raises RolloutError."""
    return replace(rollout)


@dataclass(frozen=True, slots=True)
class _Received:
    """A checked buffer and its description; makes views when asked."""

    message: Batch
    meta: Description
    plan: Layout
    buffer: Tensor
    padding: frozenset[int]
    members: Mapping[int, SharedMicroBatch]
    """Which place this rank has among those that share a micro-batch; of those that are shared."""

    def flat(self, micro_batch: int, first: int, stop: int) -> layout.FlatColumns:
        """Views of one micro-batch's columns; rollouts ``first:stop`` of the rank batch. O(columns + rollouts)."""
        scalars = self.meta.scalars[first:stop]
        # Scalars that only some rollouts have make no column.
        names = [name for name in scalars[0] if all(name in row for row in scalars)]
        rows = self.plan.rows[first:stop]
        own = rows[-1].stop  # behind them are the rows behind the chunks
        tokens = {name: user_view(self.buffer, piece) for name, piece in self.plan.columns[micro_batch].items()}
        member = self.members.get(micro_batch)
        return layout.FlatColumns(
            tokens={name: column[:own] for name, column in tokens.items()},
            lengths=tuple(one.stop - one.start for one in rows),
            scalars={name: [row[name] for row in scalars] for name in names},
            weights=torch.tensor(
                [0.0 if i in self.padding else 1.0 for i in range(first, stop)],
                dtype=torch.float32,
                device=self.buffer.device,
            ),
            executions=self.execution_sizes(first, stop)
            or [(1, tokens) for tokens in self.meta.loss_tokens[first:stop]],
            prefixes=list(zip(self.meta.group_ids[first:stop], self.meta.prefixes[first:stop], strict=False)) or None,
            shared=None
            if member is None
            else SharedColumns(
                len(member.cp_group),
                member.cp_rank,
                tuple(self.meta.lengths[first:stop]),
                {name: column[own:] for name, column in tokens.items()},
            ),
        )

    def execution_sizes(self, first: int, stop: int) -> tuple[ExecutionSize, ...] | None:
        """Of the executions of rollouts ``first:stop``; None where each is one by itself."""
        return tuple(ExecutionSize(*size) for size in self.meta.execution_sizes[first:stop]) or None

    def rollout(self, index: int) -> Rollout:
        """Rollout ``index`` of the rank batch. O(columns)."""
        meta, rows = self.meta, self.plan.rows[index]
        version: Version | None = meta.versions[index]
        columns = {name: user_view(self.buffer, p) for name, p in self.plan.columns[rows.micro_batch].items()}
        fields: dict[str, Any] = {
            "tokens": {name: column[rows.start : rows.stop] for name, column in columns.items()},
            "scalars": meta.scalars[index],
            "tensors": {name: user_view(self.buffer, piece) for name, piece in self.plan.tensors[index].items()},
            "metadata": meta.metadata[index],
            "rollout_id": meta.ids[index],
            "group_id": meta.group_ids[index],
            "execution_id": execution_id(meta, index),
            "version": version,
            "cost": meta.costs[index],
            "prefix": prefix(meta, index),
            "is_padding": index in self.padding,
        }
        member = self.members.get(rows.micro_batch)
        if member is None:
            return _trusted_rollout(**fields, num_tokens=meta.lengths[index], num_loss_tokens=meta.loss_tokens[index])
        return SharedRollout(
            **fields,
            cp_degree=len(member.cp_group),
            cp_rank=member.cp_rank,
            whole_tokens=meta.lengths[index],
            whole_loss_tokens=meta.loss_tokens[index],
            behind={name: column[rows.behind : rows.behind + 2] for name, column in columns.items()},
        )


def _trusted_rollout(**fields: object) -> Rollout:
    """A Rollout from fields that were checked where it was put, and again by :func:`decode`: no second validation."""
    rollout = Rollout.__new__(Rollout)
    for name, value in fields.items():
        # The dataclass is frozen; this is how its own __init__ does it.
        object.__setattr__(rollout, name, value)
    return rollout


class _Rollouts(Sequence[Rollout]):
    """The rollouts of a micro-batch, made when asked for. About 10 us each; each is made once."""

    def __init__(self, received: _Received, places: range) -> None:
        """``places``: of them in the rank batch."""
        self._received, self._places = received, places
        self._made: dict[int, Rollout] = {}

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self._places[index]
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = self._received.rollout(place)
        return made

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts>"


def checksum(message: Batch, buffer: Tensor) -> int:
    """Of all that travels of a buffer; never 0. O(bytes)."""
    return zlib.crc32(buffer[: message.wire_bytes].numpy().data) or 1


def _rank_batch(message: Batch, meta: Description, plan: Layout, buffer: Tensor) -> RankBatch:
    received = _Received(message, meta, plan, buffer, frozenset(meta.padding), {one.index: one for one in meta.shared})
    micro_batches = []
    for number, (first, stop) in enumerate(pairwise(accumulate(meta.micro_batches, initial=0))):
        lengths = tuple(rows.stop - rows.start for rows in plan.rows[first:stop])
        member = received.members.get(number)
        micro_batches.append(
            MicroBatch(
                _Rollouts(received, range(first, stop)),
                lengths,
                partial(received.flat, number, first, stop),
                received.execution_sizes(first, stop),
                () if member is None else member.cp_group,
                0 if member is None else member.cp_rank,
            )
        )
    return RankBatch(
        step=message.step,
        rank=message.rank,
        dp_size=message.dp_size,
        micro_batches=tuple(micro_batches),
        load=meta.load,
        denominators=denominators(meta),
        mini_batch_sizes=tuple(MiniBatchSize(*size) for size in meta.mini_batches),
    )
