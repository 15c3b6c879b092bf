"""The sessions of ranks keep the contract of transports over memory, in virtual time, on both loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, check_transport
from stream_balancer.testing.transports import CLAUSES, Opener
from stream_balancer.transport.rank_port import RankPort


class _Harness:
    def __init__(self, dp_size: int) -> None:
        self.transport = MemoryNetwork(dp_size=dp_size)

    def connect(self, rank: int, *, auto_ack: bool = True, **join: Any) -> sb.RankFeed:
        return sb.RankFeed(self.transport.connect(rank, **join), auto_ack=auto_ack)

    def kill(self, feed: sb.RankFeed) -> None:
        port = feed._port
        assert isinstance(port, RankPort)
        port.abort()


@asynccontextmanager
async def open_memory(dp_size: int) -> AsyncIterator[_Harness]:
    harness = _Harness(dp_size)
    async with harness.transport:
        yield harness


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]]) -> None:
    with anyio.fail_after(3600):  # virtual
        await clause(open_memory)


async def test_contract() -> None:
    await check_transport(open_memory)
