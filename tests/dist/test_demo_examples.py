"""Every example runs as its first line says."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_python, run_world
from guard import GUARD_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example):
    done = run_python(EXAMPLES / example)
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(ranks, *command):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = subprocess.run(
        [*map(str, [*launch, *command])], capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_and_short():
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    torchrun = {"torchrun_single_controller.py", "torchrun_every_rank_generates.py"}
    elsewhere = {"torchspec_dispatch.py", "ray_cluster.py"}  # tests/unit, tests/integrations
    assert files.keys() == {"single_process.py", "blocking_loop.py", *elsewhere, *torchrun}
    assert all(text.count("\n") < 90 for text in files.values())


def test_single_process():
    out = run("single_process.py")
    assert out.count("step ") == 8
    assert "(drain)" in out


def test_blocking_loop():
    out = run("blocking_loop.py")
    assert out.endswith("200 rollouts accepted\n")


WORLDS = [(1, run_world), (2, run_world), pytest.param(2, torchrun, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("ranks", "launch"), WORLDS)
def test_torchrun_single_controller(ranks, launch):
    out = launch(ranks, EXAMPLES / "torchrun_single_controller.py")
    assert f"{96} rollouts trained on {ranks} ranks" in out


@pytest.mark.parametrize("hand_over", ["direct", "balancer"])
@pytest.mark.parametrize(("ranks", "launch"), WORLDS)
def test_torchrun_every_rank_generates(ranks, launch, hand_over):
    out = launch(ranks, EXAMPLES / "torchrun_every_rank_generates.py", hand_over)
    assert f"{48 * ranks} rollouts trained on {ranks} ranks" in out


def test_torchspec_dispatch():
    out = run("torchspec_dispatch.py")
    round_robin, balanced = (float(line.split(" has ")[1].partition("%")[0]) for line in out.splitlines())
    assert balanced < 1 < round_robin
