"""The number of ranks changes while ``serve`` runs: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import math
from collections import Counter

import anyio
import pytest
from helpers import kill, settle
from served import serving

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout


def knobs(dp_size: int, **more: object) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": 12, **more})  # type: ignore[arg-type]


class Trainers:
    """Ranks that train, each until its iteration ends; what they have trained on."""

    def __init__(self, transport: MemoryNetwork) -> None:
        self.transport = transport
        self.trained: Counter[str] = Counter()
        self.sizes: dict[int, list[int]] = {}
        """By rank, ``dp_size`` of each step."""

    async def train(self, rank: int, next_step: int = 0) -> None:
        async for share in sb.RankFeed(self.transport.connect(rank), next_step=next_step):
            assert (share.rank, share.dp_size > rank) == (rank, True)
            self.trained.update(r.rollout_id for r in share.rollouts if not r.is_padding)
            self.sizes.setdefault(rank, []).append(share.dp_size)


async def put(balancer: sb.StreamBalancer, name: str, number: int) -> None:
    for n in range(number):
        await balancer.put(make_rollout(1 + 7 * n % 30, f"{name}{n}"))


async def test_more_ranks_once_they_are_wanted() -> None:
    async with serving(sb.StreamBalancer(knobs(2))) as (balancer, transport, tasks):
        trainers = Trainers(transport)
        for rank in range(2):
            tasks.start_soon(trainers.train, rank)
        await put(balancer, "a", 12)
        await settle()
        with pytest.raises(ValueError, match="announces dp_size=3, but the controller balances for dp_size=2"):
            await anext(sb.RankFeed(transport.connect(2, dp_size=3)))
        balancer.reconfigure(dp_size=3)
        await put(balancer, "b", 12)
        await settle()
        assert [state.connected for state in balancer.rank_states()] == [True, True, False]
        tasks.start_soon(trainers.train, 2, 1)
        await settle()
        balancer.end()
    assert trainers.sizes == {0: [2, 3], 1: [2, 3], 2: [3]}
    assert sum(trainers.trained.values()) == len(trainers.trained) == 24


@pytest.mark.parametrize("resized_first", [True, False])
async def test_a_lost_rank_that_is_no_more_is_not_waited_for(resized_first: bool) -> None:
    """``serve`` raises, and the next one has the steps planned for the others."""
    async with sb.StreamBalancer(knobs(2)) as balancer, MemoryNetwork(dp_size=2) as transport:
        feeds = [sb.RankFeed(transport.connect(rank)) for rank in range(2)]
        await put(balancer, "a", 12)
        failures: list[sb.errors.RankLostError] = []

        async def serve_alone() -> None:
            try:
                await sb.serve(balancer, transport, rejoin_timeout_s=math.inf)
            except sb.errors.RankLostError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_alone)
            for feed in feeds:
                await anext(feed)
            if resized_first:
                balancer.reconfigure(dp_size=1)
            kill(feeds[1])
            await settle()
            balancer.reconfigure(dp_size=1)
        assert [error.rank for error in failures] == [1]
        assert balancer.statistics().in_flight == 12
        with pytest.raises(sb.errors.RankLostError):
            await anext(feeds[0])
        trainers = Trainers(transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            tasks.start_soon(trainers.train, 0)
            balancer.end()
        assert trainers.sizes == {0: [1]}
        assert len(trainers.trained) == balancer.statistics().acknowledged == 12
