"""A message on a socket: the number of its bytes, their checksum, the bytes; then its buffers. Pure."""

from __future__ import annotations

import struct
import zlib

from stream_balancer.errors import WireError
from stream_balancer.wire.messages import Message, decode_message, encode_message

__all__ = ["HEADER_BYTES", "MAX_MESSAGE_BYTES", "frame", "read_header", "read_message"]

MAX_MESSAGE_BYTES = 4 * 2**20
"""Bytes of a message without its buffers: as many entries and characters as any may have."""
_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


def frame(message: Message, sizes: tuple[int, ...] = ()) -> bytes:
    """What to send before buffers of these sizes. Raises ValueError if the message is too long."""
    raw = encode_message(message, sizes)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(raw)} bytes is too long: put less at once")
    return _HEADER.pack(len(raw), zlib.crc32(raw)) + raw


def read_header(header: bytes | bytearray | memoryview) -> tuple[int, int]:
    """``HEADER_BYTES`` -> (bytes that follow, their checksum). Raises WireError before anything is allocated."""
    size, crc = _HEADER.unpack(header)
    if not 0 < size <= MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {size} bytes: something else is sending on this connection, or it is damaged")
    return size, crc


def read_message(raw: bytes | bytearray | memoryview, crc: int) -> tuple[tuple[int, ...], Message]:
    """(sizes of the buffers that follow, message)."""
    if zlib.crc32(raw) != crc:
        raise WireError("the checksum of a message is wrong: it was damaged on its way")
    return decode_message(bytes(raw))
