"""Whoever sweeps may be killed: the processes that simulate for it end too."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks into /proc")
@pytest.mark.slow
def test_the_processes_of_a_sweep_that_is_killed_end() -> None:
    give_up = time.monotonic() + 30
    with subprocess.Popen([sys.executable, "-c", SWEEP]) as parent:
        children: list[int] = []
        while len(children) < 3:  # two that simulate, and multiprocessing's resource tracker
            assert time.monotonic() < give_up, "no sweep began"
            time.sleep(0.05)
            children = children_of(parent.pid)
        time.sleep(1.0)  # they are at work, or still importing: both must do
        parent.kill()
    while any(map(is_running, children)):
        assert time.monotonic() < give_up, "still running"
        time.sleep(0.05)
