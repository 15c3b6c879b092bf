"""The way to ask: a numbered Call, exactly one Reply, and Cancel in between. For producers, ranks and fetchers alike.

::

    Session    ask -> waiting -> Call ----------->  admit (sizes before memory) -> open -> method      Peer
    Session    done <- Reply <--------------------  remembered until the caller has seen it

* At most ``max_calls`` calls and ``staged_bytes`` bytes have no reply; the rest waits where it was made. A larger call
  travels alone, up to ``max_call_bytes``.
* A call that is cancelled gets its reply too, and the reply decides: not accepted, or accepted already.
* After a lost connection the same session sends the same numbers again. The answerer knows which it has answered, which
  are being worked on, and which are new. If it knows nothing (started again), ``sent_before`` is set and the call's
  ``accepted_if`` names the error that means "the first time was accepted".

Here is one call, at the asking end and at the answering one; all of them are in :mod:`stream_balancer.net.session` and
:mod:`stream_balancer.net.service`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

import anyio
import msgspec

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, RolloutError
from stream_balancer.net.errors import Cancelled, error_of, name_of
from stream_balancer.net.loops import Signal
from stream_balancer.net.messages import NIL, Call, Reply, Welcome
from stream_balancer.wire.payload import NOTHING, Memory, Payload, reader

SMALL = 2**16
"""Bytes that are sent in the thread that asks, if nothing else is on its way. Many at a time go together, which costs
fewer wake-ups."""
CALL_BYTES = 512
"""Bytes that a call without payload counts for."""


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


class Bytes(NamedTuple):
    """Result of a method that answers with bytes."""

    value: Any
    payload: Payload


class Asked:
    """A call at the answerer; ``peer`` is the :class:`~stream_balancer.net.service.Peer` that it came from."""

    __slots__ = ("args", "cancelled", "memory", "method", "nbytes", "number", "peer")

    def __init__(self, peer: Any, call: Call, memory: Memory | None) -> None:
        self.peer, self.number, self.method, self.args, self.memory = peer, call.number, call.method, call.args, memory
        self.nbytes = CALL_BYTES + (0 if memory is None else memory.size)
        self.cancelled = False

    def reply(self, value: Any = None, error: str = "") -> None:
        """The one reply. From any thread."""
        value, payload = value if isinstance(value, Bytes) else (value, NOTHING)
        # encoded in the thread that answers: what cannot be written raises where the method was called
        raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(value))
        self.memory = None
        # alone and small, sending it here saves a thread switch; many together go in one turn of the I/O thread
        small = len(self.peer.open) == 1 and payload.total <= SMALL
        self.peer.io.do(partial(self.peer.answer, self, Reply(self.number, raw, error), payload), here=small)

    def refuse(self, error: Exception) -> None:
        """An error is the reply."""
        name, text = name_of(error)
        self.reply(text, name)


def cancel_again() -> None:
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
