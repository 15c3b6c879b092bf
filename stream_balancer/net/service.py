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
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from stream_balancer.errors import AlreadyInUseError, RefusedError, WireError
from stream_balancer.net import movers as ways
from stream_balancer.net.answers import Asked, Budget, Bytes, Peer
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import Ended, name_of
from stream_balancer.net.loops import Runs, in_loop
from stream_balancer.net.messages import Join, Welcome

__all__ = ["Bytes", "Listen", "Listening", "Method", "Peer", "Service"]

_log = logging.getLogger("stream_balancer.net")
_TURNS = 2
"""Turns of the event loop after a call that must wait, before the next one: who takes a batch needs one to hear that
there is one, and one to take it. Without them calls fill the balancer faster than it is emptied, and nearly all of them
wait, each in a task: the loop then spends half as much again on a put."""
_TOGETHER = 16
"""Calls whose replies wake the I/O thread once."""


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


Arrived: TypeAlias = Callable[[Connection, Join], None]
Listen: TypeAlias = Callable[[Arrived], Listening]
"""Begins to listen; what it is given is called in the I/O thread for every peer that has proven itself, and the peer
waits until it is let in or refused."""


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
        self._jobs: deque[tuple[Peer | None, Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake: Callable[[], object] = lambda: None
        self._waits = self._woken = False
        self._listening = listen(self._arrived)
        self.io, self.address = self._listening.io, self._listening.address

    def close(self, reason: str = "") -> None:
        """No more peers; those that are in are let go. In the event loop, when nobody attends any more."""
        self._listening.close()
        for peer in self.peers.values():
            if peer.ending:
                peer.close(reason)
            else:
                peer.abort()

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
        try:
            async with anyio.create_task_group() as self._tasks:
                # by itself: whoever waits here is not woken for each call
                self._tasks.start_soon(self._work_off)
        finally:
            self._tasks, self._wake = None, lambda: None
            left, self._begun = self._begun, {}
            # calls that were begun and not answered come first for the next who attends, in their order
            self._jobs.extendleft((peer, self.begin, (peer, asked)) for asked, (peer, _) in reversed(left.items()))

    async def _work_off(self) -> None:
        loop = in_loop()
        while True:
            event = anyio.Event()
            self._wake = partial(loop, event.set)
            # before the jobs are looked at: who adds one later wakes again
            self._woken = False
            while self._jobs:
                self.io.hold(self._some)
                # one call that waits ends the group: its task must begin before the next call is looked at
                if self._waits:
                    self._waits = False
                    for _ in range(_TURNS if self._jobs else 0):
                        await anyio.lowlevel.checkpoint()
            await event.wait()

    def answer_here(self, methods: Mapping[str, Method]) -> None:
        """Answer calls in the I/O thread, for good: with methods that neither wait nor take long."""
        self._methods = methods
        # no loop to wake: jobs run where they come from, in the I/O thread
        self._wake = self._drain
        self.io.do(self._drain)

    def _drain(self) -> None:
        self._woken = False
        while self._jobs:
            self._some()

    def _some(self) -> None:
        for _ in range(min(len(self._jobs), _TOGETHER)):
            peer, job, args = self._jobs.popleft()
            try:
                job(*args)
            except WireError as error:
                if peer is None:
                    raise
                peer.fail(error)
            if self._waits:
                break

    # in the I/O thread

    def do(self, peer: Peer | None, job: Callable[..., object], *args: object) -> None:
        """Run it where peers are attended to."""
        # before the flag is looked at, as the loop clears it before it looks at the jobs
        self._jobs.append((peer, job, args))
        if not self._woken:
            self._woken = True
            self._wake()

    def _arrived(self, connection: Connection, join: Join) -> None:
        self.do(None, self._decide, connection, join)

    # in the event loop

    def _decide(self, connection: Connection, join: Join) -> None:
        peer = self.peers.get(join.session)
        # who lost its connection may come back before the kernel here notices
        if peer is not None and peer.connection is not None:
            self._supersede(peer, peer.connection)
            peer = self.peers.get(join.session)
        try:
            about = self._admit(join)
        except (RefusedError, WireError) as error:
            self.io.do(partial(connection.fail, error))
            return
        # a session of another kind is another peer, whatever number it made up
        known = peer is not None and peer.kind == join.kind
        if peer is None or not known:
            peer = self.peers[join.session] = Peer(self, join)
        peer.connection, peer.join = connection, join
        welcome = msgspec.structs.replace(
            self.limits, known=known, movers=tuple(name for name in self._movers if name in join.movers),
            about=msgspec.Raw(msgspec.msgpack.encode(about)),
        )  # fmt: skip
        # before on_peer: what the host sends there must come behind the welcome
        self.io.do(partial(peer.let_in, connection, welcome))
        self._on_peer(peer)

    def _supersede(self, peer: Peer, connection: Connection) -> None:
        """Only the peer knows yet that this connection is lost."""
        end = Ended("lost", "its session has joined again")
        self.io.do(partial(connection.fail, end))
        self.lost(peer, connection, end)

    def lost(self, peer: Peer, connection: Connection | None, end: Ended) -> None:
        """A connection is over."""
        if peer.connection is not connection or connection is None:
            # it has joined again
            return
        peer.connection = None
        # the timer below belongs to this loss: after another one it must do nothing
        peer.losses += 1
        if end.kind == "refused":
            _log.warning("the connection to %s %s was closed: %s", peer.kind, peer.name, end.text)
        peer.on_end(end)
        # who closed on purpose does not come back
        if end.kind == "lost" and peer.keep_s > 0:
            gone = partial(self.do, peer, self._gone, peer, end, peer.losses)
            self.io.do(lambda: self.io.after(peer.keep_s, gone))
        else:
            self._gone(peer, end, peer.losses)

    def _gone(self, peer: Peer, end: Ended, losses: int) -> None:
        """Unless it has come back: what still waits of it is withdrawn."""
        if self.peers.get(peer.session) is peer and peer.connection is None and peer.losses == losses:
            del self.peers[peer.session]
            for asked, (its, _) in self._begun.items():
                if its is peer:
                    self.cancel(asked)
            self.io.do(peer.leave)
            peer.on_gone(end)

    def cancel(self, asked: Asked) -> None:
        """Take a call back, if it waits or was not begun."""
        asked.cancelled = True
        if asked in self._begun:
            self._begun[asked][1].cancel()

    def begin(self, peer: Peer, asked: Asked) -> None:
        """Begin a call, unless it was taken back. What need not wait has its reply at once."""
        if asked.cancelled:
            asked.reply("", "Cancelled")
            return
        # its session was given up while the call waited in line
        if self.peers.get(peer.session) is not peer:
            return
        method = self._methods.get(asked.method)
        # not a reply: another version, or no producer of ours, is at the other end
        if method is None:
            raise WireError(f"a call of {asked.method!r}, which is not among {', '.join(self._methods)}")
        try:
            result = method(peer, asked)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001 - the reply
            _refuse(asked, error)
            return
        if inspect.iscoroutine(result):
            self._start(peer, asked, result)
        else:
            asked.reply(result)

    def _start(self, peer: Peer, asked: Asked, coroutine: Coroutine[Any, Any, Any]) -> None:
        assert self._tasks is not None
        # one for each call: a Cancel takes back its own and nothing else
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
                asked.reply(result)
            return
        del self._begun[asked]
        asked.reply("", "Cancelled")


def _refuse(asked: Asked, error: Exception) -> None:
    name, text = name_of(error)
    asked.reply(text, name)
