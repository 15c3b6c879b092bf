"""Waiting in a balancer, first come first served, and the tasks that a change wakes: the consumer of batches, the first
waiting put, the first waiting reserver. All of it is here.

::

    what changed                                              consumer   first put   first reserver
    rollouts were added                             added()      x       siblings
    a batch left                               batch_left()                  x              x
    a step is done, a reserved rollout has come step_done()      x                          x
    knobs, version, evictions                     changed()      x           x              x
    a batch comes again, a put finds no room  wake_consumer()    x
    end                                               end()      x          all            all
    closed                                          close()      x          all            all

A wake-up says "try again", no more: who is woken for nothing waits on. So an x too many costs a task switch, and one
that is missing is a hang. Whether a batch can leave, and who has room, is the core's to decide. A task that waits is
never handed anything: it tries by itself, and wakes the next once it has succeeded or given up. So a change wakes one
task however many wait, and a task that is cancelled at any moment loses nothing and blocks nobody.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import anyio

from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle
from stream_balancer.host.stall_reporter import StallReporter

__all__ = ["Waiter", "Wakeups"]

_T = TypeVar("_T")


class Waiter:
    """A task that waits its turn, from :meth:`WaitQueue.join` on."""

    __slots__ = ("count", "group_id", "wake")

    wake: anyio.Event
    """Set when it may try again."""

    group_id: str | None
    """Group whose members wake it out of turn."""
    count: int
    """Rollouts that a reserver wants to begin."""


class WaitQueue:
    """Waiting tasks, longest waiting first. Siblings of a waiting group need no room, so they are woken out of turn."""

    def __init__(self, reporter: StallReporter) -> None:
        self.waiters: OrderedDict[int, Waiter] = OrderedDict()
        """By identity; for puts, which ask whether there is one."""
        self._of_group: dict[str, list[Waiter]] = {}
        self._reporter = reporter

    def __len__(self) -> int:
        return len(self.waiters)

    @property
    def first(self) -> Waiter | None:
        """The one that has waited longest."""
        for waiter in self.waiters.values():
            return waiter
        return None

    def join(self, waiter: Waiter) -> None:
        """Take the last place. :meth:`wait` must follow."""
        waiter.wake = anyio.Event()
        self.waiters[id(waiter)] = waiter
        if waiter.group_id is not None:
            self._of_group.setdefault(waiter.group_id, []).append(waiter)

    async def wait(self, waiter: Waiter, attempt: Callable[[], _T | None]) -> _T:
        """The result of ``attempt()``, made whenever the task is woken, as soon as that is not None. The waiter leaves
        the queue in any case: also if it raises, or the task is cancelled."""
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
        del self.waiters[id(waiter)]
        if waiter.group_id is not None:
            siblings = self._of_group[waiter.group_id]
            siblings.remove(waiter)
            if not siblings:
                del self._of_group[waiter.group_id]

    def wake_first(self) -> None:
        """The one that has waited longest may try again. O(1)."""
        if self.waiters:
            next(iter(self.waiters.values())).wake.set()

    def wake_all(self) -> None:
        """The wait is over for all. O(n)."""
        for waiter in self.waiters.values():
            waiter.wake.set()

    def wake_siblings(self, group_id: str) -> None:
        """A group's first member is held, so the others may follow. O(waiting siblings)."""
        for waiter in self._of_group.get(group_id, ()):
            waiter.wake.set()


class Wakeups:
    """Tasks that wait in a balancer, and those that each change wakes.

    O(1) however many tasks wait, but for :meth:`end` and :meth:`close`; O(n) in waiting rollouts under
    ``staleness.max_versions``, while a reserver waits.
    """

    def __init__(self, core: BalancerCore, throttle: Throttle, reporter: StallReporter) -> None:
        self.puts = WaitQueue(reporter)
        """Waiting for room."""
        self.reserves = WaitQueue(reporter)
        """Waiting until they may begin."""
        self._core = core
        self._throttle = throttle
        self._reporter = reporter
        self._consumer: anyio.Event | None = None  # while it waits
        self._consumer_wakes_at = math.inf  # by itself

    # -- the consumer --------------------------------------------------------------------------------------------------

    @property
    def consumer_waits(self) -> bool:
        """A trainer, or ``serve()``, waits for the next batch."""
        return self._consumer is not None

    async def wait_for_batch(self) -> None:
        """Return when a batch may be able to leave. For the one consumer."""
        # The event is in place before next_wakeup() is asked, and both in one pass of the loop: no put can fall between
        # the question and the wait.
        self._consumer, self._consumer_wakes_at = anyio.Event(), self._core.next_wakeup()
        try:
            await self._reporter.wait(self._consumer, self._consumer_wakes_at)
        finally:
            self._consumer = None

    def flush_if_stuck(self) -> None:
        """While a reserver waits, only rollouts that are being generated can fill the window: if they are too few, let
        a full batch go; if there are none, whatever waits. Not past a reserver that can be admitted, and only for as
        long as that is so: a short batch beside what is being generated would break the bound."""
        first, state = self.reserves.first, self._core.state
        self._core.set_stuck(
            first is not None and self._throttle.is_stuck(state) and self._throttle.room(state) < first.count
        )

    def wake_consumer(self) -> None:
        """A batch may be able to leave earlier than the consumer knows."""
        core = self._core
        if self.reserves.waiters or core.state.triggers.stuck:
            self.flush_if_stuck()
        # most of the puts between two batches change nothing for it: no task switch for them
        if self._consumer is not None and (
            core.next_wakeup() < self._consumer_wakes_at or (core.state.triggers.ended and core.finished)
        ):
            self._consumer.set()

    def _wake_reserver(self) -> None:
        """The longest-waiting one, if it can be admitted now, or has to learn of the end. It wakes the next."""
        first = self.reserves.first
        if first is not None and (self._core.ended or self._throttle.room(self._core.state) >= first.count):
            # One only: it wakes the next when it has been admitted, so a change costs one task switch however many
            # wait.
            first.wake.set()

    # -- what changed --------------------------------------------------------------------------------------------------

    def added(self, group_id: str | None) -> None:
        """Rollouts were added, of this group."""
        self.wake_consumer()
        if group_id is not None:
            self.puts.wake_siblings(group_id)

    def batch_left(self) -> None:
        """There is room in the buffer. The consumer has the batch."""
        self._reporter.moved()
        self.puts.wake_first()
        self._wake_reserver()

    def step_done(self) -> None:
        """The trainer is through with a step, or reserved rollouts have come or never will: others may begin, and what
        waits may be young enough to leave."""
        self._wake_reserver()
        self.wake_consumer()

    def changed(self) -> None:
        """Fewer rollouts wait, or the rules for them have changed."""
        self.wake_consumer()
        self.puts.wake_first()
        self._wake_reserver()

    def end(self) -> None:
        """End of admission."""
        self.wake_consumer()
        self.puts.wake_all()
        self.reserves.wake_all()

    def close(self) -> None:
        """Waiting tasks raise ClosedResourceError."""
        if self._consumer is not None:
            self._consumer.set()
        self.puts.wake_all()
        self.reserves.wake_all()
