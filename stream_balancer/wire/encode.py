"""Rollouts -> a header, and the pieces of memory that travel behind it. No token is copied that lies contiguous here.

::

    encode(micro_batches)            a block each: work for a rank, a part of a checkpoint
    encode_rollouts(rollouts)        one block: a put, a row of a journal
    payload_of(rollout)              what an owner sends of one rollout, to fill a hole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain, compress
from operator import attrgetter
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.rollouts import ExecutionSize, MicroBatch, Rollout
from stream_balancer.wire.header import (
    ALIGNMENT,
    DTYPE_INDEX,
    MAX_BYTES,
    PER_ROLLOUT,
    Column,
    Header,
    Hole,
    Layout,
    lay_out,
    runs_of,
)  # fmt: skip
from stream_balancer.wire.payload import NOTHING, Encoded, Payload
from stream_balancer.wire.remote import Handle, RemoteRollout

_ZEROS = memoryview(bytes(ALIGNMENT))
_FIELDS = attrgetter(
    "rollout_id", "is_padding", "tensors", "tokens", "num_tokens", "num_loss_tokens", *PER_ROLLOUT
)  # fmt: skip
_GATHERED_BYTES = 2**14
"""Below that, on average, a copy costs less than a view."""


def encode(micro_batches: Sequence[MicroBatch], *, max_bytes: int = MAX_BYTES) -> Encoded:
    """Micro-batches for a rank.

    Raises RolloutError, naming the rollout, if the rollouts do not share one set of columns, and ValueError if more
    than ``max_bytes`` would be needed. O(columns x rollouts).
    """
    rollouts = list(chain.from_iterable(micro_batch.rollouts for micro_batch in micro_batches))
    header = _header(rollouts, [len(micro_batch.rollouts) for micro_batch in micro_batches])
    header.execution_sizes = _execution_sizes(micro_batches)
    handles = {place: one.handle for place, one in enumerate(rollouts) if isinstance(one, RemoteRollout)}
    if handles:
        _make_holes(header, handles)
    try:
        layout = lay_out(header, max_bytes)
    except WireError as error:
        # said in the user's words: layouts know bytes only
        tokens = sum(micro_batch.num_tokens for micro_batch in micro_batches)
        raise ValueError(
            f"{tokens} tokens do not fit: {error}. Raise max_batch_bytes of RankFeed, or lower batch_size"
        ) from None
    # a view of each tensor costs as much as all else here, and movers have threads of their own
    # kept, for all processes of a rank
    pieces = cache(partial(_pieces, header, layout, rollouts))
    return Encoded(_written(header), Payload(layout.total_bytes, runs_of(header, layout), pieces))


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
        return Encoded(_written(header), NOTHING)
    layout = lay_out(header, MAX_BYTES)
    total = layout.total_bytes
    return Encoded(_written(header), Payload(total, (0, total), _pieces(header, layout, rollouts)))


def payload_of(rollout: Rollout) -> list[memoryview]:
    """All bytes of a rollout by name, columns before tensors. What is empty is left out."""
    parts = [its[name] for its in (rollout.tokens, rollout.tensors) for name in sorted(its)]
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
    # by attrgetter, zip and compress, which loop in C
    ids, are_padding, tensors, tokens, lengths, loss_tokens, *others = zip(*map(_FIELDS, rollouts), strict=True)
    header = Header(
        _columns(rollouts, tokens), blocks, list(lengths), list(loss_tokens), list(ids),
        padding=list(compress(range(len(ids)), are_padding)),
    )  # fmt: skip
    for (name, nothing), values in zip(PER_ROLLOUT.items(), others, strict=True):
        # lists that say nothing do not travel
        if values.count(nothing) < len(values):
            setattr(header, name, values)
    if any(tensors):
        header.tensors = [
            [Column(name, DTYPE_INDEX[one.dtype], tuple(one.shape)) for name, one in own.items()] for own in tensors
        ]
    return header


def _columns(rollouts: Sequence[Rollout], tokens: Sequence[Mapping[str, Tensor]]) -> tuple[Column, ...]:
    first, likes = rollouts[0], list[tuple[str, torch.dtype, int, tuple[int, ...]]]()
    # slices of shapes cost more than all else here, and most columns have one number a token
    for name, like in tokens[0].items():
        dtype, ndim, shape = like.dtype, like.ndim, () if like.ndim == 1 else tuple(like.shape[1:])
        likes.append((name, dtype, ndim, shape))
    for rollout, its in zip(rollouts[1:], tokens[1:], strict=True):
        for name, dtype, ndim, shape in likes:
            own = its.get(name)
            if own is None or own.dtype is not dtype or own.ndim != ndim or (ndim > 1 and own.shape[1:] != shape):
                raise _differ(rollout, first, name)
        if len(its) != len(likes):
            raise _differ(rollout, first, *(its.keys() - tokens[0].keys()))
    # only now: a column that no wire has is named above, if others differ
    return tuple(Column(name, DTYPE_INDEX[dtype], shape) for name, dtype, _, shape in likes)


def _differ(rollout: Rollout, first: Rollout, *names: str) -> RolloutError:
    mine, other = (
        ", ".join(f"{its[name].dtype} {list(its[name].shape)}" if name in its else "nothing" for name in names)
        for its in (rollout.tokens, first.tokens)
    )
    return RolloutError(
        f"rollout {rollout.rollout_id!r} has {mine} as {', '.join(map(repr, names))}, but rollout "
        f"{first.rollout_id!r} of the same batch has {other}. Give every rollout the same columns, with the same dtype "
        "and trailing shape"
    )


def _execution_sizes(micro_batches: Sequence[MicroBatch]) -> list[tuple[int, int]]:
    if all(micro_batch.execution_sizes is None for micro_batch in micro_batches):
        return []
    alone = [
        micro_batch.execution_sizes or [ExecutionSize(1, one.num_loss_tokens) for one in micro_batch.rollouts]
        for micro_batch in micro_batches
    ]
    return list(chain.from_iterable(alone))


def _make_holes(header: Header, handles: Mapping[int, Handle]) -> None:
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(one.owner for one in handles.values()))}
    header.owners = list(numbers)
    header.holes = [Hole(place, numbers[owner], key) for place, (owner, key) in handles.items()]


def _refuse_others(value: object) -> NoReturn:
    raise TypeError(f"it holds a {type(value).__name__}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_refuse_others)


def _written(header: Header) -> msgspec.Raw:
    try:
        return msgspec.Raw(_ENCODER.encode(header))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # every field could be written when the rollout was made
        raise RolloutError(
            f"one of {header.ids[:3]} was changed after it was made, and cannot be written any more: {error}. Make a "
            "new Rollout instead"
        ) from None


# --- the payload -----------------------------------------------------------------------------------------------------


def _pieces(header: Header, layout: Layout, rollouts: Sequence[Rollout]) -> list[memoryview]:
    """The bytes of all runs, in order, with zeros between columns."""
    holes = {hole.rollout for hole in header.holes} if header.holes else ()
    # tensors that lie one after the other, and their bytes with those of holes between them
    runs: list[tuple[list[Tensor], int]] = []
    for block in layout.blocks:
        its = rollouts[block.first : block.stop]
        here = [one for place, one in enumerate(its, block.first) if place not in holes] if holes else its
        for number, column in enumerate(header.columns):
            parts = [one.tokens[column.name] for one in here]
            runs.append((parts, block.starts[-1] * layout.widths[number]))
        for place, one in enumerate(its, block.first) if block.tensors else ():
            runs += [([] if place in holes else [tensor], tensor.nbytes) for tensor in one.tensors.values()]
    found: list[memoryview] = []
    for parts, size in runs:
        # small ones are gathered, which costs less than to send each by itself
        if len(parts) > 1 and size < _GATHERED_BYTES * len(parts):
            parts = [torch.cat(parts)]
        found += filter(None, map(bytes_of, parts))
        # up to where the next one begins; an empty one takes a place, too
        if gap := -size % ALIGNMENT if size else ALIGNMENT:
            found.append(_ZEROS[:gap])
    return found
