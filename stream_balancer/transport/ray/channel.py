"""A channel of actor calls: from any process to the actor that hosts the balancer. Knows Ray's calls, no rollout.

::

    CallingChannel (any process)  --_join(key, request, [lifeline])---------->  ActorChannels (the actor's event loop)
                                  <-- welcome, or why not --------------------
                                  --_exchange(key, number, packed messages)-->  ActorChannel
                                  <-- what was answered by then --------------
                                  --_poll(key)------------------------------>
                                  <-- what came up since --------------------  one is always pending: its failure tells
                                                                               of the actor

Only the caller can call, and an asynchronous actor starts calls in any order: messages are numbered both ways, and
received in order. The actor learns that a caller died from its lifeline: the result of ``_hold``, an object that the
caller owns and that comes only once the channel is over.

A packed message is ``(bytes, [arrays], [references])``: msgpack of ours, buffers, and Ray's object references, which
must be arguments of a call, else Ray does not count them and their objects vanish. Nothing of ours is unpickled.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Outgoing, PeerClosed, Receiver, Sendable
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.handshake import error_of
from stream_balancer.wire.messages import Close, Join, Refused, Welcome, decode_message, encode_message

__all__ = ["ActorChannel", "ActorChannels", "ActorLostError", "CallingChannel", "Inbox", "cause_of"]

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
_answers: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
Packed = tuple[bytes, list[NDArray[np.uint8]], list[Any]]
"""(message, buffers, object references)."""
Reply = tuple[int, list[Packed]]
"""(number of the first message, messages)."""
T = TypeVar("T")
_PASSES = 2  # of the event loop, until whoever was woken by a message has answered it
_THREAD_BYTES = 2**20  # what is larger is packed in a thread, beside the actor's event loop
_ALONE = 2**20  # bytes; what is larger, or has an object in the store, travels in a call of its own
_MAX_OVER = 1000  # channels that are over; each asks a last time within milliseconds
_RETRY_S = 0.1  # between attempts to write into a full object store

logger = logging.getLogger("stream_balancer.transport")


class Inbox(Generic[T]):
    """Puts numbered items in order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def add(self, number: int, item: T) -> list[T]:
        """The items whose turn has come."""
        self._early[number] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class _End:
    """What both ends have in common: packing, receiving, and the state of closing."""

    narrow = True

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._close_sent = self._close_received = False
        self._broken = False
        """Over, and not by closing."""

    @property
    def over(self) -> bool:
        """Nothing is sent or received any more."""
        return self._broken or (self._close_sent and self._close_received)

    def _receive(self, packed: Packed) -> None:
        """Hand a message to the session. Raises what the session raises."""
        assert self._receiver is not None
        raw, arrays, references = packed
        sizes, message = decode_message(raw)
        if isinstance(message, Close):
            self._close_received = True
            self.close()
            self._receiver.ended(PeerClosed(message.reason))
            return
        if sizes != tuple(array.nbytes for array in arrays):
            raise WireError(f"a {type(message).__name__} message announces {sizes} bytes, and brings others")
        buffers = [self._receiver.allocate(size) for size in self._receiver.admit(message, sizes)]
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer.numpy()[: array.size], array)
        self._receiver.receive(message, buffers, references)

    def _break(self, error: Exception) -> None:
        """The end, unless it is over already."""
        if not self.over:
            self._broken = True
            if self._receiver is not None and not self._close_received:
                self._receiver.ended(error)

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""


def _pack(outgoing: Outgoing) -> Packed:
    message, sources, references = outgoing
    arrays = [np.empty(source.size, np.uint8) for source in sources]
    for source, array in zip(sources, arrays, strict=True):
        deque(source.fill(torch.from_numpy(array)), maxlen=0)
        if source.sent is not None:
            source.sent()
    return encode_message(message, tuple(source.size for source in sources)), arrays, list(references)


class ActorChannel(_End):
    """The actor's end. Belongs to its event loop, but :meth:`send` may be called from any thread: a finalizer calls it,
    wherever the last reference to a rollout dies."""

    threads = False

    def __init__(self, on_over: Callable[[], object] = lambda: None) -> None:
        """``on_over()`` is called once nothing more can be said; the caller may still ask for what was said last."""
        super().__init__()
        self._inbox: Inbox[list[Packed]] = Inbox()
        self._outbox: deque[Sendable] = deque()
        self._first = self._answering = 0
        self._in_loop, self._thread = loop_caller(), threading.get_ident()
        self._news = anyio.Event()
        self._on_over: Callable[[], object] | None = on_over

    def start(self, receiver: Receiver) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        self._receiver = receiver

    def send(self, item: Sendable) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        if not self.over and not self._close_sent:
            self._outbox.append(item)
            if threading.get_ident() == self._thread:
                self._news.set()
            else:
                self._in_loop(lambda: self._news.set())

    def close(self, reason: str = "") -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        self.send(Outgoing(Close(reason)))
        self._close_sent = True
        self._check_over()

    def wait_closed(self, timeout_s: float) -> None:
        """Nothing to wait for: this end lives in one event loop."""

    def abort(self) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`: pending and later calls fail."""
        self._broken = self._broken or not self.over
        self._check_over()

    def lost(self, cause: str) -> None:
        """The caller's process is dead."""
        self._break(ConnectionError(cause))
        self._check_over()

    def _check_over(self) -> None:
        if self.over and self._on_over is not None:
            self._news.set()
            on_over, self._on_over = self._on_over, None
            on_over()

    # what the caller calls

    async def exchange(self, number: int, messages: list[Packed]) -> Reply:
        """Its messages in, what is answered at once out."""
        self._answering += 1
        try:
            for ready in self._inbox.add(number, messages):
                for packed in ready:
                    self._take_in(packed)
            for _ in range(_PASSES):
                await anyio.lowlevel.checkpoint()
        finally:
            self._answering -= 1
            self._news.set()  # a poll that held back meanwhile looks again
        return await self._take_out()

    async def poll(self) -> Reply:
        """What there is to say, once there is something."""
        while (self._answering or not self._outbox) and not self.over:
            self._news = anyio.Event()
            await self._news.wait()
        return await self._take_out()

    def _take_in(self, packed: Packed) -> None:
        if self.over:
            return
        try:
            self._receive(packed)
        except Exception as error:  # noqa: BLE001 - as in every channel: what a session raises ends it
            self._break(error)
        self._check_over()

    async def _take_out(self) -> Reply:
        if self._broken:
            raise ConnectionError("the other end has released this channel")
        try:
            taken = [outgoing for outgoing in self._outgoing() if outgoing is not None]
            first, self._first = self._first, self._first + len(taken)
            return first, [await _packed(outgoing) for outgoing in taken]
        except Exception as error:  # noqa: BLE001 - what cannot be sent ends the channel
            self._break(error)
            self._check_over()
            raise ConnectionError(f"a message could not be made: {error}") from None

    def _outgoing(self) -> Iterator[Outgoing | None]:
        while self._outbox:
            item = self._outbox.popleft()
            yield item(self) if callable(item) else item


async def _packed(outgoing: Outgoing) -> Packed:
    if sum(source.size for source in outgoing.sources) < _THREAD_BYTES:
        return _pack(outgoing)
    return await anyio.to_thread.run_sync(_pack, outgoing)


class ActorChannels:
    """All channels of an actor, by the keys their callers chose. Belongs to its event loop."""

    def __init__(self, judge: Callable[[ActorChannel, Join], Welcome | Refused]) -> None:
        """``judge(channel, request)`` starts the channel of who is welcome."""
        self._judge = judge
        self._open: dict[str, ActorChannel] = {}
        self._over: dict[str, ActorChannel] = {}
        self._held: dict[str, anyio.Event] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> Sequence[ActorChannel]:
        """Those that are not over."""
        return list(self._open.values())

    async def join(self, key: str, request: bytes, lifeline: list[Awaitable[None]]) -> bytes:
        """Welcome who asks to join, or refuse. Nothing proves more than having the actor's handle."""
        channel = ActorChannel(partial(self._on_over, key))
        self._open[key] = channel
        answer = self._judge(channel, _requests.decode(request))
        if isinstance(answer, Refused):
            channel.abort()
        else:
            self._watch(channel, lifeline[0])
        return _encode(answer)

    async def exchange(self, key: str, number: int, messages: list[Packed]) -> Reply:
        """See :meth:`ActorChannel.exchange`."""
        return await self._of(key).exchange(number, messages)

    async def poll(self, key: str) -> Reply:
        """See :meth:`ActorChannel.poll`."""
        return await self._of(key).poll()

    async def hold(self, key: str) -> None:
        """Return once the caller need not be watched any more: what it gets for this call is its lifeline. May be
        started before :meth:`join`."""
        if key not in self._over:
            await self._held.setdefault(key, anyio.Event()).wait()

    def _of(self, key: str) -> ActorChannel:
        channel = self._open.get(key) or self._over.get(key)
        if channel is None:
            raise ConnectionResetError("the actor does not know this channel: it was started again")
        return channel

    def _on_over(self, key: str) -> None:
        """It may still ask for what was said last."""
        self._over[key] = self._open.pop(key)
        if held := self._held.pop(key, None):
            held.set()
        if len(self._over) > _MAX_OVER:
            self._over.pop(next(iter(self._over)))

    def _watch(self, channel: ActorChannel, lifeline: Awaitable[None]) -> None:
        async def watch() -> None:
            try:
                await lifeline
            except Exception as error:  # noqa: BLE001 - OwnerDiedError and its kin
                channel.lost(cause_of(error))

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)


class CallingChannel(_End):
    """The end in a rank or a worker. One thread receives; one packs and calls, which may have to wait for room in the
    object store. A reply without buffers is received in Ray's thread: where workers pack all the time, each hand-over
    to another thread waits for Python's lock."""

    threads = True

    def __init__(
        self,
        actor: Any,
        request: Join,
        *,
        on_welcome: Callable[[Any], object] = lambda welcome: None,
        name: str = "sb-ray",
    ) -> None:
        """Ask to join, at once; a refusal is what ends the channel. ``actor``: a handle whose ``_join``, ``_exchange``,
        ``_poll`` and ``_hold`` lead to :class:`ActorChannels`. ``on_welcome(welcome)`` is called in the receiving
        thread."""
        super().__init__()
        self._actor, self._key, self._on_welcome = actor, secrets.token_hex(8), on_welcome
        self._changed = threading.Condition()
        self._receiving = threading.Lock()  # one call of the receiver at a time
        self._outbox: deque[Sendable] = deque()
        self._arrived: deque[Callable[[], None]] = deque()
        self._unsent: list[Packed] = []
        self._inbox: Inbox[Packed] = Inbox()
        self._calls = 0
        self._pending: dict[Any, None] = {}  # futures live as long as somebody holds them
        self._joined = self._warned = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True) for run in (self._receive_all, self._send_all)
        ]
        self._lifeline = actor._hold.remote(self._key)
        self._await(actor._join.remote(self._key, _encode(request), [self._lifeline]), self._on_joined)

    def start(self, receiver: Receiver) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        self._receiver = receiver
        for thread in self._threads:
            thread.start()

    def send(self, item: Sendable) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        with self._changed:
            if not self.over and not self._close_sent:
                self._outbox.append(item)
                self._changed.notify_all()

    def close(self, reason: str = "") -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        with self._changed:
            self.send(Outgoing(Close(reason)))
            self._close_sent = True
            self._changed.notify_all()

    def wait_closed(self, timeout_s: float) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or (self.over and not self._outbox), timeout_s)

    def abort(self) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        with self._changed:
            self._broken = self._broken or not self.over
            self._changed.notify_all()
        if self._receiver is None:
            self._cut()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    # in the receiving thread

    def _receive_all(self) -> None:
        try:
            while not self.over:
                with self._changed:
                    self._changed.wait_for(lambda: self._arrived or self.over)
                with self._receiving:
                    self._receive_arrived()
        except Exception as error:  # noqa: BLE001 - Ray's errors come in many kinds; so do a session's
            self._break(error)
        with self._changed:
            self._changed.notify_all()
        self._cut()

    def _receive_arrived(self) -> None:
        while self._arrived and not self.over:
            self._arrived.popleft()()

    def _cut(self) -> None:
        if self._broken:
            with suppress(Exception):  # the actor may be dead
                _ray().cancel(self._lifeline)

    def _on_joined(self, answer: bytes) -> None:
        welcome = _answers.decode(answer)
        if isinstance(welcome, Refused):
            raise error_of(welcome)
        self._poll()
        self._on_welcome(welcome)
        with self._changed:
            self._joined = True
            self._changed.notify_all()

    def _on_polled(self, reply: Reply) -> None:
        self._poll()
        self._on_reply(reply)

    def _on_reply(self, reply: Reply) -> None:
        first, messages = reply
        for number, packed in enumerate(messages, first):
            for ready in self._inbox.add(number, packed):
                if not self._broken and not self._close_received:
                    self._receive(ready)

    # in the sending thread

    def _send_all(self) -> None:
        while not self._broken:
            with self._changed:
                self._changed.wait_for(lambda: self.over or (self._joined and self._outbox))
            try:
                while (self._outbox or self._unsent) and not self._broken:
                    self._send_some()
            except (_ray().exceptions.ObjectStoreFullError, _ray().exceptions.OutOfDiskError) as error:
                self._wait_for_room(error)
            except Exception as error:  # noqa: BLE001 - what cannot be sent ends the channel
                self._arrive(partial(_raise, error))
                return
            if self.over and not self._outbox:
                with self._changed:
                    self._changed.notify_all()
                return

    def _send_some(self) -> None:
        """What waits, in one call; what is large travels alone: the next one is packed while this one is taken in."""
        while self._outbox and not any(_is_large(packed) for packed in self._unsent):
            item = self._outbox[0]
            outgoing = item(self) if callable(item) else item
            if outgoing is not None:
                self._unsent.append(_pack(outgoing))
            self._outbox.popleft()
        if self._unsent:
            self._await(self._actor._exchange.remote(self._key, self._calls, self._unsent), self._on_reply)
            self._calls, self._unsent = self._calls + 1, []

    def _wait_for_room(self, error: Exception) -> None:
        """What others let go of makes room in the store, here or elsewhere on this node."""
        if not self._warned:
            self._warned = True
            logger.warning("puts wait, because the object store of this node is full: %s", cause_of(error))
        with self._changed:
            self._changed.wait_for(lambda: self.over, _RETRY_S)

    # calls

    def _poll(self) -> None:
        self._await(self._actor._poll.remote(self._key), self._on_polled)

    def _await(self, ref: Any, then: Callable[[Any], None]) -> None:
        future = ref.future()
        self._pending[future] = None
        future.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[Any], None], future: Any) -> None:
        """In Ray's own thread, which must not be kept."""
        self._pending.pop(future, None)
        is_first = not self._arrived
        self._arrived.append(partial(self._handle, then, future))
        if is_first and _is_small(future) and self._receiving.acquire(blocking=False):
            try:
                self._receive_arrived()
            except Exception as error:  # noqa: BLE001 - for the receiving thread, before all that has arrived since
                self._arrived.appendleft(partial(_raise, error))
            finally:
                self._receiving.release()
        with self._changed:
            if self._arrived or self.over:
                self._changed.notify_all()

    def _arrive(self, handle: Callable[[], None]) -> None:
        with self._changed:
            self._arrived.append(handle)
            self._changed.notify_all()

    def _handle(self, then: Callable[[Any], None], future: Any) -> None:
        try:
            reply = future.result()
        except BaseException as error:  # noqa: BLE001 - Ray's errors come in many kinds
            raise self._lost(error) from None
        then(reply)

    def _lost(self, error: BaseException) -> ConnectionError:
        cause = getattr(error, "cause", None)  # what the actor has raised
        if isinstance(cause, ConnectionError) and not isinstance(cause, ConnectionResetError):
            return cause
        died = isinstance(error, _ray().exceptions.ActorDiedError)
        return ActorLostError(cause_of(error), for_good=died and not self._joined)


def _is_small(future: Any) -> bool:
    """A reply of messages without buffers."""
    reply = None if future.exception() else future.result()
    return isinstance(reply, tuple) and all(not arrays and not references for _, arrays, references in reply[1])


def _is_large(packed: Packed) -> bool:
    _, arrays, references = packed
    return bool(references) or sum(array.nbytes for array in arrays) >= _ALONE


def _raise(error: Exception) -> None:
    raise error


class ActorLostError(ConnectionError):
    """The actor is dead, or was started again."""

    def __init__(self, cause: str, *, for_good: bool) -> None:
        super().__init__(cause)
        self.for_good = for_good
        """It will not be started again: it said nothing, and Ray says that it is dead."""


def cause_of(error: BaseException) -> str:
    """A Ray error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _ray() -> Any:
    import ray

    return ray
