"""The actor's end of a channel of actor calls: it answers, and cannot call. Lives in the actor's event loop.

:mod:`channel` draws the conversation. The actor makes no call that could fail, so a dead caller is noticed by its
lifeline. Imports no Ray: what is awaited comes as an argument, and tests in virtual time run this code.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from stream_balancer.errors import refused_error
from stream_balancer.transport.channel import Outgoing, Receiver, Sendable, refusal
from stream_balancer.transport.event_loop import loop_caller
from stream_balancer.transport.ray.channel import ChannelEnd, Inbox, Packed, Reply, cause_of, pack
from stream_balancer.wire.messages import Close, Join, Refused, Welcome

__all__ = ["ActorChannel", "ActorChannels"]

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Join] = msgspec.msgpack.Decoder(Join)
_PASSES = 2  # of the event loop, until whoever was woken by a message has answered it
_THREAD_BYTES = 2**20  # what is larger is packed in a thread, beside the actor's event loop
_MAX_OVER = 1000  # channels that are over; each asks a last time within milliseconds


class ActorChannel(ChannelEnd):
    """The actor's end. Belongs to its event loop, but :meth:`send` may be called from any thread: see
    :attr:`~stream_balancer.transport.channel.Channel.threads`."""

    threads = False

    def __init__(self, on_over: Callable[[], object] = lambda: None) -> None:
        """``on_over()`` is called once nothing more can be said; the caller may still ask for what was said last."""
        super().__init__()
        self._inbox: Inbox[list[Packed]] = Inbox()
        self._outbox: deque[Sendable] = deque()
        self._refused: Refused | None = None  # why the caller is, if it is
        self._first = self._answering = 0
        self._in_loop, self._thread = loop_caller(), threading.get_ident()
        self._news = anyio.Event()
        self._on_over: Callable[[], object] | None = on_over

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, item: Sendable) -> None:
        if not self.over and not self._close_sent:
            self._outbox.append(item)
            if threading.get_ident() == self._thread:
                self._news.set()
            else:
                self._in_loop(lambda: self._news.set())

    def close(self, reason: str = "") -> None:
        self.send(Outgoing(Close(reason)))
        self._close_sent = True
        self._check_over()

    def wait_closed(self, timeout_s: float) -> None:
        """Nothing to wait for: this end lives in one event loop."""

    def abort(self) -> None:
        """Pending and later calls fail."""
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
        self._answering += 1  # polls hold back: an answer costs nothing in this call, and a round trip in theirs
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
            self._refused = refusal(error)
            self._break(error)
        self._check_over()

    async def _take_out(self) -> Reply:
        if self._broken:
            if self._refused is not None:  # as an error: it comes whichever call returns first
                raise refused_error(self._refused.reason, self._refused.text)
            raise ConnectionError("the other end has released this channel")
        try:
            # Numbered before anything is awaited: another call may take what comes up meanwhile, and return first.
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
        return pack(outgoing)
    return await anyio.to_thread.run_sync(pack, outgoing)


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
        return await self._of(key).exchange(number, messages)

    async def poll(self, key: str) -> Reply:
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
