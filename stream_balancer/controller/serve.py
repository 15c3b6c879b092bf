"""Batches to links. On the controller::

    import stream_balancer as sb
    from stream_balancer.controller.serve import serve
    from stream_balancer.transport.gloo.torch_dist import TorchTransport

    async with sb.StreamBalancer(config) as balancer, TorchTransport.listen(dp_size=config.dp_size) as transport:
        print(transport.address)                       # "tcp://127.0.0.1:PORT": give it to the ranks
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, transport)
            ... await balancer.put(rollout) ...
            balancer.end()                             # serve returns once every rank has acknowledged everything

and on every rank, a process of its own::

    for batch in sb.RankFeed("tcp://127.0.0.1:PORT", rank=rank, dp_size=dp_size):
        for mb in batch.micro_batches:
            train(mb.packed())

Inside an initialised torch.distributed world (torchrun) ``RankFeed()`` and ``TorchTransport(store, dp_size=...)``
meet in that world's store instead; the controller may be a thread of rank 0 that runs ``anyio.run(...)``.

What waits for what: ``serve`` takes a batch only when every rank has a credit (so the window stays full and the
choice late), each link sends as soon as it has both a share and a credit, and a step is acknowledged to the balancer
when its last rank is done.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, runtime_checkable

import anyio

from stream_balancer.config import BalancerConfig
from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.denominators import StepAgreement
from stream_balancer.controller.producers import ProducerTransport, attend
from stream_balancer.controller.stall_reporter import StallReporter
from stream_balancer.core.diagnosis import RankState, why_ranks_wait
from stream_balancer.errors import EndOfStream, RankLostError, WireError
from stream_balancer.transport import Link, Transport
from stream_balancer.types import Batch, RankBatch
from stream_balancer.wire.messages import PayloadsFetched, StepHeld, StepReport
from stream_balancer.wire.partial_share import is_remote

__all__ = ["serve"]

logger = logging.getLogger("stream_balancer.dispatch")


class Source(Protocol):
    """What ``serve`` asks of a balancer."""

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]:
        """See :meth:`StreamBalancer.batches`."""
        ...

    def acknowledge(self, step: int) -> None:
        """See :meth:`StreamBalancer.acknowledge`."""
        ...


@runtime_checkable
class _Timed(Protocol):
    def record_step_seconds(
        self,
        step: int,
        rank: int,
        seconds: float,
        *,
        own: bool = True,
        waited_s: float | None = None,
        ready_s: float = 0.0,
    ) -> None: ...


@runtime_checkable
class _Resumable(Protocol):
    def in_flight(self) -> tuple[Batch, ...]: ...
    def nack(self, step: int) -> None: ...


@runtime_checkable
class _Explaining(Protocol):
    @property
    def config(self) -> BalancerConfig: ...
    def why_no_batch(self) -> str: ...


class _Rank:
    """What the controller knows about one rank."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.unacknowledged: deque[RankBatch] = deque()
        self.sent = 0
        """How many of ``unacknowledged``, from the front, the present link has been given."""
        self.fetched: set[int] = set()
        """Steps that the present link has fetched the payloads of, and does not know the denominators of."""
        self.left = False
        """It said good-bye after the end."""
        self.error: RankLostError | None = None
        """Why it is missing, if it was there before."""
        self.deadline = math.inf
        """When to give up on it, on the event loop's clock."""
        self.since = anyio.current_time()
        """When it last became ready, or ceased to be."""
        self._was_ready = False

    @property
    def ready(self) -> bool:
        """It has a link, everything was sent, and there is room for one more."""
        return self.link is not None and self.sent == len(self.unacknowledged) and self.link.credits > 0

    @property
    def finished(self) -> bool:
        """Nothing is left to deliver and it need not be told the end any more."""
        return not self.unacknowledged and (self.left or self.error is not None)

    def note_readiness(self) -> None:
        """Remember since when it is ready, or is not."""
        if self.ready != self._was_ready:
            self._was_ready, self.since = self.ready, anyio.current_time()

    def state(self, number: int, now: float) -> RankState:
        """For the report of a stall."""
        return RankState(
            rank=number,
            ready=self.ready,
            since_s=now - self.since,
            connected=self.link is not None,
            lost=None if self.error is None else self.error.cause,
            queue=len(self.unacknowledged),
            step=self.unacknowledged[0].step if self.unacknowledged else None,
        )


async def serve(
    balancer: Source, transport: Transport, *, rejoin_timeout_s: float = 0.0, report_after_s: float = 60.0
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    Returns when every rank has acknowledged everything and has been told the end. A rank that is lost may come back
    within ``rejoin_timeout_s`` (``math.inf`` = for ever) under a new incarnation and gets again what it had not
    acknowledged, same plan, same order; the others notice nothing. The default 0 tells at once: without an elastic
    launcher nobody would come back. A rank that was lost before ``serve`` began is waited for without limit, as one
    that has not come yet.

    You may acknowledge too, with ``balancer.acknowledge_through(step)`` at a checkpoint: what ranks say of these steps
    later changes nothing, and a rank that comes back does not get them again.

    When nothing was dispatched for ``report_after_s``, a warning in the log says why: which rank gives no credit, or
    how many rollouts wait for what; again after twice that time, and so on (``math.inf`` = never).

    If ``serve`` is cancelled or raises, nothing is lost: what was not acknowledged stays in flight in the balancer,
    and the next ``serve`` delivers it again. Raises ValueError at once if ``transport`` is for another number of ranks
    than ``balancer``; RankLostError, naming rank, step and cause.
    """
    if not rejoin_timeout_s >= 0:
        raise ValueError(f"rejoin_timeout_s must be >= 0 (math.inf = wait for ever), not {rejoin_timeout_s}")
    if isinstance(balancer, _Explaining) and balancer.config.dp_size != transport.dp_size:
        raise ValueError(
            f"the transport is for dp_size={transport.dp_size} ranks, but the balancer plans for "
            f"dp_size={balancer.config.dp_size}. Give both the same number of data-parallel ranks"
        )
    await _Server(balancer, transport, rejoin_timeout_s, report_after_s).run()


class _Server:
    """One run of ``serve``. Links report through callbacks in the event loop; only :meth:`run` and its two tasks
    wait."""

    def __init__(self, balancer: Source, transport: Transport, rejoin_timeout_s: float, report_after_s: float) -> None:
        self._balancer = balancer
        self._transport = transport
        self._rejoin_timeout_s = rejoin_timeout_s
        self._reporter = StallReporter(report_after_s, self._why_stalled, logger)
        self._ranks = [_Rank() for _ in range(transport.dp_size)]
        self._links: list[Link] = []
        self._open_steps: dict[int, set[int]] = {}  # step -> ranks that have not acknowledged it
        self._agreements: dict[int, StepAgreement] = {}  # for steps some of whose payloads lie with producers
        self._busy: dict[int, set[int]] = {}  # step -> ranks whose trainer is not through with it
        self._all_ready_at = anyio.current_time()
        self._ready_s: dict[int, list[float]] = {}  # step -> how long each rank had been ready when the last one was
        self._slow: tuple[int, int] | None = None  # rank and step of the straggler that was told
        self._waiters: list[anyio.Event] = []
        self._talking: set[Link] = set()
        self._ending = False
        self._failure: Exception | None = None

    async def run(self) -> None:
        if isinstance(self._balancer, _Resumable):
            for batch in self._balancer.in_flight():
                self._balancer.nack(batch.step)  # batches() gives all of them again, in the order of their steps
        if isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.rank_states = self._states
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                tasks.start_soon(self._reporter.wait, anyio.Event())
                if isinstance(self._balancer, StreamBalancer) and isinstance(self._transport, ProducerTransport):
                    tasks.start_soon(partial(attend, direct=True), self._balancer, self._transport)
                tasks.start_soon(self._or_fail, self._accept_all, tasks.cancel_scope)
                await self._or_fail(self._deliver_all, tasks.cancel_scope)
                tasks.cancel_scope.cancel()
        finally:
            if isinstance(self._balancer, StreamBalancer):
                self._balancer.parts.consumer.rank_states = None
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for link in self._links:
                        closing.start_soon(link.aclose)
        if self._failure is not None:
            raise self._failure

    async def _or_fail(self, job: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """An error of one task ends all, and is raised by ``serve`` as it is, not in a group."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - raised by run()
            self._failure = self._failure or error
            scope.cancel()

    async def _deliver_all(self) -> None:
        batches = aiter(self._balancer.batches(auto_ack=False))
        while True:
            await self._until(lambda: all(rank.ready for rank in self._ranks))
            self._all_ready_at = anyio.current_time()
            try:
                self._add(await anext(batches))  # no name for it: it must not outlive its acknowledgement here
            except StopAsyncIteration:
                break
        self._ending = True
        self._reporter.moved()
        self._pump_all()
        await self._until(lambda: all(rank.finished for rank in self._ranks))

    async def _accept_all(self) -> None:
        while True:
            link = await self._transport.accept()
            if not link.live:
                logger.warning("rank %d connected and was lost before serve() took notice: waiting for it", link.rank)
                await link.aclose()
                continue
            self._links = [old for old in self._links if old in [rank.link for rank in self._ranks]]
            self._links.append(link)
            self._attach(link)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Act on what links say. End everything on a failure, or when a lost rank has not come back in time."""
        while self._failure is None:
            while self._talking:
                self._pump(self._talking.pop())
            missing = min(self._ranks, key=lambda rank: rank.deadline)
            if self._failure is None and missing.deadline <= anyio.current_time():
                self._failure = missing.error
            if self._failure is None:
                with anyio.CancelScope(deadline=missing.deadline):
                    await self._change()
        scope.cancel()

    # waiting

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        event = anyio.Event()
        self._waiters.append(event)
        await event.wait()

    def _ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for event in waiters:
            event.set()

    # deciding; no awaits below this line

    def _why_stalled(self, seconds: float) -> str:
        if self._ending:
            owing = [number for number, rank in enumerate(self._ranks) if not rank.finished]
            return f"all batches were sent {seconds:.0f} s ago; not yet done with them: ranks {owing}"
        reasons = [why_ranks_wait(self._states())]
        if isinstance(self._balancer, _Explaining):
            reasons.append(self._balancer.why_no_batch())
        return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))

    def _tell_straggler(self) -> None:
        """Once for each that is found."""
        straggler = self._balancer.straggler() if isinstance(self._balancer, StreamBalancer) else None
        slow = None if straggler is None else (straggler.rank, straggler.since_step)
        if slow is not None and slow != self._slow:
            logger.warning("%s", straggler)
        self._slow = slow

    def _states(self) -> list[RankState]:
        now = anyio.current_time()
        return [rank.state(number, now) for number, rank in enumerate(self._ranks)]

    def _attach(self, link: Link) -> None:
        rank = self._ranks[link.rank]
        rank.link, rank.sent, rank.left = link, 0, False
        rank.error, rank.deadline, rank.since = None, math.inf, anyio.current_time()
        rank.fetched.clear()
        self._drop_acknowledged(rank, link.rank)
        link.subscribe(lambda: self._on_talk(link))
        self._pump(link)

    def _on_talk(self, link: Link) -> None:
        """In the event loop but in no task, where few things may be done: note it, and wake the task that acts on
        it."""
        self._talking.add(link)
        self._ring()

    def _drop_acknowledged(self, rank: _Rank, number: int) -> None:
        """A rank that comes back does not get what the user has acknowledged meanwhile: its checkpoint holds it."""
        if isinstance(self._balancer, _Resumable):
            held = {batch.step for batch in self._balancer.in_flight()}
            for share in [share for share in rank.unacknowledged if share.step not in held]:
                rank.unacknowledged.remove(share)
                if share.step in self._agreements:  # the others wait for its answer, which will not come
                    self._agreements[share.step].fetched(number, ())
                    self._release(self._agreements[share.step])
                self._settle(number, share.step)

    def _add(self, batch: Batch) -> None:
        self._reporter.moved()
        self._open_steps[batch.step] = set(range(len(self._ranks)))
        if any(is_remote(rank_batch) for rank_batch in batch.ranks):
            self._agreements[batch.step] = StepAgreement(batch)
        self._busy[batch.step] = set(range(len(self._ranks)))
        self._ready_s[batch.step] = [max(self._all_ready_at - rank.since, 0.0) for rank in self._ranks]
        for rank, share in zip(self._ranks, batch.ranks, strict=True):
            rank.unacknowledged.append(share)
        self._pump_all()

    def _pump_all(self) -> None:
        for rank in self._ranks:
            if rank.link is not None:
                self._pump(rank.link)

    def _pump(self, link: Link) -> None:
        """Take in what the link has to say, and give it what it can take."""
        rank = self._ranks[link.rank]
        if rank.link is not link:
            return
        try:
            while (done := link.report()) is not None:
                if isinstance(done, StepHeld):
                    self._note_worked(link.rank, done.step)
                elif isinstance(done, StepReport):
                    self._acknowledge(rank, link.rank, done)
                else:
                    self._fetched(rank, link.rank, done)
            while link.credits > 0 and rank.sent < len(rank.unacknowledged):
                rank_batch = rank.unacknowledged[rank.sent]
                link.send(rank_batch, confirm=rank_batch.step in self._agreements)
                rank.sent += 1
            if self._ending and rank.sent == len(rank.unacknowledged):
                link.end()
        except EndOfStream:
            rank.left = True
            if rank.unacknowledged:
                self._lose(link.rank, _left_owing(link.rank, rank.unacknowledged[0].step))
        except RankLostError as error:
            self._lose(link.rank, error)
        except Exception as error:  # noqa: BLE001 - a share that cannot be sent; told by serve()
            self._failure = error
        rank.note_readiness()
        self._ring()

    def _lose(self, number: int, error: RankLostError) -> None:
        rank = self._ranks[number]
        rank.link, rank.error, rank.since = None, error, anyio.current_time()
        for agreement in self._agreements.values():
            agreement.lost(number)
        if not (self._ending and rank.finished):
            rank.deadline = anyio.current_time() + self._rejoin_timeout_s

    def _acknowledge(self, rank: _Rank, number: int, done: StepReport) -> None:
        if rank.sent == 0 or rank.unacknowledged[0].step != done.step:
            text = f"rank {number} acknowledged step {done.step}, which it was not working on"
            raise _broke_protocol(number, done.step, text)
        rank.unacknowledged.popleft()
        rank.sent -= 1
        if isinstance(self._balancer, _Timed):
            own = done.compute_s is not None
            seconds = done.seconds if done.compute_s is None else done.compute_s
            ready_s = self._ready_s[done.step][number]
            self._balancer.record_step_seconds(
                done.step, number, seconds, own=own, waited_s=done.waited_s, ready_s=ready_s
            )
        self._settle(number, done.step)

    def _fetched(self, rank: _Rank, number: int, fetched: PayloadsFetched) -> None:
        """A rank has the payloads of a step, but for those that are gone with their producer. Once all ranks have, each
        learns what to divide by; a rank that comes again, once it has fetched again."""
        agreement = self._agreements.get(fetched.step)
        try:
            if agreement is None or fetched.step in rank.fetched:
                raise WireError(f"rank {number} says that it has fetched step {fetched.step}, which it need not")
            gone = agreement.fetched(number, fetched.missing)
        except WireError as error:
            raise _broke_protocol(number, fetched.step, str(error)) from error
        rank.fetched.add(fetched.step)
        if gone:
            self._mask(number, fetched, [rollout.rollout_id for rollout in gone])
        self._release(agreement)

    def _release(self, agreement: StepAgreement) -> None:
        """Once it is final what the step divides by, send it to all who wait for it."""
        final = agreement.final
        for rank in self._ranks:
            if final is not None and rank.link is not None and final.step in rank.fetched:
                rank.fetched.discard(final.step)
                rank.link.denominators(final)

    def _mask(self, number: int, fetched: PayloadsFetched, rollout_ids: list[str]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        if isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.core.mark_missing(fetched.step, rollout_ids)
        ids = set(rollout_ids)
        named = [one for one in fetched.missing if one.rollout_id in ids]
        text = ", ".join(f"{one.rollout_id!r} (put by {one.owner}: {one.cause})" for one in named[:5])
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        logger.warning(
            "step %d, rank %d: %d rollouts are gone with their producer and are masked: %s%s",
            fetched.step,
            number,
            len(named),
            text,
            more,
        )

    def _note_worked(self, number: int, step: int) -> None:
        """A rank is through with ``step``, and asks for the next. Once all are, another may leave that is as old."""
        busy = self._busy.get(step, set())
        busy.discard(number)
        if not busy and step in self._open_steps and isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.worked_through(step)

    def _settle(self, number: int, step: int) -> None:
        """A rank has done ``step``, or need not do it. Once that is so for all, the balancer need not keep it."""
        missing = self._open_steps[step]
        missing.discard(number)
        if not missing:
            del self._open_steps[step], self._busy[step], self._ready_s[step]
            self._agreements.pop(step, None)
            with suppress(ValueError):  # the user was first: acknowledge_through() at a checkpoint
                self._balancer.acknowledge(step)
            self._tell_straggler()
        else:
            self._note_worked(number, step)


def _left_owing(rank: int, step: int) -> RankLostError:
    return RankLostError(
        f"rank {rank} closed its feed after the end without acknowledging step {step}, which is still held. Ask for "
        "the next batch until there is none, or call batch.ack(), before closing; or restart the rank",
        rank=rank,
        step=step,
        cause="the rank closed its feed",
    )


def _broke_protocol(rank: int, step: int, text: str) -> RankLostError:
    return RankLostError(f"{text}. Restart it", rank=rank, step=step, cause="broke the protocol")
