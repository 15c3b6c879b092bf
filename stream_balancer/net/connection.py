"""One authenticated connection: messages both ways, with bytes behind them that are received in place.

::

    joiner    Hello(protocol, nonce)               --->
              <---  Challenge(nonce, proof)             acceptor    HMAC-SHA256 over "acceptor" and both nonces
    joiner    Join(proof, kind, name, session)     --->             HMAC-SHA256 over "joiner", both nonces and who it is
              <---  Welcome(limits, movers)             acceptor    or Refused(reason, text)

Nothing is read before the proofs but messages of 4 KiB, and nothing that a peer announces is allocated unchecked. All of
it runs in the I/O thread; only :meth:`Connection.send`, :meth:`close` and :meth:`abort` are called from others.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from stream_balancer.net.errors import Ended, RefusedError, WireError
from stream_balancer.net.loops import Io, Runs
from stream_balancer.net.messages import (
    HEADER_BYTES, MAX_MESSAGE_BYTES, PROTOCOL, SOCKET, Challenge, Close, Envelope, Hello, Join, Message, MoverNote,
    Refused, Welcome, frame, read_envelope, read_header,
)  # fmt: skip
from stream_balancer.net.pool import Memory, Pool
from stream_balancer.wire.payload import NOTHING, Payload

__all__ = ["NOTHING", "Connection", "Handler", "Listener", "Payload", "dial"]

_log = logging.getLogger(__name__)
_BEFORE_PROOF_BYTES = 4096
_TURN_BYTES = 4 * 2**20  # read from one socket before the others get their turn
_GATHER = 512
_JOIN_BYTES = 2**16
MOVER_BYTES = 2**17
"""Smaller payloads go by the socket, whatever mover there is."""
HANDSHAKE_S, CLOSE_S, MAX_STRANGERS = 10.0, 5.0, 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Handler(Protocol):
    """Who gets the messages. Called in the I/O thread; raises WireError for what may not come now."""

    def admit(self, message: Message, total: int) -> None:
        """``total`` bytes are about to be allocated for this message."""

    def receive(self, message: Message, memory: Memory | None) -> None:
        """Called in the order of sending, whichever way the bytes came."""

    def ended(self, end: Ended) -> None:
        """Once, and nothing after it."""


class Mover(Protocol):
    """A way for bytes, one end of it. Called in the I/O thread. See :mod:`stream_balancer.net.movers`."""

    ready: bool

    def send(
        self, payload: Payload, sent: Callable[[], object] | None, go: Callable[[Sequence[int]], None]
    ) -> None: ...
    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None: ...
    def note(self, body: bytes) -> None: ...
    def close(self) -> None: ...


class _Out(NamedTuple):
    message: Message
    payload: Payload
    via: int
    sent: Callable[[], object] | None


class _Held:
    """A message whose bytes, or those of one before it, are still on their way."""

    __slots__ = ("memory", "message", "ready")

    def __init__(self, message: Message, memory: Memory | None, ready: bool) -> None:
        self.message, self.memory, self.ready = message, memory, ready


class Base:
    """What a connection is apart from its bytes: order of sending and delivery, movers, and one end. The connection in
    memory is the same with a queue below."""

    def __init__(self, io: Runs, pool: Pool) -> None:
        self.io, self.pool = io, pool
        self.handler: Handler | None = None
        self.movers: dict[int, Mover] = {}
        self.bulk = SOCKET
        """The mover for large payloads, once there is one."""
        self._items: deque[_Out] = deque()
        self._held: deque[_Held] = deque()
        self._pump_queued = self._waits_for_mover = False
        self._close_sent = self._close_seen = False
        self.over = False

    # from any thread

    def send(
        self,
        message: Message,
        payload: Payload = NOTHING,
        *,
        via: int = SOCKET,
        sent: Callable[[], object] | None = None,
    ) -> None:
        """Send it after everything before it. ``via``: the mover for its bytes, if that is ready; else the socket."""
        self._items.append(_Out(message, payload, via, sent))
        if not self._pump_queued:
            self._pump_queued = True
            self.io.do(self._pump)

    def close(self, reason: str = "") -> None:
        """On purpose: what was sent before arrives, and the peer hears ``reason``."""
        self.send(Close(reason))
        self.io.do(lambda: self.io.after(CLOSE_S, lambda: self._fail(Ended("lost", "no answer to close"))))

    def abort(self) -> None:
        """At once."""
        self.io.do(lambda: self._fail(Ended("closed", "here")))

    # in the I/O thread

    def _pump(self) -> None:
        self._pump_queued = False  # first: who appends later queues another
        while self._items and not self.over and not self._waits_for_mover and not self._close_sent:
            out = self._items.popleft()
            large = out.via != SOCKET and sum(out.payload.runs[1::2]) >= MOVER_BYTES
            mover = self.movers.get(out.via) if large else None
            if mover is None or not mover.ready:
                self._put(out, SOCKET, ())
            else:
                self._waits_for_mover = True
                mover.send(out.payload, out.sent, lambda where, out=out: self._go(out, where))
        self._flush()

    def _go(self, out: _Out, where: Sequence[int]) -> None:
        """The mover is ready for the message to leave; those behind it wait until then."""
        self._put(out._replace(payload=Payload(out.payload.total, out.payload.runs), sent=None), out.via, where)
        self._waits_for_mover = False
        if not self._pump_queued:
            self._pump_queued = True
            self.io.do(self._pump)

    def _put(self, out: _Out, via: int, where: Sequence[int]) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _on_envelope(self, envelope: Envelope) -> Iterator[memoryview]:
        """Yields what is to be filled from the socket."""
        message = envelope.message
        if isinstance(message, Refused):
            raise Ended("refused", f"{message.reason}: {message.text}")
        if isinstance(message, MoverNote):
            mover = self.movers.get(message.mover)
            if mover is None:
                raise WireError(f"a note of mover {message.mover}, which was not agreed on")
            mover.note(message.body)
            return
        assert self.handler is not None
        if self._close_seen:
            raise WireError("it goes on after it has closed")
        self._close_seen = isinstance(message, Close)
        memory = None
        if envelope.total:
            self.handler.admit(message, envelope.total)  # before anything is allocated
            if envelope.via != SOCKET:
                mover = self.movers.get(envelope.via)
                if mover is None or not envelope.runs:
                    raise WireError(f"bytes by mover {envelope.via}, which was not agreed on")
                held = _Held(message, None, ready=False)
                self._held.append(held)
                mover.receive(envelope, lambda memory: self._on_moved(held, memory))
                return
            memory = self.pool.take(envelope.total)
            for offset, size in zip(envelope.runs[::2], envelope.runs[1::2], strict=True):
                yield memory.data[offset : offset + size]
        if self._held:
            self._held.append(_Held(message, memory, ready=True))
        else:
            self._deliver(message, memory)

    def _on_moved(self, held: _Held, memory: Memory) -> None:
        if self.over:
            return
        held.memory, held.ready = memory, True
        try:
            while self._held and self._held[0].ready and not self.over:
                one = self._held.popleft()
                self._deliver(one.message, one.memory)
        except Exception as error:  # noqa: BLE001 - the handler's: the connection ends
            self._fail(error)

    def _deliver(self, message: Message, memory: Memory | None) -> None:
        assert self.handler is not None
        if isinstance(message, Close):
            self._end(Ended("closed", message.reason))
            self.close()
        else:
            self.handler.receive(message, memory)

    def _end(self, end: Ended) -> None:
        """The handler hears it once."""
        handler, self.handler = self.handler, _Nobody()
        if handler is not None and not isinstance(handler, _Nobody):
            handler.ended(end)

    def _fail(self, error: BaseException) -> None:
        if self.over:
            return
        self.over = True
        self._release(error)
        for mover in self.movers.values():
            mover.close()
        self._items.clear()
        self._held.clear()
        if not isinstance(error, Ended):
            kind = "refused" if isinstance(error, (WireError, RefusedError)) else "lost"
            error = Ended(kind, str(error) or type(error).__name__)
        self._end(error)

    def _release(self, error: BaseException) -> None:
        raise NotImplementedError


class _Nobody:
    """Takes what comes after the end."""

    def admit(self, message: Message, total: int) -> None:
        raise WireError("bytes after the end")

    def receive(self, message: Message, memory: Memory | None) -> None: ...

    def ended(self, end: Ended) -> None: ...


class Connection(Base):
    """Over TCP, with TLS or without."""

    def __init__(
        self, io: Io, sock: socket.socket, token: bytes, pool: Pool, tls: ssl.SSLContext | None, host: str | None
    ) -> None:
        """``host``: of the acceptor, at the joining end; None at the accepting end."""
        super().__init__(io, pool)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.local, self.remote = sock.getsockname()[0], sock.getpeername()[0]
        self.fd = sock.fileno()
        self._sock: Any = sock if tls is None else _Tls(sock, tls, host)
        self._io, self._token, self._joins = io, token, host is not None
        self._outgoing: deque[tuple[memoryview, Any]] = deque()
        self._limit = _BEFORE_PROOF_BYTES
        self._nonces = {self._joins: secrets.token_bytes(16)}
        self._events = selectors.EVENT_READ
        self.join: Join | None = None
        self.welcome: Welcome | None = None
        self.arrived: Callable[[Connection, Join], None] = lambda *_: None
        """At the accepting end: sets :attr:`handler` and calls :meth:`let_in`, or raises RefusedError."""
        self.let_in_by: Callable[[Connection, Welcome], None] = lambda *_: None
        """At the joining end: sets :attr:`handler`."""
        self._parser = self._parse()
        self._space = next(self._parser)

    def begin(self, hello: Join | None = None) -> None:
        """Begin the handshake."""
        self._io.selector.register(self.fd, self._events, self._ready)
        self._deadline = self._io.after(HANDSHAKE_S, lambda: self._fail(Ended("lost", "no handshake in time")))
        if hello is not None:
            self.join = hello
            self._put_raw(frame(Hello(PROTOCOL, self._nonces[True])))
            self._flush()

    # handshake

    def _proof(self, side: bytes, about: bytes = b"") -> bytes:
        text = b"|".join((b"stream_balancer", side, bytes([PROTOCOL]), self._nonces[True], self._nonces[False], about))
        return hmac.digest(self._token, text, "sha256")

    def _shake(self, message: Message) -> None:
        match message:
            case Hello() if not self._joins and True not in self._nonces:
                if message.protocol != PROTOCOL:
                    raise RefusedError("version", f"this end speaks version {PROTOCOL}, the other {message.protocol}")
                self._nonces[True] = message.nonce
                self._put_raw(frame(Challenge(self._nonces[False], self._proof(b"acceptor"))))
            case Challenge() if self._joins and False not in self._nonces:
                self._nonces[False] = message.nonce
                if not hmac.compare_digest(message.proof, self._proof(b"acceptor")):
                    raise RefusedError("token", "the other end does not know this token")
                assert self.join is not None
                self.join = msgspec.structs.replace(self.join, proof=self._proof(b"joiner", _who(self.join)))
                self._put_raw(frame(self.join))
                self._limit = MAX_MESSAGE_BYTES
            case Join() if not self._joins and True in self._nonces and self.join is None:
                if not hmac.compare_digest(message.proof, self._proof(b"joiner", _who(message))):
                    raise RefusedError("token", "you do not know the token")
                self.join = message
                self._limit = MAX_MESSAGE_BYTES
                self._deadline()
                self.arrived(self, message)
            case Welcome() if self._joins and False in self._nonces:
                self.welcome = message
                self._deadline()
                self.let_in_by(self, message)
            case _:
                raise WireError(f"a {type(message).__name__} message in the handshake")
        self._flush()

    def let_in(self, welcome: Welcome) -> None:
        """The acceptor's decision; :attr:`handler` is set."""
        self.welcome = welcome
        self._put_raw(frame(welcome))

    # receiving

    def _ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ and not self.over:
                self._read()
        except BlockingIOError:
            pass
        except Exception as error:  # noqa: BLE001 - the network's, the peer's, or the handler's: this one is over
            self._fail(error)

    def _read(self) -> None:
        """Into where the next bytes belong, and ahead: what comes after them is often small, and there already."""
        ahead, left = self._io.scratch, _TURN_BYTES
        while left > 0 and not self.over:
            space = self._space
            received = self._sock.recvmsg_into([space, ahead])[0]
            if not received:
                raise ConnectionResetError("connection closed by peer")
            left -= received
            count = min(len(space), received)
            self._space = space[count:]
            start, stop = 0, received - count
            del space
            while not self._space and not self.over:
                self._space = next(self._parser)
                count = min(len(self._space), stop - start)
                if count:
                    self._space[:count] = ahead[start : start + count]
                    self._space = self._space[count:]
                    start += count
        if isinstance(self._sock, _Tls) and not self.over:  # it may hold bytes that select() does not see
            self._io.do(lambda: self._ready(selectors.EVENT_READ) if not self.over else None)

    def _parse(self) -> Iterator[memoryview]:
        header = memoryview(bytearray(HEADER_BYTES))
        while True:
            yield header
            size, crc = read_header(header, self._limit)
            body = memoryview(bytearray(size))
            yield body
            envelope = read_envelope(body, crc)
            if self.welcome is None and not isinstance(envelope.message, Refused):
                if envelope.total:
                    raise WireError("bytes in the handshake")
                self._shake(envelope.message)
            else:
                yield from self._on_envelope(envelope)
            del envelope  # waiting for the next must not keep its memory alive

    # sending

    def _put(self, out: _Out, via: int, where: Sequence[int]) -> None:
        self._put_raw(frame(out.message, out.payload.total, out.payload.runs, via, where))
        pieces = [view for view in map(_bytes_of, out.payload.pieces) if view.nbytes]
        if via == SOCKET and sum(view.nbytes for view in pieces) != sum(out.payload.runs[1::2]):
            raise ValueError("the pieces are not as long as was announced")
        if pieces and sum(view.nbytes for view in pieces) <= _JOIN_BYTES:
            pieces = [memoryview(b"".join(pieces))]  # a dozen iovecs cost more than their bytes
        for view in pieces:
            self._outgoing.append((view, None))
        if out.sent is not None:
            self._outgoing.append((memoryview(b""), out.sent))
        self._close_sent = isinstance(out.message, Close)

    def _put_raw(self, raw: bytes) -> None:
        self._outgoing.append((memoryview(raw), None))

    def _flush(self) -> None:
        if self.over:
            return
        try:
            while self._outgoing:
                count = self._sock.sendmsg([view for view, _ in islice(self._outgoing, _GATHER)])
                while self._outgoing:
                    view, sent = self._outgoing[0]
                    if count < len(view):
                        self._outgoing[0] = (view[count:], sent)
                        break
                    self._outgoing.popleft()
                    count -= len(view)
                    if sent is not None:
                        sent()
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # reading sees it too, behind what has arrived: perhaps why we are refused
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if events != self._events:
            self._events = events
            self._io.selector.modify(self.fd, events, self._ready)
        if self._close_sent and self._close_seen and not self._outgoing and not self._held:
            self._fail(Ended("closed"))

    def _release(self, error: BaseException) -> None:
        if isinstance(error, (WireError, RefusedError)) and not self._close_sent:
            reason = error.reason if isinstance(error, RefusedError) else "protocol"
            with suppress(OSError, ValueError):
                self._outgoing.append((memoryview(frame(Refused(reason, str(error)[:1000]))), None))
                self._sock.sendmsg([view for view, _ in islice(self._outgoing, _GATHER)])
                self._sock.shutdown(socket.SHUT_WR)
        with suppress(KeyError, ValueError):
            self._io.selector.unregister(self.fd)
        self._deadline()
        self._sock.close()
        self._outgoing.clear()
        self._space = memoryview(b"")


def _who(join: Join) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(join, proof=b""))


def _bytes_of(piece: Any) -> memoryview:
    view = memoryview(piece)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _Tls:
    """A socket with TLS, with the calls that a connection makes. The handshake runs with the first of them."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        self._sock = context.wrap_socket(
            sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
        )
        self._shaken = False

    def _shake(self) -> None:
        if not self._shaken:
            self._sock.do_handshake()
            self._shaken = True

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        done = 0
        try:
            self._shake()
            for view in views:
                if len(view):
                    done += (count := self._sock.send(view))
                    if count < len(view):
                        break
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not done:
                raise BlockingIOError from None
        return done

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        try:
            self._shake()
            return (self._sock.recv_into(views[0]),)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return (0,)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self._sock.close()


class Listener:
    """Lets peers in who know the token. ``arrived`` is called in the I/O thread for each of them."""

    def __init__(
        self, host: str, port: int, token: bytes, arrived: Callable[[Connection, Join], None],
        *, tls: ssl.SSLContext | None = None, io: Io | None = None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self._io, self._token, self._arrived, self._tls = io or Io.current(), token, arrived, tls
        self._pool = pool or Pool()
        self._sock = socket.create_server((host, port), backlog=1024)
        self._sock.setblocking(False)
        self.address = f"tcp://{host}:{self._sock.getsockname()[1]}"
        self._strangers: deque[Connection] = deque()
        self.connections: set[Connection] = set()
        self._io.do(lambda: self._io.selector.register(self._sock, selectors.EVENT_READ, self._on_peer))

    def close(self) -> None:
        """No more peers; those who are in stay."""
        self._io.do(self._close)

    def _close(self) -> None:
        with suppress(KeyError, ValueError):
            self._io.selector.unregister(self._sock)
        self._sock.close()

    def _on_peer(self, _: int) -> None:
        with suppress(OSError):
            sock, _address = self._sock.accept()
            connection = Connection(self._io, sock, self._token, self._pool, self._tls, None)
            connection.arrived = self._on_join
            self._strangers = deque(one for one in self._strangers if not one.over and one.join is None)
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.popleft()._fail(Ended("lost", "too many who have proven nothing"))
            self._strangers.append(connection)
            connection.begin()

    def _on_join(self, connection: Connection, join: Join) -> None:
        self._arrived(connection, join)


def dial(
    address: str, token: bytes, join: Join, welcomed: Callable[[Connection, Welcome], None],
    failed: Callable[[BaseException], None], *, tls: ssl.SSLContext | None = None, pool: Pool | None = None,
) -> None:  # fmt: skip
    """Connect in the background. Either is called in the I/O thread, once; ``welcomed`` sets the handler."""
    io = Io.current()
    host, _, port = address.removeprefix("tcp://").rpartition(":")

    class Waiting:
        def admit(self, message: Message, total: int) -> None:
            raise WireError("bytes in the handshake")

        def receive(self, message: Message, memory: Memory | None) -> None: ...

        def ended(self, end: Ended) -> None:
            failed(end)

    def begin(sock: socket.socket) -> None:
        connection = Connection(io, sock, token, pool or Pool(), tls, host)
        connection.handler = Waiting()
        connection.let_in_by = welcomed
        connection.begin(join)

    def connect() -> None:  # names are looked up here, and that may take long
        try:
            sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        except (OSError, ValueError) as error:
            failure = error
            io.do(lambda: failed(failure))
            return
        io.do(lambda: begin(sock))

    threading.Thread(target=connect, name="stream_balancer-dial", daemon=True).start()
