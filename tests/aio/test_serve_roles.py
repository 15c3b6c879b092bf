"""``serve`` with roles, beside lost and slow ranks, other numbers of ranks, open steps and another controller."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from crew import WHENS, Crew

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
        self.lengths: set[int] = set()
        """Of rollouts, or parts, that were computed."""
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
                    self.lengths.update(one.num_tokens for one in micro_batch.rollouts)
                    self.computed.update(one.rollout_id for one in micro_batch.rollouts if not one.is_padding)
                    micro_batch.give(ref_logprobs=-micro_batch.packed()["input_ids"].float() / 7)
        except (sb.errors.RankLostError, sb.errors.RefusedError) as error:
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


@pytest.mark.parametrize("survivors", [1, 2])
async def test_a_lost_rank_of_a_role_that_shares_rollouts_is_replaced(survivors: int) -> None:
    """Those that are left compute the whole rollouts, of which the trainer's ranks get their parts."""
    shared = sb.ContextParallel(sizes=(1, 2), min_tokens=40)
    ranks = survivors + 1
    async with sb.StreamBalancer(
        knobs(ranks, context_parallel=shared, micro_batches=sb.MicroBatches(max_tokens=60))
    ) as balancer:
        crew = Roled(MemoryNetwork(dp_size=ranks))
        crew.role_dies[1] = 2
        rollouts = [make_rollout(100 if number % 4 == 0 else 6, f"r{number}") for number in range(36)]
        options = {"roles": ROLES, "on_rank_loss": "replan", "rejoin_timeout_s": 0.0}
        await crew.run(balancer, rollouts, *crew.computing(*range(ranks)), **options)
        crew.check(balancer, 36)
        assert any(cp for gradient in crew.met.values() for _, cp in gradient), "nothing was shared"
        assert crew.lengths >= {50, 100}, "first in parts, then whole"
