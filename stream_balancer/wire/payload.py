"""Bytes that travel behind a message, and where in the receiver's memory they belong; that memory, used again once the
last view over it has died, since fresh memory costs as much in page faults as receiving into it; and how msgpack is
read. Pure."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from stream_balancer.errors import WireError

Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""``[size]`` uint8."""
_SMALL = 2**17
"""Below that malloc reuses memory by itself."""


class Payload(NamedTuple):
    """Bytes to be sent, in pieces, from where they lie."""

    total: int = 0
    """Bytes of memory that the receiver needs: with what it will fetch elsewhere."""
    runs: tuple[int, ...] = ()
    """Parts that come now: offset, size, offset, size, ..."""
    pieces: Sequence[memoryview] | Callable[[], Sequence[memoryview]] = ()
    """``[n]`` bytes each, in order, none empty; they must not change until they were sent. Or a function that returns
    them: then the thread that sends collects them, not the loop that plans."""

    @property
    def size(self) -> int:
        """Bytes that come now."""
        return sum(self.runs[1::2])

    def views(self) -> Sequence[memoryview]:
        """Bytes of the pieces. Raises ValueError if they are more or fewer than the runs take."""
        pieces = self.pieces() if callable(self.pieces) else self.pieces
        found = sum(map(len, pieces))
        # a rollout that was changed meanwhile would shift all that follows on this connection
        if found != self.size:
            raise ValueError(f"{found} bytes behind a message that announces {self.size}")
        return pieces

    @classmethod
    def of(cls, *pieces: Any) -> Payload:
        """All of it, in order."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        total = sum(map(len, views))
        return cls(total, (0, total) if total else (), views)


NOTHING = Payload()


class Encoded(NamedTuple):
    """Ready to be sent."""

    header: Any
    """Values in msgpack, or what becomes that."""
    payload: Payload


def reader(kind: Any, what: str) -> Callable[[Any], Any]:
    """A function that reads values of this kind from msgpack. Raises WireError, which names ``what`` cannot be read."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: Any) -> Any:
        try:
            return decode(raw)
        # nested lists that are deep enough overflow the decoder's stack
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise WireError(f"{what} cannot be read: {error}") from None

    return read


# --- memory to receive into ------------------------------------------------------------------------------------------


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
