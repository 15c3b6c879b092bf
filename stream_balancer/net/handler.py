"""Partners of a connection: the handler of its messages, and the movers of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stream_balancer.errors import WireError
from stream_balancer.net.errors import Ended
from stream_balancer.net.messages import Envelope, Message
from stream_balancer.wire.payload import Memory, Payload

__all__ = ["Handler", "Mover", "Nobody"]


class Handler(Protocol):
    """Gets the messages. Called in the I/O thread; raises WireError for what may not come now."""

    def admit(self, message: Message, total: int) -> None:
        """``total`` bytes are about to be allocated for this message."""

    def receive(self, message: Message, memory: Memory | None) -> None:
        """Called in the order of sending, whichever way the bytes came."""

    def ended(self, end: Ended) -> None:
        """The end: once, and nothing after it. ``end.__cause__`` is the error behind it, if there is one."""


class Mover(Protocol):
    """A way for bytes, one end of it. Called in the I/O thread. See :mod:`stream_balancer.net.movers`."""

    ready: bool

    def begin(self) -> None: ...
    def send(
        self, payload: Payload, sent: Callable[[], object] | None, go: Callable[[Sequence[int]], None]
    ) -> bool: ...
    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None: ...
    def note(self, body: bytes) -> None: ...
    def close(self) -> None: ...


class Nobody:
    """Takes what comes after the end."""

    def admit(self, message: Message, total: int) -> None:
        raise WireError("bytes after the end")

    def receive(self, message: Message, memory: Memory | None) -> None: ...

    def ended(self, end: Ended) -> None: ...
