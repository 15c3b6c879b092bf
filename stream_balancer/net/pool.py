"""Memory to receive into, used again once the last view over it has died. Fresh memory costs as much in page faults as
receiving into it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from stream_balancer.wire.payload import Memory

_SMALL = 2**17
"""Below that malloc reuses memory by itself."""


def aligned(size: int) -> Memory:
    """Fresh memory that begins at a cache line."""
    # a cache line more than is needed, to be able to begin at one
    raw = np.empty(size + 63, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def lease(buffer: Memory, size: int, died: Callable[[], object]) -> Memory:
    """The start of a buffer. ``died`` is called when the last view over it has died, in whichever thread that is, even
    inside a garbage collection: it must take no lock."""
    # A slice would not do: numpy makes views of a slice views of the whole, and the slice dies before them.
    view = np.frombuffer(buffer.data[:size], dtype=np.uint8)
    # at exit nothing is to be given back, and the order of ends is not known
    weakref.finalize(view, died).atexit = False
    return view


def room_for(size: int) -> int:
    """Bytes of the buffer for ``size`` bytes: a few classes share buffers, in steps of an eighth."""
    # at most an eighth too large; batches of similar sizes find each other's buffers
    step = 1 << max(size.bit_length() - 4, 12)
    return -(-size // step) * step


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class Shelf(Generic[T]):
    """Idle things, up to so many bytes: the oldest go first."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self.num_bytes = 0
        self._things: list[T] = []

    def take(self, size: int) -> T | None:
        """The newest of exactly that size: it is warm. O(things)."""
        # from the end: the newest is still in the cache
        for index in range(len(self._things) - 1, -1, -1):
            if self._things[index].size == size:
                self.num_bytes -= size
                return self._things.pop(index)
        return None

    def put(self, thing: T) -> list[T]:
        """Keep it. Returns those that had to go."""
        self.num_bytes += thing.size
        self._things.append(thing)
        gone = []
        while self.num_bytes > self._keep_bytes:
            gone.append(self._things.pop(0))
            self.num_bytes -= gone[-1].size
        return gone


class Pool:
    """Idle buffers. Nobody gives one back by hand: its views are counted by the object that they all hold."""

    def __init__(self, keep_bytes: int = 2**28, allocate: Callable[[int], Memory] = aligned) -> None:
        self._allocate = allocate
        self._idle: Shelf[Memory] = Shelf(keep_bytes)
        # a deque, since it may be appended to inside a garbage collection, where no lock may be taken
        self._returned: deque[Memory] = deque()

    def take(self, size: int) -> Memory:
        """Contents undefined. In the I/O thread only."""
        # no lease: a weak reference costs more than malloc here
        if size <= _SMALL:
            return self._allocate(size)
        # they come back in whichever thread drops the last view
        while self._returned:
            buffer = self._returned.popleft()
            self._idle.put(buffer)
        room = room_for(size)
        idle = self._idle.take(room)
        buffer = self._allocate(room) if idle is None else idle
        return lease(buffer, size, lambda: self._returned.append(buffer))
