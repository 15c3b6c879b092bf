"""gloo pairs keep the contract of channels, with and without shared memory: real threads, both ends in one process."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import torch.distributed as dist
from guard import GUARD_S

from stream_balancer.testing.channels import CLAUSES, Opener
from stream_balancer.transport.buffers import BufferPool
from stream_balancer.transport.channel import Channel
from stream_balancer.transport.gloo.channel import GlooChannel, LinkOptions
from stream_balancer.transport.gloo.pair import GlooPair


@asynccontextmanager
async def open_pair(*, shared_memory: bool) -> AsyncIterator[tuple[Channel, Channel]]:
    store = dist.HashStore()
    options = LinkOptions(linger_s=60.0, shared_memory=shared_memory)  # far above the guards: a hang shows
    ends = [
        GlooChannel(
            f"sb-test{side}",
            functools.partial(GlooPair, store, side, "127.0.0.1"),
            lambda: None,
            options,
            pool=BufferPool(2),
            offer=2 if side == 0 else None,
        )
        for side in (0, 1)
    ]
    try:
        yield ends[0], ends[1]
    finally:
        with anyio.CancelScope(shield=True):
            for end in ends:
                await anyio.to_thread.run_sync(end.abort)


OPENERS = {f"shared_memory={shared}": functools.partial(open_pair, shared_memory=shared) for shared in (False, True)}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.__name__)
async def test_clause(clause: Callable[[Opener], Awaitable[None]], opener: Opener) -> None:
    with anyio.fail_after(GUARD_S):
        await clause(opener)
