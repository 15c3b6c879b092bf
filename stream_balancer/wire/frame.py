"""What a checkpoint and a journal write before a buffer: a header of 16 words that says what follows. Pure.

::

    frame   16 int64 words: magic, format, 1, 0, the fields of a Batch message, zeros, a checksum of all before it

A file may be read by another version than the one that wrote it, and may be cut short: a reader checks both before it
believes a size. On a channel there is none of this: a Batch message comes in its place.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stream_balancer.errors import WireError

__all__ = ["FORMAT", "FRAME_BYTES", "FRAME_WORDS", "Frame", "OtherProtocolError", "read_frame"]

FORMAT = 3
"""Version of what this file writes to a disk."""
FRAME_WORDS = 16
"""int64 words in a frame."""
FRAME_BYTES = 8 * FRAME_WORDS
_MAGIC = int.from_bytes(b"strmbal\x01", "little")
_BATCH, _FIELDS = 1, 4  # what every frame is, and the word at which its fields begin


class OtherProtocolError(WireError):
    """Nothing is damaged: it was written by another version of this file."""


class Frame(NamedTuple):
    """What a checkpoint and a journal write before a buffer: the fields of a Batch message, always the same size."""

    step: int = -1
    rank: int = 0
    dp_size: int = 0
    meta_bytes: int = 0
    """Bytes of msgpack at the start of the buffer."""
    wire_bytes: int = 0
    """Bytes of the buffer that are written, or sent."""
    total_bytes: int = 0
    """Bytes a reader needs: the buffer, and room for columns that are narrowed."""
    meta_crc: int = 0

    def pack(self) -> Tensor:
        """``[16]`` int64: magic, format, 1, 0, the fields, zeros, a checksum of all before it."""
        words = np.zeros(FRAME_WORDS, np.int64)
        words[:3] = _MAGIC, FORMAT, _BATCH
        words[_FIELDS : _FIELDS + len(self)] = self
        words[-1] = zlib.crc32(words[:-1].tobytes())
        return torch.from_numpy(words)


def read_frame(words: Tensor) -> Frame:
    """``[16]`` int64 -> :class:`Frame`. Raises WireError for anything this version would not have written."""
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
    frame = Frame(*raw[_FIELDS : _FIELDS + len(Frame._fields)].tolist())
    if any(value < 0 for value in frame[1:]) or frame.step < -1:
        raise WireError(f"a frame has negative counters: {frame}")
    return frame
