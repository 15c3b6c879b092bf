"""The balancer: the only room that waits, and the only reader of the clock.

::

    put(rollout) ---> _core.add ---> window ---> _core.poll ---> batches()
       |  waits while the buffer is full;           |  waits until the core's next_wakeup(), or until a put, end(),
       |  a batch that leaves wakes the oldest       |  reconfigure() or set_version() makes that earlier
       |  waiting put, which wakes the next           `--> the trainer, or dispatch.serve() to the ranks

Decisions are ``_core``'s; here every method is "decide, or park and be woken". Two rules keep rollouts safe on
asyncio and trio alike, under native ``task.cancel()`` and ``asyncio.timeout`` too: nothing is ever handed to a parked
task (it is woken, and takes for itself), and nothing is awaited after the taking. Batches are made when they are
asked for, not before: until the trainer is ready, rollouts stay in the window, where there is most to choose from.

All methods belong to the event loop's thread; for threads and plain loops there is
:func:`stream_balancer.blocking`.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.controller.checkpoint import read_state_dict, state_dict
from stream_balancer.controller.journal import Journal, Recovered, Writing
from stream_balancer.controller.reservations import Reservation, Slot
from stream_balancer.controller.stall_reporter import StallReporter
from stream_balancer.controller.wait_queues import ParkedPut, ParkedPuts, ParkedReserve, Queue
from stream_balancer.core.accept import Accept, Judging, ask, verdict_of
from stream_balancer.core.admission import check_group
from stream_balancer.core.auto_window import AutoWindowObserver
from stream_balancer.core.diagnosis import RankState, Taker, why_no_batch
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.core.staleness import Pacer, check_pacing
from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, WouldBlock
from stream_balancer.planning import Plan
from stream_balancer.statistics import Statistics, Straggler
from stream_balancer.tools.recorder import Recorder
from stream_balancer.transport.threads import OfOneProcess
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["Batches", "StreamBalancer"]

_log = logging.getLogger("stream_balancer.balancer")


class StreamBalancer(OfOneProcess):
    """Takes rollouts as they finish and gives batches in which all ranks finish together.

    ``async with StreamBalancer(config) as balancer`` closes it at the end; it needs no task of its own.

    ``on_evict(rollout, reason)`` is called, in the loop's thread, for every rollout that is given up. What it raises
    is logged and goes no further: the put or set_version() that evicted has happened.

    ``accept(rollouts)`` decides what is worth training on, before it takes a place: called with a rollout by itself, or
    with all siblings of a group (of ``put_group``, or once the last of ``group_size`` comes). What it turns down is
    counted and evicted as "filtered", and its put returns as usual; what it raises comes out of that put, and nothing
    was accepted. It may be async: a slow verdict delays its own put and no other. See docs/staleness.md.

    ``journal``: a folder. A put then returns once the rollout is on the disk, and the balancer goes on after a crash
    with all that was accepted and not acknowledged; see docs/journal.md. It is read on entering ``async with``, which
    raises AlreadyInUseError if another process has it.

    ``report_after_s``: when a trainer, puts or reservers have waited so long and no batch has left, a warning in the
    log says why (:meth:`why_no_batch`); again after twice that time, and so on (``math.inf`` = never). More than your
    longest step. While :func:`serve` runs it does so instead, knowing the ranks too.
    """

    _in_another_process = (
        "put with sb.connect(address), where sb.serve() serves this one; on Ray, use stream_balancer.integrations.ray"
    )

    def __init__(
        self,
        config: BalancerConfig,
        *,
        on_evict: Callable[[Rollout, EvictReason], object] | None = None,
        accept: Accept | None = None,
        journal: str | os.PathLike[str] | Journal | None = None,
        report_after_s: float = 60.0,
    ) -> None:
        self._core = BalancerCore(config)
        self._journal = journal if journal is None or isinstance(journal, Journal) else Journal(journal)
        self.recovered: Recovered | None = None
        """What the journal held when this balancer was entered; None without a journal."""
        self._on_evict = on_evict
        self._accept = accept
        self._auto_window = AutoWindowObserver(self._core)
        self._core.observers.append(self._auto_window)
        self.observers: list[Observer] = self._core.observers
        """Observers of what happens (:class:`Observer`), notified in this order in the event loop's thread. Append
        yours."""
        self._puts = ParkedPuts()
        self._pacer = Pacer()
        self._reservers: Queue[ParkedReserve] = Queue()
        self._recorder: Recorder | None = None
        self._reporter = StallReporter(report_after_s, self._why_stalled, _log)
        self._consumer: Batches | None = None
        self._alarm: anyio.Event | None = None  # set while the consumer is parked
        self._alarm_time = math.inf  # when it will wake by itself
        self._closed = False
        self._checked_world = False
        self._thread: int | None = None  # the event loop's, from the first await until it is closed
        self._serving: Callable[[], list[RankState]] | None = None  # set by serve() while it runs

    @property
    def config(self) -> BalancerConfig:
        """The knobs in force."""
        return self._core.config

    @property
    def ended(self) -> bool:
        """True once ``end()`` or ``aclose()`` was called: puts raise ClosedResourceError."""
        return self._closed or self._core.ended

    # -- rollouts in ---------------------------------------------------------------------------------------------------

    async def put(self, rollout: Rollout) -> None:
        """Hand over a finished rollout; returns once it is accepted. Waits while the buffer is full, first come first
        served.

        If ``put`` is cancelled, or raises, the rollout was not accepted, and the buffer is as it was.

        Raises :class:`RolloutError` for a rollout that cannot be dispatched (:class:`DuplicateRolloutError` if its id
        is already held), ClosedResourceError after ``end()`` or ``aclose()``, also while waiting.
        """
        await self._put([rollout])

    async def put_group(self, rollouts: Sequence[Rollout]) -> None:
        """Hand over all siblings of a group at once: all are accepted, or none. Otherwise like :meth:`put`.

        Raises :class:`RolloutError` if the rollouts do not share one ``group_id``.
        """
        check_group(rollouts)
        await self._put(rollouts)

    def put_nowait(self, rollout: Rollout) -> None:
        """:meth:`put`, or WouldBlock if the buffer is full or others are waiting to put. O(log n)."""
        self._check_thread("put_nowait")
        self._check_open()
        if self._journal is not None:
            raise WouldBlock("put_nowait() cannot wait for the journal's disk, where accepted rollouts are: use put()")
        (rollout,) = self._core.with_loss_masks([rollout])
        if self._accept is not None:
            verdict = self._verdict([rollout])
            if isinstance(verdict, Judging):
                if inspect.iscoroutine(verdict.answer):
                    verdict.answer.close()
                raise WouldBlock("put_nowait() cannot wait for an accept= that is async: use put()")
            if not verdict:
                self._filter_out([rollout])
                return
        if self._puts and not self._core.is_sibling(rollout):
            self._core.check(rollout)
            raise WouldBlock
        if not self._try_add([rollout]):
            raise WouldBlock

    async def _put(self, rollouts: Sequence[Rollout]) -> None:
        self._enter_thread("put")
        await anyio.lowlevel.checkpoint()  # before the taking: nothing may be awaited after it
        pending = self._enter(rollouts)
        if pending is not None:
            await self._finish(pending)

    def _enter(self, rollouts: Sequence[Rollout]) -> _Pending | None:
        """Take them, or begin what must be waited for, with a place in its queue: :meth:`_finish` must follow. Raises
        like ``put``."""
        self._check_open()
        rollouts = self._core.with_loss_masks(rollouts)
        if self._accept is None:
            return self._write_or_let_in(rollouts)
        verdict = self._verdict(rollouts)
        return verdict if isinstance(verdict, Judging) else self._act_on(verdict, rollouts)

    def _verdict(self, rollouts: Sequence[Rollout]) -> bool | Judging:
        """What ``accept`` says about them; True while others of their group must still come."""
        self._core.check_all(rollouts)  # a bad rollout is refused, not judged
        question = self._core.completed_by(rollouts)
        if question is None or self._accept is None:
            return True
        answer = ask(self._accept, question)
        return answer if isinstance(answer, bool) else Judging(rollouts, _ids(question), answer)

    async def _judged(self, judging: Judging) -> _Pending | None:
        verdict = verdict_of(await judging.answer)
        question = self._core.completed_by(judging.rollouts)
        if question is None or _ids(question) != judging.asked:
            return self._enter(judging.rollouts)  # siblings came or left meanwhile: ask again
        self._check_open()
        return self._act_on(verdict, judging.rollouts)

    def _act_on(self, verdict: bool, rollouts: Sequence[Rollout]) -> _Pending | None:
        if verdict:
            return self._write_or_let_in(rollouts)
        self._filter_out(rollouts)
        return None

    def _filter_out(self, rollouts: Sequence[Rollout]) -> None:
        self._core.filter_out(rollouts, anyio.current_time())
        self._moved()  # siblings that waited have made room

    def _write_or_let_in(self, rollouts: Sequence[Rollout]) -> _Pending | None:
        if self._journal is None:
            return self._let_in(rollouts)
        for rollout in rollouts:
            self._core.check(rollout)  # a bad rollout fails now, and is not written
        return self._journal.write(rollouts, self._core.next_step)

    async def _finish(self, pending: _Pending | None) -> None:
        while isinstance(pending, Judging):
            pending = await self._judged(pending)
        if pending is None:
            return None
        if isinstance(pending, ParkedPut):
            return await self._wait_for_room(pending)
        assert self._journal is not None
        await self._journal.written(pending)
        try:
            parked = self._let_in(pending.rollouts)
            if parked is not None:
                await self._wait_for_room(parked)
        except BaseException:
            self._journal.retract(pending)
            raise

    def _let_in(self, rollouts: Sequence[Rollout]) -> ParkedPut | None:
        """Take them, or give them the last place among the parked: :meth:`_wait_for_room` must follow."""
        self._check_open()
        if (not self._puts or self._core.is_sibling(rollouts[0])) and self._try_add(rollouts):
            return None
        self._core.check(rollouts[0])  # a bad rollout fails now, not after a long wait
        return self._puts.park(ParkedPut(rollouts))

    async def _wait_for_room(self, parked: ParkedPut) -> None:
        try:
            while True:
                if parked is self._puts.first:
                    await self._reporter.wait(parked.wake)
                else:
                    await parked.wake.wait()  # it is woken when it becomes the first
                self._check_open()
                if self._try_add(parked.rollouts):
                    return
                parked.wake = anyio.Event()
        finally:
            self._puts.leave(parked)
            self._puts.wake_first()  # pass the baton on: also if this one was cancelled after it was woken

    def _try_add(self, rollouts: Sequence[Rollout]) -> bool:
        now = anyio.current_time()
        try:
            self._core.add_all(rollouts, now)
        except WouldBlock:
            self._ring()  # no room means that the window counts as full
            return False
        if self._recorder is not None:
            self._recorder.add(rollouts, now)
        self._ring()
        self._puts.wake_siblings(rollouts[0].group_id)  # siblings of a waiting group need no room
        self._tell_evicted()
        return True

    def _moved(self) -> None:
        """What waits has become less, or other: tell everybody whom that may concern."""
        self._ring()
        self._puts.wake_first()
        self._wake_next_reserver()
        self._tell_evicted()

    # -- rollouts to come ----------------------------------------------------------------------------------------------

    def reserve(self, count: int = 1) -> Reservation:
        """Room for rollouts that are still to be generated::

            async with balancer.reserve() as slot:
                rollout = await generate(prompt, policy)
                await slot.put(rollout)

        Waits, first come first served, until so many more may begin and yet none of them will be older than
        ``max_staleness`` when it is dispatched: instead of throwing long rollouts away, begin fewer. Holds if every
        rollout comes this way, and ``set_version`` is called at most once per batch, before the next is asked for. See
        docs/staleness.md for the rule and its proof. Leaving the block gives back what was not put.

        Without ``max_staleness`` the limit is ``capacity``. Raises :class:`ConfigError` for knobs under which the bound
        could not hold or the window not fill, ValueError for a ``count`` that could never be admitted; entering raises
        ClosedResourceError after ``end()`` or ``aclose()``.
        """
        check_pacing(self.config, count)
        return Reservation(self, count)

    async def _admit(self, count: int) -> Slot:
        self._enter_thread("reserve")
        await anyio.lowlevel.checkpoint()
        self._check_taking()
        if not self._reservers and (slot := self._try_admit(count)) is not None:
            return slot
        parked = self._reservers.park(ParkedReserve(count))
        try:
            while True:
                self._ring()  # nobody may begin: the window may be as full as it gets
                await self._reporter.wait(parked.wake)
                slot = self._try_admit(count)
                if slot is not None:
                    return slot
                parked.wake = anyio.Event()
        finally:
            self._reservers.leave(parked)
            self._wake_next_reserver()

    def _try_admit(self, count: int) -> Slot | None:
        self._check_taking()
        check_pacing(self.config, count)  # the knobs may have changed while it waited
        version = self._core.version or 0
        if self._core.room_to_begin(self._pacer) < count:
            return None
        return Slot(self, self._pacer.admit(version, count), version, count)

    def _check_taking(self) -> None:
        if self.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")

    def _settle(self, slot: int, count: int) -> None:
        """So many rollouts of a slot have been put, or will never be."""
        if count:
            self._pacer.settle(slot, count)
            self._wake_next_reserver()
            self._ring()

    def _wake_next_reserver(self) -> None:
        """Wake the longest-waiting reserver if it can be admitted, or must be told the end. It wakes the next. O(1)."""
        first = self._reservers.first
        if first is not None and (self.ended or self._core.room_to_begin(self._pacer) >= first.count):
            first.wake.set()

    def _unstick(self) -> None:
        """While a reserver waits, the window can only be filled by what is running: if that is not enough, let a full
        batch go; if nothing is running, whatever is there."""
        if self._reservers:
            self._core.squeeze_if_stuck(self._pacer.running)

    # -- batches out ---------------------------------------------------------------------------------------------------

    def batches(self, *, auto_ack: bool = True) -> Batches:
        """Iterate over batches: ``async for batch in balancer.batches()``. Ends once ``end()`` was called and all is
        drained.

        With ``auto_ack`` asking for the next batch acknowledges the last one; otherwise call :meth:`acknowledge`.
        Either way, who asks is through with the last one: under ``max_staleness`` that is what counts.

        One trainer iterates at a time. A new iterator takes over from an old one, whose next use raises
        :class:`AlreadyInUseError`; while a task is waiting in the old one, this call raises it instead.
        """
        self._check_thread("batches")
        if self._alarm is not None:
            raise AlreadyInUseError(
                "batches() was called while another task is waiting for this balancer's next batch. One trainer "
                "iterates a "
                "balancer; to feed several ranks use serve() and RankFeed, or take batch.ranks[k]"
            )
        self._consumer = Batches(self, auto_ack=auto_ack)
        return self._consumer

    async def _next_batch(self, consumer: Batches) -> Batch | None:
        """The next batch, or None at the end. If cancelled, no batch was taken."""
        self._enter_thread("batches")
        self._check_consumer(consumer)
        if not self._checked_world:
            self._warn_where_every_rank_balances()
        asked_at = anyio.current_time()
        await anyio.lowlevel.checkpoint()
        while True:
            self._check_consumer(consumer)
            self._unstick()
            batch = self._core.poll(anyio.current_time(), asked_at)
            if batch is not None:
                self._reporter.moved()
                self._puts.wake_first()
                self._wake_next_reserver()
                if self._journal is not None:
                    await self._write_plan(self._journal, batch)
                return batch
            if self._core.finished:
                return None
            await self._park_consumer()

    async def _write_plan(self, journal: Journal, batch: Batch) -> None:
        """A plan is on the disk before anybody trains on it, so that it is the same after a crash."""
        try:
            journal.dispatched(batch, *self._core.standing())
            await journal.flush()
        except BaseException:
            self._core.give_again(batch)
            raise

    async def _park_consumer(self) -> None:
        self._alarm, self._alarm_time = anyio.Event(), self._core.next_wakeup()
        try:
            await self._reporter.wait(self._alarm, self._alarm_time)
        finally:
            self._alarm = None

    def _ring(self) -> None:
        """Wake the parked consumer if a batch can leave earlier than it knows. O(1)."""
        self._unstick()
        if self._alarm is not None and (self._core.next_wakeup() < self._alarm_time or self._core.finished):
            self._alarm.set()

    def _check_consumer(self, consumer: Batches) -> None:
        if self._closed:
            raise ClosedResourceError(
                "this balancer is closed: aclose() was called, or its 'async with' block was left"
            )
        if consumer is not self._consumer:
            raise AlreadyInUseError(
                "another iterator over this balancer was made after this one and took over. One trainer iterates "
                "a balancer; "
                "to feed several ranks use serve() and RankFeed, or take batch.ranks[k]"
            )
        if self._alarm is not None:
            raise AlreadyInUseError(
                "another task is already waiting for this balancer's next batch; one trainer iterates it"
            )

    def acknowledge(self, step: int) -> None:
        """A batch has been trained on; its rollouts need not be kept. Raises ValueError for a step that is not in
        flight."""
        self._check_thread("acknowledge")
        self._acknowledged(self._core.acknowledge(step))
        self._step_is_behind()
        self._tell_evicted()

    def acknowledge_through(self, step: int) -> None:
        """Your checkpoint contains all steps up to and including this one: none of them is delivered again.

        For exactly-once training call it when a checkpoint is saved, and after a restart, before the first batch, with
        the step of the checkpoint that was loaded. May be repeated; steps that are not in flight are passed over.
        """
        self._check_thread("acknowledge_through")
        for batch in self._core.acknowledge_through(step):
            self._acknowledged(batch)
        self._step_is_behind()
        self._tell_evicted()

    def _worked_through(self, step: int) -> None:
        """See :meth:`BalancerCore.worked_through`."""
        self._core.worked_through(step)
        self._step_is_behind()

    def _step_is_behind(self) -> None:
        """Others may begin, and what waits may be young enough to leave."""
        self._wake_next_reserver()
        self._ring()

    def _acknowledged(self, batch: Batch) -> None:
        if self._journal is not None:
            self._journal.acknowledged(batch)

    def nack(self, step: int) -> None:
        """A batch was not trained on after all (the step failed): ``batches()`` gives it again, next, with the same
        plan.

        For loops over :meth:`batches`. A rank that iterates a ``RankFeed`` gets its share again by connecting under its
        next incarnation. Raises ValueError for a step that is not in flight, and while ``serve()`` delivers.
        """
        self._check_thread("nack")
        if self._serving is not None:
            raise ValueError(
                f"nack({step}) while serve() delivers to ranks, which have the step. A rank gets its share again by "
                "connecting under its next incarnation; nack() is for loops over batches()"
            )
        self._core.nack(step)
        if self._consumer is not None:
            self._consumer._forget(step)
        self._ring()

    def _give_again(self, batch: Batch) -> None:
        """Nobody got it: the next iteration gives it, unless it was acknowledged meanwhile."""
        if any(held is batch for held in self._core.in_flight()):
            self._core.give_again(batch)
            self._ring()

    def in_flight(self) -> tuple[Batch, ...]:
        """Batches dispatched and not yet acknowledged, oldest first."""
        return self._core.in_flight()

    def record_step_seconds(
        self,
        step: int,
        rank: int,
        seconds: float,
        *,
        own: bool = True,
        waited_s: float | None = None,
        ready_s: float = 0.0,
    ) -> None:
        """Tell how long a rank computed in a step, in seconds; ``serve()`` does it for ranks that iterate a
        ``RankFeed``.

        Before the step is acknowledged. ``own``: the rank did not wait for others in them; only such seconds teach a
        ``CalibratedCost``. ``waited_s``: how long it waited for its share before; None = as long as the balancer
        waited for rollouts. ``ready_s``: how long it had been ready for more when the last rank was.
        """
        self._check_thread("record_step_seconds")
        self._core.record_step_seconds(
            step, rank, seconds, own=own, waited_s=waited_s, ready_s=ready_s, now=anyio.current_time()
        )

    def straggler(self) -> Straggler | None:
        """A rank that is slower than the others, step after step; ``serve()`` logs it when it is found. O(ranks)."""
        return self._core.straggler(anyio.current_time())

    # -- control -------------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """The policy moved on. Rollouts more than ``max_staleness`` versions behind are evicted, or sent on, as
        configured.

        Raises ValueError if it goes backwards.
        """
        self._check_thread("set_version")
        self._core.set_version(version)
        if self._journal is not None:
            self._journal.versioned(version)
        self._moved()

    def _give_up(self, lost: Callable[[Rollout], bool]) -> list[str]:
        """Evict waiting rollouts whose tokens are gone with their producer; their ids."""
        names = self._core.give_up(lost)
        self._moved()
        return names

    def _lost_in_flight(self, step: int, rollout_ids: Iterable[str]) -> None:
        """See :meth:`BalancerCore.lost_in_flight`."""
        self._core.lost_in_flight(step, rollout_ids)

    def abandon_group(self, group_id: str) -> int:
        """Give a group up, of which a sibling will never come: what waits of it is evicted ("abandoned"), now, and what
        still comes of it when it comes (its put returns as usual). How many were evicted now.

        To train on the rest of such groups instead, set ``deadline_s``. To sample the prompt again, give the new
        siblings another ``group_id``. Not kept in checkpoints: what comes of the group after a restart waits. Raises
        ValueError where groups play no part.
        """
        self._check_thread("abandon_group")
        number = self._core.abandon_group(group_id)
        self._moved()
        return number

    def reconfigure(self, /, **changes: Any) -> None:
        """Change knobs live: ``reconfigure(window=768, deadline_s=10.0)``. Knobs never given are derived anew.

        Raises :class:`ConfigError`, changing nothing, for a value or combination that cannot work, and for ``dp_size``.
        """
        self._check_thread("reconfigure")
        self._core.reconfigure(self._core.config.replace(**changes))
        self._moved()

    def end(self) -> None:
        """No more rollouts will come: drain what waits, also if it is fewer than the ranks; then ``batches()`` ends.

        Puts that are waiting for room raise ClosedResourceError: they were not accepted. May be called twice.
        """
        self._check_thread("end")
        self._core.end()
        self._ring()
        self._puts.wake_all()
        self._reservers.wake_all()

    async def aclose(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice."""
        self._check_thread("aclose")
        self._closed = True
        if self._alarm is not None:
            self._alarm.set()
        self._puts.wake_all()
        self._reservers.wake_all()
        if self._journal is not None:
            with anyio.CancelScope(shield=True):
                await self._journal.aclose()
        if self._recorder is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._recorder.close)
        await anyio.lowlevel.checkpoint()
        self._thread = None

    async def __aenter__(self) -> Self:
        self._enter_thread("__aenter__")
        if self._journal is not None and self.recovered is None:
            await self._recover(self._journal)
        return self

    async def _recover(self, journal: Journal) -> None:
        with anyio.CancelScope(shield=True):
            snapshot, recovered = await anyio.to_thread.run_sync(journal.open, self.config.remember_ids)
            try:
                self._core.restore(snapshot, anyio.current_time())
            except BaseException:
                await journal.aclose()
                raise
        journal.start(self._make_room)
        self.recovered = recovered
        self._warn_above_capacity()
        for batch in snapshot.in_flight:
            if len(batch.ranks) != self.config.dp_size:
                journal.returned(batch.step)  # planned for other ranks: its rollouts wait again
        self._tell_evicted()

    def _warn_above_capacity(self) -> None:
        waiting, capacity = self.statistics().waiting, self.config.capacity
        if waiting > capacity and self.config.max_skips is not None:
            _log.warning(
                "%d rollouts were recovered, above capacity (%d): until no more than that wait, some may be passed "
                "over by more dispatches than max_skips (%d). Use the capacity of before",
                waiting,
                capacity,
                self.config.max_skips,
            )

    def _make_room(self) -> None:
        self._core.squeeze()
        self._ring()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that is held at this instant, sharing the rollouts: O(n) pointers, so puts and dispatches go on at once.
        ``stream_balancer.controller.checkpoint.state_dict`` flattens it, in any thread."""
        self._check_thread("snapshot")
        return self._core.snapshot(anyio.current_time(), auto_window=self._auto_window.state())

    async def async_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` of this instant, written in a worker thread while puts and dispatches go on."""
        snapshot = self.snapshot()
        return await anyio.to_thread.run_sync(state_dict, snapshot, limiter=anyio.CapacityLimiter(1))

    def state_dict(self) -> dict[str, Any]:
        """What waits and what is in flight, counters, versions, known ids: tensors, numbers and strings, for
        ``torch.save`` and torch.distributed.checkpoint. Copies every byte held, in this thread; in an event loop use
        :meth:`async_state_dict`.
        """
        return state_dict(self.snapshot())

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Continue from a :meth:`state_dict`, under this balancer's own knobs; load before the first put.

        Batches that were in flight come out of ``batches()`` again, first, with the same step and the same plan; if
        they were planned for another ``dp_size``, their rollouts wait again as the oldest. Raises ValueError
        (RolloutError for a rollout that these knobs refuse, saying which and why); nothing has changed then.

        What is damaged does not spoil the rest. Returns what was set aside, one sentence each, which are logged too;
        empty if all is well.

        A journal is newer than any checkpoint: with one that held something this raises ValueError too.
        """
        self._check_thread("load_state_dict")
        snapshot = read_state_dict(state)
        if self._journal is not None and (self.recovered is None or self.recovered.found):
            raise ValueError(
                f"load_state_dict() with the journal {self._journal.path}: what that holds is newer than a "
                "checkpoint, and is restored on entering `async with`. Call acknowledge_through(step) instead; or, to "
                "go back to the checkpoint, enter a balancer with an empty journal, then load"
            )
        self._core.restore(snapshot, anyio.current_time())
        if self._journal is not None:
            self._journal.adopt(snapshot)
        self._warn_above_capacity()
        self._ring()
        self._tell_evicted()
        return snapshot.set_aside

    # -- record --------------------------------------------------------------------------------------------------------

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Write every rollout accepted from now on (lengths, group, seconds) to a trace file, csv or csv.gz, until the
        balancer is closed. ``load_trace`` reads it; see docs/tuning.md.

        Never blocks and never fails a put: what goes wrong with the disk is logged, and kept in the returned object's
        ``error``. A file that is there is not overwritten. Raises :class:`ConfigError` for another suffix,
        AlreadyInUseError while it records elsewhere, ClosedResourceError when closed.
        """
        self._check_thread("record")
        self._check_open()
        if self._recorder is not None and self._recorder.error is None:
            raise AlreadyInUseError(f"record() was called before: arrivals go to {self._recorder.path}")
        self._recorder = Recorder(path)
        return self._recorder

    def statistics(self) -> Statistics:
        """A snapshot that adds up: accepted == waiting + in_flight + acknowledged + evicted."""
        self._check_thread("statistics")
        return self._core.statistics(
            anyio.current_time(),
            blocked_puts=len(self._puts),
            reserved=self._pacer.running,
            blocked_reserves=len(self._reservers),
            idle_by_window=self._auto_window.idle_by_window,
        )

    def rank_states(self) -> list[RankState]:
        """What ``serve()`` knows of each rank; empty while it does not run."""
        return [] if self._serving is None else self._serving()

    def _waiting_lengths_and_ages(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return self._core.lengths_and_ages(anyio.current_time())

    def _last_step_seconds(self) -> tuple[float, ...]:
        return self._core.last_step_seconds

    def _preview(self) -> tuple[Plan, int] | None:
        return self._core.preview(anyio.current_time())

    def why_no_batch(self) -> str:
        """What dispatching waits for now, in a sentence: ``"37 of 64 rollouts wait, the oldest for 812 s; no deadline_s
        is set"``. ``serve()`` logs it, with the ranks' part, when nothing moves for long."""
        return why_no_batch(
            self.config,
            self.statistics(),
            taker=self._taker,
            ready=self._core.next_wakeup() <= anyio.current_time(),
            ended=self.ended,
            incomplete=self._core.incomplete_groups(),
            held_back=self._core.num_held_back,
            steps_ahead=self._core.steps_ahead,
        )

    def _why_stalled(self, seconds: float) -> str:
        return "" if self._serving is not None else f"no batch for {seconds:.0f} s: {self.why_no_batch()}"

    @property
    def _taker(self) -> Taker:
        """Who takes batches now."""
        if self._serving is not None:
            return "serve"
        if self._alarm is not None:
            return "asking"
        return "nobody" if self._consumer is None else "busy"

    def _warn_where_every_rank_balances(self) -> None:
        """A balancer of its own on each rank balances that rank's rollouts alone, and shares for the others are lost.
        Rank 0 may be the controller of all, and so may any rank that serves."""
        self._checked_world = True
        dist = sys.modules.get("torch.distributed")
        if self._serving is not None or dist is None or not dist.is_available() or not dist.is_initialized():
            return
        rank, dp_size = dist.get_rank(), self.config.dp_size
        if rank > 0 and 1 < dp_size <= dist.get_world_size():
            _log.warning(
                "rank %d iterates batches() of a balancer of its own, which plans for %d ranks. If every rank does, "
                "each trains on a part of its own rollouts, and nobody on the others. One balancer serves all ranks: "
                "sb.serve(balancer, sb.TorchTransport.in_world()) on one, `for batch in sb.RankFeed()` on each, and "
                "sb.connect() to put from each",
                rank,
                dp_size,
            )

    def _enter_thread(self, name: str) -> None:
        """A task is here: this is the event loop's thread."""
        self._check_thread(name)
        self._thread = threading.get_ident()

    def _check_thread(self, name: str) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"{name}() was called in another thread than that of the event loop in which this balancer is used: "
                "tasks would not be woken, and counts not add up. For threads there is sb.blocking(config), for other "
                f"processes sb.connect(address); a worker thread calls anyio.from_thread.run_sync(balancer.{name}, ...)"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedResourceError(
                "put() on a closed balancer: aclose() was called, or its 'async with' block was left"
            )

    def _tell_evicted(self) -> None:
        for rollout, reason in self._core.take_evicted():
            if self._journal is not None:
                self._journal.evicted([rollout.rollout_id], reason, self._core.standing()[1])
            if self._on_evict is not None:
                try:
                    self._on_evict(rollout, reason)
                except Exception:  # noqa: BLE001  # a caller's callback; see the class docstring
                    _log.exception("on_evict failed for rollout %r (%s)", rollout.rollout_id, reason)


class Batches:
    """The iterator :meth:`StreamBalancer.batches` returns. A class, not a generator: cancelling it loses nothing."""

    def __init__(self, balancer: StreamBalancer, *, auto_ack: bool) -> None:
        self._balancer = balancer
        self._auto_ack = auto_ack
        self._ahead = balancer._serving is not None  # serve() asks ahead of the trainers
        self._last_step: int | None = None

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. If cancelled, none was taken."""
        step, self._last_step = self._last_step, None
        if step is not None and self._auto_ack:
            self._balancer.acknowledge(step)
        elif step is not None:
            self._balancer._worked_through(step)
        batch = await self._balancer._next_batch(self)
        if batch is None:
            raise StopAsyncIteration
        if not self._ahead:
            self._last_step = batch.step
        return batch

    def _give_back(self, batch: Batch | None) -> None:
        """It did not reach the one who asked for it."""
        if batch is not None:
            self._forget(batch.step)
            self._balancer._give_again(batch)

    def _forget(self, step: int) -> None:
        """Asking for the next batch does not acknowledge this one."""
        if self._last_step == step:
            self._last_step = None


_Pending: TypeAlias = ParkedPut | Writing | Judging
"""What a put may have to wait for: room, the journal's disk, a verdict."""


def _ids(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    return tuple(r.rollout_id for r in rollouts)
