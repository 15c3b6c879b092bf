"""The accepting end: peers of all kinds on one port, their calls as functions of the host's event loop.

::

    I/O thread     arrived, calls, reports, ends  --jobs, in order-->  attend()    admit, on_peer, methods, on_end
    I/O thread     connection.send                <---io.do---------   replies, Peer.send

A service lives as long as its address does. Who attends to it may change: while nobody does, peers that knock wait, and
so do calls; the next who attends finds them, and those that the last one has left without a reply.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from stream_balancer.errors import AlreadyInUseError, RefusedError, WireError, refused_error
from stream_balancer.net import movers as ways
from stream_balancer.net.answers import Answerer, Asked, Budget
from stream_balancer.net.connection import Base
from stream_balancer.net.errors import Ended, name_of
from stream_balancer.net.loops import Runs, in_loop
from stream_balancer.net.messages import Call, Cancel, Join, Message, Notify, Report, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

__all__ = ["Bytes", "Listen", "Listening", "Method", "Peer", "Service"]

_log = logging.getLogger("stream_balancer.net")
_TURNS = 2
"""Turns of the event loop after a call that must wait, before the next one: who takes a batch needs one to hear that
there is one, and one to take it. Without them calls fill the balancer faster than it is emptied, and nearly all of them
wait, each in a task: the loop then spends half as much again on a put."""
_TOGETHER = 16
"""Calls whose replies wake the I/O thread once."""


class Bytes(NamedTuple):
    """What a method returns that answers with bytes."""

    value: Any
    payload: Payload


class Listening(Protocol):
    """A port that lets peers in."""

    @property
    def io(self) -> Runs:
        """Where its connections live."""
        ...

    @property
    def address(self) -> str:
        """Where others find it."""
        ...

    def close(self) -> None:
        """No more peers; those who are in stay."""


Arrived: TypeAlias = Callable[[Base, Join], None]
Listen: TypeAlias = Callable[[Arrived], Listening]
"""Begins to listen; what it is given is called in the I/O thread for every peer that has proven itself, and the peer
waits until it is let in or refused."""


class Peer:
    """A session at the accepting end; handler of its connection. Everything but sending belongs to the event loop."""

    def __init__(self, service: Service, join: Join) -> None:
        self.kind, self.name, self.session, self.join = join.kind, join.name, join.session, join
        self.keep_s = 0.0
        """Seconds that a lost session may come back in: its calls go on, and their replies are kept."""
        self.ending = False
        """The host has said that there is no more: its connection is closed in good order, where a service that closes
        otherwise looks like a loss, after which a peer may look for the next one."""
        self.max_report_bytes = 0
        """Bytes that may come behind a Report."""
        self.data: dict[Any, Any] = {}
        """The host's."""
        self.on_report: Callable[[Report, Memory | None], object] = lambda *_: None
        self.on_end: Callable[[Ended], object] = lambda _: None
        """Called when a connection is over; another one may follow within ``keep_s``."""
        self.on_gone: Callable[[Ended], object] = lambda _: None
        """Called once it does not come back any more."""
        self.connection: Base | None = None
        """None while it is lost."""
        self._service = service
        self._answerer = Answerer(
            service.io, service.limits, service.budget, self._begin, self._cancel, lambda: self.keep_s > 0
        )
        self._live: Base | None = None  # as the I/O thread sees it
        self._losses = 0

    # from any thread

    def send(self, message: Message, payload: Payload = NOTHING, sent: Callable[[], object] | None = None) -> None:
        """A message; dropped while there is no connection."""
        connection = self.connection
        if connection is not None:
            connection.send(message, payload, via=connection.bulk, sent=sent)

    def close(self, reason: str = "") -> None:
        """On purpose: what was sent before arrives."""
        connection = self.connection
        if connection is not None:
            connection.close(reason)

    def abort(self) -> None:
        """At once: for the peer, a loss."""
        connection = self.connection
        if connection is not None:
            connection.abort()

    def fail(self, error: Exception) -> None:
        """End its connection: WireError and RefusedError tell the peer why."""
        connection = self.connection
        if connection is not None:
            self._service.io.do(lambda: connection.fail(error))

    # in the I/O thread

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that may not come."""
        if not (isinstance(message, Report) and self.kind == "rank" and total <= self.max_report_bytes):
            self._answerer.admit(message, total)

    def receive(self, message: Message, memory: Memory | None) -> None:
        """In the order of sending. Raises WireError for what may not come."""
        if isinstance(message, (Call, Cancel)):
            self._answerer.receive(message, memory)
        elif isinstance(message, Report) and self.kind == "rank":
            self._service._do(self, lambda: self.on_report(message, memory))
        else:
            raise WireError(f"a {type(message).__name__} message from a {self.kind}")

    def ended(self, end: Ended) -> None:
        """Its connection is over."""
        connection, self._live = self._live, None
        self._answerer.lost()
        self._service._do(self, lambda: self._service._ended(self, connection, end))

    def _let_in(self, connection: Base, welcome: Welcome) -> None:
        self._live = connection
        if connection.over:
            self.ended(Ended("lost", "it has left while it knocked"))
            return
        connection.handler = self
        connection.let_in(welcome)
        ways.attach(connection, welcome.movers)
        self._answerer.open(connection)

    def _begin(self, asked: Asked) -> None:
        self._service._do(self, lambda: self._service._begin(self, asked))

    def _cancel(self, asked: Asked) -> None:
        asked.cancelled = True
        self._service._do(self, lambda: self._service._cancel(asked))


Method: TypeAlias = Callable[[Peer, Asked], Any]
"""Returns the value, Bytes, or a coroutine for what must wait. Whatever depends on the order of calls happens before
it returns. WireError ends the connection; any other Exception is the reply."""


class Service:
    """Listens. What peers ask is answered by who attends."""

    def __init__(
        self, listen: Listen, *, limits: Welcome | None = None, movers: Sequence[str] = (),
        most_staged_bytes: int = 2**32,
    ) -> None:  # fmt: skip
        """``limits``: of one session. ``most_staged_bytes``: of calls without a reply, over all sessions; then sockets
        are not read (but for one call a session)."""
        self.limits, self.budget = limits or Welcome(), Budget(most_staged_bytes)
        self.peers: dict[bytes, Peer] = {}
        """By session; those that are lost too, for as long as they may come back."""
        self._movers = ways.available(movers)
        self._methods: Mapping[str, Method] = {}
        self._admit: Callable[[Join], Any] = lambda _: None
        self._on_peer: Callable[[Peer], object] = lambda _: None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._begun: dict[Asked, tuple[Peer, anyio.CancelScope]] = {}
        self._jobs: deque[Callable[[], object]] = deque()
        self._knocking: dict[Base, None] = {}
        self._wake: Callable[[], object] = lambda: None
        self._waits = False
        self._listening = listen(self._arrived)
        self.io, self.address = self._listening.io, self._listening.address

    def close(self, reason: str = "") -> None:
        """No more peers; those that are in are let go. In the event loop, when nobody attends any more."""
        self._listening.close()
        closed = refused_error("closed", "the controller has closed its transport. Start it again")
        for connection in list(self._knocking):
            self.io.do(partial(connection.fail, closed))
        for peer in self.peers.values():
            if peer.ending:
                peer.close(reason)
            else:
                peer.abort()

    def notify(self, version: int | None = None, *, end: bool = False) -> None:
        """Tell every peer that a policy version is in force, or that there is no more."""
        for peer in self.peers.values():
            peer.send(Notify(version, end))

    # who attends

    async def attend(
        self, methods: Mapping[str, Method], *, admit: Callable[[Join], Any] = lambda _: None,
        on_peer: Callable[[Peer], object] = lambda _: None,
    ) -> None:  # fmt: skip
        """Answer calls in this event loop, until cancelled. ``admit``: of a peer that has proven itself; what it
        returns goes into the welcome, and RefusedError refuses. ``on_peer``: whenever one has come in, again if it is
        one that was lost."""
        if self._tasks is not None:
            raise AlreadyInUseError(f"peers at {self.address} are attended to already: one serve() at a time")
        self._methods, self._admit, self._on_peer = methods, admit, on_peer
        loop = in_loop()
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    event = anyio.Event()
                    self._wake = partial(loop, event.set)
                    while self._jobs:
                        self.io.hold(self._some)
                        if self._waits:
                            self._waits = False
                            for _ in range(_TURNS if self._jobs else 0):
                                await anyio.lowlevel.checkpoint()
                    await event.wait()
        finally:
            self._tasks, self._wake = None, lambda: None
            left, self._begun = self._begun, {}
            self._jobs.extendleft(partial(self._begin, peer, asked) for asked, (peer, _) in reversed(left.items()))

    def answer_here(self, methods: Mapping[str, Method]) -> None:
        """Answer calls in the I/O thread, for good: with methods that neither wait nor take long."""
        self._methods = methods
        self._wake = self._drain
        self.io.do(self._drain)

    def _drain(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def _some(self) -> None:
        for _ in range(min(len(self._jobs), _TOGETHER)):
            self._jobs.popleft()()
            if self._waits:
                break

    def _do(self, peer: Peer, job: Callable[[], object]) -> None:
        """Run it where it is attended to. From the I/O thread."""
        self._jobs.append(lambda: self._guarded(peer, job))
        self._wake()

    def _guarded(self, peer: Peer, job: Callable[[], object]) -> None:
        try:
            job()
        except WireError as error:
            peer.fail(error)

    # in the I/O thread

    def _arrived(self, connection: Base, join: Join) -> None:
        self._knocking[connection] = None
        self._jobs.append(lambda: self._decide(connection, join))
        self._wake()

    # in the event loop

    def _decide(self, connection: Base, join: Join) -> None:
        self._knocking.pop(connection, None)
        peer = self.peers.get(join.session)
        if peer is not None and peer.connection is not None:
            self._supersede(peer, peer.connection)
            peer = self.peers.get(join.session)
        try:
            about = self._admit(join)
        except (RefusedError, WireError) as error:
            refusal = error
            self.io.do(lambda: connection.fail(refusal))
            return
        known = peer is not None and peer.kind == join.kind
        if peer is None or not known:
            peer = self.peers[join.session] = Peer(self, join)
        peer.connection, peer.join = connection, join
        welcome = msgspec.structs.replace(
            self.limits, known=known, movers=tuple(name for name in self._movers if name in join.movers),
            about=msgspec.Raw(msgspec.msgpack.encode(about)),
        )  # fmt: skip
        self.io.do(partial(peer._let_in, connection, welcome))
        self._on_peer(peer)

    def _supersede(self, peer: Peer, connection: Base) -> None:
        """Only the peer knows yet that this connection is lost."""
        end = Ended("lost", "its session has joined again")
        self.io.do(lambda: connection.fail(end))
        self._ended(peer, connection, end)

    def _ended(self, peer: Peer, connection: Base | None, end: Ended) -> None:
        if peer.connection is not connection or connection is None:
            return  # it has joined again
        peer.connection = None
        peer._losses += 1
        if end.kind == "refused":
            _log.warning("the connection to %s %s was closed: %s", peer.kind, peer.name, end.text)
        peer.on_end(end)
        if end.kind == "lost" and peer.keep_s > 0:
            gone = partial(self._do, peer, partial(self._gone, peer, end, peer._losses))
            self.io.do(lambda: self.io.after(peer.keep_s, gone))
        else:
            self._gone(peer, end, peer._losses)

    def _gone(self, peer: Peer, end: Ended, losses: int) -> None:
        """Unless it has come back: what still waits of it is withdrawn."""
        if self.peers.get(peer.session) is peer and peer.connection is None and peer._losses == losses:
            del self.peers[peer.session]
            for asked, (its, scope) in self._begun.items():
                if its is peer:
                    asked.cancelled = True
                    scope.cancel()
            self.io.do(peer._answerer.end)
            peer.on_gone(end)

    def _cancel(self, asked: Asked) -> None:
        if asked in self._begun:
            self._begun[asked][1].cancel()

    def withdraw(self, asked: Asked) -> None:
        """As if its caller had cancelled it."""
        asked.cancelled = True
        self._cancel(asked)

    def _begin(self, peer: Peer, asked: Asked) -> None:
        if asked.cancelled:
            asked.reply("", "Cancelled")
            return
        if self.peers.get(peer.session) is not peer:
            return
        method = self._methods.get(asked.method)
        if method is None:
            peer.fail(WireError(f"a call of {asked.method!r}, which is not among {', '.join(self._methods)}"))
            return
        try:
            result = method(peer, asked)
        except WireError as error:
            peer.fail(error)
        except Exception as error:  # noqa: BLE001 - the reply
            _refuse(asked, error)
        else:
            if inspect.iscoroutine(result):
                self._start(peer, asked, result)
            else:
                _reply(asked, result)

    def _start(self, peer: Peer, asked: Asked, coroutine: Coroutine[Any, Any, Any]) -> None:
        assert self._tasks is not None
        scope = anyio.CancelScope()
        self._begun[asked] = peer, scope
        self._waits = True
        self._tasks.start_soon(self._finish, asked, scope, coroutine)

    async def _finish(self, asked: Asked, scope: anyio.CancelScope, coroutine: Coroutine[Any, Any, Any]) -> None:
        with scope:
            try:
                result = await coroutine
            except Exception as error:  # noqa: BLE001 - the reply
                del self._begun[asked]
                _refuse(asked, error)
            else:
                del self._begun[asked]
                _reply(asked, result)
            return
        del self._begun[asked]
        asked.reply("", "Cancelled")


def _reply(asked: Asked, result: Any) -> None:
    if isinstance(result, Bytes):
        asked.reply(result.value, payload=result.payload)
    else:
        asked.reply(result)


def _refuse(asked: Asked, error: Exception) -> None:
    name, text = name_of(error)
    asked.reply(text, name)
