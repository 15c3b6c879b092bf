"""A disk that the journal itself has filled, on both loops: training goes on, and what is trained on makes room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch
from guard import GUARD_S

import stream_balancer as sb

CONFIG = sb.BalancerConfig(dp_size=1, batch_size=4, window=8, capacity=4096, max_skips=2000)
MOUNTED = 'mount -t tmpfs -o size=48m tmpfs "$1" && shift && exec "$@"'
"""Runs a command with a small disk of its own at a folder; it goes with the command."""


def ids(batch: sb.Batch) -> list[str]:
    return [one.rollout_id for one in batch.rollouts if not one.is_padding]


async def fill(balancer: sb.StreamBalancer, first: int) -> tuple[list[str], int]:
    """Ids accepted until the disk is full, and the next number."""
    accepted: list[str] = []
    while True:
        try:
            await balancer.put(sb.Rollout(tokens={"input_ids": torch.full((2**15,), first)}, rollout_id=f"r{first}"))
        except sb.errors.JournalError:
            return accepted, first + 1
        accepted.append(f"r{first}")
        first += 1


async def fill_and_train(folder: str) -> None:
    accepted: list[list[str]] = []
    trained: list[str] = []
    first = 0
    async with sb.StreamBalancer(CONFIG, journal=folder) as balancer:
        batches = balancer.batches(auto_ack=False)
        for steps in (8, 8, 8, 0):
            more, first = await fill(balancer, first)
            accepted.append(more)
            for _ in range(steps):
                with anyio.fail_after(150):
                    batch = await anext(batches)
                trained += ids(batch)
                balancer.acknowledge_through(batch.step)
    async with sb.StreamBalancer(CONFIG, journal=folder) as balancer:
        balancer.end()
        left = [name async for batch in balancer.batches() for name in ids(batch)]
    sys.stdout.write(json.dumps({"accepted": accepted, "trained": trained, "left": left}) + "\n")


def with_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNTED, "sh", str(folder)]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no mount of its own is allowed here")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*unshare, *command], capture_output=True, text=True, check=False, timeout=GUARD_S, env=env)


def test_a_journal_that_fills_its_disk_goes_on_training(tmp_path: Path) -> None:
    done = with_a_small_disk(tmp_path, sys.executable, __file__, str(tmp_path / "journal"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2  # one for each loop
    for told in map(json.loads, lines):
        first, *later = told["accepted"]
        assert len(first) > 32  # more than half of the disk
        assert all(len(more) >= 16 for more in later)  # of 32 that were trained on
        assert len(told["trained"]) == 96
        assert sorted(told["trained"] + told["left"]) == sorted(one for more in told["accepted"] for one in more)


if __name__ == "__main__":
    for backend in ("asyncio", "trio"):
        anyio.run(fill_and_train, sys.argv[1], backend=backend)
        shutil.rmtree(sys.argv[1])
