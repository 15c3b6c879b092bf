"""A channel of actor calls: from any process to the actor that hosts the balancer. Knows Ray's calls, no rollout.

::

    caller.CallingChannel (any process)  --_join(key, request, [lifeline])---------->  actor.ActorChannels
                                         <-- welcome, or why not --------------------  (the actor's event loop)
                                         --_exchange(key, number, packed messages)-->  actor.ActorChannel
                                         <-- what was answered by then --------------
                                         --_poll(key)------------------------------>
                                         <-- what came up since --------------------   one is always pending: its
                                                                                       failure tells of the actor

Only the caller can call, and an asynchronous actor starts calls in any order: messages are numbered both ways, and
received in order. The actor learns that a caller died from its lifeline: the result of ``_hold``, an object that the
caller owns and that comes only once the channel is over.

A packed message is ``(bytes, [arrays], [references])``: msgpack of ours, buffers, and Ray's object references, which
must be arguments of a call, else Ray does not count them and their objects vanish. Nothing of ours is unpickled.

Here: what both ends have in common. No call is made, and none is answered.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Channel, Outgoing, PeerClosed, Receiver
from stream_balancer.wire.messages import Close, decode_message, encode_message

__all__ = ["ChannelEnd", "Inbox", "Packed", "Reply", "cause_of", "pack"]

Packed = tuple[bytes, list[NDArray[np.uint8]], list[Any]]
"""(message, buffers, object references)."""
Reply = tuple[int, list[Packed]]
"""(number of the first message, messages)."""
T = TypeVar("T")


class Inbox(Generic[T]):
    """Puts numbered items in order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def add(self, number: int, item: T) -> list[T]:
        """The items whose turn has come."""
        self._early[number] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class ChannelEnd(Channel):
    """What both ends have in common: packing, receiving, and the state of closing."""

    narrow = True

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._close_sent = self._close_received = False
        self._broken = False
        """Over, and not by closing."""

    @property
    def over(self) -> bool:
        """Nothing is sent or received any more."""
        return self._broken or (self._close_sent and self._close_received)

    def _receive(self, packed: Packed) -> None:
        """Hand a message to the session. Raises what the session raises."""
        assert self._receiver is not None
        raw, arrays, references = packed
        sizes, message = decode_message(raw)
        if isinstance(message, Close):
            self._close_received = True
            self.close()
            self._receiver.ended(PeerClosed(message.reason))
            return
        if sizes != tuple(array.nbytes for array in arrays):
            raise WireError(f"a {type(message).__name__} message announces {sizes} bytes, and brings others")
        buffers = [self._receiver.allocate(size) for size in self._receiver.admit(message, sizes)]
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer.numpy()[: array.size], array)
        self._receiver.receive(message, buffers, references)

    def _break(self, error: Exception) -> None:
        """The end, unless it is over already."""
        if not self.over:
            self._broken = True
            if self._receiver is not None and not self._close_received:
                self._receiver.ended(error)


def pack(outgoing: Outgoing) -> Packed:
    """A message with its buffers written out. O(bytes)."""
    message, sources, references = outgoing
    arrays = [np.empty(source.size, np.uint8) for source in sources]
    for source, array in zip(sources, arrays, strict=True):
        deque(source.fill(torch.from_numpy(array)), maxlen=0)
        if source.sent is not None:
            source.sent()
    return encode_message(message, tuple(source.size for source in sources)), arrays, list(references)


def cause_of(error: BaseException) -> str:
    """A Ray error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
