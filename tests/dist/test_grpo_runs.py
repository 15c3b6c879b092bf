"""The GRPO example runs end to end in both its ways, in a short form; and its gradient under DDP is that of one batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples" / "grpo" / "run.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def output_of(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("start", "policy"),
    [([sys.executable, RUN, "--single-process"], "round_robin"), ([sys.executable, RUN], "window")],
    ids=["single-process", "torchrun"],
)
@pytest.mark.timeout(120)
def test_a_few_steps(start, policy):
    """Without --single-process, run.py starts torchrun on itself. The run itself fails if the ranks' weights differ, or if a rollout is lost or trained on twice."""
    small = ["--steps", "4", "--batch-size", "16", "--group-size", "4"]
    report = json.loads(output_of(*start, *small, "--policy", policy, "--json"))
    assert report["exactly_once"] is True
    assert report["num_trained"] == 64
    assert report["num_steps"] == len(report["rewards"]) == 4
    assert (report["policy"], report["ranks"]) == (policy, 2)
    assert 0 < report["reward_start"] < 0.5
    assert 0 <= report["idle"] < 1
    assert report["staleness"] > 0


@pytest.mark.timeout(120)
def test_gradient_under_ddp():
    out = output_of(*TORCHRUN, Path(__file__).with_name("grpo_ddp_rank.py"))
    differences = json.loads(out)
    assert len(differences) == 2
    assert max(differences) <= 1e-10
