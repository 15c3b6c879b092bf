"""A trainer rank as a process of its own, for the drills: ``python feed_rank.py MODE ADDRESS RANK DP_SIZE``.

Prints ``ready`` once it has its first batch, and the steps it trained as its last line where it gets that far.
"""

from __future__ import annotations

import os
import sys
import threading

import anyio
import torch
import torch.distributed as dist
from scripted import ScriptedBalancer, make_batch

import stream_balancer as sb
from stream_balancer.errors import RankLostError


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - read by the test


def run(mode: str, address: str, rank: int, dp_size: int) -> None:
    feed = sb.RankFeed(address, rank=rank, dp_size=dp_size)
    if mode == "unconnected":
        return
    steps = [next(feed).step]
    say("ready")
    if mode == "unclosed":
        return
    if mode == "ctrl-c":
        try:
            steps.extend(batch.step for batch in feed)
        except KeyboardInterrupt:
            say("interrupted")
        return
    try:
        for batch in feed:
            steps.append(batch.step)
            if mode == "break":
                break
            if mode == "exit":
                sys.exit(3)
            if mode == "raise":
                raise LookupError("a bug in the trainer")
    except RankLostError as error:
        say("lost", error.rank, error.cause)
        return
    say(*steps)


def run_in_world(backend: str) -> None:
    """Single-controller mode: rank 0 serves from a thread, and is fed like the others."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps = 12
    acknowledged: list[int] = []

    async def control() -> None:
        balancer = ScriptedBalancer([make_batch(step, dist.get_world_size()) for step in range(steps)])
        async with sb.TorchTransport.in_world() as transport:
            await sb.serve(balancer, transport)
        acknowledged.extend(balancer.acknowledged)

    controller = threading.Thread(target=anyio.run, args=(control,), kwargs={"backend": backend})
    if rank == 0:
        controller.start()
    seen = []
    for batch in sb.RankFeed():
        total = torch.tensor([batch.step])
        dist.all_reduce(total)
        assert int(total) == batch.step * dist.get_world_size(), "ranks are in different steps"
        seen.append(batch.step)
    if rank == 0:
        controller.join()
        assert acknowledged == list(range(steps))
    dist.destroy_process_group()
    say(*seen)


def control(mode: str) -> None:
    """A controller that ends in the middle."""

    async def main() -> None:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(2)], hold=True)
        async with sb.TorchTransport.listen(dp_size=1) as transport, anyio.create_task_group() as tasks:
            say(transport.address)
            tasks.start_soon(sb.serve, balancer, transport)
            if mode == "unclosed":
                while not balancer.acknowledged:
                    await anyio.sleep(0.01)
                os._exit(0)

    try:
        anyio.run(main)
    except KeyboardInterrupt:
        say("interrupted")


if __name__ == "__main__":
    if sys.argv[1] == "world":
        run_in_world(sys.argv[2])
    elif sys.argv[1] == "control":
        control(sys.argv[2])
    else:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
