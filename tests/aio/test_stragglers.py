"""Groups that leave without their slowest siblings, in virtual time on both loops: who waits, who is told."""

from __future__ import annotations

from functools import partial

import anyio
import helpers
import pytest
from helpers import settle
from served import attended

import stream_balancer as sb
from stream_balancer.core.groups import Declared
from stream_balancer.testing import make_rollout

GROUPS = sb.Groups(size=4, min_size=3)
config = partial(helpers.config, groups=GROUPS, window=4, capacity=16)


def sibling(name: str, group_id: str = "g", tokens: int = 3) -> sb.Rollout:
    return make_rollout(tokens, name, group_id=group_id)


class Heard(sb.Observer):
    """What a program is told, so that its engine stops generating."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, float]] = []

    def group_declared(self, group_id: str, declared: Declared | None) -> None:
        """An event of the balancer."""
        if declared is not None and declared.late:
            self.said.append((group_id, "cut", anyio.current_time()))

    def evicted(self, rollout: sb.Rollout, reason: sb.EvictReason) -> None:
        """An event of the balancer."""
        self.said.append((rollout.rollout_id, reason, anyio.current_time()))


async def test_a_step_leaves_without_the_straggler_which_is_evicted_when_it_comes() -> None:
    """By a worker elsewhere, whose put returns as usual."""
    knobs = config(window=6, batch_size=6, groups=sb.Groups(size=3, min_size=2))
    async with attended(sb.StreamBalancer(knobs)) as (balancer, network, tasks):
        balancer.observers.append(heard := Heard())
        producer = sb.connect(network.connect_producer())
        got: list[tuple[float, sb.Batch]] = []

        async def train() -> None:
            batches = balancer.batches()
            while True:
                batch = await anext(batches)
                got.append((anyio.current_time(), batch))

        began = anyio.current_time()
        for group_id in "ab":
            await producer.expect_group(group_id, 3)
        tasks.start_soon(train)
        await anyio.sleep(10.0)
        await producer.put_group([sibling(f"a{n}", "a") for n in range(3)])
        await producer.put_group([sibling(f"b{n}", "b") for n in range(2)])
        await producer.put(sibling("c0", "c"))
        await anyio.sleep(1.0)
        balancer.reconfigure(deadline_s=20.0)
        await anyio.sleep(30.0)
        ((at, batch),) = got
        assert at - began == pytest.approx(30.0, abs=0.1)
        assert (batch.num_rollouts, batch.reason, batch.incomplete_groups) == (6, "deadline", ("c",))
        await producer.put(sibling("b2", "b"))
        assert [(name, why) for name, why, _ in heard.said] == [("b", "cut"), ("b2", "late")]
        assert heard.said[0][2] - began == pytest.approx(20.0, abs=0.1)
        statistics = await producer.statistics()
        assert (statistics.evicted["late"], statistics.cut_siblings, statistics.short_groups) == (1, 1, 2)


async def test_a_reserver_that_waits_gets_what_a_cut_group_leaves() -> None:
    """Nobody generates, nobody may begin: once the group is complete without its straggler, it leaves."""
    async with sb.StreamBalancer(config(capacity=4, staleness={"max_versions": 0})) as balancer:
        balancer.set_version(0)
        async with balancer.reserve(4) as slot, anyio.create_task_group() as tasks:
            for name, after_s in (("r0", 1.0), ("r1", 1.0), ("r2", 1.0)):
                await anyio.sleep(after_s)
                await slot.put(sibling(name))
            slot.release()
            steps: list[sb.Batch] = []

            async def train() -> None:
                async for batch in balancer.batches():
                    steps.append(batch)
                    balancer.set_version(batch.step + 1)

            async def begin() -> None:
                async with balancer.reserve(4):
                    tasks.cancel_scope.cancel()

            tasks.start_soon(train)
            tasks.start_soon(begin)
            with anyio.fail_after(100.0):
                await anyio.sleep_forever()
        assert [batch.num_rollouts for batch in steps] == [3]


async def test_accept_is_not_asked_about_what_is_late_nor_again_about_what_waits() -> None:
    asked: list[int] = []

    def accept(rollouts: object) -> bool:
        asked.append(len(rollouts))  # type: ignore[arg-type]
        return False

    async with sb.StreamBalancer(config(), accept=accept) as balancer, anyio.create_task_group() as tasks:
        await balancer.put_group([sibling(f"r{n}") for n in range(3)])
        tasks.start_soon(anext, balancer.batches())
        await settle()
        await balancer.put(sibling("r3"))
        assert not asked
        assert balancer.statistics().waiting == 3
        assert balancer.statistics().evicted["late"] == 1
        tasks.cancel_scope.cancel()
