"""Every example runs as its first line says; and so does the benchmark for an accelerator, at toy sizes."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import free_port, run_python, run_world, started, torchrun
from guard import GUARD_S

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ALONE = {
    "single_process.py": r"(step .*\n){7}step .*\(drain\)(.|\n)*",
    "blocking_loop.py": r"(.|\n)*200 rollouts accepted\n",
    "torchspec_dispatch.py": r"(.|\n)*",
}
UNDER_TORCHRUN = {"torchrun_single_controller.py", "torchrun_every_rank_generates.py", "torchrun_and_workers.py"}


def run(path, *options):
    done = run_python(path, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_tested_and_short():
    files = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    elsewhere = {"ray_cluster.py", "torchrun_restarts.py"}  # integrations, test_restart_drill
    assert files.keys() == {*ALONE, *UNDER_TORCHRUN, *elsewhere}
    assert all(text.count("\n") < (150 if "restarts" in name else 90) for name, text in files.items())


@pytest.mark.parametrize("name", ALONE)
def test_what_runs_alone(name):
    out = run(EXAMPLES / name)
    assert re.fullmatch(ALONE[name], out), out
    if name == "torchspec_dispatch.py":
        round_robin, balanced = (float(line.split(" has ")[1].partition("%")[0]) for line in out.splitlines())
        assert balanced < 1 < round_robin


@pytest.mark.parametrize(
    ("ranks", "launch", "name", "options", "rollouts"),
    [
        (2, run_world, "torchrun_single_controller.py", (), 96),
        (2, run_world, "torchrun_every_rank_generates.py", ("direct",), 96),
        (1, run_world, "torchrun_every_rank_generates.py", ("balancer",), 48),
        (2, run_world, "torchrun_and_workers.py", (), 96),
        pytest.param(2, torchrun, "torchrun_and_workers.py", (), 96, marks=pytest.mark.slow),
    ],
)
def test_what_runs_under_torchrun(ranks, launch, name, options, rollouts, monkeypatch):
    monkeypatch.setenv("BALANCER_PORT", str(free_port()))
    with ThreadPoolExecutor(1) as beside:
        worker = beside.submit(run, EXAMPLES / name, "worker") if "workers" in name else None
        out = launch(ranks, EXAMPLES / name, *options)
        assert worker is None or worker.result() is not None
    assert f"{rollouts} rollouts trained on {ranks} ranks" in out


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


@pytest.mark.slow
def test_every_part_of_the_benchmark_for_an_accelerator_prints_its_rows():
    """Whoever has one for ten minutes loses none."""
    out = run(ROOT / "bench" / "accelerator.py", "--device", "cpu", "--json")
    rows = {row["name"]: row["value"] for row in map(json.loads, out.splitlines())}
    for policy in ("round-robin", "arrival order, best partition", "window 2x"):
        assert rows[f"{policy}: step"] > 0
    assert rows["all ranks alike, calibrated from FLOPs: prediction error, from step 30"] > 0
    assert rows["a step beside a copy, over a step alone"] > 0
    assert rows["the trainer waits for a batch that was copied beside the step"] > 0
