"""Puts from another process against raw gloo, and direct hand-over against the way through the controller, in one run.

``python bench/connect.py [--json]``. Read the ratios: everything runs on one machine, in the same processes, one after
the other. Rollouts have 21 bytes a token.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any, cast

import anyio
import torch
import torch.distributed as dist
from _common import BYTES_PER_TOKEN, Rows, arguments, columns, peer

import stream_balancer as sb
from stream_balancer.controller.producers import attend
from stream_balancer.transport.channel import Source
from stream_balancer.transport.gloo.channel import GlooChannel
from stream_balancer.transport.gloo.packets import Packets

SMALL, MEDIUM, LARGE = 1_000, 50_000, 500_000  # tokens: 21 kB, 1 MB, 10 MB
PUTS = {  # name -> (tokens, puts at a time, puts)
    "one_at_a_time_21kB": (SMALL, 1, 1500),
    "64_at_a_time_21kB": (SMALL, 64, 6000),
    "16_at_a_time_1MB": (MEDIUM, 16, 300),
    "4_at_a_time_10MB": (LARGE, 4, 40),
}
STREAM_TOKENS, STREAM_PUTS, STREAM_AT_A_TIME = 20_000, 400, 16  # of each of the two producers: 420 kB each
ROUNDS = 3


def rollouts(tokens: int, name: str, count: int) -> list[sb.Rollout]:
    """Rollouts that share their columns."""
    common = columns(tokens)
    return [sb.Rollout(tokens=common, rollout_id=f"{name}.{n}") for n in range(count)]


# --- the other processes ---------------------------------------------------------------------------------------------


def raw_peer(sizes: dict[str, int], rounds: int) -> None:
    """Sends what the controller receives, then answers its pings."""
    dist.init_process_group("gloo", rank=1, world_size=2)
    for megabytes, repeats in sizes.items():
        buffer = torch.zeros(int(float(megabytes) * 1e6), dtype=torch.uint8)
        for _ in range(rounds):
            dist.barrier()
            for _ in range(repeats):
                dist.send(buffer, 0)
    tiny = torch.zeros(64, dtype=torch.int64)
    for _ in range(500):
        dist.recv(tiny, 0)
        dist.send(tiny, 0)
    dist.destroy_process_group()


async def put_peer(address: str, rounds: int) -> dict[str, list[list[float]]]:
    """For every case and round: seconds of all puts, and of each."""
    results: dict[str, list[list[float]]] = {name: [] for name in PUTS}
    async with sb.connect(address) as producer:
        for number in range(rounds + 1):  # the first one warms up
            for name, (tokens, at_a_time, count) in PUTS.items():
                todo = iter(rollouts(tokens, f"{name}.{number}", count))
                each: list[float] = []

                async def put_all(todo: Iterator[sb.Rollout], each: list[float]) -> None:
                    for rollout in todo:
                        began = time.perf_counter()
                        await producer.put(rollout)
                        each.append(time.perf_counter() - began)

                began = time.perf_counter()
                async with anyio.create_task_group() as tasks:
                    for _ in range(at_a_time):
                        tasks.start_soon(put_all, todo, each)
                if number:
                    results[name].append([time.perf_counter() - began, statistics.median(each)])
    return results


async def stream_peer(address: str, name: str, hand_over: Any) -> None:
    todo = iter(rollouts(STREAM_TOKENS, name, STREAM_PUTS))
    async with sb.connect(address, hand_over=hand_over) as producer, anyio.create_task_group() as tasks:

        async def put_all() -> None:
            for rollout in todo:
                await producer.put(rollout)

        for _ in range(STREAM_AT_A_TIME):
            tasks.start_soon(put_all)


def stream_rank(address: str, rank: int) -> None:
    for batch in sb.RankFeed(address, rank=rank, dp_size=2):
        for mb in batch.micro_batches:
            mb.packed()


def as_peer(what: str, *args: Any) -> None:
    torch.set_num_threads(1)
    if what == "raw":
        raw_peer(*args)
    elif what == "put":
        print(json.dumps(anyio.run(put_peer, *args)))
    elif what == "stream":
        anyio.run(stream_peer, *args)
    else:
        stream_rank(*args)


async def output(process: subprocess.Popen[str]) -> str:
    out, _ = await anyio.to_thread.run_sync(process.communicate)
    if process.returncode:
        raise SystemExit(f"a peer failed: {process.args!r}")
    return out


# --- the controller --------------------------------------------------------------------------------------------------


def raw(rounds: int) -> dict[str, float]:
    """Megabytes a second by message size, and ``ping`` in milliseconds, there and back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    sizes = {"0.021": 3000, "1.05": 300, "10.5": 40}
    rates: dict[str, float] = {}
    with peer("raw", sizes, rounds):
        dist.init_process_group("gloo", rank=0, world_size=2)
        for megabytes, repeats in sizes.items():
            buffer = torch.zeros(int(float(megabytes) * 1e6), dtype=torch.uint8)
            seconds = []
            for _ in range(rounds):
                dist.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    dist.recv(buffer, 1)
                seconds.append(time.perf_counter() - began)
            rates[megabytes] = float(megabytes) * repeats / statistics.median(seconds)
        tiny = torch.zeros(64, dtype=torch.int64)
        pings = []
        for _ in range(500):
            began = time.perf_counter()
            dist.send(tiny, 1)
            dist.recv(tiny, 1)
            pings.append(time.perf_counter() - began)
        dist.destroy_process_group()
    return {**rates, "ping": 1e3 * statistics.median(pings)}


async def puts(rounds: int) -> dict[str, list[list[float]]]:
    config = sb.BalancerConfig(dp_size=1, batch_size=64, window=64, capacity=256, policy="fifo", remember_ids=0)
    async with sb.TorchTransport.listen(dp_size=1) as transport, sb.StreamBalancer(config) as balancer:
        with peer("put", transport.address, rounds) as process:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attend, balancer, transport)

                async def train() -> None:
                    async for _ in balancer.batches():
                        pass

                tasks.start_soon(train)
                results: dict[str, list[list[float]]] = json.loads(await output(process))
                tasks.cancel_scope.cancel()
    return results


async def stream(hand_over: str, shared_memory: bool) -> tuple[float, int]:
    """(seconds from the first batch to the last acknowledgement, bytes in and out of the controller's sockets)."""
    config = sb.BalancerConfig(dp_size=2, batch_size=32, window=64)
    sent = 0
    send_bulk = GlooChannel._send_bulk

    def counted(self: GlooChannel, source: Source, packets: Packets) -> Iterator[object]:
        nonlocal sent
        sent += source.size
        return send_bulk(self, source, packets)

    cast("Any", GlooChannel)._send_bulk = counted
    try:
        async with (
            sb.TorchTransport.listen(dp_size=2, shared_memory=shared_memory, narrow=False) as transport,
            sb.StreamBalancer(config) as balancer,
        ):
            where = transport.address
            with (
                peer("rank", where, 0),
                peer("rank", where, 1),
                peer("stream", where, "a", hand_over) as one,
                peer("stream", where, "b", hand_over) as two,
            ):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(sb.serve, balancer, transport)
                    while balancer.statistics().acknowledged < 64:  # noqa: ASYNC110 - a bench
                        await anyio.sleep(0.001)
                    began = time.perf_counter()
                    while balancer.statistics().accepted < 2 * STREAM_PUTS:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                    balancer.end()
                seconds = time.perf_counter() - began
                for process in (one, two):
                    await output(process)
            received = transport.received_bytes
    finally:
        cast("Any", GlooChannel)._send_bulk = send_bulk
    return seconds, received + sent


def main() -> None:
    options = arguments(__doc__)
    if options.as_peer:
        as_peer(*options.as_peer)
        return
    torch.set_num_threads(1)
    row = Rows(options.json).add
    rates = raw(ROUNDS)
    for megabytes, rate in rates.items():
        row(f"raw_gloo_{megabytes}{'' if megabytes == 'ping' else 'MB'}", rate, "ms" if megabytes == "ping" else "MB/s")
    like = dict(zip(PUTS, ("0.021", "0.021", "1.05", "10.5"), strict=True))
    for name, measured in anyio.run(puts, ROUNDS).items():
        tokens, _, count = PUTS[name]
        seconds = statistics.median(total for total, _ in measured)
        rate = tokens * BYTES_PER_TOKEN * count / 1e6 / seconds
        row(f"put_{name}", count / seconds, "puts/s")
        row(f"put_{name}_rate", rate, "MB/s")
        row(f"put_{name}_over_raw", rate / rates[like[name]], "ratio")
        row(f"put_{name}_latency", 1e3 * statistics.median(each for _, each in measured), "ms")
    payload = 2 * STREAM_PUTS * STREAM_TOKENS * BYTES_PER_TOKEN
    for name, hand_over, shared in (
        ("through_controller", "balancer", False),
        ("through_controller_shared_memory", "balancer", True),
        ("direct", "direct", False),
    ):
        runs = [anyio.run(stream, hand_over, shared) for _ in range(ROUNDS)]
        rest = payload * (1 - 64 / (2 * STREAM_PUTS))  # timed from the 64th rollout on
        row(f"2x2_{name}", rest / 1e6 / statistics.median(seconds for seconds, _ in runs), "MB/s")
        row(f"2x2_{name}_controller_bytes", statistics.median(total for _, total in runs) / payload, "of payload")


if __name__ == "__main__":
    main()
