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

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self

from stream_balancer.client.payloads import KeepsPayloads, PayloadOwner
from stream_balancer.client.slots import PutHead, RemoteSlots
from stream_balancer.errors import BrokenResourceError, ClosedResourceError, ConfigError, WireError, WouldBlock
from stream_balancer.facade import OfOneProcess, event_loop_here, facade, run, run_here
from stream_balancer.net.address import TcpDialer, current_world
from stream_balancer.net.errors import Cancelled
from stream_balancer.net.line import Dialer
from stream_balancer.net.loops import Signal
from stream_balancer.net.messages import Message, Notify, Welcome
from stream_balancer.net.session import Pending, Session
from stream_balancer.rollouts import Rollout
from stream_balancer.slots import Reservation, check_group
from stream_balancer.statistics import Statistics
from stream_balancer.values import plain_name
from stream_balancer.wire.codec import Handle, encode_rollouts
from stream_balancer.wire.payload import Memory, reader
from stream_balancer.wire.statistics import decode_statistics

__all__ = ["BlockingProducer", "Producer", "connect"]

_log = logging.getLogger("stream_balancer.net")
_ENDED = "put() after end(): the balancer takes no more rollouts. Put before end()"
_ENDED_HERE = "put() after end() of this producer: it puts no more. Put before end()"
_CLOSED = "put() on a closed producer: close() was called, or its 'with' block was left"
_ONE_LOOP = "this producer lives in one event loop, which {} would stop. Await put()"
# so long is the reply to a put_nowait() that has come too late waited for
_TAKEN_BACK_S = 0.1
_FULL_S = 0.1
_ID = attrgetter("rollout_id")
_int_of: Callable[[Any], int] = reader(int, "a reply")
_welcome_of = reader(tuple[list[int], list[int]] | None, "a welcome")


class Producer(OfOneProcess):
    """Puts into a balancer elsewhere; any number of tasks and threads may share one.

    Raises what the balancer raises, with the same text, and BrokenResourceError if the controller is lost: put again
    on a new connection; DuplicateRolloutError then means that the first put was accepted.
    """

    _in_another_process = "call sb.connect(address) there"

    def __init__(
        self,
        source: Any = None,
        *,
        hand_over: Literal["balancer", "direct"] | KeepsPayloads = "balancer",
        loss_mask_column: str | None = "loss_mask",
        token: str | None = None,
        name: str = "stream_balancer",
        label: str = "",
        rejoin: bool = False,
        connect_timeout_s: float | None = None,
        linger_s: float = 5.0,
        host: str | None = None,
        tls: Any = None,
    ) -> None:
        """Connect to a served balancer in the background; returns at once, and puts wait for the connection.

        ``hand_over="direct"``: the balancer gets ids, lengths and all that it plans on; tokens stay in this process
        until the rank that trains on them fetches them, and for as long as its step may have to be repeated. Leaving
        the ``with`` block then waits until all have been trained on. See docs/producers.md for what a dead producer
        means.

        ``loss_mask_column``: as the balancer's knob; needed with ``hand_over="direct"`` where it is not "loss_mask",
        since the mask is counted where the tokens are.

        ``source``: ``"tcp://host:port"`` (``TorchTransport.address``), a c10d Store, None for the initialised world's
        store, or whoever says where the controller is (``read()``). ``token``: as the transport's (default: the
        environment's ``STREAM_BALANCER_TOKEN``). ``name``: as the transport's. ``label``: for logs and errors; default
        host and process id. ``connect_timeout_s``: for the first connection; by default it is tried for ever, with a
        warning now and then. ``linger_s``: seconds a graceful close, or the reply to a cancelled put, is waited for.
        ``host``: for direct hand-over, the address ranks reach this process under; default: the one it has on the way
        to the controller. ``tls``: an ``ssl.SSLContext``, if the transport has one.

        ``rejoin``: the controller is started again from its journal, or only the connection breaks. Then the loss
        raises nothing: puts wait, with a warning, and what has no reply is put again; the balancer knows what it had
        accepted among its last 100,000 finished ids. With direct hand-over, both keep what is needed of this process by
        then; a store of your own, which is this producer's alone then, is told what else to drop.

        Raises ValueError for what is not an address. Puts raise ConfigError if there is no such host, RefusedError if
        the controller refuses this producer or what it has sent, WireError if something else listens there,
        BrokenResourceError after ``connect_timeout_s``.
        """
        if isinstance(hand_over, str) and hand_over not in ("balancer", "direct"):
            raise ValueError(f"hand_over must be 'balancer' or 'direct', not {hand_over!r}")
        dialer: Dialer
        if hasattr(source, "dial"):
            dialer, rejoin, label = source, source.rejoin or rejoin, label or "memory"
        else:
            dialer = TcpDialer(current_world()[0] if source is None else source, token=token, name=name, tls=tls)
        self._loss_mask_column, self._direct, self._host = loss_mask_column, hand_over == "direct", host
        # for tokens that stay here the address is known once connected
        self._kept = None if isinstance(hand_over, str) else hand_over
        self._opened = Signal()
        self._ended_here = self._ended = self._is_full = False
        self._session = Session(
            dialer, "producer", name=label, rejoin=rejoin, linger_s=linger_s, connect_timeout_s=connect_timeout_s,
            about=lambda: (rejoin, self._slots.open(), None if self._kept is None else self._kept.owner),
            on_open=self._on_open, on_message=self._on_message, on_end=self._on_end,
        )  # fmt: skip
        self._slots: RemoteSlots = RemoteSlots(self._session, self._put)
        self._session.begin()

    async def put(self, rollout: Rollout) -> None:
        """Hand over a finished rollout; returns once the balancer holds it, waits while it is full.

        If ``put`` is cancelled, the rollout was not accepted. Cancelling takes a round trip: if the balancer turns out
        to have accepted it already, ``put`` returns normally and the cancellation comes at your next await. If no
        answer comes within ``linger_s``, BrokenResourceError: the outcome is not known.
        """
        await self._put((None, None, True), [rollout])

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """Hand over siblings of a group: all are accepted, or none. Otherwise like :meth:`put`. ``complete``: no more
        will come, as with :meth:`StreamBalancer.put_group`."""
        check_group(rollouts)
        await self._put((None, bool(complete), True), rollouts)

    async def expect_group(self, group_id: str, size: int) -> None:
        """As :meth:`StreamBalancer.expect_group`."""
        await self._declare("expect", group_id, size)

    async def close_group(self, group_id: str) -> None:
        """As :meth:`StreamBalancer.close_group`."""
        await self._declare("close", group_id)

    async def abandon_group(self, group_id: str) -> None:
        """As :meth:`StreamBalancer.abandon_group`; returns once that has happened."""
        await self._declare("abandon", group_id)

    def reserve(self, count: int = 1) -> Reservation:
        """As :meth:`StreamBalancer.reserve`, with the same bound on staleness: ``async with producer.reserve() as
        slot``, generate, ``await slot.put(rollout)``.

        Entering raises what reserving raises there. A producer that dies or leaves gives back what it had reserved.
        With ``rejoin=True`` a slot outlives its connection, unless others have begun in its place meanwhile: then its
        puts raise BrokenResourceError, and a warning says so.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"reserve({count!r}): at least 1 rollout is reserved at a time")
        return Reservation(self._slots, count)

    @property
    def version(self) -> int | None:
        """The newest policy version that has come from the controller, which passes on each; None before the first."""
        return self._session.version

    async def version_after(self, version: int | None) -> int:
        """As :meth:`StreamBalancer.version_after`. Raises ClosedResourceError once the balancer takes no more."""
        answered = await self._session.ask("version_after", version, waits_for="no version was set")
        return _int_of(answered.value)

    async def end(self) -> None:
        """End of this producer's puts. The balancer ends once as many producers have ended as its ``num_producers``
        says; where that is None, once no other is connected that has not ended.

        Returns once the puts before it have their reply; reservers that wait raise ClosedResourceError, later puts
        too. May be called twice. To end the balancer whoever still puts: its own ``end()``, or a feed's.
        """
        self._ended_here = True
        try:
            await self._session.ask("end", waits_for="puts wait")
        except ClosedResourceError:
            # the end of the balancer is what was asked for
            if not self._ended:
                raise

    async def statistics(self) -> Statistics:
        """As :meth:`StreamBalancer.statistics`; a round trip. Raises ValueError for more than a mebibyte of them."""
        return decode_statistics(bytes((await self._session.ask("statistics")).value))

    def put_nowait(self, rollout: Rollout, *, timeout_s: float = 5.0) -> None:
        """A put in one round trip, blocking this thread for about ``timeout_s`` at most: WouldBlock if the balancer is
        full.

        TimeoutError: it was not accepted in time. BrokenResourceError: no answer came; put it again,
        DuplicateRolloutError then means that it was accepted. RuntimeError where both ends live in one event loop, as
        tests have it.
        """
        if not self._session.io.threads:
            raise RuntimeError(_ONE_LOOP.format("put_nowait()"))
        run_here(lambda: self._put((None, None, False), [rollout], _TAKEN_BACK_S), timeout_s)

    async def released(self) -> None:
        """Wait until nothing of what was put is needed here any more: at once, unless ``hand_over="direct"``."""
        if self._kept is not None:
            await self._kept.released()

    @property
    def blocking(self) -> BlockingProducer:
        """The same with plain methods, for threads. Raises RuntimeError if the network lives in one event loop."""
        if not self._session.io.threads:
            raise RuntimeError(_ONE_LOOP.format("a blocking method"))
        return BlockingProducer(self)

    def close(self) -> None:
        """Leave: puts without a reply are cancelled and raise ClosedResourceError. In a thread without an event loop
        it waits for that. Idempotent."""
        if event_loop_here() is None:
            run(self._session.aclose)
        else:
            self._session.close()

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        await self._session.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                await self.released()
        finally:
            await self.aclose()

    def __enter__(self) -> BlockingProducer:
        return self.blocking

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        run(lambda: self.__aexit__(exc_type, *rest))

    async def _put(self, head: PutHead, rollouts: Sequence[Rollout], linger_s: float | None = None) -> None:
        """A bad rollout raises at its own line: only the copy into a store is made elsewhere."""
        if self._direct:
            # before that it is not known where they stay
            await self._opened.wait()
        if self._ended_here:
            raise ClosedResourceError(_ENDED_HERE)
        for rollout in rollouts:
            if not isinstance(rollout, Rollout):
                raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
        if (column := self._loss_mask_column) not in (None, "loss_mask"):
            # Whether they must have one is for the balancer to say.
            renames = [column in one.tokens and "loss_mask" not in one.tokens for one in rollouts]
            rollouts = [one.with_loss_mask(column) if has else one for one, has in zip(rollouts, renames, strict=True)]
        kept, handles = self._kept, list[Handle]()
        if kept is not None and sum(one.nbytes for one in rollouts) >= kept.least_bytes:
            handles = await self._kept_in_thread(kept, rollouts) if kept.blocks else kept.keep(rollouts)
        try:
            header, payload = encode_rollouts(rollouts, handles=handles or None)
        except BaseException as error:
            self._answered(handles, error)
            raise
        name = f"put() of rollout {', '.join(map(repr, map(_ID, rollouts[:3])))}"
        pending = Pending(
            "put", (*head, header), payload, name=name, accepted_if="DuplicateRolloutError",
            waits_for="the balancer is full",
        )  # fmt: skip
        if handles:
            pending.signal.then(lambda: self._replied(handles, pending))
        await self._session.reply_to(pending, linger_s)

    async def _kept_in_thread(self, kept: KeepsPayloads, rollouts: Sequence[Rollout]) -> list[Handle]:
        """A store copies, and tells nobody when it has room again: it is tried until it has. Raises ClosedResourceError
        if this producer is closed meanwhile."""
        found, done, io, is_left = Future[list[Handle]](), Signal(), self._session.io, False

        def keep() -> None:
            try:
                found.set_result(kept.keep(rollouts))
            except WouldBlock as full:
                if not self._is_full:
                    self._is_full = True
                    _log.warning("puts wait: %s", full)
                if not is_left and not self._session.is_closed:
                    # not a sleep here: this thread packs for everybody
                    io.do(lambda: io.after(_FULL_S, partial(io.work, keep)))
                    return
                found.set_exception(ClosedResourceError(_CLOSED))
            except BaseException as error:  # noqa: BLE001 - for who waits
                found.set_exception(error)
            done.set()

        def let_go() -> None:
            if found.exception() is None:
                self._answered(found.result(), Cancelled())

        io.work(keep)
        try:
            await done.wait()
        except BaseException:
            # it is never put, so no reply comes that would let go of what is kept
            is_left = True
            done.then(let_go)
            raise
        return found.result()

    def _answered(self, handles: Sequence[Handle], error: BaseException | None) -> None:
        # one that is lost may have been accepted
        accepted = error is None or isinstance(error, BrokenResourceError)
        if self._kept is not None:
            self._kept.answered([handle.key for handle in handles], accepted=accepted)

    async def _declare(self, what: str, group_id: str, size: int | None = None) -> None:
        if self._ended_here:
            raise ClosedResourceError(_ENDED_HERE)
        name = f"what was declared of group {group_id!r}"
        await self._session.ask("declare", (what, plain_name(group_id), size), name=name)

    # in the I/O thread

    def _replied(self, handles: Sequence[Handle], pending: Pending) -> None:
        self._answered(handles, pending.error)
        if pending.sent_before and pending.error is None:
            # with the first reply may have been lost that nobody needs them any more
            self._session.tell("drop", [handle.key for handle in handles])

    def _on_open(self, welcome: Welcome) -> None:
        lost, needed = _welcome_of(welcome.about) or ([], [])
        line = self._session.line
        if self._kept is not None:
            self._kept.retain({*needed})
        elif self._direct and line.connection is not None:
            try:
                if hasattr(line.dialer, "listen"):
                    self._kept = PayloadOwner(line.dialer.listen, b"", line.join.name)
                else:
                    self._kept = PayloadOwner.over_tcp(line.join.name, self._host or line.connection.local)
            except OSError as error:
                text = f"payloads cannot be kept here: {error}. Give connect(host=) an address of this machine"
                self._session.finish(lambda _: ConfigError(text))
                self._session.close()
        self._opened.set()
        self._slots.lost(lost)

    def _on_message(self, message: Message, _: Memory | None) -> None:
        if not isinstance(message, Notify):
            raise WireError(f"a {type(message).__name__} message for a producer")
        if message.dropped:
            if self._kept is None:
                raise WireError("payloads are dropped that nobody keeps")
            self._kept.drop(message.dropped)
        if message.end:
            self._ended = True
            self._session.finish(lambda _: ClosedResourceError(_ENDED))
        # ranks may still fetch what is kept
        if self._ended and not self._kept:
            self._session.close()

    def _on_end(self, _: Exception) -> None:
        self._opened.set()
        if self._kept is not None:
            # who needed them is gone
            self._kept.close()


connect = Producer
"""Connects to a served balancer; see :class:`Producer`."""

if TYPE_CHECKING:
    from stream_balancer.facades import BlockingProducer as BlockingProducer
else:
    BlockingProducer = facade("BlockingProducer", Producer, without=("aclose", "blocking"), timed=("reserve",))
