"""SIGKILL at random moments, to the controller, to ranks, to all: what was accepted is what was trained on.

A rank's weights are the list of ids it trained on. A checkpoint says how far that list counts and up to which step;
what comes after is lost when the rank dies, as weights are. A rank begins with the newest checkpoint that both have.
See docs/restarting.md for the protocol.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from forked import PROCESSES, free_port
from guard import GUARD_S

import stream_balancer as sb
from stream_balancer.testing import make_rollout

NUM_WORKERS = 24
SAVE_EVERY = 3


def config() -> sb.BalancerConfig:
    return sb.BalancerConfig(dp_size=2, batch_size=16, window=32, capacity=64, deadline_s=0.5)


def length(number: int) -> int:
    return 1 + number * 7919 % 97


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def checkpoints(folder: Path, rank: int) -> dict[int, int]:
    """By step: how much of the list of ids counts."""
    path = folder / f"rank{rank}.checkpoints"
    return {-1: 0} | {int(step): size for step, size in json.loads(path.read_text() if path.exists() else "{}").items()}


class Weights:
    """Ids trained on, and the checkpoints of them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._list, self._path = folder / f"rank{rank}.ids", folder / f"rank{rank}.checkpoints"
        mine, other = checkpoints(folder, rank), checkpoints(folder, 1 - rank)
        self.step = max(mine.keys() & other.keys())
        self._saved = {step: size for step, size in mine.items() if step <= self.step}
        # what is not in the checkpoint is lost; later checkpoints first, since they count on it
        write_whole(self._path, json.dumps(self._saved))
        self._list.touch()
        os.truncate(self._list, self._saved[self.step])
        self._file = self._list.open("a")

    def train(self, step: int, rollouts: Any) -> None:
        assert step == self.step + 1, f"step {step} after step {self.step}"
        self.step = step
        for rollout in rollouts:
            if not rollout.is_padding:
                assert rollout.num_tokens == length(int(rollout.rollout_id))
                self._file.write(f"{rollout.rollout_id}\n")

    def save(self) -> None:
        self._file.flush()
        self._saved[self.step] = self._list.stat().st_size
        write_whole(self._path, json.dumps(self._saved))

    def ids(self) -> list[int]:
        """Those of the checkpoint; nothing may be trained afterwards."""
        self._file.close()
        return [int(line) for line in self._list.read_text().split()]


def numbers(path: Path, least: int) -> Iterator[int]:
    """From 0 on, until the driver has said stop, but at least so many."""
    for number in itertools.count():
        if number >= least and path.exists():
            return
        yield number


def _control(folder: Path, port: int, least: int) -> None:
    logging.disable()
    anyio.run(_controller, folder, port, least)


def _appended(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)


async def _controller(folder: Path, port: int, least: int) -> None:
    accepted, begun = (_appended(folder / name) for name in ("accepted", "begun"))
    known, tried = (set(map(int, (folder / name).read_text().split())) for name in ("accepted", "begun"))
    unsure = sorted(tried - known)  # of these puts nobody heard before the crash
    todo = itertools.chain(unsure, (number for number in numbers(folder / "stop", least) if number not in tried))
    async with (
        sb.StreamBalancer(config(), journal=folder / "journal") as balancer,
        sb.TorchTransport.listen(dp_size=2, port=port) as transport,
        anyio.create_task_group() as tasks,
    ):

        async def work() -> None:
            for number in todo:
                os.write(begun, f"{number}\n".encode())
                with suppress(sb.errors.DuplicateRolloutError):  # cut off between accepting and telling
                    await balancer.put(make_rollout(length(number), str(number)))
                os.write(accepted, f"{number}\n".encode())

        tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=1000))
        async with anyio.create_task_group() as workers:
            for _ in range(NUM_WORKERS):
                workers.start_soon(work)
        balancer.end()
    (folder / "done").touch()


def _train(folder: Path, port: int, rank: int, life: int) -> None:
    logging.disable()
    torch.set_num_threads(1)
    weights = Weights(folder, rank)
    join: dict[str, Any] = {"rank": rank, "dp_size": 2, "incarnation": life, "next_step": weights.step + 1}
    with sb.RankFeed(f"tcp://127.0.0.1:{port}", auto_ack=False, rejoin=True, **join) as feed:
        for batch in feed:
            weights.train(batch.step, batch.rollouts)
            if (batch.step + 1) % SAVE_EVERY == 0:
                weights.save()
                batch.ack()
        weights.save()
        feed.acknowledge_through(weights.step)


class Lives:
    """A controller and two ranks, which are killed and started again."""

    def __init__(self, folder: Path, least: int) -> None:
        self._folder, self._port, self._least = folder, free_port(), least
        self._count = itertools.count()
        self._running = [self._start(index) for index in range(3)]

    def _start(self, index: int) -> Any:
        args = (self._folder, self._port, *((index - 1, next(self._count)) if index else (self._least,)))
        process = PROCESSES.Process(target=_train if index else _control, args=args, daemon=True)
        process.start()
        return process

    def kill(self, indices: list[int]) -> None:
        for index in indices:
            self._running[index].kill()
        for index in indices:
            self._running[index].join()
            self._running[index] = self._start(index)

    def check(self) -> None:
        """An error in one of them is an error here."""
        for index, process in enumerate(self._running):
            assert process.exitcode in (None, 0), f"{f'rank {index - 1}' if index else 'controller'} failed"

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


def _drive(folder: Path, lives: Lives, kills: int, seed: int, interval_s: float) -> None:
    chance = random.Random(seed)
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0.0, interval_s))
            lives.check()
            lives.kill(chance.choice([[0], [0], [0], [1], [2], [1, 2], [0, 1], [0, 1, 2]]))
        (folder / "stop").touch()
        give_up = time.monotonic() + 2 * GUARD_S
        while not (folder / "done").exists():
            assert time.monotonic() < give_up, "what is left does not end"
            lives.check()
            time.sleep(0.02)
    finally:
        lives.end()


@pytest.mark.parametrize(
    ("kills", "least", "seed", "interval_s"),
    [(8, 600, 1, 1.0), pytest.param(200, 20_000, 2, 1.5, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_what_was_accepted_is_trained_on_once_whatever_is_killed(
    tmp_path: Path, kills: int, least: int, seed: int, interval_s: float
) -> None:
    _drive(tmp_path, Lives(tmp_path, least), kills, seed, interval_s)
    accepted = [int(line) for line in (tmp_path / "accepted").read_text().split()]
    ranks = [Weights(tmp_path, rank) for rank in range(2)]
    trained = [number for rank in ranks for number in rank.ids()]
    assert Counter(trained) == Counter(accepted)
    assert len(set(trained)) == len(trained) >= least
    assert ranks[0].step == ranks[1].step
    with sb.blocking(config(), journal=tmp_path / "journal") as balancer:
        recovered = balancer.recovered
        assert (recovered.waiting, recovered.in_flight, recovered.damage) == (0, 0, ())
