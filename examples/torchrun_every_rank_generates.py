"""Every rank generates and trains: `torchrun --nproc-per-node 2 examples/torchrun_every_rank_generates.py`."""

import random
import threading

import anyio
import torch
import torch.distributed as dist

import stream_balancer as sb
from stream_balancer.transport.torch_dist import current_world

ROLLOUTS_PER_RANK = 48


def generate(rank: int, group: dist.ProcessGroup, all_put: threading.Event) -> None:
    """In a thread of every rank: put() whenever a rollout is finished; it returns once the balancer holds it."""
    with sb.connect() as producer:
        for n in range(ROLLOUTS_PER_RANK):
            ids = torch.randint(0, 1000, (int(random.lognormvariate(5, 1)) + 2,))
            producer.put(sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"{rank}-{n}"))
    dist.barrier(group)
    all_put.set()


async def control(all_put: threading.Event) -> None:
    """The controller, in a thread of rank 0: an event loop that meets everybody in torchrun's own store."""
    store, _, dp_size = current_world()
    transport = sb.TorchTransport(store, dp_size=dp_size)
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=16)
    async with sb.StreamBalancer(config) as balancer, transport, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        await anyio.to_thread.run_sync(all_put.wait)
        balancer.end()


def main() -> None:
    """Every rank generates in a thread and trains on its own share of every step."""
    dist.init_process_group("gloo")
    rank, all_put = dist.get_rank(), threading.Event()
    threads = [threading.Thread(target=generate, args=(rank, dist.new_group(backend="gloo"), all_put))]
    if rank == 0:
        threads.append(threading.Thread(target=anyio.run, args=(control, all_put)))
    for thread in threads:
        thread.start()
    trained = torch.zeros(1)
    for batch in sb.RankFeed():
        trained += sum(len(mb.rollouts) for mb in batch.micro_batches)  # your model's forward and backward
    dist.all_reduce(trained)
    for thread in threads:
        thread.join()
    if rank == 0:
        print(f"{int(trained)} rollouts trained on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
