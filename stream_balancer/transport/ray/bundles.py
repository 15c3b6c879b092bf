"""Bundles of rollouts in Ray's object store: how they are written there, described, and read. No actor calls.

::

    producer    encode_bundle(rollouts) --> description to the controller; write_object() into its node's store
    controller  read_bundle()           --> rollouts whose payload stays in the store
    rank        ObjectStore.read()      --> copied from the store's memory to where the batch wants it

    object      size of the index | index (msgpack) | the rollouts, as wire.rank_batch lays out a batch

Rollouts that are put together lie in one object, for an object per rollout costs more than its bytes. It says itself
what lies where, so a rollout is named by the object and its place there. On the controller a rollout's lease is the
object: once nobody holds a rollout of it, the object goes. A rank reads the store's memory where it lies and copies
once, into the buffer it trains from: the store's memory is read-only, and is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_balancer.transport.channel import PayloadSource, Source
from stream_balancer.types import SUPPORTED_DTYPES, Rollout
from stream_balancer.wire.buffer_layout import ALIGNMENT
from stream_balancer.wire.description import execution_id, prefix, unchecked_description
from stream_balancer.wire.messages import Batch, Owner, RolloutHeader
from stream_balancer.wire.partial_batch import Lease, RemoteRollout, WantedPayload
from stream_balancer.wire.rank_batch import Encoded, batch_of, decode, encode
from stream_balancer.wire.slices import Slice

__all__ = [
    "ObjectStore",
    "Stored",
    "description_of",
    "encode_bundle",
    "header_of",
    "read_bundle",
    "read_stored_bundle",
    "write_object",
]


class Stored(Lease):
    """An object in the store, for as long as anybody needs it."""

    __slots__ = ("reference",)

    def __init__(self, reference: object) -> None:
        self.reference = reference


class _Column(msgspec.Struct, array_like=True, frozen=True):
    start: int
    row_bytes: int
    narrowed: bool
    """int32 here, int64 where it is trained on."""


class _Index(msgspec.Struct, array_like=True, frozen=True):
    """What lies where in an object; bytes count from the first after the index."""

    columns: list[_Column]
    """By name."""
    rows: list[int]
    """The first row of each rollout, and where the last one ends."""
    tensors: list[list[tuple[int, int]]]
    """(first byte, bytes) of each rollout's own tensors, by name."""


_encode_index = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(_Index).decode
_WORD = 8


# --- producer --------------------------------------------------------------------------------------------------------


def encode_bundle(rollouts: Sequence[Rollout]) -> Encoded:
    """Describe rollouts that share one set of columns. Raises RolloutError if they do not."""
    return encode(batch_of(rollouts))


def header_of(encoded: Encoded, payload: int | None) -> RolloutHeader:
    """``payload``: the number of the object that the columns lie in; None: they follow the description."""
    whole = encoded.message
    size = whole.wire_bytes if payload is None else whole.meta_bytes
    return RolloutHeader(whole.meta_bytes, whole.meta_crc, size, whole.total_bytes, payload)


def description_of(encoded: Encoded) -> Source:
    """All but the columns: what travels to the controller while the columns stay in the store."""
    packed = encoded._meta

    def fill(buffer: Tensor) -> Iterator[int]:
        buffer[:] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        yield len(packed)

    return Source(len(packed), fill)


def write_object(encoded: Encoded, lend: Callable[[int], Tensor]) -> NDArray[np.uint8]:
    """``[n]``: what goes into the store. O(bytes)."""
    index = _index_bytes(encoded)
    first = _first_byte(len(index))
    size = first + encoded.message.wire_bytes
    buffer = lend(size)
    for _ in encoded.fill(buffer[first:]):
        pass
    array = buffer.numpy()[:size]
    array[:_WORD] = np.frombuffer(len(index).to_bytes(_WORD, "little"), np.uint8)
    array[_WORD : _WORD + len(index)] = np.frombuffer(index, np.uint8)
    return array


def _first_byte(index_bytes: int) -> int:
    """Behind the index."""
    return -(-(_WORD + index_bytes) // ALIGNMENT) * ALIGNMENT


def _index_bytes(encoded: Encoded) -> bytes:
    plan, batch = encoded._layout, encoded._batch
    columns = [
        _Column(piece.start, piece.what.wire_row_bytes, piece.restored != piece.start)
        for _, piece in sorted(plan.columns[0].items())
        if piece.what.row_bytes
    ]
    rows = list(accumulate((rollout.num_tokens for rollout in batch.rollouts), initial=0))
    tensors = [
        [(piece.start, piece.what.row_bytes) for _, piece in sorted(own.items()) if piece.what.row_bytes]
        for own in plan.tensors
    ]
    return _encode_index(_Index(columns, rows, tensors))


# --- controller ------------------------------------------------------------------------------------------------------


def read_bundle(header: RolloutHeader, buffer: Tensor) -> list[Rollout]:
    """The rollouts of a bundle whose columns follow the description, as views of ``buffer`` (``[total_bytes]``)."""
    message = Batch(
        step=0,
        rank=0,
        dp_size=1,
        meta_bytes=header.meta_bytes,
        meta_crc=header.meta_crc,
        wire_bytes=header.wire_bytes,
        total_bytes=header.total_bytes,
    )
    return list(decode(message, buffer).rollouts)


def read_stored_bundle(header: RolloutHeader, buffer: Tensor, stored: Stored, owner: Owner) -> list[Rollout]:
    """The rollouts of a bundle, without their payload. O(rollouts x columns).

    Not checked again: it was where the rollouts were made, and whoever can call an actor can run code in it.
    """
    meta = unchecked_description(buffer[: header.meta_bytes].numpy().tobytes())
    longest = max(meta.lengths)
    columns = {column.name: _on_meta(column.dtype, (longest, *column.shape)) for column in meta.columns}
    padding = frozenset(meta.padding)
    return [
        _stored_rollout(
            tokens={name: column[:length] for name, column in columns.items()},
            scalars=meta.scalars[index] or _NOTHING,
            tensors={t.name: _on_meta(t.dtype, t.shape) for t in meta.tensors[index]} or _NOTHING,
            metadata=meta.metadata[index] or _NOTHING,
            rollout_id=meta.ids[index],
            group_id=meta.group_ids[index],
            execution_id=execution_id(meta, index),
            version=meta.versions[index],
            cost=meta.costs[index],
            prefix=prefix(meta, index),
            is_padding=index in padding,
            num_tokens=length,
            num_loss_tokens=meta.loss_tokens[index],
            loss_tokens=meta.loss_tokens[index],
            gone="",
            owner=owner,
            key=index,
            lease=stored,
        )
        for index, length in enumerate(meta.lengths)
    ]


_NOTHING: dict[str, Any] = {}  # one for all: fewer objects for the garbage collector


def _stored_rollout(**fields: object) -> RemoteRollout:
    """A rollout from a description that was checked: no second validation."""
    rollout = RemoteRollout.__new__(RemoteRollout)
    for name, value in fields.items():
        object.__setattr__(rollout, name, value)
    return rollout


def _on_meta(dtype: int, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=SUPPORTED_DTYPES[dtype], device="meta")


# --- rank ------------------------------------------------------------------------------------------------------------

Fetch = Callable[[Sequence[Any]], "Sequence[NDArray[np.uint8] | Exception]"]


def fetch_objects(references: Sequence[Any]) -> list[NDArray[np.uint8] | Exception]:
    """The arrays, as they lie in this node's store; or why one is gone. Blocks while they come from other nodes."""
    import ray

    try:
        return list(ray.get(list(references)))
    except ray.exceptions.RayError:
        found: list[NDArray[np.uint8] | Exception] = []
        for one in references:
            try:
                found.append(ray.get(one))
            except ray.exceptions.RayError as error:
                found.append(error)
        return found


class ObjectStore(PayloadSource):
    """Payloads that lie in Ray's object store, for a rank."""

    def __init__(self, fetch: Fetch = fetch_objects) -> None:
        self._fetch = fetch

    def read(self, wanted: Sequence[WantedPayload]) -> Mapping[int, str]:
        """Keys are places in the objects. Asks Ray once: it brings what lies on other nodes side by side."""
        distinct = list(dict.fromkeys(one.reference for one in wanted))
        found = dict(zip(distinct, self._fetch(distinct), strict=True))
        opened = {one: _Object(array) for one, array in found.items() if not isinstance(array, Exception)}
        gone: dict[int, str] = {}
        for number, one in enumerate(wanted):
            if one.reference in opened:
                opened[one.reference].read(one.key, one.pieces, one.part)
            else:
                gone[number] = type(found[one.reference]).__name__
        return gone

    def close(self) -> None:
        """Nothing to release; a fetch ends when Ray has found the object, or given it up."""


class _Object:
    """An object of :func:`write_object`."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        size = int.from_bytes(array[:_WORD].tobytes(), "little")
        self._index = _decode_index(array[_WORD : _WORD + size].tobytes())
        self._bytes = array[_first_byte(size) :]

    def read(self, place: int, targets: Sequence[Tensor], part: Slice | None = None) -> None:
        """Copy a rollout's columns, or a part of them, then its tensors, each by name. O(bytes)."""
        row, end = self._index.rows[place : place + 2]
        columns = self._index.columns
        left = iter(targets)
        for column in columns:
            start, stop = (column.start + at * column.row_bytes for at in (row, end))
            rows = self._bytes[start:stop].reshape(end - row, column.row_bytes)
            if part is not None:
                held = np.zeros((part.num_rows, column.row_bytes), np.uint8)
                for at, first, last in part.spans:
                    held[at : at + last - first] = rows[first:last]
                _copy(held[:-2], next(left), column)
                _copy(held[-2:], next(left), column)
            else:
                _copy(rows, next(left), column)
        for target, (start, size) in zip(left, self._index.tensors[place], strict=True):
            np.copyto(target.numpy(), self._bytes[start : start + size])


def _copy(rows: NDArray[np.uint8], target: Tensor, column: _Column) -> None:
    """``[n, row_bytes]`` -> the bytes of the same rows as they are trained on."""
    if column.narrowed:
        np.copyto(target.numpy().view(np.int64), rows.reshape(-1).view(np.int32))
    else:
        np.copyto(target.numpy(), rows.reshape(-1))
