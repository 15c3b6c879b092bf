"""How far one planner goes: steps, loop blocks, memory and simulated runs up to 4,096 ranks, 131,072 waiting and
10^6 rollouts.

A step is the whole ``core.poll``: columns, plan, batch, commit. All rollouts have the same payload, so that what is
measured is the balancer and Python, never tokens. Each part runs in a process of its own, with a clean heap.
Run: ``python bench/scale.py [--json] [--part memory|block|dispatch|simulate|shard]``, or beside another checkout, in
turns: ``python bench/scale.py --beside PATH``.
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from _common import Rows, arguments

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore

LONGEST = 8192
BYTES_OF_A_PAGE = os.sysconf("SC_PAGE_SIZE")


def make_rollouts(count: int, seed: int = 0) -> Iterator[sb.Rollout]:
    """Rollouts of lognormal lengths (mean about 400 tokens), one column each, all views of one payload."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.0, count).clip(1, LONGEST).astype(int)
    ids = torch.zeros(LONGEST, dtype=torch.int64)
    return (sb.Rollout(tokens={"input_ids": ids[:n]}, rollout_id=f"{seed}-{i}") for i, n in enumerate(lengths.tolist()))


def config_of(dp_size: int, batch_size: int, waiting: int) -> sb.BalancerConfig:
    return sb.BalancerConfig(dp_size=dp_size, batch_size=batch_size, window=waiting, cost=sb.cost.QuadraticCost())


def dispatch_times(dp_size: int, batch_size: int, waiting: int, steps: int) -> dict[str, float]:
    """CPU time of a poll and of its acknowledgement with so many waiting at each, and of the puts between them. The
    batch before has been dropped by then: its rollouts are the caller's to free."""
    core = BalancerCore(config_of(dp_size, batch_size, waiting))
    source = make_rollouts(waiting + (steps + 2) * batch_size)
    now = 0.0

    def fill(count: int) -> float:
        nonlocal now
        rollouts = [next(source) for _ in range(count)]
        start = time.process_time()
        for rollout in rollouts:
            now += 1e-4
            core.add(rollout, now)
        return (time.process_time() - start) / count

    fill(waiting)
    polls, acknowledgements, puts, excess = [], [], [], []
    for number in range(steps + 2):
        start = time.process_time()
        batch = core.poll(now)
        middle = time.process_time()
        assert batch is not None
        core.acknowledge(batch.step)
        end = time.process_time()
        if number >= 2:  # after first-time costs
            polls.append(middle - start)
            acknowledgements.append(end - middle)
            excess.append(batch.imbalance)
        size = batch.num_rollouts
        del batch
        puts.append(fill(size))
    return {
        "poll_ms": statistics.median(polls) * 1e3,
        "worst_poll_ms": max(polls) * 1e3,
        "acknowledge_ms": statistics.median(acknowledgements) * 1e3,
        "put_us": statistics.median(puts) * 1e6,
        "imbalance_percent": statistics.median(excess) * 100.0,
    }


# (ranks, batch, waiting): the window grows; the ranks grow at 4 rollouts each; at 16 each; all grow
WINDOW_GROWS = [(512, 4096, 32 * 1024), (512, 4096, 64 * 1024), (512, 4096, 128 * 1024)]
BATCH_GROWS = [(512, 4096, 128 * 1024), (512, 16384, 128 * 1024), (512, 65536, 128 * 1024)]
ALL_GROW = [(k, 16 * k, 32 * k) for k in (64, 256, 1024, 4096)]
FEW_EACH = [(k, 4 * k, 32 * k) for k in (64, 256, 1024, 4096)]
SMALLEST_FITTED = 256  # fewer ranks are balanced in the first rounds, which would flatter nobody but the power


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The p of seconds ~ size^p, fitted on logarithms: 1 = linear."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def dispatch_rows(rows: Rows, steps: int) -> None:
    """Time per step at each size, and how it grows. Without Python's cycle collector: see the blocks for that."""
    gc.disable()
    known: dict[tuple[int, int, int], float] = {}
    for size in dict.fromkeys([*WINDOW_GROWS, *BATCH_GROWS, *ALL_GROW, *FEW_EACH]):
        found: dict[str, Any] = {name: round(value, 3) for name, value in dispatch_times(*size, steps).items()}
        known[size] = found.pop("poll_ms")
        ranks, batch, waiting = size
        most = {(512, 4096, 131072): 12, (512, 16384, 131072): 60}.get(size)
        rows.add(f"dispatch of {batch} of {waiting} on {ranks} ranks", known[size], "ms", most, **found)
    for name, series, column, most_power in (
        ("waiting, 4096 to 512 ranks", WINDOW_GROWS, 2, 0.3),
        ("the batch, of 131072 to 512 ranks", BATCH_GROWS, 1, 1.2),
        ("everything, 16 rollouts a rank", ALL_GROW, 0, 1.2),
        ("everything, 4 rollouts a rank", FEW_EACH, 0, 1.2),
    ):
        fitted = [size for size in series if size[0] >= SMALLEST_FITTED]
        power = exponent([size[column] for size in fitted], [known[size] for size in fitted])
        rows.add(f"time of a step grows with {name}: power", power, "power", most_power)


def beside_rows(rows: Rows, other: Path, steps: int) -> None:
    """Dispatches and puts of this checkout and of another one, each time in a process of its own, in turns."""
    here = Path(__file__).resolve().parent.parent
    for size in dict.fromkeys([*WINDOW_GROWS, *BATCH_GROWS, (64, 1024, 2048), (32, 256, 512)]):
        found: dict[Path, list[dict[str, float]]] = {here: [], other: []}
        for where in (here, other, other, here, here, other):
            command = [sys.executable, __file__, "--as-peer", json.dumps([*size, steps])]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(where)}
            )
            found[where].append(json.loads(done.stdout))
        for what, unit in (("poll_ms", "ms"), ("put_us", "us")):
            ours, theirs = (statistics.median(one[what] for one in found[where]) for where in (here, other))
            name = f"{what.split('_')[0]}, {size[1]} of {size[2]} on {size[0]} ranks"
            rows.add(name, ours, unit, other=round(theirs, 2), ratio=round(ours / theirs, 2))


async def longest_block_s(dp_size: int, batch_size: int, waiting: int, steps: int) -> tuple[list[float], float]:
    """-> (for each step the longest time in which the event loop ran nothing else; the same without steps).

    A task that does nothing but yield notes the gaps between its turns, while producers put and a trainer iterates.
    """
    todo = make_rollouts(waiting + (steps + 3) * batch_size)
    blocks: list[float] = []
    gap = 0.0

    async def watch() -> None:
        nonlocal gap
        last = time.perf_counter()
        while True:
            await anyio.lowlevel.checkpoint()
            now = time.perf_counter()
            gap, last = max(gap, now - last), now

    async def produce(balancer: sb.StreamBalancer) -> None:
        for rollout in todo:
            await balancer.put(rollout)

    async with sb.StreamBalancer(config_of(dp_size, batch_size, waiting)) as balancer:
        for _ in range(waiting - 1):
            await balancer.put(next(todo))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.sleep(0.5)
            quiet = gap
            for _ in range(8):
                tasks.start_soon(produce, balancer)
            batches = balancer.batches()
            for number in range(steps + 1):
                gap = 0.0
                await anext(batches)
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                if number:
                    blocks.append(gap)
            tasks.cancel_scope.cancel()
    return blocks, quiet


def block_rows(rows: Rows, steps: int) -> None:
    """The longest block of the event loop per step, under load, on asyncio."""
    for collector in ("on", "off"):
        gc.collect()
        gc.enable() if collector == "on" else gc.disable()
        for ranks, batch, waiting in ((64, 4096, 16384), (512, 16384, 131072), (4096, 65536, 131072)):
            blocks, quiet = anyio.run(longest_block_s, ranks, batch, waiting, steps)
            rows.add(
                f"longest block of the loop per step, {batch} of {waiting} on {ranks} ranks, gc {collector}",
                statistics.median(blocks) * 1e3,
                "ms",
                worst=round(max(blocks) * 1e3, 2),
                without_steps=round(quiet * 1e3, 2),
            )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * BYTES_OF_A_PAGE


def memory_rows(rows: Rows, steps: int) -> None:
    """Bytes for each waiting rollout besides its tensors: the balancer's own, and the Rollout object's. What a tensor
    weighs before it holds anything is torch's, and given beside."""
    ids = torch.zeros(LONGEST, dtype=torch.int64)
    before = resident_bytes()
    tensors = [ids[: 1 + number % LONGEST] for number in range(131_072)]
    handle = (resident_bytes() - before) / len(tensors)
    rows.add("an empty handle of a torch tensor (resident)", handle, "B")
    for waiting in (80_000, 131_072):  # in the middle between two doublings of the columns, and just before one
        _memory_of(rows, tensors[:waiting])


def _memory_of(rows: Rows, tensors: list[torch.Tensor]) -> None:
    waiting = len(tensors)
    tracemalloc.start()
    rollouts = [sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"rollout-{i}") for i, ids in enumerate(tensors)]
    users = tracemalloc.get_traced_memory()[0]
    core = BalancerCore(config_of(512, waiting // 8, waiting))
    for now, rollout in enumerate(rollouts):
        core.add(rollout, float(now))
    held = tracemalloc.get_traced_memory()[0]
    own, of_rollout = (held - users) / waiting, users / waiting
    tracemalloc.reset_peak()
    batch = core.poll(float(waiting))
    assert batch is not None
    planning = (tracemalloc.get_traced_memory()[1] - held) / waiting
    tracemalloc.stop()
    rows.add(f"balancer's book-keeping per waiting rollout, {waiting} waiting", own, "B")
    rows.add(f"Rollout object with its dict and id, {waiting} waiting", of_rollout, "B")
    rows.add(f"both, per waiting rollout, {waiting} waiting", own + of_rollout, "B", 500)
    rows.add(f"on top during a step, per waiting rollout, {waiting} waiting", planning, "B")


def simulate_rows(rows: Rows, steps: int) -> None:
    """Whole simulated runs with an instant trainer: every rollout through the core once."""
    for count, ranks, batch, waiting in (
        (100_000, 512, 4096, 8192),
        (1_000_000, 512, 16384, 131072),
        (1_000_000, 4096, 65536, 131072),
    ):
        trace = sb.generate_trace(count, "lognormal")
        start = time.perf_counter()
        report = sb.simulate(trace, config_of(ranks, batch, waiting), slots=batch)
        seconds = time.perf_counter() - start
        assert report.overall.rollouts == count
        rows.add(
            f"simulated run: {count} rollouts, {batch} of {waiting} on {ranks} ranks",
            seconds,
            "s",
            us_per_rollout=round(seconds / count * 1e6, 1),
            steps=report.overall.batches,
            idle_percent=round(100 * report.overall.idle_fraction, 3),
        )


def sharded(dp_size: int, batch_size: int, waiting: int, num_cells: int, steps: int) -> tuple[float, float]:
    """-> (idle share of rank time if all ranks of all cells meet at every step, median milliseconds of one cell's
    dispatch). Each rollout goes to the cell with the least work waiting."""
    cells = [
        BalancerCore(config_of(dp_size // num_cells, batch_size // num_cells, waiting // num_cells))
        for _ in range(num_cells)
    ]
    source = make_rollouts(waiting + (steps + 8) * batch_size)
    backlog = [(0.0, cell) for cell in range(num_cells)]
    cost = cells[0].config.cost
    mean = slowest = 0.0
    times: list[float] = []
    for step in range(steps):
        while any(core.buffer.num_waiting < core.config.window for core in cells):
            rollout = next(source)
            work, cell = heapq.heappop(backlog)
            cells[cell].add(rollout, float(step))
            heapq.heappush(backlog, (work + float(cost(np.array([rollout.num_tokens]))[0]), cell))
        loads: list[float] = []
        left: dict[int, float] = {}
        for cell, core in enumerate(cells):
            start = time.perf_counter()
            batch = core.poll(float(step))
            times.append(time.perf_counter() - start)
            assert batch is not None
            core.acknowledge(batch.step)
            loads += batch.loads
            left[cell] = sum(batch.loads)
        backlog = [(work - left[cell], cell) for work, cell in backlog]
        heapq.heapify(backlog)
        if step >= steps // 3:  # after the warm-up
            mean, slowest = mean + sum(loads) / len(loads), slowest + max(loads)
    return 1.0 - mean / slowest, statistics.median(times) * 1e3


def shard_rows(rows: Rows, steps: int) -> None:
    """What cells with a planner of their own cost in balance, where all ranks meet at every step."""
    gc.disable()
    for cells in (1, 2, 8):
        idle, milliseconds = sharded(4096, 65536, 131072, cells, 9)
        name = f"65536 of 131072 on 4096 ranks in {cells} cells: idle share of rank time"
        rows.add(name, 100 * idle, "%", dispatch_of_a_cell_ms=round(milliseconds, 1))


PARTS: dict[str, Callable[[Rows, int], None]] = {
    "memory": memory_rows,
    "block": block_rows,
    "dispatch": dispatch_rows,
    "simulate": simulate_rows,
    "shard": shard_rows,
}


def main() -> None:
    options = arguments(__doc__, part=None, steps=9, beside=None)
    rows = Rows(options.json, options.results, more=options.part is not None)
    if options.as_peer:
        gc.disable()
        print(json.dumps(dispatch_times(*options.as_peer)))
    elif options.beside:
        beside_rows(rows, Path(options.beside).resolve(), options.steps)
    elif options.part:
        PARTS[options.part](rows, options.steps)
    else:
        for part in PARTS:
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)


if __name__ == "__main__":
    main()
