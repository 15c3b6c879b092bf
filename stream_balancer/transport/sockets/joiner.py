"""How ranks, producers and fetchers reach a controller: find it, connect, prove themselves; and say what hinders them.

Everything here blocks, in a thread of whoever joins; :meth:`Joiner.cancel` ends it from any other.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, cast

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, ConfigError, WireError, refused_error
from stream_balancer.transport.handshake import Incoming, Joining, Message, pack, token_bytes
from stream_balancer.transport.sockets.hub import keep_alive
from stream_balancer.wire.messages import Join, Refused, Welcome

__all__ = ["Directory", "Entry", "Joiner", "Lookup", "Where", "join_over", "parse_address", "receive_message"]

ANSWER_S = 10.0  # a controller answers in milliseconds
CONNECT_S = 5.0  # for TCP to connect; then it is tried again
FOREIGN_S = 30.0  # so long may a port that accepts connections not answer as a controller does
_PAUSE_S = 0.1  # before a connection that was lost is built again: ten tries a second at most
WARN_AFTER_S = 5.0  # controllers often start after their ranks and producers; imports of torch take seconds
WARN_AGAIN_S = 60.0
_STORE_TIMEOUT = timedelta(seconds=5)  # nobody waits in a store, so every answer comes at once

logger = logging.getLogger("stream_balancer.transport")


class Entry(msgspec.Struct, frozen=True):
    """What a controller writes into a store."""

    host: str
    port: int
    token: str | None = None
    """For who has none: whoever reads this store is trusted. None: the user has given one to both."""


class Lookup(Protocol):
    """Says where a controller is. Asked again before every attempt: one that was started again may have moved."""

    def read(self) -> Entry | None:
        """None if no controller is there yet. Raises RuntimeError if none will ever be."""
        ...


class Directory:
    """The one key of a c10d store that says where the controller is. Nothing else is read from the store, and only
    while somebody joins."""

    _KEY = "controller"

    def __init__(self, store: Store, name: str) -> None:
        """``name``: two balancers may share a store under different names."""
        self._shared, self._name = store, name
        self._own: Store | None = None

    @property
    def _store(self) -> Store:
        """A connection of one's own: another thread may wait in the one that was given, which locks it."""
        if self._own is None:
            self._own = PrefixStore(self._name, cast("Any", self._shared).clone())
            self._own.set_timeout(_STORE_TIMEOUT)
        return self._own

    def write(self, entry: Entry) -> None:
        """Raises RuntimeError if the store is gone."""
        self._store.set(self._KEY, msgspec.json.encode(entry).decode())

    def read(self) -> Entry | None:
        """None if no controller is there yet. Raises RuntimeError if the store is gone."""
        if not cast("Any", self._store).check([self._KEY]):
            return None
        try:
            return msgspec.json.decode(self._store.get(self._KEY), type=Entry)
        except msgspec.MsgspecError:
            raise WireError(f"the store's key {self._name}/{self._KEY} was not written by a controller") from None

    def remove(self, entry: Entry) -> None:
        """Unless another controller has come meanwhile. Does nothing if the store is gone."""
        with suppress(RuntimeError, WireError):
            if self.read() == entry:
                self._store.delete_key(self._KEY)


Where: TypeAlias = Store | str | Lookup
"""Of a controller: a store that it has written its address into, ``"tcp://host:port"``, or whoever says it."""


def parse_address(address: str) -> tuple[str, int]:
    """``tcp://host:port`` -> both. Raises ValueError for anything else."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"{address!r} is not an address of a controller: expected 'tcp://host:port', as TorchTransport.address"
        )
    return host.strip("[]"), int(port)


class _NotYetError(Exception):
    """Why this try came to nothing; the next may do better."""

    def __init__(self, problem: str, *, foreign: bool = False) -> None:
        super().__init__(problem)
        self.foreign = foreign
        """Somebody listens there, and does not answer."""


class Joiner:
    """Joins one controller, as often as needed."""

    def __init__(
        self,
        source: Where,
        *,
        name: str = "stream_balancer",
        token: str | None = None,
        connect_timeout_s: float | None = None,
        host: str | None = None,
    ) -> None:
        """``name``, ``token``: the transport's. ``connect_timeout_s``: for the first connection; None = as long as it
        takes. ``host``: this machine's address for what others connect to here; None = its address on the way to the
        controller. Raises ValueError for a bad address or token, TypeError for a source of another kind."""
        if connect_timeout_s is not None and not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be > 0 or None, not {connect_timeout_s}")
        self._address = parse_address(source) if isinstance(source, str) else None
        self._directory = _lookup(source, name)
        self.token = token_bytes(token)
        self.host = host
        self._timeout_s = connect_timeout_s
        self._cancelled = threading.Event()
        self._sock: socket.socket | None = None
        self._has_joined = False
        self.problem: str | None = "it has just begun to connect"
        """Why there is no connection yet; None once there was one."""

    def join(self, request: Callable[[str], Join]) -> tuple[socket.socket, Welcome]:
        """A connection on which both ends have proven themselves, and the controller's welcome. ``request``: what to
        ask for, of who comes from this address of the machine.

        Tries until it works; after a moment if it has worked before, for it may have been cut off at once. Raises what
        a refusal says; ConfigError for a host that does not exist; WireError if something else listens there;
        BrokenResourceError after ``connect_timeout_s``, or if the store is gone; ClosedResourceError once cancelled.
        """
        if self._has_joined and self._cancelled.wait(_PAUSE_S):
            raise ClosedResourceError
        began = time.monotonic()
        warn_at, foreign_since, delay_s = began + WARN_AFTER_S, None, 0.02
        while True:
            try:
                return self._try(request)
            except _NotYetError as reason:
                why = reason
            if self._cancelled.is_set():
                raise ClosedResourceError
            now = time.monotonic()
            foreign_since = (foreign_since or now) if why.foreign else None
            if self.problem is not None:
                self.problem = str(why)
                if self._timeout_s is not None and now - began >= self._timeout_s:
                    raise BrokenResourceError(
                        f"not connected within connect_timeout_s={self._timeout_s}: {why}. Start the controller first, "
                        "or check the address"
                    )
            if foreign_since is not None and now - foreign_since >= FOREIGN_S:
                raise WireError(f"{why}. Something else listens there: check the address")
            if now >= warn_at:
                logger.warning("%s; trying again for %.0f s now", why, now - began)
                warn_at = now + WARN_AGAIN_S
            left_s = delay_s if self._timeout_s is None else min(delay_s, max(began + self._timeout_s - now, 0.0))
            if self._cancelled.wait(left_s):
                raise ClosedResourceError
            delay_s = min(2 * delay_s, 1.0)

    def cancel(self) -> None:
        """Make :meth:`join`, and whatever waits on the connection it gave, raise. From any thread, idempotent."""
        self._cancelled.set()
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _try(self, request: Callable[[str], Join]) -> tuple[socket.socket, Welcome]:
        (host, port), token = self._find()
        where = f"tcp://{host}:{port}"
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
        except (socket.gaierror, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                raise _NotYetError(f"no name server answers for {host!r}") from None
            raise ConfigError(f"there is no host {host!r}: {error}. Check the address {where}") from None
        except OSError as error:
            raise _NotYetError(
                f"nobody answers at {where}: {os.strerror(error.errno) if error.errno else error}"
            ) from None
        self._sock = sock
        try:
            if self._cancelled.is_set():  # cancel() may have come too early to see the socket
                raise ClosedResourceError
            keep_alive(sock)
            welcome = self._shake_hands(sock, request(sock.getsockname()[0]), token, where)
            self._has_joined = True
            return sock, welcome
        except BaseException:
            sock.close()
            raise

    def _find(self) -> tuple[tuple[str, int], bytes]:
        if self._directory is None:
            return cast("tuple[str, int]", self._address), self.token
        try:
            entry = self._directory.read()
        except RuntimeError as error:
            raise BrokenResourceError(f"nobody says any more where the controller is: {error}") from None
        if entry is None:
            raise _NotYetError("no controller has said yet where it is")
        if entry.token is not None:
            self.token = entry.token.encode()
        return (entry.host, entry.port), self.token

    def _shake_hands(self, sock: socket.socket, request: Join, token: bytes, where: str) -> Welcome:
        handshake = Joining(token, request)
        try:
            return join_over(sock, handshake, on_challenged=self._on_challenged)
        except WireError as error:
            raise WireError(f"{where} does not answer as a controller does: {error}. Check the address") from None
        except OSError as error:
            if handshake.challenged:
                raise _NotYetError(f"the controller at {where} closed the connection") from None
            silent = f"says nothing for {ANSWER_S:.0f} s" if isinstance(error, TimeoutError) else f"hangs up: {error}"
            raise _NotYetError(f"{where} accepts the connection, but {silent}", foreign=True) from None

    def _on_challenged(self) -> None:
        self.problem = None


def _lookup(source: Where, name: str) -> Lookup | None:
    if isinstance(source, str):
        return None
    if isinstance(source, Store):
        return Directory(source, name)
    if not hasattr(source, "read"):  # here, or it would be an AttributeError in a thread, long after the mistake
        raise TypeError(
            f"{source!r} says nothing of a controller: expected its address 'tcp://host:port', the store of "
            "torch.distributed that it is in, or a RayBalancer"
        )
    return source


def receive_message(sock: socket.socket) -> Message:
    """The next message on a blocking socket. Raises OSError (TimeoutError too) if none comes, WireError if it is none
    of ours."""
    incoming = Incoming()
    while True:
        data = sock.recv(incoming.wanted)
        if not data:
            raise ConnectionResetError("connection closed by peer")
        message = incoming.feed(data)
        if message is not None:
            return message


def join_over(
    sock: socket.socket, handshake: Joining, *, on_challenged: Callable[[], object] = lambda: None
) -> Welcome:
    """The joiner's side, on a blocking socket: waits a moment for the acceptor's proof, and for its welcome as long as
    it takes. Raises as :meth:`Joining.receive` does, and OSError if the connection ends."""
    sock.settimeout(ANSWER_S)
    sock.sendall(pack(handshake.hello))
    while True:
        answer = handshake.receive(receive_message(sock))
        if isinstance(answer, Welcome):
            return answer
        sock.sendall(pack(answer))
        if isinstance(answer, Refused):
            raise refused_error(answer.reason, answer.text)
        on_challenged()
        sock.settimeout(None)
