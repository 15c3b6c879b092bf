"""Rank batches to ranks in other processes, over raw gloo's send and recv, and raw sockets', in the same processes.

``python bench/transport.py [--json] [--sizes 1,10,40] [--ranks 2] [--rounds 5]``: megabytes a rank. Everything that
ships takes part: a balancer plans each step, ``serve`` sends it, the rank lays it out. Two kinds of batch: 64 rollouts
of 21 bytes a token that lie apart, and one rollout, whose columns are few pieces. Read the ratios, not the rates, and
the CPU time and context switches of either side beside them: the ways alternate, in the same processes. Behind these
rounds ``strace``, where it is installed, counts the system calls of one rank for a batch of 1 MB.
"""

from __future__ import annotations

import inspect
import math
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial
from typing import Any, NamedTuple, cast

import anyio
import torch
import torch.distributed as dist
from _common import BYTES_PER_TOKEN, Rows, arguments, columns, peer

import stream_balancer as sb

ROLLOUTS = {"apart": 64, "piece": 1}
RAW = ("raw", "raw_sockets")
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

    batches: int | None = None
    """Of a round; None: by their size."""

    @property
    def repeats(self) -> int:
        return WARM + (self.batches or max(4, min(24, int(160 / self.megabytes))))

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
    switches: float
    """Context switches of it."""


TRACED = Case(1, "apart", 200)
"""Of which strace counts the system calls."""
Used = tuple[float, float, float]


def used() -> Used:
    """Seconds of a clock, of CPU, and context switches so far."""
    its = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.process_time(), its.ru_nvcsw + its.ru_nivcsw


def since(began: Used) -> Taken:
    return Taken(*(now - then for now, then in zip(used(), began, strict=True)))


# --- a rank ----------------------------------------------------------------------------------------------------------


def take_one(feed: sb.RankFeed) -> None:
    """A batch, laid out."""
    batch = next(feed)
    for micro_batch in batch.micro_batches:
        micro_batch.packed()
    batch.ack()


def take(one: Callable[[], object], case: Case) -> Taken:
    """All batches of a round; the clock starts behind the first few."""
    for _ in range(WARM):
        one()
    began = used()
    for _ in range(case.repeats - WARM):
        one()
    return since(began)


def receive(connection: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        at += connection.recv_into(buffer[at:])


def system_calls(feed: sb.RankFeed) -> dict[str, float] | str:
    """System calls of this process for a batch, by name; or why nothing counted them. It is slower meanwhile."""
    if shutil.which("strace") is None:
        take(lambda: take_one(feed), TRACED)
        return "strace is not installed"
    with tempfile.NamedTemporaryFile("r") as counts:
        for _ in range(WARM):
            take_one(feed)
        command = ["strace", "-f", "-c", "-U", "calls,name", "-o", counts.name, "-p", str(os.getpid())]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        said = strace.stderr.readline()  # that it is attached, or why not
        for _ in range(TRACED.repeats - WARM):
            take_one(feed)
        strace.send_signal(signal.SIGINT)
        said += strace.communicate()[1]
        lines = [words for line in counts if len(words := line.split()) == 2]
    rows = [(name, int(count)) for count, name in lines if count.isdigit() and name != "total"]
    found = {name: count / (TRACED.repeats - WARM) for name, count in rows}
    return found if found and "attached" in said else f"strace counted nothing: {said.strip()}"


def rank_main(
    rank: int, dp_size: int, addresses: dict[str, dict[str, str]], cases: list[Any], rounds: int, port: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank + 1, world_size=dp_size + 1)
    with ExitStack() as stack:
        feeds = {
            (kind, way): stack.enter_context(sb.RankFeed(address, rank=rank, dp_size=dp_size))
            for kind, of_kind in addresses.items()
            for way, address in of_kind.items()
        }
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for case in [Case(*one) for one in cases]:
            for _ in range(rounds):
                buffer = torch.zeros(case.gloo_bytes, dtype=torch.uint8)
                dist.barrier()
                took = {"raw": take(partial(dist.recv, buffer, 0, tag=1), case)}
                dist.barrier()
                took["raw_sockets"] = take(partial(receive, connection, memoryview(cast("Any", buffer.numpy()))), case)
                for way in addresses[case.kind]:
                    dist.barrier()
                    took[way] = take(partial(take_one, feeds[case.kind, way]), case)
                dist.gather_object(took, None, 0)
        for way in addresses[TRACED.kind]:
            dist.barrier()
            feed = feeds[TRACED.kind, way]
            # one is enough: the others keep up with it
            found = take(partial(take_one, feed), TRACED) if rank else system_calls(feed)
            dist.gather_object(found, None, 0)
        for feed in feeds.values():
            # a rank that leaves before the end was lost
            for batch in feed:
                raise AssertionError(batch)
    dist.destroy_process_group()


# --- the controller --------------------------------------------------------------------------------------------------


def send_raw(case: Case, dp_size: int) -> None:
    buffer = torch.zeros(case.gloo_bytes, dtype=torch.uint8)
    for _ in range(case.repeats):
        works = [dist.isend(buffer, rank + 1, tag=1) for rank in range(dp_size)]
        for work in works:
            cast("Any", work).wait()


def send_by_sockets(case: Case, connections: list[socket.socket]) -> None:
    buffer = bytes(case.gloo_bytes)
    for _ in range(case.repeats):
        for connection in connections:
            connection.sendall(buffer)


async def in_thread(function: Any, *args: Any) -> Any:
    return await anyio.to_thread.run_sync(lambda: function(*args), abandon_on_cancel=True)


def put_all(balancer: sb.StreamBalancer, case: Case, name: str, dp_size: int) -> None:
    common = columns(case.tokens)
    for number in range(case.repeats * dp_size * ROLLOUTS[case.kind]):
        balancer.put_nowait(sb.Rollout(tokens=common, rollout_id=f"{name}.{number}"))


async def done(balancer: sb.StreamBalancer) -> None:
    while balancer.in_flight() or balancer.statistics().waiting:  # noqa: ASYNC110 - a benchmark's end of a round
        await anyio.sleep(0.002)


class Bench:
    """Walks the cases, as every rank does."""

    def __init__(
        self,
        rows: Rows,
        dp_size: int,
        balancers: dict[str, dict[str, sb.StreamBalancer]],
        connections: list[socket.socket],
    ) -> None:
        self._rows, self._dp_size, self._balancers, self._connections = rows, dp_size, balancers, connections

    async def case(self, case: Case, rounds: int) -> None:
        """Raw, and each way; as many rounds."""
        taken: dict[str, list[Taken]] = {}
        own: dict[str, list[Taken]] = {}
        for number in range(rounds):
            await in_thread(dist.barrier)
            began = used()
            await in_thread(send_raw, case, self._dp_size)
            own.setdefault("raw", []).append(since(began))
            await in_thread(dist.barrier)
            began = used()
            await in_thread(send_by_sockets, case, self._connections)
            own.setdefault("raw_sockets", []).append(since(began))
            for way in self._balancers[case.kind]:
                own.setdefault(way, []).append(await self._by(way, case, number))
            for way in (got := await self._gathered())[0]:
                slowest = max((one[way] for one in got), key=lambda one: one.seconds)
                taken.setdefault(way, []).append(slowest)
        self._report(case, taken, own)

    async def _by(self, way: str, case: Case, number: int) -> Taken:
        """What the controller used."""
        balancer = self._balancers[case.kind][way]
        await in_thread(dist.barrier)
        began = used()
        put_all(balancer, case, f"{case}.{way}.{number}", self._dp_size)
        await done(balancer)
        return since(began)

    async def _gathered(self) -> list[Any]:
        """Of all ranks."""
        got: list[Any] = [None] * (self._dp_size + 1)
        await in_thread(dist.gather_object, None, got, 0)
        return got[1:]

    async def system_calls(self) -> None:
        """Of a rank, by each way."""
        for way in self._balancers[TRACED.kind]:
            await self._by(way, TRACED, 0)
            found = (await self._gathered())[0]
            name = f"{way}_system_calls_rank"
            more: dict[str, Any] = {"megabytes": TRACED.megabytes, "ranks": self._dp_size}
            if isinstance(found, str):
                self._rows.add(name, math.nan, "calls", why=found, **more)
                continue
            futexes = found.pop("futex", 0.0)
            self._rows.add(name, futexes + sum(found.values()), "calls", 20, futexes=futexes, **more)

    def _report(self, case: Case, taken: dict[str, list[Taken]], own: dict[str, list[Taken]]) -> None:
        more: dict[str, Any] = {"megabytes": case.megabytes, "ranks": self._dp_size, "kind": case.kind}
        counted, raw = case.repeats - WARM, taken["raw"]
        rate = case.gloo_bytes * self._dp_size * counted / 1e9
        self._rows.add("raw", rate / statistics.median(one.seconds for one in raw), "GB/s", **more)
        raw_cpu = {way: max(statistics.median(one.cpu_s for one in taken[way]), 1e-9) for way in RAW}
        bars = BARS | (BARS_IN_ONE_PIECE if case.kind == "piece" else {})
        for way, rounds in taken.items():
            if way != "raw":
                ratio = statistics.median(r.seconds / o.seconds for r, o in zip(raw, rounds, strict=True))
                bar = bars.get((way, int(case.megabytes)))
                self._rows.add(f"{way}_over_raw", ratio, "ratio", bar, at_least=True, **more)
            rank_cpu = statistics.median(one.cpu_s for one in rounds)
            if way not in RAW:
                for other, its in raw_cpu.items():
                    bar = 1.5 if (other, case.megabytes) == ("raw_sockets", 10) else None
                    self._rows.add(f"{way}_cpu_rank_over_{other}", rank_cpu / its, "ratio", bar, **more)
            self._rows.add(f"{way}_cpu_rank", 1e3 * rank_cpu / counted, "ms", **more)
            its_cpu = statistics.median(one.cpu_s for one in own[way])
            self._rows.add(f"{way}_cpu_controller", 1e3 * its_cpu / case.repeats, "ms", **more)
            for side, count, those in (("rank", counted, rounds), ("controller", case.repeats, own[way])):
                switches = statistics.median(one.switches for one in those) / count
                self._rows.add(f"{way}_switches_{side}", switches, "switches", **more)


async def run(rows: Rows, dp_size: int, cases: list[Case], rounds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        balancers: dict[str, dict[str, sb.StreamBalancer]] = {}
        addresses: dict[str, dict[str, str]] = {}
        for kind in sorted({case.kind for case in (TRACED, *cases)}):
            size = dp_size * ROLLOUTS[kind]
            config = sb.BalancerConfig(dp_size=dp_size, batch_size=size, window=size, capacity=1000 * size)
            for way, options in ways().items():
                transport = await stack.enter_async_context(sb.TorchTransport.listen(dp_size=dp_size, **options))
                balancer = await stack.enter_async_context(sb.StreamBalancer(config))
                tasks.start_soon(sb.serve, balancer, transport)
                balancers.setdefault(kind, {})[way] = balancer
                addresses.setdefault(kind, {})[way] = transport.address
        with ExitStack() as peers:
            listener = peers.enter_context(socket.create_server(("127.0.0.1", 0)))
            more = (addresses, cases, rounds, listener.getsockname()[1])
            ranks = [peers.enter_context(peer(rank, dp_size, *more)) for rank in range(dp_size)]
            await in_thread(lambda: dist.init_process_group("gloo", rank=0, world_size=dp_size + 1))
            accepted = [(await in_thread(listener.accept))[0] for _ in ranks]
            connections = [peers.enter_context(closing(connection)) for connection in accepted]
            bench = Bench(rows, dp_size, balancers, connections)
            for case in cases:
                await bench.case(case, rounds)
            await bench.system_calls()
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
