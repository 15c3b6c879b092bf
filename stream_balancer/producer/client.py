"""Rollouts from any process: ``sb.connect`` gives an object to put into, wherever the balancer lives.

::

    async with sb.connect("tcp://host:port") as producer:      # or a c10d store, or None inside torchrun
        await producer.put(rollout)
    with sb.connect("tcp://host:port") as producer:            # plain threads: the same words, blocking
        producer.put(rollout)

``with`` gives :class:`BlockingProducer`, whose methods block, so that nobody can make a coroutine by mistake and
forget it. The contract is :class:`~stream_balancer.StreamBalancer`'s: returning means *held by the balancer*.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, Self, cast

import anyio
import anyio.lowlevel
import sniffio

from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.errors import BrokenResourceError, WouldBlock
from stream_balancer.producer.slots import BlockingRemoteReservation, RemoteReservation
from stream_balancer.slots import check_group
from stream_balancer.statistics import Statistics
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.requests import Mode, PendingRequest, Request, RequestCancelled
from stream_balancer.transport.threads import Errand, OfOneProcess, ThreadEvent, refuse_in_event_loop
from stream_balancer.types import Rollout
from stream_balancer.values import plain_name

__all__ = ["BlockingProducer", "Producer", "connect"]


def connect(
    source: Any = None,
    *,
    hand_over: Literal["balancer", "direct"] = "balancer",
    loss_mask_column: str | None = "loss_mask",
    **options: Any,
) -> Producer:
    """Connect to a served balancer in the background; returns at once, and puts wait for the connection.

    ``hand_over="direct"``: the balancer gets ids, lengths and all that it plans on; tokens stay in this process until
    the rank that trains on them fetches them, and for as long as its step may have to be repeated. Leaving the
    ``with`` block then waits until all have been trained on. See docs/producers.md for what a dead producer means.

    ``loss_mask_column``: as the balancer's knob; needed with ``hand_over="direct"`` where it is not "loss_mask", since
    the mask is counted where the tokens are.

    ``source``: ``"tcp://host:port"`` (``TorchTransport.address``), a c10d Store, None for the initialised world's
    store, or a port of another transport. ``options``: ``token`` (as the transport's; default: the environment's
    ``STREAM_BALANCER_TOKEN``), ``connect_timeout_s`` (for the first connection; by default it is tried for ever, with a
    warning now and then), ``label`` (for logs and errors; default host and process id), ``name`` (as the transport's),
    ``linger_s`` (seconds a graceful close, or the reply to a cancelled put, is waited for), ``host`` (for direct
    hand-over: the address ranks reach this process under; default: the one it has on the way to the controller),
    ``rejoin`` (as a feed's: the controller is started again from its journal, or only the connection breaks. Then the
    loss raises nothing: puts wait, with a warning, and what has no reply is put again; the balancer knows what it had
    accepted among its last ``remember_ids``. Default: only over Ray. Not with direct hand-over).

    Raises ValueError for what is not an address. Puts raise ConfigError if there is no such host, RefusedError if the
    controller refuses this producer or what it has sent, WireError if something else listens there,
    BrokenResourceError after ``connect_timeout_s``.
    """
    if hand_over not in ("balancer", "direct"):
        raise ValueError(f"hand_over must be 'balancer' or 'direct', not {hand_over!r}")
    if isinstance(source, ProducerPort):
        return Producer(source, loss_mask_column)
    from stream_balancer.transport.gloo import torch_dist

    if source is None:
        source, _, _ = torch_dist.current_world()
    return Producer(torch_dist.open_producer(source, direct=hand_over == "direct", **options), loss_mask_column)


class Producer(OfOneProcess):
    """Puts into a balancer elsewhere; any number of tasks and threads may share one.

    Raises what the balancer raises, with the same text, and BrokenResourceError if the controller is lost: put again
    on a new connection; DuplicateRolloutError then means that the first put was accepted.
    """

    _in_another_process = "call sb.connect(address) there"

    def __init__(self, port: ProducerPort, loss_mask_column: str | None = "loss_mask") -> None:
        self._port = port
        self._loss_mask_column = loss_mask_column

    async def put(self, rollout: Rollout) -> None:
        """Hand over a finished rollout; returns once the balancer holds it, waits while it is full.

        If ``put`` is cancelled, the rollout was not accepted. Cancelling takes a round trip: if the balancer turns out
        to have accepted it already, ``put`` returns normally and the cancellation comes at your next await. If no
        answer comes within ``linger_s``, BrokenResourceError: the outcome is not known.
        """
        await self._ask(Request(Mode.PUT, self._ready([rollout])))

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """Hand over siblings of a group: all are accepted, or none. Otherwise like :meth:`put`. ``complete``: no more
        will come, as with :meth:`StreamBalancer.put_group`."""
        rollouts = self._ready(rollouts)
        check_group(rollouts)
        await self._ask(Request(Mode.GROUP, rollouts, closed(rollouts[0].group_id) if complete else None))

    async def expect_group(self, group_id: str, size: int) -> None:
        """As :meth:`StreamBalancer.expect_group`."""
        await self._ask(Request(Mode.DECLARE, declared=GroupSize(plain_name(group_id), size)))

    async def close_group(self, group_id: str) -> None:
        """As :meth:`StreamBalancer.close_group`."""
        await self._ask(Request(Mode.DECLARE, declared=GroupSize(plain_name(group_id), None)))

    async def abandon_group(self, group_id: str) -> None:
        """As :meth:`StreamBalancer.abandon_group`; returns once that has happened."""
        await self._ask(Request(Mode.ABANDON, declared=GroupSize(plain_name(group_id), None)))

    def reserve(self, count: int = 1) -> RemoteReservation:
        """As :meth:`StreamBalancer.reserve`, with the same bound on staleness: ``async with producer.reserve() as
        slot``, generate, ``await slot.put(rollout)``.

        Entering raises what reserving raises there. A producer that dies or leaves gives back what it had reserved.
        With ``rejoin=True`` a slot outlives its connection, unless others have begun in its place meanwhile: then its
        puts raise BrokenResourceError, and a warning says so.
        """
        return RemoteReservation(self._port, self._ready, self._ask, count)

    @property
    def version(self) -> int | None:
        """The newest policy version that has come from the controller, which passes on each; None before the first."""
        return self._port.version

    async def version_after(self, version: int | None) -> int:
        """As :meth:`StreamBalancer.version_after`. Raises ClosedResourceError once the balancer takes no more."""
        return cast("int", await self._ask(Request(Mode.VERSION, later_than=version)))

    async def end(self) -> None:
        """This producer puts no more. The balancer ends once as many producers have ended as its ``num_producers``
        says; where that is None, once no other is connected that has not ended.

        Returns once the puts before it have their reply; reservers that wait raise ClosedResourceError, later puts
        too. May be called twice. To end the balancer whoever still puts: its own ``end()``, or a feed's.
        """
        await self._ask(Request(Mode.END))

    async def statistics(self) -> Statistics:
        """As :meth:`StreamBalancer.statistics`; a round trip. Raises ValueError for more than a mebibyte of them."""
        return cast("Statistics", await self._ask(Request(Mode.STATISTICS)))

    def put_nowait(self, rollout: Rollout, *, timeout_s: float = 5.0) -> None:
        """One round trip, blocking this thread for at most ``timeout_s``: WouldBlock if the balancer is full.

        TimeoutError: no answer came; put it again, DuplicateRolloutError then means that it was accepted.
        """
        reply = ThreadEvent()
        pending = self._port.pending(Request(Mode.NOWAIT, self._ready([rollout])), reply.set)
        self._port.ask(pending)
        if not reply.wait(timeout_s if self._port.threads else 0):
            self._port.cancel(pending)
            if not pending.done:
                raise TimeoutError(
                    f"put_nowait() of rollout {rollout.rollout_id!r} had no answer in {timeout_s} s. Put it again: a "
                    "DuplicateRolloutError then means that it was accepted"
                )
        if isinstance(pending.error, RequestCancelled):
            if problem := str(pending.error):
                raise TimeoutError(f"put_nowait() was not accepted within {timeout_s} s: {problem}")
            raise WouldBlock from None
        _raise(pending)

    async def _ask(self, request: Request) -> Any:
        """What the reply to it says besides yes."""
        await anyio.lowlevel.checkpoint()
        reply = anyio.Event()
        in_loop = loop_caller()
        # Encoded here, in the task of the caller: a bad rollout raises at its own line, and the channel thread sends
        # bytes only.
        pending = self._port.pending(request, lambda: in_loop(reply.set))
        self._port.ask(pending)
        try:
            await reply.wait()
        except anyio.get_cancelled_exc_class():
            self._port.cancel(pending)
            # The put may be accepted while the cancellation is on its way. To return or raise without the reply would
            # leave the caller not knowing which, so the reply is waited for, shielded.
            await self._reply_to_cancelled(pending, reply)
            if isinstance(pending.error, RequestCancelled):
                raise
            _cancel_at_next_await()
        _raise(pending)
        return pending.result

    async def _reply_to_cancelled(self, pending: PendingRequest, reply: anyio.Event) -> None:
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + self._port.linger_s) as scope:
            while not pending.done and not scope.cancel_called:
                try:
                    await reply.wait()
                except anyio.get_cancelled_exc_class():  # asyncio's task.cancel() goes through shields
                    continue
        if not pending.done:
            self._port.abandon(pending)
            raise BrokenResourceError(
                f"{pending.request.name} was cancelled, but the controller has not answered "
                f"for {self._port.linger_s} s: whether it was accepted is not known. Put it again: a "
                "DuplicateRolloutError then means that it was"
            )

    def _ready(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """To be sent: their masks called ``loss_mask``. Whether they must have one is for the balancer to say."""
        column = self._loss_mask_column
        for rollout in rollouts:
            if not isinstance(rollout, Rollout):
                raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
        if column is None or column == "loss_mask":
            return list(rollouts)
        return [r.with_loss_mask(column) if column in r.tokens and "loss_mask" not in r.tokens else r for r in rollouts]

    @property
    def blocking(self) -> BlockingProducer:
        """The same with plain methods, for threads. Raises RuntimeError if the transport lives in one event loop."""
        if not self._port.threads:
            raise RuntimeError("this producer lives in one event loop; blocking methods would stop it. Await put()")
        return BlockingProducer(self)

    def close(self) -> None:
        """Leave: puts without a reply are cancelled and raise ClosedResourceError. Idempotent."""
        self._port.close()

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        await self._port.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def released(self) -> None:
        """Wait until nothing of what was put is needed here any more: at once, unless ``hand_over="direct"``."""
        if self._port.direct:
            event, in_loop = anyio.Event(), loop_caller()
            self._port.when_released(lambda: in_loop(event.set))
            await event.wait()

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                await self.released()
        finally:
            await self.aclose()

    def __enter__(self) -> BlockingProducer:
        return self.blocking

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                self.blocking.released()
        finally:
            self.close()


class BlockingProducer(OfOneProcess):
    """:class:`Producer` with blocking methods, callable from any thread."""

    _in_another_process = Producer._in_another_process

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._port = producer._port

    def put(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.put`. TimeoutError after ``timeout_s``: it was not accepted.

        If it is interrupted (KeyboardInterrupt) the rollout is cancelled, but may have been accepted all the same:
        putting it again raises DuplicateRolloutError then.
        """
        self._ask(Request(Mode.PUT, self._producer._ready([rollout])), timeout_s)

    def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.put_group`."""
        rollouts = self._producer._ready(rollouts)
        check_group(rollouts)
        declared = closed(rollouts[0].group_id) if complete else None
        self._ask(Request(Mode.GROUP, rollouts, declared), timeout_s)

    def expect_group(self, group_id: str, size: int, *, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.expect_group`."""
        self._ask(Request(Mode.DECLARE, declared=GroupSize(plain_name(group_id), size)), timeout_s)

    def close_group(self, group_id: str, *, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.close_group`."""
        self._ask(Request(Mode.DECLARE, declared=GroupSize(plain_name(group_id), None)), timeout_s)

    def abandon_group(self, group_id: str, *, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.abandon_group`."""
        self._ask(Request(Mode.ABANDON, declared=GroupSize(plain_name(group_id), None)), timeout_s)

    def reserve(self, count: int = 1, *, timeout_s: float | None = None) -> BlockingRemoteReservation:
        """As :meth:`Producer.reserve`: ``with producer.reserve() as slot``. Entering raises TimeoutError after
        ``timeout_s``."""
        return BlockingRemoteReservation(self._port, self._producer._ready, self._ask, count, timeout_s)

    @property
    def version(self) -> int | None:
        """As :attr:`Producer.version`."""
        return self._port.version

    def version_after(self, version: int | None, *, timeout_s: float | None = None) -> int:
        """As :meth:`Producer.version_after`. TimeoutError if none came within ``timeout_s``."""
        return cast("int", self._ask(Request(Mode.VERSION, later_than=version), timeout_s))

    def end(self, *, timeout_s: float | None = None) -> None:
        """As :meth:`Producer.end`."""
        self._ask(Request(Mode.END), timeout_s)

    def statistics(self, *, timeout_s: float | None = None) -> Statistics:
        """As :meth:`Producer.statistics`."""
        return cast("Statistics", self._ask(Request(Mode.STATISTICS), timeout_s))

    def put_nowait(self, rollout: Rollout, *, timeout_s: float = 5.0) -> None:
        """As :meth:`Producer.put_nowait`."""
        _refuse_in_event_loop()
        self._producer.put_nowait(rollout, timeout_s=timeout_s)

    def released(self, *, timeout_s: float | None = None) -> bool:
        """As :meth:`Producer.released`; False if ``timeout_s`` was too short."""
        if not self._port.direct:
            return True
        _refuse_in_event_loop()
        event = ThreadEvent()
        self._port.when_released(event.set)
        return event.wait(timeout_s)

    def close(self) -> None:
        """As :meth:`Producer.close`."""
        self._producer.close()

    def _ask(self, request: Request, timeout_s: float | None) -> Any:
        _refuse_in_event_loop()
        asked = _Asked(self._port, request, timeout_s)
        errand = Errand(asked.run)  # an interrupt must not cut it
        try:
            errand.wait()
        except BaseException:
            asked.interrupt()
            raise
        if errand.error is not None:
            raise errand.error
        return errand.result


class _Asked:
    """A request of a blocking producer, on its way in a thread that no signal interrupts."""

    def __init__(self, port: ProducerPort, request: Request, timeout_s: float | None) -> None:
        self._port, self._request, self._timeout_s = port, request, timeout_s
        self._reply, self._settled, self._interrupted = ThreadEvent(), ThreadEvent(), ThreadEvent()
        self._pending: PendingRequest | None = None

    def run(self) -> Any:
        """Ask, and wait for the reply; take it back once the time is over."""
        pending = self._pending = self._port.pending(self._request, self._answer)
        if self._interrupted.is_set():
            self._port.abandon(pending)
        self._port.ask(pending)
        self._settled.wait(self._timeout_s)
        if not pending.done:
            self._port.cancel(pending)
        if not self._reply.wait(self._port.linger_s):
            self._port.abandon(pending)
            raise BrokenResourceError(
                f"the controller does not answer: the outcome of {pending.request.name} is not known"
            )
        if isinstance(pending.error, RequestCancelled):
            call, reason = _IN_VAIN.get(pending.request.mode, ("put() was not accepted", "the balancer is full"))
            raise TimeoutError(f"{call} within {self._timeout_s} s: {str(pending.error) or reason}")
        _raise(pending)
        return pending.result

    def interrupt(self) -> None:
        """Nobody waits for it any more: it is cancelled, and what it still gets is given back."""
        self._interrupted.set()
        if self._pending is not None:
            self._port.abandon(self._pending)
        self._settled.set()

    def _answer(self) -> None:
        self._reply.set()
        self._settled.set()


_IN_VAIN = {
    Mode.RESERVE: ("reserve() was not admitted", "no more may begin"),
    Mode.END: ("end() had no answer", "puts wait"),
    Mode.STATISTICS: ("statistics() had no answer", "the controller is busy"),
    Mode.VERSION: ("version_after() had none", "no version was set"),
}


def _refuse_in_event_loop() -> None:
    refuse_in_event_loop(
        "a blocking producer's method", "There, use `async with sb.connect(address) as producer` and await put()"
    )


def _raise(pending: PendingRequest) -> None:
    if pending.error is not None:
        raise pending.error


def _cancel_at_next_await() -> None:
    """A cancellation that came too late to stop the put must not be swallowed. Scopes cancel again by themselves, but
    asyncio's ``task.cancel()`` and ``asyncio.timeout`` do not."""
    if sniffio.current_async_library() != "asyncio" or anyio.current_effective_deadline() == float("-inf"):
        return
    task = asyncio.current_task()
    if task is None or not (requests := task.cancelling()):
        return

    def again() -> None:
        if task.cancelling() >= requests and not task.done():  # else a timeout block was left in time
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(again)
