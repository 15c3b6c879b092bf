"""The program of docs/restarting.md: any of its processes is killed, again and again, and the weights are those of one
process that trains the same steps."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import Python, free_port, started

import stream_balancer as sb

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_restarts.py"
# a pipe that nobody reads would stop a launcher that has said much
LAUNCH = """
import forked, os, sys
for number in (1, 2):
    os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
forked.launch(*sys.argv[2:])
"""
TURN = ("worker 0", "rank0", "rank1", "control")


class Run:
    """Its processes; those that died are started again, but for the ranks, which torchrun starts."""

    def __init__(self, folder: Path, prompts: int) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "BALANCER_PORT": str(free_port()),
            "PROMPTS": str(prompts),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.all = ExitStack()
        self.processes: dict[str, Python] = {}
        for name in ("control", "worker 0", "worker 1", "train"):
            self.start(name)

    def start(self, name: str) -> None:
        kind, *number = name.split()
        command: list[object] = [EXAMPLE, kind, self.folder, *number]
        if kind == "train":
            launcher = ["--nproc-per-node=2", "--max-restarts=100", __file__]
            command = ["-c", LAUNCH, self.folder / "log", *launcher, *command]
        self.processes[name] = self.all.enter_context(started(*command, environment=self.environment))

    @property
    def is_over(self) -> bool:
        return self.processes["train"].returncode is not None

    def keep_up(self) -> None:
        for name, process in list(self.processes.items()):
            if name != "train" and process.returncode not in (None, 0):
                self.start(name)

    def kill(self, name: str) -> None:
        if name in self.processes:
            self.processes[name].kill()
        else:
            os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def given(self) -> list[list[str]]:
        """Of both ranks: each line a step, and its rollouts."""
        logs = [self.folder / f"rank{rank}.steps" for rank in range(2)]
        return [line.split() for log in logs if log.exists() for line in log.read_text().splitlines()]


@contextmanager
def running(folder: Path, prompts: int) -> Iterator[Run]:
    run = Run(folder, prompts)
    with run.all:
        yield run


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(4, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_whatever_is_killed_each_rollout_is_in_the_weights_once(rounds: int, tmp_path: Path) -> None:
    with running(tmp_path, prompts=10**9) as run:
        for name in itertools.islice(itertools.cycle(TURN), rounds):
            before, again = len(run.given()), time.monotonic() + 1.0
            while len(run.given()) < before + 6 or time.monotonic() < again:  # all of them are at work again
                assert not run.is_over, (tmp_path / "log").read_text()
                run.keep_up()
                time.sleep(0.05)
            run.kill(name)
        for number in range(2):  # which is through with its prompts, when it is started again
            run.kill(f"worker {number}")
            run.processes[f"worker {number}"].wait()
            (tmp_path / f"worker{number}").write_text(str(10**9))
        while not run.is_over:
            run.keep_up()
            time.sleep(0.05)
        assert run.processes["train"].returncode == 0, (tmp_path / "log").read_text()
        steps = rollouts_by_step(run)
    assert list(steps) == list(range(len(steps)))
    trained = list(itertools.chain.from_iterable(steps.values()))
    assert len(trained) == len(set(trained))
    for name, weights in replayed(tmp_path, steps).items():
        torch.testing.assert_close(torch.load(tmp_path / "checkpoint.pt")["model"][name], weights)


def rollouts_by_step(run: Run) -> dict[int, list[str]]:
    """Each step was given with the same rollouts whenever it was given."""
    found: dict[int, list[str]] = {}
    for rank in range(2):
        mine: dict[str, list[str]] = {}
        for step, *ids in (line.split() for line in (run.folder / f"rank{rank}.steps").read_text().splitlines()):
            assert mine.setdefault(step, ids) == ids
        for step, ids in mine.items():
            found.setdefault(int(step), []).extend(ids)
    return dict(sorted(found.items()))


def replayed(folder: Path, steps: dict[int, list[str]]) -> dict[str, torch.Tensor]:
    """The weights of one process that trains these steps."""
    example = load_example(folder)
    model = example.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in steps.values():
        prompts = {rollout_id.partition("-")[0] for rollout_id in ids}
        there = {one.rollout_id: one for prompt in prompts for one in example.generate(int(prompt), 0)}
        rollouts = [there[rollout_id] for rollout_id in ids]
        optimizer.zero_grad()
        total = sum(int(one.tokens["loss_mask"].sum()) for one in rollouts)
        (example.loss_sum(model, sb.rollouts.MicroBatch.of(rollouts)) / total).backward()
        optimizer.step()
    return dict(model.state_dict())


def load_example(folder: Path) -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLE), "replay", str(folder)])
        return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def run_rank() -> None:
    """The example's rank writes down its process, and the rollouts that every step gave it."""
    folder, rank = Path(sys.argv[2]), os.environ["RANK"]
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    log = (folder / f"rank{rank}.steps").open("a")
    begin = sb.RankFeed.__next__

    def noted(feed: sb.RankFeed) -> sb.Step:
        step = begin(feed)
        log.write(" ".join([str(step.step), *(one.rollout_id for one in step.rollouts if not one.is_padding)]) + "\n")
        log.flush()
        return step

    sb.RankFeed.__next__ = noted  # type: ignore[assignment,method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    run_rank()
