"""A rank is killed again and again: how soon it is noticed, how soon its next process has its batch, and what the
healthy rank notices. And the controller: how soon its rank is notified.

``python bench/failures.py [--json] [--kills 50]``. Two rank processes; rank 1 gets SIGKILL at a random moment of a
running stream and is followed by a process that was forked before, so that no interpreter start is measured. Through
sockets and through shared memory.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import anyio
import torch
from _common import Rows, arguments, keep_putting

import stream_balancer as sb
from stream_balancer.errors import RankLostError

TOKENS = 20_000  # per rollout; four of them make 1 MB a rank
STEP_S = 0.01
DEPTH = 64  # batches: what a rank has in stock while another one is replaced
BARS_MS = {"controller_noticed": 100.0, "noticed": 100.0, "rejoined": 200.0, "healthy_gap": 100.0}

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["stream_balancer.client.feed", "stream_balancer.host.transport"])


def config(dp_size: int) -> sb.BalancerConfig:
    return sb.BalancerConfig(dp_size=dp_size, batch_size=4 * dp_size, window=4 * dp_size, capacity=8 * dp_size)


def movers(shared_memory: bool) -> tuple[str, ...]:
    return ("shared_memory",) if shared_memory else ()


def train(address: str, rank: int, incarnation: int, shared_memory: bool, wire: Connection) -> None:
    """One process of a rank: waits for the step to begin with, trains, reports when which step was there."""
    torch.set_num_threads(1)
    next_step = wire.recv()
    join = {"rank": rank, "dp_size": 2, "incarnation": incarnation, "next_step": next_step}
    feed = sb.RankFeed(address, depth=DEPTH, movers=movers(shared_memory), **join)
    kept = []
    for batch in steps_of(feed):
        now = time.monotonic(), batch.step
        if rank == 0:
            kept.append(now)  # nobody reads the pipe before the end
        else:
            wire.send(now)
        time.sleep(STEP_S)
    for now in kept:
        wire.send(now)
    wire.send(None)


def steps_of(feed: sb.RankFeed) -> Iterator[Any]:
    """Steps of a feed. A kill between the report of a step and its record leaves the next process one step behind."""
    while True:
        try:
            yield from feed
            return
        except RankLostError as error:
            if error.step is None or error.cause != "other ranks have trained without it":
                raise
            feed.load_state_dict({"next_step": error.step + 1})


class RankProcess:
    """The process, forked and waiting for the start."""

    def __init__(self, address: str, rank: int, incarnation: int, shared_memory: bool) -> None:
        self.wire, theirs = _PROCESSES.Pipe()
        args = (address, rank, incarnation, shared_memory, theirs)
        self.process = _PROCESSES.Process(target=train, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def reported(self) -> list[tuple[float, int]]:
        """All it has reported; waits until it has ended."""
        found = []
        try:
            while (one := self.wire.recv()) is not None:
                found.append(one)
        except EOFError:
            pass
        return found


def is_connected(transport: sb.TorchTransport, incarnation_of: int) -> bool:
    """Whether the newest process of this rank is there."""
    peers = [one for one in transport.service.peers.values() if one.kind == "rank" and one.connection is not None]
    return len(peers) > incarnation_of


async def drill(kills: int, shared_memory: bool) -> dict[str, list[float]]:
    """Times in ms, one per kill; the healthy rank's gaps for all of them."""
    chance = random.Random(0)
    times: dict[str, list[float]] = {"noticed": [], "rejoined": []}
    runs: list[list[tuple[float, int]]] = []
    async with (
        sb.TorchTransport.listen(dp_size=2, movers=movers(shared_memory)) as transport,
        sb.StreamBalancer(config(2)) as balancer,
    ):
        address = transport.address
        healthy = RankProcess(address, 0, 0, shared_memory)
        victim = RankProcess(address, 1, 0, shared_memory)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=60.0))
            tasks.start_soon(keep_putting, balancer, TOKENS)
            healthy.wire.send(0)
            victim.wire.send(0)
            for incarnation in range(1, kills + 1):
                spare = RankProcess(address, 1, incarnation, shared_memory)
                await in_thread(victim.wire.poll, 30.0)  # it has its first batch
                await anyio.sleep(chance.uniform(0.1, 0.3))
                killed_at = time.monotonic()
                os.kill(victim.process.pid or 0, signal.SIGKILL)
                while is_connected(transport, 1):  # noqa: ASYNC110 - a transport has no event for it
                    await anyio.sleep(0.0005)
                times["noticed"].append(1e3 * (time.monotonic() - killed_at))
                runs.append(await in_thread(victim.reported))
                began = time.monotonic()
                # the step that the victim had in hand is in no weights
                spare.wire.send((runs[-1] or runs[-2])[-1][1])
                await in_thread(spare.wire.poll, 30.0)
                first = spare.wire.recv()
                times["rejoined"].append(1e3 * (first[0] - began))
                spare.first = first  # type: ignore[attr-defined]
                runs.append([first])
                victim = spare
            await anyio.sleep(0.3)
            balancer.end()
            reports = await in_thread(healthy.reported)
            runs.append(await in_thread(victim.reported))
    steps = [step for _, step in reports]
    check(steps, len(steps))
    check(sorted({step for run in runs for _, step in run}), len(steps))
    times["healthy_gap"] = [1e3 * (b[0] - a[0]) for a, b in pairwise(reports)]
    return times


def control(wire: Connection) -> None:
    """A controller with one rank, until it is killed."""

    async def main() -> None:
        async with (
            sb.TorchTransport.listen(dp_size=1) as transport,
            sb.StreamBalancer(config(1)) as balancer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(keep_putting, balancer, TOKENS)
            wire.send(transport.address)
            await sb.serve(balancer, transport)

    anyio.run(main)


def controller_drill(kills: int) -> list[float]:
    """ms from a SIGKILL of the controller to the error on a rank, which had a few batches in stock."""
    times = []
    for _ in range(kills):
        wire, theirs = _PROCESSES.Pipe()
        process = _PROCESSES.Process(target=control, args=(theirs,), daemon=True)
        process.start()
        with sb.RankFeed(wire.recv(), rank=0, dp_size=1) as feed:
            for _ in range(5):
                next(feed)
            killed_at = time.monotonic()
            os.kill(process.pid or 0, signal.SIGKILL)
            try:
                while True:
                    next(feed)
            except RankLostError:
                times.append(1e3 * (time.monotonic() - killed_at))
        process.join()
    return times


async def in_thread(function: Any, *args: object) -> Any:
    return await anyio.to_thread.run_sync(lambda: function(*args))


def check(steps: list[int], total: int) -> None:
    if steps != list(range(total)):
        raise SystemExit(f"FAILED: {total} steps were dispatched, and these came: {steps}")


def main() -> None:
    options = arguments(__doc__, kills=50)
    rows = Rows(options.json, options.results)
    torch.set_num_threads(1)
    report(rows, {"controller_noticed": controller_drill(options.kills)}, options.kills)
    for how in ("sockets", "shared"):
        times = anyio.run(drill, options.kills, how == "shared")
        report(rows, {f"{name}_{how}": values for name, values in times.items()}, options.kills)


def report(rows: Rows, times: dict[str, list[float]], kills: int) -> None:
    """A row for each: the worst of all kills is what the bar is about."""
    for name, values in times.items():
        bar = BARS_MS[name.removesuffix("_sockets").removesuffix("_shared")]
        rows.add(f"{name}, worst", max(values), "ms", bar, median=round(statistics.median(values), 2), kills=kills)


if __name__ == "__main__":
    main()
