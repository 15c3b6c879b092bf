"""``sb.barrier``: everybody waits for everybody, whatever groups exist besides, and who is missing is named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked, free_port, hear
from guard import GUARD_S

import stream_balancer as sb

WORLD = 3


def _run(job: Callable[[int], Any], rank: int, port: int, told: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    told.send(job(rank))
    told.recv()  # who is missed is still there
    if job is not someone_missing:
        dist.destroy_process_group()


def all_of(job: Callable[[int], Any]) -> list[Any]:
    """What each of three processes made of ``job``."""
    port = free_port()
    processes, pipes = zip(*(forked(_run, job, rank, port) for rank in range(WORLD)), strict=True)
    got = [hear(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send("all have said")
    for process in processes:
        process.join(GUARD_S)
        assert process.exitcode == 0
    return got


def late(rank: int) -> list[tuple[float, float]]:
    """When each came and went, three times over; groups differ from process to process."""
    some = dist.new_group([0, 2])
    times = []
    for lap in range(3):
        if lap == rank:
            time.sleep(0.1)
        came = time.monotonic()
        sb.barrier()
        times.append((came, time.monotonic()))
    if rank != 1:
        sb.barrier(some)
        sb.barrier(some)
    sb.barrier()
    return times


def someone_missing(rank: int) -> str:
    sb.barrier()
    if rank == 1:
        return ""
    try:
        sb.barrier(timeout_s=0.3)
    except sb.errors.BrokenResourceError as error:
        return str(error)
    return "nothing was raised"


def test_nobody_leaves_before_all_have_come() -> None:
    times = all_of(late)
    for lap in range(3):
        assert max(one[lap][0] for one in times) <= min(one[lap][1] for one in times)


def test_the_missing_are_named() -> None:
    first, _, last = all_of(someone_missing)
    assert "not every process came within 0.3 s" in first
    assert re.search(r"Ranks 1\b.* failed to pass", first)  # and 2, if the machine was too busy for it
    assert "not every process came" in last


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_accelerator_is_waited_for_first(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronised"))
    sb.barrier()
    assert done == ["synchronised"]


@pytest.mark.parametrize("lap", [1, 2])
def test_a_new_world_gets_a_new_group(world_of_one: None, lap: int) -> None:
    sb.barrier()


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        sb.barrier()
    for timeout_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be positive and finite"):
            sb.barrier(timeout_s=timeout_s)
