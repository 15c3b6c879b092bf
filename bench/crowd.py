"""Many ranks and producers on one controller, over real sockets: how soon they have joined, what a step costs, and what
100 dead ranks cost.

``python bench/crowd.py [--json] [--ranks 512] [--producers 10000] [--steps 20] [--kill 100]``. Ranks and producers are
sessions in a few processes, each session with its own connection. A descriptor is needed for each at the controller,
and one in its own process: see ``ulimit -n``; ``make bench-crowd`` raises it.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import torch
from _common import Rows, arguments, peer

import stream_balancer as sb

PRODUCERS_A_PROCESS = 5000
RANKS_A_PROCESS = 100
AT_ONCE = 200
ROLLOUTS_A_RANK = 4
TOKENS = 48


async def producers_peer(address: str, first: int, count: int, each: int) -> None:
    """``count`` producers, which put ``each`` rollouts, one by one."""
    ids = torch.zeros(TOKENS, dtype=torch.int64)

    async def work(number: int) -> None:
        async with AsyncExitStack() as stack:
            async with at_once:  # as many processes that start together
                producer = await stack.enter_async_context(sb.connect(address))
                await producer.put(rollout(number, 0))
            joined.append(number)
            if len(joined) == count:
                print("joined", flush=True)
                all_joined.set()
            await all_joined.wait()
            for turn in range(1, each):
                await producer.put(rollout(number, turn))
            await producer.end()

    def rollout(number: int, turn: int) -> sb.Rollout:
        return sb.Rollout(tokens={"input_ids": ids}, rollout_id=f"{number}.{turn}")

    joined: list[int] = []
    all_joined, at_once = anyio.Event(), anyio.CapacityLimiter(AT_ONCE)
    print("ready", flush=True)
    async with anyio.create_task_group() as tasks:
        for number in range(first, first + count):
            tasks.start_soon(work, number)


async def ranks_peer(address: str, first: int, count: int, dp_size: int) -> None:
    async def train(rank: int) -> None:
        async for step in sb.RankFeed(address, rank=rank, dp_size=dp_size):
            for micro_batch in step:
                micro_batch.packed()
            await step.async_finish()

    async with anyio.create_task_group() as tasks:
        for rank in range(first, first + count):
            tasks.start_soon(train, rank)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def most_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Sizes(NamedTuple):
    """How many of each."""

    ranks: int
    producers: int
    steps: int
    killed: int

    @property
    def batch(self) -> int:
        return self.ranks * ROLLOUTS_A_RANK

    @property
    def puts_each(self) -> int:
        return max(2, -(-self.steps * self.batch // self.producers))

    @property
    def rollouts(self) -> int:
        return self.puts_each * self.producers


async def crowd(rows: Rows, sizes: Sizes) -> None:
    config = sb.BalancerConfig(
        dp_size=sizes.ranks, batch_size=sizes.batch, window=sizes.batch, capacity=sizes.rollouts + sizes.batch
    )
    transport = sb.TorchTransport.listen(dp_size=sizes.ranks, movers=())
    idle_mib = resident_mib()
    with anyio.fail_after(600):
        async with (
            sb.StreamBalancer(config, num_producers=sizes.producers, report_after_s=600.0) as balancer,
            transport,
            anyio.create_task_group() as tasks,
        ):
            serve = partial(sb.serve, on_rank_loss="replan")
            tasks.start_soon(serve, balancer, transport)
            await run(rows, balancer, transport.address, sizes, idle_mib)


class Clock:
    """Seconds, and CPU seconds of this process, since the last question."""

    def __init__(self) -> None:
        self._last = (time.perf_counter(), time.process_time())

    def lap(self) -> tuple[float, float]:
        now = (time.perf_counter(), time.process_time())
        (began, cpu), self._last = self._last, now
        return now[0] - began, now[1] - cpu


async def run(rows: Rows, balancer: sb.StreamBalancer, address: str, sizes: Sizes, idle_mib: float) -> None:
    clock = Clock()
    with ExitStack() as stack:
        first = range(0, sizes.producers, PRODUCERS_A_PROCESS)
        counts = [min(PRODUCERS_A_PROCESS, sizes.producers - number) for number in first]
        crowds = [
            stack.enter_context(peer("producers_peer", address, number, count, sizes.puts_each))
            for number, count in zip(first, counts, strict=True)
        ]
        clock.lap()
        for process in crowds:
            assert process.stdout is not None
            assert (await anyio.to_thread.run_sync(process.stdout.readline)) == "ready\n"
        clock.lap()
        for process in crowds:
            assert process.stdout is not None
            assert (await anyio.to_thread.run_sync(process.stdout.readline)) == "joined\n"
        seconds, cpu = clock.lap()
        a_join = round(cpu / sizes.producers * 1e6)
        rows.add(f"{sizes.producers} producers join and put", seconds, "s", controller_us_each=a_join)
        rows.add("descriptors of the controller, producers joined", descriptors(), "", limit=most_descriptors())
        grown = resident_mib() - idle_mib
        each = round(1024 * grown / sizes.producers, 1)
        rows.add("memory of the controller, producers joined, without what it had before", grown, "MiB", KiB_each=each)
        await until(lambda: balancer.statistics().waiting == sizes.rollouts)
        seconds, cpu = clock.lap()
        count = sizes.rollouts - sizes.producers
        a_put = round(cpu / count * 1e6, 1)
        rows.add(f"{count} more puts", seconds, "s", controller_us_a_put=a_put)
        # the last process has those that are killed
        starts = range(0, sizes.ranks - sizes.killed, RANKS_A_PROCESS)
        groups = [(number, min(RANKS_A_PROCESS, sizes.ranks - sizes.killed - number)) for number in starts]
        groups.append((sizes.ranks - sizes.killed, sizes.killed))
        feeds = [
            stack.enter_context(peer("ranks_peer", address, number, count, sizes.ranks)) for number, count in groups
        ]
        await until(lambda: balancer.statistics().acknowledged >= sizes.batch)
        rows.add(f"{sizes.ranks} ranks: from their processes' start to a step trained", clock.lap()[0], "s")
        rows.add("threads of the controller", threading.active_count(), "")
        rows.add("descriptors of the controller, ranks joined", descriptors(), "")
        rows.add("memory of the controller, without what it had before", resident_mib() - idle_mib, "MiB")
        clock.lap()
        known = balancer.statistics().acknowledged
        await until(lambda: balancer.statistics().acknowledged >= sizes.rollouts // 2)
        steps = (balancer.statistics().acknowledged - known) / sizes.batch
        seconds, cpu = clock.lap()
        rows.add("a step", seconds / steps, "s", controller_cpu_s=round(cpu / steps, 4))
        known = balancer.statistics().acknowledged
        feeds[-1].send_signal(signal.SIGKILL)
        await until(lambda: balancer.statistics().acknowledged >= known + 2 * sizes.batch)
        rows.add(f"{sizes.killed} ranks are killed at once: until two more steps are trained", clock.lap()[0], "s")
        await until(lambda: balancer.statistics().acknowledged == sizes.rollouts)
        rows.add("rollouts trained on", balancer.statistics().acknowledged, "", bar=sizes.rollouts, at_least=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.05)


def main() -> None:
    args = arguments(__doc__, ranks=512, producers=10_000, steps=20, kill=100)
    if args.as_peer:
        name, *rest = args.as_peer
        anyio.run({"producers_peer": producers_peer, "ranks_peer": ranks_peer}[name], *rest)
        return
    rows = Rows(args.json, args.results)
    anyio.run(crowd, rows, Sizes(args.ranks, args.producers, args.steps, args.kill))


if __name__ == "__main__":
    main()
