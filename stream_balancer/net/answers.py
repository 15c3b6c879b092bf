"""The answering end of calls: what is open, what was answered, and how many bytes of it lie here.

See :mod:`stream_balancer.net.calls` for the conversation. All state belongs to the I/O thread; methods run in the
host's event loop (:mod:`stream_balancer.net.service`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stream_balancer.errors import WireError
from stream_balancer.net.calls import CALL_BYTES, SMALL
from stream_balancer.net.connection import Base
from stream_balancer.net.loops import Runs
from stream_balancer.net.messages import Call, Cancel, Message, Reply, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload

__all__ = ["Answerer", "Asked", "Budget"]

_encode = msgspec.msgpack.encode


class Budget:
    """Bytes that all sessions together may stage. Beyond it a session with something staged is not read from, until
    its replies, or those of others, make room; one with nothing staged always is, so nobody waits for nothing."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.used = most_bytes, 0
        self._paused: dict[Answerer, Base] = {}

    def take(self, answerer: Answerer, connection: Base | None, nbytes: int) -> None:
        """So many more, and perhaps no more of this session."""
        self.used += nbytes
        if self.used > self.most_bytes and connection is not None and answerer not in self._paused:
            self._paused[answerer] = connection
            connection.pause()

    def give(self, answerer: Answerer, nbytes: int, *, has_more: bool) -> None:
        """So many less."""
        self.used -= nbytes
        if not has_more:
            self.forget(answerer)
        if self._paused and self.used <= self.most_bytes * 3 // 4:  # not at each reply
            for one in list(self._paused):
                self.forget(one)

    def forget(self, answerer: Answerer) -> None:
        """Read from it again, if its connection is still there."""
        connection = self._paused.pop(answerer, None)
        if connection is not None:
            connection.resume()


class Asked:
    """A call at the answerer."""

    __slots__ = ("_answerer", "args", "cancelled", "memory", "method", "nbytes", "number")

    def __init__(self, answerer: Answerer, call: Call, memory: Memory | None) -> None:
        self._answerer, self.number, self.method, self.args, self.memory = (
            answerer, call.number, call.method, call.args, memory,
        )  # fmt: skip
        self.nbytes = CALL_BYTES + (0 if memory is None else memory.size)
        self.cancelled = False

    def reply(self, value: Any = None, error: str = "", payload: Payload = NOTHING) -> None:
        """The one reply. From any thread."""
        raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))
        self.memory = None
        self._answerer.answer(self, Reply(self.number, raw, error), payload)


class Answerer:
    """The other end of one session: calls that are open, and replies that the caller may not have seen."""

    def __init__(
        self, io: Runs, limits: Welcome, budget: Budget, begin: Callable[[Asked], object],
        cancel: Callable[[Asked], object], remembers: Callable[[], bool],
    ) -> None:  # fmt: skip
        """``begin`` and ``cancel`` are called in the I/O thread, in the order of sending. ``remembers``: whether the
        session may come back, and ask again for replies."""
        self._io, self._limits, self._budget, self._begin, self._cancel = io, limits, budget, begin, cancel
        self._remembers = remembers
        self._connection: Base | None = None
        self._open: dict[int, Asked] = {}
        self._done: dict[int, tuple[Reply, Payload]] = {}
        self._next = self._seen = self._staged = self._coming = 0
        self._heard = 0
        """Calls below this one have come on this connection. The caller sends what has no reply again on each, and
        takes one reply to each: so a reply waits until its call is heard."""

    def open(self, connection: Base) -> None:
        """The session is connected."""
        self._connection, self._heard, self._coming = connection, 0, 0

    def lost(self) -> None:
        """... and is not. Calls go on: their replies are remembered."""
        self._connection = None
        self._budget.forget(self)

    def end(self) -> None:
        """The session will not come back: what is open has nobody to answer."""
        self._budget.give(self, self._staged, has_more=False)
        self._open, self._done, self._staged = {}, {}, 0

    def admit(self, message: Message, total: int) -> None:
        """Raises WireError for bytes beyond what Welcome has allowed."""
        limits = self._limits
        if not isinstance(message, Call) or total > limits.max_call_bytes:
            raise WireError(f"{total} bytes behind a {type(message).__name__} message")
        staged = self._staged + self._coming
        # What comes again after a lost connection is counted already, and is not kept.
        if message.number >= self._next and staged and staged + total > limits.staged_bytes:
            raise WireError(f"a call of {total} bytes, where {staged} of {limits.staged_bytes} have no reply")
        self._coming += total

    def receive(self, message: Call | Cancel, memory: Memory | None) -> None:
        """Raises WireError for what may not come now."""
        if isinstance(message, Cancel):
            asked = self._open.get(message.number)
            if asked is not None:
                self._cancel(asked)
            elif message.number >= self._heard:
                raise WireError(f"call {message.number} is cancelled before it was made")
            return
        number = message.number
        self._coming -= 0 if memory is None else memory.size
        if not self._heard <= number <= self._next or not self._seen <= message.seen <= number:
            raise WireError(f"call {number} came when {self._next} was next")
        for old in range(self._seen, message.seen):
            self._done.pop(old, None)
        self._seen, self._heard = message.seen, number + 1
        if number in self._done:
            self._send(*self._done[number])
        elif number == self._next:
            self._take(message, memory)

    def _take(self, call: Call, memory: Memory | None) -> None:
        if len(self._open) >= self._limits.max_calls:
            raise WireError("more calls without a reply than were allowed")
        self._next += 1
        asked = self._open[call.number] = Asked(self, call, memory)
        self._staged += asked.nbytes
        self._budget.take(self, self._connection, asked.nbytes)
        self._begin(asked)

    def answer(self, asked: Asked, reply: Reply, payload: Payload) -> None:
        """From any thread."""
        small = len(self._open) == 1 and payload.total <= SMALL
        self._io.do(lambda: self._answer(asked, reply, payload), here=small)

    def _answer(self, asked: Asked, reply: Reply, payload: Payload) -> None:
        if self._open.get(asked.number) is not asked:
            return
        del self._open[asked.number]
        self._staged -= asked.nbytes
        self._budget.give(self, asked.nbytes, has_more=bool(self._open))
        if self._remembers():
            self._done[asked.number] = reply, payload
        if asked.number < self._heard:
            self._send(reply, payload)

    def _send(self, reply: Reply, payload: Payload) -> None:
        if self._connection is not None:
            self._connection.send(reply, payload, via=self._connection.bulk)
