"""What a viewer costs the balancer that it looks at: rollouts per second from put to dispatch with and without one.

The event loop is kept busy all the time, which is the worst case: a picture then delays something. The viewer is a
thread that reads and does nothing; a real one is another process. Sides take turns in one run.
Run: ``python bench/watch.py [--json]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import torch

import stream_balancer as sb
from stream_balancer.watch.publish import publish_status, status_of
from stream_balancer.watch.status import attach

IDS = torch.zeros(8192, dtype=torch.int64)


async def rate(waiting: int, dispatches: int, side: str, folder: Path) -> float:
    """Rollouts per second, a quarter of ``waiting`` a batch. ``side``: "off", "published", "watched"."""
    batch_size = waiting // 4
    config = sb.BalancerConfig(dp_size=16, batch_size=batch_size, window=waiting, cost=sb.QuadraticCost())
    lengths = (torch.randn(waiting + dispatches * batch_size).exp() * 300).clamp(1, 8192).int().tolist()
    rollouts = iter([sb.Rollout(tokens={"input_ids": IDS[:length]}) for length in lengths])
    async with sb.StreamBalancer(config) as balancer, AsyncExitStack() as stack:
        if side != "off":
            path = await stack.enter_async_context(publish_status(balancer, path=folder / "bench.sock"))
            if side == "watched":
                threading.Thread(target=lambda: sum(1 for _ in attach(path)), daemon=True).start()
        batches = balancer.batches()
        for _ in range(waiting):
            balancer.put_nowait(next(rollouts))
        began = time.perf_counter()
        for number in range(dispatches):
            await anext(batches)
            if number < dispatches - 1:
                for _ in range(batch_size):
                    await balancer.put(next(rollouts))
        return dispatches * batch_size / (time.perf_counter() - began)


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
    sides = ("off", "published", "watched")
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(rate, 2048, 40, "watched", Path(folder))  # first-time costs
        for waiting, dispatches in ((2048, 300), (16_384, 40)):
            runs = [
                {side: anyio.run(rate, waiting, dispatches, side, Path(folder)) for side in sides}
                for _ in range(repeats)
            ]
            for side in sides[1:]:
                slower = statistics.median(1.0 - run[side] / run["off"] for run in runs)
                row: dict[str, object] = {
                    "name": f"rollouts/s lost with the balancer {side}, {waiting} waiting",
                    "value": round(100 * slower, 2),
                    "unit": "%",
                }
                yield row | {"rate_off": round(statistics.median(run["off"] for run in runs))}


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
