"""Where the pieces of a rank batch lie in its buffer: follows from the description, at both ends. Pure.

::

    buffer    | description | micro-batch 0: column a | column b | ... | micro-batch 1: ... | rollouts' own tensors |

Where ranks share a micro-batch, a column holds this one's two chunks of each rollout, then the two rows behind them of
each. Every piece starts at a multiple of 64 bytes. Offsets are not announced, so no announced offset can point outside;
the size that follows must be the size that came. Within a buffer a micro-batch's column is one contiguous slice. Behind
the bytes that travel there is room for columns that travel narrowed, int64 as int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.types.shared import chunk_tokens
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire.description import Description, TensorSpec

__all__ = ["ALIGNMENT", "Layout", "Piece", "Rows", "align", "lay_out", "user_view", "wire_view"]

ALIGNMENT = 64
"""Bytes; what torch's own allocator gives, and a cache line."""


class Piece(NamedTuple):
    """Where a piece lies in the buffer. Offsets in bytes."""

    what: TensorSpec
    start: int
    rows: int
    """Leading dimension of a column; -1 for a rollout's own tensor."""
    restored: int
    """Where the widened copy of a narrowed column lies; ``start`` if it is not narrowed."""


class Rows(NamedTuple):
    """Where a rollout lies in each column of its micro-batch."""

    micro_batch: int
    start: int
    stop: int
    behind: int = -1
    """The first of the two rows behind its chunks; -1 where nobody shares it."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First row and number of rows of each piece."""
        own = (self.start, self.stop - self.start)
        return [own] if self.behind < 0 else [own, (self.behind, 2)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies."""

    columns: list[dict[str, Piece]]
    """``[micro_batch][name]``."""
    tensors: list[dict[str, Piece]]
    """``[rollout][name]``."""
    rows: list[Rows]
    """``[rollout]``."""
    wire_bytes: int
    total_bytes: int


def align(n: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def lay_out(meta: Description, meta_bytes: int, max_bytes: int) -> Layout:
    """Lay out a buffer. Every piece takes at least 64 bytes, so the work is bounded by ``max_bytes``. O(pieces)."""
    at = align(meta_bytes)
    columns: list[dict[str, Piece]] = []
    places = _rows(meta)
    last = -1
    for count in meta.micro_batches:
        last += count
        rows = places[last].stop if places[last].behind < 0 else places[last].behind + 2
        here: dict[str, Piece] = {}
        for column in meta.columns:
            here[column.name] = Piece(column, at, rows, at)
            at += align(max(rows * column.wire_row_bytes, 1))
            if at > max_bytes:
                raise WireError(f"the columns need more than {max_bytes} bytes")
        columns.append(here)
    tensors: list[dict[str, Piece]] = []
    for own in meta.tensors:
        tensors.append({})
        for tensor in own:
            tensors[-1][tensor.name] = Piece(tensor, at, -1, at)
            at += align(max(tensor.row_bytes, 1))
            if at > max_bytes:
                raise WireError(f"the tensors need more than {max_bytes} bytes")
    wire_bytes = at
    for here in columns:
        for name, piece in here.items():
            if piece.what.dtype != piece.what.wire_dtype:
                here[name] = piece._replace(restored=at)
                at += align(max(piece.rows * piece.what.row_bytes, 1))
    if at > max_bytes:
        raise WireError(f"the restored columns need more than {max_bytes} bytes")
    return Layout(columns, tensors, places, wire_bytes, at)


def _rows(meta: Description) -> list[Rows]:
    """Of every rollout. O(rollouts)."""
    degrees = {one.index: len(one.cp_group) for one in meta.shared}
    found: list[Rows] = []
    for number, (first, stop) in enumerate(pairwise(accumulate(meta.micro_batches, initial=0))):
        degree = degrees.get(number)
        if degree is None:
            held = meta.lengths[first:stop]
        else:
            held = [2 * chunk_tokens(length, degree) for length in meta.lengths[first:stop]]
        ends = list(accumulate(held, initial=0))
        for place, (start, end) in enumerate(pairwise(ends)):
            found.append(Rows(number, start, end, -1 if degree is None else ends[-1] + 2 * place))
    return found


def _view(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)


def _shape(piece: Piece) -> tuple[int, ...]:
    return piece.what.shape if piece.rows < 0 else (piece.rows, *piece.what.shape)


def wire_view(buffer: Tensor, piece: Piece) -> Tensor:
    """A piece as it travels."""
    return _view(buffer, piece.start, SUPPORTED_DTYPES[piece.what.wire_dtype], _shape(piece))


def user_view(buffer: Tensor, piece: Piece) -> Tensor:
    """A piece as it was put and is trained on."""
    return _view(buffer, piece.restored, SUPPORTED_DTYPES[piece.what.dtype], _shape(piece))
