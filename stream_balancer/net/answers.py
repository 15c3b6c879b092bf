"""A session at the accepting end: which of its calls are open, which were answered, and how many bytes lie here.

See :mod:`stream_balancer.net.calls` for the conversation. Calls come in the I/O thread; methods run where somebody
attends to them (:mod:`stream_balancer.net.service`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from stream_balancer.errors import WireError
from stream_balancer.net import movers
from stream_balancer.net.calls import CALL_BYTES, SMALL
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import Ended
from stream_balancer.net.loops import Runs
from stream_balancer.net.messages import NIL, Call, Cancel, Join, Message, Reply, Report, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

__all__ = ["Asked", "Budget", "Bytes", "Peer"]

_encode = msgspec.msgpack.encode


class Budget:
    """Bytes that all sessions together may stage. Beyond it a session with something staged is not read from, until
    its replies, or those of others, make room; one with nothing staged always is, so nobody waits for nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used = most_bytes, 0
        self.paused: dict[Peer, Connection] = {}
        """Connections that are not read from."""

    def pause(self, peer: Peer, connection: Connection | None) -> None:
        """Too much is staged: read no more of this session."""
        if connection is not None and peer not in self.paused:
            self.paused[peer] = connection
            connection.pause()

    def resume(self, peer: Peer, *, has_more: bool) -> None:
        """Something of this session is not staged any more."""
        # a little below the bound, or each reply would wake all and the next call pause them again
        everybody = self.used <= self.most_bytes * 3 // 4
        for one in list(self.paused) if everybody else () if has_more else (peer,):
            self.forget(one)

    def forget(self, peer: Peer) -> None:
        """Read from it again, if its connection is still there."""
        connection = self.paused.pop(peer, None)
        if connection is not None:
            connection.resume()


class Bytes(NamedTuple):
    """Result of a method that answers with bytes."""

    value: Any
    payload: Payload


class Asked:
    """A call at the answerer."""

    __slots__ = ("_peer", "args", "cancelled", "memory", "method", "nbytes", "number")

    def __init__(self, peer: Peer, call: Call, memory: Memory | None) -> None:
        self._peer, self.number, self.method, self.args, self.memory = peer, call.number, call.method, call.args, memory
        self.nbytes = CALL_BYTES + (0 if memory is None else memory.size)
        self.cancelled = False

    def reply(self, value: Any = None, error: str = "") -> None:
        """The one reply. From any thread."""
        value, payload = value if isinstance(value, Bytes) else (value, NOTHING)
        # encoded in the thread that answers: what cannot be written raises where the method was called
        raw = NIL if value is None else value if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))
        self.memory = None
        # alone and small, sending it here saves a thread switch; many together go in one turn of the I/O thread
        small = len(self._peer.open) == 1 and payload.total <= SMALL
        self._peer.io.do(partial(self._peer.answer, self, Reply(self.number, raw, error), payload), here=small)


class Attended(Protocol):
    """Where a peer's calls are answered: its service."""

    io: Runs
    limits: Welcome
    budget: Budget

    def do(self, peer: Peer, job: Callable[..., object], *args: object) -> None:
        """Run it where peers are attended to, in order. A WireError that it raises ends the connection."""

    def begin(self, peer: Peer, asked: Asked) -> None: ...
    def cancel(self, asked: Asked) -> None: ...
    def lost(self, peer: Peer, connection: Connection | None, end: Ended) -> None: ...


class Peer:
    """A session at the accepting end; handler of its connection."""

    def __init__(self, service: Attended, join: Join) -> None:
        self.kind, self.name, self.session, self.join = join.kind, join.name, join.session, join
        # of who attends
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
        self.connection: Connection | None = None
        """None while it is lost."""
        self.losses = 0
        # of the I/O thread
        self._service, self.io = service, service.io
        self._live: Connection | None = None
        self.open: dict[int, Asked] = {}
        """Calls without a reply, by number."""
        self._done: dict[int, tuple[Reply, Payload]] = {}
        """Replies that the caller may not have seen."""
        self._next = self._seen = self._staged = self._coming = 0
        self._heard = 0
        """Calls below this one have come on this connection. The caller sends what has no reply again on each, and
        takes one reply to each: so a reply waits until its call is heard."""

    # from any thread

    def send(self, message: Message, payload: Payload = NOTHING) -> None:
        """A message; dropped while there is no connection."""
        connection = self.connection
        if connection is not None:
            # handed over as replies are: it must not overtake one that was made before
            self.io.do(partial(connection.send, message, payload))

    def close(self, reason: str = "") -> None:
        """On purpose: what was sent before arrives."""
        connection = self.connection
        if connection is not None:
            self.io.do(partial(connection.close, reason))

    def abort(self) -> None:
        """At once: for the peer, a loss."""
        self.fail(Ended("closed", "here"))

    def fail(self, error: Exception) -> None:
        """End its connection: WireError and RefusedError tell the peer why."""
        connection = self.connection
        if connection is not None:
            self.io.do(partial(connection.fail, error))

    # in the I/O thread

    def let_in(self, connection: Connection, welcome: Welcome) -> None:
        """The decision of who attends."""
        self._live = connection
        # it ended while it knocked, when this was not its handler yet
        if connection.over:
            self.ended(Ended("lost", "it has left while it knocked"))
            return
        connection.handler = self
        connection.let_in(welcome)
        movers.attach(connection, welcome.movers)
        self._heard = self._coming = 0

    def leave(self) -> None:
        """The session will not come back: what is open has nobody to answer."""
        # the budget is of all sessions: what this one has staged would be missing for ever
        self._unstage(self._staged, has_more=False)
        self.open, self._done = {}, {}

    def _unstage(self, nbytes: int, *, has_more: bool) -> None:
        budget = self._service.budget
        self._staged -= nbytes
        budget.used -= nbytes
        if budget.paused:
            budget.resume(self, has_more=has_more)

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that may not come, among them those beyond what Welcome has allowed."""
        if isinstance(message, Report) and self.kind == "rank" and total <= self.max_report_bytes:
            return
        limits = self._service.limits
        if not isinstance(message, Call) or total > limits.max_call_bytes:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")
        # calls whose bytes are still being received count, or many at once would slip through
        staged = self._staged + self._coming
        # What comes again after a lost connection is counted already, and is not kept.
        if message.number >= self._next and staged and staged + total > limits.staged_bytes:
            raise WireError(f"a call of {total} bytes, where {staged} of {limits.staged_bytes} have no reply")
        self._coming += total

    def receive(self, message: Message, memory: Memory | None) -> None:
        """In the order of sending. Raises WireError for what may not come now."""
        if not isinstance(message, Call):
            self._receive_other(message, memory)
            return
        number, service = message.number, self._service
        self._coming -= 0 if memory is None else memory.size
        # a caller that numbers as it likes could have a call run twice, or forget a reply that it needs
        if not self._heard <= number <= self._next or not self._seen <= message.seen <= number:
            raise WireError(f"call {number} came when {self._next} was next")
        # the caller has these replies: no repetition can ask for them again
        for old in range(self._seen, message.seen):
            self._done.pop(old, None)
        self._seen, self._heard = message.seen, number + 1
        # sent again after a loss: answered from memory, not done twice
        if number in self._done:
            self._send(*self._done[number])
        elif number == self._next:
            if len(self.open) >= service.limits.max_calls:
                raise WireError("more calls without a reply than were allowed")
            self._next += 1
            asked = self.open[number] = Asked(self, message, memory)
            self._staged += asked.nbytes
            service.budget.used += asked.nbytes
            # after it was taken: one call a session always is, so a full budget stops nobody for good
            if service.budget.used > service.budget.most_bytes:
                service.budget.pause(self, self._live)
            service.do(self, service.begin, self, asked)

    def _receive_other(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, Cancel):
            asked = self.open.get(message.number)
            if asked is not None:
                asked.cancelled = True
                self._service.do(self, self._service.cancel, asked)
            elif message.number >= self._heard:
                raise WireError(f"call {message.number} is cancelled before it was made")
        elif isinstance(message, Report) and self.kind == "rank":
            self._service.do(self, self._report, message, memory)
        else:
            raise WireError(f"a {type(message).__name__} message from a {self.kind}")

    def ended(self, end: Ended) -> None:
        """The connection is over. Calls go on: their replies are remembered."""
        # replies from here on are remembered, and go out on the next connection
        connection, self._live = self._live, None
        self._service.budget.forget(self)
        self._service.do(self, self._service.lost, self, connection, end)

    def _report(self, report: Report, memory: Memory | None) -> None:
        self.on_report(report, memory)

    def answer(self, asked: Asked, reply: Reply, payload: Payload) -> None:
        """The one reply to a call."""
        # the session left meanwhile, or it was answered twice
        if self.open.get(asked.number) is not asked:
            return
        del self.open[asked.number]
        self._unstage(asked.nbytes, has_more=bool(self.open))
        if self.keep_s > 0:
            self._done[asked.number] = reply, payload
        # else the caller has not repeated it on this connection yet, and gets the reply when it does
        if asked.number < self._heard:
            self._send(reply, payload)

    def _send(self, reply: Reply, payload: Payload) -> None:
        if self._live is not None:
            self._live.send(reply, payload)
