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
from typing import Any

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.handler import Handler, Mover
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
from stream_balancer.net.pool import Pool
from stream_balancer.net.tls import TlsSocket
from stream_balancer.wire.payload import NOTHING, Memory, Payload

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


class _Held:
    """A message whose bytes, or those of one before it, are still on their way."""

    def __init__(self, message: Message, memory: Memory | None, *, ready: bool) -> None:
        self.message, self.memory, self.ready = message, memory, ready


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
        self.welcome: Welcome | None = None
        self.arrived: Callable[[Connection, Join], object] = lambda *_: None
        """At the accepting end, once the peer has proven itself: sets :attr:`handler` and calls :meth:`let_in`, then or
        later; or raises RefusedError."""
        self.welcomed: Callable[[Connection, Welcome], object] = lambda *_: None
        """At the joining end: sets :attr:`handler`."""
        self.movers: dict[int, Mover] = {}
        """Movers that both ends have agreed on, the one that is preferred first."""
        self.over = self.paused = self._resumes = False
        self._items: deque[tuple[Message, Payload]] = deque()
        self._held: deque[_Held] = deque()
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
            self._send_now(self.handshake.hello())

    def let_in(self, welcome: Welcome) -> None:
        """The acceptor's decision; :attr:`handler` is set."""
        self.welcome = welcome
        self._send_now(welcome)

    def pause(self) -> None:
        """Read no more, so that the peer waits. One who pauses in ``admit`` has that message's bytes wait, too."""
        self.paused, self._resumes = True, False
        self._watch()

    def resume(self) -> None:
        """Read on, soon: who resumes may be in the middle of something that this connection has brought."""
        if self.paused and not self._resumes:
            self._resumes = True
            self.io.do(self._read_on)

    def _read_on(self) -> None:
        if self.over or not self._resumes:
            return
        self.paused = self._resumes = False
        try:
            self._deliver_held()
            unread, self._unread = self._unread, b""
            self._feed(memoryview(unread))
            self._watch()
            self._read_tls()
        except Exception as error:  # noqa: BLE001 - the peer's, or the handler's: this one is over
            self.fail(error)

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
        for queue in (self._items, self._held, self._outgoing):
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
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ and not self.over and not self.paused:
                self._read()
            # which may have had to read something before it could write
            if self._tls is not None:
                self._flush()
        except Exception as error:  # noqa: BLE001 - the network's, the peer's, or the handler's: this one is over
            self.fail(error)

    # sending

    def _send_now(self, message: Message) -> None:
        self._outgoing.append(frame(message))
        self._flush()

    def _pump(self) -> None:
        """Frame what is to be sent, up to what must wait for a mover, and send."""
        if self.over:
            self._items.clear()
        if not self._items and not self._outgoing:
            return
        try:
            while self._items and not self._waits_for_mover and not self._close_sent:
                message, payload = self._items.popleft()
                if payload.total:
                    self._add(message, payload)
                else:
                    self._outgoing.append(frame(message))
                    self._close_sent = isinstance(message, Close)
            self._flush()
        except Exception as error:  # noqa: BLE001 - a message that cannot be sent: what comes after it must not be
            _log.exception("a message could not be sent, and its connection ends")
            self.fail(error)

    def _add(self, message: Message, payload: Payload) -> None:
        if payload.size >= MOVER_BYTES and self._begin_moving(message, payload):
            return
        pieces = payload.views()
        if len(pieces) > 1 and payload.size <= _JOIN_BYTES:
            # a dozen iovecs cost more than their bytes
            pieces = [memoryview(b"".join(pieces))]
        self._outgoing.append(frame(message, payload.total, payload.runs))
        self._outgoing.extend(pieces)

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
        if self._close_sent and self._close_seen and not self._outgoing and not self._held:
            self.fail(ConnectionEnd("closed"))

    # receiving

    def _read(self) -> None:
        """Into where the next bytes belong, and ahead: what comes after them is often small, and there already."""
        ahead, left = self.io.scratch, _TURN_BYTES
        while left > 0 and not self.over and not self.paused:
            room = len(self._space) + len(ahead)
            try:
                received = self._sock.recvmsg_into([self._space, ahead])[0]
            except BlockingIOError:
                return
            if not received:
                raise ConnectionResetError("connection closed by peer")
            left -= received
            count = min(len(self._space), received)
            self._space = self._space[count:]
            self._feed(ahead[: received - count])
            if received < room and self._tls is None:
                return
        self._read_tls()

    def _read_tls(self) -> None:
        """Soon: TLS may hold bytes that the selector does not see."""
        if self._tls is not None and not self.over and not self.paused:
            self.io.do(lambda: self._ready(selectors.EVENT_READ))

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
        """Yields what is to be filled next; nothing if the connection was paused in the middle of a message."""
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
                self._take(message, None)
            else:
                assert self.handler is not None
                self.handler.admit(message, envelope.total)
                while self.paused:
                    yield memoryview(b"")
                if envelope.via != SOCKET:
                    self._begin_receiving(envelope)
                else:
                    memory = self.pool.take(envelope.total)
                    for offset, size in zip(envelope.runs[::2], envelope.runs[1::2], strict=True):
                        yield memory.data[offset : offset + size]
                    self._take(message, memory)
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
            self._send_now(answer)
        elif self.handshake.join is not None:
            self.arrived(self, self.handshake.join)

    def _mover(self, number: int) -> Mover:
        mover = self.movers.get(number)
        if mover is None:
            raise WireError(f"mover {number} was not agreed on")
        return mover

    def _begin_receiving(self, envelope: Envelope) -> None:
        if not envelope.runs:
            raise WireError("a mover that brings nothing")
        held = _Held(envelope.message, None, ready=False)

        def ready(memory: Memory) -> None:
            held.memory, held.ready = memory, True
            try:
                self._deliver_held()
            except Exception as error:  # noqa: BLE001 - the handler's: the connection ends
                self.fail(error)

        self._held.append(held)
        self._mover(envelope.via).receive(envelope, ready)

    def _take(self, message: Message, memory: Memory | None) -> None:
        """All of it is here; but it waits for those before it, whichever way their bytes come."""
        if self._held:
            self._held.append(_Held(message, memory, ready=True))
        else:
            self._deliver(message, memory)

    def _deliver_held(self) -> None:
        while self._held and self._held[0].ready and not self.over and not self.paused:
            one = self._held.popleft()
            self._deliver(one.message, one.memory)

    def _deliver(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, Close):
            self._end(ConnectionEnd("closed", message.reason))
            # the answer: who closes waits for it, and so knows that everything has arrived
            self.close()
        elif self.handler is not None:
            self.handler.receive(message, memory)

    # the end

    def _end(self, end: ConnectionEnd) -> None:
        """The handler hears it once."""
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.ended(end)

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
