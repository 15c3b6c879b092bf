"""Puts from another process: how many a second, and the CPU time of both sides.

``python bench/connect.py [--json] [--rounds 3]``. A producer puts rollouts of 1 kB, 1 MB and 10 MB, one at a time and
many at a time, into a balancer whose batches are taken as they come; raw gloo's send beside it, in the same processes.
Read the ratios, and the CPU time: everything runs on one machine.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
from importlib import import_module
from typing import Any

import anyio
import torch
import torch.distributed as dist
from _common import BYTES_PER_TOKEN, Rows, arguments, columns, peer

import stream_balancer as sb

PUTS = {  # name -> (tokens, puts at a time, puts)
    "1kB_one": (48, 1, 2000),
    "1kB_64": (48, 64, 10_000),
    "21kB_one": (1_000, 1, 1500),
    "21kB_64": (1_000, 64, 6000),
    "1MB_one": (50_000, 1, 200),
    "1MB_64": (50_000, 64, 400),
    "10MB_one": (500_000, 1, 30),
    "10MB_4": (500_000, 4, 60),
}
RAW = {"1MB": (1_050_000, 300), "10MB": (10_500_000, 40)}


async def attend(balancer: sb.StreamBalancer, transport: sb.TorchTransport) -> None:
    """Take producers' puts. ``serve`` does it by itself; here no rank takes part."""
    try:
        module = import_module("stream_balancer.host.producers")
    except ModuleNotFoundError:  # of commits before the controller's process was one package
        module = import_module("stream_balancer.controller.producers")
    await module.attend(balancer, transport)


# --- the producer ----------------------------------------------------------------------------------------------------


async def put_peer(address: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For every case and round: seconds, and CPU seconds of this process."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in PUTS}
    async with sb.connect(address) as producer:
        for number in range(rounds + 1):  # the first one warms up
            for name, (tokens, at_a_time, count) in PUTS.items():
                common = columns(tokens)
                todo = iter([sb.Rollout(tokens=common, rollout_id=f"{name}.{number}.{n}") for n in range(count)])

                async def put_all(todo: Any) -> None:
                    for rollout in todo:
                        await producer.put(rollout)

                began, cpu = time.perf_counter(), time.process_time()
                async with anyio.create_task_group() as tasks:
                    for _ in range(at_a_time):
                        tasks.start_soon(put_all, todo)
                if number:
                    results[name].append((time.perf_counter() - began, time.process_time() - cpu))
    return results


def raw_peer(rounds: int) -> None:
    """Sends what the controller receives."""
    dist.init_process_group("gloo", rank=1, world_size=2)
    for size, repeats in RAW.values():
        buffer = torch.zeros(size, dtype=torch.uint8)
        for _ in range(rounds):
            dist.barrier()
            for _ in range(repeats):
                dist.send(buffer, 0)
    dist.destroy_process_group()


# --- the controller --------------------------------------------------------------------------------------------------


def raw(rounds: int) -> dict[str, float]:
    """Megabytes a second by message size."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    rates = {}
    with peer("raw", rounds):
        dist.init_process_group("gloo", rank=0, world_size=2)
        for name, (size, repeats) in RAW.items():
            buffer, seconds = torch.zeros(size, dtype=torch.uint8), []
            for _ in range(rounds):
                dist.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    dist.recv(buffer, 1)
                seconds.append(time.perf_counter() - began)
            rates[name] = size * repeats / 1e6 / statistics.median(seconds)
        dist.destroy_process_group()
    return rates


async def puts(rounds: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """What the producer measured, and the controller's CPU seconds for all of it."""
    config = sb.BalancerConfig(dp_size=1, batch_size=16, window=32, capacity=256)
    async with (
        sb.TorchTransport.listen(dp_size=1) as transport,
        sb.StreamBalancer(config) as balancer,
        anyio.create_task_group() as tasks,
    ):

        async def take() -> None:
            async for _ in balancer.batches():
                pass

        tasks.start_soon(attend, balancer, transport)
        tasks.start_soon(take)
        with peer("put", transport.address, rounds) as process:
            began = time.process_time()
            measured = await anyio.to_thread.run_sync(output, process)
            cpu = time.process_time() - began
        tasks.cancel_scope.cancel()
    return json.loads(measured), cpu


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a peer failed: {process.args!r}")
    return out


def main() -> None:
    options = arguments(__doc__, rounds=3)
    if options.as_peer:
        torch.set_num_threads(1)
        what, *rest = options.as_peer
        if what == "raw":
            raw_peer(*rest)
        else:
            print(json.dumps(anyio.run(put_peer, *rest)))
        return
    torch.set_num_threads(1)
    row = Rows(options.json, options.results).add
    rates = raw(options.rounds)
    for name, rate in rates.items():
        row(f"raw_gloo_{name}", rate, "MB/s")
    measured, cpu = anyio.run(puts, options.rounds)
    for name, rounds in measured.items():
        tokens, _, count = PUTS[name]
        seconds = statistics.median(total for total, _ in rounds)
        row(f"put_{name}", count / seconds, "puts/s")
        row(f"put_{name}_cpu_producer", 1e6 * statistics.median(its for _, its in rounds) / count, "us")
        size = name.partition("_")[0]
        if size in rates:
            row(f"put_{name}_over_raw", tokens * BYTES_PER_TOKEN * count / 1e6 / seconds / rates[size], "ratio")
    row("cpu_controller", cpu, "s")


if __name__ == "__main__":
    main()
