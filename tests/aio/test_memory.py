"""The in-process transport keeps the contract, under virtual time, on both loops, with and without the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing import check_transport
from stream_balancer.testing.transports import CLAUSES, Opener
from stream_balancer.transport.memory import MemoryPort, MemoryTransport


class _Harness:
    def __init__(self, dp_size: int, through_wire: bool) -> None:
        self.transport = MemoryTransport(dp_size=dp_size, through_wire=through_wire)

    def connect(
        self,
        rank: int,
        *,
        dp_size: int | None = None,
        incarnation: int = 0,
        depth: int = 2,
        auto_ack: bool = True,
    ) -> RankFeed:
        port = self.transport.connect(rank, dp_size=dp_size, incarnation=incarnation, depth=depth)
        return RankFeed(port, auto_ack=auto_ack)

    def kill(self, feed: RankFeed) -> None:
        port = feed._port
        assert isinstance(port, MemoryPort)
        port.kill()


@asynccontextmanager
async def open_memory(dp_size: int, *, through_wire: bool) -> AsyncIterator[_Harness]:
    harness = _Harness(dp_size, through_wire)
    async with harness.transport:
        yield harness


@pytest.mark.parametrize("through_wire", [False, True])
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]], through_wire: bool) -> None:
    with anyio.fail_after(3600):  # virtual
        await clause(partial(open_memory, through_wire=through_wire))


async def test_contract() -> None:
    await check_transport(partial(open_memory, through_wire=True))
