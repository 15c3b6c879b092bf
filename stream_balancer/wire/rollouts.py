"""One rollout <-> one buffer: what a producer puts. Pure.

::

    producer    encode_rollout(rollout)             header and buffer: description | columns | tensors
                encode_rollout(rollout, kept=True)  header and description; the producer keeps the payload
    controller  decode_rollout(header, buffer)      Rollout, its tensors are views of the buffer
                decode_kept(header, buffer, ...)    RemoteRollout, all but the payload

The buffer is laid out as that of a batch of one rollout (:mod:`stream_balancer.wire.rank_batch`). A receiver checks the
header before it allocates. A wrong description raises :class:`~stream_balancer.errors.WireError`; one that is in order,
but describes what no Rollout may be, :class:`~stream_balancer.errors.RolloutError`: that rollout is refused, and the
connection goes on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.types import SUPPORTED_DTYPES, Rollout
from stream_balancer.wire.buffer_layout import ALIGNMENT, Layout, align, lay_out, user_view
from stream_balancer.wire.description import (
    Description,
    TensorSpec,
    description_of,
    execution_id,
    pack_description,
    prefix,
    read_description,
)
from stream_balancer.wire.messages import Owner, RolloutHeader
from stream_balancer.wire.partial_batch import Lease, RemoteRollout
from stream_balancer.wire.rank_batch import bytes_of

__all__ = ["EncodedRollout", "check_header", "decode_kept", "decode_rollout", "encode_rollout"]

_MAX_BYTES = 2**62
_ZEROS = torch.zeros(ALIGNMENT, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class EncodedRollout:
    """A rollout, ready to be sent."""

    header: RolloutHeader
    """Its ``payload`` is still to be set where the producer keeps it."""
    _packed: bytes
    _rollout: Rollout | None
    """Whose columns and tensors follow the description; None: they are kept."""

    def pieces(self) -> list[Tensor]:
        """``[n]`` uint8 each, ``header.wire_bytes`` in all; no token is copied that lies contiguous on the CPU.
        O(columns)."""
        found = [torch.frombuffer(bytearray(self._packed), dtype=torch.uint8)]
        if self._rollout is not None:
            rollout = self._rollout
            for tensor in chain(rollout.tokens.values(), rollout.tensors.values()):
                found += _padding(found[-1].numel())
                found.append(bytes_of(tensor) if tensor.numel() else _ZEROS)  # an empty one has a place, too
        return found + _padding(found[-1].numel())

    def fill(self, buffer: Tensor) -> Iterator[int]:
        """Write into ``buffer`` (``[wire_bytes]`` uint8); yields how many leading bytes are final. O(bytes)."""
        at = 0
        for piece in self.pieces():
            buffer[at : at + piece.numel()] = piece
            at += piece.numel()
            yield at


def encode_rollout(rollout: Rollout, *, kept: bool = False) -> EncodedRollout:
    """Describe ``rollout``. Copies no token yet. ``kept``: only the description will be sent.

    Raises RolloutError if it was changed after it was made, and cannot be written any more. O(columns).

    Examples:
        >>> rollout = Rollout(tokens={"input_ids": torch.arange(3)}, rollout_id="r1")
        >>> encoded = encode_rollout(rollout)
        >>> decode_rollout(encoded.header, torch.cat(encoded.pieces())).tokens["input_ids"]
        tensor([0, 1, 2])
    """
    meta = description_of([rollout], [1], narrow=False)
    packed = pack_description(meta, [rollout])
    total = lay_out(meta, len(packed), _MAX_BYTES).total_bytes
    wire = align(len(packed)) if kept else total
    header = RolloutHeader(len(packed), zlib.crc32(packed), wire, total)
    return EncodedRollout(header, packed, None if kept else rollout)


def check_header(header: RolloutHeader, size: int) -> None:
    """Refuse a header that cannot be true of a buffer of ``size`` bytes. Before any allocation."""
    whole = header.payload is not None or header.wire_bytes == header.total_bytes
    if not (0 < header.meta_bytes <= header.wire_bytes == size <= header.total_bytes and whole) or size % ALIGNMENT:
        raise WireError(f"a put announces impossible sizes: {header}, and {size} bytes behind it")


def decode_rollout(header: RolloutHeader, buffer: Tensor) -> Rollout:
    """The rollout that a checked header and its buffer hold, with every check that a Rollout makes. O(columns)."""
    meta, plan = _described(header, buffer)
    return Rollout(
        tokens={name: user_view(buffer, piece) for name, piece in plan.columns[0].items()},
        tensors={name: user_view(buffer, piece) for name, piece in plan.tensors[0].items()},
        **_plain_fields(meta),
    )


def decode_kept(header: RolloutHeader, buffer: Tensor, owner: Owner, lease: Lease) -> RemoteRollout:
    """The rollout whose payload ``owner`` keeps under ``header.payload``, for as long as ``lease`` lives."""
    if header.payload is None:
        raise WireError("a put does not say under which number its payload is kept")
    meta, _ = _described(header, buffer)
    length = meta.lengths[0]
    return RemoteRollout(
        tokens={column.name: _on_meta(column, (length, *column.shape)) for column in meta.columns},
        tensors={tensor.name: _on_meta(tensor, tensor.shape) for tensor in meta.tensors[0]},
        **_plain_fields(meta),
        owner=owner,
        key=header.payload,
        lease=lease,
        loss_tokens=meta.loss_tokens[0],
    )


def _plain_fields(meta: Description) -> dict[str, Any]:
    """All but columns and tensors, of the one rollout described."""
    return {
        "scalars": meta.scalars[0],
        "metadata": meta.metadata[0],
        "rollout_id": meta.ids[0],
        "group_id": meta.group_ids[0],
        "execution_id": execution_id(meta, 0),
        "version": meta.versions[0],
        "cost": meta.costs[0],
        "prefix": prefix(meta, 0),
        "is_padding": bool(meta.padding),
    }


def _described(header: RolloutHeader, buffer: Tensor) -> tuple[Description, Layout]:
    packed = buffer[: header.meta_bytes].numpy().tobytes()
    meta = read_description(packed, header.meta_crc, "a put", check_rollouts=False)
    if len(meta.ids) != 1 or meta.shared or any(column.dtype != column.wire_dtype for column in meta.columns):
        raise WireError("a put holds one whole rollout, and nothing of it is narrowed")
    plan = lay_out(meta, header.meta_bytes, header.total_bytes)
    if plan.total_bytes != header.total_bytes:
        raise WireError(f"a put's description needs {plan.total_bytes} bytes, but it announced {header.total_bytes}")
    return meta, plan


def _padding(size: int) -> list[Tensor]:
    """What follows a piece of ``size`` bytes, so that the next one is aligned."""
    return [_ZEROS[: -size % ALIGNMENT]] if size % ALIGNMENT else []


def _on_meta(described: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=SUPPORTED_DTYPES[described.dtype], device="meta")
