"""All of a rank batch, or of a put, that is not in columns: made from rollouts, packed, read with every check. Pure.

A description says which columns there are, and of each rollout its length, ids, scalars, metadata and the shapes of its
own tensors. It says no offset: where a piece lies follows from it (:mod:`stream_balancer.wire.buffer_layout`). A reader
checks it before it makes a view: what is wrong raises :class:`~stream_balancer.errors.WireError`. Work and memory spent
on hostile bytes are proportional to the bytes received.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.types import Denominators, Rollout, SharedRollout
from stream_balancer.types.shared import columns_of, loss_tokens_of, tokens_of
from stream_balancer.values import (
    MAX_COLUMNS,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    SUPPORTED_DTYPES,
    plain_cost,
    plain_name,
    plain_prefix,
    plain_version,
)

__all__ = [
    "Description",
    "SharedMicroBatch",
    "TensorSpec",
    "check_members",
    "denominators",
    "description_of",
    "encode_description",
    "execution_id",
    "pack_description",
    "prefix",
    "read_description",
    "unchecked_description",
]


class TensorSpec(msgspec.Struct, array_like=True, frozen=True, gc=False):
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


NOTHING = Denominators(0, 0, 0, 0)

_INT64 = SUPPORTED_DTYPES.index(torch.int64)
_INT32 = SUPPORTED_DTYPES.index(torch.int32)


class SharedMicroBatch(msgspec.Struct, array_like=True, frozen=True):
    """A micro-batch of which this rank holds a part: of each rollout two chunks, and the rows behind these."""

    index: int
    """Among the micro-batches."""
    cp_group: tuple[int, ...]
    """Ranks that share it."""
    cp_rank: int
    """Place of this one among them."""


class Description(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All of a rank batch that is not in columns. Lists are per rollout unless said otherwise."""

    load: float
    global_num_rollouts: int
    global_num_tokens: int
    global_num_loss_tokens: int
    columns: list[TensorSpec]
    """Per column; every rollout of the rank batch has all of them."""
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
    tensors: list[list[TensorSpec]]
    padding: list[int]
    """Indices of padding copies."""
    global_num_executions: int = 0
    execution_ids: list[str | None] = []
    """Empty where none has one."""
    execution_sizes: list[tuple[int, int]] = []
    """(rollouts, loss tokens) that the execution of each has in the step; empty where each is one by itself."""
    mini_batches: list[tuple[int, float, int, int, int, int]] = []
    """Per mini-batch: micro-batches and load here; rollouts, tokens, loss tokens and executions over all ranks. Empty
    where the step is in one piece."""
    prefixes: list[int] = []
    """Leading tokens that each shares with its siblings; empty where none shares any."""
    shared: list[SharedMicroBatch] = []
    """Micro-batches of which each of several ranks holds a part. ``lengths`` and ``loss_tokens`` are of the whole
    rollouts: how many rows are here follows from them."""
    is_last: bool = True
    """False in a row of an open step that more rows follow: what to divide by is not known, and 0 here."""


def description_of(
    rollouts: Sequence[Rollout],
    micro_batches: list[int],
    *,
    narrow: bool,
    load: float = 0.0,
    denominators: Denominators | None = NOTHING,
    execution_sizes: Sequence[tuple[int, int]] = (),
    mini_batches: Sequence[tuple[int, float, int, int, int, int]] = (),
    shared: Sequence[SharedMicroBatch] = (),
) -> Description:
    """Describe rollouts that lie in micro-batches of these sizes. ``narrow``: int64 columns whose values fit travel as
    int32. Raises RolloutError if they do not share one set of columns."""
    global_num_rollouts, global_num_tokens, global_num_loss_tokens, global_num_executions = denominators or (0, 0, 0, 0)
    return Description(
        load,
        global_num_rollouts,
        global_num_tokens,
        global_num_loss_tokens,
        columns=_columns(rollouts, narrow),
        micro_batches=micro_batches,
        lengths=[tokens_of(r) for r in rollouts],
        loss_tokens=[loss_tokens_of(r) for r in rollouts],
        ids=[r.rollout_id for r in rollouts],
        group_ids=[r.group_id for r in rollouts],
        versions=[r.version for r in rollouts],
        costs=[r.cost for r in rollouts],
        scalars=[r.scalars for r in rollouts],
        metadata=[r.metadata for r in rollouts],
        tensors=[[_describe(k, t, tuple(t.shape)) for k, t in r.tensors.items()] for r in rollouts],
        padding=[i for i, r in enumerate(rollouts) if r.is_padding],
        global_num_executions=global_num_executions,
        execution_ids=_unless_all_none([r.execution_id for r in rollouts]),
        execution_sizes=list(execution_sizes),
        mini_batches=list(mini_batches),
        prefixes=[r.prefix for r in rollouts] if any(r.prefix for r in rollouts) else [],
        shared=list(shared),
        is_last=denominators is not None,
    )


def _unless_all_none(names: list[str | None]) -> list[str | None]:
    return names if any(name is not None for name in names) else []


def _columns(rollouts: Sequence[Rollout], narrow: bool) -> list[TensorSpec]:
    first, columns = rollouts[0], [columns_of(rollout) for rollout in rollouts]
    behind = [r.behind for r in rollouts if isinstance(r, SharedRollout) and r.whole is None]
    described: list[TensorSpec] = []
    for name, tensor in columns[0].items():
        parts = [_column_of(r, own.get(name), name, tensor, first) for r, own in zip(rollouts, columns, strict=True)]
        parts += [its[name] for its in behind]
        fits = narrow and tensor.dtype is torch.int64 and all(_fits_int32(part) for part in parts)
        described.append(_describe(name, tensor, tuple(tensor.shape[1:]), torch.int32 if fits else None))
    for r in rollouts:
        if len(r.tokens) != len(first.tokens):
            raise RolloutError(_differ(r, first, f"has columns {sorted(r.tokens)}", f"{sorted(first.tokens)}"))
    return described


def _column_of(rollout: Rollout, part: Tensor | None, name: str, like: Tensor, first: Rollout) -> Tensor:
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


def _describe(name: str, tensor: Tensor, shape: tuple[int, ...], wire: torch.dtype | None = None) -> TensorSpec:
    index = SUPPORTED_DTYPES.index(tensor.dtype)
    return TensorSpec(name, index, index if wire is None else SUPPORTED_DTYPES.index(wire), shape)


def denominators(meta: Description) -> Denominators | None:
    """Of the step; None in a row before its last one."""
    if not meta.is_last:
        return None
    return Denominators(
        meta.global_num_rollouts, meta.global_num_tokens, meta.global_num_loss_tokens, meta.global_num_executions
    )


def execution_id(meta: Description, index: int) -> str | None:
    """Of the rollout at this place."""
    return meta.execution_ids[index] if meta.execution_ids else None


def prefix(meta: Description, index: int) -> int:
    """Of the rollout at this place."""
    return meta.prefixes[index] if meta.prefixes else 0


def pack_description(meta: Description, rollouts: Sequence[Rollout]) -> bytes:
    """As msgpack. Raises RolloutError, naming the one of ``rollouts`` that cannot be written."""
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


def encode_description(meta: Description) -> bytes:
    """As msgpack; for one whose fields could all be written before."""
    return _ENCODER.encode(meta)


def unchecked_description(packed: bytes) -> Description:
    """What :func:`encode_description` made, where whoever made it is trusted: only its types are checked."""
    return _DECODER.decode(packed)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_refuse_others)
_DECODER = msgspec.msgpack.Decoder(Description)


def read_description(packed: bytes, crc: int, what: str, *, check_rollouts: bool = True) -> Description:
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


def _check_meta(meta: Description) -> None:
    n = len(meta.lengths)
    per_rollout = (
        meta.loss_tokens, meta.ids, meta.group_ids, meta.versions, meta.costs, meta.scalars, meta.metadata, meta.tensors
    )  # fmt: skip
    if any(len(column) != n for column in per_rollout):
        raise WireError("the batch's description has lists of different lengths")
    if len(meta.execution_ids) not in (0, n) or len(meta.execution_sizes) not in (0, n):
        raise WireError("the batch's executions are not as many as its rollouts")
    if len(meta.prefixes) not in (0, n):
        raise WireError("the batch's prefixes are not as many as its rollouts")
    if any(samples < 1 or tokens < 0 for samples, tokens in meta.execution_sizes):
        raise WireError("an execution has an impossible size")
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
        or meta.global_num_executions < 0
    ):
        raise WireError("the step's denominators are wrong")
    if not meta.is_last and (meta.mini_batches or meta.global_num_rollouts):
        raise WireError("a row before the last one has what is known with that")
    if meta.mini_batches and sum(number for number, *_ in meta.mini_batches) != len(meta.micro_batches):
        raise WireError("mini-batches must hold all micro-batches")
    for number, load, *counts in meta.mini_batches:
        if number < 1 or not isfinite(load) or min(counts) < 0:
            raise WireError("a mini-batch has an impossible size")
    _check_shared(meta)
    _check_tensors(meta)


def _check_shared(meta: Description) -> None:
    places = [one.index for one in meta.shared]
    if len(set(places)) != len(places) or any(not 0 <= place < len(meta.micro_batches) for place in places):
        raise WireError("the list of shared micro-batches is wrong")
    for one in meta.shared:
        members = one.cp_group
        if len(set(members)) != len(members) or len(members) < 2 or not 0 <= one.cp_rank < len(members):
            raise WireError(f"a micro-batch is shared by ranks {list(members[:8])}, which is impossible")


def check_members(meta: Description, rank: int, dp_size: int) -> None:
    """Raise WireError where a micro-batch is shared by others than this rank and its peers."""
    for one in meta.shared:
        if one.cp_group[one.cp_rank] != rank or min(one.cp_group) < 0 or max(one.cp_group) >= dp_size:
            raise WireError(
                f"rank {rank} of {dp_size} is sent a part for place {one.cp_rank} among {list(one.cp_group[:8])}"
            )


def _check_rollouts(meta: Description) -> None:
    """What of a Rollout's own checks lies in ``meta``. Metadata and values of scalars are nobody's index or size."""
    for rollout_id in meta.ids:
        plain_name(rollout_id)
    for name in (*meta.group_ids, *meta.execution_ids):
        if name is not None:
            plain_name(name)
    for version in meta.versions:
        if version is not None:
            plain_version(version)
    for cost in meta.costs:
        if cost is not None:
            plain_cost(cost)
    for index, its in enumerate(meta.prefixes):
        plain_prefix(its, meta.lengths[index], meta.group_ids[index])


def _check_tensors(meta: Description) -> None:
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
