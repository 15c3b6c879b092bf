"""Every rank generates and trains: `torchrun --nproc-per-node 2 examples/torchrun_every_rank_generates.py`."""

import random
import sys
import threading

import anyio
import torch
import torch.distributed as dist

import stream_balancer as sb

ROLLOUTS_PER_RANK = 48


def generate(producer: sb.BlockingProducer, group: dist.ProcessGroup, all_put: threading.Event) -> None:
    """In a thread of every rank: put() whenever a rollout is finished; it returns once the balancer has it."""
    for n in range(ROLLOUTS_PER_RANK):
        ids = torch.randint(0, 1000, (int(random.lognormvariate(5, 1)) + 2,))
        producer.put(sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"{dist.get_rank()}-{n}"))
    dist.barrier(group)
    all_put.set()


async def control(all_put: threading.Event) -> None:
    """The controller, in a thread of rank 0: an event loop that meets everybody in torchrun's own store."""
    transport = sb.TorchTransport.in_world()
    config = sb.BalancerConfig(dp_size=transport.dp_size, batch_size=16)
    async with sb.StreamBalancer(config) as balancer, transport, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        await anyio.to_thread.run_sync(all_put.wait)
        balancer.end()


def main() -> None:
    """Tokens stay with the rank that generated them until the rank that trains on them fetches them."""
    dist.init_process_group("gloo")
    all_put, trained = threading.Event(), torch.zeros(1)
    with sb.connect(hand_over="balancer" if "balancer" in sys.argv else "direct") as producer:
        group = dist.new_group(backend="gloo")
        threads = [threading.Thread(target=generate, args=(producer, group, all_put), daemon=True)]
        if dist.get_rank() == 0:
            threads.append(threading.Thread(target=anyio.run, args=(control, all_put), daemon=True))
        for thread in threads:
            thread.start()
        for batch in sb.RankFeed():
            trained += sum(len(mb.rollouts) for mb in batch.micro_batches)  # your model's forward and backward
    dist.all_reduce(trained)
    for thread in threads:
        thread.join()
    if dist.get_rank() == 0:
        print(f"{int(trained)} rollouts trained on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
