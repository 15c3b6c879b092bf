"""The balancer: rollouts in, batches out, and the knobs between.

::

    put(rollout) ---> core.add ---> window ---> core.poll ---> batches()
       |  waits while the buffer is full;         |  waits until the core's next_wakeup(), or until a put, end(),
       |  a batch that leaves wakes the oldest     |  reconfigure() or set_version() makes that earlier
       |  waiting put, which wakes the next         `--> the trainer, or serve() to the ranks

What a user calls is here, and nothing else. The core decides; around it is one shell, in two modules: ``puts`` and
``batches`` are "decide, or wait and be woken", and ``puts`` knows the event loop, and whom a change wakes. Two rules
keep rollouts safe under every kind of cancellation: nothing is ever handed to a waiting task (it is woken, and takes
for itself), and nothing is awaited after the taking.

All methods belong to the event loop's thread; for threads and plain loops there is :func:`stream_balancer.blocking`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer import learn
from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.core.diagnosis import RankState, why_no_batch
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import AlreadyInUseError
from stream_balancer.facade import OfOneProcess
from stream_balancer.host.batches import Batches, Shell
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.host.journal import Journal, Recovered
from stream_balancer.host.observers import Notices
from stream_balancer.host.producer_registry import ProducerRegistry
from stream_balancer.host.puts import PendingPut
from stream_balancer.host.recorder import Recorder
from stream_balancer.host.wakeups import StallReporter
from stream_balancer.rollouts import Batch, EvictReason, Rollout
from stream_balancer.slots import Reservation
from stream_balancer.statistics import Statistics, Straggler

_log = logging.getLogger("stream_balancer.balancer")


class StreamBalancer(OfOneProcess):
    """Takes rollouts as they finish and gives batches in which all ranks finish together.

    ``async with StreamBalancer(config) as balancer`` closes it at the end; it needs no task of its own.

    ``on_evict(rollout, reason)`` is called, in the loop's thread, for every rollout that is given up. What it raises
    is logged.

    ``accept(rollouts)`` decides what is worth training on, before it takes a place: called with a rollout by itself, or
    with all siblings of a group (of ``put_group``, or once the last of ``groups.size`` comes). What it refuses is
    counted and evicted as "filtered", and its put returns as usual; what it raises comes out of that put, and nothing
    was accepted. It may be async: a slow answer delays its own put and no other. See docs/staleness.md.

    ``journal``: a folder. A put then returns once the rollout is on the disk, and the balancer goes on after a crash
    with all that was accepted and not acknowledged; see docs/restarting.md. It is read on entering ``async with``,
    which raises AlreadyInUseError if another process has it.

    ``report_after_s``: when a trainer, puts or reservers have waited so long and no batch has left, a warning in the
    log says why (:meth:`why_no_batch`); again after twice that time, and so on (``math.inf`` = never). More than your
    longest step. While :func:`serve` runs it does so instead, knowing the ranks too.

    ``num_producers``: how many producers in other processes (:func:`connect`) take part; this balancer ends once so
    many have called ``end()`` (None: one), and no other is connected that has not.
    """

    _in_another_process = (
        "put with sb.connect(address), where sb.serve() serves this one; on Ray, use stream_balancer.ray"
    )

    def __init__(
        self,
        config: BalancerConfig,
        *,
        on_evict: Callable[[Rollout, EvictReason], object] | None = None,
        accept: Accept | None = None,
        journal: str | os.PathLike[str] | None = None,
        report_after_s: float = 60.0,
        num_producers: int | None = None,
    ) -> None:
        core, reporter = BalancerCore(config), StallReporter(report_after_s, self._why_stalled, _log)
        self._core, self.parts = core, Shell(core, reporter, accept, None if journal is None else Journal(journal))
        self.parts.producers = ProducerRegistry(self.parts.handed, self.end, num_producers)
        self._idle = learn.attach(core)
        self._recorder: Recorder | None = None
        self.observers: list[Observer] = core.observers
        """Observers of what happens (:class:`Observer`), notified in this order in the loop's thread. Append yours."""
        self._notices = Notices(core)
        self.observers.append(self._notices)
        if on_evict is not None:
            observer = Observer()
            observer.evicted = on_evict  # type: ignore[assignment, method-assign]
            self.observers.append(observer)

    def __repr__(self) -> str:
        core = self._core
        then = "ended" if self.ended else f"step {core.in_flight.next_step} is next"
        return f"{type(self).__name__}({core.buffer.num_waiting} wait, window {self.config.window}, {then})"

    @property
    def config(self) -> BalancerConfig:
        """The knobs in force."""
        return self._core.config

    @property
    def ended(self) -> bool:
        """True once ``end()`` or ``aclose()`` was called: puts raise ClosedResourceError."""
        return self.parts.closed or self._core.ended

    @property
    def recovered(self) -> Recovered | None:
        """Content of the journal when this balancer was entered; None without a journal."""
        return None if self.parts.journal is None else self.parts.journal.recovered

    # -- rollouts in ---------------------------------------------------------------------------------------------------

    async def put(self, rollout: Rollout) -> None:
        """Put a finished rollout; returns once it is accepted. First come, first served while the buffer is full.

        If ``put`` is cancelled, or raises, the rollout was not accepted, and the buffer is as it was.

        Raises :class:`RolloutError` for a rollout that cannot be dispatched (:class:`DuplicateRolloutError` if its id
        is already held), ClosedResourceError after ``end()`` or ``aclose()``, also while waiting.
        """
        await self.parts.put([rollout])

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """Put siblings of a group at once: all are accepted, or none. Otherwise like :meth:`put`.

        ``complete``: no more will come; the group may leave with these and those that came before, however many
        ``groups.size`` says there are. A later put of the group raises :class:`RolloutError`.

        Raises :class:`RolloutError` if the rollouts do not share one ``group_id``.
        """
        # a list of ours: theirs may be used again while this put waits
        await self.parts.put(list(rollouts), complete=bool(complete))

    async def expect_group(self, group_id: str, size: int) -> None:
        """A group has ``size`` rollouts, not ``groups.size``: it may leave once so many have come, and takes no more.

        Raises ValueError if another size was declared before, if more have come already, for a size above
        ``batch_size``, and where groups play no part.
        """
        await self.parts.put([], size=GroupSize(group_id, size))

    async def close_group(self, group_id: str) -> None:
        """Declare that no sibling of a group will come any more, say where a worker has died: the group leaves short,
        and takes no more. :meth:`abandon_group` throws it away instead.

        May be repeated. Raises ValueError where groups play no part.
        """
        await self.parts.put([], size=GroupSize(group_id, None))

    def put_nowait(self, rollout: Rollout) -> None:
        """:meth:`put`, or WouldBlock if the buffer is full or others are waiting to put. O(log n)."""
        # No checkpoint, unlike put(): it must be callable from a callback of the loop, where nothing can be awaited.
        # an object all the same: every put goes one way, and this one never gets into a queue
        PendingPut(self.parts, [rollout]).begin(self.parts.now("put_nowait"), may_wait=False)

    def reserve(self, count: int = 1) -> Reservation:
        """A slot for rollouts that are still to be generated::

            async with balancer.reserve() as slot:
                rollout = await generate(prompt, policy)
                await slot.put(rollout)

        Waits, first come first served, until so many more may begin and yet none of them will be older than
        ``staleness.max_versions`` when it is dispatched: instead of throwing long rollouts away, begin fewer. Holds if
        every rollout comes this way, and ``set_version`` is called at most once per batch, before the next is asked
        for. See docs/staleness.md for the rule. Leaving the block gives back what was not put.

        Without ``staleness`` the limit is ``capacity``. Raises :class:`ConfigError` for knobs under which the bound
        could not hold or the window not fill, ValueError for a ``count`` that could never be admitted; entering raises
        ClosedResourceError after ``end()`` or ``aclose()``.
        """
        return self.parts.reserve(count)

    # -- batches out ---------------------------------------------------------------------------------------------------

    def batches(self, *, auto_ack: bool = True) -> Batches:
        """Iterate over batches: ``async for batch in balancer.batches()``. Ends once ``end()`` was called and all is
        drained.

        With ``auto_ack`` asking for the next batch acknowledges the last one; otherwise call :meth:`acknowledge`.
        Either way, who asks is through with the last one: under ``staleness.max_versions`` that is what counts.

        One trainer iterates at a time. A new iterator takes over from an old one, whose next use raises
        :class:`AlreadyInUseError`; while a task is waiting in the old one, this call raises it instead.
        """
        return self.parts.iterate(auto_ack=auto_ack)

    def acknowledge(self, step: int) -> None:
        """A batch has been trained on; its rollouts need not be kept. Raises ValueError for a step that is not in
        flight."""
        self.parts.acknowledge(step)

    def acknowledge_through(self, step: int) -> None:
        """Your checkpoint contains all steps up to and including this one: none of them is delivered again.

        For exactly-once training call it when a checkpoint is saved, and after a restart, before the first batch, with
        the step of the checkpoint that was loaded. May be repeated; steps that are not in flight are passed over.
        """
        self.parts.check_thread("acknowledge_through")
        for number in self._core.in_flight.steps_through(step):
            self.parts.acknowledge(number)

    def nack(self, step: int) -> None:
        """A batch was not trained on after all (the step failed): ``batches()`` gives it again, next, with the same
        plan.

        For loops over :meth:`batches`. A rank that iterates a ``RankFeed`` gets its rank batch again by connecting
        under its next incarnation. Raises ValueError for a step that is not in flight, and while ``serve()`` delivers.
        """
        self.parts.nack(step)

    def in_flight(self) -> tuple[Batch, ...]:
        """Batches dispatched and not yet acknowledged, oldest first."""
        return self._core.in_flight.delivered()

    def record_step_seconds(
        self, step: int, rank: int, seconds: float, *, own: bool = True, waited_s: float | None = None,
        ready_s: float = 0.0,
    ) -> None:  # fmt: skip
        """The seconds that a rank computed in a step; ``serve()`` does it for ranks that iterate a ``RankFeed``.

        Before the step is acknowledged. ``own``: the rank did not wait for others in them; only such seconds teach a
        ``CalibratedCost``. ``waited_s``: how long it waited for its rank batch before; None = as long as the balancer
        waited for rollouts. ``ready_s``: how long it had been ready for more when the last rank was. Raises ValueError
        for a rank that the step has not, and for seconds that cannot be.
        """
        timing = StepTiming(step, rank, seconds, own, waited_s, ready_s)
        self._core.record_step(timing, self.parts.now("record_step_seconds"))

    def straggler(self) -> Straggler | None:
        """A rank that is slower than the others, step after step; ``serve()`` logs it when it is found. O(ranks)."""
        return self._idle.straggler(self.parts.now("straggler"))

    # -- control -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """Policy version last set; None before the first."""
        return self._core.staleness.version

    async def version_after(self, version: int | None) -> int:
        """Wait for a policy version later than ``version`` (None: for any), and return the newest; at once where there
        is one. Raises ClosedResourceError once :meth:`aclose` was called.
        """
        self.parts.enter("version_after")
        await anyio.lowlevel.checkpoint()
        # in a loop: other knobs, or a checkpoint that is loaded, wake all, perhaps with no newer version
        while (current := self.version) is None or (version is not None and current <= version):
            await self.parts.version_changes()
        return current

    def set_version(self, version: int) -> None:
        """The policy moved on. Rollouts more than ``staleness.max_versions`` behind are evicted, or sent on, as
        configured. An older version than the last one, as of an older checkpoint, changes nothing, with a warning.
        """
        self.parts.check_thread("set_version")
        self._core.set_version(version)
        self.parts.version_changed()

    def abandon_group(self, group_id: str) -> int:
        """Give a group up, of which a sibling will never come: what waits of it is evicted ("abandoned"), now, and what
        still comes of it when it comes (its put returns as usual). How many were evicted now.

        To train on the rest of it instead, call :meth:`close_group`. To sample the prompt again, give the new siblings
        another ``group_id``. Raises ValueError where groups play no part.
        """
        self.parts.check_thread("abandon_group")
        number = self._core.abandon_group(group_id)
        self.parts.changed()
        return number

    def reconfigure(self, /, **changes: Any) -> None:
        """Change knobs live: ``reconfigure(window=768, deadline_s=10.0)``. Knobs never given are derived anew.

        Another ``dp_size`` holds from the next batch on. A batch that
        is to be given again is planned again: same step, same rollouts. What ranks do: docs/elastic.md.

        Raises :class:`ConfigError`, changing nothing, for a value or combination that cannot work.
        """
        self.parts.check_thread("reconfigure")
        self._core.reconfigure(self.config.replace(**changes))
        self.parts.version_changed()

    def end(self) -> None:
        """No more rollouts will come: drain what waits, also if it is fewer than the ranks; then ``batches()`` ends.

        Puts that are waiting for room raise ClosedResourceError: they were not accepted. May be called twice.
        """
        self.parts.check_thread("end")
        self._core.end()
        self.parts.end()

    async def aclose(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice."""
        self.parts.check_thread("aclose")
        self._notices.closed()
        self.parts.closed = True
        self.parts.end()
        self.parts.version_changed()
        with anyio.CancelScope(shield=True):
            if self.parts.journal is not None:
                if self._core.finished and not self._core.in_flight.delivered():
                    self.parts.producers.forget()
                await self.parts.journal.aclose()
            if self._recorder is not None:
                await anyio.to_thread.run_sync(self._recorder.close)
        await anyio.lowlevel.checkpoint()
        self.parts.leave()

    async def __aenter__(self) -> Self:
        self.parts.enter("__aenter__")
        if self.parts.journal is not None:
            await self.parts.journal.recover(self._core)
            self.parts.producers.follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything that is held at this instant, sharing the rollouts. O(n) pointers."""
        return self._core.snapshot(self.parts.now("snapshot"))

    async def async_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` of this instant, written in a worker thread while puts and batches go on."""
        state = self.snapshot(), self.parts.handed.steps_and_ranks
        return await anyio.to_thread.run_sync(state_dict, *state, limiter=anyio.CapacityLimiter(1))

    def state_dict(self) -> dict[str, Any]:
        """Rollouts that wait and are in flight, counters, versions, known ids: tensors, numbers and strings, for
        ``torch.save`` and torch.distributed.checkpoint. Copies every byte held, in this thread; in an event loop use
        :meth:`async_state_dict`.
        """
        return state_dict(self.snapshot(), self.parts.handed.steps_and_ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Continue from a :meth:`state_dict`, under this balancer's own knobs; load before the first put.

        Batches that were in flight come again, first, with the same step and plan; those for another ``dp_size`` are
        planned again, with the same rollouts. Raises ValueError (RolloutError for a waiting rollout that these knobs
        refuse, saying which and why); nothing has changed then.

        What is damaged does not spoil the rest: it is logged, and returned, one sentence each; empty if all is well.

        A journal is newer than any checkpoint: with one that held something this raises ValueError too.
        """
        now = self.parts.now("load_state_dict")
        snapshot, rows = read_state_dict(state)
        if self.parts.journal is not None:
            self.parts.journal.check_empty()
        self._core.restore(snapshot, now)
        for row in rows:
            self.parts.handed.note(row)
        self.parts.version_changed()
        return snapshot.set_aside

    # -- record --------------------------------------------------------------------------------------------------------

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Write every rollout accepted from now on (lengths, group, seconds) to a new CSV file, until the
        balancer is closed. ``load_trace`` reads it; see docs/tuning.md.

        Never fails a put: what goes wrong with the disk is logged, and kept in the returned object's ``error``. Raises
        :class:`ConfigError` for another suffix, AlreadyInUseError while it records elsewhere.
        """
        self.parts.check_thread("record")
        self.parts.check_open("record")
        if self._recorder is not None and self._recorder.error is None:
            raise AlreadyInUseError(f"record() was called before: arrivals go to {self._recorder.path}")
        self._recorder = Recorder(path)
        self.observers.append(self._recorder)
        return self._recorder

    def statistics(self) -> Statistics:
        """A snapshot that adds up: accepted == waiting + in_flight + acknowledged + evicted."""
        parts, now = self.parts, self.parts.now("statistics")
        return parts.core.statistics(
            now, blocked_puts=len(parts.puts.waiters), reserved=parts.throttle.running,
            blocked_reserves=len(parts.reserves.waiters),
            producer_idle_seconds={"put": parts.puts.waited_s(now), "reserve": parts.reserves.waited_s(now)},
        )  # fmt: skip

    def rank_states(self) -> list[RankState]:
        """Knowledge of ``serve()`` about each rank; empty while it does not run."""
        read = self.parts.rank_states
        return [] if read is None else read()

    def why_no_batch(self) -> str:
        """Reason for which dispatching waits now, in a sentence: ``"37 rollouts wait (window 64), the oldest for
        812 s; no deadline_s is set"``. ``serve()`` logs it, with the ranks' part, when nothing moves for long."""
        core, now = self._core, self.parts.now("why_no_batch")
        ready, taker = core.next_wakeup() <= now, self.parts.taker
        statistics, any_rollouts = self.statistics(), core.counts.accepted > 0
        why = why_no_batch(core, statistics, taker=taker, ready=ready, ended=self.ended)
        producers = "" if self.ended else self.parts.producers.why_not_ended(any_rollouts=any_rollouts)
        return "; ".join(filter(None, [why, producers]))

    def _why_stalled(self, seconds: float) -> str:
        return f"no batch for {seconds:.0f} s: {self.why_no_batch()}"
