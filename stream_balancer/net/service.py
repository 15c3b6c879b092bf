"""The accepting end: peers of all kinds on one port, their calls as functions of the host's event loop.

::

    I/O thread     arrived, calls, reports, ends  --jobs, in order-->  attend()    a Host
    I/O thread     connection.send                <---io.do---------   replies, Peer.send

A service lives as long as its address does. Who attends to it may change: while nobody does, peers that knock wait, and
so do calls; the next who attends finds them, and those that the last one has left without a reply. See
:mod:`stream_balancer.net.session` for the conversation.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import anyio
import anyio.abc
import msgspec

from stream_balancer.errors import AlreadyInUseError, RefusedError, WireError
from stream_balancer.net import movers as ways
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import ConnectionEnd, name_of
from stream_balancer.net.listener import Listen
from stream_balancer.net.loops import Inbox, Job
from stream_balancer.net.messages import CALL_BYTES, SMALL, Call, Cancel, Join, Message, Reply, Report, Welcome
from stream_balancer.wire.payload import NOTHING, Encoded, Memory, Payload

_log = logging.getLogger("stream_balancer.net")

Method: TypeAlias = Callable[["Peer", "Asked"], Any]
"""Returns the value, an Encoded, or a coroutine for what must wait. Whatever depends on the order of calls happens
before it returns. WireError ends the connection; any other Exception is the reply."""


class Host:
    """Attendant of peers: in an event loop, but for the methods of :meth:`Service.answer_here`."""

    methods: Mapping[str, Method] = {}
    """Calls that are answered."""

    def admit(self, peer: Peer, join: Join) -> Any:
        """A peer has proven itself. What this returns goes into the welcome, and RefusedError refuses."""

    def on_peer(self, peer: Peer) -> None:
        """A peer has come in, perhaps one that was lost."""

    def on_report(self, peer: Peer, report: Report) -> None:
        """Raises WireError for what it cannot mean."""

    def on_end(self, peer: Peer, end: ConnectionEnd) -> None:
        """A connection is over; another one may follow within ``peer.keep_s``."""

    def on_gone(self, peer: Peer, end: ConnectionEnd) -> None:
        """A peer does not come back any more."""


class Asked(msgspec.Struct, eq=False):
    """A call of a peer, until its reply."""

    peer: Peer
    number: int
    method: str
    args: msgspec.Raw
    memory: Memory | None
    nbytes: int
    cancelled: bool = False
    keeps: Any = None
    """Value that lives until the reply was made, whoever makes it: the host's."""

    def reply(self, value: Any = None, error: str = "") -> None:
        """The one reply. From any thread."""
        value, payload = value if isinstance(value, Encoded) else (value, NOTHING)
        # encoded in the thread that answers: what cannot be written raises where the method was called
        raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(value))
        self.memory = None
        # alone and small, sending it here saves a thread switch; many together go in one turn of the I/O thread
        small = len(self.peer.open) == 1 and payload.total <= SMALL
        self.peer.io.do(partial(self.peer.answer, self, Reply(self.number, raw, error), payload), here=small)
        self.keeps = None

    def refuse(self, error: Exception) -> None:
        """An error is the reply."""
        name, text = name_of(error)
        self.reply(text, name)


class Peer:
    """A session at the accepting end; handler of its connection."""

    def __init__(self, service: Service, join: Join) -> None:
        self.kind, self.name, self.session, self.join = join.kind, join.name, join.session, join
        # of who attends
        self.keep_s = 0.0
        """Seconds that a lost session may come back in: its calls go on, and their replies are kept."""
        self.ending = False
        """The host has said that there is no more: its connection is closed in good order, where a service that closes
        otherwise looks like a loss, after which a peer may look for the next one."""
        self.data: Any = None
        """The host's."""
        self.connection: Connection | None = None
        """None while it is lost."""
        self.end: ConnectionEnd | None = None
        """End of its last connection, while it is lost."""
        # of the I/O thread
        self._service, self.io = service, service.io
        self.live: Connection | None = None
        """As :attr:`connection`, but as the I/O thread knows it."""
        self.open: dict[int, Asked] = {}
        """Calls without a reply, by number."""
        self._done: dict[int, tuple[Reply, Payload]] = {}
        """Replies that the caller may not have seen."""
        self.staged = 0
        self._next = self._seen = self._coming = 0
        self._heard = 0
        """Calls below this one have come on this connection. The caller sends what has no reply again on each, and
        takes one reply to each: so a reply waits until its call is heard."""

    # from any thread

    def send(self, message: Message, payload: Payload = NOTHING) -> None:
        """A message; dropped while there is no connection."""
        # handed over as replies are: it must not overtake one that was made before
        self._do(lambda connection: connection.send(message, payload))

    def close(self, reason: str = "") -> None:
        """On purpose: what was sent before arrives."""
        self._do(lambda connection: connection.close(reason))

    def abort(self) -> None:
        """At once: for the peer, a loss."""
        # not Connection.abort, which is one job later: replies that were made meanwhile would get out
        self.fail(ConnectionEnd("closed", "here"))

    def fail(self, error: Exception) -> None:
        """End its connection: WireError and RefusedError tell the peer why."""
        self._do(lambda connection: connection.fail(error))

    def _do(self, job: Callable[[Connection], object]) -> None:
        # a later connection does not get what was meant for this one: it is let in by a job behind this one
        self.io.do(lambda: None if self.live is None else job(self.live))

    # in the I/O thread

    def let_in(self, connection: Connection, welcome: Welcome) -> None:
        """The decision of who attends."""
        self.live = connection
        # it ended while it knocked, when this was not its handler yet
        if connection.over:
            self.ended(ConnectionEnd("lost", "it has left while it knocked"))
            return
        connection.handler = self
        connection.let_in(welcome)
        ways.attach(connection, welcome.movers)
        self._heard = self._coming = 0

    def leave(self) -> None:
        """The session will not come back: what is open has nobody to answer."""
        self.open, self._done = {}, {}
        # counted over all sessions: what this one has staged would be missing for ever
        self._service.stage(self, -self.staged)

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that may not come, among them those beyond what Welcome has allowed."""
        limits = self._service.limits
        if not isinstance(message, Call) or total > limits.max_call_bytes:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")
        # calls whose bytes are still being received count, or many at once would slip through
        staged = self.staged + self._coming
        # What comes again after a lost connection is counted already, and is not kept.
        if message.number >= self._next and staged and staged + total > limits.staged_bytes:
            raise WireError(f"a call of {total} bytes, where {staged} of {limits.staged_bytes} have no reply")
        self._coming += total

    def receive(self, message: Message, memory: Memory | None) -> None:
        """In the order of sending. Raises WireError for what may not come now."""
        if not isinstance(message, Call):
            self._receive_other(message)
            return
        number, service = message.number, self._service
        size = 0 if memory is None else memory.size
        self._coming -= size
        # a caller that numbers as it likes could have a call run twice, or forget a reply that it needs
        if not self._heard <= number <= self._next or not self._seen <= message.seen <= number:
            raise WireError(f"call {number} came when {self._next} was next")
        # the caller has these replies: no repetition can ask for them again
        for old in range(self._seen, message.seen):
            self._done.pop(old, None)
        self._seen, self._heard = message.seen, number + 1
        # sent again after a loss: answered from memory, not done twice
        if number in self._done:
            self.send(*self._done[number])
        elif number == self._next:
            if len(self.open) >= service.limits.max_calls:
                raise WireError("more calls without a reply than were allowed")
            self._next += 1
            asked = self.open[number] = Asked(self, number, message.method, message.args, memory, CALL_BYTES + size)
            service.stage(self, asked.nbytes)
            service.do(partial(service.begin, asked))

    def _receive_other(self, message: Message) -> None:
        if isinstance(message, Cancel):
            asked = self.open.get(message.number)
            if asked is not None:
                asked.cancelled = True
                self._service.do(partial(self._service.cancel, asked))
            elif message.number >= self._heard:
                raise WireError(f"call {message.number} is cancelled before it was made")
        elif isinstance(message, Report) and self.kind == "rank":
            self._service.do(partial(self._service.report, self, message))
        else:
            raise WireError(f"a {type(message).__name__} message from a {self.kind}")

    def ended(self, end: ConnectionEnd) -> None:
        """The connection is over. Calls go on: their replies are remembered."""
        # replies from here on are remembered, and go out on the next connection
        connection, self.live = self.live, None
        self._service.read_on(self)
        self._service.do(partial(self._service.lost, self, connection, end))

    def answer(self, asked: Asked, reply: Reply, payload: Payload) -> None:
        """The one reply to a call."""
        # the session left meanwhile, or it was answered twice
        if self.open.get(asked.number) is not asked:
            return
        del self.open[asked.number]
        self._service.stage(self, -asked.nbytes)
        if self.keep_s > 0:
            self._done[asked.number] = reply, payload
        # else the caller has not repeated it on this connection yet, and gets the reply when it does
        if asked.number < self._heard and self.live is not None:
            self.live.send(reply, payload)


class Service:
    """Listens. What peers ask is answered by who attends."""

    def __init__(
        self, listen: Listen, *, limits: Welcome | None = None, movers: Sequence[str] = (),
        most_staged_bytes: int = 2**32,
    ) -> None:  # fmt: skip
        """``limits``: of one session. ``most_staged_bytes``: of calls without a reply, over all sessions; then sockets
        are not read (but for one call a session)."""
        self.limits = limits or Welcome()
        self.peers: dict[bytes, Peer] = {}
        """By session; those that are lost too, for as long as they may come back."""
        self._movers = ways.available(movers)
        self.host = Host()
        """Attendant of now."""
        self._tasks: anyio.abc.TaskGroup | None = None
        self._begun: dict[Asked, anyio.CancelScope] = {}
        # of the I/O thread
        self.staged, self._most_staged = 0, most_staged_bytes
        self.paused: dict[Peer, Connection] = {}
        """Peers that are not read from."""
        self._listening = listen(lambda connection, join: self.do(partial(self._decide, connection, join)))
        self.io, self.address = self._listening.io, self._listening.address
        self._inbox = Inbox(self.io)
        self.do = self._inbox.do
        """Run a job where peers are attended to, in order. From any thread."""

    def close(self, reason: str = "") -> None:
        """No more peers; those that are in are let go. In the event loop, when nobody attends any more."""
        self._listening.close()
        for peer in self.peers.values():
            if peer.ending:
                peer.close(reason)
            else:
                peer.abort()

    # who attends

    async def attend(self, host: Host) -> None:
        """Answer calls in this event loop, until cancelled."""
        if self._tasks is not None:
            raise AlreadyInUseError(f"peers at {self.address} are attended to already: one serve() at a time")
        self.host = host
        try:
            async with anyio.create_task_group() as self._tasks:
                # by itself: whoever waits here is not woken for each call
                self._tasks.start_soon(self._inbox.work_off)
        finally:
            self._tasks, self.host = None, Host()
            left, self._begun = self._begun, {}
            # calls that were begun and not answered come first for the next who attends, in their order
            self._inbox.jobs.extendleft(partial(self.begin, asked) for asked in reversed(left))

    def answer_here(self, methods: Mapping[str, Method]) -> None:
        """Answer calls in the I/O thread, for good: with methods that neither wait nor take long."""
        self.host.methods = methods
        self._inbox.work_off_here()

    # in the I/O thread

    def stage(self, peer: Peer, nbytes: int) -> None:
        """Calls of so many bytes have come; or, below 0, were answered.

        Beyond what all sessions together may stage, one with something staged is not read from, until its replies, or
        those of others, make room. One with nothing staged always is, so nobody waits for nothing."""
        peer.staged += nbytes
        self.staged += nbytes
        if nbytes > 0:
            # after it was taken: one call a session always is, so a full budget stops nobody for good
            if self.staged > self._most_staged and peer.live is not None and peer not in self.paused:
                self.paused[peer] = peer.live
                peer.live.pause()
        elif self.paused:
            # a little below the bound, or each reply would wake all and the next call pause them again
            everybody = self.staged <= self._most_staged * 3 // 4
            for one in [*self.paused] if everybody else [] if peer.open else [peer]:
                self.read_on(one)

    def read_on(self, peer: Peer) -> None:
        """Read from it again, if it was not and its connection is still there."""
        connection = self.paused.pop(peer, None)
        if connection is not None:
            connection.resume()

    # in the event loop

    def _decide(self, connection: Connection, join: Join) -> None:
        peer = self.peers.get(join.session)
        # who lost its connection may come back before the kernel here notices
        if peer is not None and peer.connection is not None:
            end = ConnectionEnd("lost", "its session has joined again")
            peer.fail(end)
            self.lost(peer, peer.connection, end)
            peer = self.peers.get(join.session)
        # a session of another kind is another peer, whatever number it made up
        known = peer is not None and peer.kind == join.kind
        if peer is None or not known:
            peer = Peer(self, join)
        try:
            about = self.host.admit(peer, join)
        except (RefusedError, WireError) as error:
            self.io.do(partial(connection.fail, error))
            return
        self.peers[join.session] = peer
        peer.connection, peer.end, peer.join = connection, None, join
        welcome = msgspec.structs.replace(
            self.limits, known=known, movers=tuple(name for name in self._movers if name in join.movers),
            about=msgspec.Raw(msgspec.msgpack.encode(about)),
        )  # fmt: skip
        # before on_peer: what the host sends there must come behind the welcome
        self.io.do(partial(peer.let_in, connection, welcome))
        self.host.on_peer(peer)

    def lost(self, peer: Peer, connection: Connection | None, end: ConnectionEnd) -> None:
        """A connection is over."""
        if peer.connection is not connection or connection is None:
            # it has joined again
            return
        peer.connection, peer.end = None, end
        if end.kind == "refused":
            _log.warning("the connection to %s %s was closed: %s", peer.kind, peer.name, end.text)
        self.host.on_end(peer, end)
        # who closed on purpose does not come back
        if end.kind == "lost" and peer.keep_s > 0:
            gone = partial(self.do, partial(self._gone, peer, end))
            self.io.do(lambda: self.io.after(peer.keep_s, gone))
        else:
            self._gone(peer, end)

    def _gone(self, peer: Peer, end: ConnectionEnd) -> None:
        """Unless it has come back: what still waits of it is withdrawn."""
        # the end is of this loss: after another one the timer must do nothing
        if self.peers.get(peer.session) is peer and peer.end is end:
            del self.peers[peer.session]
            for asked in self._begun:
                if asked.peer is peer:
                    self.cancel(asked)
            self.io.do(peer.leave)
            self.host.on_gone(peer, end)

    def cancel(self, asked: Asked) -> None:
        """Take a call back, if it waits or was not begun."""
        asked.cancelled = True
        if asked in self._begun:
            self._begun[asked].cancel()

    def report(self, peer: Peer, report: Report) -> None:
        """A fact that nobody answers."""
        try:
            self.host.on_report(peer, report)
        except WireError as error:
            peer.fail(error)

    def begin(self, asked: Asked) -> None:
        """Begin a call, unless it was taken back. What need not wait has its reply at once."""
        if asked.cancelled:
            asked.reply("", "Cancelled")
            return
        peer = asked.peer
        # its session was given up while the call waited in line
        if self.peers.get(peer.session) is not peer:
            return
        method = self.host.methods.get(asked.method)
        try:
            # not a reply: another version, or no producer of ours, is at the other end
            if method is None:
                raise WireError(f"a call of {asked.method!r}, which is not among {', '.join(self.host.methods)}")
            result = method(peer, asked)
        except WireError as error:
            peer.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - the reply
            asked.refuse(error)
            return
        if not inspect.iscoroutine(result):
            asked.reply(result)
            return
        assert self._tasks is not None
        # one for each call: a Cancel takes back its own and nothing else
        scope = self._begun[asked] = anyio.CancelScope()
        self._inbox.waits = True
        self._tasks.start_soon(self._finish, asked, scope, result)

    async def _finish(self, asked: Asked, scope: anyio.CancelScope, coroutine: Coroutine[Any, Any, Any]) -> None:
        reply: Job = partial(asked.reply, "", "Cancelled")
        # where who attends is cancelled, this ends here, and the call is begun again by the next
        with scope:
            try:
                reply = partial(asked.reply, await coroutine)
            except Exception as error:  # noqa: BLE001 - the reply
                reply = partial(asked.refuse, error)
        del self._begun[asked]
        reply()
