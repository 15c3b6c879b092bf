"""Shares within one event loop: for tests and simulations. No threads, no clock: works under virtual time.

::

    transport = MemoryTransport(dp_size=2)
    feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Self

import anyio
import torch

from stream_balancer.errors import (
    AlreadyInUseError,
    ClosedResourceError,
    EndOfStream,
    RankLostError,
    WouldBlock,
    to_raise,
)
from stream_balancer.transport import StepDone
from stream_balancer.transport.event_loop import Arrivals
from stream_balancer.transport.memory_channel import Wire
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.put_ledger import Limits
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import JoinProducer, WelcomeProducer
from stream_balancer.wire.share import decode, encode

__all__ = ["MemoryLink", "MemoryPort", "MemoryTransport"]


class MemoryLink:
    """The controller's end."""

    def __init__(self, port: MemoryPort) -> None:
        self.rank = port.rank
        self.incarnation = port.incarnation
        self._port = port
        self._granted = port.depth
        self._reports: deque[StepDone] = deque()
        self._error: Exception | None = None
        self._ended = False
        self._callback: Callable[[], None] = lambda: None

    @property
    def credits(self) -> int:
        """Shares the rank has room for now."""
        return 0 if self._error is not None or self._ended else self._granted

    @property
    def live(self) -> bool:
        """False once lost or closed."""
        return self._error is None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        self._callback = callback

    def send(self, share: RankBatch) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._error is not None:
            raise to_raise(self._error)
        if self._ended:
            raise ClosedResourceError
        if self._granted == 0:
            raise WouldBlock
        self._granted -= 1
        self._port._arrive(share)

    def report(self) -> StepDone | None:
        """See :class:`~stream_balancer.transport.Link`."""
        if self._reports:
            return self._reports.popleft()
        if self._error is not None:
            raise to_raise(self._error)
        return None

    def end(self) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        if not self._ended:
            self._ended = True
            self._port._finish(EndOfStream())

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Link`."""
        self._fail(ClosedResourceError())
        self._port._controller_lost("its link was closed")

    # called by the port

    def _on_taken(self) -> None:
        self._granted += 1
        self._callback()

    def _on_report(self, done: StepDone) -> None:
        if self._error is None:
            self._reports.append(done)
            self._callback()

    def _on_bye(self) -> None:
        self._fail(EndOfStream() if self._ended else self._lost("the rank closed its feed"))

    def _lost(self, cause: str) -> RankLostError:
        return RankLostError(f"rank {self.rank} was lost: {cause}. Connect it again", rank=self.rank, cause=cause)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._callback()


class MemoryPort:
    """The rank's end. Belongs to the event loop of its transport."""

    def __init__(self, rank: int, dp_size: int, incarnation: int, depth: int, through_wire: bool) -> None:
        self.rank = rank
        self.dp_size = dp_size
        self.incarnation = incarnation
        self.depth = depth
        self._through_wire = through_wire
        self._queue: deque[RankBatch] = deque()
        self._end: Exception | None = None
        self._link: MemoryLink | None = None
        self._callback: Callable[[], None] = lambda: None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self._callback = callback

    def take(self) -> RankBatch | None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        if self._queue:
            share = self._queue.popleft()
            if self._link is not None:
                self._link._on_taken()
            return share
        if self._end is not None:
            raise to_raise(self._end)
        return None

    def report(self, done: StepDone) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        if self._link is not None:
            self._link._on_report(done)

    def leave(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self._leave(MemoryLink._on_bye)

    def close(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self.leave()

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.RankPort`."""
        self.close()

    def kill(self) -> None:
        """Be gone without a word, as a killed process."""
        self._leave(lambda link: link._fail(link._lost("connection closed by peer")))

    def _leave(self, tell: Callable[[MemoryLink], None]) -> None:
        self._finish(ClosedResourceError())
        self._queue.clear()
        if self._link is not None:
            tell(self._link)

    # called by the link

    def _arrive(self, share: RankBatch) -> None:
        if self._end is None:
            self._queue.append(_carry(share) if self._through_wire else share)
            self._callback()

    def _finish(self, error: Exception) -> None:
        if self._end is None:
            self._end = error
            self._callback()

    def _controller_lost(self, cause: str) -> None:
        message = f"rank {self.rank} lost its controller: {cause}. Start the controller again and open a new RankFeed"
        self._finish(RankLostError(message, rank=self.rank, cause=cause))


def _carry(share: RankBatch) -> RankBatch:
    """To bytes and back, as between processes."""
    encoded = encode(share)
    slab = torch.empty(encoded.frame.total_bytes, dtype=torch.uint8)
    for _ in encoded.fill(slab):
        pass
    return decode(encoded.frame, slab)


class MemoryProducerPort(ProducerPort):
    """A producer's end; ``wire.hold()`` lets messages hang."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(threads=False)
        self.wire = wire


class MemoryTransport:
    """The controller's side, and where ranks of the same event loop connect."""

    def __init__(self, *, dp_size: int, through_wire: bool = False) -> None:
        """``through_wire``: shares go to bytes and back, as between processes, instead of being handed over as they
        are."""
        self.dp_size = dp_size
        self._through_wire = through_wire
        self._arrived: deque[MemoryLink] = deque()
        self._links: dict[int, MemoryLink] = {}
        self._arrival: anyio.Event | None = None
        self._closed = False
        self._producers: Arrivals[ProducerSession] = Arrivals()
        self._sessions: list[ProducerSession] = []

    def connect_producer(self, **limits: int) -> MemoryProducerPort:
        """A producer's port; give it to ``sb.connect``. ``limits``: ``staged_bytes``, ``max_put_bytes``."""
        wire, allowed = Wire(), Limits(**limits).check()
        here, there = wire.ends
        session = ProducerSession(here, JoinProducer("memory"), allowed, lambda function: function())
        here.start(session)
        port = MemoryProducerPort(wire)
        port.opened(there, WelcomeProducer(*allowed))
        self._sessions.append(session)
        self.readmit(session)
        return port

    def readmit(self, link: ProducerSession) -> None:
        """Give a producer back, for the next ``attend``."""
        self._producers.add(link)

    async def accept_producer(self) -> ProducerSession:
        """The next producer. If cancelled, none is lost."""
        return await self._producers.next()

    def connect(self, rank: int, *, dp_size: int | None = None, incarnation: int = 0, depth: int = 2) -> MemoryPort:
        """A rank's port; give it to RankFeed. A refused one raises in the feed's iteration, as between processes."""
        port = MemoryPort(rank, self.dp_size if dp_size is None else dp_size, incarnation, depth, self._through_wire)
        refusal = self._judge(port)
        if refusal is not None:
            port._finish(refusal)
            return port
        before = self._links.get(rank)
        link = port._link = self._links[rank] = MemoryLink(port)
        if before is not None:
            before._fail(before._lost(f"superseded by incarnation {incarnation}"))
            before._port._controller_lost(f"superseded by incarnation {incarnation}")
        self._arrived.append(link)
        if self._arrival is not None:
            self._arrival.set()
        return port

    def _judge(self, port: MemoryPort) -> Exception | None:
        if self._closed:
            return RankLostError("the transport is closed", rank=port.rank, cause="closed")
        if port.dp_size != self.dp_size or not 0 <= port.rank < self.dp_size:
            return ValueError(
                f"rank {port.rank} announces dp_size={port.dp_size}, but the controller balances for "
                f"dp_size={self.dp_size}. Give both the same number of data-parallel ranks"
            )
        before = self._links.get(port.rank)
        if before is not None and before.live and before.incarnation >= port.incarnation:
            return AlreadyInUseError(
                f"rank {port.rank} is already connected (incarnation {before.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation"
            )
        return None

    async def accept(self) -> MemoryLink:
        """See :class:`~stream_balancer.transport.Transport`."""
        await anyio.lowlevel.checkpoint()
        while not self._arrived:
            if self._closed:
                raise ClosedResourceError
            self._arrival = anyio.Event()
            await self._arrival.wait()
        return self._arrived.popleft()

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Transport`."""
        self._closed = True
        for link in self._links.values():
            await link.aclose()
        for session in self._sessions:
            await session.aclose()
        self._producers.fail(ClosedResourceError())
        if self._arrival is not None:
            self._arrival.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
