"""Rollout workers and trainer ranks on a Ray cluster, with the balancer between them.

``python examples/ray_cluster.py`` starts a small cluster on this machine; with ``--address auto`` it runs on yours.
Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from typing import Any

import ray
import torch

import stream_balancer as sb
from stream_balancer.ray import RayBalancer, host

RANKS, WORKERS, ROLLOUTS = 2, 3, 40


class Worker:
    """Generates: here it makes up lengths with a heavy tail."""

    def __init__(self, balancer: RayBalancer, name: str) -> None:
        self.balancer = balancer
        self.name = name

    async def generate(self, count: int) -> int:
        lengths = random.Random(self.name)

        async def one(n: int) -> None:
            length = min(int(50 * lengths.paretovariate(1.2)), 20_000)
            rollout = sb.Rollout(tokens={"input_ids": torch.arange(length)}, rollout_id=f"{self.name}-{n}")
            await self.balancer.put(rollout)

        await asyncio.gather(*[one(n) for n in range(count)])
        await self.balancer.producer.released()  # all trained on: this process may go
        return count


class Rank:
    """Trains: here it counts."""

    def train(self, balancer: RayBalancer, rank: int) -> tuple[int, list[int]]:
        trained, tokens = 0, []
        for batch in balancer.feed(rank=rank):
            for micro_batch in batch.micro_batches:
                packed = micro_batch.packed(shift=True)  # your model's forward and backward, on packed.cu_seqlens
                trained += sum(1 for rollout in micro_batch.rollouts if not rollout.is_padding)
                tokens.append(int(packed["input_ids"].numel()))
        return trained, tokens


async def end_when_all_are_put(balancer: RayBalancer, workers: list[Any]) -> None:
    """``end()`` when every put has returned. Training still goes on then."""
    while (await balancer.statistics()).accepted < WORKERS * ROLLOUTS:  # noqa: ASYNC110 - the workers report at the end
        await asyncio.sleep(0.1)
    await balancer.end()
    await asyncio.gather(*workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="local", help="of a running cluster; 'auto' finds it")
    parser.add_argument("--journal", action="store_true", help="write down what is accepted: nothing is ever lost")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False)
    config = sb.BalancerConfig(dp_size=RANKS, batch_size=8, window=24)
    journal = tempfile.mkdtemp() if options.journal else None
    balancer = host(config, name="balancer", journal=journal)
    worker, trainer = ray.remote(num_cpus=0)(Worker), ray.remote(num_cpus=0)(Rank)
    ranks = [trainer.remote().train.remote(balancer, rank) for rank in range(RANKS)]
    workers = [worker.remote(balancer, f"w{n}").generate.remote(ROLLOUTS) for n in range(WORKERS)]
    asyncio.run(end_when_all_are_put(balancer, workers))
    for rank, (trained, tokens) in enumerate(ray.get(ranks)):
        print(f"rank {rank}: {trained} rollouts, {sum(tokens):,} tokens in {len(tokens)} micro-batches")
    ray.shutdown()


if __name__ == "__main__":
    main()
