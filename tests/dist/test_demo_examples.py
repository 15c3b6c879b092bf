"""Every example runs as its first line says."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import free_port, run_python, run_world, started, torchrun
from guard import GUARD_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example):
    done = run_python(EXAMPLES / example)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_and_short():
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    torchrun = {"torchrun_single_controller.py", "torchrun_every_rank_generates.py", "torchrun_and_workers.py"}
    elsewhere = {"torchspec_dispatch.py", "ray_cluster.py"}  # tests/unit, tests/integrations
    restarts = {"torchrun_restarts.py"}  # test_restart_drill.py
    whole = {"single_process.py", "blocking_loop.py", "shared_prefixes.py", *elsewhere, *torchrun}
    assert files.keys() == whole | restarts
    assert all(text.count("\n") < (150 if name in restarts else 90) for name, text in files.items())


def test_single_process():
    out = run("single_process.py")
    assert out.count("step ") == 8
    assert "(drain)" in out


def test_blocking_loop():
    out = run("blocking_loop.py")
    assert out.endswith("200 rollouts accepted\n")


def test_shared_prefixes():
    assert re.fullmatch(r"dense \S+ s, with shared prefixes \S+ s: \S+ of it\n", run("shared_prefixes.py"))


WORLDS = [(1, run_world), (2, run_world), pytest.param(2, torchrun, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("ranks", "launch"), WORLDS)
def test_torchrun_single_controller(ranks, launch):
    out = launch(ranks, EXAMPLES / "torchrun_single_controller.py")
    assert f"{96} rollouts trained on {ranks} ranks" in out


@pytest.mark.parametrize(
    ("ranks", "launch", "hand_over"),
    [
        *((ranks, run_world, hand_over) for ranks in (1, 2) for hand_over in ("direct", "balancer")),
        pytest.param(2, torchrun, "direct", marks=pytest.mark.slow),
    ],
)
def test_torchrun_every_rank_generates(ranks, launch, hand_over):
    out = launch(ranks, EXAMPLES / "torchrun_every_rank_generates.py", hand_over)
    assert f"{48 * ranks} rollouts trained on {ranks} ranks" in out


@pytest.mark.parametrize(("ranks", "launch"), WORLDS)
def test_torchrun_and_workers(ranks, launch, monkeypatch):
    monkeypatch.setenv("BALANCER_PORT", str(free_port()))
    example = EXAMPLES / "torchrun_and_workers.py"
    with ThreadPoolExecutor(1) as beside:
        worker = beside.submit(run_python, example, "worker")
        out = launch(ranks, example)
        assert worker.result().returncode == 0, worker.result().stderr
    assert f"{96} rollouts trained on {ranks} ranks" in out


FAILS = """
import os, sys, runpy, stream_balancer as sb
def given(feed):
    if os.environ["RANK"] == "0":
        raise ArithmeticError("the loss is not a number")
    return begin(feed)
begin, sb.RankFeed.__iter__ = sb.RankFeed.__iter__, given
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("example", ["torchrun_single_controller.py", "torchrun_every_rank_generates.py"])
def test_an_error_in_the_training_of_rank_0_ends_its_process_with_the_controller_in_it(example):
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    with started("-c", FAILS, EXAMPLES / example, environment={**os.environ, **world}) as process:
        _, errors = process.communicate(GUARD_S)
    assert process.returncode != 0
    assert "the loss is not a number" in errors


def test_torchspec_dispatch():
    out = run("torchspec_dispatch.py")
    round_robin, balanced = (float(line.split(" has ")[1].partition("%")[0]) for line in out.splitlines())
    assert balanced < 1 < round_robin
