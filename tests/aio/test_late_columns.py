"""Columns that another consumer computes: a balancer before the trainer's, whose ranks put what they got, and more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch

import stream_balancer as sb
from stream_balancer.controller.serve import serve
from stream_balancer.testing import make_rollouts
from stream_balancer.transport.memory import MemoryTransport

pytestmark = pytest.mark.anyio
NUM_ROLLOUTS = 32


async def test_a_reference_rank_that_dies_between_put_and_acknowledgement_loses_and_doubles_nothing() -> None:
    transport = MemoryTransport(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=8, policy="fifo")
    trained: list[sb.Rollout] = []
    num_put_again = 0

    async with (
        sb.StreamBalancer(config) as rollouts,
        sb.StreamBalancer(sb.BalancerConfig(dp_size=2, batch_size=8, max_staleness=0)) as trainers,
        anyio.create_task_group() as tasks,
    ):
        trainers.set_version(5)

        async def reference_rank(rank: int, incarnation: int, dies_after: int) -> None:
            nonlocal num_put_again
            num_put = 0
            async with sb.RankFeed(transport.connect(rank, incarnation=incarnation)) as feed:
                async for rank_batch in feed:
                    for rollout in (r for r in rank_batch.rollouts if not r.is_padding):
                        column = -rollout.tokens["input_ids"].double()
                        try:
                            await trainers.put(replace(rollout, tokens={**rollout.tokens, "ref_logprobs": column}))
                        except sb.DuplicateRolloutError:
                            num_put_again += 1
                        num_put += 1
                        if num_put == dies_after:
                            return  # without acknowledging what it has put

        async def reference() -> None:
            async with anyio.create_task_group() as ranks:
                ranks.start_soon(reference_rank, 0, 0, NUM_ROLLOUTS)
                await reference_rank(1, 0, 7)
                await reference_rank(1, 1, NUM_ROLLOUTS)
            trainers.end()

        async def train() -> None:
            async for batch in trainers.batches():
                trained.extend(r for r in batch.rollouts if not r.is_padding)
                await anyio.sleep(1)

        tasks.start_soon(partial(serve, rejoin_timeout_s=10), rollouts, transport)
        tasks.start_soon(reference)
        tasks.start_soon(train)
        given = [replace(r, version=5) for r in make_rollouts([3 * n % 50 + 1 for n in range(NUM_ROLLOUTS)])]
        for rollout in given:
            await rollouts.put(rollout)
        rollouts.end()
    assert num_put_again > 0
    assert sorted(r.rollout_id for r in trained) == sorted(r.rollout_id for r in given)
    for rollout in trained:
        assert torch.equal(rollout.tokens["ref_logprobs"], -rollout.tokens["input_ids"].double())
        assert rollout.version == 5
    assert trainers.statistics().evicted["stale"] == 0
