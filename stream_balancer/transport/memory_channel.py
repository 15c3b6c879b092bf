"""Channels within one event loop, for tests and simulations: no threads, no clock; every message goes through bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver, Sendable, refusal
from stream_balancer.wire.messages import Close, decode_message, encode_message

__all__ = ["MemoryChannel", "Wire"]


class Wire:
    """Joins two channels: ``wire.ends``. One queue for both directions; :meth:`hold` lets messages hang in it."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._held = self._busy = False
        self.ends = (MemoryChannel(self, 0), MemoryChannel(self, 1))

    def hold(self) -> None:
        """From now on messages wait in the wire, both ways."""
        self._held = True

    def release(self) -> None:
        """They arrive, in order."""
        self._held = False
        self._deliver()

    def cut(self, cause: str, *, seen_by: Iterable[int] = (0, 1)) -> None:
        """The connection breaks: what is in the wire is lost, and these ends see the loss. The other one does not yet
        know that nothing arrives any more."""
        self._queue.clear()
        for side in seen_by:
            self.ends[side]._end(ConnectionResetError(cause))

    def _carry(self, deliver: Callable[[], None]) -> None:
        self._queue.append(deliver)
        self._deliver()

    def _deliver(self) -> None:
        """Not from within itself: a reply waits its turn instead of nesting in the message that it answers."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue and not self._held and all(end._started for end in self.ends):
                self._queue.popleft()()
        finally:
            self._busy = False


class MemoryChannel(Channel):
    """One end. Belongs to one event loop."""

    threads, narrow = False, True

    def __init__(self, wire: Wire, side: int) -> None:
        self.wire = wire
        self._side = side
        self._receiver: Receiver
        self._started = self._closed = self._over = False

    def start(self, receiver: Receiver) -> None:
        self._receiver, self._started = receiver, True
        self.wire._deliver()

    def send(self, item: Sendable) -> None:
        if self._over or self._closed:
            return
        try:
            outgoing = item(self) if callable(item) else item
            if outgoing is None:
                return
            raw, buffers = _pack(outgoing)
        except Exception as error:  # noqa: BLE001 - as in every channel: what cannot be sent ends it
            self._fail(error)
            return
        peer, references = self.wire.ends[1 - self._side], outgoing.references
        self.wire._carry(lambda: peer._arrive(raw, buffers, references))

    def close(self, reason: str = "") -> None:
        self.send(Outgoing(Close(reason)))
        self._closed = True

    def wait_closed(self, timeout_s: float) -> None:
        """Nothing to wait for: what was sent has arrived, or hangs in the wire on purpose."""

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self.wire.cut("connection closed by peer")

    def _arrive(self, raw: bytes, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        if self._over:
            return
        try:
            sizes, message = decode_message(raw)
            if isinstance(message, Close):
                self.close()
                self._end(PeerClosed(message.reason))
                return
            targets = [self._receiver.allocate(size) for size in self._receiver.admit(message, sizes)]
            for target, buffer in zip(targets, buffers, strict=True):
                target[: buffer.numel()] = buffer
            self._receiver.receive(message, targets, references)
        except Exception as error:  # noqa: BLE001 - as in every channel: what a session raises ends it
            if (refused := refusal(error)) is None:
                self._fail(error)
            else:
                self.send(Outgoing(refused))
                self._end(error)

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.wire.cut("connection closed by peer")

    def _end(self, error: Exception) -> None:
        if not self._over:
            self._over = True
            self._receiver.ended(error)


def _pack(outgoing: Outgoing) -> tuple[bytes, list[Tensor]]:
    """The bytes of a message, and of each buffer behind it."""
    buffers = []
    for source in outgoing.sources:
        buffer = torch.empty(source.size, dtype=torch.uint8)
        for _ in source.fill(buffer):
            pass
        buffers.append(buffer)
        if source.sent is not None:
            source.sent()
    return encode_message(outgoing.message, tuple(source.size for source in outgoing.sources)), buffers
