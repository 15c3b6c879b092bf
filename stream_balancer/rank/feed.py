"""The rank's side: an iterator over its rank batches, with their tensors on the device. ``for`` or ``async for``.

::

    for batch in sb.RankFeed("tcp://127.0.0.1:29400", rank=3, dp_size=8):
        for mb in batch.micro_batches: ...

Asking for the next batch acknowledges the one before; leaving the loop early does not. A trainer that commits less
often says so itself::

    for batch in sb.RankFeed(..., auto_ack=False):
        accumulate(batch)
        if time_to_step(batch):
            optimizer.step()
            batch.ack()             # this one and every one before it

What is not acknowledged is delivered again, in the same plan, after a reconnect or a restart.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import anyio
import torch

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, EndOfStream
from stream_balancer.rank import opening
from stream_balancer.rank.acknowledgements import Taken
from stream_balancer.rank.arrivals import TWO_ITERATE, Arrivals
from stream_balancer.rank.device import Pace, Uploader, stopwatch_on
from stream_balancer.rank.reassigned import MicroBatches, Reassigned
from stream_balancer.statistics import Statistics
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.threads import Errand, OfOneProcess, ThreadEvent, refuse_in_event_loop
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import JoinRank, StepComplete

__all__ = ["RankFeed"]

DEFAULT_MAX_BATCH_BYTES = 4 * 2**30  # of one rank batch; far above text, below what would take a trainer's host memory


class RankFeed(OfOneProcess):
    """Iterates over one rank's batches, in step order, each exactly once. ``for`` and ``async for`` (asyncio, trio).

    Tensors of a batch stay valid for as long as you hold them: their memory is reused only when the last of them is
    gone. Keep none beyond the step if you want the feed to stay within ``depth + 1`` batches of memory.

    When the last batch is acknowledged the iteration ends; with ``auto_ack=False`` it ends when the last batch was
    given, and the feed takes its leave with the last ``batch.ack()``.

    Raises, from the iteration: RankLostError if the controller went away, RefusedError if it does not let this rank in
    or refuses what it has sent, AlreadyInUseError if two threads iterate one feed, ConfigError if there is no
    such host, WireError if something else listens there, ClosedResourceError after :meth:`close`.
    """

    _in_another_process = "make it where the rank trains: RankFeed(address, rank=..., dp_size=...)"

    def __init__(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        dp_size: int | None = None,
        depth: int = 2,
        auto_ack: bool = True,
        mesh: Any = None,
        dp_dim: str | Sequence[str] = "dp",
        device: str | torch.device = "cpu",
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        incarnation: int | None = None,
        role: str = "",
        **options: Any,
    ) -> None:
        """Connect in the background; returns at once.

        ``source``: ``"tcp://host:port"`` of a controller, a c10d Store, None for the store, rank and world size of the
        initialised torch.distributed world, or a :class:`~stream_balancer.transport.Port`. ``depth``: batches
        that may lie ready besides the one in use. ``auto_ack``: asking for the next batch acknowledges the last one;
        otherwise :meth:`RankBatch.ack` does, and what is not acknowledged does not hold up the next batches.
        ``mesh``: a DeviceMesh in place of ``rank`` and ``dp_size``; processes that differ only along dimensions other
        than ``dp_dim`` (tensor, context, pipeline parallel) get the same batches, and all of them iterate.
        ``dp_dim`` may name several dimensions (HSDP). ``device``: where batches are wanted; copies run beside the
        step before. ``incarnation``: how often this rank was started before (default:
        TORCHELASTIC_RESTART_COUNT, else 0). ``role``: this rank computes columns that the trainer's ranks wait for,
        and gives them with ``batch.ack(columns=...)``: see ``serve(roles=)``. ``options``: ``token`` (as the
        transport's; default: the environment's ``STREAM_BALANCER_TOKEN``), ``connect_timeout_s`` (for the
        first connection; by default it is tried for ever, with a warning now and then), ``host``, ``name``,
        ``keepalive_s``, ``linger_s`` of the transport, ``rejoin``: the controller has a journal, and whoever watches
        over it starts it again under the same address, or in the same store. Then the loss of the controller raises
        nothing: the feed waits for the next one, with a warning, and no step that it gave is given twice (default: only
        over Ray, where the balancer's actor has a journal).
        """
        if depth < 1:
            raise ValueError(f"depth must be >= 1, not {depth}: with no room for a batch none could ever be sent")
        device = torch.device(device)
        self._device = device
        self._uploader = None if device.type == "cpu" else Uploader(device)
        if incarnation is None:
            incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        request = partial(
            JoinRank,
            incarnation=incarnation,
            depth=depth,
            max_batch_bytes=max_batch_bytes,
            feed_id=secrets.token_bytes(8),
            role=role,
        )
        if role and options.get("rejoin"):
            raise ValueError(
                f"role {role!r} with rejoin=True: a controller that was started again asks for columns again, of steps "
                "that this feed has given. Leave rejoin out, and start this rank again"
            )
        if hasattr(source, "take"):
            self._port = opening.given_port(source, mesh, self._uploader)
        elif mesh is None:
            source, rank, dp_size = opening.in_world(source, rank, dp_size)
            self._port = opening.open_port(source, request(rank, dp_size), self._uploader, options)
        elif rank is not None or dp_size is not None:
            raise ValueError("give RankFeed either mesh= or rank= and dp_size=: the mesh says both")
        else:
            self._port = opening.open_in_mesh(source, mesh, dp_dim, request, self._uploader, options)
        self._arrivals = Arrivals()
        self._errand: Errand[RankBatch] | None = None
        self._auto_ack = auto_ack
        self._taken = Taken(self._port)
        self._closed = False
        self._asked_at: float | None = None
        self._port.subscribe(self._arrivals.notify)

    @property
    def rank(self) -> int:
        """This DP rank."""
        return self._port.rank

    @property
    def dp_size(self) -> int:
        """DP ranks that take part."""
        return self._port.dp_size

    @property
    def auto_ack(self) -> bool:
        """Whether asking for the next batch acknowledges the last one."""
        return self._auto_ack

    @property
    def waiting_s(self) -> float:
        """Seconds the trainer has now waited for the next batch; 0.0 while it has one in hand."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def acknowledge_through(self, step: int) -> None:
        """Acknowledge ``step`` and every one before it: :meth:`RankBatch.ack` for code that kept the number only. From
        any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before."""
        self._taken.acknowledge(step)

    @property
    def version(self) -> int | None:
        """The newest policy version: set here, or passed on by the controller; None before the first."""
        return self._port.control.version

    def set_version(self, version: int) -> None:
        """The policy moved on, as :meth:`StreamBalancer.set_version`: call it after the optimizer step and before the
        next batch is asked for. From any thread, never blocks.

        One rank may say it, or all of them, each the same. Raises ValueError if it goes backwards, ClosedResourceError
        if the feed was closed before; a lost controller is raised by the iteration.
        """
        self._port.control.set_version(version)

    def end(self) -> None:
        """No more rollouts are wanted, as :meth:`StreamBalancer.end`: producers' puts raise ClosedResourceError, what
        waits is drained, then the iteration ends on all ranks. From any thread, never blocks, may be called twice."""
        self._port.control.end()

    def statistics(self, *, timeout_s: float | None = None) -> Statistics:
        """As :meth:`StreamBalancer.statistics`, from the controller; blocks for a round trip. Raises TimeoutError after
        ``timeout_s``, RankLostError if the controller goes away, ClosedResourceError if the feed was closed, ValueError
        for more than a mebibyte of them."""
        refuse_in_event_loop("statistics() of a feed", "There, await feed.async_statistics()")
        answers: list[Statistics | Exception] = []
        arrived = ThreadEvent()

        def answer(statistics: Statistics | Exception) -> None:
            answers.append(statistics)
            arrived.set()

        self._port.control.ask_statistics(answer)
        if not arrived.wait(timeout_s):
            raise TimeoutError(f"statistics() had no answer within {timeout_s} s: the controller is busy, or away")
        return _statistics_of(answers[0])

    async def async_statistics(self) -> Statistics:
        """:meth:`statistics`, without blocking the event loop."""
        answers: list[Statistics | Exception] = []
        arrived, in_loop = anyio.Event(), loop_caller()

        def answer(statistics: Statistics | Exception) -> None:
            answers.append(statistics)
            in_loop(arrived.set)

        self._port.control.ask_statistics(answer)
        await arrived.wait()
        return _statistics_of(answers[0])

    def close(self) -> None:
        """Leave: the controller is notified, threads end. A batch that was not acknowledged will be delivered again.
        Idempotent."""
        self._closed = True
        self._taken.close()
        self._port.close()
        self._arrivals.notify()

    @contextmanager
    def timed(self, device: str | torch.device | None = None) -> Iterator[None]:
        """Time what this rank computes by itself for the batch in hand: forward and backward, before it waits for the
        other ranks in a collective. Several times in a batch add up.

        A ``CalibratedCost`` learns from these seconds, and ``statistics()`` takes the measured idle time from them;
        without them a step counts from taking the batch to asking for the next, in which all ranks look alike once
        they have met. With DDP, that means micro-batches under ``no_sync()``. ``device``: where the work runs, if it
        is not the feed's; on an accelerator its own clock counts, and is read when the batch is acknowledged.
        """
        stopwatch = stopwatch_on(self._device if device is None else torch.device(device))
        with stopwatch:
            yield
        self._taken.computed(stopwatch.seconds)

    def add_compute_s(self, seconds: float) -> None:
        """As :meth:`timed`, for a trainer that has the seconds from a clock of its own. Raises ValueError unless they
        are a finite number >= 0."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"add_compute_s() takes seconds >= 0, not {seconds!r}")
        self._taken.computed(lambda: seconds)

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        self._closed = True
        self._taken.close()
        await self._port.aclose()
        self._arrivals.notify()

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        """The next rank batch. Blocks until there is one; Ctrl-C ends the wait, and the next call gives the batch."""
        # Taking a batch and acknowledging the last one change the port, which an interrupt must not cut in two:
        # an Errand does both in a thread, and transport/threads says why its result cannot get lost.
        refuse_in_event_loop("`for` over a RankFeed", "There, use `async for`")
        errand = self._errand
        if errand is None or errand.taken:
            errand = self._errand = Errand(self._next)
        elif errand.thread != threading.get_ident():
            raise AlreadyInUseError(TWO_ITERATE)
        errand.wait()
        error = errand.error
        if error is not None:
            errand.error, errand.taken = None, True
            try:
                raise error
            finally:
                del error  # it refers to this frame
        if self._uploader is not None:
            self._uploader.hand_over(cast("RankBatch", errand.result))
        batch, errand.result, errand.taken = errand.result, None, True
        return batch  # type: ignore[return-value]  # a call here would be a step to be interrupted at

    def _next(self) -> RankBatch:
        with self._asking():
            try:
                return self._arrivals.wait_for(self._take)
            except EndOfStream:
                if self._taken.end():
                    self.close()
                raise StopIteration from None

    def __aiter__(self) -> AsyncIterator[RankBatch]:
        return self

    async def __anext__(self) -> RankBatch:
        """As ``next()``, without blocking the event loop. If cancelled, no batch was taken."""
        await anyio.lowlevel.checkpoint()
        with self._asking():
            try:
                batch = await self._arrivals.wait_in_loop_for(self._take)
            except EndOfStream:
                if self._taken.end():
                    await self.aclose()
                raise StopAsyncIteration from None
        if self._uploader is not None:
            self._uploader.hand_over(batch)
        return batch

    # -- what others owed ----------------------------------------------------------------------------------------------

    def reassigned(self) -> Reassigned:
        """What this rank takes over, in the step in hand, of ranks that were lost or are slow: rank batches, mostly
        none. For ``serve(on_rank_loss="replan")``; otherwise it only waits until all ranks have come so far::

            for batch in feed:
                train(batch.micro_batches)                 # gradients of this rank alone
                others = feed.reassigned()
                for more in others:                        # the same step, the same denominators
                    train(more.micro_batches)
                all_reduce_gradients(others.ranks)         # those that are left, the same on each of them
                optimizer.step()

        Call it when all micro-batches are done, before the ranks meet; on every rank, in every step. It ends once every
        rank that is left is there too. If the ranks cannot meet after all, because another one was lost, call it again.
        ``for`` and ``async for``. Raises RankLostError as the feed does, ValueError without a batch in hand, and for a
        model-parallel rank (``mesh=``).
        """
        return Reassigned(self._arrivals, partial(self._take_part, self._taken.step_in_hand))

    def micro_batches(self, batch: RankBatch, device: str | torch.device | None = None) -> MicroBatches:
        """All that this rank works on in the step in hand: the micro-batches of ``batch``, but for those that others
        take over because this rank is slow, and then those that it takes over itself. For ``serve(move_late=True)``,
        and it is :meth:`reassigned` as well::

            for batch in feed:
                mine = feed.micro_batches(batch)
                for micro_batch in mine:                   # divide by batch.global_num_loss_tokens and the like
                    with feed.timed():
                        train(micro_batch)                 # gradients of this rank alone
                all_reduce_gradients(mine.ranks)
                optimizer.step()

        What it has given is begun and stays with this rank, so ask for one at a time. ``device``: where the work runs,
        if it is not the feed's; on an accelerator the host waits so that it is at most one micro-batch ahead. It ends
        when no rank has anything left to do. Called again in the same step, it goes on where it was. ``for`` and
        ``async for``; raises as :meth:`reassigned`, and ValueError if ``batch`` is not the one in hand.
        """
        if batch.step != self._taken.step_in_hand:
            raise ValueError(
                f"micro_batches() is for the batch in hand, of step {self._taken.step_in_hand}; this one is of step "
                f"{batch.step}"
            )
        begin = partial(self._begin, batch.step, len(batch.micro_batches))
        pace = Pace(self._device if device is None else torch.device(device))
        return MicroBatches(batch, begin, self.reassigned(), pace)

    def _begin(self, step: int, number: int) -> int | None:
        if self._closed:
            raise ClosedResourceError
        return self._port.begin(step, number)

    def _take_part(self, step: int) -> RankBatch | StepComplete | None:
        if self._closed:
            raise ClosedResourceError
        part = self._port.next_part(step)
        if not isinstance(part, RankBatch):
            return part
        if self._uploader is not None:
            self._uploader.hand_over(part)
        return replace(part, on_ack=partial(self._taken.acknowledge, step))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """The trainer waits for the next batch: it is done with the one it has."""
        with self._arrivals.one_user:
            self._asked_at = time.monotonic()
            # First of all, before anything may wait or raise: asking is what acknowledges, whether or not a batch
            # comes.
            try:
                self._taken.done(self._asked_at, acknowledge=self._auto_ack)
                yield
            finally:
                self._asked_at = None

    def _take(self) -> RankBatch | None:
        if self._closed:
            raise ClosedResourceError
        batch = self._port.take()
        if batch is None:
            return None
        asked_at, now = self._asked_at, time.monotonic()
        return self._taken.add(batch, now, 0.0 if asked_at is None else now - asked_at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _statistics_of(answer: Statistics | Exception) -> Statistics:
    if isinstance(answer, Exception):
        raise answer
    return answer
