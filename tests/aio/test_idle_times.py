"""The balancer's waits reach the ledger, and the ranks' reports carry theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import pytest
from helpers import give

import stream_balancer as sb
from stream_balancer.core.step_times import StepTiming
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.types import Batch


class Timings(sb.Observer):
    """What ranks have reported."""

    def __init__(self) -> None:
        self.all: list[StepTiming] = []

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        """An event of the balancer."""
        self.all += timings


async def test_serve_hands_on_how_long_each_rank_had_been_ready() -> None:
    transport = MemoryNetwork(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=2, window=2)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.observers.append(told := Timings())
        tasks.start_soon(sb.serve, balancer, transport)
        await anyio.sleep(0.001)
        early = sb.RankFeed(transport.connect(0, depth=1))
        await anyio.sleep(7.0)
        late = sb.RankFeed(transport.connect(1, depth=1))
        for length in (3, 4):
            await balancer.put(make_rollout(length))
        balancer.end()
        for feed in (early, late):
            tasks.start_soon(_train, feed)
    assert [one.ready_s for one in told.all] == pytest.approx([7.0, 0.0], abs=0.01)


async def test_serve_hands_on_how_long_a_step_was_with_other_roles() -> None:
    async def compute(feed: sb.RankFeed) -> None:
        async for batch in feed:
            await anyio.sleep(5.0 + batch.step)
            give(batch, {"ref_logprobs": [m.packed()["input_ids"] * 2.0 for m in batch.micro_batches]})

    transport = MemoryNetwork(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=2, window=2)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.observers.append(told := Timings())
        for length in (3, 4, 5, 6):
            await balancer.put(make_rollout(length))
        balancer.end()
        tasks.start_soon(partial(sb.serve, balancer, transport, roles={"ref": ["ref_logprobs"]}))
        for rank in range(2):
            tasks.start_soon(_train, sb.RankFeed(transport.connect(rank, depth=1)))
            tasks.start_soon(compute, sb.RankFeed(transport.connect(rank, depth=1, role="ref")))
    assert [(one.step, round(one.roles_s, 2)) for one in told.all] == [(0, 5.0), (0, 5.0), (1, 6.0), (1, 6.0)]


async def test_serve_names_a_slow_rank_once(caplog: pytest.LogCaptureFixture) -> None:
    transport = MemoryNetwork(dp_size=3)

    async def train(feed: sb.RankFeed) -> None:
        async for batch in feed:
            feed.add_compute_s(batch.num_tokens * (1.5 if feed.rank == 1 else 1.0))

    config = sb.BalancerConfig(dp_size=3, batch_size=3, window=3)
    with caplog.at_level("WARNING", logger="stream_balancer.dispatch"):
        async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            for rank in range(3):
                tasks.start_soon(train, sb.RankFeed(transport.connect(rank, depth=1)))
            for _ in range(10 * 3):
                await balancer.put(make_rollout(8))
            balancer.end()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("rank 1 takes 1.50 times as long as the median rank for the same work, since step 0")


async def _train(feed: sb.RankFeed) -> None:
    async for _ in feed:
        pass
