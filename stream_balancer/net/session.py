"""The joining end: numbered Calls, exactly one Reply each, and Cancel in between; over one connection after the other.
For producers, ranks and fetchers alike. The answering end is :mod:`stream_balancer.net.service`.

::

    Session    ask -> waiting -> Call ----------->  admit (sizes before memory) -> open -> method      Peer
    Session    done <- Reply <--------------------  remembered until the caller has seen it

* At most ``max_calls`` calls and ``staged_bytes`` bytes have no reply; the rest waits where it was made. A larger call
  travels alone, up to ``max_call_bytes``.
* A call that is cancelled gets its reply too, and the reply decides: not accepted, or accepted already.
* After a lost connection the same session sends the same numbers again. The answerer knows which it has answered, which
  are being worked on, and which are new. If it knows nothing (started again), ``sent_before`` is set and the call's
  ``accepted_if`` names the error that means "the first time was accepted".

All state belongs to the I/O thread; callers hand their calls in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio
import msgspec

from stream_balancer.errors import (
    BrokenResourceError,
    ClosedResourceError,
    RefusedError,
    RolloutError,
    WireError,
    refused_error,
    to_raise,
)  # fmt: skip
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import Cancelled, ConnectionEnd, error_of
from stream_balancer.net.line import FINAL, Dialer, Line
from stream_balancer.net.loops import Job, Signal, blocking_deadline
from stream_balancer.net.messages import CALL_BYTES, NIL, SMALL, Call, Cancel, Message, Notify, Reply, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload, reader

_text_of = reader(str, "the text of an error")


class Answered(NamedTuple):
    """The value of a reply, and the bytes that came behind it."""

    value: msgspec.Raw
    memory: Memory | None


class Pending:
    """A call until its reply."""

    __slots__ = (
        "accepted_if", "answer", "args", "cancelled", "error", "method", "name", "nbytes", "number", "payload",
        "reply_bytes", "sent_before", "signal", "waits_for",
    )  # fmt: skip

    def __init__(
        self, method: str, args: Any = None, payload: Payload = NOTHING, *, name: str = "", accepted_if: str = "",
        reply_bytes: int = 0, waits_for: str = "the controller is busy",
    ) -> None:  # fmt: skip
        """``name``: for errors. ``accepted_if``: the name of the error that, after a repetition, means that the first
        call was accepted. ``reply_bytes``: the most that may come behind the reply. ``waits_for``: why no reply comes.
        """
        self.method, self.payload, self.accepted_if, self.waits_for = method, payload, accepted_if, waits_for
        self.name, self.reply_bytes = name or f"{method}()", reply_bytes
        # in the caller's thread, at its own line: the I/O thread has nobody to raise to
        self.args = args if isinstance(args, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(args))
        self.nbytes = CALL_BYTES + payload.total
        self.number: int | None = None
        self.signal = Signal()
        self.answer = Answered(NIL, None)
        self.error: Exception | None = None
        self.cancelled = self.sent_before = False

    @property
    def was_sent(self) -> bool:
        """The other end may have it, and may have accepted it."""
        return self.number is not None or self.sent_before

    @property
    def fate(self) -> str:
        """Fate of the call as known without a reply."""
        if self.was_sent:
            return "whether it was accepted is not known"
        return "it had not been sent, so it was not accepted"

    @property
    def advice(self) -> str:
        """Advice for a reply that does not come any more."""
        if not self.accepted_if:
            return "Connect again, and ask again"
        means = f": a {self.accepted_if} then means that the first put was accepted" if self.was_sent else ""
        return f"Connect and put it again{means}"

    def resolve(self, error: Exception | None, answer: Answered | None = None) -> None:
        """The reply; the first one counts."""
        # a reply and the loss of the connection may come in either order
        if not self.signal.is_set:
            self.error, self.answer, self.payload = error, answer or self.answer, NOTHING
            self.signal.set()

    def too_large(self, limits: Welcome) -> Exception:
        """The error where no connection with these limits may bring it."""
        return RolloutError(
            f"{self.name} takes {self.payload.total} bytes, more than the controller's max_put_bytes "
            f"({limits.max_call_bytes}). Raise max_put_bytes of the transport, or put less at once"
        )

    def error_in(self, reply: Reply) -> Exception | None:
        """The error of its reply, as the method raised it. Raises WireError for one that cannot be read."""
        # the first time was accepted, and its reply was lost with the connection
        if not reply.error or (self.sent_before and reply.error == self.accepted_if):
            return None
        if reply.error == "Cancelled":
            if self.cancelled:
                return Cancelled()
            return ClosedResourceError(f"{self.name} waited while this end was closed, or ended: it was not granted")
        return error_of(reply.error, _text_of(reply.value))

    def lost(self, whom: str, cause: str) -> Exception:
        """The error where the connection is lost for good."""
        return BrokenResourceError(f"{whom} was lost while {self.name} waited: {cause}; {self.fate}. {self.advice}")


Over: TypeAlias = Callable[[Pending], Exception]
"""The error that calls raise when there is no connection any more."""


class Session:
    """The calls of one caller; handler of its connections."""

    def __init__(
        self, dialer: Dialer, kind: str, *, linger_s: float = 5.0, whom: str = "the controller",
        takes_leave: bool = False, on_open: Callable[[Welcome], object] = lambda _: None,
        admit: Callable[[Message, int], object] | None = None,
        on_message: Callable[[Message, Memory | None], object] | None = None,
        on_end: Callable[[Exception], object] = lambda _: None, **line: Any,
    ) -> None:  # fmt: skip
        """Connects once :meth:`begin` is called. ``linger_s``: how long a close, and the reply to a cancelled call, is
        waited for. ``whom``: the other end, for errors. ``line``: options of the :class:`Line`.

        All in the I/O thread: ``on_open`` when connected, ``admit`` before bytes behind a message are allocated (raises
        WireError; default: none are taken), ``on_message`` for all but replies, ``on_end`` once: with RefusedError,
        ConfigError (no such host), WireError, or a ConnectionEnd. ``takes_leave``: what was sent without a reply must
        arrive before it has left: if the connection is lost first, it joins again, where it may, to say so."""
        self.line, self.io = Line(self, dialer, kind, **line), dialer.io
        self.kind, self.whom, self.linger_s = kind, whom, linger_s
        self.version: int | None = None
        """The policy version that was passed on last."""
        self._on_open, self._admit, self._on_message, self._on_end = on_open, admit, on_message, on_end
        self._is_closing, self._takes_leave = False, takes_leave and self.line.rejoin
        self._left = Signal()
        self._stop_waiting: Job = lambda: None
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
                _cancel_again()
        elif not timed_out:
            # Ctrl-C is raised where it was pressed, even if the call was accepted
            raise interruption

    def _in_vain(self, pending: Pending) -> TimeoutError:
        what = "was not accepted" if pending.accepted_if else "had no answer"
        why = f"not connected: {self.line.problem}" if self.line.problem else pending.waits_for
        return TimeoutError(f"{pending.method}() {what} within {blocking_deadline.timeout_s} s: {why}")

    def submit(self, pending: Pending) -> None:
        """Have it sent when there is room. Never blocks."""
        # in the caller's thread: calls keep the order in which they were made
        self._waiting.append(pending)
        self.io.do(self._send, here=not self._sent and pending.payload.total <= SMALL)

    def send(self, message: Message) -> None:
        """A message; dropped while there is no connection."""
        connection = self.line.connection
        if connection is not None:
            connection.send(message)

    def begin(self) -> None:
        """Begin to connect."""
        self.io.do(self.line.begin)

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
        connection, limits = self.line.connection, self._limits
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
        self._over, self.line.wanted = self._over or over, self._is_closing and self._takes_leave
        sent, self._sent, self._staged = self._sent, {}, 0
        for pending in sent.values():
            pending.resolve(over(pending))
        # those that wait hear it there
        self._send()

    # connections, in the I/O thread

    def opened(self, connection: Connection, welcome: Welcome) -> None:
        """Connected, perhaps again."""
        # before calls are sent again: what the handler sets up there, they may need
        self._on_open(welcome)
        if self._is_closing:
            connection.close()
        else:
            self._send_again(welcome)

    def ended(self, end: ConnectionEnd) -> None:
        """The connection is over."""
        self.line.lost(end)

    # the end, in the I/O thread

    def failed(self, error: BaseException) -> None:
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
        elif isinstance(error, ConnectionEnd) or not isinstance(error, FINAL):
            cause = str(error).split("\n", 1)[0][:200]
            self.finish(lambda pending: pending.lost(self.whom, cause))
        else:
            self.finish(lambda _: to_raise(error))
        self.line.wanted = False
        self.line.rest()
        self._stop_waiting()
        self._left.set()
        self._on_end(error if isinstance(error, Exception) else ConnectionEnd.of(error))

    def _leave(self) -> None:
        """Calls that wait are done, those that were sent are taken back; the last reply closes the connection."""
        if self._left.is_set or self._is_closing:
            return
        self._is_closing = True
        self.line.rest()
        # a controller that hangs must not keep a process from ending
        self._stop_waiting = self.io.after(self.linger_s, self._abort)
        # their replies say what became of those that were sent, if there is anybody to reply
        sent, self._sent = ({}, self._sent) if self.line.connection is None else (self._sent, {})
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
        if self.line.connection is not None:
            self.line.connection.close()
        # with ``takes_leave`` it dials again, to say goodbye; but not where nobody ever was
        elif not self._takes_leave or self.line.problem is not None:
            self._abort()

    def _abort(self) -> None:
        """Nothing is to be said any more; or there was no reply, or no answer to the goodbye, in time."""
        self.failed(ConnectionEnd("closed", "the connection was closed here"))
        if self.line.connection is not None:
            self.line.connection.abort()


def _cancel_again() -> None:
    """A cancellation that came too late must not be swallowed: scopes cancel again by themselves, but asyncio's
    ``task.cancel()`` and ``asyncio.timeout`` do not."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    if task is None or not (requests := task.cancelling()) or anyio.current_effective_deadline() == float("-inf"):
        return

    def again() -> None:
        # fewer requests: a timeout block was left in time
        if task.cancelling() >= requests and not task.done():
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(again)
