"""A transport within one event loop, for tests and simulations. No threads, no clock: works in virtual time.

Its ends are the sessions of every transport, its channels carry bytes: what is tested over it is what ships. ::

    transport = MemoryTransport(dp_size=2)
    feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
"""

from __future__ import annotations

from collections.abc import Callable

from stream_balancer.errors import refused_error
from stream_balancer.transport.admission import AdmittingTransport
from stream_balancer.transport.channel import PayloadSource
from stream_balancer.transport.event_loop import at_once
from stream_balancer.transport.memory_channel import Wire
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.rank_port import RankPort
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.wire.messages import JoinProducer, JoinRank, WelcomeProducer

__all__ = ["MemoryTransport"]

_MAX_BATCH_BYTES = 2**40  # no bound: nothing is received from another process


class MemoryProducerPort(ProducerPort):
    """A producer's end; ``wire.hold()`` lets messages hang, ``wire.cut()`` breaks the connection."""

    wire: Wire

    def __init__(self, reconnect: Callable[[MemoryProducerPort], object] | None) -> None:
        super().__init__(threads=False, reconnect=None if reconnect is None else lambda: reconnect(self))


class MemoryTransport(AdmittingTransport):
    """The controller's side, and where ranks and producers of the same event loop connect."""

    def __init__(self, *, dp_size: int) -> None:
        super().__init__(dp_size)

    def connect_producer(self, *, rejoin: bool = False, **limits: int) -> MemoryProducerPort:
        """A producer's port; give it to ``sb.connect``. ``rejoin``: it connects again if its wire is cut. ``limits``:
        ``staged_bytes``, ``max_put_bytes``."""
        allowed = Limits(**limits).check()

        def join(port: MemoryProducerPort) -> None:
            port.wire = Wire()
            here, there = port.wire.ends
            request = JoinProducer("memory", producer_id=port.producer_id)
            session = ProducerSession(here, request, allowed, at_once)
            here.start(session)
            port.opened(there, WelcomeProducer(*allowed))
            self._producer_sessions.add(session)
            self.readmit(session)

        port = MemoryProducerPort(join if rejoin else None)
        join(port)
        return port

    def connect(
        self,
        rank: int,
        *,
        dp_size: int | None = None,
        incarnation: int = 0,
        depth: int = 2,
        role: str = "",
        payloads: PayloadSource | None = None,
    ) -> RankPort:
        """A rank's port; give it to RankFeed. A refused one raises in the feed's iteration, as between processes."""
        dp_size = self.dp_size if dp_size is None else dp_size
        request = JoinRank(rank, dp_size, incarnation, depth, _MAX_BATCH_BYTES, role=role)
        here, there = Wire().ends
        port = RankPort(there, request, payloads=payloads)
        refused = self.admission.refusal(request)
        if refused is not None:
            port.ended(refused_error(refused.reason, refused.text))
            return port
        session = RankSession(here, request, at_once)
        here.start(session)
        port.start()
        self.admission.admit(session)
        return port
