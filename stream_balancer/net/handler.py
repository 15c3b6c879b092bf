"""Partners of a connection: the handler of its messages, and the movers of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import Envelope, Message
from stream_balancer.wire.payload import Memory, Payload


class Handler(Protocol):
    """Gets the messages. Called in the I/O thread; raises WireError for what may not come now."""

    def admit(self, message: Message, total: int) -> None:
        """``total`` bytes are about to be allocated for this message."""

    def receive(self, message: Message, memory: Memory | None) -> None:
        """Called in the order of sending, whichever way the bytes came."""

    def ended(self, end: ConnectionEnd) -> None:
        """The end: once, and nothing after it. ``end.__cause__`` is the error behind it, if there is one."""


class Mover(Protocol):
    """A way for bytes, one end of it; see :mod:`stream_balancer.net.movers`. Called in the I/O thread."""

    ready: bool

    @property
    def number(self) -> int:
        """``via`` of its messages."""
        ...

    def begin(self) -> None:
        """Set it up with the other end."""

    def send(self, payload: Payload, go: Callable[[Sequence[int]], None]) -> bool:
        """``go(where)`` lets the message leave; those behind it wait for that. False: not now, use the socket."""
        ...

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        """``ready(memory)``, once all runs are there; messages behind it wait for that. Raises WireError."""

    def note(self, body: bytes) -> None:
        """The other end's mover says something. Raises WireError for what makes no sense."""

    def close(self) -> None:
        """The connection is over."""
