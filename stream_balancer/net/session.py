"""The joining end of a session: one :class:`~stream_balancer.net.calls.Caller` over one connection after the other."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    ConfigError,
    RefusedError,
    WireError,
    refused_error,
    to_raise,
)  # fmt: skip
from stream_balancer.net import movers
from stream_balancer.net.calls import Caller, Over, Pending
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import Ended
from stream_balancer.net.loops import Runs, Signal
from stream_balancer.net.messages import Join, Message, Notify, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

__all__ = ["Dialer", "Session", "own_name"]

_log = logging.getLogger("stream_balancer.net")
# after the first try, which is made at once
_AGAIN_S, _MOST_AGAIN_S = 0.02, 1.0
# a connection that lasts so long is built again at once, too
_RESTED_S = 0.1
# controllers often start last; imports of torch take seconds
_WARN_AFTER_S, _WARN_AGAIN_S = 5.0, 60.0


class Dialer(Protocol):
    """A way to the other end."""

    @property
    def io(self) -> Runs:
        """Where its connections live."""
        ...

    def dial(
        self, join: Join, welcomed: Callable[[Connection, Welcome], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Connect in the background. Either is called in the I/O thread, once; ``welcomed`` sets the handler."""


def own_name() -> str:
    """Host and process, for logs and errors."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Session(Caller):
    """Dials, and dials again."""

    def __init__(
        self, dialer: Dialer, kind: str, *, name: str = "", about: Any = None, rejoin: bool = False,
        movers: Sequence[str] = (), linger_s: float = 5.0, connect_timeout_s: float | None = None,
        whom: str = "the controller", on_open: Callable[[Welcome], object] = lambda _: None,
        admit: Callable[[Message, int], object] | None = None,
        on_message: Callable[[Message, Memory | None], object] | None = None,
        on_end: Callable[[Exception], object] = lambda _: None, begin: bool = True, takes_leave: bool = False,
    ) -> None:  # fmt: skip
        """``about``: what is said of this end when it joins; a function is asked anew each time. ``rejoin``: a lost
        connection fails nothing. ``linger_s``: how long a close, and the reply to a cancelled call, is waited for.
        ``connect_timeout_s``: for the first connection.

        All in the I/O thread: ``on_open`` when connected, ``admit`` before bytes behind a message are allocated (raises
        WireError; default: none are taken), ``on_message`` for all but replies, ``on_end`` once: with RefusedError,
        ConfigError (no such host), WireError, or an Ended. ``begin``: at once; else with :meth:`begin`.
        ``takes_leave``: what was sent without a reply must arrive before it has left: if the connection is lost first,
        it joins again, where it may, to say so."""
        if connect_timeout_s is not None and not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be > 0 or None, not {connect_timeout_s}")
        super().__init__(dialer.io)
        self.kind, self.name, self.whom, self.linger_s = kind, name or own_name(), whom, linger_s
        self.version: int | None = None
        """The policy version that was passed on last."""
        self.problem: str | None = "it has just begun to connect"
        """Why there is no connection yet; None once there was one."""
        self.dialer, self._about, self._rejoin, self._timeout_s = dialer, about, rejoin, connect_timeout_s
        # the session number stays for all connections: by it the other end finds what it remembers
        self._join = Join(b"", kind, self.name, secrets.token_bytes(16), tuple(movers))
        self._on_open, self._admit, self._on_message, self._on_end = on_open, admit, on_message, on_end
        self._is_closing, self._takes_leave = False, takes_leave and rejoin
        self._left = Signal()
        self._delay_s = 0.0
        self._timers: list[Callable[[], object]] = []
        if begin:
            self.begin()

    # from any thread or task

    def send(self, message: Message, payload: Payload = NOTHING) -> None:
        """A message; dropped while there is no connection."""
        connection = self.connection
        if connection is not None:
            connection.send(message, payload)

    def begin(self) -> None:
        """Begin to connect."""
        self.io.do(self._begin)

    def close(self) -> None:
        """Leave: take back what has no reply, then close the connection. Never blocks. Idempotent."""
        self.io.do(self._leave)

    async def aclose(self) -> None:
        """:meth:`close`, and wait for it, twice ``linger_s`` at most."""
        self.close()
        await self._left.wait_shielded(2 * self.linger_s)

    @property
    def is_closed(self) -> bool:
        """True if this end has left, or was told to."""
        return self._over is not None

    def finish(self, over: Over) -> None:
        """The other end takes no more: calls raise what ``over`` says, and nothing is dialled again. In the I/O
        thread."""
        self._resolve_all(over)

    # in the I/O thread

    def _begin(self) -> None:
        self._after(_WARN_AFTER_S, self._warn)
        if self._timeout_s is not None:
            self._after(self._timeout_s, self._give_up)
        self._dial()

    def _after(self, seconds: float, job: Callable[[], object]) -> None:
        self._timers.append(self.io.after(seconds, job))

    def _stop_timers(self) -> None:
        while self._timers:
            self._timers.pop()()

    def _warn(self) -> None:
        if self.connection is None:
            _log.warning("%s is not connected: %s; trying again", self.name, self.problem or "the connection was lost")
            self._after(_WARN_AGAIN_S, self._warn)

    def _give_up(self) -> None:
        self._fail(
            BrokenResourceError(
                f"not connected within connect_timeout_s={self._timeout_s}: {self.problem}. Start the controller "
                "first, or check the address"
            )
        )

    def _dial(self) -> None:
        if self._may_dial:
            about = self._about() if callable(self._about) else self._about
            join = msgspec.structs.replace(self._join, about=msgspec.Raw(msgspec.msgpack.encode(about)))
            self.dialer.dial(join, self._welcomed, self._failed)

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        if not self._may_dial:
            connection.close()
            return
        # while it leaves, one of the timers ends the wait
        if not self._is_closing:
            self._stop_timers()
        self.connection, connection.handler, self.problem = connection, self, None
        # only a connection that lasts resets the delay: a peer that lets in and drops would be dialled in a loop
        self._after(_RESTED_S, lambda: self._rest(connection))
        movers.attach(connection, [name for name in welcome.movers if name in self._join.movers])
        # torch's pairs may have broken with this one: the next connection goes without
        again = movers.available(self._join.movers, again=True)
        self._join = msgspec.structs.replace(self._join, movers=again)
        # before calls are sent again: what the handler sets up there, they may need
        self._on_open(welcome)
        if self._is_closing:
            connection.close()
        else:
            self._send_again(welcome)

    def _failed(self, error: BaseException) -> None:
        """No connection, this time."""
        final = (
            isinstance(error, (RefusedError, ConfigError, WireError, ClosedResourceError))
            or getattr(error, "kind", "") == "refused"
        )
        if final or (isinstance(error, BrokenResourceError) and not isinstance(error, Ended)):
            self._fail(error)
            return
        # it says why there has never been a connection, and stays None once there was one
        if self.problem is not None:
            self.problem = str(error)
        self._again()

    def _again(self) -> None:
        if self._may_dial:
            # none of the timers that a close stops: what was sent before it may still have to arrive
            self.io.after(self._delay_s, self._dial)
            self._delay_s = min(2 * self._delay_s or _AGAIN_S, _MOST_AGAIN_S)

    def _rest(self, connection: Connection) -> None:
        if self.connection is connection:
            self._delay_s = 0.0

    @property
    def _may_dial(self) -> bool:
        return not self._left.is_set() and (self._over is None or (self._is_closing and self._takes_leave))

    def _fail(self, error: BaseException) -> None:
        """For good."""
        # the first end counts: a refusal is followed by the loss of its connection
        if self._left.is_set():
            return
        # the error behind it says more, with the exception's own type
        if isinstance(error, Ended) and error.kind == "refused":
            error = error.__cause__ or error.to_raise()
        if isinstance(error, RefusedError):
            reason, text = error.reason, str(error)
            self._resolve_all(lambda pending: refused_error(reason, f"{text}; {pending.fate}"))
        elif isinstance(error, Ended) or not isinstance(error, (BrokenResourceError, ConfigError, ClosedResourceError)):
            self._resolve_all(self._lost_for(str(error).split("\n", 1)[0][:200]))
        else:
            self._resolve_all(lambda _: to_raise(error))
        self._end(error if isinstance(error, Exception) else Ended.of(error))

    def _end(self, error: Exception) -> None:
        self._stop_timers()
        if not self._left.is_set():
            self._left.set()
            self._on_end(error)

    def _closed_here(self, pending: Pending) -> Exception:
        fate = f"; {pending.fate}" if pending.sent_before or pending.number is not None else ""
        return ClosedResourceError(
            f"{pending.method}() on a closed {self.kind}: close() was called, or its 'with' block was left{fate}"
        )

    def _leave(self) -> None:
        if self._left.is_set() or self._is_closing:
            return
        self._is_closing = True
        self._stop_timers()
        # a controller that hangs must not keep a process from ending
        self._after(self.linger_s, self._hang_up)
        self._take_all_back(self._closed_here)

    def _on_idle(self) -> None:
        if self.connection is not None:
            self.connection.close()
        elif not self._takes_leave or self.problem is not None:
            # nothing is to be said any more, or nobody was ever there
            self._hang_up()
        else:
            self._resolve_all(self._lost_for("the connection was closed here"))

    def _hang_up(self) -> None:
        """No reply, or no answer to the goodbye, in time."""
        self._resolve_all(self._lost_for("the connection was closed here"))
        if self.connection is not None:
            self.connection.abort()
        self._end(Ended("closed", "closed here"))

    # of the connection, in the I/O thread

    def _admit_other(self, message: Message, total: int) -> None:
        if self._admit is None:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message for a {self.kind}")
        self._admit(message, total)

    def _receive_other(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, Notify) and message.version is not None:
            self.version = message.version
        if self._on_message is None:
            raise WireError(f"a {type(message).__name__} message for a {self.kind}")
        self._on_message(message, memory)

    def ended(self, end: Ended) -> None:
        """The connection is over."""
        self.connection = None
        # refusals and closes are decisions of the other end, and dialling again would not change them
        if end.kind == "lost" and self._rejoin and self._may_dial:
            _log.warning("%s %s waits for the controller to be there again: %s", self.kind, self.name, end.text)
            self._after(_WARN_AGAIN_S, self._warn)
            self._again()
        else:
            self._fail(end)
