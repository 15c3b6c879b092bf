"""Asynchronous GRPO from random weights: `python examples/grpo/run.py`, or `torchrun --nproc-per-node 2` with it.

::

    controller process                                           rank processes (torchrun)
    workers --> engine        put_group                            .--> RankFeed --> Trainer (DDP) --.
    (rollout.py)  ^  `-----> StreamBalancer --> serve -------------+--> RankFeed --> Trainer (DDP) --+ gradients
                  |                                                                    |
                  `------- version, weights (a pipe; NCCL in your cluster) <-----------' rank 0

`--single-process` runs the same workers, balancer and trainer in one process, rank after rank.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import anyio
import anyio.to_thread
import numpy as np
import task
import torch
import torch.distributed as dist
from model import Decoder
from report import Options, Report, parse
from rollout import Engine, generate_groups
from train import Trainer

import stream_balancer as sb

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 128, 2, 4
TEMPERATURE = 1.0
LEARNING_RATE = 2e-3


def balancer_config(options: Options) -> sb.BalancerConfig:
    """The knobs, the same for every policy but for the window."""
    return sb.BalancerConfig(
        dp_size=options.ranks,
        batch_size=options.batch_size,
        capacity=2 * options.batch_size,  # no more than the window needs: what waits grows stale
        group_size=options.group_size,
        max_staleness=8,
        max_tokens_per_micro_batch=1024,
        cost=sb.TransformerCost(
            hidden_size=HIDDEN_SIZE,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            intermediate_size=4 * HIDDEN_SIZE,
            vocab_size=task.VOCAB_SIZE,
            gated_mlp=False,
        ),
        policy=options.policy,
    )


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


async def generate(options: Options, engine: Engine, balancer: sb.StreamBalancer) -> None:
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
    balancer = sb.StreamBalancer(balancer_config(options), on_evict=lambda r, _: report.evicted.append(r.rollout_id))
    async with balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(generate, options, engine, balancer)
        async for batch in balancer.batches():
            report.add(await anyio.to_thread.run_sync(trainer.step, batch.ranks))
            engine.load(trainer.version, trainer.weights())
            balancer.set_version(trainer.version)
    report.finish(trainer.trained_ids)


# -- torchrun: the ranks -----------------------------------------------------------------------------------------------


def run_rank(options: Options) -> None:
    """Train on this rank's part of every step. Rank 0 starts the controller and sends it the weights."""
    dist.init_process_group("gloo")
    rank, dp_size = dist.get_rank(), dist.get_world_size()
    options = replace(options, ranks=dp_size)
    pipe = start_controller(options) if rank == 0 else None
    address = [pipe.recv() if pipe else None]
    dist.broadcast_object_list(address)
    trainer, report = new_trainer(options), Report(options)
    feed = sb.RankFeed(address[0], rank=rank, dp_size=dp_size, depth=1)
    for rank_batch in feed:
        figures = trainer.step([rank_batch])
        feed.add_compute_s(figures.compute_s[rank])
        if pipe:
            report.add(figures)
            send_weights(pipe, trainer)
    check_ranks_agree(trainer)
    trained: list[list[str]] = [[] for _ in range(dp_size)]
    dist.gather_object(trainer.trained_ids, trained if rank == 0 else None)
    if pipe:
        report.evicted = pipe.recv()
        report.finish([rollout_id for ids in trained for rollout_id in ids])
        pipe.close()
    dist.destroy_process_group()


def start_controller(options: Options) -> Connection:
    """The controller in a process of its own, so that it and rank 0 do not compete for one interpreter. It ends with
    us."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=run_controller, args=(options, theirs), daemon=True).start()
    theirs.close()  # the controller's end is the controller's: if it dies, ours reads EOF
    return ours


def send_weights(pipe: Connection, trainer: Trainer) -> None:
    """A new policy version for the engine."""
    pipe.send(trainer.version)
    pipe.send_bytes(trainer.weights().numpy().tobytes())


def check_ranks_agree(trainer: Trainer) -> None:
    """All ranks must end with the same weights, to the bit."""
    weights = trainer.weights()
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    if not torch.equal(weights, of_rank_0):
        raise RuntimeError(f"rank {dist.get_rank()} ended with other weights than rank 0")


# -- torchrun: the controller ------------------------------------------------------------------------------------------


def run_controller(options: Options, pipe: Connection) -> None:
    """Main function of the controller process."""
    anyio.run(control, options, pipe)


async def control(options: Options, pipe: Connection) -> None:
    """Workers and balancer; every rank's batch over its link; new weights as they come."""
    evicted: list[str] = []
    balancer = sb.StreamBalancer(balancer_config(options), on_evict=lambda r, _: evicted.append(r.rollout_id))
    engine = new_engine(options)
    async with balancer, sb.TorchTransport.listen(dp_size=options.ranks) as transport:
        pipe.send(transport.address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive_weights, pipe, engine, balancer)
            tasks.start_soon(generate, options, engine, balancer)
            await sb.serve(balancer, transport)
            pipe.send(evicted)


async def receive_weights(pipe: Connection, engine: Engine, balancer: sb.StreamBalancer) -> None:
    """Until rank 0 hangs up."""

    def receive() -> tuple[int, torch.Tensor] | None:
        try:
            return pipe.recv(), torch.from_numpy(np.frombuffer(bytearray(pipe.recv_bytes()), np.float32))
        except EOFError:
            return None

    while (news := await anyio.to_thread.run_sync(receive)) is not None:
        version, weights = news
        engine.load(version, weights)
        balancer.set_version(version)


def main() -> None:
    """One of the three ways to be started."""
    options = parse(sys.argv[1:])
    if options.single_process:
        anyio.run(run_alone, options)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        run_rank(options)
    else:
        os.environ.setdefault("STREAM_BALANCER_TOKEN", secrets.token_hex(16))  # every process of this run has it
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        sys.exit(subprocess.call([sys.executable, *torchrun, __file__, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
