"""Where the bytes of a header's rollouts lie in memory: both ends compute it, and nothing of it is on the wire. Pure.

::

    memory   block 0: column a | column b | ... | tensors of its rollouts || block 1: ... || room for widened columns

A column of a block holds the rows of the block's rollouts, one after the other, so a packed micro-batch is one view per
column. In a shared block these are each rollout's two chunks, and then the two rows behind the chunks of each. Every
piece begins at a multiple of 64 bytes and takes at least 64, so the memory there is bounds the work of laying out.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from stream_balancer.errors import WireError
from stream_balancer.types.shared import chunk_tokens
from stream_balancer.wire.header import Column, Header, Shared

__all__ = ["ALIGNMENT", "MAX_BYTES", "Block", "Layout", "align", "lay_out", "runs_of", "spans_of"]

ALIGNMENT = 64
"""Bytes; a cache line, and what torch's own allocator gives."""
MAX_BYTES = 2**40
"""Of all rollouts of one header."""
_FIRST = attrgetter("first")


class Block(NamedTuple):
    """A block's place. Offsets in bytes."""

    first: int
    stop: int
    """Its rollouts."""
    starts: list[int]
    """[n + 1] row at which each rollout starts in every column."""
    rows: int
    """Of every column, those behind the chunks included."""
    shared: Shared | None
    columns: list[int]
    """Offset of each column."""
    restored: dict[int, int]
    """Offsets of narrowed columns once they are widened."""
    tensors: list[list[int]]
    """[n] offsets of each rollout's own tensors; empty where no rollout has any."""


class Layout(NamedTuple):
    """Where everything lies."""

    blocks: list[Block]
    widths: list[int]
    """Bytes of a row of each column, as it travels."""
    wire_bytes: int
    total_bytes: int
    """With the room for widened columns."""

    def block_of(self, rollout: int) -> Block:
        """The block that it is in. O(log(blocks))."""
        return self.blocks[bisect_right(self.blocks, rollout, key=_FIRST) - 1]


def align(size: int) -> int:
    """The next multiple of :data:`ALIGNMENT`, at least one of it."""
    return -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT


def lay_out(header: Header, max_bytes: int) -> Layout:
    """Raises WireError where more than ``max_bytes`` would be needed. O(columns x blocks + rollouts)."""
    widths = [column.row_bytes for column in header.columns]
    narrowed = header.narrowed
    for number in narrowed:
        widths[number] //= 2
    shared = {one.block: one for one in header.shared}
    at = 0
    blocks: list[Block] = []
    for number, (first, stop) in enumerate(pairwise(accumulate(header.blocks, initial=0))):
        one = shared.get(number)
        starts = list(accumulate(_held(header.lengths[first:stop], one), initial=0))
        rows = starts[-1] + (0 if one is None else 2 * (stop - first))
        columns = []
        for width in widths:
            columns.append(at)
            at += align(rows * width)
            if at > max_bytes:
                raise _too_much(max_bytes)
        tensors = []
        for own in header.tensors[first:stop]:
            tensors.append(_offsets(own, at))
            at = tensors[-1].pop()
            if at > max_bytes:
                raise _too_much(max_bytes)
        blocks.append(Block(first, stop, starts, rows, one, columns, {}, tensors))
    wire_bytes = at
    for block in blocks if narrowed else ():
        for number in narrowed:
            block.restored[number] = at
            at += align(2 * block.rows * widths[number])
    if at > max_bytes:
        raise _too_much(max_bytes)
    return Layout(blocks, widths, wire_bytes, at)


def _held(lengths: list[int], shared: Shared | None) -> list[int]:
    if shared is None:
        return lengths
    return [2 * chunk_tokens(length, len(shared.cp_group)) for length in lengths]


def _offsets(tensors: list[Column], at: int) -> list[int]:
    return list(accumulate((align(tensor.row_bytes) for tensor in tensors), initial=at))


def _too_much(max_bytes: int) -> WireError:
    return WireError(f"more than {max_bytes} bytes would be needed")


def runs_of(header: Header, layout: Layout) -> tuple[int, ...]:
    """What comes along as (offset, size, offset, size, ...): all but holes."""
    runs: list[int] = []
    at = 0
    absent = sorted(span for hole in header.holes for span in spans_of(header, layout, hole.rollout))
    for start, size in [*absent, (layout.wire_bytes, 0)]:
        if start > at:
            runs += (at, start - at)
        at = start + size
    return tuple(runs)


def spans_of(header: Header, layout: Layout, rollout: int) -> list[tuple[int, int]]:
    """(offset, size) of all pieces of a hole, by name, which is the order in which its owner sends them: columns that
    are not late, each with the rows behind its chunks, and then tensors."""
    block = layout.block_of(rollout)
    place = rollout - block.first
    row, end = block.starts[place : place + 2]
    behind = block.starts[-1] + 2 * place
    spans = []
    for number, column in sorted(enumerate(header.columns), key=lambda its: its[1].name):
        if number not in header.late:
            start, width = block.columns[number], column.row_bytes
            spans.append((start + row * width, (end - row) * width))
            if block.shared is not None:
                spans.append((start + behind * width, 2 * width))
    if block.tensors:
        own = zip(header.tensors[rollout], block.tensors[place], strict=True)
        spans += [(at, tensor.row_bytes) for tensor, at in sorted(own, key=lambda its: its[0].name)]
    return [(at, size) for at, size in spans if size]
