"""A balancer, its ranks in one event loop, and what their trainers got."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from helpers import attend
from kept import Kept

import stream_balancer as sb
from stream_balancer.rollouts import RankBatch, Rollout
from stream_balancer.testing import MemoryNetwork


@asynccontextmanager
async def serving(
    balancer: sb.StreamBalancer, *, by: Callable[..., Any] = sb.serve, until_end: bool = True, **options: Any
) -> AsyncIterator[tuple[sb.StreamBalancer, MemoryNetwork, TaskGroup]]:
    """A balancer that is served, its network, and tasks beside; until all is done where it was ended and ``until_end``,
    else until the block is left."""
    async with balancer, MemoryNetwork(dp_size=balancer.config.dp_size) as network, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(by, **options), balancer, network)
        yield balancer, network, tasks
        if not (until_end and balancer.ended):
            tasks.cancel_scope.cancel()


attended = partial(serving, by=attend, until_end=False)
"""The same for producers only: the test itself takes the batches."""


def feeds_of(network: MemoryNetwork, *, depth: int = 2, **options: Any) -> list[sb.RankFeed]:
    return [sb.RankFeed(network.connect(rank, depth=depth), **options) for rank in range(network.dp_size)]


async def drain(feed: sb.RankFeed, got: list[Any] | None = None) -> None:
    """To its end."""
    async for step in feed:
        if got is not None:
            got.append(step)


class Served:
    """``kept`` holds payloads of rollouts that are put with ``remote=True``."""

    def __init__(self, **knobs: Any) -> None:
        config = sb.BalancerConfig(**knobs)
        self.evicted: list[tuple[str, str]] = []
        self.balancer = sb.StreamBalancer(config, on_evict=lambda one, why: self.evicted.append((one.rollout_id, why)))
        self.network = MemoryNetwork(dp_size=config.dp_size)
        self.kept = Kept(self.network)
        self.ranks = range(config.dp_size)
        self.seen: list[RankBatch] = []
        """Rank batches in the order in which they came."""
        self.rollouts: dict[str, Rollout] = {}

    def feed(self, rank: int, **join: Any) -> sb.RankFeed:
        return sb.RankFeed(self.kept.port(self.network, rank, **join))

    async def train(self, rank: int, **join: Any) -> None:
        async for batch in self.feed(rank, **join):
            self.seen.append(batch)

    def of_rank(self, rank: int) -> list[RankBatch]:
        return [batch for batch in self.seen if batch.rank == rank]

    async def put(self, rollouts: Iterable[Rollout], *, remote: bool = False) -> None:
        for rollout in rollouts:
            self.rollouts[rollout.rollout_id] = rollout
            await self.balancer.put(self.kept.remote(rollout) if remote else rollout)

    async def serve(self, **options: Any) -> None:
        with anyio.fail_after(3600):  # virtual
            await sb.serve(self.balancer, self.network, **options)

    async def run(
        self, rollouts: Iterable[Rollout], *others: Callable[[], Any], remote: bool = False, **options: Any
    ) -> None:
        """To the end: every rank trains on what is put."""
        async with self.balancer, anyio.create_task_group() as tasks:
            for rank in self.ranks:
                tasks.start_soon(self.train, rank)
            for other in (partial(self.serve, **options), *others):
                tasks.start_soon(other)
            await self.put(rollouts, remote=remote)
            self.balancer.end()


def real(batches: Iterable[RankBatch]) -> list[Rollout]:
    """Rollouts of these that are no padding copies."""
    return [rollout for batch in batches for rollout in batch.rollouts if not rollout.is_padding]
