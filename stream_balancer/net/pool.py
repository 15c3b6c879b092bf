"""Memory to receive into, used again once the last view over it has died. Fresh memory costs as much in page faults as
receiving into it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from stream_balancer.wire.payload import Memory

__all__ = ["Memory", "Pool", "aligned"]

_SMALL = 2**17
"""Below that malloc reuses memory by itself."""


def aligned(size: int) -> Memory:
    """Fresh memory that begins at a cache line."""
    raw = np.empty(size + 63, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


class Pool:
    """Idle buffers. Nobody gives one back by hand: its views are counted by the object that they all hold."""

    def __init__(self, keep_bytes: int = 2**28) -> None:
        self._keep = keep_bytes
        self._idle: dict[int, list[Memory]] = {}
        self._idle_bytes = 0
        self._returned: deque[Memory] = deque()

    def take(self, size: int) -> Memory:
        """Contents undefined. In one thread only."""
        if size <= _SMALL:
            return aligned(size)
        while self._returned:  # they come back in whichever thread drops the last view
            buffer = self._returned.popleft()
            if self._idle_bytes + buffer.size <= self._keep:
                self._idle_bytes += buffer.size
                self._idle.setdefault(buffer.size, []).append(buffer)
        room = _room(size)
        fitting = self._idle.get(room)
        if fitting:
            self._idle_bytes -= room
            buffer = fitting.pop()
        else:
            buffer = aligned(room)
        lease = buffer[:size]
        weakref.finalize(lease, self._returned.append, buffer).atexit = False
        return lease


def _room(size: int) -> int:
    """Sizes of one class share buffers: steps of an eighth."""
    step = max(2 ** (size.bit_length() - 4), 2**12)
    return -(-size // step) * step
