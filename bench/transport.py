"""Rank batches to ranks in other processes, over raw gloo's send and recv in the same processes.

``python bench/transport.py [--json] [--sizes 1,10,40] [--ranks 2] [--rounds 5]``: megabytes a rank. Everything that
ships takes part: a balancer plans each step, ``serve`` sends it, the rank lays it out. Two kinds of batch: 64 rollouts
of 21 bytes a token that lie apart, and one rollout, whose columns are few pieces. Read the ratios, not the rates, and
the CPU time of either side beside them: the ways alternate, in the same processes.
"""

from __future__ import annotations

import inspect
import os
import socket
import statistics
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Any, NamedTuple, cast

import anyio
import torch
import torch.distributed as dist
from _common import BYTES_PER_TOKEN, Rows, arguments, columns, peer

import stream_balancer as sb

ROLLOUTS = {"apart": 64, "piece": 1}
WARM = 3
"""Batches of a round before the clock starts: credits let the first ones leave early."""
BARS = {("socket", 10): 0.9, ("socket", 40): 0.9, ("shared_memory", 10): 2.0, ("shared_memory", 40): 3.0}
BARS_IN_ONE_PIECE = {("send_recv", 10): 0.8, ("send_recv", 40): 0.8}


def ways() -> dict[str, dict[str, Any]]:
    """Options of the transport, by the way that bytes go. Before movers there were two."""
    if "movers" in inspect.signature(sb.TorchTransport.__init__).parameters:
        movers: dict[str, tuple[str, ...]] = {
            "socket": (),
            "send_recv": ("torch_dist",),
            "shared_memory": ("shared_memory",),
        }
        return {name: {"movers": wanted} for name, wanted in movers.items()}
    return {"send_recv": {"shared_memory": False, "narrow": False}, "shared_memory": {"narrow": False}}


class Case(NamedTuple):
    """One size and kind of batch."""

    megabytes: float
    kind: str

    @property
    def repeats(self) -> int:
        return WARM + max(4, min(24, int(160 / self.megabytes)))

    @property
    def tokens(self) -> int:
        return max(int(self.megabytes * 1e6 / BYTES_PER_TOKEN / ROLLOUTS[self.kind]), 1)

    @property
    def gloo_bytes(self) -> int:
        return self.tokens * BYTES_PER_TOKEN * ROLLOUTS[self.kind]


class Taken(NamedTuple):
    """Of one round, at a rank."""

    seconds: float
    cpu_s: float
    """Of the rank's process."""


# --- a rank ----------------------------------------------------------------------------------------------------------


def take(feed: sb.RankFeed, case: Case) -> Taken:
    """All batches of a round, laid out; the clock starts behind the first few."""
    began = cpu = 0.0
    for number in range(case.repeats):
        batch = next(feed)
        for micro_batch in batch.micro_batches:
            micro_batch.packed()
        batch.ack()
        if number == WARM - 1:
            began, cpu = time.perf_counter(), time.process_time()
    return Taken(time.perf_counter() - began, time.process_time() - cpu)


def take_raw(case: Case) -> Taken:
    buffer = torch.zeros(case.gloo_bytes, dtype=torch.uint8)
    began = cpu = 0.0
    for number in range(case.repeats):
        dist.recv(buffer, 0, tag=1)
        if number == WARM - 1:
            began, cpu = time.perf_counter(), time.process_time()
    return Taken(time.perf_counter() - began, time.process_time() - cpu)


def rank_main(rank: int, dp_size: int, addresses: dict[str, dict[str, str]], cases: list[Any], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank + 1, world_size=dp_size + 1)
    with ExitStack() as stack:
        feeds = {
            (kind, way): stack.enter_context(sb.RankFeed(address, rank=rank, dp_size=dp_size))
            for kind, of_kind in addresses.items()
            for way, address in of_kind.items()
        }
        for case in [Case(*one) for one in cases]:
            for _ in range(rounds):
                dist.barrier()
                took = {"raw": take_raw(case)}
                for way in addresses[case.kind]:
                    dist.barrier()
                    took[way] = take(feeds[case.kind, way], case)
                dist.gather_object(took, None, 0)
    dist.destroy_process_group()


# --- the controller --------------------------------------------------------------------------------------------------


def send_raw(case: Case, dp_size: int) -> None:
    buffer = torch.zeros(case.gloo_bytes, dtype=torch.uint8)
    for _ in range(case.repeats):
        works = [dist.isend(buffer, rank + 1, tag=1) for rank in range(dp_size)]
        for work in works:
            cast("Any", work).wait()


async def in_thread(function: Any, *args: Any) -> None:
    await anyio.to_thread.run_sync(lambda: function(*args), abandon_on_cancel=True)


def put_all(balancer: sb.StreamBalancer, case: Case, name: str, dp_size: int) -> None:
    common = columns(case.tokens)
    for number in range(case.repeats * dp_size * ROLLOUTS[case.kind]):
        balancer.put_nowait(sb.Rollout(tokens=common, rollout_id=f"{name}.{number}"))


async def done(balancer: sb.StreamBalancer) -> None:
    while balancer.in_flight() or balancer.statistics().waiting:  # noqa: ASYNC110 - a benchmark's end of a round
        await anyio.sleep(0.002)


class Bench:
    """Walks the cases, as every rank does."""

    def __init__(self, rows: Rows, dp_size: int, balancers: dict[str, dict[str, sb.StreamBalancer]]) -> None:
        self._rows, self._dp_size, self._balancers = rows, dp_size, balancers

    async def case(self, case: Case, rounds: int) -> None:
        """Raw, and each way; as many rounds."""
        taken: dict[str, list[Taken]] = {}
        cpu: dict[str, list[float]] = {}
        for number in range(rounds):
            await in_thread(dist.barrier)
            await in_thread(send_raw, case, self._dp_size)
            for way, balancer in self._balancers[case.kind].items():
                await in_thread(dist.barrier)
                began = time.process_time()
                put_all(balancer, case, f"{case.megabytes:g}.{way}.{number}", self._dp_size)
                await done(balancer)
                cpu.setdefault(way, []).append((time.process_time() - began) / case.repeats)
            got: list[Any] = [None] * (self._dp_size + 1)
            await in_thread(dist.gather_object, None, got, 0)
            for way in got[1]:
                slowest = max((one[way] for one in got[1:]), key=lambda one: one.seconds)
                taken.setdefault(way, []).append(slowest)
        self._report(case, taken, cpu)

    def _report(self, case: Case, taken: dict[str, list[Taken]], cpu: dict[str, list[float]]) -> None:
        more: dict[str, Any] = {"megabytes": case.megabytes, "ranks": self._dp_size, "kind": case.kind}
        counted, raw = case.repeats - WARM, taken.pop("raw")
        rate = case.gloo_bytes * self._dp_size * counted / 1e9
        self._rows.add("raw", rate / statistics.median(one.seconds for one in raw), "GB/s", **more)
        raw_cpu = statistics.median(one.cpu_s for one in raw)
        for way, rounds in taken.items():
            ratio = statistics.median(r.seconds / o.seconds for r, o in zip(raw, rounds, strict=True))
            bars = BARS | (BARS_IN_ONE_PIECE if case.kind == "piece" else {})
            self._rows.add(
                f"{way}_over_raw", ratio, "ratio", bars.get((way, int(case.megabytes))), at_least=True, **more
            )
            rank_cpu = statistics.median(one.cpu_s for one in rounds)
            self._rows.add(f"{way}_cpu_rank", 1e3 * rank_cpu / counted, "ms", **more)
            self._rows.add(f"{way}_cpu_rank_over_raw", rank_cpu / max(raw_cpu, 1e-9), "ratio", **more)
            self._rows.add(f"{way}_cpu_controller", 1e3 * statistics.median(cpu[way]), "ms", **more)


async def run(rows: Rows, dp_size: int, cases: list[Case], rounds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        balancers: dict[str, dict[str, sb.StreamBalancer]] = {}
        addresses: dict[str, dict[str, str]] = {}
        for kind in sorted({case.kind for case in cases}):
            size = dp_size * ROLLOUTS[kind]
            config = sb.BalancerConfig(dp_size=dp_size, batch_size=size, window=size, capacity=100 * size)
            for way, options in ways().items():
                transport = await stack.enter_async_context(sb.TorchTransport.listen(dp_size=dp_size, **options))
                balancer = await stack.enter_async_context(sb.StreamBalancer(config))
                tasks.start_soon(sb.serve, balancer, transport)
                balancers.setdefault(kind, {})[way] = balancer
                addresses.setdefault(kind, {})[way] = transport.address
        with ExitStack() as peers:
            ranks = [peers.enter_context(peer(rank, dp_size, addresses, cases, rounds)) for rank in range(dp_size)]
            await in_thread(lambda: dist.init_process_group("gloo", rank=0, world_size=dp_size + 1))
            bench = Bench(rows, dp_size, balancers)
            for case in cases:
                await bench.case(case, rounds)
            for of_kind in balancers.values():
                for balancer in of_kind.values():
                    balancer.end()
            for process in ranks:
                await in_thread(process.wait)
            dist.destroy_process_group()
        tasks.cancel_scope.cancel()


def main() -> None:
    options = arguments(__doc__, sizes="1,10,40", ranks="2", rounds=5)
    if options.as_peer:
        rank_main(*options.as_peer)
        return
    torch.set_num_threads(1)
    rows = Rows(options.json, options.results)
    cases = [Case(float(size), kind) for size in options.sizes.split(",") for kind in ROLLOUTS]
    for dp_size in map(int, options.ranks.split(",")):
        anyio.run(run, rows, dp_size, cases, options.rounds)
    raise SystemExit(f"below their bars: {', '.join(rows.failed)}" if rows.failed else 0)


if __name__ == "__main__":
    main()
