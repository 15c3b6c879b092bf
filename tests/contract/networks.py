"""Ways to reach a controller: what a promise of the contract is given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import helpers

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork

KINDS = ("memory", "socket", "shared_memory")


class Network:
    """A controller's transport, and who connects to it."""

    def __init__(self, kind: str, transport: MemoryNetwork | sb.TorchTransport) -> None:
        self.transport = transport
        self._movers = ["shared_memory"] if kind == "shared_memory" else []
        self._peers: list[sb.RankFeed | sb.Producer] = []

    def feed(self, rank: int = 0, *, auto_ack: bool = True, next_step: int = 0, **join: Any) -> sb.RankFeed:
        """A rank's feed, as a trainer would open it."""
        if isinstance(self.transport, MemoryNetwork):
            feed = sb.RankFeed(self.transport.connect(rank, **join), auto_ack=auto_ack, next_step=next_step)
        else:
            given = {"dp_size": self.transport.dp_size, "movers": self._movers, **join}
            feed = sb.RankFeed(self.transport.address, rank=rank, auto_ack=auto_ack, next_step=next_step, **given)
        self._peers.append(feed)
        return feed

    def producer(self, **options: Any) -> sb.Producer:
        """Another one, as a rollout worker would connect it."""
        if isinstance(self.transport, MemoryNetwork):
            producer = sb.connect(self.transport.connect_producer(**options))
        else:
            producer = sb.connect(self.transport.address, **options)
        self._peers.append(producer)
        return producer

    async def leave(self) -> None:
        """Everybody."""
        async with anyio.create_task_group() as tasks:
            for peer in self._peers:
                tasks.start_soon(peer.aclose)


@asynccontextmanager
async def open_network(kind: str, dp_size: int) -> AsyncIterator[Network]:
    if kind == "memory":
        transport: Any = MemoryNetwork(dp_size=dp_size)
    else:
        transport = sb.TorchTransport.listen(dp_size=dp_size, movers=["shared_memory"] * (kind == "shared_memory"))
    with anyio.fail_after(1e6 if kind == "memory" else 30.0):
        async with transport:
            network = Network(kind, transport)
            try:
                yield network
            finally:
                with anyio.CancelScope(shield=True):
                    await network.leave()


async def until(condition: Callable[[], bool]) -> None:
    """A way to see what notifies nobody; time passes."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def drain(feed: sb.RankFeed) -> list[Any]:
    return [step async for step in feed]


kill = helpers.kill
