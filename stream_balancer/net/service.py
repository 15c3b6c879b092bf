"""The accepting end: peers of all kinds on one port, their calls as functions of the host's event loop."""

from __future__ import annotations

import inspect
import logging
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from stream_balancer.net import movers as ways
from stream_balancer.net.calls import Answerer, Asked
from stream_balancer.wire.codec import Encoded
from stream_balancer.net.connection import NOTHING, Connection, Listener, Payload
from stream_balancer.net.errors import Ended, WireError
from stream_balancer.net.loops import Io, in_loop
from stream_balancer.net.messages import Call, Cancel, Join, Message, Notify, Report, Seal, Welcome, Work
from stream_balancer.net.pool import Memory, Pool

__all__ = ["Bytes", "Service", "Peer"]

_log = logging.getLogger(__name__)
_TURNS = 2
"""Turns of the event loop after a call that must wait, before the next one: who takes a batch needs one to hear that there
is one and one to take it. Without them calls fill the balancer faster than it is emptied, and nearly all of them wait,
each in a task: the loop then spends half as much again on a put."""
_TOGETHER = 16
"""Calls whose replies wake the I/O thread once."""


class Bytes(NamedTuple):
    """What a method returns that answers with bytes."""

    value: Any
    payload: Payload


Method = Callable[["Peer", Asked], Any]
"""Returns the value, or a coroutine for what must wait. Whatever depends on the order of calls happens before it
returns."""


class Peer:
    """A session at the accepting end; handler of its connection. ``data`` is the host's."""

    def __init__(self, host: Service, join: Join) -> None:
        self.host, self.kind, self.name, self.session = host, join.kind, join.name, join.session
        self.about = join.about
        self.data: dict[Any, Any] = {}
        self.connection: Connection | None = None
        self.end: Ended | None = None
        self.answerer = Answerer(host.io, host.limits, self._begin, self._cancel)
        self.on_report: Callable[[Report, Memory | None], object] = lambda *_: None
        self.on_end: Callable[[Ended], object] = lambda _: None
        self._forget = lambda: None

    # from any thread

    def work(self, step: int, first: int, encoded: Encoded, sent: Callable[[], object] | None = None) -> None:
        """Send items of a step."""
        self._send(Work(step, first, encoded.header), encoded.payload, sent)

    def seal(self, step: int, items: int, about: Any) -> None:
        self._send(Seal(step, items, msgspec.Raw(msgspec.msgpack.encode(about))))

    def notify(self, version: int | None = None, *, end: bool = False) -> None:
        self._send(Notify(version, end))

    def _send(self, message: Message, payload: Payload = NOTHING, sent: Callable[[], object] | None = None) -> None:
        connection = self.connection
        if connection is not None:
            connection.send(message, payload, via=connection.bulk, sent=sent)

    # in the I/O thread

    def admit(self, message: Message, total: int) -> None:
        if isinstance(message, Report) and self.kind == "rank" and total <= self.host.limits.max_call_bytes:
            return
        self.answerer.admit(message, total)

    def receive(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, (Call, Cancel)):
            self.answerer.receive(message, memory)
        elif isinstance(message, Report) and self.kind == "rank":
            self.on_report(message, memory)
        else:
            raise WireError(f"a {type(message).__name__} message from a {self.kind}")

    def ended(self, end: Ended) -> None:
        self.connection, self.end = None, end
        self.answerer.lost()
        self._forget = self.host.io.after(self.host.keep_s if end.kind == "lost" else 0.0, self._gone)
        self.on_end(end)

    def _gone(self) -> None:
        self.answerer.end()
        self.host.peers.pop(self.session, None)

    def _begin(self, asked: Asked) -> None:
        self.host._loop(lambda: self.host._begin(self, asked))

    def _cancel(self, asked: Asked) -> None:
        asked.cancelled = True
        self.host._loop(lambda: asked.cancel())


class Service:
    """Listens; ``async with`` it in the event loop that its methods belong to."""

    def __init__(
        self, token: bytes, methods: Mapping[str, Method], *, host: str = "127.0.0.1", port: int = 0,
        limits: Welcome = Welcome(), movers: Sequence[str] = (), tls: ssl.SSLContext | None = None, keep_s: float = 60.0,
        admit: Callable[[Join], object] = lambda _: None, on_peer: Callable[[Peer], object] = lambda _: None,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        """``admit`` raises RefusedError for who may not come in, and ``on_peer`` is told of who has; both in the I/O
        thread. ``keep_s``: how long a lost session may come back."""
        self.io = Io.current()
        self.limits, self.keep_s, self.peers = limits, keep_s, {}
        self._methods, self._movers, self._admit, self._on_peer = dict(methods), ways.available(movers), admit, on_peer
        self._tasks: anyio.abc.TaskGroup | None = None
        self._jobs: deque[Callable[[], object]] = deque()
        self._wake: Callable[[], object] = lambda: None
        self._waits = False
        self._listener = Listener(host, port, token, self._arrived, tls=tls, pool=pool)
        self.address = self._listener.address

    async def __aenter__(self) -> Service:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._attend)
        return self

    def _loop(self, job: Callable[[], object]) -> None:
        """Run it in the event loop, in a task. From any thread."""
        self._jobs.append(job)
        self._wake()

    async def _attend(self) -> None:
        loop = in_loop()
        while True:
            event = anyio.Event()
            self._wake = lambda event=event: loop(event.set)
            while self._jobs:
                self.io.hold(self._some)
                if self._waits:
                    self._waits = False
                    for _ in range(_TURNS if self._jobs else 0):
                        await anyio.lowlevel.checkpoint()
            await event.wait()

    def _some(self) -> None:
        for _ in range(min(len(self._jobs), _TOGETHER)):
            self._jobs.popleft()()
            if self._waits:
                break

    async def __aexit__(self, *exc: Any) -> Any:
        assert self._tasks is not None
        self._listener.close()
        for peer in list(self.peers.values()):
            if peer.connection is not None:
                peer.connection.close("the balancer is closed")
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*exc)

    def notify(self, version: int | None = None, *, end: bool = False) -> None:
        """Tell everybody."""
        for peer in list(self.peers.values()):
            peer.notify(version, end=end)

    def _arrived(self, connection: Connection, join: Join) -> None:
        """In the I/O thread."""
        self._admit(join)
        peer = self.peers.get(join.session)
        known = peer is not None and peer.kind == join.kind
        if not known:
            peer = self.peers[join.session] = Peer(self, join)
        elif peer.connection is not None:  # its old connection, which is not known to be lost yet
            old, peer.connection = peer.connection, None
            old.handler = None
            old._fail(Ended("lost", "its session has joined again"))
        peer._forget()
        peer.connection, peer.end, connection.handler = connection, None, peer
        names = tuple(name for name in self._movers if name in join.movers)
        connection.let_in(msgspec.structs.replace(self.limits, known=known, movers=names))
        ways.attach(connection, names)
        peer.answerer.open(connection)
        self._on_peer(peer)

    # in the event loop

    def _begin(self, peer: Peer, asked: Asked) -> None:
        if asked.cancelled:
            asked.reply("", "Cancelled")
            return
        try:
            result = self._methods[asked.method](peer, asked)
        except WireError as error:
            refusal = error
            connection = peer.connection
            if connection is not None:
                self.io.do(lambda: connection._fail(refusal))
            return
        except Exception as error:  # noqa: BLE001 - the caller gets it
            asked.reply(str(error), type(error).__name__)
            return
        if inspect.iscoroutine(result):
            assert self._tasks is not None
            self._waits = True
            self._tasks.start_soon(self._finish, asked, result)
        elif isinstance(result, Bytes):
            asked.reply(result.value, payload=result.payload)
        else:
            asked.reply(result)

    async def _finish(self, asked: Asked, coroutine: Any) -> None:
        with anyio.CancelScope() as scope:
            asked.cancel = scope.cancel
            try:
                value = await coroutine
            except Exception as error:  # noqa: BLE001 - the caller gets it
                asked.reply(str(error), type(error).__name__)
            else:
                asked.reply(value)
            return
        asked.reply("", "Cancelled")
