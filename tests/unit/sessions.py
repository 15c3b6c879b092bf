"""What tests of sessions have in common: a channel that only keeps what was sent, and the other side's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stream_balancer.transport.channel import Outgoing, Receiver, Sendable
from stream_balancer.transport.event_loop import InLoop
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.transport.request_messages import EncodedRequest
from stream_balancer.wire.messages import DeclareGroup, JoinProducer, Message, Owner, Put, PutGroup

OWNER = Owner("127.0.0.1", 1, "secret", "the owner")


class FakeChannel:
    """Keeps what was sent; makes what callables make at once, or when :meth:`turn` comes."""

    narrow = True

    def __init__(self, *, threads: bool = True, at_once: bool = True) -> None:
        self.threads, self._at_once = threads, at_once
        self._queue: list[Sendable] = []
        self.outgoing: list[Outgoing] = []
        self.sent: list[Message] = []
        self.closed: str | None = None
        self.aborted = False

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def send(self, item: Sendable) -> None:
        self._queue.append(item)
        if self._at_once:
            self.turn()

    def turn(self) -> None:
        while self._queue:
            item = self._queue.pop(0)
            made = item(self) if callable(item) else item
            if isinstance(made, Outgoing):
                self.outgoing.append(made)
                self.sent.append(made.message)

    def close(self, reason: str = "") -> None:
        self.closed = reason if self.closed is None else self.closed

    def wait_closed(self, timeout_s: float) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def at_once(function: Callable[[], object]) -> None:
    function()


def producer_session(
    channel: FakeChannel,
    limits: Limits | None = None,
    in_loop: InLoop | None = None,
    owner: Owner | None = None,
) -> ProducerSession:
    session = ProducerSession(channel, JoinProducer("a producer", owner), limits or Limits(), in_loop or at_once)
    channel.start(session)
    return session


def outgoing(put: EncodedRequest, number: int, first_payload: int = 0) -> tuple[Any, list[Tensor]]:
    """The message of a put that is sent under this number, and its buffers."""
    put.number, put.first_payload = number, first_payload
    message, sources, _ = put.outgoing()[:3]
    assert isinstance(message, (Put, PutGroup, DeclareGroup))
    return message, [torch.cat(list(source.pieces())) for source in sources if source.pieces is not None]


def send(receiver: Receiver, message: Message, buffers: Sequence[Tensor] = ()) -> None:
    """As a channel does when a message arrives."""
    sizes = tuple(buffer.numel() for buffer in buffers)
    targets = [receiver.allocate(size) for size in receiver.admit(message, sizes)]
    for target, buffer in zip(targets, buffers, strict=True):
        target[: buffer.numel()] = buffer
    receiver.receive(message, targets, ())
