"""What a producer asks of the balancer: to take rollouts, or anything else; and one such request until its reply.

A slot, the end and statistics are asked for as rollouts are put: numbered, sent, answered, cancelled and sent again in
the same way. So there is one kind of request, and one ledger of them (:mod:`.request_ledger`).

Example: ``put(rollout)`` is ``Request(Mode.PUT, [rollout])``. It becomes a :class:`PendingRequest`, gets number 7 when
it is sent, and is done once ``Accepted((7,))`` or ``PutRefused(7, ...)`` has come, or the controller is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from stream_balancer.core.groups import GroupSize
from stream_balancer.errors import BrokenResourceError, ClosedResourceError
from stream_balancer.types import Rollout

SLOT_CLOSED = "put() on a slot whose 'with' block was left: its place is given back"
TOO_MANY = "{count} rollouts for a slot with {left} places left. Reserve as many as are put: reserve(n)"

__all__ = ["HeldSlot", "Mode", "PendingRequest", "Request", "RequestCancelled"]


class Mode(IntEnum):
    """What is asked for: how rollouts are put, or what else."""

    PUT = 0
    GROUP = 1
    NOWAIT = 2
    DECLARE = 3
    """No rollouts: how many a group has."""
    ABANDON = 4
    """No rollouts: a group is not wanted."""
    RESERVE = 5
    """A slot for rollouts that are still to be generated."""
    END = 6
    """This producer puts no more."""
    STATISTICS = 7
    """What the balancer reports of itself."""
    VERSION = 8
    """A later policy version. Never sent: the controller passes on each by itself."""


_CALLS = {
    Mode.RESERVE: "reserve()",
    Mode.END: "end()",
    Mode.STATISTICS: "statistics()",
    Mode.VERSION: "version_after()",
}


class Request(NamedTuple):
    """Rollouts to put, or whatever else there is a mode for, as a value."""

    mode: Mode
    rollouts: Sequence[Rollout] = ()
    declared: GroupSize | None = None
    """Of their group, with or without rollouts."""
    slot: HeldSlot | None = None
    """The one they are put in; or, to reserve, the one to have again."""
    places: int = 0
    """Rollouts to reserve a slot for."""
    later_than: int | None = None
    """The policy version that a later one is waited for."""

    @property
    def is_put(self) -> bool:
        """Whether it hands over rollouts, or declares something of their group."""
        return self.mode not in _CALLS

    @property
    def name(self) -> str:
        """For errors: ``put() of rollout 'a'``."""
        if not self.is_put:
            return _CALLS[self.mode]
        if self.declared is not None and not self.rollouts:
            return f"what was declared of group {self.declared.group_id!r}"
        return f"put() of rollout {', '.join(repr(r.rollout_id) for r in self.rollouts[:3])}"


class RequestCancelled(Exception):  # noqa: N818 - a reply, not a fault
    """The reply to a request that was cancelled before it was granted. ``str()``: what it has waited for here, if not
    for the balancer."""


class PendingRequest:
    """A request without a reply yet: it waits here, is sent, is done. It may be cancelled at any time before."""

    def __init__(
        self, request: Request, callback: Callable[[], object], *, total_bytes: int = 0, wire_bytes: int = 0
    ) -> None:
        """``callback()`` is called, in any thread, once there is a reply."""
        self.request = request
        self.total_bytes = total_bytes
        """Bytes of all its rollouts, wherever their payloads are."""
        self.wire_bytes = wire_bytes
        """Bytes that travel to the controller."""
        self.number: int | None = None
        """Set once sent."""
        self.first_payload = 0
        """Number of its first rollout among all this producer sent; the others follow. Set once sent."""
        self.cancelled = False
        self.abandoned = False
        """Nobody waits for its reply any more: a slot that comes with it is released."""
        self.sent_before = False
        """To a controller that died before it replied."""
        self.done = False
        self.error: Exception | None = None
        """None = granted, once ``done``."""
        self.result: Any = None
        """What else the reply says: the version of a slot, statistics."""
        self._callback = callback

    @property
    def payloads(self) -> range:
        """Numbers of its rollouts among all this producer sent."""
        return range(self.first_payload, self.first_payload + len(self.request.rollouts))

    def resolve(self, error: Exception | None, result: Any = None) -> None:
        """The reply; the first one counts. From any thread."""
        if not self.done:
            self.error, self.result = error, result
            self.done = True
            self._callback()

    @property
    def fate(self) -> str:
        """What is known of it without a reply."""
        if self.number is None and not self.sent_before:
            return "it had not been sent, so it was not accepted"
        return "whether it was accepted is not known"

    def lost(self, cause: str) -> BrokenResourceError:
        """What to raise when the controller is gone."""
        name = self.request.name
        if not self.request.is_put:
            return BrokenResourceError(
                f"the controller was lost while {name} waited: {cause}. Connect again, and ask again"
            )
        return BrokenResourceError(
            f"the controller was lost while {name} waited: {cause}; {self.fate}. Connect and put it again: a "
            "DuplicateRolloutError then means that the first put was accepted"
        )


class HeldSlot:
    """Places for rollouts that the controller has admitted, as their producer counts them. From any thread."""

    def __init__(self, number: int, version: int, count: int) -> None:
        self.number = number
        """Of the request that reserved it; another one once the producer has joined again."""
        self.version = version
        """Policy version at which it was admitted."""
        self.left = count
        """Rollouts that may still be put."""
        self.open = True
        """Its block was not left."""
        self._under_way = 0  # in puts without a reply
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        """Rollouts that may still be put, or are on their way."""
        with self._lock:
            return self.left + self._under_way

    def put(self, count: int) -> None:
        """So many are on their way. Raises ClosedResourceError, and ValueError for more than are left."""
        with self._lock:
            if not self.open:
                raise ClosedResourceError(SLOT_CLOSED)
            if count > self.left:
                raise ValueError(TOO_MANY.format(count=count, left=self.left))
            self.left -= count
            self._under_way += count

    def settle(self, count: int, *, accepted: bool) -> None:
        """They have their reply."""
        with self._lock:
            self._under_way -= count
            if self.open and not accepted:
                self.left += count

    def close(self) -> None:
        """No more will be put than are on their way."""
        with self._lock:
            self.open, self.left = False, 0
