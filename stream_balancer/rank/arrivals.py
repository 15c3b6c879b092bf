"""Waiting until a rank's port has something: in a thread of its own, or in an event loop.

The port notifies in a thread of its own and says only that there is news. Who waits looks for itself, and looks again
whenever it is notified, so a notice that comes too early or twice does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

from stream_balancer.errors import AlreadyInUseError
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.threads import ThreadEvent

__all__ = ["TWO_ITERATE", "Arrivals"]

T = TypeVar("T")

TWO_ITERATE = "two threads or tasks iterate one RankFeed. Each batch goes to one of them: let one iterate"


class Arrivals:
    """Where the one thread or task that iterates a feed waits."""

    def __init__(self) -> None:
        self.one_user = _OneUser()
        """To be held while waiting: ``with arrivals.one_user``. Raises AlreadyInUseError if another one holds it."""
        self._wake: Callable[[], object] | None = None

    def notify(self) -> None:
        """There is news: who waits looks again. From any thread."""
        # Read once: the trainer clears it in another thread, and a wake-up too many does no harm.
        wake = self._wake
        if wake is not None:
            wake()

    def wait_for(self, take: Callable[[], T | None]) -> T:
        """What ``take`` gives, as soon as it gives something."""
        while True:
            # A new event each round, in place before take(): what comes between take() and wait() sets it.
            arrival = ThreadEvent()
            self._wake = arrival.set
            try:
                taken = take()
                if taken is not None:
                    return taken
                arrival.wait()
            finally:
                self._wake = None

    async def wait_in_loop_for(self, take: Callable[[], T | None]) -> T:
        """:meth:`wait_for`, without blocking the event loop. If cancelled, nothing was taken."""
        in_loop = loop_caller()
        while True:
            # As in wait_for(); the port notifies in a thread of its own, so the event is set through the loop.
            arrival = anyio.Event()
            self._wake = lambda: in_loop(arrival.set)  # noqa: B023 - each round's own event
            try:
                taken = take()
                if taken is not None:
                    return taken
                await arrival.wait()
            finally:
                self._wake = None


class _OneUser:
    """Refuses a second user instead of making it wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise AlreadyInUseError(TWO_ITERATE)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
