"""``serve(open=True)``: steps that begin before they are complete, beside everything that may happen in their midst."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from crew import WHENS, Crew
from helpers import until
from kept import Kept

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


async def by_group(balancer: sb.StreamBalancer, rollouts: list[Rollout]) -> None:
    for first in range(0, len(rollouts), 3):
        await anyio.sleep(3.0)
        await balancer.put_group(rollouts[first : first + 3])
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


@pytest.mark.parametrize("move_late", [False, True])
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"sync": "micro_batch", "micro_batches": {"max_tokens": 40}},
        {"context_parallel": {"sizes": (1, 2), "min_tokens": 10}, "micro_batches": {"max_tokens": 40}},
    ],
    ids=str,
)
async def test_a_rank_is_lost_in_the_midst_of_a_step(when: str, move_late: bool, plan: dict[str, Any]) -> None:
    move_late = move_late and not plan
    plan = plan or {"micro_batches": {"counts": "free"}}
    async with sb.StreamBalancer(knobs(3, **plan)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {1: (1, when)})
        await run(balancer, crew, some(60), on_rank_loss="replan", move_late=move_late)
        crew.check(balancer, 60)
        assert crew.present[4] == (0, 2)
        assert balancer.config.dp_size == 2


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


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_is_lost_and_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    async with sb.StreamBalancer(knobs(3, micro_batches=sb.MicroBatches(counts="free"))) as balancer:
        crew = Crew(MemoryNetwork(dp_size=3), {1: (chance.randrange(3), chance.choice(WHENS))})
        crew.seconds = lambda rank, step: chance.choice([0.0, 1.0, 3.0])

        async def again() -> None:
            await anyio.sleep(chance.uniform(20, 40))
            with anyio.move_on_after(5.0):
                await crew.train(1, incarnation=1)
            await anyio.sleep(5)
            await crew.train(1, incarnation=2)

        timeout_s = chance.choice([0.0, 50.0])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            await run(
                balancer, crew, some(96), on_rank_loss="replan", rejoin_timeout_s=timeout_s, move_late=seed % 2 == 0
            )
            tasks.cancel_scope.cancel()
        crew.check(balancer, 96)


@pytest.mark.parametrize("gone", [False, True])
async def test_payloads_that_lie_with_producers(gone: bool) -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        network = MemoryNetwork(dp_size=2)
        crew, kept = Crew(network), Kept(network)
        crew.connect = partial(kept.port, network)
        kept.gone = {3, 17} if gone else set()
        rollouts = some(24)
        await run(balancer, crew, [kept.remote(one) for one in rollouts])
        trained = {name for gradient in crew.met.values() for name, _ in gradient}
        assert trained == {one.rollout_id for n, one in enumerate(rollouts) if n not in kept.gone}
        assert balancer.statistics().evicted["lost"] == len(kept.gone)
        for step, gradient in crew.met.items():
            assert {end.rollouts for end in crew.ends[step]} == {len(gradient)}


@pytest.mark.parametrize(
    "event", ["a group above batch_size", "a filter that answers late", "an execution", "an abandoned group"]
)
async def test_what_happens_to_groups_in_the_midst_of_a_step(event: str) -> None:
    """Nothing is lost, doubled or starved by it."""

    async def accept(rollouts: Any) -> bool:
        await anyio.sleep(7.0)
        return rollouts[0].group_id != "g2"

    more = {"accept": accept} if event.startswith("a filter") else {}
    async with sb.StreamBalancer(knobs(2, groups=sb.Groups(size=3)), **more) as balancer:
        crew = Crew(MemoryNetwork(dp_size=2))
        rollouts = [make_rollout(1 + 7 * n % 30, f"r{n}", group_id=f"g{n // 3}") for n in range(48)]
        if event == "an execution":
            rollouts = [
                sb.Rollout(
                    tokens={"input_ids": list(range(1 + n % 5))}, rollout_id=f"r{n}", group_id=f"g{n // 3}",
                    execution_id="x",
                )
                for n in range(48)
            ]  # fmt: skip

        async def happens() -> None:
            await anyio.sleep(5.5)
            if event == "a group above batch_size":
                await balancer.put_group([make_rollout(2, f"x{n}", group_id="big") for n in range(13)])
            elif event == "an abandoned group":
                await balancer.put(make_rollout(3, "left", group_id="left"))
                await anyio.sleep(3)
                assert balancer.abandon_group("left") == 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(happens)
            await run(balancer, crew, rollouts, by_group if event == "an execution" else slowly)
        trained = sorted(name for gradient in crew.met.values() for name, _ in gradient)
        turned_down = {"r6", "r7", "r8"} if event.startswith("a filter") else set()
        more_of_it = {f"x{n}" for n in range(13)} if event.startswith("a group") else set()
        assert trained == sorted({one.rollout_id for one in rollouts} - turned_down | more_of_it)
        statistics = balancer.statistics()
        assert (statistics.acknowledged, statistics.waiting, statistics.in_flight) == (len(trained), 0, 0)
        if event == "an execution":
            assert {end.executions for ends in crew.ends.values() for end in ends} == {4}


async def test_an_execution_without_groups_is_refused_at_its_put() -> None:
    async with sb.StreamBalancer(knobs(1)) as balancer:
        crew = Crew(MemoryNetwork(dp_size=1))
        rollouts = [
            sb.Rollout(tokens={"input_ids": [n]}, rollout_id=f"r{n}", group_id="g", execution_id="x") for n in range(4)
        ]
        with pytest.raises(BaseExceptionGroup) as caught:
            await run(balancer, crew, rollouts)
        assert caught.group_contains(sb.RolloutError, match="execution_id needs group_size")


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_another_controller_begins_the_step_anew(tmp_path: Path) -> None:
    """Real time: the journal has a thread."""
    network = MemoryNetwork(dp_size=2)
    crew = Crew(network)
    # step 1 is under way when the controller dies, on a slow machine, too
    crew.rejoin, crew.seconds = True, lambda rank, step: 0.01 if step == 0 else 0.5
    options = {"open": True, "on_rank_loss": "replan", "rejoin_timeout_s": math.inf}
    async with anyio.create_task_group() as tasks:
        for rank in range(2):
            tasks.start_soon(crew.train, rank)
        async with sb.StreamBalancer(knobs(2), journal=tmp_path / "j") as balancer, anyio.create_task_group() as first:
            first.start_soon(partial(sb.serve, balancer, network, **options))
            for rollout in some(18):
                await balancer.put(rollout)
            await until(lambda: 0 in crew.met and any(step == 1 for _, step, _ in crew.trained))
            first.cancel_scope.cancel()
        assert set(crew.met) == {0}
        crew.seconds = lambda rank, step: 0.01
        async with sb.StreamBalancer(knobs(2), journal=tmp_path / "j") as balancer, anyio.create_task_group() as next_:
            next_.start_soon(partial(sb.serve, balancer, network, **options))
            await slowly(balancer, some(6, "s"), 0.01)
        assert balancer.statistics().acknowledged == 24
    crew.ends.clear()
    assert sorted(name for gradient in crew.met.values() for name, _ in gradient) == sorted(
        [*(f"r{n}" for n in range(18)), *(f"s{n}" for n in range(6))]
    )
