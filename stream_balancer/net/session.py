"""The joining end: the calls of one session (:mod:`stream_balancer.net.calls`), over one connection after the other.

All state belongs to the I/O thread; callers hand their calls in.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

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
from stream_balancer.net.calls import SMALL, Answered, Pending, cancel_again
from stream_balancer.net.connection import Connection, Failed, Welcomed
from stream_balancer.net.errors import Cancelled, ConnectionEnd
from stream_balancer.net.loops import Io, Job, Signal, blocking_deadline
from stream_balancer.net.messages import Call, Cancel, Join, Message, Notify, Reply, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

_log = logging.getLogger("stream_balancer.net")
# after the first try, which is made at once
_AGAIN_S, _MOST_AGAIN_S = 0.02, 1.0
# a connection that lasts so long is built again at once, too
_RESTED_S = 0.1
# controllers often start last; imports of torch take seconds
_WARN_AFTER_S, _WARN_AGAIN_S = 5.0, 60.0
# a later try to connect would find the same
_FINAL = (RefusedError, ConfigError, BrokenResourceError, ClosedResourceError)

Over: TypeAlias = Callable[[Pending], Exception]
"""The error that calls raise when there is no connection any more."""


class Dialer(Protocol):
    """A way to the other end."""

    @property
    def io(self) -> Io:
        """Where its connections live."""
        ...

    def dial(self, join: Join, welcomed: Welcomed, failed: Failed) -> None:
        """Connect in the background. Either is called in the I/O thread, once; ``welcomed`` sets the handler."""


def own_name() -> str:
    """Host and process, for logs and errors."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Session:
    """Dials, and dials again; handler of its connections."""

    def __init__(
        self, dialer: Dialer, kind: str, *, name: str = "", about: Any = None, rejoin: bool = False,
        movers: Sequence[str] = (), linger_s: float = 5.0, connect_timeout_s: float | None = None,
        once: bool = False, whom: str = "the controller", on_open: Callable[[Welcome], object] = lambda _: None,
        admit: Callable[[Message, int], object] | None = None,
        on_message: Callable[[Message, Memory | None], object] | None = None,
        on_end: Callable[[Exception], object] = lambda _: None, takes_leave: bool = False,
    ) -> None:  # fmt: skip
        """Connects once :meth:`begin` is called. ``about``: what is said of this end when it joins; a function is asked
        anew each time. ``rejoin``: a lost connection fails nothing. ``linger_s``: how long a close, and the reply to a
        cancelled call, is waited for. ``connect_timeout_s``: for the first connection. ``once``: a try that fails is
        the last. ``whom``: the other end, for errors.

        All in the I/O thread: ``on_open`` when connected, ``admit`` before bytes behind a message are allocated (raises
        WireError; default: none are taken), ``on_message`` for all but replies, ``on_end`` once: with RefusedError,
        ConfigError (no such host), WireError, or a ConnectionEnd. ``takes_leave``: what was sent without a reply must
        arrive before it has left: if the connection is lost first, it joins again, where it may, to say so."""
        if connect_timeout_s is not None and not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be > 0 or None, not {connect_timeout_s}")
        self.io, self.kind, self.name, self.whom, self.linger_s = dialer.io, kind, name or own_name(), whom, linger_s
        self.connection: Connection | None = None
        self.version: int | None = None
        """The policy version that was passed on last."""
        self.problem: str | None = "nobody has answered yet"
        """Why there is no connection yet; None once there was one."""
        self.dialer, self._about, self._rejoin, self._once = dialer, about, rejoin, once
        self._timeout_s = connect_timeout_s
        # the session number stays for all connections: by it the other end finds what it remembers
        self._join = Join(b"", kind, self.name, secrets.token_bytes(16), tuple(movers))
        self._on_open, self._admit, self._on_message, self._on_end = on_open, admit, on_message, on_end
        self._is_closing, self._takes_leave = False, takes_leave and rejoin
        self._left = Signal()
        self._delay_s = 0.0
        self._timers: list[Job] = []
        # calls without a reply: those that wait for a connection, or for room; those that were sent, by number
        self._waiting: deque[Pending] = deque()
        self._sent: dict[int, Pending] = {}
        self._limits = Welcome()
        self._staged = self._next = 0
        self._over: Over | None = None
        """Set once this end takes no more calls."""

    # from any thread or task

    async def ask(self, method: str, args: Any = None, payload: Payload = NOTHING, **options: Any) -> Answered:
        """The reply to a call; see :class:`Pending` for the options, and :meth:`reply_to` for cancellation."""
        return await self.reply_to(Pending(method, args, payload, **options))

    def tell(self, method: str, args: Any = None) -> None:
        """A call whose reply nobody waits for. Never blocks."""
        self.submit(Pending(method, args))

    async def reply_to(self, pending: Pending, linger_s: float | None = None) -> Answered:
        """Send a call, and wait for its reply. If this is cancelled or interrupted the call was not accepted; where it
        turns out that it was, this returns and the cancellation comes at the next await."""
        try:
            self.submit(pending)
            await pending.signal.wait()
        except BaseException as interruption:  # noqa: BLE001 - raised again, unless the call was accepted
            await self._take_back(pending, interruption, self.linger_s if linger_s is None else linger_s)
        if pending.error is not None:
            raise pending.error
        return pending.answer

    async def _take_back(self, pending: Pending, interruption: BaseException, linger_s: float) -> None:
        """Returns if it was accepted, or refused, before it could be taken back."""
        self.io.do(partial(self._cancel, pending))
        if isinstance(interruption, GeneratorExit):
            raise interruption
        # The call may be accepted while the cancellation is on its way. To leave without the reply would leave the
        # caller not knowing which, so the reply is waited for, shielded.
        if not await pending.signal.wait_shielded(linger_s):
            raise BrokenResourceError(
                f"{pending.name} was cancelled, but {self.whom} has not answered for {linger_s} s: whether it was "
                f"accepted is not known. {pending.advice}"
            ) from interruption
        timed_out = isinstance(interruption, TimeoutError)
        if isinstance(pending.error, Cancelled):
            raise self._in_vain(pending) if timed_out else interruption
        if not hasattr(blocking_deadline, "at"):
            if pending.error is None:
                cancel_again()
        elif not timed_out:
            # Ctrl-C is raised where it was pressed, even if the call was accepted
            raise interruption

    def _in_vain(self, pending: Pending) -> TimeoutError:
        what = "was not accepted" if pending.accepted_if else "had no answer"
        why = f"not connected: {self.problem}" if self.problem else pending.waits_for
        return TimeoutError(f"{pending.method}() {what} within {blocking_deadline.timeout_s} s: {why}")

    def submit(self, pending: Pending) -> None:
        """Have it sent when there is room. Never blocks."""
        # in the caller's thread: calls keep the order in which they were made
        self._waiting.append(pending)
        self.io.do(self._send, here=not self._sent and pending.payload.total <= SMALL)

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

    # calls, in the I/O thread

    def _send(self) -> None:
        """Send the calls that have room, strictly in order: a small one must not overtake a large one that waits."""
        connection, limits = self.connection, self._limits
        while self._waiting:
            pending = self._waiting[0]
            # resolved: it was taken back while it waited
            if self._over is not None or pending.signal.is_set:
                self._waiting.popleft()
                if self._over is not None:
                    pending.resolve(self._over(pending))
                continue
            # one that is larger than the window travels alone, or it could never be sent
            is_full = self._staged and self._staged + pending.nbytes > limits.staged_bytes
            if connection is None or is_full or len(self._sent) >= limits.max_calls:
                break
            self._waiting.popleft()
            if pending.payload.total > limits.max_call_bytes:
                pending.resolve(pending.too_large(limits))
                continue
            # a number is kept over reconnects: the answerer knows by it what it has answered
            if pending.number is None:
                pending.number, self._next = self._next, self._next + 1
            self._sent[pending.number] = pending
            self._staged += pending.nbytes
            # the oldest without a reply: all below are answered, and may be forgotten there
            seen = next(iter(self._sent))
            connection.send(Call(pending.number, seen, pending.method, pending.args), pending.payload)
            if pending.cancelled:
                connection.send(Cancel(pending.number))

    def _cancel(self, pending: Pending) -> None:
        pending.cancelled = True
        # One that was sent before may have been accepted: only the answerer can say.
        if not pending.was_sent:
            pending.resolve(Cancelled())
        elif pending.number in self._sent:
            self.send(Cancel(pending.number))

    def _send_again(self, welcome: Welcome) -> None:
        """Connected: what has no reply is sent again, in its old order and under its old numbers."""
        # nothing is remembered there, so numbers begin anew
        if not welcome.known:
            self._next = 0
        for pending in reversed(self._sent.values()):
            pending.sent_before = True
            if not welcome.known:
                pending.number = None
            # in the old order, in front of what was never sent
            self._waiting.appendleft(pending)
        self._sent, self._staged, self._limits = {}, 0, welcome
        self._send()

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that nobody has asked for."""
        if isinstance(message, Reply):
            pending = self._sent.get(message.number)
            if pending is None or total > pending.reply_bytes:
                raise WireError(f"{total} bytes behind the reply to call {message.number}, which nobody has asked for")
        elif self._admit is None:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message for a {self.kind}")
        else:
            self._admit(message, total)

    def receive(self, message: Message, memory: Memory | None) -> None:
        """In the order of sending. Raises WireError for what may not come."""
        if not isinstance(message, Reply):
            if isinstance(message, Notify) and message.version is not None:
                self.version = message.version
            if self._on_message is None:
                raise WireError(f"a {type(message).__name__} message for a {self.kind}")
            self._on_message(message, memory)
            return
        pending = self._sent.pop(message.number, None)
        if pending is None:
            if self._over is None:
                raise WireError(f"a reply to call {message.number}, which is not on its way")
            return
        self._staged -= pending.nbytes
        pending.resolve(pending.error_in(message), Answered(message.value, memory))
        if self._waiting:
            self._send()
        if self._over is not None and not self._sent:
            self._hang_up()

    def finish(self, over: Over) -> None:
        """No more calls, and no more replies: calls raise what ``over`` says, and nothing is dialled again."""
        self._over = self._over or over
        sent, self._sent, self._staged = self._sent, {}, 0
        for pending in sent.values():
            pending.resolve(over(pending))
        # those that wait hear it there
        self._send()

    # connections, in the I/O thread

    def _begin(self) -> None:
        self._after(_WARN_AFTER_S, self._warn)
        if self._timeout_s is not None:
            self._after(self._timeout_s, self._give_up)
        self._dial()

    def _after(self, seconds: float, job: Job) -> None:
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

    @property
    def _may_dial(self) -> bool:
        return not self._left.is_set and (self._over is None or (self._is_closing and self._takes_leave))

    def _dial(self) -> None:
        if self._may_dial:
            about = self._about() if callable(self._about) else self._about
            join = msgspec.structs.replace(self._join, about=msgspec.Raw(msgspec.msgpack.encode(about)))
            self.dialer.dial(join, self._welcomed, self._failed)

    def _dial_again(self) -> None:
        if self._may_dial:
            # none of the timers that a close stops: what was sent before it may still have to arrive
            self.io.after(self._delay_s, self._dial)
            self._delay_s = min(2 * self._delay_s or _AGAIN_S, _MOST_AGAIN_S)

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

    def _rest(self, connection: Connection) -> None:
        if self.connection is connection:
            self._delay_s = 0.0

    def _failed(self, error: BaseException) -> None:
        """No connection, this time."""
        if isinstance(error, _FINAL) or self._once:
            self._fail(error)
            return
        # it says why there has never been a connection, and stays None once there was one
        if self.problem is not None:
            self.problem = str(error)
        self._dial_again()

    def ended(self, end: ConnectionEnd) -> None:
        """The connection is over."""
        self.connection = None
        # refusals and closes are decisions of the other end, and dialling again would not change them
        if end.kind == "lost" and self._rejoin and self._may_dial:
            _log.warning("%s %s waits for the controller to be there again: %s", self.kind, self.name, end.text)
            self._after(_WARN_AGAIN_S, self._warn)
            self._dial_again()
        else:
            self._fail(end)

    # the end, in the I/O thread

    def _fail(self, error: BaseException) -> None:
        """For good."""
        # the first end counts: a refusal is followed by the loss of its connection
        if self._left.is_set:
            return
        # the error behind it says more, with the exception's own type
        if isinstance(error, ConnectionEnd) and error.kind == "refused":
            error = error.__cause__ or error.to_raise()
        if isinstance(error, RefusedError):
            reason, text = error.reason, str(error)
            self.finish(lambda pending: refused_error(reason, f"{text}; {pending.fate}"))
        elif isinstance(error, ConnectionEnd) or not isinstance(error, _FINAL):
            cause = str(error).split("\n", 1)[0][:200]
            self.finish(lambda pending: pending.lost(self.whom, cause))
        else:
            self.finish(lambda _: to_raise(error))
        self._stop_timers()
        self._left.set()
        self._on_end(error if isinstance(error, Exception) else ConnectionEnd.of(error))

    def _leave(self) -> None:
        """Calls that wait are done, those that were sent are taken back; the last reply closes the connection."""
        if self._left.is_set or self._is_closing:
            return
        self._is_closing = True
        self._stop_timers()
        # a controller that hangs must not keep a process from ending
        self._after(self.linger_s, self._abort)
        # their replies say what became of those that were sent, if there is anybody to reply
        sent, self._sent = ({}, self._sent) if self.connection is None else (self._sent, {})
        self.finish(self._closed_here)
        self._sent = sent
        for number in sent:
            self.send(Cancel(number))
        if not sent:
            self._hang_up()

    def _closed_here(self, pending: Pending) -> Exception:
        fate = f"; {pending.fate}" if pending.was_sent else ""
        return ClosedResourceError(
            f"{pending.method}() on a closed {self.kind}: close() was called, or its 'with' block was left{fate}"
        )

    def _hang_up(self) -> None:
        """No more calls are taken, and none is on its way."""
        if self.connection is not None:
            self.connection.close()
        # with ``takes_leave`` it dials again, to say goodbye; but not where nobody ever was
        elif not self._takes_leave or self.problem is not None:
            self._abort()

    def _abort(self) -> None:
        """Nothing is to be said any more; or there was no reply, or no answer to the goodbye, in time."""
        self._fail(ConnectionEnd("closed", "the connection was closed here"))
        if self.connection is not None:
            self.connection.abort()
