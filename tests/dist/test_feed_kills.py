"""Ranks are killed, stopped and started again; nothing is lost, nothing comes twice, the healthy rank notices
nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import anyio
import pytest
import torch
from forked import PROCESSES

from stream_balancer.controller.serve import serve
from stream_balancer.errors import RankLostError
from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing.transports import ScriptedBalancer, make_batch
from stream_balancer.transport.gloo.torch_dist import TorchTransport

GUARD_S = 50


def _train(address: str, rank: int, incarnation: int, step_s: float, told: Connection) -> None:
    torch.set_num_threads(1)
    for batch in RankFeed(address, rank=rank, dp_size=2, incarnation=incarnation):
        ids = [r.rollout_id for r in batch.rollouts]
        checksum = sum(int(mb.packed()["input_ids"].sum()) for mb in batch.micro_batches)
        time.sleep(step_s)
        told.send((batch.step, ids, checksum))
    told.send(None)


class Rank:
    """A rank's process and what it has told."""

    def __init__(self, address: str, rank: int, incarnation: int = 0, step_s: float = 0.0) -> None:
        self.told, theirs = PROCESSES.Pipe(duplex=False)
        self.process: BaseProcess = PROCESSES.Process(
            target=_train, args=(address, rank, incarnation, step_s, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def trained(self) -> list[tuple[int, list[str], int]]:
        """What it has said so far; waits until it has ended."""
        got = []
        try:
            while (said := self.told.recv()) is not None:
                got.append(said)
        except EOFError:
            pass
        self.process.join(GUARD_S)
        return got


def _expected(step: int, rank: int, num_tokens: int) -> tuple[int, list[str], int]:
    share = make_batch(step, 2, num_tokens=num_tokens).ranks[rank]
    checksum = sum(int(r.tokens["input_ids"].sum()) for r in share.rollouts)
    return step, [r.rollout_id for r in share.rollouts], checksum


async def _drill(
    seed: int, kills: int, steps: int, num_tokens: int, step_s: float, *, shared_memory: bool = True
) -> None:
    """Kill rank 1 at random moments, and start it again, until all is delivered."""
    chance = random.Random(seed)
    balancer = ScriptedBalancer([make_batch(step, 2, num_tokens=num_tokens) for step in range(steps)])
    async with TorchTransport.listen(dp_size=2, shared_memory=shared_memory) as transport:
        address = transport.address or ""
        healthy = Rank(address, 0, step_s=step_s)
        lives: list[Rank] = []

        async def reaper() -> None:
            for incarnation in range(kills):
                lives.append(Rank(address, 1, incarnation, step_s))
                await anyio.sleep(chance.uniform(0.0, 0.3))
                lives[-1].signal(signal.SIGKILL)
            lives.append(Rank(address, 1, kills, step_s))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaper)
            await serve(balancer, transport, rejoin_timeout_s=30)
        told_healthy = await anyio.to_thread.run_sync(healthy.trained)
        told = [await anyio.to_thread.run_sync(rank.trained) for rank in lives]
    assert told_healthy == [_expected(step, 0, num_tokens) for step in range(steps)]
    assert balancer.acknowledged == list(range(steps))
    flat = [said for life in told for said in life]
    by_step = {said[0]: said for said in flat}
    assert by_step == {step: _expected(step, 1, num_tokens) for step in range(steps)}
    for life in told:  # in order, and without a gap
        assert [said[0] for said in life] == list(range(life[0][0], life[0][0] + len(life))) if life else True
    for before, after in pairwise(told):
        if before and after:  # at most the one step whose acknowledgement the kill may have cut off comes again
            assert after[0][0] >= before[-1][0]


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("shared_memory", [False, True])
async def test_kills_at_random_moments(shared_memory: bool) -> None:
    with anyio.fail_after(GUARD_S):
        await _drill(1, kills=4, steps=30, num_tokens=100_000, step_s=0.01, shared_memory=shared_memory)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared_memory", [False, True])
async def test_fifty_kills_in_a_row(shared_memory: bool) -> None:
    with anyio.fail_after(500):
        await _drill(2, kills=50, steps=150, num_tokens=100_000, step_s=0.1, shared_memory=shared_memory)


@pytest.mark.timeout(90)
def test_a_stopped_rank_is_reported_and_goes_on() -> None:
    anyio.run(_stop)


async def _stop() -> None:
    steps = 6
    balancer = ScriptedBalancer([make_batch(step, 2, num_tokens=400_000) for step in range(steps)])
    with anyio.fail_after(GUARD_S):
        async with TorchTransport.listen(dp_size=2, keepalive_s=0.4) as transport:
            address = transport.address or ""
            ranks = [Rank(address, rank, step_s=0.05) for rank in range(2)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve, balancer, transport)
                while not balancer.step_seconds:
                    await anyio.sleep(0.005)
                ranks[1].signal(signal.SIGSTOP)
                while not transport.sessions[1].stalled_s > 1.5:
                    await anyio.sleep(0.02)
                assert transport.sessions[0].live
                ranks[1].signal(signal.SIGCONT)
            told = [await anyio.to_thread.run_sync(rank.trained) for rank in ranks]
    for rank in range(2):
        assert [said[0] for said in told[rank]] == list(range(steps))
    assert balancer.acknowledged == list(range(steps))


def _acknowledge_and_return(address: str, raises: bool) -> None:
    """A child that ends without closing its feed: multiprocessing then runs no ``atexit``."""
    feed = RankFeed(address, rank=0, dp_size=1, auto_ack=False)
    next(feed).ack()
    if raises:
        raise LookupError("a bug in the trainer")


@pytest.mark.processes
@pytest.mark.parametrize("raises", [False, True])
async def test_what_a_child_acknowledged_last_arrives_though_it_ends_at_once(raises: bool) -> None:
    balancer = ScriptedBalancer([make_batch(step, 1) for step in range(2)])
    with anyio.fail_after(GUARD_S):
        async with TorchTransport.listen(dp_size=1) as transport:
            child = PROCESSES.Process(target=_acknowledge_and_return, args=(transport.address or "", raises))
            child.start()
            with pytest.raises(RankLostError, match="closed its feed"):
                await serve(balancer, transport)
            await anyio.to_thread.run_sync(child.join)
    assert balancer.acknowledged == [0]
    assert child.exitcode == int(raises)
