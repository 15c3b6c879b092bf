"""Bytes that travel behind a message: bytes, and where in the receiver's memory they belong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["NOTHING", "Memory", "Payload"]

Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""``[size]`` uint8."""


class Payload(NamedTuple):
    """Bytes to be sent, in pieces, from where they lie."""

    total: int = 0
    """Bytes of memory that the receiver needs: with what it will fetch elsewhere."""
    runs: tuple[int, ...] = ()
    """Parts that come now: offset, size, offset, size, ..."""
    pieces: Sequence[Any] = ()
    """Bytes of the pieces, in order; they must not change until they were sent."""

    @classmethod
    def of(cls, *pieces: Any) -> Payload:
        """All of it, in order."""
        total = sum(memoryview(piece).nbytes for piece in pieces)
        return cls(total, (0, total) if total else (), pieces)


NOTHING = Payload()
