"""Rank 0 hosts the balancer, all iterate: `torchrun --nproc-per-node 2 examples/torchrun_single_controller.py`."""

import random
import threading

import anyio
import torch
import torch.distributed as dist

import stream_balancer as sb

NUM_ROLLOUTS = 96


async def generate(balancer: sb.StreamBalancer) -> None:
    """Your rollout workers call put() whenever a rollout is finished."""
    for n in range(NUM_ROLLOUTS):
        ids = torch.randint(0, 1000, (int(random.lognormvariate(5, 1)) + 2,))
        await balancer.put(sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"rollout-{n}"))
    balancer.end()


async def control() -> None:
    """The controller: an event loop in a thread of rank 0, meeting the ranks in torchrun's own store."""
    transport = sb.TorchTransport.in_world()
    config = sb.BalancerConfig(dp_size=transport.dp_size, batch_size=16)
    async with sb.StreamBalancer(config) as balancer, transport, anyio.create_task_group() as group:
        group.start_soon(sb.serve, balancer, transport)
        await generate(balancer)


def main() -> None:
    """Every rank trains on its own part of every step."""
    dist.init_process_group("gloo")
    controller = threading.Thread(target=anyio.run, args=(control,), daemon=True)  # an error below ends rank 0
    if dist.get_rank() == 0:
        controller.start()
    trained = torch.zeros(1)
    for batch in sb.RankFeed():
        for micro_batch in batch.micro_batches:
            packed = micro_batch.packed(shift=True)  # your model's forward and backward, on packed.cu_seqlens
            trained += len(packed.cu_seqlens) - 1
    dist.all_reduce(trained)
    if dist.get_rank() == 0:
        controller.join()
        print(f"{int(trained)} rollouts trained on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
