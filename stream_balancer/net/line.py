"""The way to one controller: a connection, and another one whenever it is lost, for as long as one is wanted.

All of it runs in the I/O thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, ConfigError, RefusedError
from stream_balancer.net import movers as ways
from stream_balancer.net.connection import Connection, Failed, Handler, Welcomed
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.loops import Io, Job
from stream_balancer.net.messages import Join, Welcome

_log = logging.getLogger("stream_balancer.net")
# after the first try, which is made at once
_AGAIN_S, _MOST_AGAIN_S = 0.02, 1.0
# a connection that lasts so long is built again at once, too
_RESTED_S = 0.1
# controllers often start last; imports of torch take seconds
_WARN_AFTER_S, _WARN_AGAIN_S = 5.0, 60.0
FINAL = (RefusedError, ConfigError, BrokenResourceError, ClosedResourceError)
"""Errors of a try to connect that a later one would find again."""


class Dialer(Protocol):
    """A way to the other end."""

    @property
    def io(self) -> Io:
        """Where its connections live."""
        ...

    def dial(self, join: Join, welcomed: Welcomed, failed: Failed) -> None:
        """Connect in the background. Either is called in the I/O thread, once; ``welcomed`` sets the handler."""


class Talker(Handler, Protocol):
    """Handler of each of the connections."""

    def opened(self, connection: Connection, welcome: Welcome) -> None:
        """Connected, perhaps again."""

    def failed(self, error: BaseException) -> None:
        """There will be no connection any more."""


def own_name() -> str:
    """Host and process, for logs and errors."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Line:
    """Dials, and dials again."""

    def __init__(
        self, talker: Talker, dialer: Dialer, kind: str, *, name: str = "", about: Any = None, rejoin: bool = False,
        movers: Sequence[str] = (), connect_timeout_s: float | None = None, once: bool = False,
    ) -> None:  # fmt: skip
        """``about``: what is said of this end when it joins; a function is asked anew each time. ``rejoin``: a lost
        connection fails nothing. ``connect_timeout_s``: for the first connection. ``once``: a process that does not
        listen any more has ended, and a connection that was lost comes back within ``connect_timeout_s``, too."""
        if connect_timeout_s is not None and not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be > 0 or None, not {connect_timeout_s}")
        self.dialer, self.rejoin, self.wanted = dialer, rejoin, True
        self.connection: Connection | None = None
        self.problem: str | None = "nobody has answered yet"
        """Why there is no connection yet; None once there was one."""
        # the session number stays for all connections: by it the other end finds what it remembers
        self.join = Join(b"", kind, name or own_name(), secrets.token_bytes(16), tuple(movers))
        self._talker, self._about, self._once, self._timeout_s = talker, about, once, connect_timeout_s
        self._delay_s = 0.0
        self._timers: list[Job] = []

    def begin(self) -> None:
        """Begin to connect."""
        self._after(_WARN_AFTER_S, self._warn)
        if self._timeout_s is not None:
            self._after(self._timeout_s, self._give_up)
        self._dial()

    def rest(self) -> None:
        """No warning any more, and no limit of time."""
        while self._timers:
            self._timers.pop()()

    def lost(self, end: ConnectionEnd) -> None:
        """The connection is over."""
        self.connection = None
        # refusals and closes are decisions of the other end, and dialling again would not change them
        if end.kind == "lost" and self.rejoin and self.wanted:
            _log.warning(
                "%s %s waits for the controller to be there again: %s", self.join.kind, self.join.name, end.text
            )
            self._after(_WARN_AGAIN_S, self._warn)
            if self._once and self._timeout_s is not None:
                self._after(self._timeout_s, self._give_up)
            self._dial_again()
        else:
            self._talker.failed(end)

    def _after(self, seconds: float, job: Job) -> None:
        self._timers.append(self.dialer.io.after(seconds, job))

    def _warn(self) -> None:
        if self.connection is None:
            why = self.problem or "the connection was lost"
            _log.warning("%s is not connected: %s; trying again", self.join.name, why)
            self._after(_WARN_AGAIN_S, self._warn)

    def _give_up(self) -> None:
        self._talker.failed(
            BrokenResourceError(
                f"not connected within connect_timeout_s={self._timeout_s}: {self.problem}. Start the controller "
                "first, or check the address"
            )
        )

    def _dial(self) -> None:
        if self.wanted:
            about = self._about() if callable(self._about) else self._about
            join = msgspec.structs.replace(self.join, about=msgspec.Raw(msgspec.msgpack.encode(about)))
            self.dialer.dial(join, self._welcomed, self._failed)

    def _dial_again(self) -> None:
        if self.wanted:
            # none of the timers that a close stops: what was sent before it may still have to arrive
            self.dialer.io.after(self._delay_s, self._dial)
            self._delay_s = min(2 * self._delay_s or _AGAIN_S, _MOST_AGAIN_S)

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        if not self.wanted:
            connection.close()
            return
        self.rest()
        self.connection, connection.handler, self.problem = connection, self._talker, None
        # only a connection that lasts resets the delay: a peer that lets in and drops would be dialled in a loop
        self._after(_RESTED_S, lambda: self._rested(connection))
        ways.attach(connection, [name for name in welcome.movers if name in self.join.movers])
        # torch's pairs may have broken with this one: the next connection goes without
        self.join = msgspec.structs.replace(self.join, movers=ways.available(self.join.movers, again=True))
        self._talker.opened(connection, welcome)

    def _rested(self, connection: Connection) -> None:
        if self.connection is connection:
            self._delay_s = 0.0

    def _failed(self, error: BaseException) -> None:
        """No connection, this time."""
        if isinstance(error, FINAL) or (self._once and isinstance(error, ConnectionRefusedError)):
            self._talker.failed(error)
            return
        # it says why there has never been a connection, and stays None once there was one
        if self.problem is not None:
            self.problem = str(error)
        self._dial_again()
