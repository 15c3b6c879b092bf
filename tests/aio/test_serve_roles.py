"""``serve`` with roles, beside lost and slow ranks, other numbers of ranks, open steps and another controller."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from crew import WHENS, Crew
from helpers import until

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.types import MicroBatch, Rollout

ROLES = {"ref": ["ref_logprobs"]}


def knobs(dp_size: int, **more: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 12, "window": 12, **more})


def some(number: int, name: str = "r") -> list[Rollout]:
    return [make_rollout(1 + 7 * n % 30, f"{name}{n}") for n in range(number)]


class Roled(Crew):
    """Ranks of a role, too; the trainer's look at its columns."""

    def __init__(self, network: MemoryNetwork, die: dict[int, tuple[int, str]] | None = None) -> None:
        super().__init__(network, die)
        self.computed: Counter[str] = Counter()
        self.role_s = 0.5
        self.role_dies: dict[int, int] = {}
        """By rank of the role, after how many micro-batches."""

    async def compute(self, rank: int, **join: Any) -> None:
        peer = self.network.connect(rank, role="ref", **join)
        try:
            async for step in sb.RankFeed(peer):
                async for micro_batch in step:
                    await anyio.sleep(self.role_s)
                    left = self.role_dies[rank] = self.role_dies.get(rank, 1000) - 1
                    if left < 0:
                        peer.cut()
                        return
                    self.computed.update(one.rollout_id for one in micro_batch.rollouts if not one.is_padding)
                    micro_batch.give(ref_logprobs=-micro_batch.packed()["input_ids"].float() / 7)
        except (sb.RankLostError, sb.RefusedError) as error:
            self.errors.append(error)

    def add(self, rank: int, step: int, micro_batch: MicroBatch, gradient: Counter[tuple[str, int]]) -> None:
        super().add(rank, step, micro_batch, gradient)
        packed = micro_batch.packed()
        for rollout in micro_batch.rollouts:
            assert rollout.is_padding or len(rollout.tokens["ref_logprobs"]) == rollout.num_tokens
        real = packed["loss_mask"] != 0
        assert torch.equal(packed["ref_logprobs"][real], (-packed["input_ids"].float() / 7)[real])

    def computing(self, *ranks: int) -> list[Callable[[], Any]]:
        return [partial(self.compute, rank) for rank in ranks]


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("move_late", [False, True])
async def test_ranks_that_are_lost_while_columns_are_computed(when: str, move_late: bool) -> None:
    """What others take over has its columns; nobody computes them twice."""
    async with sb.StreamBalancer(knobs(3, micro_batches=sb.MicroBatches(counts="free", max_tokens=40))) as balancer:
        crew = Roled(MemoryNetwork(dp_size=3), {1: (1, when)})
        options = {"roles": ROLES, "on_rank_loss": "replan", "move_late": move_late}
        await crew.run(balancer, some(60), *crew.computing(0, 1, 2), **options)
        crew.check(balancer, 60)
        assert set(crew.computed.values()) == {1}
        assert len(crew.computed) == 60
        assert crew.present[4] == (0, 2)


async def test_a_slow_rank_is_helped_once_the_columns_are_there() -> None:
    async with sb.StreamBalancer(
        knobs(4, batch_size=32, window=32, micro_batches=sb.MicroBatches(counts="free", max_tokens=40))
    ) as balancer:
        crew = Roled(MemoryNetwork(dp_size=4))
        crew.role_s = 0.0
        crew.seconds = lambda rank, step: 10.0 if rank == 1 else 1.0
        await crew.run(balancer, some(128), *crew.computing(*range(4)), roles=ROLES, move_late=True)
        crew.check(balancer, 128)
        work = Counter(rank for rank, _, _ in crew.trained)
        assert work[1] < min(work[0], work[2], work[3])


async def test_the_trainer_begins_with_its_first_columns() -> None:
    async with sb.StreamBalancer(knobs(1, micro_batches=sb.MicroBatches(max_tokens=40))) as balancer:
        crew = Roled(MemoryNetwork(dp_size=1))
        crew.role_s, began_at = 10.0, []
        crew.seconds = lambda rank, step: began_at.append(anyio.current_time()) or 0.0  # type: ignore[func-returns-value]
        await crew.run(balancer, some(24), *crew.computing(0), roles=ROLES)
        crew.check(balancer, 24)
        gaps = [later - sooner for sooner, later in itertools.pairwise(began_at)]
        assert gaps[-2:] == pytest.approx([10.0, 10.0]), "over micro-batches since the first"


@pytest.mark.parametrize("policy", ["raise", "replan"])
async def test_a_lost_rank_of_a_role_is_waited_for_or_given_up(policy: Any) -> None:
    async with sb.StreamBalancer(knobs(2, micro_batches=sb.MicroBatches(max_tokens=40))) as balancer:
        crew = Roled(MemoryNetwork(dp_size=2))
        crew.role_dies[1] = 3

        async def again() -> None:
            await anyio.sleep(20)
            crew.role_dies.clear()
            if policy == "raise":
                await crew.compute(1, incarnation=1)

        timeout_s = math.inf if policy == "raise" else 0.0
        options = {"roles": ROLES, "on_rank_loss": policy, "rejoin_timeout_s": timeout_s}
        await crew.run(balancer, some(60), *crew.computing(0, 1), again, **options)
        crew.check(balancer, 60)
        assert set(crew.computed.values()) == {1}


async def test_more_ranks_and_fewer_with_a_role() -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Roled(MemoryNetwork(dp_size=2))

        async def change() -> None:
            await anyio.sleep(5)
            balancer.reconfigure(dp_size=3)
            await anyio.sleep(1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(crew.train, 2, dp_size=3))
                tasks.start_soon(partial(crew.compute, 2, dp_size=3))
                await anyio.sleep(30)
                balancer.reconfigure(dp_size=1)

        await crew.run(balancer, some(480), *crew.computing(0, 1), change, roles=ROLES)
        crew.check(balancer, 480)
        assert {(0, 1), (0, 1, 2), (0,)} == set(crew.present.values())


async def test_a_role_whose_link_breaks_computes_anew_what_it_had_not_given() -> None:
    async with sb.StreamBalancer(knobs(2, micro_batches=sb.MicroBatches(max_tokens=40))) as balancer:
        crew = Roled(MemoryNetwork(dp_size=2))
        peers: list[Any] = []
        connect = crew.network.connect

        def remember(rank: int, **join: Any) -> Any:
            peers.append(connect(rank, **join))
            return peers[-1]

        crew.network.connect = remember  # type: ignore[method-assign]

        async def breaks() -> None:
            for _ in range(6):
                await anyio.sleep(3.3)
                for peer in peers:
                    peer.cut()

        crew.rejoin = True
        compute = [partial(crew.compute, rank, rejoin=True) for rank in range(2)]
        await crew.run(balancer, some(60), *compute, breaks, roles=ROLES, rejoin_timeout_s=math.inf)
        crew.check(balancer, 60)
        assert set(crew.computed) == {f"r{n}" for n in range(60)}


async def test_wrong_columns_on_the_last_step_are_told() -> None:
    async with sb.StreamBalancer(knobs(1)) as balancer:
        crew = Roled(MemoryNetwork(dp_size=1))
        told: list[str] = []

        async def wrong() -> None:
            with pytest.raises(sb.RankLostError, match=r"is to give the columns \['ref_logprobs'\], not \['values'\]"):  # noqa: PT012 - whichever of these notices
                async for step in sb.RankFeed(crew.network.connect(0, role="ref")):
                    async for micro_batch in step:
                        balancer.end()
                        await anyio.sleep(1)
                        micro_batch.give(values=micro_batch.packed()["input_ids"])
            told.append("the rank")

        with pytest.raises(BaseExceptionGroup) as caught:
            await crew.run(balancer, some(12), wrong, roles=ROLES)
        assert caught.group_contains(sb.RankLostError, match=r"not \['values'\]")
        assert told == ["the rank"]


async def test_open_steps_with_a_role(tmp_path: Path) -> None:
    async with sb.StreamBalancer(knobs(2)) as balancer:
        crew = Roled(MemoryNetwork(dp_size=2), {1: (2, "work")})
        await crew.run(balancer, some(60), *crew.computing(0, 1), roles=ROLES, open=True, on_rank_loss="replan")
        crew.check(balancer, 60)
        assert set(crew.computed.values()) == {1}


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_another_controller_has_the_columns_computed_again(tmp_path: Path) -> None:
    """The first one is cancelled in the middle; feeds with rejoin=True go on with the next, at the same place. Real
    time: the journal has a thread."""
    network = MemoryNetwork(dp_size=2)
    crew = Roled(network)
    crew.rejoin, crew.seconds, crew.role_s = True, lambda rank, step: 0.02, 0.01
    async with anyio.create_task_group() as tasks:
        for rank in range(2):
            tasks.start_soon(crew.train, rank)
            tasks.start_soon(partial(crew.compute, rank, rejoin=True))
        async with sb.StreamBalancer(knobs(2), journal=tmp_path / "j") as balancer, anyio.create_task_group() as first:
            first.start_soon(partial(sb.serve, roles=ROLES, rejoin_timeout_s=math.inf), balancer, network)
            for rollout in some(60):
                await balancer.put(rollout)
            await until(lambda: 2 in crew.met)
            first.cancel_scope.cancel()
        done = balancer.statistics().acknowledged
        async with sb.StreamBalancer(knobs(2), journal=tmp_path / "j") as balancer, anyio.create_task_group() as next_:
            assert balancer.recovered.steps
            next_.start_soon(partial(sb.serve, roles=ROLES, rejoin_timeout_s=math.inf), balancer, network)
            balancer.end()
        assert balancer.statistics().acknowledged == 60
    assert done < 60
    assert sorted(name for _, _, name in crew.trained) == sorted(f"r{n}" for n in range(60) for _ in range(1))
