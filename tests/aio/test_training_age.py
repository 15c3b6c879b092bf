"""``max_versions`` bounds the age at training: balancer, transport and feeds together, in virtual time, on both loops.

The world here makes a version at every step and its rollouts are of any age; nothing may stand still, however late the
trainer acknowledges.
"""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout


class World:
    """A policy that moves on at every optimizer step, workers that lag behind it, a trainer in lockstep."""

    def __init__(self, config: sb.BalancerConfig, seed: int) -> None:
        self.config, self.random = config, random.Random(seed)
        self.ages: list[int] = []
        self.version: int | None = None
        """The trainer's, where it sets it from a rank."""
        self.evicted = 0
        self.trained: list[sb.types.RankBatch] = []

    async def run(self, *, depth: int, num_rollouts: int, accumulate: int = 1, direct: bool = False) -> sb.Statistics:
        """``accumulate``: batches an optimizer step, which is what acknowledges and makes a version."""
        transport = MemoryNetwork(dp_size=self.config.dp_size)
        async with sb.StreamBalancer(self.config) as balancer:
            balancer.set_version(0)
            with anyio.fail_after(1e6):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self.generate, balancer, num_rollouts)
                    if direct:
                        await self.train_locally(balancer, accumulate)
                    else:
                        tasks.start_soon(sb.serve, balancer, transport)
                        ports = [transport.connect(rank, depth=depth) for rank in range(self.config.dp_size)]
                        feeds = [sb.RankFeed(port, auto_ack=accumulate == 1) for port in ports]
                        await self.train(balancer, feeds, accumulate)
            return balancer.statistics()

    async def generate(self, balancer: sb.StreamBalancer, number: int) -> None:
        size = self.config.groups.size or 1
        lags = (self.config.staleness.max_versions or 0) + 1
        for group in range(number // size):
            version = max((balancer.statistics().version or 0) - self.random.randint(0, lags), 0)
            for n in range(size):
                await anyio.sleep(self.random.choice([0.0, 0.0, 0.3, 2.0]))
                rollout = make_rollout(self.random.randint(1, 50), f"{group}.{n}", group_id=f"{group}", version=version)
                await balancer.put(rollout)
        balancer.end()
        for share in self.trained:  # no step will follow that acknowledges it
            share.ack()

    async def train(self, balancer: sb.StreamBalancer, feeds: list[sb.RankFeed], accumulate: int) -> None:
        step = 0
        while True:
            last: list[sb.types.RankBatch] = []

            async def ask(feed: sb.RankFeed, into: list[sb.types.RankBatch] = last) -> None:
                if (share := await anext(feed, None)) is not None:
                    into.append(share)

            async with anyio.create_task_group() as ranks:
                for feed in feeds:
                    ranks.start_soon(ask, feed)
            if not last:
                return
            self.look(balancer, [rollout for share in last for rollout in share.rollouts])
            await anyio.sleep(self.random.choice([0.0, 0.5, 1.0]))
            step += 1
            if step % accumulate == 0:
                self.version = step // accumulate
                feeds[0].set_version(self.version)  # behind its report of the step before
            if accumulate > 1 and (step % accumulate == 0 or balancer.ended):
                for share in last:
                    share.ack()
            else:
                self.trained = last

    async def train_locally(self, balancer: sb.StreamBalancer, accumulate: int) -> None:
        step = 0
        async for batch in balancer.batches(auto_ack=accumulate == 1):
            self.look(balancer, list(batch.rollouts))
            await anyio.sleep(self.random.choice([0.0, 0.5, 1.0]))
            step += 1
            if step % accumulate == 0:
                balancer.set_version(step // accumulate)
        if accumulate > 1:
            balancer.acknowledge_through(step)

    def look(self, balancer: sb.StreamBalancer, rollouts: list[sb.Rollout]) -> None:
        version = balancer.statistics().version or 0 if self.version is None else self.version
        self.ages += [version - (r.min_version or 0) for r in rollouts if not r.is_padding]


@pytest.mark.parametrize("seed", range(12))
async def test_no_rollout_is_trained_on_too_old(seed: int) -> None:
    draw = random.Random(seed)
    group = draw.choice([None, None, 2])
    dp_size = draw.randint(1, 2)
    batch = dp_size * draw.randint(1, 3) * (group or 1)
    staleness = seed % 4
    knobs: dict[str, Any] = {
        "dp_size": dp_size,
        "batch_size": batch,
        "groups": {"size": group},
        "staleness": {"max_versions": staleness},
    }
    config = sb.BalancerConfig(
        **knobs, window=batch * draw.randint(1, 2), deadline_s=draw.choice([None, 3.0]), min_batch_size=dp_size
    )
    world = World(config, seed)
    how = {"depth": draw.randint(1, 3), "accumulate": draw.choice([1, 1, 2, 3]), "direct": seed % 5 == 4}
    stats = await world.run(num_rollouts=120, **how)
    assert max(world.ages) <= staleness
    assert stats.accepted == 120 == stats.acknowledged + stats.evicted["stale"]
    assert stats.acknowledged == len(world.ages) > 10
    assert stats.training_age is not None
    assert (stats.training_age.rollouts, stats.training_age.max) == (len(world.ages), max(world.ages))
    assert stats.training_age.mean == pytest.approx(sum(world.ages) / len(world.ages))


async def test_rollouts_of_the_present_are_prefetched_as_far_as_they_may() -> None:
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, capacity=40, staleness=sb.Staleness(max_versions=2))
    transport = MemoryNetwork(dp_size=1)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(5)
        for n in range(20):
            await balancer.put(make_rollout(3, f"r{n}", version=5))
        tasks.start_soon(sb.serve, balancer, transport)
        feed = sb.RankFeed(transport.connect(0, depth=9))
        await anyio.sleep(1.0)
        assert len(balancer.in_flight()) == 3  # trained at versions 5, 6 and 7
        for step in range(3):
            await anext(feed)
            await anyio.sleep(1.0)  # it trains; that it is through with the one before has been told by now
            balancer.set_version(6 + step)
            await anyio.sleep(1.0)
            assert len(balancer.in_flight()) == (3 if step == 0 else 2 if step == 1 else 1)
        stats = balancer.statistics()
        assert (stats.evicted["stale"], stats.waiting) == (14, 0)
        assert stats.training_age is not None
        assert stats.training_age.max == 2
        await feed.aclose()
        tasks.cancel_scope.cancel()
