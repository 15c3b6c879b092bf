"""What a checkpoint and a journal write before a header and its memory, and how they are read again. Pure.

::

    64 bytes   magic, format, bytes of the header, bytes of memory, checksum of these and the header
    header     up to a multiple of 64 bytes
    memory

A file may be read by another version than the one that wrote it, and may be cut short: both are checked before a size
is believed.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from stream_balancer.errors import WireError
from stream_balancer.wire.encode import Encoded
from stream_balancer.wire.layout import ALIGNMENT, align
from stream_balancer.wire.payload import Memory

__all__ = ["FORMAT", "OtherFormatError", "from_bytes", "to_bytes"]

FORMAT = 5
"""Version of what this file writes to a disk."""
_MAGIC = b"strmbal\x01"
_PREFIX = struct.Struct("<8sqqqI")


class OtherFormatError(WireError):
    """Nothing is damaged: it was written by another version of the library."""


def to_bytes(encoded: Encoded) -> bytes:
    """All of it, in one copy. Raises ValueError where some of it lies elsewhere."""
    header, payload = encoded
    if payload.runs != (0, payload.total):
        raise ValueError("what lies elsewhere, or is narrowed, cannot be written")
    sizes = (_MAGIC, FORMAT, len(bytes(header)), payload.total)
    prefix = _PREFIX.pack(*sizes, _checksum(sizes, header)).ljust(ALIGNMENT, b"\0")
    return b"".join([prefix, bytes(header).ljust(align(len(bytes(header))), b"\0"), *payload.pieces])


def from_bytes(written: Memory) -> tuple[msgspec.Raw, Memory]:
    """Header and memory, a view. Raises WireError for damaged bytes, OtherFormatError for another version's."""
    if written.size < ALIGNMENT or written[:8].tobytes() != _MAGIC:
        raise WireError("nothing that stream_balancer has written, or too short")
    _, version, header_bytes, total, crc = _PREFIX.unpack(written[: _PREFIX.size].tobytes())
    if version != FORMAT:
        raise OtherFormatError(
            f"this was written in format {version}, and this version reads {FORMAT}. Install the version that wrote it"
        )
    start = ALIGNMENT + align(header_bytes)
    if min(header_bytes, total) < 0 or start + total != written.size:
        raise WireError(f"{written.size} bytes, where {start + total} were written: damaged or cut short")
    header = msgspec.Raw(written[ALIGNMENT : ALIGNMENT + header_bytes].tobytes())
    if crc != _checksum((_MAGIC, version, header_bytes, total), header):
        raise WireError("the checksum of a header is wrong: damaged")
    return header, written[start:]


def _checksum(sizes: tuple[bytes, int, int, int], header: msgspec.Raw) -> int:
    return zlib.crc32(bytes(header), zlib.crc32(_PREFIX.pack(*sizes, 0)))
