"""A line in the log when nothing has moved for long: once, and each time the stall has doubled.

It has no task and no timer of its own. Whoever waits anyway is its clock: :meth:`StallReporter.wait` wakes when the
next line is due, and at most once in that time while batches leave.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import anyio

__all__ = ["StallReporter"]


class StallReporter:
    """``why(seconds)`` gives the line, after so many seconds without a move; ``""`` for none."""

    def __init__(self, after_s: float, why: Callable[[float], str], log: logging.Logger) -> None:
        if not after_s > 0:
            raise ValueError(f"report_after_s must be > 0 (math.inf = never), not {after_s}")
        self._after_s = self._due_s = after_s
        self._why = why
        self._log = log
        self._began = -math.inf
        self._waiting = 0

    def moved(self) -> None:
        """A batch has left."""
        self._began, self._due_s = anyio.current_time(), self._after_s

    async def wait(self, event: anyio.Event, deadline: float = math.inf) -> None:
        """Until ``event``, or ``deadline`` on the event loop's clock; on the way, log what is due."""
        if not self._waiting:
            self.moved()  # nobody missed anything before
        self._waiting += 1
        try:
            # in a loop: moved() shifts what is due, and a wake-up for an old time says nothing
            while not event.is_set() and anyio.current_time() < deadline:
                with anyio.CancelScope(deadline=min(deadline, self._began + self._due_s)):
                    await event.wait()
                if not event.is_set() and anyio.current_time() >= self._began + self._due_s:
                    self._report()
        finally:
            self._waiting -= 1

    def _report(self) -> None:
        # not at equal times: a night without rollouts is ten lines, not five hundred
        self._due_s *= 2
        line = self._why(anyio.current_time() - self._began)
        if line:
            self._log.warning("%s", line)
