"""The header of rollouts on the wire and on disk: its msgpack structs, every check of a stranger's header, and where
the bytes of its rollouts lie. Pure.

A header says which columns there are, how many rollouts each block holds, and of each rollout its length, names,
scalars and tensors. Offsets are never in it: both ends compute them.

::

    memory   block 0: column a | column b | ... | tensors of its rollouts || block 1: ...

A column of a block holds the rows of the block's rollouts, one after the other, so a packed micro-batch is one view per
column. Every piece begins at a multiple of 64 bytes and takes at least 64, so the memory there is bounds the work of
laying out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter, le, methodcaller
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import torch

from stream_balancer.errors import WireError
from stream_balancer.values import (
    MAX_COLUMNS,
    MAX_COST,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    MAX_NAME_BYTES,
    MAX_VERSION,
    PADDING_PREFIX,
    SUPPORTED_DTYPES,
)  # fmt: skip
from stream_balancer.wire.payload import reader

DTYPE_INDEX = {dtype: index for index, dtype in enumerate(SUPPORTED_DTYPES)}
ALIGNMENT = 64
"""Bytes; a cache line, and what torch's own allocator gives."""
MAX_BYTES = 2**40
"""Bytes of all rollouts of one header."""
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS_OF_8_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_FIRST = attrgetter("first")
_is_padding = methodcaller("startswith", PADDING_PREFIX)

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
Version: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_VERSION, lt=MAX_VERSION)]
# Not tuple[Version, Version]: beside an integer with bounds msgspec 0.22 crashes on it.
Versions: TypeAlias = Annotated[tuple[Version, ...], msgspec.Meta(min_length=2, max_length=2)]
Cost: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_COST)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | float | bool
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]


class Column(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Name, type and shape of a column, or of a tensor that belongs to one rollout."""

    name: Name
    index: Annotated[int, msgspec.Meta(ge=0, lt=len(SUPPORTED_DTYPES))]
    """Place of its dtype in SUPPORTED_DTYPES."""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    """Shape of one row of a column; of the whole tensor otherwise."""

    @property
    def dtype(self) -> torch.dtype:
        return SUPPORTED_DTYPES[self.index]

    @property
    def num_bytes(self) -> int:
        """Bytes of one row of a column, or of a tensor. Raises WireError for a shape that no tensor has."""
        # A size of 0 must not hide another one that is absurd: torch refuses it even where there is no element.
        if prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            raise WireError(f"{self.name!r} has an impossible shape: {self.shape}")
        return prod(self.shape) * self.dtype.itemsize


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """A process that keeps payloads, and how ranks reach it."""

    address: Text
    token: Annotated[bytes, msgspec.Meta(max_length=256)]
    label: Text = ""
    """For errors and logs."""


class Hole(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A rollout whose bytes an owner keeps."""

    rollout: Count
    owner: Count
    """Index into the header's owners."""
    key: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """The owner's number of it."""


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Lists are per rollout unless said otherwise; those with a default are empty where no rollout says anything."""

    columns: Annotated[tuple[Column, ...], msgspec.Meta(min_length=1, max_length=MAX_COLUMNS)]
    """Per column; every rollout has all of them."""
    blocks: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    """Rollouts in each block. A micro-batch is a block; so is a put."""
    lengths: list[Positive]
    """Tokens of the rollout."""
    loss_tokens: list[Count]
    ids: list[Name]
    group_id: list[Name | None] = []
    execution_id: list[Name | None] = []
    version: list[Version | Versions | None] = []
    cost: list[Cost | None] = []
    metadata: list[Mapping[str, Any]] = []
    scalars: list[Mapping[Name, Number]] = []
    tensors: list[Annotated[list[Column], msgspec.Meta(max_length=MAX_COLUMNS)]] = []
    execution_sizes: list[tuple[Positive, Count]] = []
    """(rollouts, loss tokens) that the execution of each has in the step."""
    padding: list[Count] = []
    """Indices of padding copies, ascending."""
    holes: list[Hole] = []
    """Per hole, ascending."""
    owners: list[Owner] = []
    """Per owner."""


PER_ROLLOUT: dict[str, Any] = {
    "group_id": None, "execution_id": None, "version": None, "cost": None, "metadata": {}, "scalars": {}
}  # fmt: skip
"""Fields of a rollout that travel as they are, in a list of the same name, and the value that says nothing."""
lists_of = attrgetter("ids", "lengths", "loss_tokens", *PER_ROLLOUT)
"""Lists of a header that become fields of rollouts."""


_read = reader(Header, "the header of rollouts")


def read_header(raw: msgspec.Raw | bytes) -> Header:
    """A header that is possible, so that nobody behind this looks at a length, an index or a name again. Raises
    WireError."""
    header: Header = _read(raw)
    widths, lengths, loss_tokens, count = _widths(header.columns), header.lengths, header.loss_tokens, len(header.ids)
    its = header.tensors, header.execution_sizes, *lists_of(header)[3:]
    if {*map(len, (lengths, loss_tokens, *filter(None, its)))} != {count}:
        raise WireError("the header of rollouts has lists of different lengths")
    if sum(header.blocks) != count:
        raise WireError(f"the blocks must hold all {count} rollouts")
    if not all(map(le, loss_tokens, lengths)):
        raise WireError("a rollout has an impossible number of loss tokens")
    if header.padding:
        if not _ascends(header.padding, count) or any(loss_tokens[index] for index in header.padding):
            raise WireError("the list of padding copies is wrong")
    elif any(map(_is_padding, header.ids)):
        raise WireError(f"an id begins with {PADDING_PREFIX!r}: so the balancer names its padding copies")
    if header.scalars and not all(map(widths.keys().isdisjoint, header.scalars)):
        raise WireError("a name is both a column and a scalar")
    if header.tensors and any(len({tensor.name for tensor in own}) != len(own) for own in header.tensors):
        raise WireError("a rollout has two tensors of one name")
    if header.holes:
        _check_holes(header)
    return header


@lru_cache(64)
def _widths(columns: tuple[Column, ...]) -> dict[str, int]:
    """Bytes of a row of each column, in their order. Raises WireError for columns that no rollout has. Kept: all puts
    of a run have the same ones."""
    widths = {column.name: column.num_bytes for column in columns}
    if len(widths) != len(columns):
        raise WireError("a column occurs twice")
    if "input_ids" not in widths:
        raise WireError("there is no column 'input_ids'")
    for column in columns:
        if column.shape and column.name in ("input_ids", "loss_mask"):
            raise WireError(f"{column.name} must have one number per token")
        if column.name == "input_ids" and column.dtype not in _INTEGERS:
            raise WireError("input_ids must be integers")
        # torch counts no such ones
        if column.name == "loss_mask" and column.dtype in _FLOATS_OF_8_BITS:
            raise WireError(f"loss_mask has dtype {column.dtype}")
    return widths


def _check_holes(header: Header) -> None:
    # ascending and distinct: each is then found by one pass, and none counts twice
    absent = [one.rollout for one in header.holes]
    if not _ascends(absent, len(header.lengths)):
        raise WireError("the list of what does not come along is wrong")
    if any(one.owner >= len(header.owners) for one in header.holes):
        raise WireError("an owner of a rollout is not named")


def _ascends(numbers: Collection[int], end: int) -> bool:
    last = -1
    for number in numbers:
        if number <= last:
            return False
        last = number
    return last < end


# --- where the bytes lie ---------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block's place. Offsets in bytes."""

    first: int
    stop: int
    """End of its rollouts."""
    lengths: list[int]
    """[n] rows of each rollout in every column."""
    starts: list[int]
    """[n + 1] row at which each rollout starts."""
    columns: list[int]
    """Offset of each column."""
    tensors: list[list[int]]
    """[n] offsets of each rollout's own tensors; empty where no rollout has any."""

    def rows_of(self, rollout: int) -> tuple[int, int]:
        """First and last row but one of a rollout."""
        place = rollout - self.first
        return self.starts[place], self.starts[place + 1]


class Layout(NamedTuple):
    """Where everything lies."""

    blocks: list[Block]
    widths: tuple[int, ...]
    """Bytes of a row of each column."""
    total_bytes: int

    def block_of(self, rollout: int) -> Block:
        """The block that it is in. O(log(blocks))."""
        return self.blocks[bisect_right(self.blocks, rollout, key=_FIRST) - 1]


def align(size: int) -> int:
    """The next multiple of :data:`ALIGNMENT`, at least one of it."""
    return -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT


def lay_out(header: Header, max_bytes: int) -> Layout:
    """Raises WireError where more than ``max_bytes`` would be needed. O(columns x blocks + rollouts)."""
    widths = tuple(_widths(header.columns).values())
    at = 0
    blocks: list[Block] = []
    for first, stop in pairwise(accumulate(header.blocks, initial=0)):
        lengths = header.lengths[first:stop]
        starts = list(accumulate(lengths, initial=0))
        columns = []
        for width in widths:
            columns.append(at)
            # align() written out: this line runs for each column of each block
            at += -(-starts[-1] * width // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        tensors = []
        for own in header.tensors[first:stop]:
            *its, at = accumulate((align(one.num_bytes) for one in own), initial=at)
            tensors.append(its)
        # for each block: sizes of a stranger must not be summed to the end first
        if at > max_bytes:
            raise WireError(f"more than {max_bytes} bytes would be needed")
        blocks.append(Block(first, stop, lengths, starts, columns, tensors))
    return Layout(blocks, widths, at)


def runs_of(header: Header, layout: Layout) -> tuple[int, ...]:
    """Bytes that come along, as (offset, size, offset, size, ...): all but holes."""
    runs: list[int] = []
    at = 0
    absent = sorted(span for hole in header.holes for span in spans_of(header, layout, hole.rollout))
    for start, size in [*absent, (layout.total_bytes, 0)]:
        if start > at:
            runs += (at, start - at)
        at = start + size
    return tuple(runs)


def spans_of(header: Header, layout: Layout, rollout: int) -> list[tuple[int, int]]:
    """(offset, size) of all pieces of a hole, by name, which is the order in which its owner sends them: columns, and
    then tensors."""
    block, spans = layout.block_of(rollout), list[tuple[int, int]]()
    first, stop = block.rows_of(rollout)
    # by name: the owner's rollout may have its columns in another order
    for _, number in sorted((column.name, number) for number, column in enumerate(header.columns)):
        at, width = block.columns[number], layout.widths[number]
        spans.append((at + first * width, (stop - first) * width))
    if block.tensors:
        own = zip(header.tensors[rollout], block.tensors[rollout - block.first], strict=True)
        spans += [(at, tensor.num_bytes) for tensor, at in sorted(own, key=lambda its: its[0].name)]
    # empty ones are left out at both ends
    return [(at, size) for at, size in spans if size]
