"""What arrives at a rank, in which order, against which credits; what is acknowledged, and what comes again; the end, a
rank that is gone, refusals."""

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


def same_share(got: Any, planned: sb.rollouts.RankBatch) -> bool:
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


async def test_bytes_are_identical(kind: str) -> None:
    """Every dtype, awkward shapes, all of the metadata."""
    rollouts = {one.rollout_id: one for mb in awkward_micro_batches() for one in mb if not one.is_padding}
    config = sb.BalancerConfig(
        dp_size=1, batch_size=len(rollouts), micro_batches=sb.MicroBatches(max_tokens=129), sync="step"
    )
    async with sb.StreamBalancer(config) as balancer, open_network(kind, 1) as network:
        for rollout in rollouts.values():
            await balancer.put(rollout)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, network.transport)
            (step,) = await drain(network.feed())
    assert sorted(one.rollout_id for one in step.rollouts if not one.is_padding) == sorted(rollouts)
    for micro_batch in step.micro_batches:
        whole = sb.rollouts.MicroBatch.of([rollouts[one.rollout_id] for one in micro_batch.rollouts])
        for got in micro_batch.rollouts:
            assert same_rollout(rollouts[got.rollout_id], got), f"rollout {got.rollout_id} changed on its way"
        assert same_tensors(dict(whole.packed().columns), dict(micro_batch.packed().columns))
        assert torch.equal(whole.packed().cu_seqlens, micro_batch.packed().cu_seqlens)


async def test_what_is_held_is_never_overwritten(kind: str) -> None:
    """Memory is used again only when the last tensor of it is gone."""
    async with Filled(12, 1, num_tokens=500) as filled, open_network(kind, 1) as network:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, filled.balancer, network.transport)
            held = await drain(network.feed())
        assert all(same_share(step, filled.share(step.step, 0)) for step in held)


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
            await train(1, incarnation=1, next_step=2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train, 0)
            tasks.start_soon(dies_once)
            await sb.serve(filled.balancer, network.transport, rejoin_timeout_s=1000)
        assert steps == {0: list(range(8)), 1: list(range(8))}
        assert filled.acknowledged_steps == list(range(8))


async def test_the_version_of_loaded_weights_is_known_before_their_steps_are_acknowledged(kind: str) -> None:
    """Else rollouts would be begun that are too old for the next step."""
    events: list[str] = []

    class Seen(sb.Observer):
        def version_set(self, version: int) -> None:
            events.append(f"version {version}")

        def acknowledged(self, batch: sb.Batch) -> None:
            events.append(f"acknowledged {batch.step}")

    async with Filled(2, 1) as filled, open_network(kind, 1) as network, anyio.create_task_group() as tasks:
        filled.balancer.observers.append(Seen())
        tasks.start_soon(partial(sb.serve, rejoin_timeout_s=1000), filled.balancer, network.transport)
        first = network.feed(auto_ack=False)
        assert (await anext(first)).step == 0
        kill(first)
        loaded = network.feed(auto_ack=False, incarnation=1, next_step=1)
        loaded.set_version(1)
        step = await anext(loaded)
        assert step.step == 1
        step.ack()
        await drain(loaded)
    assert events == ["version 1", "acknowledged 0", "acknowledged 1"]


async def test_leaving_with_something_unacknowledged_is_a_loss(kind: str) -> None:
    """Also after the end was told."""
    async with Filled(3, 1, capacity=64) as filled, open_network(kind, 1) as network:

        async def train() -> None:
            feed = network.feed(auto_ack=False)
            steps = await drain(feed)
            steps[1].ack()
            await feed.aclose()
            with pytest.raises(sb.errors.ClosedResourceError):
                steps[2].ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            with pytest.raises(sb.errors.RankLostError, match="step 2"):
                await sb.serve(filled.balancer, network.transport)
        assert filled.acknowledged_steps == [0, 1]


async def test_a_rank_that_stays_away_is_an_error(kind: str) -> None:
    """``serve`` names rank and cause; what was not acknowledged is still in flight."""
    async with Filled(3, 1, hold=True) as filled, open_network(kind, 1) as network, anyio.create_task_group() as tasks:

        async def dies() -> None:
            feed = network.feed()
            await anext(feed)
            await anext(feed)
            await until(lambda: filled.acknowledged_steps == [0])
            kill(feed)

        tasks.start_soon(dies)
        with pytest.raises(sb.errors.RankLostError) as caught:
            await sb.serve(filled.balancer, network.transport)
        assert caught.value.rank == 0
        assert caught.value.cause
        assert [batch.step for batch in filled.balancer.in_flight()][:1] == [1]
        assert filled.acknowledged_steps == [0]


async def test_strangers_are_refused(kind: str) -> None:
    """A second feed for a rank, and one of another world; who is connected notices nothing."""
    async with Filled(4, 2, hold=True) as filled, open_network(kind, 2) as network, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, rejoin_timeout_s=1000), filled.balancer, network.transport)
        feed, other = network.feed(0), network.feed(1)
        assert (await anext(feed)).step == 0
        with pytest.raises(sb.errors.AlreadyInUseError, match="rank 0") as busy:
            await anext(network.feed(0))
        assert isinstance(busy.value, sb.errors.RefusedError)
        assert busy.value.reason == "busy"
        for rank, dp_size in ((1, 3), (2, 4)):
            with pytest.raises(ValueError, match=f"dp_size={dp_size}.*dp_size=2") as refused:
                await anext(network.feed(rank, dp_size=dp_size))
            assert isinstance(refused.value, sb.errors.RefusedError)
            assert refused.value.reason == "value"
        assert (await anext(other)).step == 0
        newer = network.feed(0, incarnation=1)
        assert (await anext(newer)).step == 0
        with pytest.raises(sb.errors.RankLostError):
            await drain(feed)
        tasks.cancel_scope.cancel()
