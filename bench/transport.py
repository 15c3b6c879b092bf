"""The feed against raw gloo and against what others do, in one run on one machine.

``python bench/transport.py [--json] [--sizes 1,10,40] [--ranks 1,2] [--full]``: megabytes per rank; ``--full`` is 1 to
256 MB and 1 to 4 ranks. Read the ratios, not the rates: raw
and ours run in the same processes, one after the other, alternating. One payload per rank: 64 rollouts, 21 bytes a
token.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import anyio
import msgspec
import torch
import torch.distributed as dist
from _common import BYTES_PER_TOKEN, Rows, arguments, peer, rollout

from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing.scripted import rank_batch
from stream_balancer.transport.channel import Outgoing, Source
from stream_balancer.transport.gloo.torch_dist import TorchTransport
from stream_balancer.types import RankBatch
from stream_balancer.wire import rank_batch as wire

ROLLOUTS = 64
LATENCY_MEGABYTES = (0.02, 1.0, 10.0)
BARS = {  # from the issue: (name, megabytes) -> at least (or at most, for latencies)
    ("prepacked_over_raw", 10): 0.75,
    ("prepacked_over_raw", 40): 0.9,
    ("full_over_raw", 10): 0.55,
    ("full_over_raw", 40): 0.7,
    ("shared_over_raw", 64): 2.0,
    ("shared_over_raw", 128): 2.0,
    ("shared_over_raw", 256): 2.0,
}


def share(rank: int, dp_size: int, megabytes: float) -> RankBatch:
    tokens = max(int(megabytes * 1e6 / BYTES_PER_TOKEN / ROLLOUTS), 1)
    rollouts = [rollout(tokens, f"{rank}.{i}") for i in range(ROLLOUTS)]
    return rank_batch(*(rollouts[i : i + 16] for i in range(0, ROLLOUTS, 16)), rank=rank, dp_size=dp_size)


def at_step(batch: RankBatch, step: int) -> RankBatch:
    return replace(batch, step=step)


class Plan:
    """What controller and ranks do, in the same order: both walk it."""

    def __init__(self, sizes: list[float], rounds: int, latency_rounds: int) -> None:
        self.sizes, self.rounds, self.latency_rounds = sizes, rounds, latency_rounds

    def repeats(self, megabytes: float) -> int:
        return max(2, min(24, int(160 / megabytes)))


# --- raw gloo, and what others do ------------------------------------------------------------------------------------


def raw_send(buffers: list[torch.Tensor], repeats: int) -> None:
    for _ in range(repeats):
        works = [dist.isend(buffer, rank + 1, tag=1) for rank, buffer in enumerate(buffers)]
        for work in works:
            cast("Any", work).wait()


def raw_receive(buffer: torch.Tensor, repeats: int) -> None:
    for _ in range(repeats):
        dist.recv(buffer, 0, tag=1)


def plain(batch: RankBatch) -> list[dict[str, torch.Tensor]]:
    return [dict(r.tokens) for r in batch.rollouts]


def list_of_dicts(rows: list[dict[str, torch.Tensor]] | None) -> None:
    """AReaL's shape: every rank receives everything, tensor by tensor, each after its description."""
    count = [0 if rows is None else len(rows)]
    dist.broadcast_object_list(count, 0)
    for index in range(count[0]):
        described = [None if rows is None else {k: (v.shape, v.dtype) for k, v in rows[index].items()}]
        dist.broadcast_object_list(described, 0)
        for name, (shape, dtype) in (described[0] or {}).items():
            tensor = torch.empty(shape, dtype=dtype) if rows is None else rows[index][name]
            dist.broadcast(tensor.view(torch.uint8), 0)


# --- the rank --------------------------------------------------------------------------------------------------------


def take(feed: RankFeed, count: int) -> None:
    for _ in range(count):
        batch = next(feed)
        for mb in batch.micro_batches:
            mb.packed()
        batch.ack()


def rank_main(rank: int, dp_size: int, addresses: list[str], plan: Plan) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank + 1, world_size=dp_size + 1)
    with (
        RankFeed(addresses[0], rank=rank, dp_size=dp_size) as feed,
        RankFeed(addresses[1], rank=rank, dp_size=dp_size) as shared_feed,
    ):
        for megabytes in plan.sizes:
            repeats = plan.repeats(megabytes)
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, 0)
            buffer = torch.zeros(int(size), dtype=torch.uint8)
            for _ in range(plan.rounds):
                dist.barrier()
                raw_receive(buffer, repeats)
                for source in (feed, feed, shared_feed):  # pre-packed; with packing and unpacking; shared memory
                    dist.barrier()
                    take(source, repeats)
            others: list[Callable[[], object]] = [
                lambda: dist.broadcast_object_list([None], 0),
                lambda: cast("Any", dist).scatter_object_list([None], None, 0),
                lambda: list_of_dicts(None),
            ]
            for job in others[: 3 if megabytes <= 10 else 2]:
                dist.barrier()
                job()
                dist.barrier()
        latencies(feed, shared_feed, plan.latency_rounds)
        memory(feed)
        memory(shared_feed)
    dist.destroy_process_group()


def latencies(feed: RankFeed, shared_feed: RankFeed, rounds: int) -> None:
    for _ in LATENCY_MEGABYTES:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0)
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        arrivals: dict[str, list[float]] = {"raw": [], "feed": [], "shared": []}
        dist.barrier()
        for _ in range(rounds):
            dist.recv(buffer, 0, tag=1)
            arrivals["raw"].append(time.monotonic())
            dist.send(size, 0)
        for name, source in (("feed", feed), ("shared", shared_feed)):
            dist.barrier()
            for _ in range(rounds):
                batch = next(source)
                arrivals[name].append(time.monotonic())
                batch.ack()
        dist.gather_object(arrivals, None, 0)


def memory(feed: RankFeed) -> None:
    """A thousand batches: how much does the process grow after the first hundred?"""
    dist.barrier()
    before = 0
    for number in range(1000):
        next(feed).ack()
        if number == 99:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pool = getattr(feed._port, "_pool", None)
    dist.gather_object((grown * 1024, getattr(pool, "allocated_bytes", 0)), None, 0)


# --- the controller --------------------------------------------------------------------------------------------------


def send_packed(link: Any, packed: Any, buffer: torch.Tensor, step: int) -> None:
    """As ``link.send()``, but packed before: sent from where it lies, or copied into shared memory."""

    def fill(target: torch.Tensor) -> Iterator[int]:
        target.copy_(buffer)
        yield buffer.numel()

    message = msgspec.structs.replace(packed, step=step)
    link._use_credit(step)
    link.channel.send(Outgoing(message, [Source(packed.wire_bytes, fill, lambda: [buffer])]))


class Bench:
    """Walks the plan on the controller's side; torch.distributed calls of the bench itself run in a thread."""

    def __init__(self, rows: Rows, links: list[Any], plan: Plan, shared_links: list[Any] | None = None) -> None:
        self.rows, self.links, self.plan, self.steps = rows, links, plan, {False: 0, True: 0}
        self.shared_links = shared_links or []

    def row(self, name: str, value: float, unit: str, bar: float | None = None, *, at_least: bool = False) -> None:
        self.rows.add(name, value, unit, bar, at_least=at_least, ranks=len(self.links))

    async def drive(self, repeats: int, send: Callable[[Any, int], None], *, shared: bool = False) -> float:
        """Send ``repeats`` steps against credits, wait for every acknowledgement; seconds."""
        changed = anyio.Event()
        links = self.shared_links if shared else self.links

        def wake() -> None:
            changed.set()

        for link in links:
            link._callbacks[:] = [wake]
        left = [repeats] * len(links)
        sent = [0] * len(links)
        began = time.perf_counter()
        while any(left):
            changed = anyio.Event()
            for index, link in enumerate(links):
                while link.report() is not None:
                    left[index] -= 1
                while sent[index] < repeats and link.credits:
                    send(link, self.steps[shared] + sent[index])
                    sent[index] += 1
            if any(left):
                await changed.wait()
        self.steps[shared] += repeats
        return time.perf_counter() - began

    async def size(self, megabytes: float) -> None:
        dp_size = len(self.links)
        shares = [share(rank, dp_size, megabytes) for rank in range(dp_size)]
        buffers, frames = [], []
        for one in shares:
            encoded = wire.encode(one, narrow=False)
            buffer = torch.zeros(encoded.message.wire_bytes, dtype=torch.uint8)
            list(encoded.fill(buffer))
            buffers.append(buffer)
            frames.append(encoded.message)
        for rank, buffer in enumerate(buffers):
            await in_thread(dist.send, torch.tensor([buffer.numel()]), rank + 1)
        repeats = self.plan.repeats(megabytes)
        times: dict[str, list[float]] = {"raw": [], "prepacked": [], "full": [], "shared": []}

        def send(link: Any, step: int) -> None:
            link.send(at_step(shares[link.rank], step))

        def prepacked(link: Any, step: int) -> None:
            send_packed(link, frames[link.rank], buffers[link.rank], step)

        for _ in range(self.plan.rounds):
            await in_thread(dist.barrier)
            began = time.perf_counter()
            await in_thread(raw_send, buffers, repeats)
            times["raw"].append(time.perf_counter() - began)
            await in_thread(dist.barrier)
            times["prepacked"].append(await self.drive(repeats, prepacked))
            await in_thread(dist.barrier)
            times["full"].append(await self.drive(repeats, send))
            await in_thread(dist.barrier)
            times["shared"].append(await self.drive(repeats, send, shared=True))
        self.report(megabytes, times, repeats)
        await self.others(megabytes, shares, statistics.median(times["shared"]) / repeats)

    def report(self, megabytes: float, times: dict[str, list[float]], repeats: int) -> None:
        where = f"{megabytes:g}MB_x{len(self.links)}"
        total = megabytes * len(self.links) * repeats
        self.row(f"raw_{where}", total / 1e3 / statistics.median(times["raw"]), "GB/s")
        for kind in ("prepacked", "full", "shared"):
            ratio = statistics.median(r / o for r, o in zip(times["raw"], times[kind], strict=True))
            name = f"{kind}_over_raw"
            self.row(f"{name}_{where}", ratio, "ratio", BARS.get((name, int(megabytes))), at_least=True)

    async def others(self, megabytes: float, shares: list[RankBatch], ours: float) -> None:
        where = f"{megabytes:g}MB_x{len(self.links)}"
        everything = [plain(one) for one in shares]
        rows = [row for rank in everything for row in rank]
        jobs: dict[str, tuple[Callable[[], object], float]] = {
            "broadcast_object_list": (lambda: dist.broadcast_object_list([everything], 0), 5),
            "scatter_object_list": (lambda: cast("Any", dist).scatter_object_list([None], [None, *everything], 0), 5),
        }
        if megabytes <= 10:
            jobs["list_of_dicts"] = (partial(list_of_dicts, rows), 50)
        for name, (job, bar) in jobs.items():
            await in_thread(dist.barrier)
            began = time.perf_counter()
            await in_thread(job)
            await in_thread(dist.barrier)
            self.row(f"{name}_over_feed_{where}", (time.perf_counter() - began) / ours, "ratio", bar, at_least=True)

    async def latency(self, megabytes: float) -> None:
        """From the moment a packed batch is handed to the wire until the trainer has it, over a blocking recv of as
        many bytes."""
        rounds = self.plan.latency_rounds
        sent: dict[str, list[float]] = {"raw": [], "feed": [], "shared": []}
        shares = [share(rank, len(self.links), megabytes) for rank in range(len(self.links))]
        encoded = [wire.encode(one, narrow=False) for one in shares]
        buffers = [torch.zeros(one.message.wire_bytes, dtype=torch.uint8) for one in encoded]
        for one, buffer in zip(encoded, buffers, strict=True):
            list(one.fill(buffer))
        for rank, buffer in enumerate(buffers):
            await in_thread(dist.send, torch.tensor([buffer.numel()]), rank + 1)

        def raw() -> None:
            answer = torch.zeros(1, dtype=torch.int64)
            for _ in range(rounds):
                time.sleep(0.002)
                sent["raw"].append(time.monotonic())
                raw_send(buffers, 1)
                for rank in range(len(self.links)):
                    dist.recv(answer, rank + 1)

        def prepacked(link: Any, step: int) -> None:
            send_packed(link, encoded[link.rank].message, buffers[link.rank], step)

        await in_thread(dist.barrier)
        await in_thread(raw)
        for kind, send in (("feed", prepacked), ("shared", prepacked)):
            await in_thread(dist.barrier)
            for _ in range(rounds):
                await anyio.sleep(0.002)
                sent[kind].append(time.monotonic())
                await self.drive(1, send, shared=kind == "shared")
        got: list[Any] = [None] * (len(self.links) + 1)
        await in_thread(dist.gather_object, None, got, 0)
        median = {
            kind: statistics.median(a - s for one in got[1:] for a, s in zip(one[kind], sent[kind], strict=True))
            for kind in sent
        }
        where = f"{megabytes:g}MB"
        self.row(f"arrival_raw_{where}", 1e3 * median["raw"], "ms")
        for kind in ("feed", "shared"):
            self.row(f"arrival_{kind}_over_raw_{where}", median[kind] / median["raw"], "ratio", 2.0)

    async def memory(self, *, shared: bool) -> None:
        await in_thread(dist.barrier)
        shares = [share(rank, len(self.links), 4) for rank in range(len(self.links))]
        buffer = wire.encode(shares[0]).message.total_bytes
        await self.drive(1000, lambda link, n: link.send(at_step(shares[link.rank], n)), shared=shared)
        got: list[Any] = [None] * (len(self.links) + 1)
        await in_thread(dist.gather_object, None, got, 0)
        kind = "shared" if shared else "feed"
        self.row(f"receiver_growth_{kind}", max(g for g, _ in got[1:]) / buffer, "buffers", 1.0)


async def in_thread(function: Callable[..., object], *args: object) -> None:
    await anyio.to_thread.run_sync(lambda: function(*args))


async def stall(links: list[Any], bench: Bench) -> None:
    """The longest the event loop was late while 256 MB left, over the same without."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await anyio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    big = share(0, 1, 256)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await anyio.sleep(1.0)
        quiet = max(gaps)
        gaps.clear()
        await bench.drive(2, lambda link, n: link.send(at_step(big, n)))
        bench.row("loop_stall_quiet", 1e3 * quiet, "ms")
        how = "_shared" if links[0].channel.shares_memory else ""
        bench.row(f"loop_stall_256MB{how}", 1e3 * max(gaps), "ms", 20.0)
        tasks.cancel_scope.cancel()


def stall_rank(address: str) -> None:
    for _ in RankFeed(address, rank=0, dp_size=1):
        pass


async def run(rows: Rows, dp_size: int, plan: Plan) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    async with (
        TorchTransport.listen(dp_size=dp_size, narrow=False, shared_memory=False) as transport,
        TorchTransport.listen(dp_size=dp_size) as shared,
    ):
        addresses = [transport.address, shared.address]
        with ExitStack() as stack:
            ranks = [stack.enter_context(peer(rank, dp_size, addresses, vars(plan))) for rank in range(dp_size)]
            await anyio.to_thread.run_sync(
                lambda: dist.init_process_group("gloo", rank=0, world_size=dp_size + 1), abandon_on_cancel=True
            )
            links = sorted([await transport.accept() for _ in ranks], key=lambda link: link.rank)
            shared_links = sorted([await shared.accept() for _ in ranks], key=lambda link: link.rank)
            bench = Bench(rows, links, plan, shared_links)
            for megabytes in plan.sizes:
                await bench.size(megabytes)
            for megabytes in LATENCY_MEGABYTES:
                await bench.latency(megabytes)
            await bench.memory(shared=False)
            await bench.memory(shared=True)
            for process in ranks:
                await anyio.to_thread.run_sync(process.wait)
            dist.destroy_process_group()


async def run_stall(rows: Rows, shared: bool) -> None:
    async with TorchTransport.listen(dp_size=1, shared_memory=shared) as transport:
        with peer("stall", transport.address) as process:
            link = await transport.accept()
            await stall([link], Bench(rows, [link], Plan([], 0, 0)))
            link.end()
            await anyio.to_thread.run_sync(process.wait)


def main() -> None:
    options = arguments(__doc__, sizes="1,10,40", ranks="1,2", rounds=5, full=False)
    if options.as_peer:
        what, *rest = options.as_peer
        if what == "stall":
            stall_rank(*rest)
        else:
            rank_main(what, rest[0], rest[1], Plan(**rest[2]))
        return
    sizes = "1,10,40,64,128,256" if options.full else options.sizes
    worlds = "1,2,4" if options.full else options.ranks
    plan = Plan([float(size) for size in sizes.split(",")], options.rounds, 200)
    torch.set_num_threads(1)
    rows = Rows(options.json)
    for shared_memory in (False, True):
        anyio.run(run_stall, rows, shared_memory)
    for dp_size in worlds.split(","):
        anyio.run(run, rows, int(dp_size), plan)


if __name__ == "__main__":
    main()
