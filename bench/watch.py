"""What a viewer costs the balancer that it looks at: the loop's time for a picture, rollouts per second of its CPU.

The event loop is kept busy all the time, which is the worst case: a picture then delays something. The viewer is a
thread that asks and shows nothing; a real one is another process. Sides take turns in one run.
Run: ``python bench/watch.py [--json]``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import anyio
import torch

import stream_balancer as sb
from stream_balancer.watch.publish import publish_status, status_of
from stream_balancer.watch.status import fetch

IDS = torch.zeros(8192, dtype=torch.int64)


async def picture_ms(waiting: int, ranks: int) -> float:
    """Of the event loop, with its line of JSON; median of nine."""
    config = sb.BalancerConfig(dp_size=ranks, batch_size=waiting // 2, window=waiting + 1, capacity=2 * waiting)
    async with sb.StreamBalancer(config) as balancer:
        for number in range(waiting):
            balancer.put_nowait(sb.Rollout(tokens={"input_ids": IDS[: 1 + number % 8192]}))
        times = []
        for _ in range(9):
            began = time.perf_counter()
            status_of(balancer).line()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3


async def rate(waiting: int, seconds: float, folder: Path, *, watched: bool) -> float:
    """Rollouts per CPU second of the event loop's thread, put to acknowledged, a quarter of ``waiting`` a batch."""
    batch_size = waiting // 4
    config = sb.BalancerConfig(dp_size=16, batch_size=batch_size, window=waiting, cost=sb.QuadraticCost())
    lengths = itertools.cycle((torch.randn(4096).exp() * 300).clamp(1, 8192).int().tolist())
    done = 0
    async with sb.StreamBalancer(config) as balancer, AsyncExitStack() as stack:
        if watched:
            path = await stack.enter_async_context(publish_status(balancer, path=folder / "bench.sock"))
            threading.Thread(target=watch, args=[path], daemon=True).start()
        batches = balancer.batches()
        for _ in range(waiting - batch_size):
            balancer.put_nowait(sb.Rollout(tokens={"input_ids": IDS[: next(lengths)]}))
        began, cpu = time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < seconds:
            for _ in range(batch_size):
                await balancer.put(sb.Rollout(tokens={"input_ids": IDS[: next(lengths)]}))
            await anext(batches)
            done += batch_size
        return done / (time.thread_time() - cpu)


def watch(path: Path) -> None:
    """As the command does."""
    with suppress(OSError):
        while True:
            fetch(path)
            time.sleep(0.25)


def rows(repeats: int) -> Iterator[dict[str, object]]:
    """One row per figure."""
    for waiting, ranks in ((512, 8), (16_384, 64), (131_072, 512)):
        name = f"a picture of {waiting} waiting on {ranks} ranks, of the event loop's time"
        yield {"name": name, "value": round(anyio.run(picture_ms, waiting, ranks), 3), "unit": "ms"}
    gc.disable()  # the balancer makes no cycles, and the collector would drown what is measured
    for waiting in (2048, 16_384):
        with tempfile.TemporaryDirectory() as name:
            off, on = (partial(rate, waiting, 4.0, Path(name), watched=watched) for watched in (False, True))
            lost = [1.0 - anyio.run(on) / anyio.run(off) for _ in range(repeats)]
        share = statistics.median(lost)
        name = f"rollouts per CPU second lost with the balancer watched, {waiting} waiting"
        yield {"name": name, "value": round(100 * share, 2), "unit": "%"}


def main() -> None:
    """Print the rows, as a table or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for row in rows(args.repeats):
        print(json.dumps(row) if args.json else f"{row['name']:<80} {row['value']:>8} {row['unit']}", flush=True)


if __name__ == "__main__":
    main()
