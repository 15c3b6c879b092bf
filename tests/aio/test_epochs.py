"""Ranks that train several epochs over the mini-batches of a step: the step is acknowledged once, after the last."""

from __future__ import annotations

import anyio
import pytest

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollouts

pytestmark = pytest.mark.anyio
NUM_STEPS, NUM_EPOCHS = 3, 2


@pytest.mark.parametrize("auto_ack", [True, False])
async def test_a_step_is_acknowledged_after_its_last_epoch(auto_ack: bool) -> None:
    transport = MemoryNetwork(dp_size=2)
    config = sb.BalancerConfig(dp_size=2, batch_size=8, window=8, step_size=sb.StepSize(mini_batches=2))
    trained: list[list[tuple[int, int]]] = [[], []]

    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:

        async def train(rank: int) -> None:
            async for rank_batch in sb.RankFeed(transport.connect(rank), auto_ack=auto_ack):
                for mini_batch in rank_batch.epochs(NUM_EPOCHS):
                    await anyio.sleep(1)
                    trained[rank].append((rank_batch.step, mini_batch.global_num_tokens))
                    assert rank_batch.step in [batch.step for batch in balancer.in_flight()]
                assert balancer.statistics().acknowledged <= 8 * rank_batch.step
                if not auto_ack:
                    rank_batch.ack()

        for rank in range(2):
            tasks.start_soon(train, rank)
        tasks.start_soon(sb.serve, balancer, transport)
        for rollout in make_rollouts([3 * n + 1 for n in range(8 * NUM_STEPS)]):
            await balancer.put(rollout)
        balancer.end()
    assert trained[0] == trained[1], "all ranks run the same mini-batches in the same order"
    assert len(trained[0]) == NUM_STEPS * NUM_EPOCHS * 2
    assert balancer.statistics().acknowledged == 8 * NUM_STEPS
