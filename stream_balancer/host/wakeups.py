"""Waiting in a balancer, first come first served; and the line in the log when nothing has moved for long.

A wake-up says "try again", no more: who is woken for nothing waits on. So one too many costs a task switch, and one
that is missing is a hang. Whether a batch can leave, and who has room, is the core's to decide. A task that waits is
never handed anything: it tries by itself, and wakes the next once it has succeeded or given up. So a change wakes one
task of each kind however many wait, and a task that is cancelled at any moment loses nothing and blocks nobody.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio

_T = TypeVar("_T")


class StallReporter:
    """A line in the log when nothing has moved for long: once, and each time the stall has doubled.

    ``why(seconds)`` gives the line, after so many seconds without a move; ``serve()`` gives another one, which knows
    the ranks. Whoever waits anyway is the clock: :meth:`wait` wakes when the next line is due, and at most once in that
    time while batches leave.
    """

    def __init__(self, after_s: float, why: Callable[[float], str], log: logging.Logger) -> None:
        if not after_s > 0:
            raise ValueError(f"report_after_s must be > 0 (math.inf = never), not {after_s}")
        self._after_s = self._due_s = after_s
        self.why, self.log = why, log
        self._began = -math.inf
        self._waiting = 0

    def moved(self) -> None:
        """A batch has left."""
        self._began, self._due_s = anyio.current_time(), self._after_s

    async def wait(self, event: anyio.Event, deadline: float = math.inf) -> None:
        """Wait until ``event``, or ``deadline`` on the event loop's clock; on the way, log what is due."""
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
        self.log.warning("%s", self.why(anyio.current_time() - self._began))


class Waiter:
    """A task that waits its turn in a :class:`WaitQueue`."""

    __slots__ = ("count", "group_id", "wake")

    wake: anyio.Event
    """Set when it may try again."""
    group_id: str | None
    """Group whose members wake it out of turn."""
    count: int
    """Rollouts that it puts, or wants to begin."""


class WaitQueue:
    """Waiting tasks, longest waiting first. Siblings of a waiting group need no room, so they are woken out of turn."""

    def __init__(self, reporter: StallReporter) -> None:
        # a dict's first key is found in O(n) after n others have left; this one's in O(1)
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        """For puts, too, which ask whether there is one."""
        self._of_group: dict[str, list[Waiter]] = {}
        self._reporter = reporter
        # rollouts that wait now; and the seconds of those that do not, less the times at which these began to
        self._count, self._waited_s = 0, 0.0

    @property
    def first(self) -> Waiter | None:
        """The one that has waited longest."""
        return next(iter(self.waiters), None)

    def waited_s(self, now: float) -> float:
        """Seconds that rollouts have waited here, those of a task that waits with n counted n times. O(1)."""
        return self._waited_s + self._count * now

    def _change(self, count: int) -> None:
        self._count += count
        self._waited_s -= count * anyio.current_time()

    def wait(self, waiter: Waiter, attempt: Callable[[], _T | None]) -> Coroutine[Any, Any, _T]:
        """Take the last place now. -> the result of ``attempt()``, made whenever the task is woken, as soon as that is
        not None. The waiter leaves the queue in any case: also if it raises, or the task is cancelled."""
        waiter.wake = anyio.Event()
        self.waiters[waiter] = None
        self._change(waiter.count)
        if waiter.group_id is not None:
            self._of_group.setdefault(waiter.group_id, []).append(waiter)
        return self._wait(waiter, attempt)

    async def _wait(self, waiter: Waiter, attempt: Callable[[], _T | None]) -> _T:
        try:
            while True:
                # one report for the whole queue: the others wait for the same
                if waiter is self.first:
                    await self._reporter.wait(waiter.wake)
                else:
                    await waiter.wake.wait()  # it is woken when it becomes the first
                # Others may have run since it was woken, and have taken what it was woken for: so it looks for itself.
                # Nothing is awaited between an attempt that succeeds and the return.
                got = attempt()
                if got is not None:
                    return got
                waiter.wake = anyio.Event()
        finally:
            self._leave(waiter)
            self.wake_first()  # also if this one was cancelled after it was woken: the wake-up must not be lost

    def _leave(self, waiter: Waiter) -> None:
        """O(waiting siblings)."""
        del self.waiters[waiter]
        self._change(-waiter.count)
        if waiter.group_id is not None:
            siblings = self._of_group[waiter.group_id]
            siblings.remove(waiter)
            if not siblings:
                del self._of_group[waiter.group_id]

    def wake_first(self) -> None:
        """The one that has waited longest may try again. O(1)."""
        first = self.first
        if first is not None:
            first.wake.set()

    def wake_siblings(self, group_id: str) -> None:
        """A group's first member is held, so the others may follow. O(waiting siblings)."""
        for waiter in self._of_group.get(group_id, ()):
            waiter.wake.set()
