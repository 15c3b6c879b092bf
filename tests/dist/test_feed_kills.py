"""Ranks are killed, stopped and started again; nothing is lost, nothing comes twice, the healthy rank notices
nothing."""

from __future__ import annotations

import random
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
        told: list[list[Any]] = []

        async def reaper() -> None:
            next_step = 0
            for incarnation in range(kills + 1):
                rank = Rank(transport.address, 1, 2, incarnation=incarnation, next_step=next_step, **join)
                if incarnation < kills:
                    await anyio.sleep(chance.uniform(0.0, 0.3))
                    rank.kill()
                told.append(await anyio.to_thread.run_sync(rank.told))
                # its weights are saved when it tells of a step
                next_step = told[-1][-1][0] + 1 if told[-1] and incarnation < kills else next_step

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaper)
            await sb.serve(filled.balancer, transport, rejoin_timeout_s=GUARD_S)
        told_healthy = await anyio.to_thread.run_sync(healthy.told)
    assert told_healthy == [*given(filled, 0), END]
    assert told[-1].pop() == END
    assert filled.acknowledged_steps == list(range(steps))
    # each step once, in order, though the kill may have cut off its acknowledgement
    assert [said for life in told for said in life] == given(filled, 1)


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
