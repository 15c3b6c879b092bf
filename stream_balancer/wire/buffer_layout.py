"""Where the pieces of a rank batch lie in its buffer: follows from the description, at both ends. Pure.

::

    buffer    | description | micro-batch 0: column a | column b | ... | micro-batch 1: ... | rollouts' own tensors |

Every piece starts at a multiple of 64 bytes. Offsets are not announced, so no announced offset can point outside; the
size that follows must be the size that came. Within a buffer a micro-batch's column is one contiguous slice. Behind the
bytes that travel there is room for columns that travel narrowed, int64 as int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire.description import Description, TensorSpec

__all__ = ["ALIGNMENT", "Layout", "Piece", "align", "lay_out", "user_view", "wire_view"]

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies."""

    columns: list[dict[str, Piece]]
    """``[micro_batch][name]``."""
    tensors: list[dict[str, Piece]]
    """``[rollout][name]``."""
    wire_bytes: int
    total_bytes: int


def align(n: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def lay_out(meta: Description, meta_bytes: int, max_bytes: int) -> Layout:
    """Lay out a buffer. Every piece takes at least 64 bytes, so the work is bounded by ``max_bytes``. O(pieces)."""
    at = align(meta_bytes)
    columns: list[dict[str, Piece]] = []
    first = 0
    for count in meta.micro_batches:
        rows = sum(meta.lengths[first : first + count])
        first += count
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
    return Layout(columns, tensors, wire_bytes, at)


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
