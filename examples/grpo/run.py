"""Asynchronous GRPO from random weights: `python examples/grpo/run.py`, or `torchrun --nproc-per-node 2` with it.

::

    rank processes (torchrun)                                  rollout worker's process (rollout.py)
    RankFeed <--- serve, StreamBalancer (thread of rank 0) <-- put_group -- workers <-- Engine
       `---> Trainer (DDP) --- set_version ---^       `------- version_after -------------^
                      `------------ weights (a file; NCCL in your cluster) ---------------'

`--single-process` runs the same workers, balancer and trainer in one process, rank after rank.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import anyio.to_process
import anyio.to_thread
import task
import torch
import torch.distributed as dist
from model import Decoder
from report import Options, Report, parse
from rollout import Balancer, Engine, generate_groups
from train import Trainer

import stream_balancer as sb

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 128, 2, 4
TEMPERATURE = 1.0
LEARNING_RATE = 2e-3


def new_balancer(options: Options, report: Report) -> sb.StreamBalancer:
    """The knobs, the same for every policy but for the window."""
    config = sb.BalancerConfig(
        dp_size=options.ranks,
        batch_size=options.batch_size,
        capacity=2 * options.batch_size,  # no more than the window needs: what waits grows stale
        groups=sb.Groups(size=options.group_size),
        staleness=sb.Staleness(max_versions=8),
        micro_batches=sb.MicroBatches(max_tokens=1024),
        sync="step",
        cost=sb.cost.TransformerCost(
            hidden_size=HIDDEN_SIZE,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            intermediate_size=4 * HIDDEN_SIZE,
            vocab_size=task.VOCAB_SIZE,
            gated_mlp=False,
        ),
        policy=options.policy,
    )
    return sb.StreamBalancer(config, on_evict=lambda r, _: report.evicted.append(r.rollout_id))


def new_model(seed: int) -> Decoder:
    """The same random weights in every process."""
    torch.set_num_threads(1)  # processes share cores
    torch.manual_seed(seed)
    return Decoder(vocab_size=task.VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, num_heads=NUM_HEADS)


def new_engine(options: Options) -> Engine:
    """An engine for two batches' worth of conversations at a time."""
    return Engine(new_model(options.seed), slots=2 * options.batch_size, temperature=TEMPERATURE, seed=options.seed)


def new_trainer(options: Options) -> Trainer:
    """A trainer with the engine's first weights."""
    return Trainer(
        new_model(options.seed), learning_rate=LEARNING_RATE, num_steps=options.steps, temperature=TEMPERATURE
    )


async def generate(options: Options, engine: Engine, balancer: Balancer) -> None:
    """Everything the run will train on."""
    await generate_groups(
        engine,
        balancer,
        num_groups=options.steps * options.batch_size // options.group_size,
        group_size=options.group_size,
        num_workers=2 * options.batch_size // options.group_size,
        seed=options.seed,
    )


# -- one process -------------------------------------------------------------------------------------------------------


async def run_alone(options: Options) -> None:
    """Workers in the event loop, training beside it in a thread."""
    report = Report(options)
    engine, trainer = new_engine(options), new_trainer(options)

    async def work() -> None:
        await generate(options, engine, balancer)
        balancer.end()

    async with new_balancer(options, report) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        async for batch in balancer.batches():
            report.add(await anyio.to_thread.run_sync(trainer.step, batch.ranks))
            engine.load(trainer.version, trainer.weights())
            balancer.set_version(trainer.version)
    report.finish(trainer.trained_ids)


# -- torchrun: the ranks -----------------------------------------------------------------------------------------------


def run_rank(options: Options) -> None:
    """Train on this rank's part of every step. Rank 0 hosts the controller too, and publishes the weights."""
    rank, dp_size = dist.get_rank(), dist.get_world_size()
    options = replace(options, ranks=dp_size)
    trainer, report = new_trainer(options), Report(options)
    transport = sb.TorchTransport.listen(dp_size=dp_size) if rank == 0 else None
    address = [transport and transport.address]
    dist.broadcast_object_list(address)
    with TemporaryDirectory() as directory:  # a shared one, if the rollout worker runs on another machine
        path = Path(directory) / "weights.pt"
        controller = threading.Thread(target=anyio.run, args=(control, options, transport, report, path), daemon=True)
        if rank == 0:
            controller.start()
        feed = sb.RankFeed(address[0], rank=rank, dp_size=dp_size, depth=1)
        for rank_batch in feed:
            figures = trainer.step([rank_batch])
            feed.add_compute_s(figures.compute_s[rank])
            if rank == 0:
                report.add(figures)
                save_weights(trainer, path)
                feed.set_version(trainer.version)  # after the weights are there, before the next batch is asked for
        check_ranks_agree(trainer)
        trained: list[list[str]] = [[] for _ in range(dp_size)]
        dist.gather_object(trainer.trained_ids, trained if rank == 0 else None)
        if rank == 0:
            controller.join()
            report.finish([rollout_id for ids in trained for rollout_id in ids])


def save_weights(trainer: Trainer, path: Path) -> None:
    """A new policy version for the engine. Who reads meanwhile reads the old one, whole."""
    new = path.with_suffix(".new")
    torch.save((trainer.version, trainer.weights()), new)
    new.replace(path)


def check_ranks_agree(trainer: Trainer) -> None:
    """All ranks must end with the same weights, to the bit."""
    weights = trainer.weights()
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    if not torch.equal(weights, of_rank_0):
        raise RuntimeError(f"rank {dist.get_rank()} ended with other weights than rank 0")


# -- torchrun: the controller, and the rollout worker ------------------------------------------------------------------


async def control(options: Options, transport: sb.TorchTransport, report: Report, path: Path) -> None:
    """The controller. If the rollout worker fails, so does it, and the ranks with it."""
    async with new_balancer(options, report) as balancer, transport, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        await anyio.to_process.run_sync(anyio.run, roll_out, options, transport.address, path)


async def roll_out(options: Options, address: str, path: Path) -> None:
    """Main function of the rollout worker's process."""
    engine = new_engine(options)
    async with sb.connect(address) as producer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, producer, engine, path)
            await generate(options, engine, producer)
            tasks.cancel_scope.cancel()
        await producer.end()


async def follow(producer: sb.Producer, engine: Engine, path: Path) -> None:
    """New weights, as soon as rank 0 says that there are some; the file may hold newer ones by now."""
    version = None
    while True:
        await producer.version_after(version)
        version, weights = await anyio.to_thread.run_sync(partial(torch.load, path, weights_only=True))
        engine.load(version, weights)


def main() -> None:
    """One of the three ways to be started."""
    options = parse(sys.argv[1:])
    if options.single_process:
        anyio.run(run_alone, options)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        run_rank(options)
        dist.destroy_process_group()  # the model is gone: a DDP model that goes after its group may hang in PyTorch
    else:
        os.environ.setdefault("STREAM_BALANCER_TOKEN", secrets.token_hex(16))  # every process of this run has it
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        sys.exit(subprocess.call([sys.executable, *torchrun, __file__, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
