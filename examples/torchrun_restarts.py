"""A training run that goes on after any of its processes was killed. Three commands, each in a terminal of its own, in
any order; start a controller or a worker that has died again with the same command, torchrun does so with the ranks:

    python examples/torchrun_restarts.py control FOLDER
    python examples/torchrun_restarts.py worker FOLDER 0          # and: worker FOLDER 1
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 100 \\
        examples/torchrun_restarts.py train FOLDER
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anyio
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stream_balancer as sb

COMMAND, FOLDER = sys.argv[1], Path(sys.argv[2])
PORT = int(os.environ.get("BALANCER_PORT", "29600"))
ADDRESS, RANKS, WORKERS, SIBLINGS, VOCABULARY = f"tcp://127.0.0.1:{PORT}", 2, 2, 4, 100
PROMPTS, SAVE_EVERY = int(os.environ.get("PROMPTS", "80")), 3


async def control() -> None:
    """The controller. What was accepted and is in no checkpoint is in its journal."""
    config = sb.BalancerConfig(
        dp_size=RANKS,
        batch_size=16,
        groups=sb.Groups(size=SIBLINGS),
        staleness=sb.Staleness(max_versions=3),
        micro_batches=sb.MicroBatches(max_tokens=512),
        sync="step",
    )
    transport = sb.TorchTransport.listen(dp_size=RANKS, port=PORT)
    async with sb.StreamBalancer(config, journal=FOLDER / "journal", num_producers=WORKERS) as balancer, transport:
        await sb.serve(balancer, transport, rejoin_timeout_s=600)  # ranks may take so long to come back


def work(number: int) -> None:
    """A rollout worker: of all prompts every second one is its own."""
    progress = FOLDER / f"worker{number}"
    prompt = int(progress.read_text()) if progress.exists() else number  # of a worker that was killed
    with sb.connect(ADDRESS, rejoin=True) as producer:  # waits for a controller that is started again
        while prompt < PROMPTS:
            try:
                with producer.reserve(SIBLINGS) as slot:  # begins only what can still be young enough
                    slot.put_group(generate(prompt, slot.version))
            except sb.errors.DuplicateRolloutError:
                pass  # it was accepted just before this worker was killed
            except sb.errors.BrokenResourceError:
                continue  # the slot was lost with the controller: sample the prompt again
            prompt += WORKERS
            replace(progress, partial(Path.write_text, data=str(prompt)))
        producer.end()  # the run ends once all workers have said so


def generate(prompt: int, version: int) -> list[sb.Rollout]:
    """The siblings of a prompt; yours come from an inference engine."""
    chance = torch.Generator().manual_seed(prompt)
    rollouts = []
    for sibling in range(SIBLINGS):
        ids = torch.randint(VOCABULARY, (int(torch.randint(8, 200, (), generator=chance)),), generator=chance)
        columns = {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= 4}  # a prompt of four tokens
        rollouts.append(
            sb.Rollout(tokens=columns, rollout_id=f"{prompt}-{sibling}", group_id=str(prompt), version=version)
        )
    return rollouts


def train() -> None:
    """A rank. Its weights are those of the last checkpoint, and it says so."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint, state = FOLDER / "checkpoint.pt", {"next_step": 0}
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["feed"]

    def save() -> None:  # the weights, and which steps they contain, in one file
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feed": feed.state_dict()}
        if rank == 0:
            replace(checkpoint, partial(torch.save, saved))
        sb.barrier()  # it is there, for all of them
        feed.acknowledge_through(feed.state_dict()["next_step"] - 1)

    ddp = DistributedDataParallel(model)
    feed = sb.RankFeed(ADDRESS, rank=rank, dp_size=RANKS, next_step=state, auto_ack=False, rejoin=True, depth=1)
    if rank == 0:  # each step makes a version; after a restart the controller's may be newer
        feed.set_version(state["next_step"])
    for batch in feed:
        optimizer.zero_grad()
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with nullcontext() if number == len(batch.micro_batches) else ddp.no_sync():
                loss = loss_sum(ddp, micro_batch) / batch.global_num_loss_tokens  # of the whole step
                torch.autograd.backward(loss * RANKS)  # DDP divides by RANKS
        optimizer.step()
        if rank == 0:
            feed.set_version(batch.step + 1)
        if (batch.step + 1) % SAVE_EVERY == 0:
            save()
    save()
    feed.close()


def make_model() -> torch.nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))


def loss_sum(model: torch.nn.Module, micro_batch: sb.rollouts.MicroBatch) -> torch.Tensor:
    """Over the trained tokens: to be divided by the step's ``global_num_loss_tokens``."""
    packed = micro_batch.packed(shift=True)
    losses = torch.nn.functional.cross_entropy(model(packed["input_ids"]), packed["targets"], reduction="none")
    return (losses * packed["loss_mask"]).sum()


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """The old file, or the new one, whenever this process is killed."""
    new = path.with_suffix(".new")
    write(new)
    new.replace(path)


if __name__ == "__main__":
    if COMMAND == "control":
        anyio.run(control)
    elif COMMAND == "worker":
        work(int(sys.argv[3]))
    else:
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()  # the model is gone: a DDP model that goes after its group may hang in PyTorch
