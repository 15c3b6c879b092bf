"""Puts: the way of rollouts from the call into the buffer. All callers of a put take the same way.

::

    checked --> filtered by accept= --> journalled --> waiting for room --> held
       |                |  |                |                 |
       |                |  `-> evicted      |                 |
       `----------------`-------------------`-----------------`---> refused (raises), or cancelled

One :class:`PendingPut` for each put: ``put``, ``put_nowait``, ``put_group``, a slot's put, a remote
producer's, Ray's. :meth:`PendingPut.begin` goes as far as it can go without waiting, and takes the last place in the
queue where it cannot; what it returns waits for the rest. Most puts never wait.

**If a put is cancelled, or raises, the rollout was not accepted.** So nothing is awaited after the rollouts are taken,
and a put that waits for room is woken and then takes the room itself. The journal deletes the rows of a refused put.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
import anyio.lowlevel

from stream_balancer.core.accept import Accept, call_accept, decision_of
from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle, check_reserve
from stream_balancer.errors import ClosedResourceError, WouldBlock
from stream_balancer.host.journal import Change, Journal
from stream_balancer.host.journal.handed import Handed
from stream_balancer.host.wakeups import StallReporter, Waiter, WaitQueue
from stream_balancer.rollouts import Rollout
from stream_balancer.slots import Reservation, Slot, check_group

Rest: TypeAlias = Coroutine[Any, Any, object] | None
"""Returns once the rollouts are held; if it is cancelled, or raises, they were not accepted. None: they are held."""


class Puts:
    """The event loop of a balancer, from the first await until ``aclose()``: its thread, its clock and its waiting
    tasks. The way into the buffer, and slots for rollouts that are still to be generated
    (:class:`~stream_balancer.slots.Admits`). The throttle counts the slots; this class gives them out in order.

    O(1) however many tasks wait; O(n) in waiting rollouts under ``staleness.max_versions``, while a reserver waits.
    """

    def __init__(
        self, core: BalancerCore, reporter: StallReporter, accept: Accept | None, journal: Journal | None
    ) -> None:
        self.core, self.throttle, self.accept = core, Throttle(), accept
        self.journal = journal
        """Rollouts are written here before their put returns. None without a journal."""
        self.handed = journal or Handed()
        self.puts = WaitQueue(reporter)
        """Waiting for room."""
        self.reserves = WaitQueue(reporter)
        """Waiting until they may begin."""
        self.reporter = reporter
        self._consumer: anyio.Event | None = None  # Set while the consumer waits.
        self._consumer_wakes_at = math.inf  # The consumer's own deadline.
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
        # trio's loop is no asyncio loop, even as a guest of one
        if (loop := asyncio._get_running_loop()) is not None and asyncio.current_task(loop) is not None:
            self._clock, self.checkpoint = loop.time, partial(asyncio.sleep, 0)
        elif (trio := sys.modules.get("trio")) is not None and trio.lowlevel.in_trio_task():
            self._clock, self.checkpoint = trio.current_time, trio.lowlevel.checkpoint

    def leave(self) -> None:
        """The balancer is closed: another event loop may read its state."""
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
        # One comparison is enough for a call in the right thread.
        if self._thread != threading.get_ident():
            self.check_thread(method)
        try:
            return self._clock()
        except RuntimeError:  # anyio's message does not name the remedy.
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
        """If a reserve() is blocked and the rollouts in generation cannot fill the window, dispatch early: a full
        batch, or any batch if no rollout is in generation. Only while that reserve() is blocked: otherwise a short
        batch would break the bound of ``max_versions``."""
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
        """A batch has left, a step is done, rollouts were evicted, or knobs or the version have changed."""
        self.wake_consumer()
        self.puts.wake_first()
        first = self.reserves.first
        # Only if the reserver can be admitted: otherwise it and the consumer would wake each other for ever.
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
        """Admission has ended, or the balancer is closed: wake every waiting task, which then raises. O(waiting
        tasks)."""
        if self._consumer is not None:
            self._consumer.set()
        for queue in (self.puts, self.reserves):
            for waiter in queue.waiters:
                waiter.wake.set()

    # rollouts

    async def put(
        self, rollouts: Sequence[Rollout], *, complete: bool | None = None, size: GroupSize | None = None
    ) -> None:
        """Return once they are accepted; see :class:`PendingPut`, and :meth:`StreamBalancer.put`."""
        self.enter("put")
        await self.checkpoint()  # before they are taken: nothing may be awaited after it
        rest = PendingPut(self, rollouts, complete=complete, size=size).begin(self.now("put"))
        if rest is not None:
            await rest

    def evict_lost(self, lost: Callable[[Rollout], bool]) -> list[str]:
        """Evict waiting rollouts whose producer has died with their tokens. -> their ids."""
        ids = self.core.evict_lost(lost)
        self.changed()
        return ids

    # slots

    def reserve(self, count: int) -> Reservation:
        """A reservation that was not entered yet. Raises like :meth:`StreamBalancer.reserve`."""
        check_reserve(self.core.config, count)
        return Reservation(self, count)

    async def admit(self, count: int) -> Slot:
        """Wait until ``count`` more may begin. If cancelled, nothing was reserved."""
        self.enter("reserve")
        await anyio.lowlevel.checkpoint()
        begun = self.begin(count)
        return begun if isinstance(begun, Slot) else await begun

    def begin(self, count: int) -> Slot | Coroutine[Any, Any, Slot]:
        """A slot; or a coroutine that waits in the queue for one. Raises as :meth:`admit`."""
        # A waiting reserver goes first.
        if not self.reserves.waiters and (slot := self.try_admit(count)) is not None:
            return slot
        waiter = Waiter()
        waiter.group_id, waiter.count = None, count
        rest = self.reserves.wait(waiter, partial(self.try_admit, count))
        self.wake_consumer()  # No rollout may begin now, so the window may never become fuller.
        return rest

    def try_admit(self, count: int, began: int | None = None) -> Slot | None:
        """A slot for ``count`` rollouts, or None if the bound of ``max_versions`` does not admit it. ``began``: version
        of a slot that was given back when its producer seemed lost, while the producer went on generating."""
        if self.closed or self.core.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")
        # A resumed slot was admitted under the knobs of its time.
        if began is None:
            check_reserve(self.core.config, count)  # the knobs may have changed while it waited
        now = self.core.staleness.version or 0
        # never newer than now: a restarted controller may know an older version than the producer
        version = now if began is None else min(began, now)
        if self.throttle.room(self.core, version) < count:
            self.wake_consumer()
            return None
        return Slot(self, self.throttle.admit(version, count), version, count)

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """A slot's put is a put like any other."""
        await self.put(rollouts, complete=complete)

    async def stale(self, slot: Slot) -> None:
        """Wait until a rollout of this slot would be too old."""
        while not self.core.staleness.is_too_old(slot.version):
            await self.version_changes()

    def settle(self, slot: Slot, count: int) -> None:
        """``count`` rollouts of a slot were put, or never will be."""
        if count:
            self.throttle.settle(slot.number, count)
            self.changed()


class PendingPut(Waiter):
    """A put of one rollout, or of siblings, which are accepted or refused together. ``complete``: True if no more
    siblings will come (None: a single rollout). ``size``: declaration of a group without rollouts."""

    __slots__ = ("_answer", "_complete", "_may_wait", "_rollouts", "_shell", "_size")

    def __init__(
        self, shell: Puts, rollouts: Sequence[Rollout], *, complete: bool | None = None, size: GroupSize | None = None
    ) -> None:
        first = rollouts[0] if rollouts else None  # perhaps no rollout: that is refused later
        self.group_id = getattr(first, "group_id", None) if size is None else size.group_id
        self._shell, self._rollouts, self._complete, self._size = shell, rollouts, complete, size
        self.count = len(rollouts)
        self._answer: tuple[list[str], bool] | None = None

    def begin(self, now: float, *, may_wait: bool = True) -> Rest:
        """Go as far as possible without waiting. The caller awaits the result. Raises the reason of a refusal;
        WouldBlock if the put would have to wait and may not."""
        shell, self._may_wait = self._shell, may_wait
        if shell.closed:
            shell.check_open("put")
        if shell.journal is not None and not may_wait:
            raise WouldBlock("put_nowait() cannot wait for the journal's disk, where accepted rollouts are: use put()")
        # most puts are one rollout, which cannot disagree with its group
        if self._complete is not None or (len(self._rollouts) != 1 and self._size is None):
            check_group(self._rollouts)
            self._size = closed(self.group_id) if self._complete else None
        # before accept= is asked: it may look at the masks
        if shell.core.admission.looks_at_masks:
            self._rollouts = shell.core.admission.with_loss_masks(self._rollouts)
        return self._go_on(now) if shell.accept is None else self._filter(shell.accept, now)

    # -- filtered by accept= -------------------------------------------------------------------------------------------

    def _filter(self, accept: Accept, now: float) -> Rest:
        """Ask ``accept``, unless the group is incomplete: then the put of the last sibling asks."""
        core = self._shell.core
        core.check(self._rollouts, self._size)  # a bad rollout is refused, whatever accept= would say
        question, before = core.admission.completed_by(self._rollouts, self._size), self._answer
        asked = [rollout.rollout_id for rollout in question or ()]
        # None: siblings are still to come, and the put of the last one asks.
        answer: bool | Awaitable[Any] = True
        if question is not None:
            # While an async accept= thought, any other task may have run: a sibling may have been put, evicted or
            # abandoned, so that the answer is about a group that is no more.
            answer = before[1] if before is not None and before[0] == asked else call_accept(accept, question)
        if not isinstance(answer, bool):
            if self._may_wait:
                return self._finish_filter(asked, answer)
            if inspect.iscoroutine(answer):
                # The next put asks the filter again.
                answer.close()  # Otherwise Python warns that the coroutine was never awaited.
            raise WouldBlock("put_nowait() cannot wait for an accept= that is async: use put()")
        if answer:
            return self._go_on(now)
        # needs no room, so it is never queued: a refused one must not wait for a place
        core.filter_out(self._rollouts, now, self._size)
        self._shell.changed()  # siblings that waited have made room
        return None

    async def _finish_filter(self, asked: list[str], answer: Awaitable[Any]) -> None:
        """``asked``: ids of the rollouts that the answer is about."""
        self._answer = asked, decision_of(await answer)
        rest = self.begin(anyio.current_time())
        if rest is not None:
            await rest

    # -- journalled ----------------------------------------------------------------------------------------------------

    def _write(self, journal: Journal) -> Rest:
        core, size = self._shell.core, self._size
        # A bad rollout is not written. The check is repeated after the disk has answered, when the id may be in use.
        core.check(self._rollouts, size)
        # A later declaration does not change a closed group.
        before = None if size is None else core.buffer.groups.declared(size.group_id)
        put = journal.write(
            self._rollouts, core.in_flight.next_step, None if before is not None and before.closed else size
        )
        return self._finish_journal(journal, put)

    async def _finish_journal(self, journal: Journal, put: Change) -> None:
        accepted = False
        try:
            # Between here and the taking below the rollouts are on the disk and not in the buffer. A crash then brings
            # back rollouts whose put had not returned, which a retry finds as duplicates: never lost, never doubled.
            await put.written()
            self._shell.check_open("put")
            rest = self._go_on(anyio.current_time(), written=True)
            if rest is not None:
                await rest
            accepted = True
        finally:
            journal.settle(put, accepted=accepted)

    # -- waiting for room ----------------------------------------------------------------------------------------------

    def _go_on(self, now: float, *, written: bool = False) -> Rest:
        core, journal, queue = self._shell.core, self._shell.journal, self._shell.puts
        if journal is not None and not written:
            return self._write(journal)
        # A waiting put goes first. A sibling needs no room, and may be the one that a full buffer waits for.
        if queue.waiters and self._rollouts and not core.admission.is_sibling(self._rollouts[0]):
            core.check(self._rollouts, self._size)  # a bad rollout is refused now, not after a long wait
        elif self._take(now):
            return None
        if not self._may_wait:
            raise WouldBlock
        return queue.wait(self, self._try_again)

    def _try_again(self) -> Literal[True] | None:
        self._shell.check_open("put")
        return True if self._take(anyio.current_time()) else None

    def _take(self, now: float) -> bool:
        """Into the buffer, if there is room. Nothing may be awaited after it."""
        shell = self._shell
        try:
            shell.core.add_all(self._rollouts, now, self._size)
        except WouldBlock:
            shell.wake_consumer()  # no room means that the window counts as full
            return False
        if self._size is not None:
            shell.changed()  # fewer places are kept for siblings
        # After the rollouts are held, because a woken task looks for them.
        shell.wake_consumer()
        if self.group_id is not None:
            shell.puts.wake_siblings(self.group_id)
        return True
