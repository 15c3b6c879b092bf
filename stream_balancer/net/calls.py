"""One way to ask: a numbered Call, exactly one Reply, and Cancel in between. For producers, ranks and fetchers alike.

::

    Caller     ask -> waiting -> Call ----------->  admit (sizes before memory) -> open -> method      Answerer
    Caller     done <- Reply <--------------------  remembered until the caller has seen it

* At most ``max_calls`` calls and ``staged_bytes`` bytes have no reply; the rest waits where it was made. A larger call
  travels alone, up to ``max_call_bytes``.
* A call that is cancelled gets its reply too, and the reply decides: not accepted, or accepted already.
* After a lost connection the same session sends the same numbers again. The answerer knows which it has answered, which
  it is still working on, and which are new. If it knows nothing (started again), ``sent_before`` is set and the method's
  ``accepted_if`` names the error that means "the first time was accepted".

All state belongs to the I/O thread; methods run in the host's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import msgspec
import sniffio

from stream_balancer.net.connection import NOTHING, Base, Payload
from stream_balancer.net.errors import Cancelled, Ended, RemoteError, UnknownOutcome, WireError
from stream_balancer.net.loops import Runs, Signal, blocking_deadline
from stream_balancer.net.messages import Call, Cancel, Message, Reply, Welcome
from stream_balancer.net.pool import Memory

__all__ = ["Answered", "Answerer", "Asked", "Caller", "Pending"]

_encode = msgspec.msgpack.encode
_NIL = msgspec.Raw(b"\xc0")
SMALL = 2**16
"""Sent in the thread that asks, if nothing else is on its way: many at a time go together, which costs fewer wake-ups."""
_CALL_BYTES = 512
"""What a call without payload counts for."""


class Answered(NamedTuple):
    """The value of a reply, and the bytes that came behind it."""

    value: msgspec.Raw
    memory: Memory | None


class Pending:
    """A call until its reply."""

    __slots__ = (
        "accepted_if",
        "answer",
        "args",
        "cancelled",
        "error",
        "method",
        "number",
        "payload",
        "sent_before",
        "signal",
    )

    def __init__(self, method: str, args: Any, payload: Payload = NOTHING, accepted_if: str = "") -> None:
        """Encoded here, in the caller's thread: what cannot be written raises at its own line."""
        self.method, self.payload, self.accepted_if = method, payload, accepted_if
        self.args = args if isinstance(args, msgspec.Raw) else msgspec.Raw(_encode(args))
        self.number: int | None = None
        self.signal = Signal()
        self.answer = Answered(_NIL, None)
        self.error: Exception | None = None
        self.cancelled = self.sent_before = False

    @property
    def nbytes(self) -> int:
        return _CALL_BYTES + self.payload.total

    def resolve(self, error: Exception | None, answer: Answered | None = None) -> None:
        if not self.signal.is_set():
            self.error = error
            self.answer = answer or self.answer
            self.payload = NOTHING
            self.signal.set()


class Caller:
    """The calls of one session that have no reply."""

    def __init__(self, io: Runs, *, rejoin: bool = False, linger_s: float = 5.0) -> None:
        """``rejoin``: a lost connection fails nothing; calls wait for the next :meth:`open`. ``linger_s``: how long the
        reply to a cancelled call is waited for."""
        self._io, self._rejoin, self._linger_s = io, rejoin, linger_s
        self._connection: Base | None = None
        self._limits = Welcome()
        self._waiting: dict[Pending, None] = {}
        self._sent: dict[int, Pending] = {}
        self._staged = self._next = 0
        self._over: Exception | None = None
        self._news: deque[Pending] = deque()

    # from any thread or task

    async def ask(self, pending: Pending) -> Answered:
        """Its reply. If this is cancelled or interrupted the call was not accepted; where it turns out that it was,
        this returns and a cancellation comes at the next await."""
        self.submit(pending)
        try:
            await pending.signal.wait()
        except BaseException as interruption:
            self._io.do(lambda: self._cancel(pending))
            await pending.signal.wait_shielded(self._linger_s)
            if not pending.signal.is_set():
                text = f"{pending.method} was cancelled and has no answer: whether it was accepted is not known"
                raise UnknownOutcome(text) from interruption
            if isinstance(pending.error, Cancelled) or isinstance(interruption, KeyboardInterrupt):
                raise
            if pending.error is None and not isinstance(interruption, TimeoutError):
                _cancel_again()
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def submit(self, pending: Pending) -> None:
        self._news.append(pending)
        self._io.do(self._take_news, here=not self._sent and pending.payload.total <= SMALL)

    # in the I/O thread

    def _take_news(self) -> None:
        while self._news:
            pending = self._news.popleft()
            if self._over is not None:
                pending.resolve(self._over)
            else:
                self._waiting[pending] = None
        self._send()

    def _send(self) -> None:
        connection, limits = self._connection, self._limits
        while self._waiting and connection is not None and len(self._sent) < limits.max_calls:
            pending = next(iter(self._waiting))
            if pending.payload.total > limits.max_call_bytes:
                del self._waiting[pending]
                pending.resolve(ValueError(f"{pending.payload.total} bytes; {limits.max_call_bytes} are taken at most"))
                continue
            if self._staged and self._staged + pending.nbytes > limits.staged_bytes:
                break
            del self._waiting[pending]
            if pending.number is None:
                pending.number, self._next = self._next, self._next + 1
            self._sent[pending.number] = pending
            self._staged += pending.nbytes
            seen = next(iter(self._sent))
            connection.send(
                Call(pending.number, seen, pending.method, pending.args), pending.payload, via=connection.bulk
            )
            if pending.cancelled:
                connection.send(Cancel(pending.number))

    def _cancel(self, pending: Pending) -> None:
        pending.cancelled = True
        if pending in self._waiting and not pending.sent_before:
            del self._waiting[pending]
            pending.resolve(Cancelled())
        elif pending.number in self._sent and self._connection is not None:
            self._connection.send(Cancel(pending.number))

    def open(self, connection: Base, welcome: Welcome) -> None:
        """Connected: what has no reply is sent again, in its old order and under its old numbers."""
        if not welcome.known:  # nothing is remembered there, so numbers begin anew
            self._next = 0
        for pending in self._sent.values():
            pending.sent_before = True
            if not welcome.known:
                pending.number = None
        self._waiting = dict.fromkeys([*self._sent.values(), *self._waiting])
        self._sent, self._staged = {}, 0
        self._connection, self._limits = connection, welcome
        self._send()

    def admit(self, message: Message, total: int) -> None:
        if not isinstance(message, Reply) or message.number not in self._sent or total > self._limits.max_call_bytes:
            raise WireError("bytes that nobody has asked for")

    def receive(self, reply: Reply, memory: Memory | None) -> None:
        pending = self._sent.pop(reply.number, None)
        if pending is None:
            raise WireError(f"a reply to call {reply.number}, which is not on its way")
        self._staged -= pending.nbytes
        error: Exception | None = None
        if reply.error == "Cancelled":
            error = Cancelled() if pending.cancelled else Ended("closed", "the other end takes no more calls")
        elif reply.error and not (pending.sent_before and reply.error == pending.accepted_if):
            error = RemoteError(reply.error, msgspec.msgpack.decode(reply.value, type=str))
        pending.resolve(error, Answered(reply.value, memory))
        self._send()

    def lost(self, end: Ended) -> None:
        """The connection is over."""
        self._connection = None
        if not self._rejoin or end.kind != "lost":
            self.end(end)

    def end(self, error: Exception) -> None:
        """No more calls."""
        self._over = error
        for pending in [*self._sent.values(), *self._waiting]:
            pending.resolve(error)
        self._sent, self._waiting, self._staged = {}, {}, 0


def _cancel_again() -> None:
    """A cancellation that came too late must not be swallowed: scopes cancel again by themselves, but asyncio's
    ``task.cancel()`` and ``asyncio.timeout`` do not."""
    if hasattr(blocking_deadline, "at") or sniffio.current_async_library() != "asyncio":
        return
    task = asyncio.current_task()
    if task is None or not (requests := task.cancelling()) or anyio.current_effective_deadline() == float("-inf"):
        return

    def again() -> None:
        if task.cancelling() >= requests and not task.done():  # else a timeout block was left in time
            task.uncancel()
            task.cancel()

    asyncio.get_running_loop().call_soon(again)


class Asked:
    """A call at the answerer."""

    __slots__ = ("answerer", "args", "cancel", "cancelled", "memory", "method", "nbytes", "number")

    def __init__(self, answerer: Answerer, call: Call, memory: Memory | None) -> None:
        self.answerer, self.number, self.method, self.args, self.memory = (
            answerer,
            call.number,
            call.method,
            call.args,
            memory,
        )
        self.nbytes = _CALL_BYTES + (0 if memory is None else memory.size)
        self.cancelled = False
        self.cancel: Callable[[], object] = lambda: None
        """Set by who works on it; called in that event loop."""

    def reply(self, value: Any = None, error: str = "", payload: Payload = NOTHING) -> None:
        """The one reply. From any thread."""
        raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))
        self.memory = None
        self.answerer._io.do(
            lambda: self.answerer._answer(self, Reply(self.number, raw, error), payload),
            here=len(self.answerer._open) == 1 and payload.total <= SMALL,
        )


class Answerer:
    """The other end of one session: calls that are open, and replies that the caller may not have seen."""

    def __init__(
        self, io: Runs, limits: Welcome, begin: Callable[[Asked], object], cancel: Callable[[Asked], object]
    ) -> None:
        """``begin`` and ``cancel`` are called in the I/O thread, in the order of sending."""
        self._io, self._limits, self._begin, self._cancel = io, limits, begin, cancel
        self._connection: Base | None = None
        self._open: dict[int, Asked] = {}
        self._done: dict[int, tuple[Reply, Payload]] = {}
        self._next = self._seen = self._staged = 0

    def open(self, connection: Base) -> None:
        """The session is connected."""
        self._connection = connection

    def lost(self) -> None:
        """... and is not. Calls go on: their replies are remembered."""
        self._connection = None

    def end(self) -> None:
        """The session will not come back: what is open is taken back."""
        for asked in self._open.values():
            self._cancel(asked)

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes beyond what Welcome has allowed."""
        limits = self._limits
        if not isinstance(message, Call) or total > limits.max_call_bytes:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")
        if self._staged and self._staged + total > limits.staged_bytes:
            raise WireError("more bytes without a reply than were allowed")

    def receive(self, message: Message, memory: Memory | None) -> None:
        if isinstance(message, Cancel):
            asked = self._open.get(message.number)
            if asked is not None:
                self._cancel(asked)
            return
        assert isinstance(message, Call)
        if message.number > self._next or not self._seen <= message.seen <= message.number:
            raise WireError(f"call {message.number} came when {self._next} was next")
        for number in range(self._seen, message.seen):
            self._done.pop(number, None)
        self._seen = message.seen
        if message.number in self._done:
            if self._connection is not None:
                self._send(*self._done[message.number])
            return
        if message.number < self._next:
            return  # worked on: its reply will come
        if len(self._open) >= self._limits.max_calls:
            raise WireError("more calls without a reply than were allowed")
        self._next += 1
        asked = self._open[message.number] = Asked(self, message, memory)
        self._staged += asked.nbytes
        self._begin(asked)

    def _answer(self, asked: Asked, reply: Reply, payload: Payload) -> None:
        if self._open.pop(asked.number, None) is None:
            return
        self._staged -= asked.nbytes
        self._done[asked.number] = reply, payload
        if self._connection is not None:
            self._send(reply, payload)

    def _send(self, reply: Reply, payload: Payload) -> None:
        assert self._connection is not None
        self._connection.send(reply, payload, via=self._connection.bulk)
