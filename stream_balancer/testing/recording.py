"""The receiver that channels are checked with: it accepts everything, and remembers what the channel called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stream_balancer.testing.harness import until
from stream_balancer.transport.channel import Source
from stream_balancer.wire.messages import Message

__all__ = ["Recorder", "source_of"]


class Recorder:
    """A receiver that accepts everything, and remembers it."""

    def __init__(self, *, spare: int = 0) -> None:
        """``spare``: bytes to allocate beyond what comes."""
        self.events: list[str] = []
        """What the channel called, in order."""
        self.messages: list[Message] = []
        self.buffers: list[list[bytes]] = []
        """What came behind each message."""
        self.error: Exception | None = None
        """What ended it."""
        self.on_message: Callable[[Message], object] = lambda message: None
        self._spare = spare
        self._sizes: Sequence[int] = ()

    def admit(self, message: Message, sizes: Sequence[int]) -> Sequence[int]:
        self.events.append("admit")
        self._sizes = sizes
        return [size + self._spare for size in sizes]

    def allocate(self, size: int) -> Tensor:
        self.events.append(f"allocate {size}")
        return torch.empty(size, dtype=torch.uint8)

    def receive(self, message: Message, buffers: Sequence[Tensor], references: Sequence[object]) -> None:
        self.events.append("receive")
        assert all(buffer.numel() == size + self._spare for buffer, size in zip(buffers, self._sizes, strict=True))
        self.buffers.append(
            [buffer[:size].numpy().tobytes() for buffer, size in zip(buffers, self._sizes, strict=True)]
        )
        self.messages.append(message)
        self.on_message(message)

    def ended(self, error: Exception) -> None:
        self.events.append("ended")
        self.error = error

    def stalled(self, seconds: float) -> None:
        pass

    async def arrived(self, count: int) -> None:
        """Wait for so many messages."""
        await until(lambda: len(self.messages) >= count or self.error is not None)
        assert len(self.messages) >= count, f"ended after {len(self.messages)} of {count} messages: {self.error!r}"

    async def end(self) -> Exception:
        """What ended it, once that has come; nothing may come after it."""
        await until(lambda: self.error is not None)
        assert self.events.count("ended") == 1, "ended() was called twice"
        assert self.events[-1] == "ended", "something came after ended()"
        assert self.error is not None
        return self.error


def source_of(tensor: Tensor, *, sent: Callable[[], object] | None = None) -> Source:
    """A source that sends ``tensor`` (``[n]`` uint8), a megabyte at a time."""

    def fill(buffer: Tensor) -> Iterator[int]:
        for at in range(0, tensor.numel(), 2**20):
            yield at
            buffer[at : at + 2**20] = tensor[at : at + 2**20]
        yield tensor.numel()

    return Source(tensor.numel(), fill, lambda: [tensor], sent)
