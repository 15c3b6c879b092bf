"""The joining end of a session: one :class:`~net.calls.Caller` over one connection after the other."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stream_balancer.net import movers
from stream_balancer.net.calls import Answered, Caller, Pending
from stream_balancer.net.connection import NOTHING, Connection, Payload, dial
from stream_balancer.net.errors import Ended, WireError
from stream_balancer.net.loops import Io
from stream_balancer.net.messages import Join, Message, Notify, Reply, Welcome
from stream_balancer.net.pool import Memory, Pool

__all__ = ["Session"]

_log = logging.getLogger(__name__)
_AGAIN_S = (0.02, 1.0)


class Session:
    """Dials, and dials again. Handler of its connection."""

    def __init__(
        self, address: str, token: bytes, kind: str, *, name: str = "", about: Any = None, rejoin: bool = False,
        movers: Sequence[str] = (), tls: ssl.SSLContext | None = None, linger_s: float = 5.0,
        most_bytes: int = 2**32, on_message: Callable[[Message, Memory | None], object] | None = None,
        on_end: Callable[[Ended], object] = lambda _: None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.io = Io.current()
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.caller = Caller(self.io, rejoin=rejoin, linger_s=linger_s)
        self.connection: Connection | None = None
        self.version: int | None = None
        self.on_notify: Callable[[Notify], object] = lambda _: None
        self._address, self._token, self._tls, self._rejoin = address, token, tls, rejoin
        self._join = Join(
            b"", kind, self.name, secrets.token_bytes(16), tuple(movers), msgspec.Raw(msgspec.msgpack.encode(about))
        )
        self._most, self._on_message, self._on_end = most_bytes, on_message, on_end
        self._pool = pool or Pool()
        self._closed = False
        self._delay = _AGAIN_S[0]
        self.io.do(self._dial)

    async def ask(self, method: str, args: Any = None, payload: Payload = NOTHING, accepted_if: str = "") -> Answered:
        """See :meth:`Caller.ask`."""
        return await self.caller.ask(Pending(method, args, payload, accepted_if))

    def close(self) -> None:
        """Leave. Idempotent."""
        self._closed = True
        self.io.do(self._leave)

    def _leave(self) -> None:
        self.caller.end(Ended("closed", "close() was called"))
        if self.connection is not None:
            self.connection.close()

    def _dial(self) -> None:
        if not self._closed:
            dial(self._address, self._token, self._join, self._welcomed, self._failed, tls=self._tls, pool=self._pool)

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        self.connection, connection.handler, self._delay = connection, self, _AGAIN_S[0]
        movers.attach(connection, [name for name in welcome.movers if name in self._join.movers])
        self.caller.open(connection, welcome)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Ended) and error.kind == "refused":
            self.caller.end(error)
            self._on_end(error)
        elif not self._closed:
            self.io.after(self._delay, self._dial)
            self._delay = min(2 * self._delay, _AGAIN_S[1])

    # of the connection, in the I/O thread

    def admit(self, message: Message, total: int) -> None:
        if isinstance(message, Reply):
            self.caller.admit(message, total)
        elif self._on_message is None or total > self._most:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")

    def receive(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, Reply):
            self.caller.receive(message, memory)
        elif isinstance(message, Notify):
            self.version = self.version if message.version is None else message.version
            self.on_notify(message)
        elif self._on_message is not None:
            self._on_message(message, memory)
        else:
            raise WireError(f"a {type(message).__name__} message for a producer")

    def ended(self, end: Ended) -> None:
        self.connection = None
        self.caller.lost(end)
        if self._rejoin and end.kind == "lost" and not self._closed:
            self._failed(end)
        else:
            self._on_end(end)
