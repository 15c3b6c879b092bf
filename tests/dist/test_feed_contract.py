"""torch.distributed keeps the transport contract: real gloo pairs and threads, both ends in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from stream_balancer.feed import RankFeed
from stream_balancer.testing import check_transport
from stream_balancer.testing.transports import CLAUSES, Opener
from stream_balancer.transport.torch_dist import GlooPort, TorchTransport

LINGER_S = 35.0  # more than the guards: a good-bye that is not answered shows as a hang


class _Harness:
    def __init__(self, dp_size: int) -> None:
        self.transport = TorchTransport.listen(dp_size=dp_size, linger_s=LINGER_S)
        self.feeds: list[RankFeed] = []

    def connect(self, rank: int, *, dp_size: int | None = None, incarnation: int = 0, depth: int = 2) -> RankFeed:
        feed = RankFeed(
            self.transport.address,
            rank=rank,
            dp_size=dp_size or self.transport.dp_size,
            incarnation=incarnation,
            depth=depth,
            linger_s=LINGER_S,
        )
        self.feeds.append(feed)
        return feed

    def kill(self, feed: RankFeed) -> None:
        port = feed._port
        assert isinstance(port, GlooPort)
        port._shut()  # the sockets close without a good-bye


@asynccontextmanager
async def open_gloo(dp_size: int) -> AsyncIterator[_Harness]:
    harness = _Harness(dp_size)
    async with harness.transport:
        try:
            yield harness
        finally:
            with anyio.CancelScope(shield=True):
                for feed in harness.feeds:
                    await feed.aclose()


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]]) -> None:
    with anyio.fail_after(30):
        await clause(open_gloo)


async def test_contract() -> None:
    await check_transport(open_gloo)
