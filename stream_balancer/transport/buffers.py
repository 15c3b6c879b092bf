"""Reusable buffers that are never overwritten while somebody may still read them: one pool, whatever the memory.

A fresh buffer of 64 MiB or more costs about as much in page faults as receiving into it, hence pools. Where memory
comes from is the allocator's business: this process's own (:class:`BufferPool`), or a file that two processes map
(``gloo.shared_memory``). How a buffer comes back differs too: its last view here dies, or the peer says that its own
has. Which idle buffer is lent next, how large a new one is and how many are kept is decided here, for all.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["BufferPool", "Pool"]

_GRAIN = 2**20  # bytes; buffers are whole MiB, so that batches of about one size share them


class _HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


B = TypeVar("B", bound=_HasBytes)


class Pool(Generic[B]):
    """Idle buffers of one kind. Safe to use from any thread."""

    def __init__(
        self, keep: int, allocate: Callable[[int], B], forget: Callable[[B], object] = lambda buffer: None
    ) -> None:
        """``keep``: how many idle buffers are kept. ``allocate(nbytes)`` makes one; :meth:`take` raises what it raises.
        ``forget`` is called with each that is let go."""
        self._keep, self._allocate, self._forget = keep, allocate, forget
        self._idle: list[B] = []  # the last one used is the last: it is warm
        self._returned: deque[B] = deque()  # on their way into _idle
        self._lock = threading.Lock()

    @property
    def num_idle(self) -> int:
        """Buffers that have come back, and may be lent again."""
        return len(self._idle) + len(self._returned)

    def take(self, size: int) -> B:
        """The smallest idle buffer of at least ``size`` bytes, or a new one; contents undefined. O(idle buffers)."""
        with self._lock:
            # Buffers come back in whichever thread drops the last view; they are sorted in here, under the lock.
            while self._returned:
                self._idle.append(self._returned.popleft())
            self._let_go_of_oldest(max(len(self._idle) - self._keep, 0))
            fitting = [index for index, buffer in enumerate(self._idle) if buffer.nbytes >= size]
            if fitting:  # of equal ones the last: min() takes the first that it sees
                return self._idle.pop(min(reversed(fitting), key=lambda index: self._idle[index].nbytes))
            self._let_go_of_oldest(1)  # all are too small: the batches grew, so let one go for the larger one
        room = size + size // 8  # the next batch may be a little larger
        return self._allocate(-(-room // _GRAIN) * _GRAIN)

    def give_back(self, buffer: B) -> None:
        """Nobody reads ``buffer`` any more. Takes no lock, because it may run inside a garbage collection in the middle
        of :meth:`take`; and touches only what nobody iterates over, because another thread may be choosing."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Let go of every idle buffer, without calling ``forget``."""
        with self._lock:
            self._idle.clear()
            self._returned.clear()

    def _let_go_of_oldest(self, count: int) -> None:
        for buffer in self._idle[:count]:
            self._forget(buffer)
        del self._idle[:count]


class BufferPool(Pool[Tensor]):
    """Lends out uint8 buffers aligned to 64 bytes, and takes one back when the last tensor (or numpy view) over it has
    died.

    Nobody returns a buffer by hand: its views are counted by their storage. Holding on to tensors of old batches is
    therefore always safe; it only makes the pool allocate another buffer.
    """

    def __init__(self, keep: int, *, pinned: bool = False) -> None:
        """``keep``: how many idle buffers are kept. ``pinned``: in memory that an accelerator can read by itself."""
        super().__init__(keep, self._new)
        self._pinned = pinned
        self.allocated_bytes = 0
        """Bytes allocated over the pool's life."""

    def lend(self, size: int) -> Tensor:
        """``[size]`` uint8, contents undefined; back in the pool once no tensor over it is left. O(idle buffers)."""
        buffer = self.take(size)
        lease = buffer.numpy()[:size]  # an object of its own: it dies with its last view, and the buffer lives on
        # atexit False: at the end of the process buffers need not come back, and torch may be gone.
        weakref.finalize(lease, self.give_back, buffer).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _new(self, size: int) -> Tensor:
        self.allocated_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
