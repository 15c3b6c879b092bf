"""Controller, ranks and producers in one event loop, for tests and simulations. No threads, no sockets: it works in
virtual time, and what is tested over it is what ships. ::

    network = MemoryNetwork(dp_size=2)
    feeds = [sb.RankFeed(network.connect(rank)) for rank in range(2)]
    producer = sb.connect(network.connect_producer())
    await sb.serve(balancer, network)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import count
from typing import Self

from stream_balancer.errors import refused_error
from stream_balancer.net.address import tell_dialler
from stream_balancer.net.connection import Arrived, Connection, Failed, Welcomed
from stream_balancer.net.listener import CLOSED
from stream_balancer.net.memory import LoopIo, Wire
from stream_balancer.net.messages import About, Join, Welcome
from stream_balancer.net.service import Service
from stream_balancer.wire.payload import Pool


class MemoryNetwork:
    """The controller's side: ``listen``, and where ranks and producers of the same event loop connect."""

    address = "memory://controller"

    def __init__(self, *, dp_size: int) -> None:
        self.dp_size = dp_size
        self.io, self.pool = LoopIo(), Pool()
        self._listeners: dict[str, MemoryListener] = {}
        self._waiting: list[Callable[[], object]] = []
        self._owners = count(1)
        self._closed = False

    @cached_property
    def service(self) -> Service:
        """Controller's end of all connections."""
        # kept here and in no table: a service refers to its network, so an entry of it would never go
        return Service(self.listen)

    def listen(self, arrived: Arrived, *, address: str = address) -> MemoryListener:
        """``arrived`` is called for each peer, also for those who came before."""
        listener = self._listeners[address] = MemoryListener(self, address, arrived)
        if address == self.address:
            self._dial_waiting()
        return listener

    def connect(
        self, rank: int, *, dp_size: int | None = None, incarnation: int = 0, depth: int = 2,
        seat: int = 0, seats: int = 1, rejoin: bool = False,
    ) -> MemoryPeer:  # fmt: skip
        """Where a rank is; give it to RankFeed. A refused one raises in the feed's iteration, as between processes."""
        peer = self.connect_producer(rejoin=rejoin)
        peer.who = About(rank, dp_size or self.dp_size, incarnation, depth, seat, seats)
        return peer

    def connect_producer(self, *, rejoin: bool = False) -> MemoryPeer:
        """Where a producer is; give it to ``sb.connect``. ``rejoin``: it connects again if it is cut."""
        return MemoryPeer(self, self.address, rejoin=rejoin)

    def dialer(self, address: str = address) -> MemoryPeer:
        """Where anybody else is."""
        return MemoryPeer(self, address)

    def resize(self, dp_size: int) -> None:
        """So many ranks from now on."""
        self.dp_size = dp_size

    async def aclose(self) -> None:
        """End of joining. Idempotent."""
        # before the listeners go: who dials meanwhile must hear that it is over, and not wait
        self._closed = True
        for listener in [*self._listeners.values()]:
            listener.close()
        self._dial_waiting()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _dial(self, peer: MemoryPeer, join: Join, welcomed: Welcomed, failed: Failed) -> None:
        listener = self._listeners.get(peer.address)
        if listener is not None:
            wire = Wire(self.io, self.pool, join)
            # the codec and the handshake are those of sockets; only the bytes' way is another
            there, here = wire.ends
            there.arrived, here.welcomed = listener.arrived, welcomed
            here.gone = partial(tell_dialler, peer.address, here, failed)
            peer._begin(wire)
        elif peer.address != self.address:
            failed(ConnectionRefusedError(f"nobody listens at {peer.address}"))
        elif self._closed:
            failed(refused_error("closed", CLOSED))
        else:
            self._waiting.append(lambda: self._dial(peer, join, welcomed, failed))

    def _dial_waiting(self) -> None:
        # taken first: one that fails may dial again at once
        waiting, self._waiting = self._waiting, []
        for dial in waiting:
            self.io.do(dial)


class MemoryListener:
    """An address of a network."""

    def __init__(self, network: MemoryNetwork, address: str, arrived: Arrived) -> None:
        self.io, self.address, self.arrived = network.io, address, arrived
        self._network = network

    def close(self) -> None:
        """No more peers; those who are in stay. Idempotent."""
        # another one may listen at this address by now
        if self._network._listeners.get(self.address) is self:
            del self._network._listeners[self.address]


class MemoryPeer:
    """A dialer, what its rank or producer says of itself, and the wire between."""

    who: About
    """Facts of a rank, which its feed tells."""

    def __init__(self, network: MemoryNetwork, address: str, *, rejoin: bool = False) -> None:
        self.io, self.pool, self.network, self.address = network.io, network.pool, network, address
        self.rejoin = rejoin
        """Connects again if it is cut."""
        self.joined = 0
        """Times that it was welcomed."""
        self.wire: Wire | None = None
        """The newest."""
        self._holds = False

    def dial(self, join: Join, welcomed: Welcomed, failed: Failed) -> None:
        """Connect. Either is called, once."""

        def count(connection: Connection, welcome: Welcome) -> None:
            self.joined += 1
            welcomed(connection, welcome)

        self.io.do(lambda: self.network._dial(self, join, count, failed))

    def elsewhere(self, address: str) -> MemoryPeer:
        """A dialer for another address of the same network."""
        return self.network.dialer(address)

    def listen(self, arrived: Arrived) -> MemoryListener:
        """An address of its own, where others of the network come in."""
        return self.network.listen(arrived, address=f"memory://owner{next(self.network._owners)}")

    def hold(self) -> None:
        """Messages of both directions wait in between, until :meth:`release` or the next connection."""
        self._holds = True
        if self.wire is not None:
            self.wire.hold()

    def release(self) -> None:
        """Held messages arrive, in order."""
        self._holds = False
        if self.wire is not None:
            self.wire.release()

    def cut(self, cause: str = "the network broke", *, seen_by: Iterable[int] = (0, 1)) -> None:
        """The connection breaks without a word, and what was in between is lost. Who sees it: 0 the controller, 1 the
        peer; the other does not know yet that nothing arrives any more."""
        if self.wire is not None:
            self.wire.cut(cause, seen_by=seen_by)

    def _begin(self, wire: Wire) -> None:
        held, self._holds = self._holds and self.wire is None, False
        self.wire = wire
        if held:
            wire.hold()
        wire.begin()
