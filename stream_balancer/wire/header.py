"""The header of rollouts on the wire and on disk: its msgpack structs, and every check of a stranger's header. Pure.

A header says which columns there are, how many rollouts each block holds, and of each rollout its length, scalars and
tensors. Offsets are never in it: both ends compute them (:mod:`stream_balancer.wire.layout`). Names (ids, groups,
metadata, ...) are kept as bytes until someone asks for them: a rank that trains on packed columns never does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from operator import le, lt
from typing import Annotated, Any, TypeAlias

import msgspec
import torch

from stream_balancer.errors import WireError
from stream_balancer.values import MAX_COLUMNS, MAX_DIMENSIONS, MAX_ELEMENTS, SUPPORTED_DTYPES

__all__ = [
    "DTYPE_INDEX", "Column", "GivenColumns", "Header", "Hole", "Names", "Owner", "Shared", "read_header", "read_names",
]  # fmt: skip

DTYPE_INDEX = {dtype: index for index, dtype in enumerate(SUPPORTED_DTYPES)}
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]


class Column(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Name, type and shape of a column, or of a tensor that belongs to one rollout."""

    name: Text
    dtype: Annotated[int, msgspec.Meta(ge=0, lt=len(SUPPORTED_DTYPES))]
    """Index into SUPPORTED_DTYPES."""
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    """Of one row of a column; of the whole tensor otherwise."""

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * SUPPORTED_DTYPES[self.dtype].itemsize


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """A process that keeps payloads, and how ranks reach it."""

    address: Text
    token: Annotated[bytes, msgspec.Meta(max_length=256)]
    label: Text = ""
    """For errors and logs."""


class Hole(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A rollout whose bytes lie with an owner."""

    rollout: Count
    owner: Count
    """Index into the header's owners."""
    key: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """The owner's number of it."""


class Shared(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A block of which this rank holds a part: of each rollout two chunks, and the two rows behind these."""

    block: Count
    cp_group: tuple[Count, ...]
    """Ranks that share it."""
    cp_rank: Count
    """Place of this one among them."""


class Names(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What rollouts are called, and what else is of no use to a layout. A list is empty where no rollout has one."""

    ids: list[Text]
    group_ids: list[Text | None] = []
    execution_ids: list[Text | None] = []
    versions: list[int | tuple[int, int] | None] = []
    costs: list[float | None] = []
    metadata: list[Mapping[str, Any]] = []


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Lists are per rollout unless said otherwise."""

    columns: Annotated[list[Column], msgspec.Meta(min_length=1, max_length=MAX_COLUMNS)]
    """Per column; every rollout has all of them."""
    blocks: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    """Rollouts in each block. A micro-batch is a block; so is a put."""
    lengths: list[Positive]
    """Tokens of the whole rollout, also where only a part of it is here."""
    loss_tokens: list[Count]
    """As ``lengths``."""
    names: msgspec.Raw
    """:class:`Names`."""
    scalars: list[Mapping[Text, int | float | bool]] = []
    """Empty where no rollout has any."""
    tensors: list[Annotated[list[Column], msgspec.Meta(max_length=MAX_COLUMNS)]] = []
    """Empty where no rollout has any."""
    prefixes: list[Count] = []
    """Leading tokens shared with siblings. Empty where no rollout shares any."""
    padding: list[Count] = []
    """Indices of padding copies, ascending."""
    execution_sizes: list[tuple[Positive, Count]] = []
    """(rollouts, loss tokens) that the execution of each has in the step; empty where each is one by itself."""
    shared: list[Shared] = []
    """Per shared block, ascending."""
    narrowed: list[Count] = []
    """Indices of int64 columns that travel as int32, ascending."""
    late: list[Count] = []
    """Indices of columns that come along even of holes, ascending."""
    holes: list[Hole] = []
    """Per hole, ascending."""
    owners: list[Owner] = []
    """Per owner."""


_DECODER = msgspec.msgpack.Decoder(Header)
_NAMES = msgspec.msgpack.Decoder(Names)


def read_header(raw: msgspec.Raw | bytes) -> Header:
    """A header whose sizes and indices are possible. Raises WireError."""
    try:
        header = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"the header of rollouts cannot be read: {error}") from None
    _check_lists(header)
    _check_columns(header)
    _check_parts(header)
    return header


def read_names(header: Header) -> Names:
    """The names in a header. Raises WireError."""
    try:
        names = _NAMES.decode(header.names)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"the names of rollouts cannot be read: {error}") from None
    count = len(header.lengths)
    lists = (names.group_ids, names.execution_ids, names.versions, names.costs, names.metadata)
    if len(names.ids) != count or any(len(one) not in (0, count) for one in lists):
        raise WireError("the names of rollouts have lists of different lengths")
    groups = names.group_ids or [None] * count
    if any(prefix and group is None for prefix, group in zip(header.prefixes, groups, strict=False)):
        raise WireError("a rollout shares tokens with no group")
    return names


def _check_lists(header: Header) -> None:
    lengths, loss_tokens = header.lengths, header.loss_tokens
    count = len(lengths)
    some = (header.scalars, header.tensors, header.prefixes, header.execution_sizes)
    if len(loss_tokens) != count or any(len(one) not in (0, count) for one in some):
        raise WireError("the header of rollouts has lists of different lengths")
    if sum(header.blocks) != count:
        raise WireError(f"the blocks must hold all {count} rollouts")
    if not all(map(le, loss_tokens, lengths)):
        raise WireError("a rollout has an impossible number of loss tokens")
    if header.prefixes and not all(map(lt, header.prefixes, lengths)):
        raise WireError("a rollout shares more tokens than it has")
    if not _ascends(header.padding, count) or any(loss_tokens[index] for index in header.padding):
        raise WireError("the list of padding copies is wrong")


def _check_columns(header: Header) -> None:
    columns = header.columns
    names = {column.name for column in columns}
    if len(names) != len(columns) or "input_ids" not in names:
        raise WireError("a column occurs twice, or there is no column 'input_ids'")
    for column in columns:
        _check_shape(column)
        if column.shape and column.name in ("input_ids", "loss_mask"):
            raise WireError(f"{column.name} must have one number per token")
        if column.name == "input_ids" and SUPPORTED_DTYPES[column.dtype] not in _INTEGERS:
            raise WireError("input_ids must be integers")
    for tensors in header.tensors:
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise WireError("a rollout has two tensors of one name")
        for tensor in tensors:
            _check_shape(tensor)
    if any(not names.isdisjoint(scalars) for scalars in header.scalars):
        raise WireError("a name is both a column and a scalar")


def _check_shape(column: Column) -> None:
    # A size of 0 must not hide another one that is absurd: torch refuses it even where there is no element.
    if prod(max(size, 1) for size in column.shape) > MAX_ELEMENTS:
        raise WireError(f"{column.name!r} has an impossible shape: {column.shape}")


def _check_parts(header: Header) -> None:
    if not _ascends([one.block for one in header.shared], len(header.blocks)):
        raise WireError("the list of shared blocks is wrong")
    for one in header.shared:
        members = one.cp_group
        if len(members) < 2 or len(set(members)) != len(members) or one.cp_rank >= len(members):
            raise WireError(f"a block is shared by ranks {list(members[:8])}, which is impossible")
    columns = header.columns
    if not _ascends(header.narrowed, len(columns)) or any(
        SUPPORTED_DTYPES[columns[number].dtype] is not torch.int64 for number in header.narrowed
    ):
        raise WireError("only int64 columns may travel narrowed")
    if not _ascends(header.late, len(columns)) or not _ascends(
        [one.rollout for one in header.holes], len(header.lengths)
    ):
        raise WireError("the list of what does not come along is wrong")
    if any(one.owner >= len(header.owners) for one in header.holes):
        raise WireError("a rollout lies with an owner that is not named")
    if (header.holes and header.narrowed) or (header.late and not header.holes):
        raise WireError("what lies elsewhere is not narrowed, and only beside it columns are late")


def _ascends(numbers: Collection[int], end: int) -> bool:
    last = -1
    for number in numbers:
        if number <= last:
            return False
        last = number
    return last < end


class GivenColumns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Columns that a role has computed of some micro-batches."""

    columns: Annotated[list[Column], msgspec.Meta(min_length=1, max_length=64)]
    lengths: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    """Tokens of each micro-batch."""
