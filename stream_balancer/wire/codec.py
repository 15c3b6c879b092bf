"""One layout for a put and for a rank batch: a header in msgpack, and memory in which every tensor is a view.

::

    header   who they are (ids, groups, versions, ...), their columns, how many rollouts in each block
    memory   block by block, column by column: the rows of the block's rollouts, one after the other;
             then the block's tensors that belong to one rollout each. Everything begins at a cache line.

A put is one block. A rank batch has a block for each micro-batch, so a packed micro-batch is one view per column. A
rollout whose payload lies elsewhere is a *hole*: its bytes do not come along, and :func:`holes` says where they go once
they were fetched from ``owners[...]``. Both ends compute offsets from the header; nothing of them is on the wire.
Small where it can be: sizes and shapes are checked before anything is believed. No socket, thread or clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from stream_balancer.wire.payload import Payload
from stream_balancer.net.errors import WireError
from stream_balancer.wire.payload import Memory

__all__ = ["Decoded", "Encoded", "Header", "Hole", "Kept", "Owner", "decode", "encode", "fill", "payload_of"]

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_INDEX = {dtype: index for index, dtype in enumerate(DTYPES)}
_ALIGN = 64
_MAX_ROLLOUTS, _MAX_COLUMNS, _MAX_DIMENSIONS, _MAX_BYTES = 2**16, 256, 16, 2**40

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
Many = msgspec.Meta(max_length=_MAX_ROLLOUTS)


class Column(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of every rollout: ``shape`` is what follows the rows. Of one rollout: all of its shape."""

    name: Name
    dtype: Annotated[int, msgspec.Meta(ge=0, lt=len(DTYPES))]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """Who keeps payloads, and how to reach it."""

    address: Name
    token: Annotated[bytes, msgspec.Meta(max_length=256)]
    label: Name = ""


class Hole(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A rollout whose bytes lie with an owner, under a number."""

    rollout: Count
    owner: Count
    key: Count


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Lists are per rollout unless said otherwise."""

    columns: Annotated[list[Column], msgspec.Meta(max_length=_MAX_COLUMNS)]
    """Per column."""
    blocks: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], Many]
    """Per block: rollouts in it."""
    lengths: Annotated[list[Count], Many]
    ids: Annotated[list[Name], Many]
    groups: Annotated[list[Name | None], Many]
    versions: Annotated[list[int | tuple[int, int] | None], Many]
    costs: Annotated[list[float | None], Many]
    scalars: Annotated[list[Mapping[Name, int | float | bool]], Many]
    metadata: Annotated[list[Mapping[Name, Any]], Many]
    tensors: Annotated[list[Annotated[list[Column], msgspec.Meta(max_length=_MAX_COLUMNS)]], Many]
    """Empty where no rollout has tensors of its own."""
    holes: Annotated[list[Hole], Many] = []
    owners: Annotated[list[Owner], Many] = []


_decoder = msgspec.msgpack.Decoder(Header)
_encoder = msgspec.msgpack.Encoder()


class _Placed(NamedTuple):
    total: int
    columns: list[tuple[int, int, Column, int]]
    """(block, offset, column, rows): what is contiguous over a block."""
    spans: list[list[tuple[int, int, Column, int]]]
    """Of each rollout: (offset, bytes, column, rows; -1 for a tensor of its own)."""


def _place(header: Header) -> _Placed:
    at, first = 0, 0
    columns: list[tuple[int, int, Column, int]] = []
    spans: list[list[tuple[int, int, Column, int]]] = [[] for _ in header.lengths]
    widths = [(column, column.row_bytes) for column in header.columns]
    for block, count in enumerate(header.blocks):
        members = range(first, first + count)
        rows = sum(header.lengths[first : first + count])
        for column, width in widths:
            columns.append((block, at, column, rows))
            for index in members:
                length = header.lengths[index]
                spans[index].append((at, length * width, column, length))
                at += length * width
            at += -at % _ALIGN
        if header.tensors:
            for index in members:
                for column in header.tensors[index]:
                    size = column.row_bytes
                    spans[index].append((at, size, column, -1))
                    at += size + -(at + size) % _ALIGN
        if at > _MAX_BYTES:
            raise WireError("more bytes than any message may have")
        first += count
    return _Placed(at, columns, spans)


def _runs(header: Header, placed: _Placed) -> tuple[int, ...]:
    """What comes along: everything but holes."""
    if not header.holes:
        return (0, placed.total) if placed.total else ()
    holes = {hole.rollout for hole in header.holes}
    spans = sorted(
        (offset, size)
        for index, its in enumerate(placed.spans)
        if index not in holes
        for offset, size, *_ in its
        if size
    )
    runs: list[int] = []
    for offset, size in spans:
        if runs and runs[-2] + runs[-1] == offset:
            runs[-1] += size
        else:
            runs += (offset, size)
    return tuple(runs)


class Encoded(NamedTuple):
    """To be sent."""

    header: msgspec.Raw
    payload: Payload


class Kept:
    """A rollout whose bytes lie here: described once, when it comes in, so that sending it is only cutting."""

    __slots__ = ("columns", "length", "own", "rollout", "views")

    def __init__(self, rollout: Any) -> None:
        tokens, tensors = rollout.tokens, rollout.tensors
        self.rollout = rollout
        self.columns = [Column(name, _INDEX[tensor.dtype], tuple(tensor.shape[1:])) for name, tensor in tokens.items()]
        self.own = [Column(name, _INDEX[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        self.length = len(next(iter(tokens.values())))
        self.views = {name: bytes_of(tensor) for name, tensor in (*tokens.items(), *tensors.items())}


def encode(rollouts: Sequence[Any], blocks: Sequence[int] = (), holes: Mapping[int, tuple[Owner, int]] = {}) -> Encoded:
    """Copies nothing. ``rollouts``: :class:`Kept` or what becomes one. ``blocks``: rollouts in each; all in one if
    empty. ``holes``: index -> (owner, key). Raises ValueError where rollouts do not have the same columns."""
    kept = [one if isinstance(one, Kept) else Kept(one) for one in rollouts]
    columns = kept[0].columns
    for one in kept:
        if one.columns != columns and sorted(one.columns, key=_name) != sorted(columns, key=_name):
            raise ValueError(f"{one.rollout.rollout_id!r} has other columns than {kept[0].rollout.rollout_id!r}")
    plain = [one.rollout for one in kept]
    owners = list(dict.fromkeys(owner for owner, _ in holes.values()))
    header = Header(
        columns,
        list(blocks) or [len(kept)],
        [one.length for one in kept],
        [one.rollout_id for one in plain],
        [one.group_id for one in plain],
        [one.version for one in plain],
        [one.cost for one in plain],
        [one.scalars for one in plain],
        [one.metadata for one in plain],
        [one.own for one in kept] if any(one.own for one in kept) else [],
        [Hole(index, owners.index(owner), key) for index, (owner, key) in holes.items()],
        owners,
    )
    placed = _place(header)
    order = [
        (offset, size, index, column.name)
        for index, its in enumerate(placed.spans)
        if index not in holes
        for offset, size, column, _ in its
        if size
    ]
    if len(kept) > 1:
        order.sort()
    runs = _runs(header, placed)
    pieces: list[Any] = []
    at = 0
    for offset, size, index, name in order:
        if offset > at and not holes:
            pieces.append(_ZEROS[: offset - at])
        pieces.append(kept[index].views[name])
        at = offset + size
    if placed.total > at and not holes:
        pieces.append(_ZEROS[: placed.total - at])
    return Encoded(msgspec.Raw(_encoder.encode(header)), Payload(placed.total, runs, pieces))


_ZEROS = memoryview(bytes(_ALIGN))


def _name(column: Column) -> str:
    return column.name


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory; a copy only where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class Decoded:
    """Rollouts in memory that was received. Every tensor is a view of it."""

    __slots__ = ("_placed", "header", "memory")

    def __init__(self, header: Header, placed: _Placed, memory: Memory | None) -> None:
        self.header, self._placed, self.memory = header, placed, memory

    def __len__(self) -> int:
        return len(self.header.lengths)

    def fields(self, index: int) -> dict[str, Any]:
        """Of one rollout, by the names of its class."""
        header = self.header
        views = {-1: {}, 0: {}}
        for offset, size, column, rows in self._placed.spans[index]:
            shape = column.shape if rows < 0 else (rows, *column.shape)
            views[min(rows, 0)][column.name] = self._view(offset, size, column, shape)
        return {
            "tokens": views[0], "tensors": views[-1], "rollout_id": header.ids[index], "group_id": header.groups[index],
            "version": header.versions[index], "cost": header.costs[index], "scalars": header.scalars[index],
            "metadata": header.metadata[index],
        }  # fmt: skip

    def packed(self, block: int) -> dict[str, Tensor]:
        """The columns of a micro-batch: the rows of all its rollouts, without a copy."""
        return {
            column.name: self._view(at, rows * column.row_bytes, column, (rows, *column.shape))
            for its, at, column, rows in self._placed.columns
            if its == block
        }

    def _view(self, offset: int, size: int, column: Column, shape: Sequence[int]) -> Tensor:
        dtype = DTYPES[column.dtype]
        if not size:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=size // dtype.itemsize, offset=offset)
        return flat if len(shape) == 1 else flat.view(shape)

    def holes(self) -> dict[int, list[tuple[Hole, list[memoryview]]]]:
        """By owner: what is to be fetched, and the places that it goes to."""
        found: dict[int, list[tuple[Hole, list[memoryview]]]] = {}
        assert self.memory is not None or not self.header.holes
        for hole in self.header.holes:
            spans = self._placed.spans[hole.rollout]
            places = [self.memory.data[offset : offset + size] for offset, size, *_ in spans if size]
            found.setdefault(hole.owner, []).append((hole, places))
        return found


def decode(raw: msgspec.Raw | bytes, memory: Memory | None, total: int | None = None) -> Decoded:
    """Raises WireError for a header that is not true of this memory."""
    try:
        header = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"a header cannot be read: {error}") from None
    count = len(header.lengths)
    lists = (header.ids, header.groups, header.versions, header.costs, header.scalars, header.metadata)
    if any(len(one) != count for one in lists) or len(header.tensors) not in (0, count) or sum(header.blocks) != count:
        raise WireError("a header with lists of different lengths")
    if not count or not header.columns or len({column.name for column in header.columns}) != len(header.columns):
        raise WireError("a header without rollouts, without columns, or with a column twice")
    if any(len({column.name for column in its}) != len(its) for its in header.tensors):
        raise WireError("a rollout with two tensors of one name")
    for column in (*header.columns, *(column for its in header.tensors for column in its)):
        if prod(max(size, 1) for size in column.shape) > _MAX_BYTES:
            raise WireError("a shape that nothing has")
    missing = {hole.rollout for hole in header.holes}
    if len(missing) != len(header.holes) or any(
        hole.rollout >= count or hole.owner >= len(header.owners) for hole in header.holes
    ):
        raise WireError("a hole that is none")
    placed = _place(header)
    if placed.total != (0 if memory is None else memory.size):
        raise WireError(f"a header of {placed.total} bytes, and {0 if memory is None else memory.size} are there")
    return Decoded(header, placed, memory)


def check_came(decoded: Decoded, runs: Sequence[int]) -> None:
    """Raise WireError unless exactly what is no hole has come."""
    if tuple(runs) != _runs(decoded.header, decoded._placed):
        raise WireError("other bytes have come than the header says")


def payload_of(rollouts: Sequence[Any]) -> Payload:
    """What an owner answers to a fetch: each rollout's spans, in the order of its columns, without gaps."""
    tensors = [tensor for rollout in rollouts for tensor in (*rollout.tokens.values(), *rollout.tensors.values())]
    return Payload.of(*[view for view in map(bytes_of, tensors) if view.nbytes])


def fill(places: Sequence[memoryview], came: Memory | None) -> None:
    """Put fetched bytes where they belong. Raises WireError if they are not as many."""
    size = 0 if came is None else came.size
    if sum(len(place) for place in places) != size:
        raise WireError(f"{size} bytes were fetched for places of {sum(len(place) for place in places)}")
    at = 0
    for place in places:
        place[:] = came.data[at : at + len(place)]
        at += len(place)
