"""``sb.barrier``: everybody waits for everybody, whatever groups exist besides, and who is missing is named."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from forked import free_port
from processes import world_of

import stream_balancer as sb


def late_and_then_missing(rank: int) -> tuple[list[tuple[float, float]], str]:
    """When each came and went, three times over; groups differ from process to process. Then rank 1 stays away."""
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
    if rank == 1:
        return times, ""
    try:
        sb.barrier(timeout_s=0.3)
    except sb.errors.BrokenResourceError as error:
        return times, str(error)
    return times, "nothing was raised"


def test_nobody_leaves_before_all_have_come_and_the_missing_are_named() -> None:
    times, errors = zip(*world_of(3, late_and_then_missing), strict=True)
    for lap in range(3):
        assert max(one[lap][0] for one in times) <= min(one[lap][1] for one in times)
    first, _, last = errors
    assert "not every process came within 0.3 s" in first
    assert re.search(r"Ranks 1\b.* failed to pass", first)  # and 2, if the machine was too busy for it
    assert "not every process came" in last


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("lap", [1, 2])
def test_a_new_world_gets_a_new_group_and_the_accelerator_is_waited_for_first(
    world_of_one: None, lap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronised"))
    sb.barrier()
    assert done == ["synchronised"]


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="call init_process_group first"):
        sb.barrier()
    for timeout_s in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s must be positive and finite"):
            sb.barrier(timeout_s=timeout_s)
