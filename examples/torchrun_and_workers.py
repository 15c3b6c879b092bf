"""Ranks: `torchrun --nproc-per-node 2 examples/torchrun_and_workers.py`. Rollout workers, in processes of their own:
`python examples/torchrun_and_workers.py worker` in another terminal. In any order."""

import os
import random
import sys
import threading
from contextlib import nullcontext

import anyio
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stream_balancer as sb

PORT = int(os.environ.get("BALANCER_PORT", "29600"))
ADDRESS = f"tcp://127.0.0.1:{PORT}"
VOCABULARY, ROLLOUTS, MOST_TOKENS = 1000, 96, 2048


def work() -> None:
    """A worker: put() returns once the balancer holds the rollout, and waits while its buffer is full."""
    with sb.connect(ADDRESS) as producer:
        for _ in range(ROLLOUTS):
            ids = torch.randint(0, VOCABULARY, (min(int(random.lognormvariate(5, 1)) + 2, MOST_TOKENS),))
            columns = {"input_ids": ids, "loss_mask": torch.arange(len(ids)) > 0}  # not the prompt: here one token
            producer.put(sb.Rollout(tokens=columns, scalars={"advantage": random.gauss(0, 1)}))
        producer.end()  # no more from this worker; training ends once num_producers have said so


async def control(dp_size: int) -> None:
    """The controller, in a thread of rank 0."""
    config = sb.BalancerConfig(
        dp_size=dp_size, batch_size=16, micro_batches=sb.MicroBatches(max_tokens=MOST_TOKENS), sync="step"
    )
    transport = sb.TorchTransport.listen(dp_size=dp_size, port=PORT)
    async with sb.StreamBalancer(config, num_producers=1) as balancer, transport:
        await sb.serve(balancer, transport)


def train(rank: int, dp_size: int) -> int:
    """Every rank: one optimizer step for each batch."""
    layers = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = 0
    for batch in sb.RankFeed(ADDRESS, rank=rank, dp_size=dp_size):
        optimizer.zero_grad()
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            packed = micro_batch.packed(shift=True)  # each row has what belongs to the token that follows
            with nullcontext() if number == len(batch.micro_batches) else model.no_sync():
                logprobs = model(packed["input_ids"]).log_softmax(-1)
                logprobs = logprobs.gather(-1, packed["targets"][:, None])[:, 0]
                weights = packed["loss_mask"] * packed.per_token("advantage")
                loss = -(logprobs * weights).sum() / batch.global_num_loss_tokens  # of the whole step
                (loss * dp_size).backward()  # DDP divides by dp_size
        optimizer.step()
        trained += batch.global_num_rollouts  # of the whole step, the same on every rank
    return trained


def main() -> None:
    """A rank. Rank 0 has the controller beside it."""
    dist.init_process_group("gloo")
    rank, dp_size = dist.get_rank(), dist.get_world_size()
    controller = threading.Thread(target=anyio.run, args=(control, dp_size), daemon=True)  # an error below ends rank 0
    if rank == 0:
        controller.start()
    trained = train(rank, dp_size)
    if rank == 0:
        controller.join()
        print(f"{trained} rollouts trained on {dp_size} ranks")
    dist.destroy_process_group()  # the model is gone: a DDP model that goes after its group may hang in PyTorch


if __name__ == "__main__":
    work() if "worker" in sys.argv else main()
