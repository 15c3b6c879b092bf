"""Every example runs as its first line says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_and_short():
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    torchrun = {"torchrun_single_controller.py", "torchrun_every_rank_generates.py"}
    elsewhere = {"torchspec_dispatch.py", "ray_cluster.py"}  # tests/unit, tests/integrations
    assert files.keys() == {"single_process.py", "blocking_loop.py", *elsewhere, *torchrun}
    assert all(text.count("\n") < 90 for text in files.values())


def test_single_process():
    out = run(sys.executable, EXAMPLES / "single_process.py")
    assert out.count("step ") == 8
    assert "(drain)" in out


def test_blocking_loop():
    out = run(sys.executable, EXAMPLES / "blocking_loop.py")
    assert out.endswith("200 rollouts accepted\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchrun_single_controller(ranks):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    out = run(*torchrun, EXAMPLES / "torchrun_single_controller.py")
    assert f"{96} rollouts trained on {ranks} ranks" in out


@pytest.mark.parametrize(("ranks", "hand_over"), [(1, "direct"), (2, "direct"), (2, "balancer")])
def test_torchrun_every_rank_generates(ranks, hand_over):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    out = run(*torchrun, EXAMPLES / "torchrun_every_rank_generates.py", hand_over)
    assert f"{48 * ranks} rollouts trained on {ranks} ranks" in out


def test_torchspec_dispatch():
    out = run(sys.executable, EXAMPLES / "torchspec_dispatch.py")
    round_robin, balanced = (float(line.split(" has ")[1].partition("%")[0]) for line in out.splitlines())
    assert balanced < 1 < round_robin
