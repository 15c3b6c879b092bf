"""Ranks are killed, stopped and started again; nothing is lost, nothing comes twice, the healthy rank notices
nothing."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import anyio
import pytest
from guard import GUARD_S
from processes import END, Child, Rank, given
from scripted import Filled

import stream_balancer as sb
from stream_balancer.errors import RankLostError


async def _drill(seed: int, mover: str, kills: int, steps: int) -> None:
    """Kill rank 1 at random moments, and start it again, until all is delivered."""
    movers = [] if mover == "socket" else [mover]
    chance = random.Random(seed)
    async with (
        Filled(steps, 2, num_tokens=100_000) as filled,
        sb.TorchTransport.listen(dp_size=2, movers=movers) as transport,
    ):
        join: dict[str, Any] = {"step_s": 0.1, "movers": movers}
        healthy = Rank(transport.address, 0, 2, **join)
        lives: list[Rank] = []

        async def reaper() -> None:
            for incarnation in range(kills):
                lives.append(Rank(transport.address, 1, 2, incarnation=incarnation, **join))
                await anyio.sleep(chance.uniform(0.0, 0.3))
                lives[-1].kill()
            lives.append(Rank(transport.address, 1, 2, incarnation=kills, **join))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaper)
            await sb.serve(filled.balancer, transport, rejoin_timeout_s=GUARD_S)
        told_healthy = await anyio.to_thread.run_sync(healthy.told)
        told = [await anyio.to_thread.run_sync(rank.told) for rank in lives]
    assert told_healthy == [*given(filled, 0), END]
    assert told[-1].pop() == END
    assert filled.acknowledged_steps == list(range(steps))
    by_step = {said[0]: said for life in told for said in life}
    assert [by_step[step] for step in sorted(by_step)] == given(filled, 1)
    for life in filter(None, told):  # in order, and without a gap
        assert [said[0] for said in life] == list(range(life[0][0], life[0][0] + len(life)))
    for before, after in pairwise(told):
        if before and after:  # at most the one step whose acknowledgement the kill may have cut off comes again
            assert after[0][0] >= before[-1][0]


MOVERS = ["socket", "shared_memory", "torch_dist"]


@pytest.mark.processes
@pytest.mark.parametrize("mover", MOVERS)
async def test_kills_at_random_moments(mover: str) -> None:
    with anyio.fail_after(GUARD_S):
        # the kills come within 1.2 s, before a rank could be through
        await _drill(1, mover, kills=4, steps=20)


@pytest.mark.soak
@pytest.mark.parametrize("mover", MOVERS)
async def test_fifty_kills_in_a_row(mover: str) -> None:
    with anyio.fail_after(1000):
        # a rank that comes again goes by the socket: each kill over torch's own pair needs a run of its own
        for seed, kills, steps in [(2, 50, 150)] if mover != "torch_dist" else [(seed, 1, 6) for seed in range(50)]:
            await _drill(seed, mover, kills, steps)


def _acknowledge_and_return(address: str, raises: bool, _: Any) -> None:
    """A child that ends without closing its feed: multiprocessing then runs no ``atexit``."""
    feed = sb.RankFeed(address, rank=0, dp_size=1, auto_ack=False)
    next(feed).ack()
    if raises:
        raise LookupError("a bug in the trainer")


@pytest.mark.processes
@pytest.mark.parametrize("raises", [False, True])
async def test_what_a_child_acknowledged_last_arrives_though_it_ends_at_once(raises: bool) -> None:
    with anyio.fail_after(GUARD_S):
        async with Filled(2, 1) as filled, sb.TorchTransport.listen(dp_size=1) as transport:
            child = Child(_acknowledge_and_return, transport.address, raises)
            with pytest.raises(RankLostError, match="rank 0"):
                await sb.serve(filled.balancer, transport)
            await anyio.to_thread.run_sync(child.told)
    assert filled.acknowledged_steps == [0]
    assert child.process.exitcode == int(raises)
