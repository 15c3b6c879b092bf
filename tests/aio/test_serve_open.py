"""``serve(open=True)``: steps that begin before they are complete, beside everything that may happen in their midst."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import pytest
from crew import Crew

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.types import Rollout


def knobs(dp_size: int, **more: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": 12, **more})


def some(number: int, name: str = "r") -> list[Rollout]:
    return [make_rollout(1 + 7 * n % 30, f"{name}{n}") for n in range(number)]


async def slowly(balancer: sb.StreamBalancer, rollouts: list[Rollout], seconds: float = 1.0) -> None:
    for rollout in rollouts:
        await anyio.sleep(seconds)
        await balancer.put(rollout)
    balancer.end()


async def run(
    balancer: sb.StreamBalancer, crew: Crew, rollouts: list[Rollout], put: Any = slowly, **options: Any
) -> None:
    with anyio.fail_after(10_000):  # virtual
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, balancer, crew.network, open=True, **options))
            for rank in range(crew.network.dp_size):
                tasks.start_soon(crew.train, rank)
            await put(balancer, rollouts)


async def test_a_step_begins_with_its_first_rollouts() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew, at = Crew(MemoryNetwork(dp_size=2)), list[float]()
        crew.seconds = lambda rank, step: at.append(anyio.current_time()) or 0.0  # type: ignore[func-returns-value]
        await run(balancer, crew, some(24))
        crew.check(balancer, 24)
        gaps = [later - sooner for sooner, later in pairwise(at) if later - sooner]
        assert max(gaps) <= 4, "nobody waits for twelve"


async def test_ranks_become_others_while_the_first_row_of_a_step_waits_for_one_that_has_not_come() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=2))

        async def put(_: object, rollouts: list[Rollout]) -> None:
            for one in rollouts[:12]:
                await balancer.put(one)
            await anyio.sleep(50.0)
            balancer.reconfigure(dp_size=3)  # rank 2 has not come
            for one in rollouts[12:16]:
                await balancer.put(one)
            await anyio.sleep(50.0)
            crew.kill(0)
            await anyio.sleep(50.0)
            assert balancer.config.dp_size == 2
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(crew.train, 2)
                await slowly(balancer, rollouts[16:])

        await run(balancer, crew, some(36), put, on_rank_loss="replan")
        crew.check(balancer, 36)
        assert crew.present == {0: (0, 1), 1: (1, 2), 2: (1, 2)}


async def test_an_execution_without_groups_is_refused_at_its_put() -> None:
    async with sb.StreamBalancer(knobs(1)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=1))
        rollouts = [
            sb.Rollout(tokens={"input_ids": [n]}, rollout_id=f"r{n}", group_id="g", execution_id="x") for n in range(4)
        ]
        with pytest.raises(BaseExceptionGroup) as caught:
            await run(balancer, crew, rollouts)
        assert caught.group_contains(sb.RolloutError, match="execution_id needs group_size")
