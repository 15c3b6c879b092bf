"""The number of ranks changes while ``serve`` runs: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import suppress

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

    async def train(self, rank: int) -> None:
        async for share in sb.RankFeed(self.transport.connect(rank)):
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
        assert balancer.statistics().redelivering == 12, "what was asked for before is for whoever is there"
        tasks.start_soon(trainers.train, 2)
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


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_order_of_changes_every_rollout_is_trained_on_once(seed: int) -> None:
    chance = random.Random(seed)
    balancer = sb.StreamBalancer(knobs(2, capacity=48), report_after_s=math.inf)
    async with balancer, MemoryNetwork(dp_size=2) as transport:
        trained: Counter[str] = Counter()

        async def train(rank: int) -> None:
            """As a launcher keeps it: whenever its place is wanted, a rank is there."""
            while not balancer.ended or balancer.statistics().waiting:
                if rank < transport.dp_size:
                    with suppress(sb.errors.RefusedError):  # their number has changed while it was on its way
                        async for share in sb.RankFeed(transport.connect(rank, depth=chance.randint(1, 3))):
                            await anyio.sleep(chance.choice([0.0, 0.5, 3.0]))
                            trained.update(r.rollout_id for r in share.rollouts if not r.is_padding)
                await anyio.sleep(1.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            for rank in range(4):
                tasks.start_soon(train, rank)
            for n in range(200):
                await balancer.put(make_rollout(1 + chance.randrange(50), f"r{n}"))
                if chance.random() < 0.1:
                    await anyio.sleep(chance.choice([0.0, 0.2, 5.0]))
                    balancer.reconfigure(dp_size=chance.randint(1, 4))
            await anyio.sleep(100.0)
            balancer.end()
        assert sum(trained.values()) == len(trained) == 200
        assert balancer.statistics().acknowledged == 200
