"""What a checkpoint and a journal write before a header and its memory, and how they are read again. Pure.

::

    frame    16 int64 words: magic, format, bytes of the header, bytes of memory, checksum of the header, zeros,
             checksum of all before it
    header   up to a multiple of 64 bytes
    memory

A file may be read by another version than the one that wrote it, and may be cut short: both are checked before a size
is believed. All versions have the first two words and the last one.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from stream_balancer.errors import WireError
from stream_balancer.wire.encode import Encoded
from stream_balancer.wire.header import align
from stream_balancer.wire.payload import Memory

__all__ = ["FORMAT", "OtherFormatError", "from_bytes", "to_bytes"]

FORMAT = 5
"""Version of what this file writes to a disk."""
_MAGIC = b"strmbal\x01"
_FRAME = struct.Struct("<8s4q80x")
_CRC = struct.Struct("<q")
_FRAME_BYTES = _FRAME.size + _CRC.size


class OtherFormatError(WireError):
    """Nothing is damaged: it was written by another version of the library."""


def to_bytes(encoded: Encoded) -> bytes:
    """All of it, in one copy. Raises ValueError where some of it lies elsewhere."""
    header, payload = bytes(encoded.header), encoded.payload
    if payload.runs != (0, payload.total):
        raise ValueError("what lies elsewhere, or is narrowed, cannot be written")
    frame = _FRAME.pack(_MAGIC, FORMAT, len(header), payload.total, zlib.crc32(header))
    return b"".join([frame, _CRC.pack(zlib.crc32(frame)), header.ljust(align(len(header)), b"\0"), *payload.pieces])


def from_bytes(written: Memory) -> tuple[msgspec.Raw, Memory]:
    """Header and memory, a view. Raises WireError for damaged bytes, OtherFormatError for another version's."""
    frame = written[:_FRAME_BYTES].tobytes()
    if not frame.startswith(_MAGIC) or len(frame) < _FRAME_BYTES:
        raise WireError("nothing that stream_balancer has written, or cut short")
    _, version, header_bytes, total, crc = _FRAME.unpack_from(frame)
    if _CRC.unpack_from(frame, _FRAME.size) != (zlib.crc32(frame[: _FRAME.size]),):
        raise WireError("the checksum of a frame is wrong: it was damaged")
    if version != FORMAT:
        raise OtherFormatError(
            f"this was written in format {version}, and this version reads {FORMAT}. Install the version that wrote it"
        )
    start = _FRAME_BYTES + align(header_bytes)
    if min(header_bytes, total) < 0 or start + total != written.size:
        raise WireError(f"{written.size} bytes, where {start + total} were written: it was cut short")
    header = written[_FRAME_BYTES : _FRAME_BYTES + header_bytes].tobytes()
    if crc != zlib.crc32(header):
        raise WireError("the checksum of a header is wrong: it was damaged")
    return msgspec.Raw(header), written[start:]
