"""What a checkpoint and a journal write before a buffer: a header of 16 words that says what follows. Pure.

::

    frame   16 int64 words: magic, format, 1, 0, the fields of a Batch message, zeros, a checksum of all before it

A file may be read by another version than the one that wrote it, and may be cut short: a reader checks both before it
believes a size. On a channel there is none of this: a Batch message comes in its place.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.wire.messages import Batch

__all__ = ["FORMAT", "FRAME_BYTES", "FRAME_WORDS", "OtherProtocolError", "pack_frame", "read_frame"]

FORMAT = 4
"""Version of what this file writes to a disk."""
FRAME_WORDS = 16
"""int64 words in a frame."""
FRAME_BYTES = 8 * FRAME_WORDS
_MAGIC = int.from_bytes(b"strmbal\x01", "little")
_BATCH, _FIELDS = 1, 4  # what every frame is, and the word at which its fields begin
_ORDER = ("step", "rank", "dp_size", "meta_bytes", "wire_bytes", "total_bytes", "meta_crc")  # on the disk


class OtherProtocolError(WireError):
    """Nothing is damaged: it was written by another version of this file."""


def pack_frame(batch: Batch) -> Tensor:
    """``[16]`` int64: what goes before the buffer of ``batch``."""
    words = np.zeros(FRAME_WORDS, np.int64)
    words[:3] = _MAGIC, FORMAT, _BATCH
    words[_FIELDS : _FIELDS + len(_ORDER)] = [getattr(batch, name) for name in _ORDER]
    words[-1] = zlib.crc32(words[:-1].tobytes())
    return torch.from_numpy(words)


def read_frame(words: Tensor) -> Batch:
    """``[16]`` int64 -> the message of the buffer behind them. Raises WireError for anything this version would not
    have written."""
    raw = words.numpy()
    if raw.shape != (FRAME_WORDS,) or raw.dtype != np.int64:
        raise WireError(f"a frame is [{FRAME_WORDS}] int64, not {list(raw.shape)} {raw.dtype}")
    if raw[0] != _MAGIC:
        raise WireError("not a stream_balancer frame (wrong magic): something else was written here")
    if raw[-1] != zlib.crc32(raw[:-1].tobytes()):
        raise WireError("a frame's checksum is wrong: it was damaged or cut short")
    if raw[1] != FORMAT:
        raise OtherProtocolError(
            f"this was written in format {raw[1]}, and this version reads {FORMAT}. Install the version that wrote it"
        )
    if raw[2] != _BATCH:
        raise WireError(f"unknown kind of frame: {raw[2]}")
    fields = dict(zip(_ORDER, raw[_FIELDS : _FIELDS + len(_ORDER)].tolist(), strict=True))
    if min(fields.values()) < 0:
        raise WireError(f"a frame has negative counters: {fields}")
    return Batch(**fields)
