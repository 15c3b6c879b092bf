"""Whoever sweeps may be killed: the processes that simulate for it end too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import started
from guard import GUARD_S

SWEEP = """
import stream_balancer as sb
trace = sb.generate_trace(20_000, "lrm")
sb.tune(trace, sb.BalancerConfig(dp_size=8, batch_size=32), processes=2)
"""


def children_of(pid: int) -> list[int]:
    """Its children; none once they are children of another."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def is_running(pid: int) -> bool:
    """There, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
@pytest.mark.slow
def test_the_processes_of_a_sweep_that_is_killed_end() -> None:
    with started("-c", SWEEP) as parent:  # all is ended in any case: a whole sweep takes an hour on a slow machine
        wait_until(lambda: len(children_of(parent.pid)) >= 2, "no sweep began")
        time.sleep(1.0)  # they are at work, or still importing: both must do
        children = children_of(parent.pid)
        parent.kill()
        wait_until(lambda: not any(map(is_running, children)), "still running")
