"""A training run to be looked at: workers that generate, ranks that compute, all asleep for as long as that takes.

Its balancer, puts, batches and reports are those of any run. After a while rank 5 becomes slow.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.lowlevel
import torch

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork

__all__ = ["training"]

RANKS, BATCH, WORKERS = 8, 64, 80
SLOW_RANK, SLOWDOWN = 5, 1.4


@asynccontextmanager
async def training(*, step_s: float, slow_after_steps: int) -> AsyncIterator[sb.StreamBalancer]:
    """The run's balancer; the run ends with the block. A step takes about ``step_s``."""
    cost = sb.cost.CalibratedCost(sb.cost.QuadraticCost(linear=20_000.0, quadratic=1.0))
    config = sb.BalancerConfig(dp_size=RANKS, batch_size=BATCH, cost=cost)
    lengths = itertools.cycle(sb.generate_trace(8_000, "lrm", seed=3).lengths.tolist())
    work = cost([4_000])[0] * BATCH / RANKS  # of a rank in a step, about
    transport = MemoryNetwork(dp_size=RANKS)
    worth_training = itertools.cycle([True] * 11 + [False])  # the others: groups whose rewards are all alike
    balancer = sb.StreamBalancer(config, accept=lambda _: next(worth_training))
    balancer.set_version(0)
    versions = itertools.count(1)

    async def generate() -> None:
        while True:
            async with balancer.reserve() as slot:
                length, version = next(lengths), balancer.statistics().version
                await anyio.sleep(step_s * length / 4_000)
                tokens = {"input_ids": torch.zeros(length, dtype=torch.int32)}
                await slot.put(sb.Rollout(tokens=tokens, version=version))

    async def train(feed: sb.RankFeed) -> None:
        async for batch in feed:
            slow = SLOWDOWN if feed.rank == SLOW_RANK and batch.step >= slow_after_steps else 1.0
            lengths = [length for one in batch.micro_batches for length in one.lengths]
            with feed.timed():
                await anyio.sleep(step_s * slow * float(cost(lengths).sum()) / work)
            if feed.rank == 0:
                balancer.set_version(next(versions))

    async with balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        await anyio.lowlevel.checkpoint()
        for rank in range(RANKS):
            tasks.start_soon(train, sb.RankFeed(transport.connect(rank, depth=1)))
        for _ in range(WORKERS):
            tasks.start_soon(generate)
        yield balancer
        tasks.cancel_scope.cancel()
