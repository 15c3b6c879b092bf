"""Rollout workers and a trainer in one asyncio program: `python examples/single_process.py`.

The trainer drives two "ranks" itself, one after the other. Across processes, see torchrun_single_controller.py.
"""

import asyncio
import random

import torch

import stream_balancer as sb

config = sb.BalancerConfig(
    dp_size=2, batch_size=16, window=32, cost=sb.cost.QuadraticCost(linear=1000.0, quadratic=1.0)
)


async def worker(name: str, balancer: sb.StreamBalancer) -> None:
    """Generate eight rollouts of very different lengths; put() waits while the buffer is full."""
    for n in range(8):
        length = int(random.lognormvariate(5, 1)) + 2
        await asyncio.sleep(length * 1e-4)  # a language model would generate here
        ids = torch.randint(0, 1000, (length,))
        await balancer.put(
            sb.Rollout(
                tokens={"input_ids": ids, "loss_mask": torch.arange(length) > 0},
                scalars={"advantage": random.gauss(0, 1)},
                rollout_id=f"{name}-{n}",
            )
        )


async def train(balancer: sb.StreamBalancer) -> None:
    """One optimizer step per batch."""
    async for batch in balancer.batches():
        for rank_batch in batch.ranks:
            for micro_batch in rank_batch.micro_batches:
                packed = micro_batch.packed(shift=True)
                loss = torch.zeros(()) * packed["input_ids"].sum()  # your model, on packed.cu_seqlens
                loss = loss / rank_batch.global_num_loss_tokens  # the step's denominator: ranks hold different numbers
        tokens = " + ".join(str(rank_batch.num_tokens) for rank_batch in batch.ranks)
        print(f"step {batch.step} ({batch.reason}): {tokens} tokens, ranks differ by {batch.imbalance:.1%}")


async def main() -> None:
    """Sixteen workers put, one trainer iterates; end() lets the loop drain and finish."""
    async with sb.StreamBalancer(config) as balancer, asyncio.TaskGroup() as group:
        trainer = group.create_task(train(balancer))
        await asyncio.gather(*(worker(f"worker{i}", balancer) for i in range(16)))
        balancer.end()
        await trainer


if __name__ == "__main__":
    asyncio.run(main())
