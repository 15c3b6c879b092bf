"""Nothing moves for long: whoever waits has it logged, at the moment, and then each time it has doubled."""

from __future__ import annotations

import math
from functools import partial

import anyio
import helpers
import pytest

import stream_balancer as sb
from stream_balancer.testing import make_rollout, make_rollouts

config = partial(helpers.config, window=4, capacity=4)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "stream_balancer.balancer"]


async def fill(balancer: sb.StreamBalancer, extra: int = 1) -> None:
    for rollout in make_rollouts([2] * 4):
        await balancer.put(rollout)
    for n in range(extra):
        await balancer.put(make_rollout(2, f"extra{n}"))


async def test_nobody_iterates(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        with anyio.move_on_after(500):
            await fill(balancer)
    assert [line.split(" s:")[0] for line in reports(caplog)] == [f"no batch for {n}" for n in (60, 120, 240, 480)]
    assert all("a batch is ready; nobody iterates batches(); 1 puts wait for room" in line for line in reports(caplog))


async def test_producers_died_and_end_was_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config(), report_after_s=10) as balancer:
        await balancer.put(make_rollout(2))
        with anyio.move_on_after(30):
            await anext(balancer.batches())
    assert [line[:19] for line in reports(caplog)] == ["no batch for 10 s: ", "no batch for 20 s: "]
    assert "1 rollout waits (window 4), the oldest for 10 s" in reports(caplog)[0]


async def test_nobody_may_begin(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config()) as balancer, balancer.reserve(4):
        with anyio.move_on_after(100):
            async with balancer.reserve():
                pass
    assert len(reports(caplog)) == 1


async def test_silence_while_batches_leave_in_time_and_where_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    async with sb.StreamBalancer(config()) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(fill, balancer, 36)
        batches = balancer.batches()
        for _ in range(10):
            await anyio.sleep(50)
            await anext(batches)
    async with sb.StreamBalancer(config(), report_after_s=math.inf) as balancer:
        with anyio.move_on_after(1e6):
            await anext(balancer.batches())
    assert reports(caplog) == []


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_bad_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="report_after_s must be > 0"):
        sb.StreamBalancer(config(), report_after_s=value)


@pytest.mark.parametrize(
    ("rank", "world_size", "warned"), [(0, 2, False), (1, 2, True), (1, 4, True), (1, 1, False), (None, 2, False)]
)
async def test_a_balancer_on_every_rank_is_noticed(
    rank: int | None, world_size: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: rank is not None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, 0)
        balancer.end()
        assert [batch.step async for batch in balancer.batches()] == [0]
    told = reports(caplog)
    assert len(told) == warned
    assert all("sb.serve" in line and "sb.connect" in line and "rank 1 " in line for line in told)
