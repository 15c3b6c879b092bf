"""The GRPO example runs end to end in both its ways, in a short form. Its gradient under DDP is that of one batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_python

STARTS_TORCHRUN = """
import forked, runpy, subprocess, sys
from pathlib import Path
def call(command):
    assert command[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    forked.launch(*command[4:])
subprocess.call = call
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "grpo" / "run.py"


def forked(*command: object) -> str:
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(*command: object) -> str:
    """run.py starts torchrun on itself."""
    return forked("-c", STARTS_TORCHRUN, *command)


@pytest.mark.parametrize(
    ("start", "options", "policy", "steps"),
    [
        (forked, ["--single-process"], "round_robin", 4),
        pytest.param(under_torchrun, [], "window", 20, marks=pytest.mark.slow),
    ],
)
def test_a_few_steps(start, options, policy, steps):
    """The run itself fails if the ranks' weights differ, or if a rollout is lost or trained on twice."""
    small = ["--steps", str(steps), "--batch-size", "16", "--group-size", "4"]
    report = json.loads(start(RUN, *options, *small, "--policy", policy, "--json"))
    assert report["exactly_once"] is True
    assert report["num_trained"] + report["num_evicted"] == 16 * steps
    assert steps / 2 < report["num_steps"] == len(report["rewards"]) <= steps  # 9 steps, if no new weights came
    assert (report["policy"], report["ranks"]) == (policy, 2)
    assert 0 < report["reward_start"] < 0.5
    assert 0 <= report["idle"] < 1
    assert report["staleness"] > 0
