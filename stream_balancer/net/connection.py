"""An authenticated connection: messages both ways, with bytes behind them that are received in place.

A producer sends a message with 10 MB behind it: the handler at the other end is asked first (``admit``), the bytes go
where they will stay, and the handler gets both (``receive``). Nothing that a peer announces is allocated unchecked, and
before the proofs only short messages are read. All of it runs in the I/O thread; only :meth:`Connection.send`,
:meth:`close` and :meth:`abort` are called from others.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.loops import Io, Job
from stream_balancer.net.messages import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    SOCKET,
    Close,
    Envelope,
    Join,
    Message,
    MoverNote,
    Refused,
    Welcome,
    frame,
    read_envelope,
    read_header,
)  # fmt: skip
from stream_balancer.net.tls import TlsSocket
from stream_balancer.wire.payload import NOTHING, Memory, Payload, Pool

_log = logging.getLogger(__name__)
# A rank's Join names its steps and their items, a producer's its slots. Memory of what has not come is not touched.
_BEFORE_PROOF_BYTES = 2**18
_JOIN_BYTES = 2**16
MOVER_BYTES = 2**17
"""Smaller payloads go by the socket, whatever mover there is."""
HANDSHAKE_S, CLOSE_S = 10.0, 5.0
_TURN_BYTES = 4 * 2**20
"""Read from one socket, or sent, before the others get their turn."""
_GATHER = 512


class Handler(Protocol):
    """Gets the messages of a connection. Called in the I/O thread; raises WireError for what may not come now."""

    def admit(self, message: Message, total: int) -> None:
        """``total`` bytes are about to be allocated for this message."""

    def receive(self, message: Message, memory: Memory | None) -> None:
        """Called in the order of sending, whichever way the bytes came."""

    def ended(self, end: ConnectionEnd) -> None:
        """The end: once, and nothing after it. ``end.__cause__`` is the error behind it, if there is one."""


Arrived: TypeAlias = Callable[["Connection", Join], object]
Welcomed: TypeAlias = Callable[["Connection", Welcome], object]
Failed: TypeAlias = Callable[[BaseException], object]
"""Hears that a dialled connection was never welcomed."""


class Connection:
    """An end of a connection. Bytes are received where they belong; only what comes ahead of its place is copied."""

    def __init__(self, io: Io, sock: Any, pool: Pool, handshake: Handshake, *, local: str = "") -> None:
        """``sock``: a socket, one with TLS, or one in memory. ``local``: this machine's address on the way to the
        peer."""
        self.io, self.pool, self.handshake, self.local = io, pool, handshake, local
        self._sock, self._tls = sock, sock if isinstance(sock, TlsSocket) else None
        self._fd, self._events = sock.fileno(), 0
        io.sockets[self._fd] = lambda: self.fail(ConnectionEnd("closed", "the process has ended"))
        self.handler: Handler | None = None
        """None in the handshake, and once the end was told."""
        self.gone: Callable[[ConnectionEnd], object] = lambda _: None
        """Hears of an end in the handshake."""
        self.welcome: Welcome | None = None
        self.arrived: Arrived = lambda *_: None
        """At the accepting end, once the peer has proven itself: sets :attr:`handler` and calls :meth:`let_in`, then or
        later; or raises RefusedError."""
        self.welcomed: Welcomed = lambda *_: None
        """At the joining end: sets :attr:`handler`."""
        self.movers: dict[int, Any] = {}
        """Movers (:class:`~stream_balancer.net.movers.common.Mover`) that both ends have agreed on, by number, the
        preferred one first."""
        self.over = self.paused = False
        self._items: deque[tuple[Message, Payload]] = deque()
        self._incoming: deque[tuple[Message, list[Memory | None]]] = deque()
        """Messages in order; the list is empty while a mover still brings the bytes of its message."""
        self._outgoing: deque[memoryview | bytes] = deque()
        self._num_sent = 0
        self._waits_for_mover = self._close_sent = self._close_seen = False
        self._deadline: Job = lambda: None
        self._parser = self._parse()
        self._space = next(self._parser)
        self._unread = b""

    # from any thread

    def send(self, message: Message, payload: Payload = NOTHING) -> None:
        """Send it after everything before it; large payloads go by the mover that is ready, else by the socket."""
        # appended before the job is handed in: the order of calls is the order of sending, whoever pumps
        self._items.append((message, payload))
        self.io.do(self._pump)

    def close(self, reason: str = "") -> None:
        """On purpose: what was sent before arrives, and the peer hears ``reason``."""
        self.send(Close(reason))
        self.io.do(self._leave)

    def abort(self) -> None:
        """At once."""
        self.io.do(partial(self.fail, ConnectionEnd("closed", "here")))

    # in the I/O thread

    def begin(self) -> None:
        """Begin the handshake."""
        self._watch()
        # a stranger who says nothing must not hold a descriptor for ever
        self._deadline = self.io.after(HANDSHAKE_S, lambda: self.fail(ConnectionEnd("lost", "no handshake in time")))
        if self.handshake.joins:
            self.send(self.handshake.hello())

    def let_in(self, welcome: Welcome) -> None:
        """The acceptor's decision; :attr:`handler` is set."""
        self.welcome = welcome
        self.send(welcome)

    def pause(self) -> None:
        """Read no more, so that the peer waits."""
        self.paused = True
        self._watch()

    def resume(self) -> None:
        """Read on, soon: who resumes may be in the middle of something that this connection has brought."""
        self.paused = False
        self._watch()
        self.io.do(partial(self._ready, selectors.EVENT_READ))

    def fail(self, error: BaseException) -> None:
        """The end, and why. A WireError or a RefusedError is told to the peer."""
        if self.over:
            return
        self.over = True
        self._deadline()
        self.io.leaving.discard(self)
        self._release(error)
        for mover in self.movers.values():
            mover.close()
        for queue in (self._items, self._incoming, self._outgoing):
            queue.clear()
        self._space, self._unread = memoryview(b""), b""
        end = ConnectionEnd.of(error)
        if end is not error:
            end.__cause__ = error
        # its frames would keep memory alive for as long as somebody keeps the end
        error.with_traceback(None)
        self._end(end)

    def _release(self, error: BaseException) -> None:
        if isinstance(error, (WireError, RefusedError)) and not self._close_sent:
            reason = error.reason if isinstance(error, RefusedError) else "protocol"
            # behind what is half sent: a frame in the midst of another could not be read
            self._outgoing.append(frame(Refused(reason, str(error)[:1000])))
            with suppress(OSError, ValueError, WireError):
                self._sock.sendmsg([*islice(self._outgoing, _GATHER)])
                # the peer reads the refusal before it sees the end
                self._sock.shutdown(socket.SHUT_WR)
        if self._events:
            with suppress(KeyError, ValueError, OSError):
                self.io.watch(self._sock, self._events, 0, self._ready)
        self.io.sockets.pop(self._fd, None)
        self._sock.close()

    def _watch(self) -> None:
        """Wait for the events that matter: without TLS's handshake a socket that may be written to is of no use."""
        writes = bool(self._outgoing) and (self._tls is None or self._tls.shaken)
        events = (0 if self.paused else selectors.EVENT_READ) | (selectors.EVENT_WRITE if writes else 0)
        # a system call, which most turns do not need
        if events != self._events and not self.over:
            before, self._events = self._events, events
            self.io.watch(self._sock, before, events, self._ready)

    def _ready(self, mask: int) -> None:
        # an event of the same turn may have ended it
        if self.over:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ and not self.paused:
                self._read()
            # TLS may have had to read something before it could write
            if self._tls is not None:
                self._flush()
        except Exception as error:  # noqa: BLE001 - the network's, the peer's, or the handler's: this one is over
            self.fail(error)

    # sending

    def _pump(self) -> None:
        """Frame what is to be sent, up to what must wait for a mover, and send."""
        if self.over:
            self._items.clear()
        try:
            while self._items and not self._waits_for_mover and not self._close_sent:
                message, payload = self._items.popleft()
                size = payload.size if payload.runs else 0
                if size >= MOVER_BYTES and self._begin_moving(message, payload):
                    continue
                parts: list[memoryview | bytes] = [frame(message, payload.total, payload.runs)]
                if size:
                    parts += payload.views()
                # a dozen iovecs cost more than their bytes
                self._outgoing.extend([b"".join(parts)] if 0 < size <= _JOIN_BYTES else parts)
                self._close_sent = isinstance(message, Close)
            self._flush()
        except Exception as error:  # noqa: BLE001 - a message that cannot be sent: what comes after it must not be
            _log.exception("a message could not be sent, and its connection ends")
            self.fail(error)

    def _begin_moving(self, message: Message, payload: Payload) -> bool:
        """By the first mover that is ready, if one is and takes it now. Messages behind it wait until it may leave."""
        mover = next((mover for mover in self.movers.values() if mover.ready), None)

        def go(where: Sequence[int]) -> None:
            if mover is not None and not self.over:
                self._outgoing.append(frame(message, payload.total, payload.runs, mover.number, where))
                self._waits_for_mover = False
                self.io.do(self._pump)

        # before the mover is asked: it may call go() at once
        self._waits_for_mover = True
        if mover is not None and mover.send(payload, go):
            return True
        self._waits_for_mover = False
        return False

    def _flush(self) -> None:
        if self.over:
            return
        # one large payload must not keep the other connections of this thread waiting
        left = _TURN_BYTES
        try:
            while self._outgoing and left > 0:
                count = self._sock.sendmsg([*islice(self._outgoing, _GATHER)])
                self._num_sent += count
                left -= count
                while self._outgoing and count >= len(self._outgoing[0]):
                    count -= len(self._outgoing.popleft())
                if count:
                    self._outgoing[0] = memoryview(self._outgoing[0])[count:]
        except BlockingIOError:
            pass
        except OSError as error:
            if self.paused:
                raise
            _log.debug("reading will see it too, behind what has arrived: perhaps a refusal. %s", error)
            self._outgoing.clear()
        self._watch()
        if self._close_sent and self._close_seen and not self._outgoing and not self._incoming:
            self.fail(ConnectionEnd("closed"))

    # receiving

    def _read(self) -> None:
        """Into where the next bytes belong, and ahead: what comes after them is often small, and there already."""
        # first what a pause has kept
        self._deliver()
        unread, self._unread = self._unread, b""
        self._feed(memoryview(unread))
        ahead, left = self.io.scratch, _TURN_BYTES
        while left > 0 and not self.over and not self.paused:
            room = len(self._space) + len(ahead)
            try:
                received = self._sock.recvmsg_into([self._space, ahead])[0]
            except BlockingIOError:
                break
            if not received:
                raise ConnectionResetError("connection closed by peer")
            left -= received
            count = min(len(self._space), received)
            self._space = self._space[count:]
            self._feed(ahead[: received - count])
            if received < room and self._tls is None:
                break
        # soon: TLS may hold bytes that the selector does not see
        if left <= 0 and self._tls is not None:
            self.io.do(partial(self._ready, selectors.EVENT_READ))

    def _feed(self, data: memoryview) -> None:
        """Bytes from below that are not where they belong yet."""
        while not self.over:
            if not len(self._space):
                if self.paused:
                    self._unread = bytes(data)
                    return
                self._space = next(self._parser)
                continue
            if not len(data):
                return
            count = min(len(self._space), len(data))
            self._space[:count] = data[:count]
            self._space, data = self._space[count:], data[count:]

    def _parse(self) -> Iterator[memoryview]:
        """Yields what is to be filled next."""
        header = memoryview(bytearray(HEADER_BYTES))
        while True:
            yield header
            size, crc = read_header(header, MAX_MESSAGE_BYTES if self.handshake.proven else _BEFORE_PROOF_BYTES)
            body = memoryview(bytearray(size))
            yield body
            envelope = read_envelope(body, crc)
            message = envelope.message
            if isinstance(message, Refused):
                raise ConnectionEnd("refused", message.text, message.reason)
            if self.welcome is None:
                self._shake(envelope)
            elif isinstance(message, MoverNote):
                self._mover(message.mover).note(message.body)
            elif self._close_seen:
                raise WireError("it goes on after it has closed")
            elif not envelope.total:
                self._close_seen = isinstance(message, Close)
                self._incoming.append((message, [None]))
                self._deliver()
            else:
                assert self.handler is not None
                self.handler.admit(message, envelope.total)
                if envelope.via != SOCKET:
                    self._begin_receiving(envelope)
                else:
                    memory = self.pool.take(envelope.total)
                    for offset, size in zip(envelope.runs[::2], envelope.runs[1::2], strict=True):
                        yield memory.data[offset : offset + size]
                    self._incoming.append((message, [memory]))
                    self._deliver()
                    # waiting for the next must not keep its memory alive
                    del memory
            del envelope, message

    def _shake(self, envelope: Envelope) -> None:
        message = envelope.message
        if envelope.total:
            raise WireError("bytes in the handshake")
        if isinstance(message, Welcome) and self.handshake.joins and self.handshake.proven:
            self.welcome = message
            self.welcomed(self, message)
            return
        answer = self.handshake.hear(message)
        # a controller that does not serve yet may let it wait for long
        if self.handshake.proven:
            self._deadline()
        if answer is not None:
            self.send(answer)
        elif self.handshake.join is not None:
            self.arrived(self, self.handshake.join)

    def _mover(self, number: int) -> Any:
        mover = self.movers.get(number)
        if mover is None:
            raise WireError(f"mover {number} was not agreed on")
        return mover

    def _begin_receiving(self, envelope: Envelope) -> None:
        if not envelope.runs:
            raise WireError("a mover that brings nothing")
        its: list[Memory | None] = []

        def ready(memory: Memory) -> None:
            its.append(memory)
            try:
                self._deliver()
            except Exception as error:  # noqa: BLE001 - the handler's: the connection ends
                self.fail(error)

        self._incoming.append((envelope.message, its))
        self._mover(envelope.via).receive(envelope, ready)

    def _deliver(self) -> None:
        """All that is here, up to a message whose bytes are still on their way, whichever way they come."""
        while self._incoming and self._incoming[0][1] and not self.over and not self.paused:
            message, (memory,) = self._incoming.popleft()
            if isinstance(message, Close):
                self._end(ConnectionEnd("closed", message.reason))
                # the answer: who closes waits for it, and so knows that everything has arrived
                self.close()
            elif self.handler is not None:
                self.handler.receive(message, memory)

    # the end

    def _end(self, end: ConnectionEnd) -> None:
        """The handler hears it once."""
        hear = self.gone if self.handler is None else self.handler.ended
        self.handler, self.gone = None, lambda _: None
        hear(end)

    def _leave(self, num_sent: int = -1) -> None:
        """The other end answers with a Close of its own, as long as it takes what it is sent."""
        if self.over:
            return
        self.io.leaving.add(self)
        # as long as bytes leave, the peer is alive and still takes what was sent before
        if self._num_sent == num_sent:
            self.fail(ConnectionEnd("lost", "no answer to close"))
        else:
            self._deadline = self.io.after(CLOSE_S, partial(self._leave, self._num_sent))
