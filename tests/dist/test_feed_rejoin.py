"""A controller that is killed and started again from its journal: ranks that wait for it train on each rollout once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
from forked import PROCESSES, free_port
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.testing import make_rollout

NUM_ROLLOUTS = 48


def _control(folder: Path, port: int) -> None:
    anyio.run(_controller, folder, port)


async def _controller(folder: Path, port: int) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, capacity=8)
    async with (
        sb.StreamBalancer(config, journal=folder) as balancer,
        sb.TorchTransport.listen(dp_size=2, port=port) as transport,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, transport)
        for number in range(NUM_ROLLOUTS):
            try:
                await balancer.put(make_rollout(10 + number, str(number)))
            except sb.errors.DuplicateRolloutError:
                continue  # accepted by the one before
        balancer.end()


@pytest.mark.processes
@pytest.mark.parametrize("auto_ack", [True, False], ids=["auto_ack", "every third step"])
async def test_ranks_go_on_with_a_controller_that_comes_back(tmp_path: Path, auto_ack: bool) -> None:
    port = free_port()
    trained: list[list[str]] = [[], []]
    enough = anyio.Event()

    def start() -> None:
        nonlocal controller
        controller = PROCESSES.Process(target=_control, args=(tmp_path / "journal", port), daemon=True)
        controller.start()

    async def train(rank: int) -> None:
        feed = sb.RankFeed(f"tcp://127.0.0.1:{port}", rank=rank, dp_size=2, auto_ack=auto_ack, rejoin=True)
        async with feed:
            async for batch in feed:
                trained[rank] += [rollout.rollout_id for rollout in batch.rollouts if not rollout.is_padding]
                if batch.step == 3:
                    enough.set()
                if not auto_ack and (batch.step % 3 == 0 or batch.step == NUM_ROLLOUTS // 4 - 1):
                    batch.ack()

    controller = PROCESSES.Process()
    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as tasks:
            start()
            for rank in range(2):
                tasks.start_soon(train, rank)
            await enough.wait()
            assert controller.pid
            os.kill(controller.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(controller.join)
            start()
        await anyio.to_thread.run_sync(controller.join)
    assert controller.exitcode == 0
    assert sorted(trained[0] + trained[1], key=int) == [str(number) for number in range(NUM_ROLLOUTS)]
