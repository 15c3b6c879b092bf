"""One of several real ranks is killed, or slow: others do its part of the step, with the gradient that it would have
had."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from forked import forked
from gradient import Gradient, World, all_said
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.testing import make_rollout

ROLLOUTS, BATCH = 96, 24


SLOW = 1


def run_rank(address: str, port: int, rank: int, dp_size: int, dies_at: dict[int, str], late: bool, pipe: Any) -> None:
    """The loop of every feature. ``late``: ``SLOW`` is not through with its first micro-batch of a step before another
    rank works on what it has not begun."""
    world = World(port, rank)
    feed = sb.RankFeed(address, rank=rank, dp_size=dp_size)
    for step in feed:
        gradient, resumed_at, number = Gradient(), 0.0, 0
        own = len(step._part.work)
        die(pipe, dies_at, step.step, "work")
        for number, micro_batch in enumerate(step):
            if late and rank == SLOW and number == 0:
                world.store.wait([f"step {step.step}"], timedelta(minutes=5))
                die(pipe, dies_at, step.step, "slow")
            if number >= own:
                resumed_at = time.monotonic()
                world.store.set(f"step {step.step}", "others are at work")
                die(pipe, dies_at, step.step, "taking over")
            gradient.add(micro_batch)
        end = step.finish()
        assert end is not None
        total = gradient.flat() / end.loss_tokens
        world.all_reduce(total, end.ranks)
        pipe.send((step.step, end.ranks, gradient.ids, total.tolist(), resumed_at))
        die(pipe, dies_at, step.step, "met")


def die(pipe: Any, dies_at: dict[int, str], step: int, when: str) -> None:
    if dies_at.get(step) == when:
        pipe.send(("dies", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


async def drill(
    dp_size: int, deaths: dict[int, dict[int, str]], journal: Path, *, move_late: bool = False
) -> tuple[sb.Statistics, list[list[Any]]]:
    """``deaths[rank]``: in which step, and when. -> what each rank has said."""
    more: dict[str, Any] = {"micro_batches": {"max_tokens": 60, "counts": "free"}} if move_late else {}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=BATCH, window=BATCH, **more)
    with anyio.fail_after(GUARD_S):
        async with (
            sb.StreamBalancer(config, journal=journal) as balancer,
            sb.TorchTransport.listen(dp_size=dp_size) as transport,
        ):
            ranks = [
                forked(run_rank, transport.address, store.port, rank, dp_size, deaths.get(rank, {}), move_late)
                for rank in range(dp_size)
            ]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sb.serve, on_rank_loss="replan", move_late=move_late), balancer, transport)
                for n in range(ROLLOUTS):
                    await balancer.put(make_rollout(1 + 7 * n % 50, f"r{n}"))
                balancer.end()
            said = [await anyio.to_thread.run_sync(all_said, process, pipe) for process, pipe in ranks]
            return balancer.statistics(), said


def check(statistics: sb.Statistics, said: list[list[Any]], lost: set[int]) -> list[float]:
    """Every rollout is in one gradient, once, and the gradient is that of the step. -> seconds from each death to the
    part that another rank took over, where one did."""
    assert (statistics.acknowledged, statistics.in_flight, statistics.waiting) == (ROLLOUTS, 0, 0)
    steps: dict[int, list[tuple[Any, ...]]] = {}
    died = [one[1] for words in said for one in words if one[0] == "dies"]
    for words in said:
        for step, *rest in words:
            if step != "dies":
                steps.setdefault(step, []).append(tuple(rest))
    trained: list[str] = []
    for heard in steps.values():
        ranks = heard[0][0]
        assert all(one[0] == ranks for one in heard)
        ids = [name for one in heard for name in one[1]]
        trained += ids
        reference = Gradient()
        of_step = [make_rollout(1 + 7 * int(name[1:]) % 50, name) for name in ids]
        reference.add(sb.types.MicroBatch.of(of_step))
        whole = reference.flat() / sum(rollout.num_loss_tokens for rollout in of_step)
        assert all(torch.allclose(torch.tensor(one[2]), whole, atol=1e-6) for one in heard)
    assert sorted(trained) == sorted(f"r{n}" for n in range(ROLLOUTS))
    last = steps[max(steps)][0][0]
    assert set(last) == set(range(len(said))) - lost
    # A rank that dies after the ranks have met may owe nothing that another could take over.
    resumed = [[r - at for heard in steps.values() for *_, r in heard if r > at] for at in died]
    return [min(seconds) for seconds in resumed if seconds]


@pytest.mark.parametrize("when", ["work", "met"])
def test_one_of_three_is_killed(when: str, tmp_path: Path) -> None:
    statistics, said = anyio.run(drill, 3, {1: {1: when}}, tmp_path)
    check(statistics, said, {1})


@pytest.mark.parametrize("deaths", [{}, {SLOW: {1: "slow"}}, {0: {1: "taking over"}}], ids=str)
def test_others_do_what_a_slow_rank_has_not_begun(deaths: dict[int, dict[int, str]], tmp_path: Path) -> None:
    statistics, said = anyio.run(partial(drill, move_late=True), 3, deaths, tmp_path)
    died = {rank for rank, words in enumerate(said) if any(one[0] == "dies" for one in words)}
    assert bool(died) == bool(deaths)
    check(statistics, said, died)


@pytest.mark.slow
def test_one_of_eight_is_killed_then_another(tmp_path: Path) -> None:
    statistics, said = anyio.run(drill, 8, {3: {1: "work"}, 0: {2: "met"}}, tmp_path)
    seconds = check(statistics, said, {0, 3})
    print("resumed after", [f"{s * 1000:.0f} ms" for s in seconds])  # noqa: T201
