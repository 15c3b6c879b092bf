"""Rollouts -> a header, and the pieces of memory that travel behind it. No token is copied that lies contiguous here.

::

    encode(micro_batches)            a block each: work for a rank, a part of a checkpoint
    encode_rollouts(rollouts)        one block: a put, a row of a journal
    encode_columns(items)            columns that a role has computed
    payload_of(rollout)              what an owner sends of one rollout, to fill a hole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, NoReturn, TypeVar

import msgspec
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.types import ExecutionSize, MicroBatch, Rollout, SharedRollout
from stream_balancer.types.shared import columns_of, loss_tokens_of, part_of, rows_behind, rows_of, tokens_of
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire.header import (
    ALIGNMENT,
    DTYPE_INDEX,
    MAX_BYTES,
    Column,
    GivenColumns,
    Header,
    Hole,
    Layout,
    Names,
    Shared,
    align,
    lay_out,
    runs_of,
)  # fmt: skip
from stream_balancer.wire.payload import NOTHING, Later, Payload
from stream_balancer.wire.remote import Handle, RemoteRollout, remote_of

__all__ = ["Encoded", "bytes_of", "encode", "encode_columns", "encode_rollouts", "payload_of"]

V = TypeVar("V")
_ZEROS = memoryview(bytes(ALIGNMENT))
_GATHERED_BYTES = 2**14
"""Below that, on average, a copy costs less than a view."""
_BESIDE_TOKENS = attrgetter("scalars", "tensors", "prefix", "is_padding")
_NAMED = attrgetter("rollout_id", "group_id", "execution_id", "version", "cost", "metadata")


class Encoded(NamedTuple):
    """Ready to be sent."""

    header: msgspec.Raw
    payload: Payload


def encode(micro_batches: Sequence[MicroBatch], *, max_bytes: int = MAX_BYTES, narrow: bool = False) -> Encoded:
    """Micro-batches for a rank. ``narrow``: int64 columns whose values fit travel as int32, unless some rollout lies
    elsewhere.

    Raises RolloutError, naming the rollout, if the rollouts do not share one set of columns, and ValueError if more
    than ``max_bytes`` would be needed. O(columns x rollouts).
    """
    rollouts = list(chain.from_iterable(micro_batch.rollouts for micro_batch in micro_batches))
    header = _header(rollouts, [len(micro_batch.rollouts) for micro_batch in micro_batches])
    header.execution_sizes = _execution_sizes(micro_batches)
    header.shared = [
        Shared(number, micro_batch.cp_group, micro_batch.cp_rank)
        for number, micro_batch in enumerate(micro_batches)
        if micro_batch.cp_group
    ]
    handles = {place: one.handle for place, one in enumerate(map(remote_of, rollouts)) if one is not None}
    if handles:
        _make_holes(header, handles)
        # columns of a role are here even where the payload is not, and travel now
        here = {name for name, column in columns_of(rollouts[min(handles)]).items() if not column.is_meta}
        header.late = [number for number, column in enumerate(header.columns) if column.name in here]
    elif narrow:
        header.narrowed = [number for number, one in enumerate(header.columns) if _fits(one, rollouts)]
    try:
        layout = lay_out(header, max_bytes)
    except WireError as error:
        # said in the user's words: layouts know bytes only
        tokens = sum(micro_batch.num_tokens for micro_batch in micro_batches)
        raise ValueError(
            f"{tokens} tokens do not fit: {error}. Raise max_batch_bytes of RankFeed, or lower batch_size"
        ) from None
    packed = _pack(header, rollouts)
    # a view of each tensor costs as much as all else here, and movers have threads of their own
    pieces = Later(lambda: _pieces(header, layout, rollouts))
    return Encoded(packed, Payload(layout.total_bytes, runs_of(header, layout), pieces))


def encode_rollouts(rollouts: Sequence[Rollout], *, handles: Sequence[Handle] | None = None) -> Encoded:
    """Rollouts that are put, or written down. ``handles``: where the payload of each lies; then none of it comes along.

    Raises RolloutError if one was changed after it was made, and cannot be written any more, or if they do not share
    one set of columns. O(columns x rollouts).
    """
    header = _header(rollouts, [len(rollouts)])
    if handles is None and isinstance(rollouts[0], RemoteRollout):
        # written down where they are not
        handles = [one.handle for one in rollouts if isinstance(one, RemoteRollout)]
    if handles is not None:
        _make_holes(header, dict(enumerate(handles)))
        return Encoded(_pack(header, rollouts), NOTHING)
    layout = lay_out(header, MAX_BYTES)
    return Encoded(
        _pack(header, rollouts),
        Payload(layout.total_bytes, (0, layout.wire_bytes), _pieces(header, layout, rollouts)),
    )


def encode_columns(items: Sequence[Mapping[str, Tensor]]) -> Encoded:
    """Columns ``[T]`` of some micro-batches, the same names and dtypes in each. Raises ValueError for others."""
    first = items[0]
    # checked here: a role's columns were never a Rollout, whose constructor looks
    if odd := [f"{name!r} has dtype {one.dtype}" for name, one in first.items() if one.dtype not in DTYPE_INDEX]:
        raise ValueError(f"{odd[0]}, which cannot travel")
    lengths = [len(next(iter(item.values()))) for item in items]
    header = GivenColumns([Column(name, DTYPE_INDEX[one.dtype], ()) for name, one in first.items()], lengths)
    given: list[memoryview] = []
    total = 0
    for name, like in first.items():
        its = [item[name] for item in items if name in item]
        if any(one.dtype != like.dtype for one in its) or [one.shape for one in its] != [(n,) for n in lengths]:
            raise ValueError(f"column {name!r} must have a number for each token of each micro-batch, in one dtype")
        size = sum(lengths) * like.dtype.itemsize
        _add(given, its, size)
        total += align(size)
    return Encoded(msgspec.Raw(_ENCODER.encode(header)), Payload(total, (0, total), given))


def payload_of(rollout: Rollout, degree: int = 1, place: int = 0) -> list[memoryview]:
    """All bytes of a rollout by name, columns before tensors; or of the part that the rank at this place of ``degree``
    ranks holds, with the rows behind its chunks. What is empty is left out."""
    one = rollout if degree == 1 else part_of(rollout, degree, place)
    parts: list[Tensor] = []
    for name in sorted(rollout.tokens):
        parts += rows_of(one, name)
        if isinstance(one, SharedRollout):
            parts += rows_behind(one, name)
    parts += [rollout.tensors[name] for name in sorted(rollout.tensors)]
    return [bytes_of(part) for part in parts if part.numel()]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory. A copy only where it is not contiguous, or on another device."""
    if tensor.numel() and tensor.is_contiguous() and tensor.dtype not in _NOT_NUMPYS and tensor.is_cpu:
        return tensor.numpy().data.cast("B")
    flat = tensor.cpu().contiguous()
    # One element is contiguous at any stride, but view() to another size of elements asks for a stride of 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


_NOT_NUMPYS = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})

# --- the header ------------------------------------------------------------------------------------------------------


def _header(rollouts: Sequence[Rollout], blocks: list[int]) -> Header:
    if not rollouts:
        raise ValueError("no rollouts to encode")
    scalars, tensors, prefixes, padding = zip(*map(_BESIDE_TOKENS, rollouts), strict=True)
    return Header(
        _columns(rollouts),
        blocks,
        list(map(tokens_of, rollouts)),
        list(map(loss_tokens_of, rollouts)),
        msgspec.Raw(),
        list(scalars) if any(scalars) else [],
        list(map(_described, tensors)) if any(tensors) else [],
        list(prefixes) if any(prefixes) else [],
        [place for place, is_padding in enumerate(padding) if is_padding] if any(padding) else [],
    )


def _columns(rollouts: Sequence[Rollout]) -> tuple[Column, ...]:
    first = rollouts[0]
    columns: list[Column] = []
    likes: list[tuple[str, torch.dtype, int, tuple[int, ...]]] = []
    for name, like in columns_of(first).items():
        # Slices of shapes cost more than all else here, and most columns have one number a token.
        shape = () if like.ndim == 1 else tuple(like.shape[1:])
        columns.append(Column(name, DTYPE_INDEX[like.dtype], shape))
        likes.append((name, like.dtype, like.ndim, shape))
    for rollout in rollouts[1:]:
        its = columns_of(rollout)
        if len(its) != len(likes):
            raise _differ(rollout, first, f"has columns {sorted(its)}", f"{sorted(columns_of(first))}")
        for name, dtype, ndim, shape in likes:
            own = its.get(name)
            if own is None:
                raise _differ(rollout, first, f"has no column {name!r}", "that one does")
            if own.dtype is not dtype or own.ndim != ndim or (ndim > 1 and own.shape[1:] != shape):
                mine, other = f"{own.dtype} {list(own.shape)}", f"{dtype} {list(columns_of(first)[name].shape)}"
                raise _differ(rollout, first, f"has column {name!r} as {mine}", other)
    return tuple(columns)


def _differ(rollout: Rollout, first: Rollout, mine: str, other: str) -> RolloutError:
    return RolloutError(
        f"rollout {rollout.rollout_id!r} {mine}, but rollout {first.rollout_id!r} of the same batch: {other}. "
        "Give every rollout the same columns, with the same dtype and trailing shape"
    )


def _described(tensors: Mapping[str, Tensor]) -> list[Column]:
    return [Column(name, DTYPE_INDEX[own.dtype], tuple(own.shape)) for name, own in tensors.items()]


def _execution_sizes(micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    if all(micro_batch.execution_sizes is None for micro_batch in micro_batches):
        return []
    alone = [
        micro_batch.execution_sizes or [ExecutionSize(1, loss_tokens_of(one)) for one in micro_batch.rollouts]
        for micro_batch in micro_batches
    ]
    return list(chain.from_iterable(alone))


def _make_holes(header: Header, handles: Mapping[int, Handle]) -> None:
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(one.owner for one in handles.values()))}
    header.owners = list(numbers)
    header.holes = [Hole(place, numbers[owner], key) for place, (owner, key) in handles.items()]


def _fits(column: Column, rollouts: Sequence[Rollout]) -> bool:
    if SUPPORTED_DTYPES[column.dtype] is not torch.int64:
        return False
    parts = [columns_of(rollout)[column.name] for rollout in rollouts]
    parts += [one.behind[column.name] for one in rollouts if isinstance(one, SharedRollout) and one.whole is None]
    # one pass over each part for both ends
    ends = [torch.aminmax(part) for part in parts if part.numel()]
    return all(int(low) >= -(2**31) and int(high) < 2**31 for low, high in ends)


def _refuse_others(value: object) -> NoReturn:
    raise TypeError(f"it holds a {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_refuse_others)


def _pack(header: Header, rollouts: Sequence[Rollout]) -> msgspec.Raw:
    # by attrgetter and zip, which loop in C
    names = Names(*map(list, zip(*map(_NAMED, rollouts), strict=True)))
    if not any(names.metadata):
        names.metadata = []
    for field in ("group_ids", "execution_ids", "versions", "costs"):
        # lists that say nothing do not travel
        if getattr(names, field).count(None) == len(rollouts):
            setattr(names, field, [])
    try:
        # bytes within bytes: a rank that trains on columns never decodes them
        header.names = msgspec.Raw(_ENCODER.encode(names))
        return msgspec.Raw(_ENCODER.encode(header))
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


# --- the payload -----------------------------------------------------------------------------------------------------


def _pieces(header: Header, layout: Layout, rollouts: Sequence[Rollout]) -> list[memoryview]:
    """The bytes of all runs, in order, with zeros between columns."""
    holes = {hole.rollout for hole in header.holes} if header.holes else ()
    found: list[memoryview] = []
    for block in layout.blocks:
        its = rollouts[block.first : block.stop]
        here = [one for place, one in enumerate(its, block.first) if place not in holes] if holes else its
        for number, column in enumerate(header.columns):
            whose, name = its if number in header.late else here, column.name
            parts = [one.tokens[name] for one in whose] if block.shared is None else _rows(whose, name)
            if number in header.narrowed:
                parts = [part.to(torch.int32) for part in parts]
            _add(found, parts, block.rows * layout.widths[number])
        for place, one in enumerate(its, block.first) if block.tensors else ():
            for tensor in one.tensors.values():
                _add(found, [] if place in holes else [tensor], tensor.nbytes)
    return found


def _rows(rollouts: Sequence[Rollout], name: str) -> list[Tensor]:
    """Rows of a shared block."""
    own = [rows for rollout in rollouts for rows in rows_of(rollout, name)]
    return own + [rows for one in rollouts if isinstance(one, SharedRollout) for rows in rows_behind(one, name)]


def _add(found: list[memoryview], parts: list[Tensor], size: int) -> None:
    """Memory of tensors of so many bytes together, and zeros up to the next piece. Small ones are gathered, which costs
    less than to send each by itself."""
    if len(parts) > 1 and size < _GATHERED_BYTES * len(parts):
        parts = [torch.cat(parts)]
    found += filter(None, map(bytes_of, parts))
    gap = align(size) - size
    if gap:
        found.append(_ZEROS[:gap])
