"""A checkpoint of a gigabyte held, while puts go on: how late the event loop gets, and how long saving takes.

``python bench/checkpoint.py [--json] [--gigabytes 1]``. The stall is the longest a 1 ms ticker was late.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import torch
from _common import BYTES_PER_TOKEN, Rows, arguments, rollout

import stream_balancer as sb
from stream_balancer.host.checkpoint import state_dict

TOKENS = 4096


async def longest_stall_ms(
    balancer: sb.StreamBalancer, spare: Iterator[int], job: Callable[[], Awaitable[Any]]
) -> float:
    """While ``job`` runs and rollouts are put; in milliseconds."""
    late: list[float] = []
    done = anyio.Event()

    async def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            await anyio.sleep(0.001)
            now = time.perf_counter()
            late.append(now - last - 0.001)
            last = now

    async def put() -> None:
        while not done.is_set():
            await balancer.put(rollout(8, f"s{next(spare)}"))
            await anyio.sleep(0.002)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        tasks.start_soon(put)
        await anyio.sleep(0.2)
        late.clear()
        await job()
        await anyio.sleep(0.01)
        done.set()
    return 1e3 * max(late)


async def measure(rows: Rows, gigabytes: float, repeats: int) -> None:
    count = int(gigabytes * 1e9 / TOKENS / BYTES_PER_TOKEN)
    config = sb.BalancerConfig(dp_size=8, batch_size=256, window=4 * count, capacity=8 * count)
    async with sb.StreamBalancer(config) as balancer:
        for number in range(count):
            balancer.put_nowait(rollout(TOKENS, f"r{number}"))
        held = balancer.statistics().waiting_bytes / 1e9
        spare = iter(range(10**9))
        quiet, beside, took = [], [], []
        states: list[dict[str, Any]] = []

        async def nothing() -> None:
            await anyio.sleep(0.5)

        async def in_a_thread() -> None:
            began = time.perf_counter()
            states.append(await balancer.async_state_dict())  # kept: to free a gigabyte takes 70 ms of its own
            took.append(time.perf_counter() - began)

        for _ in range(repeats):
            quiet.append(await longest_stall_ms(balancer, spare, nothing))
            states.clear()
            beside.append(await longest_stall_ms(balancer, spare, in_a_thread))
        began = time.perf_counter()
        balancer.snapshot()
        rows.add(f"snapshot() of {held:.2f} GB in {count} rollouts", 1e3 * (time.perf_counter() - began), "ms")
        rows.add("loop stall without a checkpoint, median", statistics.median(quiet), "ms")
        rows.add("loop stall during a checkpoint in a thread, median", statistics.median(beside), "ms", 20.0)
        rows.add("loop stall during a checkpoint in a thread, worst", max(beside), "ms")
        rows.add("checkpoint in a thread", statistics.median(took), "s")
        began = time.perf_counter()
        state_dict(balancer.snapshot())
        rows.add(
            "state_dict() in the loop's thread: the loop stands still for", 1e3 * (time.perf_counter() - began), "ms"
        )
    file = io.BytesIO()
    began = time.perf_counter()
    torch.save(states[0], file)
    rows.add("torch.save to memory", time.perf_counter() - began, "s")
    file.seek(0)
    began = time.perf_counter()
    async with sb.StreamBalancer(config) as balancer:
        balancer.load_state_dict(torch.load(file, weights_only=True))
        rows.add("torch.load and load_state_dict", time.perf_counter() - began, "s")


def main() -> None:
    options = arguments(__doc__, gigabytes=1.0, repeats=5)
    torch.set_num_threads(1)
    anyio.run(measure, Rows(options.json), options.gigabytes, options.repeats)


if __name__ == "__main__":
    main()
