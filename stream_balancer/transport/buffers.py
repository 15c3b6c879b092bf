"""Reusable receive and send buffers that are never overwritten while somebody may still read them."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

__all__ = ["SlabPool"]

_GRAIN = 2**20  # bytes; slabs are whole MiB, so that batches of about one size share them


class SlabPool:
    """Lends out uint8 slabs aligned to 64 bytes, and takes one back when the last tensor (or numpy view) over it has
    died.

    Nobody returns a slab by hand: its views are counted by their storage. Holding on to tensors of old batches is
    therefore always safe; it only makes the pool allocate another slab. Safe to use from any thread. A fresh slab of
    64 MiB or more costs about as much in page faults as receiving into it, hence the pool.
    """

    def __init__(self, keep: int, *, pinned: bool = False) -> None:
        """``keep``: how many idle slabs are kept. ``pinned``: in memory that an accelerator can read by itself."""
        self._keep = keep
        self._pinned = pinned
        self._idle: list[Tensor] = []  # the last one used is the last: it is warm
        self._returned: deque[Tensor] = deque()  # on their way into _idle
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """Bytes allocated over the pool's life."""

    @property
    def num_idle(self) -> int:
        """Buffers that have come back, and may be lent again."""
        return len(self._idle) + len(self._returned)

    def lend(self, size: int) -> Tensor:
        """``[size]`` uint8, contents undefined; back in the pool once no tensor over it is left. O(idle slabs)."""
        slab = self._take(size)
        lease = slab.numpy()[:size]
        weakref.finalize(lease, self._give_back, slab).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            while self._returned:
                self._idle.append(self._returned.popleft())
            del self._idle[: max(len(self._idle) - self._keep, 0)]
            fitting = [index for index, slab in enumerate(self._idle) if slab.numel() >= size]
            if fitting:
                return self._idle.pop(min(reversed(fitting), key=lambda index: self._idle[index].numel()))
            del self._idle[:1]  # all are too small: the batches grew, so let one go for the larger one
        room = -(-(size + size // 8) // _GRAIN) * _GRAIN
        self.allocated_bytes += room
        return torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)

    def _give_back(self, slab: Tensor) -> None:
        # Runs wherever the last view dies, perhaps inside a garbage collection in the middle of lend(). So it takes no
        # lock, and touches only what nobody iterates over: another thread may be choosing among the idle ones.
        self._returned.append(slab)
