"""A channel of actor calls: from any process to the actor that hosts the balancer. Knows Ray's calls, no rollout.

::

    CallingChannel (any process)  --_exchange(key, number, packed messages)-->  ActorChannel (in the actor's event loop)
                                  <-- what was answered by then -------------
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
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Outgoing, PeerClosed, Receiver, Sendable
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.wire.messages import Close, decode_message, encode_message

__all__ = ["ActorChannel", "ActorChannels", "ActorLostError", "CallingChannel", "Inbox", "cause_of"]

Packed = tuple[bytes, list[NDArray[np.uint8]], list[Any]]
"""(message, buffers, object references)."""
Reply = tuple[int, list[Packed]]
"""(number of the first message, messages)."""
T = TypeVar("T")
_PASSES = 2  # of the event loop, until whoever was woken by a message has answered it
_THREAD_BYTES = 2**20  # what is larger is packed in a thread, beside the actor's event loop
_ALONE = 2**20  # bytes; what is larger travels in a call of its own
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

    def close(self, reason: str = "") -> None:
        raise NotImplementedError


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
        self._on_over = on_over
        self._released = anyio.Event()

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
        if self.over and not self._released.is_set():
            self._released.set()
            self._news.set()
            self._on_over()

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

    async def hold(self) -> None:
        """Return once the caller need not be watched any more."""
        await self._released.wait()

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

    def __init__(self, on_channel: Callable[[ActorChannel], object]) -> None:
        """``on_channel(channel)``: somebody has connected."""
        self._on_channel = on_channel
        self._open: dict[str, ActorChannel] = {}
        self._over: dict[str, ActorChannel] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> Sequence[ActorChannel]:
        """Those that are not over."""
        return list(self._open.values())

    async def exchange(self, key: str, number: int, messages: list[Any]) -> Reply:
        """See :meth:`ActorChannel.exchange`. The first call of a caller brings its lifeline instead of messages."""
        channel = self._of(key)
        if number == 0:
            self._watch(channel, messages.pop())
        return await channel.exchange(number, messages)

    async def poll(self, key: str) -> Reply:
        """See :meth:`ActorChannel.poll`."""
        return await self._of(key).poll()

    async def hold(self, key: str) -> None:
        """See :meth:`ActorChannel.hold`."""
        await self._of(key).hold()

    def _of(self, key: str) -> ActorChannel:
        channel = self._open.get(key) or self._over.get(key)
        if channel is None:
            channel = self._open[key] = ActorChannel(partial(self._on_over, key))
            self._on_channel(channel)
        return channel

    def _on_over(self, key: str) -> None:
        """It may still ask for what was said last."""
        self._over[key] = self._open.pop(key)
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
    """The end in a rank or a worker. Its thread packs, calls, and receives."""

    threads = True

    def __init__(self, actor: Any, *, name: str = "sb-ray") -> None:
        """Connects at once. ``actor``: a handle whose ``_exchange``, ``_poll`` and ``_hold`` lead to
        :class:`ActorChannels`."""
        super().__init__()
        self._actor, self._key = actor, secrets.token_hex(8)
        self._changed = threading.Condition()
        self._outbox: deque[Sendable] = deque()
        self._arrived: deque[tuple[Reply | Exception, bool]] = deque()
        self._unsent: list[Any] = []
        self._inbox: Inbox[Packed] = Inbox()
        self._calls = 0
        self._pending: dict[Any, None] = {}  # futures live as long as somebody holds them
        self._warned = self._heard = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lifeline = actor._hold.remote(self._key)
        self._call([self._lifeline])

    def start(self, receiver: Receiver) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        self._receiver = receiver
        self._thread.start()

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
            self._changed.wait_for(lambda: self.over and not self._outbox, timeout_s)

    def abort(self) -> None:
        """See :class:`~stream_balancer.transport.channel.Channel`."""
        with self._changed:
            self._broken = self._broken or not self.over
            self._changed.notify_all()
        if self._thread.ident is None:
            self._cut()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    # in the thread

    def _run(self) -> None:
        try:
            self._poll()
            while not self.over:
                with self._changed:
                    self._changed.wait_for(lambda: self._arrived or self._outbox or self.over)
                    arrived, self._arrived = self._arrived, deque()
                for reply in arrived:
                    self._take_in(*reply)
                self._send_all()
        except Exception as error:  # noqa: BLE001 - Ray's errors come in many kinds; so do a session's
            self._break(error)
        with self._changed:
            self._changed.notify_all()
        self._cut()

    def _cut(self) -> None:
        if self._broken:
            with suppress(Exception):  # the actor may be dead
                _ray().cancel(self._lifeline)

    def _take_in(self, reply: Reply | Exception, polled: bool) -> None:
        if isinstance(reply, Exception):
            if not self.over:
                raise reply
            return
        if polled and not self.over:
            self._poll()
        self._heard = True
        first, messages = reply
        for number, packed in enumerate(messages, first):
            for ready in self._inbox.add(number, packed):
                if not self._broken and not self._close_received:
                    self._receive(ready)

    def _send_all(self) -> None:
        """Everything that waits. What is large travels alone: the next one is packed while this one is taken in."""
        while (self._outbox or self._unsent) and not self._broken:
            try:
                while self._outbox and sum(array.nbytes for _, arrays, _ in self._unsent for array in arrays) < _ALONE:
                    item = self._outbox[0]
                    outgoing = item(self) if callable(item) else item
                    if outgoing is not None:
                        self._unsent.append(_pack(outgoing))
                    self._outbox.popleft()
                if self._unsent:
                    self._call(self._unsent)
                self._unsent = []
            except (_ray().exceptions.ObjectStoreFullError, _ray().exceptions.OutOfDiskError) as error:
                self._wait_for_room(error)
                return

    def _wait_for_room(self, error: Exception) -> None:
        """What others let go of makes room in the store, here or elsewhere on this node."""
        if not self._warned:
            self._warned = True
            logger.warning("puts wait, because the object store of this node is full: %s", cause_of(error))
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self.over, _RETRY_S)

    def _call(self, messages: list[Any]) -> None:
        self._await(self._actor._exchange.remote(self._key, self._calls, messages), polled=False)
        self._calls += 1

    def _poll(self) -> None:
        self._await(self._actor._poll.remote(self._key), polled=True)

    def _await(self, ref: Any, *, polled: bool) -> None:
        future = ref.future()
        self._pending[future] = None
        future.add_done_callback(partial(self._done, polled))

    def _done(self, polled: bool, future: Any) -> None:
        """In Ray's own thread, which must not be kept."""
        self._pending.pop(future, None)
        try:
            reply: Reply | Exception = future.result()
        except BaseException as error:  # noqa: BLE001 - Ray's errors come in many kinds
            reply = self._lost(error)
        with self._changed:
            self._arrived.append((reply, polled))
            self._changed.notify_all()

    def _lost(self, error: BaseException) -> ActorLostError:
        died = isinstance(error, _ray().exceptions.ActorDiedError)
        return ActorLostError(cause_of(error), for_good=died and not self._heard)


class ActorLostError(ConnectionError):
    """The actor cannot be reached."""

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
