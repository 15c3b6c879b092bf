"""Payloads that stay with their producer: it is told to drop one when nobody at the controller holds its rollout.

::

    producer --description, key--> Leases.hold --Lease--> rollout: waits, is in flight, has a name in your code
    producer <---DropPayloads----- the last reference to the lease dies

So neither the balancer nor its core knows that a payload lies elsewhere.
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Channel, Outgoing
from stream_balancer.types import Rollout
from stream_balancer.wire.messages import MAX_ENTRIES, DropPayloads, Owner, RolloutHeader
from stream_balancer.wire.partial_batch import Lease
from stream_balancer.wire.rollouts import decode_kept, decode_rollout

__all__ = ["Leases"]


class Leases:
    """Of one producer."""

    def __init__(self, owner: Owner | None, max_bytes: int, channel: Channel) -> None:
        """``owner``: where ranks fetch what this producer keeps; None if it keeps nothing. ``max_bytes``: of one
        payload. ``channel``: to the producer."""
        self._owner, self._max_bytes, self._channel = owner, max_bytes, channel
        self._kept: set[int] = set()
        self._dropped: deque[int] = deque()
        self._drop_is_queued = False

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, header: RolloutHeader) -> None:
        """Raise WireError if its payload may not be kept."""
        key = header.payload
        if key is not None and (self._owner is None or key in self._kept or header.total_bytes > self._max_bytes):
            raise WireError(f"it offers to keep payload {key} of {header.total_bytes} bytes, which it may not")

    def decode(self, header: RolloutHeader, buffer: Tensor) -> Rollout:
        """A rollout that came with its payload, or without. Raises RolloutError if it is none, WireError like
        :meth:`check`."""
        if header.payload is None or self._owner is None:
            return decode_rollout(header, buffer)
        self.check(header)  # again: one group may name a payload twice
        lease = Lease()
        self.hold(lease, header.payload)
        return decode_kept(header, buffer, self._owner, lease)

    def hold(self, lease: Lease, key: int) -> None:
        """The producer keeps payload ``key`` for as long as anybody refers to ``lease``."""
        self._kept.add(key)
        weakref.finalize(lease, self._on_released, key).atexit = False

    def _on_released(self, key: int) -> None:
        """Runs wherever the last reference to a rollout dies, perhaps inside a garbage collection: takes no lock."""
        self._kept.discard(key)
        self._dropped.append(key)
        if not self._drop_is_queued:
            self._drop_is_queued = True
            self._channel.send(self._take_dropped)

    def _take_dropped(self, channel: Channel) -> Outgoing | None:
        # First of all: whoever sees it set has appended before this, and whoever does not queues another call. To look
        # whether the own key is the only one would not do: two threads that append at the same time both see two.
        self._drop_is_queued = False
        keys: list[int] = []
        while self._dropped and len(keys) < MAX_ENTRIES:
            keys.append(self._dropped.popleft())
        if self._dropped:
            channel.send(self._take_dropped)
        return Outgoing(DropPayloads(tuple(keys))) if keys else None
