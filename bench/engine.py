"""The engine by itself: rollouts through ``await put`` to dispatch, and what a put costs as the window grows.

No transport, no training, real time. Rollouts are small, since the engine never looks at tokens; lengths are lognormal.
Run: ``python bench/engine.py [--json]``.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import NamedTuple

import anyio
import numpy as np
import torch
from _common import Rows, arguments, columns

import stream_balancer as sb

NUM_PRODUCERS = 64
BATCH_SIZE, DP_SIZE = 4096, 64


def make_rollouts(count: int, seed: int) -> list[sb.Rollout]:
    """Rollouts with lognormal lengths (mean about 500 tokens), one column each, a shared payload."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.0, count).clip(1, 8192).astype(int)
    ids = torch.zeros(8192, dtype=torch.int64)
    return [sb.Rollout(tokens={"input_ids": ids[:n]}, rollout_id=f"{seed}-{i}") for i, n in enumerate(lengths.tolist())]


class Rate(NamedTuple):
    """From put to dispatch."""

    per_second: float
    cpu_us: float
    """CPU time of a rollout."""
    switches: float
    """Context switches of a thousand rollouts."""


def used() -> tuple[float, float, int]:
    """Seconds of a clock, of CPU, and context switches so far."""
    its = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.process_time(), its.ru_nvcsw + its.ru_nivcsw


async def throughput(rollouts: list[sb.Rollout], waiting: int) -> Rate:
    """With about ``waiting`` rollouts in the window all the time."""
    config = sb.BalancerConfig(dp_size=DP_SIZE, batch_size=BATCH_SIZE, window=waiting, cost=sb.cost.QuadraticCost())
    async with sb.StreamBalancer(config) as balancer:
        fill, rest = rollouts[: waiting - 1], rollouts[waiting - 1 :]
        for rollout in fill:
            balancer.put_nowait(rollout)
        todo = iter(rest)
        start = used()

        async def produce() -> None:
            for rollout in todo:
                await balancer.put(rollout)

        async def produce_all() -> None:
            async with anyio.create_task_group() as producers:
                for _ in range(NUM_PRODUCERS):
                    producers.start_soon(produce)

        dispatched = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce_all)
            async for batch in balancer.batches():
                dispatched += batch.num_rollouts
                if dispatched >= len(rest) - BATCH_SIZE:
                    break
            seconds, cpu_s, switches = (now - then for now, then in zip(used(), start, strict=True))
            tasks.cancel_scope.cancel()
    return Rate(dispatched / seconds, 1e6 * cpu_s / dispatched, 1e3 * switches / dispatched)


async def calls_of_a_put() -> int:
    """Calls of ``put_nowait``, of Python and of C, for a rollout of one column."""
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=8, batch_size=256)) as balancer:
        first, second = (sb.Rollout(tokens={"input_ids": torch.zeros(8, dtype=torch.int64)}) for _ in range(2))
        balancer.put_nowait(first)  # what others must be like, and the cost of its length
        sys.setprofile(note)
        balancer.put_nowait(second)
        sys.setprofile(None)
    return calls - 1  # the last is setprofile


def columns_of(count: int) -> list[dict[str, torch.Tensor]]:
    """Five columns each of 64 tokens."""
    return [columns(64) for _ in range(count)]


def rollout_us(count: int = 4000) -> float:
    """CPU of ``Rollout()`` of five columns, of its own: what it holds is made before."""
    made = columns_of(count)
    began = time.process_time()
    rollouts = [sb.Rollout(tokens=tokens) for tokens in made]
    return 1e6 * (time.process_time() - began) / len(rollouts)


async def put_us(count: int = 4000) -> float:
    """CPU of ``put_nowait`` of rollouts of five columns, none of which fills the window."""
    rollouts = [sb.Rollout(tokens=tokens) for tokens in columns_of(count)]
    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=8, batch_size=count)) as balancer:
        began = time.process_time()
        for rollout in rollouts:
            balancer.put_nowait(rollout)
        return 1e6 * (time.process_time() - began) / count


def put_seconds(waiting: int, probes: int = 2000) -> tuple[float, float]:
    """Median and largest seconds of one ``put_nowait`` with ``waiting`` rollouts in the window.

    All three sizes are powers of two, where the columns double: the largest holds that (amortised) copy.
    """

    async def run() -> tuple[float, float]:
        config = sb.BalancerConfig(
            dp_size=DP_SIZE, batch_size=BATCH_SIZE, window=max(4 * waiting, 2 * BATCH_SIZE), max_skips=None
        )
        async with sb.StreamBalancer(config) as balancer:
            rollouts = make_rollouts(waiting + probes, 1)
            for rollout in rollouts[:waiting]:
                balancer.put_nowait(rollout)
            times = []
            for rollout in rollouts[waiting:]:
                start = time.perf_counter()
                balancer.put_nowait(rollout)
                times.append(time.perf_counter() - start)
            return statistics.median(times), max(times)

    return anyio.run(run)


async def deadline_lateness_s(deadline_s: float = 0.05) -> float:
    """Real seconds from the moment a deadline is due to the moment the trainer holds the batch."""
    config = sb.BalancerConfig(dp_size=4, batch_size=64, deadline_s=deadline_s)
    async with sb.StreamBalancer(config) as balancer:
        due = anyio.current_time() + deadline_s
        for rollout in make_rollouts(10, 2):
            balancer.put_nowait(rollout)
        await anext(balancer.batches())
        return anyio.current_time() - due


async def window_latency_s() -> float:
    """Real seconds from the put that fills the window (256 of 512 go to 8 ranks) to the trainer holding the batch."""
    config = sb.BalancerConfig(dp_size=8, batch_size=256, cost=sb.cost.QuadraticCost())
    rollouts = make_rollouts(config.window, 3)
    taken: list[float] = []
    async with sb.StreamBalancer(config) as balancer:

        async def trainer() -> None:
            await anext(balancer.batches())
            taken.append(time.perf_counter())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer)
            await anyio.sleep(0.01)
            for rollout in rollouts[:-1]:
                await balancer.put(rollout)
            await anyio.sleep(0.01)
            start = time.perf_counter()
            await balancer.put(rollouts[-1])
    return taken[0] - start


def latency(rows: Rows, repeats: int) -> None:
    """Deadline lateness and window latency on both loops; medians and worst of ten times ``repeats``."""
    for backend in ("asyncio", "trio"):
        anyio.run(deadline_lateness_s, backend=backend)  # imports and first-time costs
        late = sorted(anyio.run(deadline_lateness_s, backend=backend) for _ in range(10 * repeats))
        rows.add(f"deadline lateness, worst of {len(late)}, {backend}", late[-1] * 1e3, "ms", 5.0)
        rows.add(f"deadline lateness, median, {backend}", late[len(late) // 2] * 1e3, "ms")
        full = statistics.median(anyio.run(window_latency_s, backend=backend) for _ in range(10 * repeats))
        name = f"full window to batch in hand (plan of 256 of 512 on 8 ranks included), {backend}"
        rows.add(name, full * 1e3, "ms")


def rates(rows: Rows, repeats: int) -> None:
    """Medians of ``repeats``, sides interleaved."""
    waiting = 16384
    rollouts = make_rollouts(waiting + 12 * BATCH_SIZE, 0)
    for backend in ("asyncio", "trio"):
        rates = [anyio.run(throughput, rollouts, waiting, backend=backend) for _ in range(repeats)]
        rate, cpu_us, switches = map(statistics.median, zip(*rates, strict=True))
        name = f"await put to dispatch, {waiting} waiting, {NUM_PRODUCERS} producers, {backend}"
        rows.add(name, rate, "rollouts/s", 20_000, at_least=True)
        rows.add(f"{name}: CPU of a rollout", cpu_us, "us")
        rows.add(f"{name}: context switches of 1000 rollouts", switches, "switches")
    rows.add("calls of a put_nowait, of Python and of C", anyio.run(calls_of_a_put), "calls", 50)
    mine, puts = zip(*((rollout_us(), anyio.run(put_us)) for _ in range(repeats)), strict=True)
    rows.add("CPU of Rollout() of five columns", statistics.median(mine), "us")
    rows.add("CPU of put_nowait of five columns", statistics.median(puts), "us")
    sizes = (1024, 16384, 131072)
    runs = [[put_seconds(size) for size in sizes] for _ in range(repeats)]
    for k, size in enumerate(sizes):
        for name, of in (("put", 0), ("slowest put", 1)):
            rows.add(f"{name} with {size} waiting", statistics.median(run[k][of] for run in runs) * 1e6, "us")
    ratio = statistics.median(run[-1][0] / run[0][0] for run in runs)
    rows.add("put with 131072 waiting / put with 1024 waiting", ratio, "ratio", 2)


def main() -> None:
    """Print the rows, as a table or one JSON object a line."""
    options = arguments(__doc__, repeats=5)
    rows = Rows(options.json, options.results)
    latency(rows, options.repeats)  # before the heap is large
    rates(rows, options.repeats)


if __name__ == "__main__":
    main()
