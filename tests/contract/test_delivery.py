"""What arrives at a rank, in which order, against which credits; what is acknowledged, and what comes again."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from networks import drain, kill, open_network, until
from scripted import Filled, awkward_micro_batches, same_rollout, same_tensors

import stream_balancer as sb


def same_share(got: Any, planned: sb.types.RankBatch) -> bool:
    return len(got.micro_batches) == len(planned.micro_batches) and all(
        same_rollout(a, b) for a, b in zip(got.rollouts, planned.rollouts, strict=True)
    )


async def test_every_share_arrives_once_and_in_order(kind: str) -> None:
    got: dict[int, list[Any]] = {}
    async with Filled(20, 2) as filled, open_network(kind, 2) as network, anyio.create_task_group() as tasks:

        async def train(rank: int) -> None:
            got[rank] = await drain(network.feed(rank))

        for rank in range(2):
            tasks.start_soon(train, rank)
        await sb.serve(filled.balancer, network.transport)
    for rank in range(2):
        assert [step.step for step in got[rank]] == list(range(20))
        for step in got[rank]:
            planned = filled.share(step.step, rank)
            assert same_share(step, planned)
            assert (step.rank, step.dp_size, step.load) == (rank, 2, planned.load)
            assert step.global_num_loss_tokens == planned.global_num_loss_tokens
    assert filled.acknowledged_steps == list(range(20))


async def test_credits_bound_the_queue(kind: str) -> None:
    """A rank with depth 3 is never planned a fourth step before it takes one."""
    async with Filled(8, 1, capacity=64) as filled, open_network(kind, 1) as network:  # noqa: SIM117 - tasks end first
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, filled.balancer, network.transport)
            feed = network.feed(0, depth=3)
            await until(lambda: len(filled.plans) == 3)
            await anyio.sleep(0.1)
            assert len(filled.plans) == 3
            assert (await anext(feed)).step == 0
            await until(lambda: len(filled.plans) == 4)
            await anyio.sleep(0.1)
            assert len(filled.plans) == 4
            assert filled.acknowledged_steps == [], "taking is not acknowledging"
            assert [step.step for step in await drain(feed)] == list(range(1, 8))


async def test_asking_for_the_next_acknowledges(kind: str) -> None:
    """Not the taking, not the leaving; or ``ack()``, once."""
    async with Filled(3, 1, hold=True) as filled, open_network(kind, 1) as network:  # noqa: SIM117 - tasks end first
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), filled.balancer, network.transport)
            feed = network.feed()
            await anext(feed)
            await anyio.sleep(0.1)
            assert filled.acknowledged_steps == []
            step = await anext(feed)
            await until(lambda: filled.acknowledged_steps == [0])
            step.ack()
            step.ack()
            await until(lambda: filled.acknowledged_steps == [0, 1])
            await anext(feed)
            await feed.aclose()
            await anyio.sleep(0.1)
            assert filled.acknowledged_steps == [0, 1]
            tasks.cancel_scope.cancel()


async def test_a_commit_acknowledges_all_before_it(kind: str) -> None:
    """``auto_ack=False``: nothing is acknowledged by asking for more, and what was not is delivered again."""
    async with Filled(8, 1, capacity=64) as filled, open_network(kind, 1) as network:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), filled.balancer, network.transport)
            feed = network.feed(auto_ack=False)
            taken = [await anext(feed) for _ in range(6)]
            await anyio.sleep(0.1)
            assert filled.acknowledged_steps == [], "asking for the next step acknowledged one"
            taken[3].ack()
            taken[1].ack()
            await until(lambda: filled.acknowledged_steps == [0, 1, 2, 3])
            kill(feed)
            taken = await drain(network.feed(incarnation=1, auto_ack=False))
            assert [step.step for step in taken] == [4, 5, 6, 7]
            assert filled.acknowledged_steps == [0, 1, 2, 3]
            taken[-1].ack()  # serve returns: the feed has taken its leave
        assert filled.acknowledged_steps == list(range(8))


async def test_bytes_are_identical(kind: str) -> None:
    """Every dtype, awkward shapes, all of the metadata."""
    rollouts = {one.rollout_id: one for mb in awkward_micro_batches() for one in mb if not one.is_padding}
    config = sb.BalancerConfig(dp_size=1, batch_size=len(rollouts), micro_batches=sb.MicroBatches(max_tokens=129))
    async with sb.StreamBalancer(config) as balancer, open_network(kind, 1) as network:
        for rollout in rollouts.values():
            await balancer.put(rollout)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, network.transport)
            (step,) = await drain(network.feed())
    assert sorted(one.rollout_id for one in step.rollouts if not one.is_padding) == sorted(rollouts)
    for micro_batch in step.micro_batches:
        whole = sb.types.MicroBatch.of([rollouts[one.rollout_id] for one in micro_batch.rollouts], micro_batch.lengths)
        for got in micro_batch.rollouts:
            assert same_rollout(rollouts[got.rollout_id], got), f"rollout {got.rollout_id} changed on its way"
        assert same_tensors(dict(whole.packed().columns), dict(micro_batch.packed().columns))
        assert torch.equal(whole.packed().cu_seqlens, micro_batch.packed().cu_seqlens)


async def test_siblings_share_their_prefix_on_the_rank(kind: str) -> None:
    """A micro-batch has the same unique tokens there."""
    config = sb.BalancerConfig(dp_size=1, batch_size=6, groups=sb.Groups(share_prefixes=True, size=3))
    planned: list[sb.Batch] = []

    class Plans(sb.Observer):
        def dispatched(self, batch: sb.Batch) -> None:
            planned.append(batch)

    async with sb.StreamBalancer(config) as balancer, open_network(kind, 1) as network:
        balancer.observers.append(Plans())
        for group in ("g", "long"):
            for number in range(3):
                ids = torch.cat([torch.arange(5) + len(group), torch.full((number + 1,), number)])
                rollout = sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"{group}{number}", group_id=group, prefix=5)
                await balancer.put(rollout)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, network.transport)
            (step,) = await drain(network.feed())
    for ours, theirs in zip(planned[0].ranks[0].micro_batches, step.micro_batches, strict=True):
        here, there = ours.tree(), theirs.tree()
        assert here.nodes == there.nodes
        assert here.index.equal(there.index)
        assert here["input_ids"].equal(there["input_ids"])
        assert there.num_tokens < theirs.num_tokens


async def test_what_is_held_is_never_overwritten(kind: str) -> None:
    """Memory is used again only when the last tensor of it is gone."""
    async with Filled(12, 1, num_tokens=500) as filled, open_network(kind, 1) as network:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, filled.balancer, network.transport)
            held = await drain(network.feed())
        assert all(same_share(step, filled.share(step.step, 0)) for step in held)


async def test_what_a_lost_rank_owed_is_done_by_the_others(kind: str) -> None:
    async with Filled(3, 2, capacity=64) as filled, open_network(kind, 2) as network:
        trained: list[str] = []

        async def train(feed: sb.RankFeed) -> None:
            async for step in feed:
                async for micro_batch in step:
                    trained.extend(one.rollout_id for one in micro_batch.rollouts if not one.is_padding)
                    await anyio.sleep(0.02)
                end = await step.async_finish()
                assert end is not None
                assert end.ranks == (0,)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), filled.balancer, network.transport)
            lost, healthy = network.feed(1), network.feed(0)
            await anext(lost)
            kill(lost)
            tasks.start_soon(train, healthy)
        assert len(trained) == len(set(trained)) == 24
        assert filled.acknowledged_steps == [0, 1, 2]


@pytest.mark.parametrize("auto_ack", [True, False])
async def test_a_killed_rank_may_come_back(kind: str, auto_ack: bool) -> None:
    """What it had not acknowledged comes again, in the same plan and order; the other rank notices nothing."""
    steps: dict[int, list[int]] = {0: [], 1: []}
    async with Filled(8, 2) as filled, open_network(kind, 2) as network:

        async def train(rank: int, **join: Any) -> None:
            async for step in network.feed(rank, auto_ack=auto_ack, **join):
                steps[rank].append(step.step)
                assert same_share(step, filled.share(step.step, rank))
                if not auto_ack:
                    step.ack()

        async def dies_once() -> None:
            first = network.feed(1, auto_ack=auto_ack)
            for _ in range(3):
                step = await anext(first)
                steps[1].append(step.step)
                if not auto_ack and step.step < 2:
                    step.ack()
            await until(lambda: 1 in filled.acknowledged_steps)  # its word about step 1 has come through
            kill(first)
            steps[1].pop()  # what it was working on is gone with it
            await train(1, incarnation=1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, 0)
            tasks.start_soon(dies_once)
            await sb.serve(filled.balancer, network.transport, rejoin_timeout_s=1000)
        assert steps == {0: list(range(8)), 1: list(range(8))}
        assert filled.acknowledged_steps == list(range(8))
