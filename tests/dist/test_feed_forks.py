"""A process that has forked children dies: its peers learn it at once, though the children live on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import anyio
import pytest
from forked import forked, hear
from guard import GUARD_S
from scripted import ScriptedBalancer, make_batch

import stream_balancer as sb
from stream_balancer.errors import BrokenResourceError, RankLostError
from stream_balancer.testing import make_rollout

LIFE_S = 4 * GUARD_S


def by_fork_of_a_fork() -> int:
    """A worker of a worker."""
    told, tell = os.pipe()
    if os.fork() == 0:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFE_S,))
        child.start()
        os.write(tell, (child.pid or 0).to_bytes(4, "little"))
        os._exit(0)
    return int.from_bytes(os.read(told, 4), "little")


def by_exec() -> int:
    return subprocess.Popen(["sleep", str(LIFE_S)], close_fds=False).pid


WAYS = [by_fork_of_a_fork, by_exec]


def train(address: str, begin_child: Callable[[], int], told: Connection) -> None:
    with sb.RankFeed(address, rank=0, dp_size=1) as feed:
        next(feed)
        told.send(begin_child())
        time.sleep(LIFE_S)


def control(begin_child: Callable[[], int], told: Connection) -> None:
    async def main() -> None:
        config = sb.BalancerConfig(dp_size=1, batch_size=1, window=1)
        async with sb.TorchTransport.listen(dp_size=1) as transport, sb.StreamBalancer(config) as balancer:
            told.send(transport.address)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sb.serve, balancer, transport)
                while not balancer.statistics().in_flight:
                    await anyio.sleep(0.005)
                told.send(begin_child())

    anyio.run(main)


class Parent:
    """A process that has begun a child; ``kill`` ends it, and leaves the child."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._process, self.told = forked(target, *args, daemon=False)

    def kill(self) -> None:
        """Once its child is there."""
        self._child = hear(self.told)
        self._process.kill()

    def end_child(self) -> None:
        os.kill(self._child, signal.SIGKILL)  # raises if it does not live any more
        self._process.join()


@pytest.mark.parametrize("begin_child", WAYS)
def test_a_killed_rank_is_missed_though_its_child_lives(begin_child: Callable[[], int]) -> None:
    async def main() -> None:
        async with sb.TorchTransport.listen(dp_size=1) as transport, anyio.create_task_group() as tasks:
            rank = Parent(train, transport.address, begin_child)
            tasks.start_soon(anyio.to_thread.run_sync, rank.kill)
            with pytest.raises(RankLostError, match="rank 0"), anyio.fail_after(GUARD_S):
                await sb.serve(ScriptedBalancer([make_batch(0, 1)], hold=True), transport)
        rank.end_child()

    anyio.run(main)


@pytest.mark.parametrize("begin_child", WAYS)
def test_a_killed_controller_is_missed_though_its_child_lives(begin_child: Callable[[], int]) -> None:
    controller = Parent(control, begin_child)
    address = hear(controller.told)
    with sb.connect(address) as producer, sb.RankFeed(address, rank=0, dp_size=1) as feed:
        producer.put(make_rollout(4))
        next(feed)
        controller.kill()
        with pytest.raises(RankLostError, match="lost its controller"):
            next(feed)
        with pytest.raises(BrokenResourceError):
            while True:
                producer.put(make_rollout(4))
    controller.end_child()
