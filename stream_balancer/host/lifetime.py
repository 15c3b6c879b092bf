"""Thread, event loop and end of a balancer: it may be used in one thread, in one loop, until it is closed.

The thread is that of the event loop, from the first await until ``aclose()``. The clock is that loop's too, and this is
where plain methods read it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.lowlevel

from stream_balancer.errors import ClosedResourceError


class Lifetime:
    """The event loop's thread, its clock, and whether the balancer is closed."""

    def __init__(self) -> None:
        self.closed = False
        """``aclose()`` was called."""
        self._thread: int | None = None
        self._clock: Callable[[], float] = anyio.current_time
        self.checkpoint: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        """As anyio's, which asks at each call whose event loop it is in."""

    def enter(self, method: str) -> None:
        """A task called ``method``, so this is the event loop's thread. Raises like :meth:`check_thread`."""
        if self._thread == threading.get_ident():
            return
        self.check_thread(method)
        self._thread = threading.get_ident()
        # trio's loop is no asyncio loop, even as a guest of one: anyio's way, which is slower, is left
        if (loop := asyncio._get_running_loop()) is not None and asyncio.current_task(loop) is not None:
            self._clock, self.checkpoint = loop.time, partial(asyncio.sleep, 0)

    def leave(self) -> None:
        """Closed: what is left may be looked at from another event loop."""
        self._thread, self._clock, self.checkpoint = None, anyio.current_time, anyio.lowlevel.checkpoint

    def check_thread(self, method: str) -> None:
        """Raise RuntimeError in another thread than the event loop's."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"{method}() was called in another thread than that of the event loop in which this balancer is used: "
                "tasks would not be woken, and counts not add up. For threads there is sb.blocking(config), for other "
                f"processes sb.connect(address); a worker thread calls anyio.from_thread.run_sync(balancer.{method}, "
                "...)"
            )

    def now(self, method: str) -> float:
        """Seconds on the event loop's clock, for a plain method. Raises RuntimeError in another thread, and where no
        event loop runs."""
        # one comparison for the many calls in the right thread; the check that names the fault is only for the others
        if self._thread != threading.get_ident():
            self.check_thread(method)
        try:
            return self._clock()
        except RuntimeError:  # anyio's own says nothing about what to do here
            raise RuntimeError(
                f"{method}() was called outside of any event loop's tasks, and it reads that loop's clock. In a script "
                "or thread without an event loop use `with sb.blocking(config) as balancer`, which has the same "
                "methods; else call it in a task, within `async with sb.StreamBalancer(config) as balancer`"
            ) from None

    def check_open(self, method: str) -> None:
        """Raise ClosedResourceError once closed."""
        if self.closed:
            raise ClosedResourceError(
                f"{method}() on a closed balancer: aclose() was called, or its 'async with' block was left"
            )
