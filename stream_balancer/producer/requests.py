"""What a producer asks of the balancer, as a value. Who waits for the reply, and how, is the asker's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stream_balancer.core.groups import GroupSize
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.put_ledger import HeldSlot, Mode, PendingPut
from stream_balancer.types import Rollout

__all__ = ["Request"]


class Request(NamedTuple):
    """Rollouts to put, or whatever else there is a mode for."""

    mode: Mode
    rollouts: Sequence[Rollout] = ()
    declared: GroupSize | None = None
    """Of their group, with or without rollouts."""
    slot: HeldSlot | None = None
    """The one they are put in."""
    places: int = 0
    """Rollouts to reserve places for."""
    later_than: int | None = None
    """The policy version that a later one is waited for."""

    def pending(self, port: ProducerPort, callback: Callable[[], object]) -> PendingPut:
        """As the port wants it."""
        put = port.pending(self.rollouts, self.mode, callback, self.declared, self.slot)
        put.places, put.later_than = self.places, self.later_than
        return put
