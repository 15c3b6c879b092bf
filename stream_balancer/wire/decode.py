"""A header and the memory behind it -> rollouts, as views of that memory. Every size is checked before a view is made.

::

    decoded = decode(header, memory)    micro-batches for this rank
    decoded.mask(gone)                  lost rollouts: weight 0
    decoded.holes()                     payloads to be fetched, and their places; see client.payloads
    decoded.move(copy)                  to the trainer's device
    decoded.micro_batches               for the trainer
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, overload

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.rollouts import ExecutionSize, MicroBatch, Rollout
from stream_balancer.rollouts import tensors as layouts
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire.header import (
    MAX_BYTES,
    PER_ROLLOUT,
    Block,
    Header,
    Owner,
    lay_out,
    lists_of,
    read_header,
    spans_of,
)  # fmt: skip
from stream_balancer.wire.payload import Memory
from stream_balancer.wire.remote import Handle, Leases, RemoteRollout


class Wanted(NamedTuple):
    """A rollout whose bytes must be fetched."""

    rollout_id: str
    owner: Owner
    key: int
    places: list[memoryview]
    """Destinations, in the order of :func:`~stream_balancer.wire.encode.payload_of`."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.places))

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Copy pieces to the places in sequence; the owner may cut them anywhere. Raises WireError for a wrong total of
        bytes."""
        left = [piece for piece in reversed(list(pieces)) if piece]
        found = sum(map(len, left))
        if found != self.num_bytes:
            raise WireError(f"{found} bytes came for a payload of {self.num_bytes}")
        for place in self.places:
            at = 0
            while at < len(place):
                piece = left.pop()
                size = min(len(piece), len(place) - at)
                place[at : at + size] = piece[:size]
                at += size
                if size < len(piece):
                    left.append(piece[size:])


# fields of a rollout, in the order of lists_of()
_FIELDS = "rollout_id", "num_tokens", "num_loss_tokens", *PER_ROLLOUT


def decode(header: msgspec.Raw | bytes, memory: Memory | None) -> Decoded:
    """Micro-batches of an encoded message (see :func:`~stream_balancer.wire.encode.encode`), as views of ``memory``.
    Sizes are checked; values are trusted, since the put checked them. Raises WireError for a header that encode cannot
    make. O(columns x blocks + rollouts)."""
    return Decoded(read_header(header), memory)


class Decoded:
    """Micro-batches in received memory."""

    def __init__(self, header: Header, memory: Memory | None, *, elsewhere: bool = False) -> None:
        """``elsewhere``: no byte is in this process, and tensors are on the meta device."""
        size = MAX_BYTES if elsewhere else 0 if memory is None else memory.size
        self._header, self._layout = header, lay_out(header, size)
        # an exact match: a peer could otherwise make this process allocate unused memory
        if not elsewhere and self._layout.total_bytes != size:
            raise WireError(f"a header describes {self._layout.total_bytes} bytes, but {size} came")
        self._elsewhere = elsewhere
        self._buffer = torch.empty(0, device="meta") if memory is None else torch.from_numpy(memory)
        self._lists = lists_of(header)
        self._padding, self._masked = set(header.padding), set[int]()
        self._views: dict[torch.dtype, Tensor] = {}
        self._is_finished = False

    def __len__(self) -> int:
        return len(self._header.lengths)

    @property
    def ids(self) -> Sequence[str]:
        """Ids of all rollouts."""
        return self._header.ids

    @property
    def num_rollouts(self) -> tuple[int, ...]:
        """Number of rollouts of each micro-batch."""
        return tuple(self._header.blocks)

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """Micro-batches, one for each block, new at each call. Fill the holes first."""
        # not cached: a reference cycle would keep the memory until the garbage collector runs
        return tuple(self.micro_batch(number) for number in range(len(self._layout.blocks)))

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """Rollouts of all micro-batches, made on access."""
        self._finish()
        return _LazyRollouts(self, range(len(self)))

    # on a device

    @property
    def buffer(self) -> Tensor:
        """All bytes. Fill the holes first."""
        self._finish()
        return self._buffer

    def move(self, there: Tensor) -> None:
        """Take the same bytes from a device: micro-batches are views of these from now on."""
        self._buffer, self._views = there, {}

    # payloads elsewhere

    def holes(self) -> list[Wanted]:
        """Payloads to be fetched into ``places`` before :attr:`micro_batches` are used, without masked ones."""
        header, layout, memory, found = self._header, self._layout, self._buffer.numpy().data, list[Wanted]()
        for index, number, key in map(structs.astuple, header.holes):
            if index not in self._masked:
                places = [memory[at : at + size] for at, size in spans_of(header, layout, index)]
                found.append(Wanted(self.ids[index], header.owners[number], key, places))
        return found

    def mask(self, rollout_ids: Collection[str]) -> None:
        """Make these rollouts padding copies of zeros, so that no rank trains on them. Unknown ids are fine. Earlier
        micro-batches keep their weights. O(rollouts + bytes masked)."""
        if not rollout_ids:
            return
        gone, header = set(rollout_ids), self._header
        for index, name in enumerate(header.ids):
            if name in gone and index not in self._masked:
                self._masked.add(index)
                self._padding.add(index)
                # this object owns the header: it was read from private bytes
                header.loss_tokens[index] = 0
                its = self.fields_of(index)
                # on the device, after move()
                for tensor in (*its["tokens"].values(), *its["tensors"].values()):
                    tensor.zero_()

    # views

    def _finish(self) -> None:
        """Zero the loss masks of fetched padding copies, once, after the holes were filled."""
        if self._is_finished:
            return
        self._is_finished = True
        for index in {hole.rollout for hole in self._header.holes} & self._padding:
            # a padding copy has the payload of its original, without loss
            columns = self.fields_of(index)["tokens"]
            if "loss_mask" in columns:
                columns["loss_mask"].zero_()

    def _view(self, at: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = prod(shape)
        if not count or self._elsewhere:
            return _without_bytes(tuple(shape), dtype, self._buffer.device)
        # one cached view of each dtype: columns are slices of it
        every = self._views.get(dtype)
        if every is None:
            every = self._views[dtype] = self._buffer.view(dtype)
        first = at // dtype.itemsize
        flat = every[first : first + count]
        return flat if len(shape) == 1 else flat.view(tuple(shape))

    def _columns(self, block: Block, first: int, stop: int) -> dict[str, Tensor]:
        """Rows ``first`` to ``stop`` of all columns."""
        found, widths = {}, self._layout.widths
        for number, column in enumerate(self._header.columns):
            at = block.columns[number] + first * widths[number]
            found[column.name] = self._view(at, SUPPORTED_DTYPES[column.index], (stop - first, *column.shape))
        return found

    def micro_batch(self, number: int) -> MicroBatch:
        """The micro-batch of one block."""
        self._finish()
        block = self._layout.blocks[number]
        return MicroBatch(
            _LazyRollouts(self, range(block.first, block.stop)),
            tuple(block.lengths),
            partial(self._flat, block),
            self._execution_sizes(block),
        )

    def _execution_sizes(self, block: Block) -> tuple[ExecutionSize, ...] | None:
        return tuple(ExecutionSize(*size) for size in self._header.execution_sizes[block.first : block.stop]) or None

    def _flat(self, block: Block) -> layouts.FlatColumns:
        """Views of one micro-batch's columns. O(columns + rollouts)."""
        header, first, stop = self._header, block.first, block.stop
        scalars = header.scalars[first:stop]
        # a scalar that only some rollouts have makes no column
        names = [name for name in scalars[0] if all(name in row for row in scalars)] if scalars else []
        # a padding copy has its original's tokens, and must not count
        weights = [0.0 if index in self._padding else 1.0 for index in range(first, stop)]
        return layouts.FlatColumns(
            tokens=self._columns(block, 0, block.starts[-1]),
            lengths=tuple(block.lengths),
            scalars={name: [row[name] for row in scalars] for name in names},
            weights=torch.tensor(weights, dtype=torch.float32, device=self._buffer.device),
            executions=self._execution_sizes(block) or [(1, tokens) for tokens in header.loss_tokens[first:stop]],
        )

    def rollout(self, index: int) -> Rollout:
        """One rollout. O(columns)."""
        return Rollout.unchecked(**self.fields_of(index))

    def fields_of(self, index: int) -> dict[str, Any]:
        """All fields of a rollout."""
        fields, block = PER_ROLLOUT | {"tensors": {}}, self._layout.block_of(index)
        for name, its in zip(_FIELDS, self._lists, strict=True):
            # an empty list means the default for all rollouts
            if its:
                fields[name] = its[index]
        fields["tokens"] = self._columns(block, *block.rows_of(index))
        fields["is_padding"] = index in self._padding
        if block.tensors:
            own = zip(self._header.tensors[index], block.tensors[index - block.first], strict=True)
            fields["tensors"] = {one.name: self._view(at, one.dtype, one.shape) for one, at in own}
        return fields


class _LazyRollouts(Sequence[Rollout]):
    """Rollouts, made on access in about 10 us each, once."""

    def __init__(self, decoded: Decoded, places: range) -> None:
        self._decoded, self._places = decoded, places
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
            made = self._made[place] = self._decoded.rollout(place)
        return made

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts>"


# --- puts ------------------------------------------------------------------------------------------------------------


def decode_rollouts(
    header: msgspec.Raw | bytes, memory: Memory | None, leases_of: Callable[[Owner], Leases] | None = None
) -> list[Rollout]:
    """Rollouts of a put. ``leases_of``: leases of an owner, if payloads may be kept. Checks types, ranges and sizes;
    the maker of the rollouts checked values. Raises WireError for a header that
    :func:`~stream_balancer.wire.encode.encode_rollouts` cannot make."""
    read = read_header(header)
    # a padding copy passes here: the balancer refuses it
    if len(read.blocks) != 1 or read.execution_sizes:
        raise WireError("a put holds rollouts, and nothing that only a step has")
    if read.holes:
        return _kept_rollouts(read, memory, leases_of)
    decoded = Decoded(read, memory)
    return [decoded.rollout(index) for index in range(len(read.ids))]


def _kept_rollouts(header: Header, memory: Memory | None, leases_of: Callable[[Owner], Leases] | None) -> list[Rollout]:
    has_bytes = memory is not None and memory.size > 0
    if leases_of is None or has_bytes or len(header.holes) != len(header.lengths):
        raise WireError("a put keeps payloads, and may not")
    if len({(hole.owner, hole.key) for hole in header.holes}) < len(header.holes):
        raise WireError("a payload is named twice")
    decoded, found = Decoded(header, None, elsewhere=True), list[Rollout]()
    for index, hole in enumerate(header.holes):
        owner = header.owners[hole.owner]
        handle, lease = Handle(owner, hole.key), leases_of(owner).hold(hole.key)
        found.append(RemoteRollout.unchecked(**decoded.fields_of(index), handle=handle, lease=lease))
    return found


@lru_cache(4096)
def _without_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # cached: without bytes, all rollouts of one length can share a tensor
    return torch.empty(shape, dtype=dtype, device=device)
