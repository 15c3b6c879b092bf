"""What a viewer costs the balancer that it looks at: the loop's time for pictures, rollouts per second of its CPU.

The event loop is kept busy all the time, which is the worst case: a picture then delays something. The viewer is a
thread that reads and does nothing; a real one is another process. Sides take turns in one run.
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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import anyio
import torch

import stream_balancer as sb
from stream_balancer.watch import publish
from stream_balancer.watch.publish import status_of
from stream_balancer.watch.status import Status, attach

IDS = torch.zeros(8192, dtype=torch.int64)


class Run(NamedTuple):
    rate: float
    """Rollouts per CPU second of the event loop's thread, put to acknowledged."""
    share: float
    """Of the wall time that the loop spent on pictures."""


async def run(waiting: int, seconds: float, side: str, folder: Path) -> Run:
    """Put and dispatch for so long, a quarter of ``waiting`` a batch. ``side``: "off", "published", "watched"."""
    batch_size = waiting // 4
    config = sb.BalancerConfig(dp_size=16, batch_size=batch_size, window=waiting, cost=sb.QuadraticCost())
    lengths = itertools.cycle((torch.randn(4096).exp() * 300).clamp(1, 8192).int().tolist())
    pictures_s: list[float] = []

    def timed(balancer: sb.StreamBalancer, name: str) -> tuple[Status, float]:
        status, taken_s = original(balancer, name)
        pictures_s.append(taken_s)
        return status, taken_s

    original, publish._timed_status = publish._timed_status, timed
    async with sb.StreamBalancer(config) as balancer, AsyncExitStack() as stack:
        if side != "off":
            path = await stack.enter_async_context(publish.publish_status(balancer, path=folder / "bench.sock"))
            if side == "watched":
                threading.Thread(target=lambda: sum(1 for _ in attach(path)), daemon=True).start()
        batches = balancer.batches()
        for _ in range(waiting - batch_size):
            balancer.put_nowait(sb.Rollout(tokens={"input_ids": IDS[: next(lengths)]}))
        began, cpu, done = time.perf_counter(), time.thread_time(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(batch_size):
                await balancer.put(sb.Rollout(tokens={"input_ids": IDS[: next(lengths)]}))
            await anext(batches)
            done += batch_size
        elapsed_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
    publish._timed_status = original
    return Run(done / cpu_s, sum(pictures_s) / elapsed_s)


async def picture_ms(waiting: int, ranks: int) -> float:
    """Of the event loop, median of nine."""
    config = sb.BalancerConfig(dp_size=ranks, batch_size=waiting // 2, window=waiting + 1, capacity=2 * waiting)
    async with sb.StreamBalancer(config) as balancer:
        for number in range(waiting):
            balancer.put_nowait(sb.Rollout(tokens={"input_ids": IDS[: 1 + number % 8192]}))
        times = []
        for _ in range(9):
            began = time.perf_counter()
            status_of(balancer)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3


def rows(repeats: int) -> Iterator[dict[str, object]]:
    """One row per figure."""
    for waiting, ranks in ((512, 8), (16_384, 64), (131_072, 512)):
        name = f"a picture of {waiting} waiting on {ranks} ranks, of the event loop's time"
        yield {"name": name, "value": round(anyio.run(picture_ms, waiting, ranks), 3), "unit": "ms"}
    gc.disable()  # the balancer makes no cycles, and the collector would drown what is measured
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(run, 2048, 1.0, "watched", Path(folder))  # first-time costs
        for waiting in (2048, 16_384):
            sides = ("off", "published", "watched")
            runs = [{side: anyio.run(run, waiting, 4.0, side, Path(folder)) for side in sides} for _ in range(repeats)]
            for side in sides[1:]:
                slower = statistics.median(1.0 - one[side].rate / one["off"].rate for one in runs)
                name = f"rollouts per CPU second lost with the balancer {side}, {waiting} waiting"
                yield {"name": name, "value": round(100 * slower, 2), "unit": "%"}
            share = statistics.median(one["watched"].share for one in runs)
            row: dict[str, object] = {
                "name": f"share of the event loop's time that pictures take, {waiting} waiting",
                "value": round(100 * share, 3),
                "unit": "%",
                "bar": "<= 1",
                "holds": share <= 0.01,
            }
            yield row | {"rollouts_per_cpu_second_off": round(statistics.median(one["off"].rate for one in runs))}


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
