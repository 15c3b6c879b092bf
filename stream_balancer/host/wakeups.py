"""Waiting in a balancer, first come first served: the consumer of batches, puts without room, reservers; in one event
loop, until it is closed; and the line in the log when nothing has moved for long.

A wake-up says "try again", no more: who is woken for nothing waits on. So one too many costs a task switch, and one
that is missing is a hang. Whether a batch can leave, and who has room, is the core's to decide. A task that waits is
never handed anything: it tries by itself, and wakes the next once it has succeeded or given up. So a change wakes one
task of each kind however many wait, and a task that is cancelled at any moment loses nothing and blocks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle
from stream_balancer.errors import ClosedResourceError

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


class Wakeups:
    """The event loop in which a balancer is used, from the first await until ``aclose()``: its thread, its clock, the
    tasks that wait in it, and those that a change wakes.

    O(1) however many tasks wait; O(n) in waiting rollouts under ``staleness.max_versions``, while a reserver waits.
    """

    def __init__(self, core: BalancerCore, reporter: StallReporter) -> None:
        self.core, self.throttle = core, Throttle()
        self.puts = WaitQueue(reporter)
        """Waiting for room."""
        self.reserves = WaitQueue(reporter)
        """Waiting until they may begin."""
        self.reporter = reporter
        self._consumer: anyio.Event | None = None  # while it waits
        self._consumer_wakes_at = math.inf  # by itself
        self._version = anyio.Event()
        self.closed = False
        """``aclose()`` was called."""
        self._thread: int | None = None
        self._clock: Callable[[], float] = anyio.current_time
        self.checkpoint: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        """As anyio's, which asks at each call whose event loop it is in."""

    # whose loop, and until when

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

    # who waits

    @property
    def consumer_waits(self) -> bool:
        """A trainer, or ``serve()``, waits for the next batch."""
        return self._consumer is not None

    async def wait_for_batch(self) -> None:
        """Return when a batch may be able to leave. For the one consumer."""
        # The event is in place before next_wakeup() is asked, and both in one pass of the loop: no put can fall between
        # the question and the wait.
        self._consumer, self._consumer_wakes_at = anyio.Event(), self.core.next_wakeup()
        try:
            await self.reporter.wait(self._consumer, self._consumer_wakes_at)
        finally:
            self._consumer = None

    def flush_if_stuck(self) -> None:
        """While a reserver waits, only rollouts that are being generated can fill the window: if they are too few, let
        a full batch go; if there are none, whatever waits. Not past a reserver that can be admitted, and only for as
        long as that is so: a short batch beside what is being generated would break the bound."""
        first, core = self.reserves.first, self.core
        core.set_stuck(first is not None and self.throttle.is_stuck(core) and self.throttle.room(core) < first.count)

    def wake_consumer(self) -> None:
        """A batch may be able to leave earlier than the consumer knows."""
        core = self.core
        if self.reserves.waiters or core.triggers.stuck:
            self.flush_if_stuck()
        # most of the puts between two batches change nothing for it: no task switch for them
        if self._consumer is not None and (
            core.next_wakeup() < self._consumer_wakes_at or (core.triggers.ended and core.finished)
        ):
            self._consumer.set()

    def changed(self) -> None:
        """A batch has left, a step is done, rollouts were evicted, knobs or the version are others."""
        self.wake_consumer()
        self.puts.wake_first()
        first = self.reserves.first
        # not in vain: whoever cannot be admitted would wake the consumer, and that the next reserver
        if first is not None and (self.core.ended or self.throttle.room(self.core) >= first.count):
            first.wake.set()

    async def version_changes(self) -> None:
        """Wait for another version, for other knobs, or for the state of another balancer. Raises ClosedResourceError
        once the balancer is closed."""
        self.check_open("version_after")
        await self._version.wait()

    def version_changed(self) -> None:
        """Another version, other knobs, or the state of another balancer are in force; or the balancer is closed."""
        self._version.set()
        self._version = anyio.Event()
        self.changed()

    def end(self) -> None:
        """End of admission, or of everything: who waits looks, and raises. O(waiting tasks)."""
        if self._consumer is not None:
            self._consumer.set()
        # All in one pass of the loop, not each by the one before: what a put has on the disk it retracts from a journal
        # that closes in the next moment.
        for queue in (self.puts, self.reserves):
            for waiter in queue.waiters:
                waiter.wake.set()
