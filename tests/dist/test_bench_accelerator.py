"""The benchmark for an accelerator runs, here at toy sizes on the CPU: whoever has one for ten minutes loses none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_part_of_the_benchmark_prints_its_rows() -> None:
    done = run_python(ROOT / "bench" / "accelerator.py", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row["value"] for row in map(json.loads, done.stdout.splitlines())}
    for policy in ("round-robin", "arrival order, best partition", "window 2x"):
        assert rows[f"{policy}: step"] > 0
    assert rows["all ranks alike, calibrated from FLOPs: prediction error, from step 30"] > 0
    assert rows["a step beside a copy, over a step alone"] > 0
    assert rows["the trainer waits for a batch that was copied beside the step"] > 0
