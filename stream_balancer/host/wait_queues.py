"""Tasks that wait in the balancer, first come first served: puts for room, reservers until more may begin.

A waiting task is woken, never handed anything: it then tries by itself, and wakes the next once it has succeeded or
given up. So a change wakes one task however many wait, and a task that is cancelled at any moment loses nothing and
blocks nobody. Only queues and their waiting enter here: whom a change wakes is ``wakeups``', what a task tries is its
own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from stream_balancer.host.stall_reporter import StallReporter

__all__ = ["PutQueue", "WaitQueue", "Waiter"]


class Waiter:
    """A task that waits its turn."""

    __slots__ = ("group_id", "wake")

    group_id: str | None
    """For :class:`PutQueue`."""
    wake: anyio.Event
    """Set when it may try again. From :meth:`WaitQueue.join` on."""


_T = TypeVar("_T")
_W = TypeVar("_W", bound=Waiter)


class WaitQueue(Generic[_W]):
    """Waiting tasks, longest waiting first."""

    def __init__(self, reporter: StallReporter) -> None:
        self._waiters: OrderedDict[int, _W] = OrderedDict()
        self._reporter = reporter

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def first(self) -> _W | None:
        """The one that has waited longest."""
        return next(iter(self._waiters.values()), None)

    def join(self, waiter: _W) -> None:
        """Take the last place. :meth:`wait` must follow."""
        waiter.wake = anyio.Event()
        self._waiters[id(waiter)] = waiter

    async def wait(self, waiter: _W, attempt: Callable[[], _T | None]) -> _T:
        """What ``attempt()`` gives, made whenever the task is woken, as soon as that is not None. The waiter leaves the
        queue in any case: also if it raises, or the task is cancelled."""
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
            self.leave(waiter)
            self.wake_first()  # also if this one was cancelled after it was woken: the wake-up must not be lost

    def leave(self, waiter: _W) -> None:
        """It got what it waited for, or gave up."""
        del self._waiters[id(waiter)]

    def wake_first(self) -> None:
        """The one that has waited longest may try again. O(1)."""
        if self._waiters:
            next(iter(self._waiters.values())).wake.set()

    def wake_all(self) -> None:
        """It has ended for all. O(n)."""
        for waiter in self._waiters.values():
            waiter.wake.set()


class PutQueue(WaitQueue[Waiter]):
    """Siblings of a waiting group need no room, so they can be woken out of turn."""

    def __init__(self, reporter: StallReporter) -> None:
        super().__init__(reporter)
        self._of_group: dict[str, list[Waiter]] = {}

    def join(self, waiter: Waiter) -> None:
        super().join(waiter)
        if waiter.group_id is not None:
            self._of_group.setdefault(waiter.group_id, []).append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """O(waiting siblings)."""
        super().leave(waiter)
        if waiter.group_id is not None:
            siblings = self._of_group[waiter.group_id]
            siblings.remove(waiter)
            if not siblings:
                del self._of_group[waiter.group_id]

    def wake_siblings(self, group_id: str | None) -> None:
        """A group's first member is held, so the others may follow. O(waiting siblings)."""
        for waiter in self._of_group.get(group_id or "", ()):
            waiter.wake.set()
