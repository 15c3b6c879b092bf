"""Where peers come in over TCP."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias

from stream_balancer.errors import refused_error
from stream_balancer.net.connection import Arrived, Connection
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import Join
from stream_balancer.net.tls import TlsSocket, check_tls
from stream_balancer.wire.payload import Pool

_log = logging.getLogger(__name__)
MAX_STRANGERS = 1024
"""Connections that have proven nothing yet. With 64, the producers of a cluster pushed each other out."""
CLOSED = "the controller has closed its transport. Start it again"
# The machine is gone: noticed after 25 s without traffic, after 30 s with bytes on their way.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL_S = 1.0
# A stranger must not fill a disk: so many lines at once, then one every so many seconds.
_MOST_WARNINGS, _WARNING_S = 10, 10.0


class Listening(Protocol):
    """A port that lets peers in."""

    @property
    def io(self) -> Io:
        """Where its connections live."""
        ...

    @property
    def address(self) -> str:
        """Where others find it."""
        ...

    def close(self) -> None:
        """No more peers; those who are in stay."""


Listen: TypeAlias = Callable[[Arrived], Listening]
"""Begins to listen; what it is given is called in the I/O thread for every peer that has proven itself, and the peer
waits until it is let in or refused."""


class Listener:
    """Lets peers in who know the token. ``arrived`` is called in the I/O thread for each of them."""

    def __init__(
        self, host: str, port: int, token: bytes, arrived: Arrived, *,
        tls: ssl.SSLContext | None = None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.io = Io.current()
        check_tls(tls)
        self._token, self._arrived, self._tls, self._pool = token, arrived, tls, pool or Pool()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # a long backlog: all ranks and producers of a cluster come in the same second
        self._sock = socket.create_server((host, port), family=family, backlog=MAX_STRANGERS)
        self._sock.setblocking(False)
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{self._sock.getsockname()[1]}"
        self._strangers: dict[Connection, None] = {}
        self._knocking: list[Connection] = []
        self._warned_at = 0.0
        self._closed = False
        # the selector belongs to the I/O thread
        self.io.do(self._listen)

    def close(self) -> None:
        """No more peers; those who are in stay. Idempotent."""
        self.io.do(self._close)

    def _listen(self) -> None:
        if not self._closed:
            self.io.sockets[self._sock.fileno()] = self._close
            self.io.selector.register(self._sock, selectors.EVENT_READ, self._on_peer)

    def _close(self) -> None:
        self._closed = True
        with suppress(KeyError, ValueError):
            self.io.selector.unregister(self._sock)
        self.io.sockets.pop(self._sock.fileno(), None)
        self._sock.close()
        for stranger in list(self._strangers):
            stranger.fail(ConnectionEnd("lost", "nobody listens any more"))
        for connection in self._knocking:
            # who is in stays: its session is the service's
            if connection.welcome is None:
                connection.fail(refused_error("closed", CLOSED))

    def _on_peer(self, _: int) -> None:
        try:
            # one at a time: the connections that are there get their turn in between
            sock, address = self._sock.accept()
        except OSError as error:
            # the next one is there at once: without a rest this thread does nothing else
            if error.errno in _FULL:
                _log.warning("nobody can be let in for %g s: %s. Raise the limit of open files", _FULL_S, error)
                self.io.selector.unregister(self._sock)
                self.io.after(_FULL_S, self._listen)
            return
        try:
            connection = over_tcp(self.io, sock, self._pool, Handshake(self._token), self._tls, None)
        except OSError:
            # it is gone already
            sock.close()
            return
        connection.arrived = self._on_proven
        connection.gone = partial(self._on_stranger_gone, connection, address)
        # the oldest: who means well has long been through with it
        if len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers)).fail(ConnectionEnd("lost", "too many who have proven nothing"))
        # not known to the service before it has proven itself: what strangers cost is bounded here
        self._strangers[connection] = None
        connection.begin()

    def _on_stranger_gone(self, connection: Connection, address: tuple[object, ...], end: ConnectionEnd) -> None:
        self._strangers.pop(connection, None)
        if end.kind == "refused":
            self._warn(":".join(map(str, address[:2])), end.text)

    def _on_proven(self, connection: Connection, join: Join) -> None:
        self._strangers.pop(connection, None)
        # pruned when another one comes, so no timer is needed to forget them
        self._knocking = [one for one in self._knocking if one.welcome is None and not one.over]
        self._knocking.append(connection)
        self._arrived(connection, join)

    def _warn(self, who: str, why: str) -> None:
        # each line takes its seconds of those that have passed, of which so many are kept
        now = time.monotonic()
        at = max(self._warned_at, now - _MOST_WARNINGS * _WARNING_S) + _WARNING_S
        if at <= now:
            self._warned_at = at
            _log.warning("somebody who connected from %s was sent away: %s", who, why)


def over_tcp(
    io: Io, sock: socket.socket, pool: Pool, handshake: Handshake, tls: ssl.SSLContext | None, host: str | None
) -> Connection:
    """``host``: the acceptor's, whose certificate the joiner checks. Raises OSError if the peer is gone already."""
    sock.setblocking(False)
    # messages are gathered here already; Nagle would hold the last one back for a round trip
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    local = sock.getsockname()[0]
    over = sock if tls is None else TlsSocket(sock, tls, host)
    return Connection(io, over, pool, handshake, local=local)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises ValueError."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"{address!r} is not an address of a controller: expected 'tcp://host:port', as TorchTransport.address"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
