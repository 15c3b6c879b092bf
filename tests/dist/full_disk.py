"""A journal that fills a disk of its own, on both loops: ``python full_disk.py FOLDER``. Prints what happened, as JSON,
a line for each loop."""

from __future__ import annotations

import json
import shutil
import sys

import anyio
import torch

import stream_balancer as sb

CONFIG = sb.BalancerConfig(dp_size=1, batch_size=4, window=8, capacity=4096, max_skips=2000)


def rollout(n: int) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": torch.full((2**15,), n)}, rollout_id=f"r{n}")


def ids(batch: sb.Batch) -> list[str]:
    return [one.rollout_id for share in batch.ranks for one in share.rollouts if not one.is_padding]


async def fill(balancer: sb.StreamBalancer, first: int) -> tuple[list[str], int]:
    """Ids accepted until the disk is full, and the next number."""
    accepted: list[str] = []
    while True:
        try:
            await balancer.put(rollout(first))
        except sb.errors.JournalError:
            return accepted, first + 1
        accepted.append(f"r{first}")
        first += 1


async def main(folder: str) -> None:
    accepted: list[list[str]] = []
    trained: list[str] = []
    first = 0
    async with sb.StreamBalancer(CONFIG, journal=folder) as balancer:
        batches = balancer.batches(auto_ack=False)
        for _ in range(3):
            more, first = await fill(balancer, first)
            accepted.append(more)
            for _ in range(8):
                with anyio.fail_after(150):
                    batch = await anext(batches)
                trained += ids(batch)
                balancer.acknowledge_through(batch.step)
        more, first = await fill(balancer, first)
        accepted.append(more)
    left: list[str] = []
    async with sb.StreamBalancer(CONFIG, journal=folder) as balancer:
        balancer.end()
        async for batch in balancer.batches():
            left += ids(batch)
    sys.stdout.write(json.dumps({"accepted": accepted, "trained": trained, "left": left}) + "\n")


if __name__ == "__main__":
    for backend in ("asyncio", "trio"):
        anyio.run(main, sys.argv[1], backend=backend)
        shutil.rmtree(sys.argv[1])
