"""RankBatch <-> bytes: a small header, and one flat buffer per share. Pure; no pickle anywhere.

What crosses a channel, behind a Batch message, and what lies on a disk, behind a frame::

    frame   16 int64 words: magic, format, the fields of a Batch message, a checksum of itself
    buffer    | meta (msgpack) | micro-batch 0: column a | column b | ... | micro-batch 1: ... | rollouts' own tensors |

Every piece of the buffer starts at a multiple of 64 bytes. Offsets are not announced, they follow from what meta says
(both sides run :func:`_plan`), so no announced offset can point outside; the size that follows must be the size that
came. Within a buffer a micro-batch's column is one contiguous slice, so on the rank a
:class:`~stream_balancer.types.MicroBatch` is a set of views and ``packed()`` copies no token.

A receiver checks a message before it allocates, and meta before it makes a view: what is wrong raises
:class:`~stream_balancer.errors.WireError`. Work and memory spent on hostile bytes are proportional to the bytes
received.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite, prod
from typing import Any, NamedTuple, NoReturn, overload

import msgspec
import numpy as np
import torch
from torch import Tensor

from stream_balancer import tensors as layout
from stream_balancer.errors import RolloutError, WireError
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.values import (
    MAX_COLUMNS,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    SUPPORTED_DTYPES,
    Version,
    plain_cost,
    plain_name,
    plain_version,
)
from stream_balancer.wire.messages import Batch

__all__ = [
    "FORMAT",
    "FRAME_BYTES",
    "FRAME_WORDS",
    "Encoded",
    "Frame",
    "OtherProtocolError",
    "checked",
    "decode",
    "encode",
    "read_frame",
]

FORMAT = 3
"""Version of what this file writes to a disk."""
FRAME_WORDS = 16
"""int64 words in a frame."""
FRAME_BYTES = 8 * FRAME_WORDS
ALIGNMENT = 64
"""Bytes; what torch's own allocator gives, and a cache line."""
_MAGIC = int.from_bytes(b"strmbal\x01", "little")
_BATCH, _FIELDS = 1, 4  # what every frame is, and the word at which its fields begin


class OtherProtocolError(WireError):
    """Nothing is damaged: it was written by another version of this file."""


class Frame(NamedTuple):
    """What a checkpoint and a journal write before a buffer: the fields of a Batch message, always the same size."""

    step: int = -1
    rank: int = 0
    dp_size: int = 0
    meta_bytes: int = 0
    """Bytes of msgpack at the start of the buffer."""
    wire_bytes: int = 0
    """Bytes of the buffer that are written, or sent."""
    total_bytes: int = 0
    """Bytes a reader needs: the buffer, and room for columns that are narrowed."""
    meta_crc: int = 0

    def pack(self) -> Tensor:
        """``[16]`` int64: magic, format, 1, 0, the fields, zeros, a checksum of all before it."""
        words = np.zeros(FRAME_WORDS, np.int64)
        words[:3] = _MAGIC, FORMAT, _BATCH
        words[_FIELDS : _FIELDS + len(self)] = self
        words[-1] = zlib.crc32(words[:-1].tobytes())
        return torch.from_numpy(words)


def read_frame(words: Tensor) -> Frame:
    """``[16]`` int64 -> :class:`Frame`. Raises WireError for anything this version would not have written."""
    raw = words.numpy()
    if raw.shape != (FRAME_WORDS,) or raw.dtype != np.int64:
        raise WireError(f"a frame is [{FRAME_WORDS}] int64, not {list(raw.shape)} {raw.dtype}")
    if raw[0] != _MAGIC:
        raise WireError("not a stream_balancer frame (wrong magic): something else was written here")
    if raw[-1] != zlib.crc32(raw[:-1].tobytes()):
        raise WireError("a frame's checksum is wrong: it was damaged or cut short")
    if raw[1] != FORMAT:
        raise OtherProtocolError(
            f"this was written in format {raw[1]}, and this version reads {FORMAT}. Install the version that wrote it"
        )
    if raw[2] != _BATCH:
        raise WireError(f"unknown kind of frame: {raw[2]}")
    frame = Frame(*raw[_FIELDS : _FIELDS + len(Frame._fields)].tolist())
    if any(value < 0 for value in frame[1:]) or frame.step < -1:
        raise WireError(f"a frame has negative counters: {frame}")
    return frame


class _Tensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A column's or a tensor's name, type and shape."""

    name: str
    dtype: int
    """Index into SUPPORTED_DTYPES: what the user put in and gets out."""
    wire_dtype: int
    """Index into SUPPORTED_DTYPES: what travels."""
    shape: tuple[int, ...]
    """Of one row of a column (without the leading L); of the whole tensor in ``tensors``."""

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * SUPPORTED_DTYPES[self.dtype].itemsize

    @property
    def wire_row_bytes(self) -> int:
        return prod(self.shape) * SUPPORTED_DTYPES[self.wire_dtype].itemsize

    def check(self) -> None:
        if not (0 <= self.dtype < len(SUPPORTED_DTYPES) and 0 <= self.wire_dtype < len(SUPPORTED_DTYPES)):
            raise WireError(f"{self.name!r} has an unknown dtype ({self.dtype}, {self.wire_dtype})")
        if self.dtype != self.wire_dtype and (self.dtype, self.wire_dtype) != (_INT64, _INT32):
            raise WireError(f"{self.name!r}: only int64 may travel narrowed, and only as int32")
        elements = prod(max(n, 1) for n in self.shape)
        if len(self.shape) > MAX_DIMENSIONS or elements > MAX_ELEMENTS or any(n < 0 for n in self.shape):
            raise WireError(f"{self.name!r} has an impossible shape: {self.shape[: MAX_DIMENSIONS + 1]}")


_INT64 = SUPPORTED_DTYPES.index(torch.int64)
_INT32 = SUPPORTED_DTYPES.index(torch.int32)


class _Meta(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All of a share that is not in columns. Lists are per rollout unless said otherwise."""

    load: float
    global_num_rollouts: int
    global_num_tokens: int
    global_num_loss_tokens: int
    columns: list[_Tensor]
    """Per column; every rollout of the share has all of them."""
    micro_batches: list[int]
    """Rollouts in each micro-batch."""
    lengths: list[int]
    loss_tokens: list[int]
    ids: list[str]
    group_ids: list[str | None]
    versions: list[int | tuple[int, int] | None]
    costs: list[float | None]
    scalars: list[Mapping[str, int | float | bool]]
    metadata: list[Mapping[str, Any]]
    tensors: list[list[_Tensor]]
    padding: list[int]
    """Indices of padding copies."""


class _Slice(NamedTuple):
    """Where a piece lies in the buffer. Offsets in bytes."""

    what: _Tensor
    start: int
    rows: int
    """Leading dimension of a column; -1 for a rollout's own tensor."""
    restored: int
    """Where the widened copy of a narrowed column lies; ``start`` if it is not narrowed."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything lies."""

    columns: list[dict[str, _Slice]]
    """``[micro_batch][name]``."""
    tensors: list[dict[str, _Slice]]
    """``[rollout][name]``."""
    wire_bytes: int
    total_bytes: int


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _plan(meta: _Meta, meta_bytes: int, max_bytes: int) -> _Plan:
    """Lay out a buffer. Every piece takes at least 64 bytes, so the work is bounded by ``max_bytes``. O(pieces)."""
    at = _align(meta_bytes)
    columns: list[dict[str, _Slice]] = []
    first = 0
    for count in meta.micro_batches:
        rows = sum(meta.lengths[first : first + count])
        first += count
        here: dict[str, _Slice] = {}
        for column in meta.columns:
            here[column.name] = _Slice(column, at, rows, at)
            at += _align(max(rows * column.wire_row_bytes, 1))
            if at > max_bytes:
                raise WireError(f"the columns need more than {max_bytes} bytes")
        columns.append(here)
    tensors: list[dict[str, _Slice]] = []
    for own in meta.tensors:
        tensors.append({})
        for tensor in own:
            tensors[-1][tensor.name] = _Slice(tensor, at, -1, at)
            at += _align(max(tensor.row_bytes, 1))
            if at > max_bytes:
                raise WireError(f"the tensors need more than {max_bytes} bytes")
    wire_bytes = at
    for here in columns:
        for name, piece in here.items():
            if piece.what.dtype != piece.what.wire_dtype:
                here[name] = piece._replace(restored=at)
                at += _align(max(piece.rows * piece.what.row_bytes, 1))
    if at > max_bytes:
        raise WireError(f"the restored columns need more than {max_bytes} bytes")
    return _Plan(columns, tensors, wire_bytes, at)


# --- sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """A share, ready to be written into a buffer of ``frame.wire_bytes`` bytes."""

    frame: Frame
    """The BATCH frame, with ``seen`` and ``chunk_bytes`` still to be set."""
    _share: RankBatch
    _meta: bytes
    _layout: _Plan

    def fill(self, buffer: Tensor) -> Iterator[int]:
        """Write piece by piece into ``buffer`` (``[>= wire_bytes]`` uint8); yields how many leading bytes are final.
        O(bytes)."""
        buffer[: len(self._meta)] = torch.frombuffer(bytearray(self._meta), dtype=torch.uint8)
        for micro_batch, pieces in zip(self._share.micro_batches, self._layout.columns, strict=True):
            for name, piece in pieces.items():
                yield piece.start
                _concatenate([r.tokens[name] for r in micro_batch.rollouts], _wire_view(buffer, piece))
        rollouts = self._share.rollouts if any(self._layout.tensors) else ()
        for rollout, pieces in zip(rollouts, self._layout.tensors, strict=False):
            for name, piece in pieces.items():
                yield piece.start
                _wire_view(buffer, piece).copy_(rollout.tensors[name])
        yield self._layout.wire_bytes


def bytes_of(tensor: Tensor) -> Tensor:
    """``[nbytes]`` uint8. Not copied if it lies contiguous on the CPU."""
    flat = tensor.cpu().contiguous()
    count = flat.numel()
    return flat.as_strided((count,), (1,)).view(torch.uint8)  # one element is contiguous at any stride; view asks for 1


def _concatenate(parts: list[Tensor], out: Tensor) -> None:
    if any(part.device != out.device for part in parts):
        parts = [part.to(out.device) for part in parts]
    if len(parts) == 1:
        out.copy_(parts[0])  # half the time of cat
    elif out.numel():
        torch.cat(parts, out=out)


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)


def _shape(piece: _Slice) -> tuple[int, ...]:
    return piece.what.shape if piece.rows < 0 else (piece.rows, *piece.what.shape)


def _wire_view(buffer: Tensor, piece: _Slice) -> Tensor:
    return _view(buffer, piece.start, SUPPORTED_DTYPES[piece.what.wire_dtype], _shape(piece))


def _user_view(buffer: Tensor, piece: _Slice) -> Tensor:
    return _view(buffer, piece.restored, SUPPORTED_DTYPES[piece.what.dtype], _shape(piece))


def encode(share: RankBatch, *, max_bytes: int = 2**62, narrow: bool = True) -> Encoded:
    """Describe ``share`` for the wire. Copies no token yet (:meth:`Encoded.fill` does).

    ``narrow``: int64 columns whose values fit travel as int32 and are widened again on the rank. Raises RolloutError,
    naming the rollout, if the rollouts do not share one set of columns, and ValueError if more than ``max_bytes``
    would be needed.
    """
    rollouts = share.rollouts
    meta = _meta_of(
        rollouts,
        [len(mb.rollouts) for mb in share.micro_batches],
        narrow=narrow,
        load=float(share.load),
        denominators=(share.global_num_rollouts, share.global_num_tokens, share.global_num_loss_tokens),
    )
    packed = _pack_meta(meta, rollouts)
    try:
        plan = _plan(meta, len(packed), max_bytes)
    except WireError as error:
        raise ValueError(
            f"rank {share.rank}, step {share.step}: {share.num_tokens} tokens do not fit: {error}. "
            "Raise max_batch_bytes of RankFeed, or lower batch_size"
        ) from None
    frame = Frame(
        step=share.step,
        rank=share.rank,
        dp_size=share.dp_size,
        meta_bytes=len(packed),
        wire_bytes=plan.wire_bytes,
        total_bytes=plan.total_bytes,
        meta_crc=zlib.crc32(packed),
    )
    return Encoded(frame, share, packed, plan)


def _meta_of(
    rollouts: Sequence[Rollout],
    micro_batches: list[int],
    *,
    narrow: bool,
    load: float = 0.0,
    denominators: tuple[int, int, int] = (0, 0, 0),
) -> _Meta:
    return _Meta(
        load,
        *denominators,
        columns=_columns(rollouts, narrow),
        micro_batches=micro_batches,
        lengths=[r.num_tokens for r in rollouts],
        loss_tokens=[r.num_loss_tokens for r in rollouts],
        ids=[r.rollout_id for r in rollouts],
        group_ids=[r.group_id for r in rollouts],
        versions=[r.version for r in rollouts],
        costs=[r.cost for r in rollouts],
        scalars=[r.scalars for r in rollouts],
        metadata=[r.metadata for r in rollouts],
        tensors=[[_describe(k, t, tuple(t.shape)) for k, t in r.tensors.items()] for r in rollouts],
        padding=[i for i, r in enumerate(rollouts) if r.is_padding],
    )


def _pack_meta(meta: _Meta, rollouts: Sequence[Rollout]) -> bytes:
    try:
        return _ENCODER.encode(meta)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _changed(rollouts, error) from None


def _changed(rollouts: Sequence[Rollout], error: Exception) -> RolloutError:
    """Every field could be written when the rollout was made."""
    for rollout in rollouts:
        try:
            _ENCODER.encode((rollout.rollout_id, rollout.scalars, rollout.metadata))
        except Exception as its_own:  # noqa: BLE001 - it becomes the message
            return RolloutError(
                f"rollout {rollout.rollout_id!r} was changed after it was made, and cannot be written any more: "
                f"{its_own}. Make a new Rollout instead"
            )
    return RolloutError(f"a rollout cannot be written: {error}")


def _refuse_others(value: object) -> NoReturn:
    raise TypeError(f"it holds a {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_refuse_others)
_DECODER = msgspec.msgpack.Decoder(_Meta)


def _describe(name: str, tensor: Tensor, shape: tuple[int, ...], wire: torch.dtype | None = None) -> _Tensor:
    index = SUPPORTED_DTYPES.index(tensor.dtype)
    return _Tensor(name, index, index if wire is None else SUPPORTED_DTYPES.index(wire), shape)


def _columns(rollouts: Sequence[Rollout], narrow: bool) -> list[_Tensor]:
    first = rollouts[0]
    described: list[_Tensor] = []
    for name, tensor in first.tokens.items():
        parts = [_column_of(r, name, tensor, first) for r in rollouts]
        fits = narrow and tensor.dtype is torch.int64 and all(_fits_int32(part) for part in parts)
        described.append(_describe(name, tensor, tuple(tensor.shape[1:]), torch.int32 if fits else None))
    for r in rollouts:
        if len(r.tokens) != len(first.tokens):
            raise RolloutError(_differ(r, first, f"has columns {sorted(r.tokens)}", f"{sorted(first.tokens)}"))
    return described


def _column_of(rollout: Rollout, name: str, like: Tensor, first: Rollout) -> Tensor:
    part = rollout.tokens.get(name)
    if part is None:
        raise RolloutError(_differ(rollout, first, f"has no column {name!r}", "that one does"))
    if part.dtype != like.dtype or (part.ndim + like.ndim > 2 and part.shape[1:] != like.shape[1:]):
        mine, other = f"{part.dtype} {list(part.shape)}", f"{like.dtype} {list(like.shape)}"
        raise RolloutError(_differ(rollout, first, f"has column {name!r} as {mine}", other))
    return part


def _differ(rollout: Rollout, first: Rollout, mine: str, other: str) -> str:
    return (
        f"rollout {rollout.rollout_id!r} {mine}, but rollout {first.rollout_id!r} of the same batch: {other}. "
        "Give every rollout the same columns, with the same dtype and trailing shape"
    )


def _fits_int32(part: Tensor) -> bool:
    if part.numel() == 0:
        return True
    low, high = torch.aminmax(part)
    return int(low) >= -(2**31) and int(high) < 2**31


# --- receiving -------------------------------------------------------------------------------------------------------


def decode(
    frame: Frame | Batch,
    buffer: Tensor,
    *,
    on_device: Callable[[Tensor], Tensor] | None = None,
    check_rollouts: bool = True,
) -> RankBatch:
    """A received buffer (``[total_bytes]`` uint8 on the CPU, the first ``wire_bytes`` filled) -> the share, as views of
    it.

    Nothing is copied but columns that travelled narrowed. ``on_device`` moves the whole buffer once, for accelerators.
    ``check_rollouts`` False: only what they share is checked; :func:`checked` must follow for each, so that one bad
    rollout does not spoil the others. Raises WireError for anything :func:`encode` would not have made. O(rollouts +
    pieces).
    """
    packed = buffer[: frame.meta_bytes].numpy().tobytes()  # a copy: in shared memory it could change
    meta = _read_meta(packed, frame.meta_crc, f"step {frame.step}", check_rollouts=check_rollouts)
    plan = _plan(meta, frame.meta_bytes, frame.total_bytes)
    if (plan.wire_bytes, plan.total_bytes) != (
        frame.wire_bytes,
        frame.total_bytes,
    ) or buffer.numel() < plan.total_bytes:
        raise WireError(
            f"step {frame.step}: the description needs {plan.wire_bytes} ({plan.total_bytes}) bytes, "
            f"but {frame.wire_bytes} ({frame.total_bytes}) came"
        )
    if on_device is not None:
        buffer = on_device(buffer)
    for pieces in plan.columns:
        for piece in pieces.values():
            if piece.restored != piece.start:
                _user_view(buffer, piece).copy_(_wire_view(buffer, piece))
    return _share(frame, meta, plan, buffer)


def checked(rollout: Rollout) -> Rollout:
    """A decoded rollout, made anew, with every check there is. Raises RolloutError."""
    return replace(rollout)


def _read_meta(packed: bytes, crc: int, what: str, *, check_rollouts: bool = True) -> _Meta:
    """The description of ``what``, a step or a put."""
    if zlib.crc32(packed) != crc:
        raise WireError(f"{what}: the checksum of its description is wrong: damaged on its way")
    try:
        meta = _DECODER.decode(packed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"{what}: its description cannot be read: {error}") from None
    _check_meta(meta)
    if check_rollouts:
        try:
            _check_rollouts(meta)
        except RolloutError as error:
            raise WireError(f"a rollout is wrong: {error}") from None
    return meta


def _check_meta(meta: _Meta) -> None:
    n = len(meta.lengths)
    per_rollout = (
        meta.loss_tokens, meta.ids, meta.group_ids, meta.versions, meta.costs, meta.scalars, meta.metadata, meta.tensors
    )  # fmt: skip
    if any(len(column) != n for column in per_rollout):
        raise WireError("the batch's description has lists of different lengths")
    if not meta.micro_batches or min(meta.micro_batches) < 1 or sum(meta.micro_batches) != n:
        raise WireError(f"micro-batches must hold all {n} rollouts and none be empty")
    if min(meta.lengths) < 1 or max(meta.lengths) > MAX_ELEMENTS:
        raise WireError("a rollout has an impossible number of tokens")
    if any(not 0 <= loss <= length for loss, length in zip(meta.loss_tokens, meta.lengths, strict=True)):
        raise WireError("a rollout has an impossible number of loss tokens")
    if len(set(meta.ids)) != n:
        raise WireError("two rollouts of a batch have one rollout_id")
    if len(set(meta.padding)) != len(meta.padding) or any(not 0 <= i < n or meta.loss_tokens[i] for i in meta.padding):
        raise WireError("the list of padding copies is wrong")
    if (
        not isfinite(meta.load)
        or min(meta.global_num_rollouts, meta.global_num_tokens, meta.global_num_loss_tokens) < 0
    ):
        raise WireError("the step's denominators are wrong")
    _check_tensors(meta)


def _check_rollouts(meta: _Meta) -> None:
    """What of a Rollout's own checks lies in ``meta``. Metadata and values of scalars are nobody's index or size."""
    for name in meta.ids:
        plain_name(name)
    for group in meta.group_ids:
        if group is not None:
            plain_name(group)
    for version in meta.versions:
        if version is not None:
            plain_version(version)
    for cost in meta.costs:
        if cost is not None:
            plain_cost(cost)


def _check_tensors(meta: _Meta) -> None:
    names = {column.name for column in meta.columns}
    if len(names) != len(meta.columns) or len(names) > MAX_COLUMNS:
        raise WireError("the column table is wrong: a name occurs twice, or there are too many")
    for column in meta.columns:
        column.check()
        if column.name in ("input_ids", "loss_mask") and column.shape:
            raise WireError(f"{column.name} must have one number per token")
        if column.name == "input_ids" and SUPPORTED_DTYPES[column.dtype] not in _INTEGERS:
            raise WireError("input_ids must be integers")
    if "input_ids" not in names:
        raise WireError("there is no column 'input_ids'")
    if any(not names.isdisjoint(scalars) for scalars in meta.scalars):
        raise WireError("a name is both a column and a scalar")
    for own in meta.tensors:
        if len({tensor.name for tensor in own}) != len(own):
            raise WireError("a rollout has two tensors of one name")
        for tensor in own:
            tensor.check()
            if tensor.dtype != tensor.wire_dtype:
                raise WireError("only columns may travel narrowed")


_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True, slots=True)
class _Received:
    """A checked buffer and its description; makes views when asked."""

    frame: Frame | Batch
    meta: _Meta
    plan: _Plan
    buffer: Tensor
    padding: frozenset[int]

    def flat(self, micro_batch: int, first: int, stop: int) -> layout.FlatColumns:
        """Views of one micro-batch's columns; rollouts ``first:stop`` of the share. O(columns + rollouts)."""
        scalars = self.meta.scalars[first:stop]
        names = [name for name in scalars[0] if all(name in row for row in scalars)]
        return layout.FlatColumns(
            tokens={name: _user_view(self.buffer, piece) for name, piece in self.plan.columns[micro_batch].items()},
            lengths=tuple(self.meta.lengths[first:stop]),
            scalars={name: [row[name] for row in scalars] for name in names},
            weights=torch.tensor(
                [0.0 if i in self.padding else 1.0 for i in range(first, stop)],
                dtype=torch.float32,
                device=self.buffer.device,
            ),
        )

    def rollout(self, index: int, micro_batch: int, start: int) -> Rollout:
        """Rollout ``index`` of the share, whose tokens begin at row ``start`` of its micro-batch. O(columns)."""
        meta = self.meta
        stop = start + meta.lengths[index]
        version: Version | None = meta.versions[index]
        return _trusted_rollout(
            tokens={name: _user_view(self.buffer, p)[start:stop] for name, p in self.plan.columns[micro_batch].items()},
            scalars=meta.scalars[index],
            tensors={name: _user_view(self.buffer, piece) for name, piece in self.plan.tensors[index].items()},
            metadata=meta.metadata[index],
            rollout_id=meta.ids[index],
            group_id=meta.group_ids[index],
            version=version,
            cost=meta.costs[index],
            is_padding=index in self.padding,
            num_tokens=meta.lengths[index],
            num_loss_tokens=meta.loss_tokens[index],
        )


def _trusted_rollout(**fields: object) -> Rollout:
    """A Rollout from fields that were checked where it was put, and again by :func:`decode`: no second validation."""
    rollout = Rollout.__new__(Rollout)
    for name, value in fields.items():
        object.__setattr__(rollout, name, value)
    return rollout


class _Rollouts(Sequence[Rollout]):
    """The rollouts of a micro-batch, made when asked for. About 10 us each; each is made once."""

    def __init__(self, received: _Received, micro_batch: int, first: int, starts: Sequence[int]) -> None:
        self._received, self._micro_batch, self._first, self._starts = received, micro_batch, first, starts
        self._made: dict[int, Rollout] = {}

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        made = self._made.get(place)
        if made is None:
            made = self._received.rollout(self._first + place, self._micro_batch, self._starts[place])
            self._made[place] = made
        return made

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts>"


def checksum(frame: Frame | Batch, buffer: Tensor) -> int:
    """Of all that travels of a buffer; never 0. O(bytes)."""
    return zlib.crc32(buffer[: frame.wire_bytes].numpy().data) or 1


def _share(frame: Frame | Batch, meta: _Meta, plan: _Plan, buffer: Tensor) -> RankBatch:
    received = _Received(frame, meta, plan, buffer, frozenset(meta.padding))
    micro_batches = []
    for number, (first, stop) in enumerate(pairwise(accumulate(meta.micro_batches, initial=0))):
        lengths = tuple(meta.lengths[first:stop])
        starts = list(accumulate(lengths, initial=0))[:-1]
        rollouts = _Rollouts(received, number, first, starts)
        micro_batches.append(MicroBatch(rollouts, lengths, partial(received.flat, number, first, stop)))
    return RankBatch(
        step=frame.step,
        rank=frame.rank,
        dp_size=frame.dp_size,
        micro_batches=tuple(micro_batches),
        load=meta.load,
        global_num_rollouts=meta.global_num_rollouts,
        global_num_tokens=meta.global_num_tokens,
        global_num_loss_tokens=meta.global_num_loss_tokens,
    )
