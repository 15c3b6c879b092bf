"""A connection over TCP, with TLS or without."""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
from contextlib import suppress
from itertools import islice
from typing import Any

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.net.connection import Base
from stream_balancer.net.errors import Ended
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import Refused, frame
from stream_balancer.net.pool import Pool
from stream_balancer.net.tls import TlsSocket

__all__ = ["Connection"]

_log = logging.getLogger(__name__)
_TURN_BYTES = 4 * 2**20
"""Read from one socket, or sent, before the others get their turn."""
_GATHER = 512
# The machine is gone: noticed after 25 s without traffic, after 30 s with bytes on their way.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Connection(Base):
    """One end. Bytes are received where they belong; only what comes ahead of its place is copied."""

    def __init__(
        self, io: Io, sock: socket.socket, pool: Pool, handshake: Handshake, tls: ssl.SSLContext | None, host: str
    ) -> None:
        """``host``: the acceptor's, whose certificate the joiner checks."""
        super().__init__(io, pool, handshake)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.helpers = io.helpers
        self.local = sock.getsockname()[0]
        """This end's address, as a name of its network interface."""
        self.is_local = sock.getpeername()[0] == self.local
        self._fd = sock.fileno()
        io.sockets[self._fd] = lambda: self.fail(Ended("closed", "the process has ended"))
        self._tls = None if tls is None else TlsSocket(sock, tls, host if handshake.joins else None)
        self._sock: Any = self._tls or sock
        self._io = io
        self._events = 0

    def begin(self) -> None:
        self._watch()
        super().begin()

    def pause(self) -> None:
        super().pause()
        self._watch()

    def _read_on(self) -> None:
        super()._read_on()
        self._watch()

    def _watch(self) -> None:
        """What the selector is to wait for: without TLS's handshake a socket that may be written to is of no use."""
        writes = bool(self._outgoing) and (self._tls is None or self._tls.shaken)
        events = (0 if self.paused else selectors.EVENT_READ) | (selectors.EVENT_WRITE if writes else 0)
        if events == self._events or self.over:
            return
        if not self._events:
            self._io.selector.register(self._fd, events, self._ready)
        elif events:
            self._io.selector.modify(self._fd, events, self._ready)
        else:
            self._io.selector.unregister(self._fd)
        self._events = events

    def _ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ and not self.over and not self.paused:
                self._read()
            if self._tls is not None:  # which may have had to read something before it could write
                self._flush()
        except Exception as error:  # noqa: BLE001 - the network's, the peer's, or the handler's: this one is over
            self.fail(error)

    def _read(self) -> None:
        """Into where the next bytes belong, and ahead: what comes after them is often small, and there already."""
        ahead, left = self._io.scratch, _TURN_BYTES
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
        if self._tls is not None and not self.over:  # it may hold bytes that the selector does not see
            self._io.do(lambda: self._ready(selectors.EVENT_READ))

    def _flush(self) -> None:
        if self.over:
            return
        left = _TURN_BYTES
        try:
            while self._outgoing and left > 0:
                count = self._sock.sendmsg([view for view, _ in islice(self._outgoing, _GATHER)])
                self._took(count)
                left -= count
        except BlockingIOError:
            pass
        except OSError as error:
            if self.paused:
                raise
            _log.debug("reading will see it too, behind what has arrived: perhaps a refusal. %s", error)
            self._outgoing.clear()
        self._watch()
        if self._close_sent and self._close_seen:
            self._end_if_both_closed()

    def _release(self, error: BaseException) -> None:
        if isinstance(error, (WireError, RefusedError)) and not self._close_sent:
            reason = error.reason if isinstance(error, RefusedError) else "protocol"
            self._outgoing.append((memoryview(frame(Refused(reason, str(error)[:1000]))), None))
            with suppress(OSError, ValueError, WireError):
                self._sock.sendmsg([view for view, _ in islice(self._outgoing, _GATHER)])
                self._sock.shutdown(socket.SHUT_WR)
        if self._events:
            with suppress(KeyError, ValueError, OSError):
                self._io.selector.unregister(self._fd)
        self._io.sockets.pop(self._fd, None)
        self._sock.close()
