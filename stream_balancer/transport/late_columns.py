"""Columns that a rank with a role has computed, on their way to the controller: what both ends do with them. Pure.

A column has a number for each token of the rank batch, its micro-batches one after the other. The controller knows how
many that are, so a size that is announced is checked before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Outgoing, Source
from stream_balancer.values import SUPPORTED_DTYPES
from stream_balancer.wire.messages import MAX_LATE_COLUMNS, LateColumn, StepColumns, StepHeld, StepReport
from stream_balancer.wire.rank_batch import bytes_of

__all__ = ["GivenColumns", "check_columns", "flat_columns", "pack_columns", "read_columns"]


@dataclass(frozen=True, eq=False, slots=True)
class GivenColumns:
    """What a rank with a role reports of a step."""

    done: StepColumns
    columns: Mapping[str, Tensor]
    """[T] each, of the rank batch."""

    @property
    def step(self) -> int:
        """Its number."""
        return self.done.step


def flat_columns(columns: Mapping[str, Sequence[Tensor]], num_tokens: Sequence[int]) -> dict[str, Tensor]:
    """A trainer's ``[T]`` of each micro-batch -> ``[T]`` of the rank batch, on the CPU. ``num_tokens``: of each
    micro-batch. Raises ValueError, naming the column, for what does not fit."""
    if not 0 < len(columns) <= MAX_LATE_COLUMNS:
        raise ValueError(f"batch.ack(columns=): 1 to {MAX_LATE_COLUMNS} columns, not {len(columns)}")
    return {name: _flat(name, parts, num_tokens) for name, parts in columns.items()}


def _flat(name: str, parts: Sequence[Tensor], num_tokens: Sequence[int]) -> Tensor:
    if [tuple(part.shape) for part in parts] != [(number,) for number in num_tokens]:
        raise ValueError(
            f"batch.ack(columns=): {name!r} has shapes {[list(part.shape) for part in parts]}, but must have a number "
            f"for each token of each micro-batch: {[[number] for number in num_tokens]}"
        )
    flat = torch.cat([part.detach() for part in parts]).cpu()
    if flat.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"batch.ack(columns=): {name!r} has dtype {flat.dtype}, which cannot travel")
    return flat


def pack_columns(done: StepReport | StepHeld, columns: Mapping[str, Tensor]) -> Outgoing:
    """The report of a step, and a buffer for each of its columns."""
    described = tuple(LateColumn(name, SUPPORTED_DTYPES.index(column.dtype)) for name, column in columns.items())
    message = StepColumns(**msgspec.structs.asdict(done), columns=described)
    return Outgoing(message, [_source(bytes_of(column)) for column in columns.values()])


def _source(column: Tensor) -> Source:
    def fill(buffer: Tensor) -> Iterator[int]:
        buffer[: column.numel()] = column
        yield column.numel()

    return Source(column.numel(), fill, lambda: [column])


def check_columns(message: StepColumns, sizes: Sequence[int], num_tokens: int) -> None:
    """Before anything is allocated. ``num_tokens``: of the rank batch. Raises WireError."""
    names = {column.name for column in message.columns}
    if len(names) != len(message.columns) or any(one.dtype >= len(SUPPORTED_DTYPES) for one in message.columns):
        raise WireError(f"step {message.step}: a column comes twice, or has an unknown dtype")
    if list(sizes) != [num_tokens * SUPPORTED_DTYPES[column.dtype].itemsize for column in message.columns]:
        raise WireError(f"step {message.step}: columns of {list(sizes)} bytes do not fit its {num_tokens} tokens")


def read_columns(message: StepColumns, buffers: Sequence[Tensor]) -> GivenColumns:
    """What was checked, and has arrived: views of the buffers."""
    return GivenColumns(
        message,
        {
            column.name: buffer.view(SUPPORTED_DTYPES[column.dtype])
            for column, buffer in zip(message.columns, buffers, strict=True)
        },
    )
