"""Where a controller is, and the way there: an address, or a c10d store or anything else that says one."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import msgspec

from stream_balancer.errors import BrokenResourceError, ConfigError, WireError
from stream_balancer.net.connection import HANDSHAKE_S, Connection, Failed, Welcomed
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.listener import over_tcp, split_address
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import Join
from stream_balancer.net.tls import check_tls
from stream_balancer.wire.payload import Pool

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TOKEN_VARIABLE = "STREAM_BALANCER_TOKEN"
# what is shorter can be guessed
_LEAST_TOKEN_BYTES = 16
# nobody waits in a store, so every answer comes at once
_STORE_TIMEOUT = timedelta(seconds=5)


class Entry(msgspec.Struct, frozen=True):
    """Entry that a controller writes into a store."""

    host: str
    port: int
    token: str | None = None
    """For who has none: whoever reads this store is trusted. None: the user has given one to both."""

    @property
    def address(self) -> str:
        """``tcp://host:port``."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class Lookup(Protocol):
    """Says where a controller is. Asked again before every attempt: one that was started again may have moved."""

    def read(self) -> Entry | None:
        """None if no controller is there yet. Raises RuntimeError if none will ever be, ClosedResourceError once it has
        ended."""
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
            from torch._C._distributed_c10d import PrefixStore

            self._own = PrefixStore(self._name, cast("Any", self._shared).clone())
            # a store that hangs must not hold the thread that looks
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
            # a controller that was started again has written its own address meanwhile
            if self.read() == entry:
                self._store.delete_key(self._KEY)


Where: TypeAlias = "Store | str | Lookup"
"""Place of a controller: a store that it has written its address into, ``"tcp://host:port"``, or whoever says it."""


class TcpDialer:
    """The way to one controller over TCP, as often as needed."""

    def __init__(
        self, where: Where, *, token: str | None = None, name: str = "stream_balancer",
        tls: ssl.SSLContext | None = None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        """``name``, ``token``: the transport's. Raises ValueError for a bad address or token, TypeError for a source of
        another kind."""
        check_tls(tls)
        self.io, self.pool, self._tls = Io.current(), pool or Pool(), tls
        self._token = token_bytes(token)
        self._read: Callable[[], Entry | None]
        if isinstance(where, str):
            entry = Entry(*split_address(where))
            self._read = lambda: entry
        elif hasattr(where, "read"):
            self._read = where.read
        elif hasattr(where, "clone"):
            self._read = Directory(where, name).read
        else:
            # here, or it would be an AttributeError in a thread, long after the mistake
            raise TypeError(
                f"{where!r} says nothing of a controller: expected its address 'tcp://host:port', the store of "
                "torch.distributed that it is in, or a RayBalancer"
            )

    def dial(self, join: Join, welcomed: Welcomed, failed: Failed) -> None:
        """Connect in the background. Either is called in the I/O thread, once; ``welcomed`` sets the handler. What
        ``failed`` gets is final if it is a RefusedError, ConfigError (no such host), WireError or BrokenResourceError
        (the store is gone)."""

        def connect() -> None:
            entry = None
            try:
                entry = self._find()
                sock = socket.create_connection((entry.host, entry.port), timeout=HANDSHAKE_S)
            except Exception as error:  # noqa: BLE001 - for who dials
                self.io.do(partial(failed, error if entry is None else _why(entry.address, error)))
            else:
                self.io.do(partial(begin, sock, entry))

        def begin(sock: socket.socket, entry: Entry) -> None:
            # one in the store was made for whoever reads the store; it wins
            token = self._token if entry.token is None else entry.token.encode()
            try:
                connection = over_tcp(self.io, sock, self.pool, Handshake(token, join), self._tls, entry.host)
            except OSError as error:
                # it is gone already
                sock.close()
                failed(_why(entry.address, error))
                return
            connection.gone, connection.welcomed = partial(tell_dialler, entry.address, connection, failed), welcomed
            connection.begin()

        # In a thread, as a store or a name server may take its time; a daemon, as one that does not answer must not
        # keep the process from ending.
        threading.Thread(target=connect, name="stream_balancer-dial", daemon=True).start()

    def _find(self) -> Entry:
        try:
            entry = self._read()
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise BrokenResourceError(f"nobody says any more where the controller is: {cause}") from None
        if entry is None:
            raise ConnectionError("no controller has said yet where it is")
        return entry


def tell_dialler(address: str, connection: Connection, failed: Failed, end: ConnectionEnd) -> None:
    """The connection ended before it was welcomed: who dials hears what is most likely wrong."""
    # what listens there speaks something else: no later try can do better
    if isinstance(end.__cause__, WireError):
        text = f"{address} does not answer as a controller of this version does: {end}. Check the address"
        failed(WireError(text))
    elif end.kind == "refused":
        failed(end.to_raise())
    # it is a controller and knows the token: it was closed while this end waited to be let in
    elif connection.handshake.proven:
        failed(ConnectionError(f"the controller went away before it had let anybody in: {end.text}"))
    else:
        failed(_why(address, end))


def _why(address: str, error: BaseException) -> BaseException:
    """The error for people, which also says if another try may do better."""
    if isinstance(error, socket.gaierror):
        host = split_address(address)[0]
        # the name server, not the name: a cluster's may come up after its nodes
        if error.errno == socket.EAI_AGAIN:
            return ConnectionError(f"no name server answers for {host!r}")
        return ConfigError(f"there is no host {host!r}: {error}. Check the address {address}")
    if isinstance(error, UnicodeError):
        return ConfigError(f"{address!r} has no name of a host in it: {error}")
    if isinstance(error, OSError):
        # kept: the process that listened there has ended
        kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else ConnectionError
        return kind(f"nobody answers at {address}: {os.strerror(error.errno) if error.errno else error}")
    if isinstance(error, ConnectionEnd):
        # not final: a controller without a core to run on looks like this, too
        return ConnectionError(
            f"{address} accepts the connection, but does not answer as a controller does: {error}. Either something "
            "else listens there, or the controller is too busy to answer"
        )
    return error


def token_bytes(token: str | None) -> bytes:
    """``token``, else the environment's, else empty. Raises ValueError for one that can be guessed."""
    given = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    raw = given.encode()
    if raw and len(raw) < _LEAST_TOKEN_BYTES:
        raise ValueError(
            f"a token has at least {_LEAST_TOKEN_BYTES} characters, not {len(raw)}: who connects may try guesses at "
            "home. Make one with: python -c 'import secrets; print(secrets.token_hex(16))'"
        )
    return raw


def current_world() -> tuple[Store, int, int]:
    """Store, rank and world size of the initialised default group. Raises ValueError if there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(
            "RankFeed() and connect() without a source take the store from torch.distributed, which is not "
            "initialised. Call init_process_group first, or give a store or 'tcp://host:port'"
        )
    store = cast("Store", cast("Any", dist.distributed_c10d)._get_default_store())
    return store, dist.get_rank(), dist.get_world_size()
