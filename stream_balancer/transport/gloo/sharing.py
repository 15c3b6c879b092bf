"""A channel's buffers in shared memory: one end offers it and packs there, the other one maps it and reads.

::

    Offers   ProbeMemory, MapBuffer, SharedBuffers   -->   Maps
    Offers   <--   ProbeResult, ReleaseBuffers             Maps

What these messages do at either end, and nothing else: the memory itself is ``shared_memory``, threads and packets are
the channel's, which calls this in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.channel import Outgoing, Source
from stream_balancer.transport.gloo.packets import INSTALL, Packet
from stream_balancer.transport.gloo.shared_memory import OfferedBuffers, SharedViews, available
from stream_balancer.wire.messages import (
    MapBuffer,
    Message,
    ProbeMemory,
    ProbeResult,
    ReleaseBuffers,
    SharedBuffers,
    encode_message,
)

__all__ = ["Maps", "Offers", "offers_or_none"]


def offers_or_none(keep: int, on_answer: Callable[[], object]) -> Offers | None:
    """:class:`Offers`, if this system can share memory, and has some left."""
    if available():
        with suppress(OSError):
            return Offers(keep, on_answer)
    return None


class Offers:
    """The end that packs."""

    def __init__(self, keep: int, on_answer: Callable[[], object]) -> None:
        """``keep``: how many idle buffers are kept. ``on_answer`` is called once :attr:`accepted` is known. Raises
        OSError where memory cannot be shared."""
        self._buffers = OfferedBuffers(keep)
        self._on_answer = on_answer
        self.accepted: bool | None = None
        """Whether the peer can map this memory; None: it has not answered yet."""

    def probe(self) -> ProbeMemory:
        """The first message on the channel, which the peer answers."""
        return self._buffers.probe()

    def handle(self, message: Message) -> bool:
        """Act on a message of the peer's; False if it is none of these. Raises WireError if it makes no sense."""
        match message:
            case ProbeResult():
                self.accepted = message.ok
                self._on_answer()
            case ReleaseBuffers():
                for number in message.numbers:
                    self._buffers.give_back(number)
            case _:
                return False
        return True

    def fill(self, sources: Sequence[Source], packet: Packet) -> None:
        """Write ``sources`` into shared memory, and what the peer must know before their message into ``packet``.

        Raises OSError if there is no memory, or no descriptor, for all of them. Then the peer has got nothing
        that it would wait for: it knows some buffers more, which are idle.
        """
        numbers = []
        try:
            for source in sources:
                lent = self._buffers.lend(source.size)
                numbers.append(lent.number)
                for news in lent.news:
                    packet.add(encode_message(news), [lent.keep])
                deque(source.fill(lent.memory), maxlen=0)
        except OSError:
            for number in numbers:
                self._buffers.give_back(number)
            raise
        packet.add(encode_message(SharedBuffers(tuple(numbers))))

    def close(self) -> None:
        """Release everything; what the peer has mapped lives on there. Idempotent."""
        self._buffers.close()


class Maps:
    """The end that reads."""

    def __init__(self, send: Callable[[Outgoing], object], on_freed: Callable[[], object], *, allowed: bool) -> None:
        """``on_freed``: there is something to :meth:`release`. It is called wherever the last view of a buffer dies,
        perhaps inside a garbage collection, so it must not wait for a lock. ``allowed`` False: never maps anything."""
        self._send, self._on_freed, self._allowed = send, on_freed, allowed
        self._views = SharedViews(self._on_last_view_gone)
        self._freed: deque[int] = deque()
        self._next: tuple[int, ...] = ()  # where the buffers of the next message lie

    def handle(self, message: Message) -> bool:
        """Act on a message of the peer's; False if it is none of these. Raises WireError if it makes no sense."""
        match message:
            case ProbeMemory():
                self._send(Outgoing(ProbeResult(self._allowed and self._views.probe(message))))
            case MapBuffer():
                self._views.announce(message)
            case SharedBuffers():
                self._next = message.numbers
            case _:
                return False
        return True

    def buffers(self, sizes: Sequence[int]) -> list[Tensor] | None:
        """``[size]`` uint8 for each buffer of a message, if they lie in shared memory. Each is reported once its last
        view has died."""
        numbers, self._next = self._next, ()
        if not numbers:
            return None
        if len(numbers) != len(sizes):
            raise WireError(f"{len(sizes)} buffers in {len(numbers)} of shared memory. {INSTALL}")
        return [self._views.lend(number, size) for number, size in zip(numbers, sizes, strict=True)]

    @property
    def must_release(self) -> bool:
        """Whether the peer has to hear of buffers that nobody looks at any more."""
        return bool(self._freed)

    def release(self) -> ReleaseBuffers:
        """Says so, of all there are by now."""
        return ReleaseBuffers(tuple(self._freed.popleft() for _ in range(len(self._freed))))

    def _on_last_view_gone(self, number: int) -> None:
        self._freed.append(number)
        self._on_freed()
