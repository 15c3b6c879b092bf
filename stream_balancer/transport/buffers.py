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
        self._idle: deque[Tensor] = deque()
        self._lock = threading.Lock()
        self.allocated_bytes = 0
        """Bytes allocated over the pool's life."""

    def lend(self, size: int) -> Tensor:
        """``[size]`` uint8, contents undefined; back in the pool once no tensor over it is left. O(idle slabs)."""
        slab = self._take(size)
        lease = slab.numpy()[:size]
        weakref.finalize(lease, self._give_back, slab).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            self._trim()
            fitting = [slab for slab in self._idle if slab.numel() >= size]
            if fitting:
                best = min(reversed(fitting), key=lambda slab: slab.numel())  # of equals the last one used: it is warm
                self._idle = deque(slab for slab in self._idle if slab is not best)
                return best
            if self._idle:  # all too small: the batches grew, so let one go for the larger one
                self._idle.popleft()
        room = -(-(size + size // 8) // _GRAIN) * _GRAIN
        self.allocated_bytes += room
        return torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)

    def _give_back(self, slab: Tensor) -> None:
        # Runs wherever the last view dies, perhaps inside a garbage collection in the middle of lend(): no lock here.
        self._idle.append(slab)

    def _trim(self) -> None:
        while len(self._idle) > self._keep:
            self._idle.popleft()
