"""The way to ask: a numbered Call, exactly one Reply, and Cancel in between. For producers, ranks and fetchers alike.

::

    Caller     ask -> waiting -> Call ----------->  admit (sizes before memory) -> open -> method      Answerer
    Caller     done <- Reply <--------------------  remembered until the caller has seen it

* At most ``max_calls`` calls and ``staged_bytes`` bytes have no reply; the rest waits where it was made. A larger call
  travels alone, up to ``max_call_bytes``.
* A call that is cancelled gets its reply too, and the reply decides: not accepted, or accepted already.
* After a lost connection the same session sends the same numbers again. The answerer knows which it has answered, which
  are being worked on, and which are new. If it knows nothing (started again), ``sent_before`` is set and the call's
  ``accepted_if`` names the error that means "the first time was accepted".

All state belongs to the I/O thread. The other end is :mod:`stream_balancer.net.answers`; connections come and go in
:mod:`stream_balancer.net.session`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio
import msgspec

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, RolloutError, WireError
from stream_balancer.net.connection import Connection
from stream_balancer.net.errors import Cancelled, error_of
from stream_balancer.net.loops import Runs, Signal, blocking_deadline
from stream_balancer.net.messages import NIL, Call, Cancel, Message, Reply, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

__all__ = ["CALL_BYTES", "SMALL", "Answered", "Caller", "Pending"]

_encode = msgspec.msgpack.encode
SMALL = 2**16
"""Bytes that are sent in the thread that asks, if nothing else is on its way. Many at a time go together, which costs
fewer wake-ups."""
CALL_BYTES = 512
"""Bytes that a call without payload counts for."""


class Answered(NamedTuple):
    """The value of a reply, and the bytes that came behind it."""

    value: msgspec.Raw
    memory: Memory | None


class Pending:
    """A call until its reply."""

    __slots__ = (
        "abandoned", "accepted_if", "answer", "args", "cancelled", "error", "method", "name", "nbytes", "number",
        "payload", "reply_bytes", "sent_before", "signal", "undo",
    )  # fmt: skip

    def __init__(
        self, method: str, args: Any = None, payload: Payload = NOTHING, *, name: str = "", accepted_if: str = "",
        reply_bytes: int = 0, undo: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Encoded here, in the caller's thread: what cannot be written raises at its own line.

        ``name``: for errors. ``accepted_if``: the name of the error that, after a repetition, means that the first call
        was accepted. ``reply_bytes``: the most that may come behind the reply. ``undo``: called in the I/O thread if it
        is accepted and nobody waits for it any more.
        """
        self.method, self.payload, self.accepted_if, self.undo = method, payload, accepted_if, undo
        self.name, self.reply_bytes = name or f"{method}()", reply_bytes
        # in the caller's thread, at its own line: the I/O thread has nobody to raise to
        self.args = args if isinstance(args, msgspec.Raw) else msgspec.Raw(_encode(args))
        self.nbytes = CALL_BYTES + payload.total
        self.number: int | None = None
        self.signal = Signal()
        self.answer = Answered(NIL, None)
        self.error: Exception | None = None
        self.cancelled = self.abandoned = self.sent_before = False

    @property
    def fate(self) -> str:
        """Fate of the call as known without a reply."""
        if self.number is None and not self.sent_before:
            return "it had not been sent, so it was not accepted"
        return "whether it was accepted is not known"

    def resolve(self, error: Exception | None, answer: Answered | None = None) -> None:
        """The reply; the first one counts."""
        # a reply and the loss of the connection may come in either order
        if self.signal.is_set():
            return
        self.error, self.answer, self.payload = error, answer or self.answer, NOTHING
        # accepted, and the caller is gone: what it was given (a slot) would stay taken
        if self.abandoned and error is None and self.undo is not None:
            self.undo()
        self.signal.set()

    def abandon(self) -> None:
        """The reply is not waited for any more. In the I/O thread."""
        self.abandoned = True
        if self.signal.is_set() and self.error is None and self.undo is not None:
            self.undo()


Over: TypeAlias = Callable[[Pending], Exception]
"""The error that calls raise when there is no connection any more."""


class Caller(ABC):
    """The calls of one session that have no reply; handler of its connection."""

    whom: str
    """The other end, for errors."""
    linger_s: float
    """How long the reply to a cancelled call is waited for."""

    def __init__(self, io: Runs) -> None:
        self.io = io
        self.connection: Connection | None = None
        self._limits = Welcome()
        self._news: deque[Pending] = deque()
        self._waiting: dict[Pending, None] = {}
        self._sent: dict[int, Pending] = {}
        self._staged = self._next = 0
        self._over: Over | None = None
        """Set once this end takes no more calls."""

    @abstractmethod
    def _on_idle(self) -> None:
        """No more calls are taken, and none is on its way."""

    @abstractmethod
    def _admit_other(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that may not come behind what is no reply."""

    @abstractmethod
    def _receive_other(self, message: Message, memory: Memory | None) -> None:
        """A message that is no reply. Raises WireError for what may not come."""

    # from any thread or task

    async def ask(self, method: str, args: Any = None, payload: Payload = NOTHING, **options: Any) -> Answered:
        """The reply to a call; see :class:`Pending` for the options, and :meth:`reply_to` for cancellation."""
        return await self.reply_to(Pending(method, args, payload, **options))

    def tell(self, method: str, args: Any = None) -> None:
        """A call whose reply nobody waits for. Never blocks."""
        self.submit(Pending(method, args))

    async def reply_to(self, pending: Pending) -> Answered:
        """Send a call, and wait for its reply. If this is cancelled or interrupted the call was not accepted; where it
        turns out that it was, this returns and the cancellation comes at the next await."""
        try:
            self.submit(pending)
            await pending.signal.wait()
        except BaseException as interruption:  # noqa: BLE001 - raised again, unless the call was accepted
            await self._take_back(pending, interruption)
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def submit(self, pending: Pending) -> None:
        """Have it sent when there is room. Never blocks."""
        # a queue of its own, appended in the caller's thread: calls keep the order in which they were made
        self._news.append(pending)
        self.io.do(self._send, here=not self._sent and pending.payload.total <= SMALL)

    def cancel(self, pending: Pending) -> None:
        """Ask for it back; its reply says whether that was in time. Never blocks."""
        self.io.do(partial(self._cancel, pending))

    async def _take_back(self, pending: Pending, interruption: BaseException) -> None:
        """Returns if it was accepted, or refused, before it could be taken back."""
        answered = False
        try:
            self.cancel(pending)
            if isinstance(interruption, GeneratorExit):
                raise interruption
            # The call may be accepted while the cancellation is on its way. To leave without the reply would leave the
            # caller not knowing which, so the reply is waited for, shielded.
            answered = await pending.signal.wait_shielded(self.linger_s)
        finally:
            if not answered:
                self.io.do(pending.abandon)
        if not answered:
            raise BrokenResourceError(
                f"{pending.name} was cancelled, but {self.whom} has not answered for {self.linger_s} s: whether it "
                f"was accepted is not known{_again(pending)}"
            ) from interruption
        if isinstance(pending.error, Cancelled):
            raise interruption
        if not hasattr(blocking_deadline, "at"):
            if pending.error is None:
                _cancel_again()
        elif not isinstance(interruption, TimeoutError):
            # Ctrl-C is raised where it was pressed, even if the call was accepted
            self.io.do(pending.abandon)
            raise interruption

    # in the I/O thread

    def _send(self) -> None:
        """Send the calls that have room."""
        while self._news:
            pending = self._news.popleft()
            if self._over is not None:
                pending.resolve(self._over(pending))
            elif not pending.cancelled:
                self._waiting[pending] = None
        connection, limits = self.connection, self._limits
        while self._waiting and connection is not None and len(self._sent) < limits.max_calls:
            # strictly in order: a small call must not overtake a large one that waits for room
            pending = next(iter(self._waiting))
            if pending.payload.total > limits.max_call_bytes:
                del self._waiting[pending]
                pending.resolve(_too_large(pending, limits))
                continue
            # one that is larger than the window travels alone, or it could never be sent
            if self._staged and self._staged + pending.nbytes > limits.staged_bytes:
                break
            del self._waiting[pending]
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
        if not pending.sent_before and pending.number not in self._sent:
            # an interrupt may have come before it was handed in: then it is not waiting, and never will
            self._waiting.pop(pending, None)
            pending.resolve(Cancelled())
        elif pending.number in self._sent and self.connection is not None:
            self.connection.send(Cancel(pending.number))

    def _send_again(self, welcome: Welcome) -> None:
        """Connected: what has no reply is sent again, in its old order and under its old numbers."""
        # nothing is remembered there, so numbers begin anew
        if not welcome.known:
            self._next = 0
        for pending in self._sent.values():
            pending.sent_before = True
            if not welcome.known:
                pending.number = None
        # behind each other in the old order, in front of what was never sent
        self._waiting = dict.fromkeys([*self._sent.values(), *self._waiting])
        self._sent, self._staged, self._limits = {}, 0, welcome
        self._send()

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes that nobody has asked for."""
        if not isinstance(message, Reply):
            self._admit_other(message, total)
            return
        pending = self._sent.get(message.number)
        if pending is None or total > pending.reply_bytes:
            raise WireError(f"{total} bytes behind the reply to call {message.number}, which nobody has asked for")

    def receive(self, message: Message, memory: Memory | None) -> None:
        """In the order of sending. Raises WireError for what may not come."""
        if not isinstance(message, Reply):
            self._receive_other(message, memory)
            return
        pending = self._sent.pop(message.number, None)
        if pending is None:
            if self._over is None:
                raise WireError(f"a reply to call {message.number}, which is not on its way")
            return
        self._staged -= pending.nbytes
        error = self._error_of(message, pending) if message.error else None
        pending.resolve(error, Answered(message.value, memory))
        if self._waiting:
            self._send()
        if self._over is not None and not self._sent:
            self._on_idle()

    def _error_of(self, reply: Reply, pending: Pending) -> Exception | None:
        # the first time was accepted, and its reply was lost with the connection
        if pending.sent_before and reply.error == pending.accepted_if:
            return None
        if reply.error == "Cancelled":
            if pending.cancelled:
                return Cancelled()
            return ClosedResourceError(f"{pending.name} waited while this end was closed, or ended: it was not granted")
        try:
            text = msgspec.msgpack.decode(reply.value, type=str)
        except msgspec.MsgspecError as error:
            raise WireError(f"an error without a text: {error}") from None
        return error_of(reply.error, text)

    def _take_all_back(self, over: Over) -> None:
        """No more calls. Those that wait are done, those that are sent are taken back."""
        if self.connection is None:
            self._resolve_all(over)
        self._over = self._over or over
        waiting, self._waiting = self._waiting, {}
        for pending in waiting:
            pending.resolve(over(pending))
        for number in self._sent:
            assert self.connection is not None
            self.connection.send(Cancel(number))
        # nothing is to be answered any more: the way is free to close
        if not self._sent:
            self._on_idle()

    def _resolve_all(self, over: Over) -> None:
        """No more calls, and no more replies."""
        self._over = self._over or over
        left, self._sent, self._waiting, self._staged = [*self._sent.values(), *self._waiting], {}, {}, 0
        for pending in left:
            pending.resolve(over(pending))

    def _lost_for(self, cause: str) -> Over:
        """The error that calls raise when the connection is lost for good."""
        return lambda pending: BrokenResourceError(
            f"{self.whom} was lost while {pending.name} waited: {cause}; {pending.fate}{_again(pending)}"
        )


def _again(pending: Pending) -> str:
    if not pending.accepted_if:
        return ". Connect again, and ask again"
    return f". Connect and put it again: a {pending.accepted_if} then means that the first put was accepted"


def _too_large(pending: Pending, limits: Welcome) -> Exception:
    return RolloutError(
        f"{pending.name} takes {pending.payload.total} bytes, more than the controller's max_put_bytes "
        f"({limits.max_call_bytes}). Raise max_put_bytes of the transport, or put less at once"
    )


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
