"""Batches to ranks: ``serve`` and its tasks. On the controller::

    import stream_balancer as sb

    async with sb.StreamBalancer(config) as balancer, sb.TorchTransport.listen(dp_size=config.dp_size) as transport:
        print(transport.address)                       # "tcp://127.0.0.1:PORT": give it to the ranks
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            ...                                        # await balancer.put(rollout), in rollout workers
            balancer.end()                             # serve returns once every rank has acknowledged everything

and on every rank, a process of its own::

    for batch in sb.RankFeed("tcp://127.0.0.1:PORT", rank=rank, dp_size=dp_size):
        for micro_batch in batch.micro_batches:
            train(micro_batch.packed())

Inside an initialised torch.distributed world (torchrun) ``RankFeed()`` and ``TorchTransport(store, dp_size=...)``
meet in that world's store instead; the controller may be a thread of rank 0 that runs ``anyio.run(...)``.

What waits for what: ``serve`` takes a batch only when every rank has a credit (so the window stays full and the
choice late), each link sends as soon as it has both a rank batch and a credit, and a step is acknowledged to the
balancer when its last rank is done.

What is decided on the way is in :mod:`stream_balancer.controller.delivery`; here is only who waits for what.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.delivery import Delivery, Source
from stream_balancer.controller.producers import attend
from stream_balancer.controller.stall_reporter import StallReporter
from stream_balancer.core.diagnosis import why_ranks_wait
from stream_balancer.transport import Link, Transport
from stream_balancer.transport.admission import AdmittingTransport

__all__ = ["serve"]

logger = logging.getLogger("stream_balancer.dispatch")


async def serve(
    balancer: Source, transport: Transport, *, rejoin_timeout_s: float = 0.0, report_after_s: float = 60.0
) -> None:
    """Deliver every batch of ``balancer`` to the ranks that connect to ``transport``, until ``batches()`` ends.

    Returns when every rank has acknowledged everything and was sent the end. A rank that is lost may come back
    within ``rejoin_timeout_s`` (``math.inf`` = for ever) under a new incarnation and gets again what it had not
    acknowledged, same plan, same order; the others notice nothing. The default 0 raises at once: without an elastic
    launcher nobody would come back. A rank that was lost before ``serve`` began is waited for without limit, as one
    that has not come yet.

    You may acknowledge too, with ``balancer.acknowledge_through(step)`` at a checkpoint: what ranks report of these
    steps later changes nothing, and a rank that comes back does not get them again.

    When nothing was dispatched for ``report_after_s``, a warning in the log says why: which rank gives no credit, or
    how many rollouts wait for what; again after twice that time, and so on (``math.inf`` = never).

    If ``serve`` is cancelled or raises, nothing is lost: what was not acknowledged stays in flight in the balancer,
    and the next ``serve`` delivers it again. Raises ValueError at once if ``transport`` is for another number of ranks
    than ``balancer``; RankLostError, naming rank, step and cause.
    """
    if not rejoin_timeout_s >= 0:
        raise ValueError(f"rejoin_timeout_s must be >= 0 (math.inf = wait for ever), not {rejoin_timeout_s}")
    if isinstance(balancer, StreamBalancer) and balancer.config.dp_size != transport.dp_size:
        raise ValueError(
            f"the transport is for dp_size={transport.dp_size} ranks, but the balancer plans for "
            f"dp_size={balancer.config.dp_size}. Give both the same number of data-parallel ranks"
        )
    await _Server(balancer, transport, rejoin_timeout_s, report_after_s).run()


class _Server:
    """One run of ``serve``. Links report through callbacks in the event loop; only :meth:`run` and its tasks wait."""

    def __init__(self, balancer: Source, transport: Transport, rejoin_timeout_s: float, report_after_s: float) -> None:
        self._balancer = balancer
        self._transport = transport
        self._delivery = Delivery(balancer, transport.dp_size, rejoin_timeout_s, on_change=self._wake)
        self._reporter = StallReporter(report_after_s, self._why_stalled, logger)
        self._links: list[Link] = []
        self._changed: set[Link] = set()
        self._waiters: list[anyio.Event] = []
        self._failure: Exception | None = None

    async def run(self) -> None:
        for batch in self._balancer.in_flight():
            self._balancer.nack(batch.step)  # batches() gives all of them again, in the order of their steps
        if isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.rank_states = self._delivery.states
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                tasks.start_soon(self._reporter.wait, anyio.Event())
                if isinstance(self._balancer, StreamBalancer) and isinstance(self._transport, AdmittingTransport):
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
            await self._until(lambda: self._delivery.all_ready)
            all_ready_at = anyio.current_time()
            try:  # no name for the batch: it must not outlive its acknowledgement here
                self._delivery.add(await anext(batches), all_ready_at)
            except StopAsyncIteration:
                break
            self._reporter.moved()
        self._reporter.moved()
        self._delivery.end()
        await self._until(lambda: self._delivery.all_finished)

    async def _accept_all(self) -> None:
        while True:
            link = await self._transport.accept()
            if not link.live:
                logger.warning("rank %d connected and was lost before serve() took notice: waiting for it", link.rank)
                await link.aclose()
                continue
            self._links = [old for old in self._links if self._delivery.uses(old)]
            self._links.append(link)
            link.subscribe(partial(self._on_change, link))
            self._delivery.attach(link)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Act on what links report. End everything on a failure, or when a lost rank has not come back in time."""
        while self._failure is None:
            while self._changed:
                self._delivery.advance(self._changed.pop())
            give_up_at, lost = self._delivery.next_to_give_up
            self._failure = self._delivery.failure or (lost if give_up_at <= anyio.current_time() else None)
            if self._failure is None:
                with anyio.CancelScope(deadline=give_up_at):
                    await self._change()
        scope.cancel()

    def _on_change(self, link: Link) -> None:
        """In the event loop but in no task, where few things may be done: note it, and wake the task that acts on
        it."""
        self._changed.add(link)
        self._wake()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        event = anyio.Event()
        self._waiters.append(event)
        await event.wait()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for event in waiters:
            event.set()

    def _why_stalled(self, seconds: float) -> str:
        owing = self._delivery.owing
        if owing is not None:
            return f"all batches were sent {seconds:.0f} s ago; not yet done with them: ranks {owing}"
        reasons = [why_ranks_wait(self._delivery.states())]
        if isinstance(self._balancer, StreamBalancer):
            reasons.append(self._balancer.why_no_batch())
        return f"no batch for {seconds:.0f} s: " + "; ".join(filter(None, reasons))
