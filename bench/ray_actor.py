"""The balancer in a Ray actor beside TransferQueue and plain actor calls; start-up; and a node killed in mid-run.

``python bench/ray_actor.py [--json] [--part compare|kill]``, in the environment of bench/peers.txt. A rollout is 20 kB:
2,500 token ids; "unequal": lengths of that mean with a tail, and log-probabilities. Both sides do the same: one rollout
per call, one call after the other or 64 at a time; 64 and 256 rollouts per call; and from a worker's process to a
rank's.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from _common import Rows, arguments
from ray.cluster_utils import Cluster

import stream_balancer as sb
from stream_balancer.ray import LostRollout, RayBalancer, host

TOKENS = 2_500
STORE_BYTES = 600 * 2**20
ROUNDS = 3
SINGLES, CONCURRENT = 300, 3_000
GROUPS = {64: 48, 256: 20}  # rollouts per call -> calls
THROUGH, KILLED = 3_200, 10_000
IDS = torch.arange(TOKENS)

_names = (f"b{n}" for n in itertools.count())


def rollouts(count: int, group: str | None = None, *, ragged: bool = False) -> list[sb.Rollout]:
    # tensors of their own: pickle writes one that it has seen as a reference, and no two real rollouts are one
    columns = ragged_columns(count) if ragged else [{"input_ids": IDS.clone()} for _ in range(count)]
    return [sb.Rollout(tokens=tokens, rollout_id=next(_names), group_id=group) for tokens in columns]


def ragged_columns(count: int) -> list[dict[str, torch.Tensor]]:
    """As rollouts are: of unequal lengths, with log-probabilities. 2,500 tokens in the mean."""
    choose = random.Random(count)
    lengths = [min(max(int(choose.lognormvariate(7.5, 0.8)), 16), 16_000) for _ in range(count)]
    return [{"input_ids": torch.arange(length), "logprobs": torch.rand(length)} for length in lengths]


@contextmanager
def balancer() -> Iterator[RayBalancer]:
    """One that takes everything and dispatches nothing, as TransferQueue's storage does while nobody fetches."""
    held = host(sb.BalancerConfig(dp_size=1, batch_size=20_000, window=20_000, capacity=20_000))
    try:
        yield held
    finally:
        ray.kill(held.actor)


def rate(count: int, job: Callable[[], object]) -> float:
    """Per second. What was prepared does not count as garbage to be looked through, on either side."""
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    job()
    return count / (time.perf_counter() - began)


def batched() -> Iterator[tuple[int, int, int]]:
    """(rollouts per call, calls, calls at a time)."""
    for size, calls in GROUPS.items():
        for width in (1, 2):
            yield size, calls, width


def named(size: int, width: int, ragged: bool) -> str:
    return f"{size} per call" + (", two calls at a time" if width == 2 else "") + (", unequal" if ragged else "")


# --- ours ------------------------------------------------------------------------------------------------------------


async def at_a_time(width: int, jobs: Sequence[Callable[[], Awaitable[object]]]) -> None:
    todo = iter(jobs)

    async def worker() -> None:
        for job in todo:
            await job()

    await asyncio.gather(*[worker() for _ in range(width)])


def ours() -> dict[str, float]:
    with balancer() as target:
        asyncio.run(target.put(rollouts(1)[0]))
        found = {}
        latencies: list[float] = []

        async def singles() -> None:
            for rollout in made:
                began = time.perf_counter()
                await target.put(rollout)
                latencies.append(time.perf_counter() - began)

        made = rollouts(SINGLES)
        found["one after the other"] = rate(SINGLES, lambda: asyncio.run(singles()))
        latencies.sort()
        found["latency p50, ms"] = 1e3 * latencies[SINGLES // 2]
        found["latency p99, ms"] = 1e3 * latencies[SINGLES * 99 // 100]
        many = rollouts(CONCURRENT)
        jobs = [lambda rollout=rollout: target.put(rollout) for rollout in many]
        found["64 at a time"] = rate(CONCURRENT, lambda: asyncio.run(at_a_time(64, jobs)))
    for ragged in (False, True):
        with balancer() as target:
            asyncio.run(target.put(rollouts(1, ragged=ragged)[0]))
            for size, calls, width in batched():
                groups = [rollouts(size, f"g{size}.{width}.{n}", ragged=ragged) for n in range(calls)]
                puts = [partial(target.put_group, group) for group in groups]
                found[named(size, width, ragged)] = rate(size * calls, partial(asyncio.run, at_a_time(width, puts)))
    return found


# --- TransferQueue ---------------------------------------------------------------------------------------------------


def theirs(tq: Any) -> dict[str, float]:
    from tensordict import TensorDict

    client = tq.get_client()
    partition = (f"p{n}" for n in itertools.count())

    def batch(size: int) -> Any:
        return TensorDict({"input_ids": IDS.repeat(size, 1)}, batch_size=size)

    def ragged_batch(size: int) -> Any:
        rows = ragged_columns(size)
        columns = {
            name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]
        }
        return TensorDict(columns, batch_size=size)

    found = {}
    where = next(partition)
    client.put(batch(1), partition_id=where)

    def singles() -> None:
        for _ in range(SINGLES):
            client.put(batch(1), partition_id=where)

    found["one after the other"] = rate(SINGLES, singles)

    async def concurrent() -> None:
        jobs = [lambda: client.async_put(batch(1), partition_id=where) for _ in range(SINGLES)]
        await at_a_time(64, jobs)

    found["64 at a time"] = rate(SINGLES, lambda: client._run_coroutine(concurrent()))
    for ragged, (size, calls, width) in itertools.product((False, True), batched()):
        where = next(partition)
        batches = [ragged_batch(size) if ragged else batch(size) for _ in range(calls)]

        async def put(width: int, batches: list[Any], where: str) -> None:
            jobs = [partial(client.async_put, one, partition_id=where) for one in batches]
            await at_a_time(width, jobs)

        name = named(size, width, ragged)
        found[name] = rate(size * calls, partial(client._run_coroutine, put(width, batches, where)))
        client.clear_partition(where)
    return found


# --- an actor that only keeps what it is given -----------------------------------------------------------------------


class Shelf:
    """Of the same columns under the same names, and nothing else: what Ray alone costs."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    async def put(self, rollouts: list[tuple[str, dict[str, torch.Tensor]]]) -> None:
        self._kept.append(rollouts)


@contextmanager
def shelf() -> Iterator[Any]:
    held = ray.remote(num_cpus=0)(Shelf).remote()
    ray.get(held.put.remote([]))
    try:
        yield held
    finally:
        ray.kill(held)


def plain_calls() -> dict[str, float]:
    def put(target: Any, those: list[sb.Rollout]) -> Any:
        return target.put.remote([(one.rollout_id, one.tokens) for one in those])

    async def call(target: Any, those: list[sb.Rollout]) -> None:
        await put(target, those)

    found = {}
    with shelf() as target:
        made = rollouts(SINGLES)
        found["one after the other"] = rate(SINGLES, lambda: [ray.get(put(target, [one])) for one in made])
        jobs = [partial(call, target, [one]) for one in rollouts(CONCURRENT)]
        found["64 at a time"] = rate(CONCURRENT, lambda: asyncio.run(at_a_time(64, jobs)))
    for ragged in (False, True):
        with shelf() as target:
            for size, calls, width in batched():
                jobs = [partial(call, target, rollouts(size, ragged=ragged)) for _ in range(calls)]
                found[named(size, width, ragged)] = rate(size * calls, partial(asyncio.run, at_a_time(width, jobs)))
    return found


# --- from worker to rank ---------------------------------------------------------------------------------------------


class Worker:
    """Puts 64 at a time."""

    def __init__(self, target: RayBalancer) -> None:
        self._target = target

    def label(self) -> str:
        return self._target.label

    def put(self, name: str, count: int) -> list[str]:
        accepted: list[str] = []

        async def one(rollout_id: str) -> None:
            await self._target.put(sb.Rollout(tokens={"input_ids": IDS}, rollout_id=rollout_id))
            accepted.append(rollout_id)

        asyncio.run(at_a_time(64, [partial(one, f"{name}.{n}") for n in range(count)]))
        return accepted


class Rank:
    """Touches every token."""

    def ready(self) -> None:
        """Its process has imported what it needs, as TransferQueue's has in its warm-up."""
        import stream_balancer.client.feed  # noqa: F401

    def train(self, target: RayBalancer, rank: int) -> list[tuple[str, bool]]:
        seen: list[tuple[str, bool]] = []
        for batch in target.feed(rank=rank):
            for micro_batch in batch.micro_batches:
                micro_batch.packed()["input_ids"].sum()
                seen += [(rollout.rollout_id, rollout.is_padding) for rollout in micro_batch.rollouts]
        return seen


class TheirWorker:
    """Puts 64 per call, its better way."""

    def put(self, count: int) -> None:
        import transfer_queue as tq
        from tensordict import TensorDict

        tq.init()
        for _ in range(count // 64):
            batch = TensorDict({"input_ids": IDS.repeat(64, 1)}, batch_size=64)
            tq.get_client().put(batch, partition_id="through")


class TheirRank:
    """Fetches 64 per call, and touches every token."""

    def train(self, count: int) -> int:
        import transfer_queue as tq

        tq.init()
        client, seen = tq.get_client(), 0
        while seen < count:
            meta = client.get_meta(
                data_fields=["input_ids"], batch_size=64, partition_id="through", mode="fetch", task_name="train"
            )
            if meta.size:
                client.get_data(meta)["input_ids"].sum()
                seen += meta.size
            else:
                time.sleep(0.001)
        return seen


def through_ours() -> float:
    target = host(sb.BalancerConfig(dp_size=1, batch_size=64))
    start = ray.remote(num_cpus=0)
    worker, rank = start(Worker).remote(target), start(Rank).remote()
    ray.get([worker.put.remote("warm", 64), rank.ready.remote()])
    trained = rank.train.remote(target, 0)
    began = time.perf_counter()
    ray.get(worker.put.remote("w", THROUGH))
    ray.get(target.actor._call.remote("end"))
    assert len(ray.get(trained)) == THROUGH + 64
    took = time.perf_counter() - began
    for actor in (worker, rank, target.actor):
        ray.kill(actor)
    return THROUGH / took


def through_theirs() -> float:
    start = ray.remote(num_cpus=0)
    worker, rank = start(TheirWorker).remote(), start(TheirRank).remote()
    ray.get(worker.put.remote(64))
    ray.get(rank.train.remote(64))
    began = time.perf_counter()
    trained = rank.train.remote(THROUGH)
    ray.get([worker.put.remote(THROUGH), trained])
    took = time.perf_counter() - began
    for actor in (worker, rank):
        ray.kill(actor)
    return THROUGH / took


# --- a killed node ---------------------------------------------------------------------------------------------------


def killed_node(rows: Rows) -> None:
    """10,000 rollouts from three workers; the node of one of them is killed in mid-run."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "resources": {"head": 100},
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
        },
    )
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    node = cluster.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=STORE_BYTES)
    target = host(sb.BalancerConfig(dp_size=2, batch_size=64, capacity=512))
    here = {"num_cpus": 0, "resources": {"head": 1}}
    worker, rank = ray.remote(**here)(Worker), ray.remote(**here)(Rank)
    ranks = [rank.remote().train.remote(target, number) for number in range(2)]
    doomed = worker.options(resources={"doomed": 1}).remote(target)
    label = ray.get(doomed.label.remote())
    theirs = doomed.put.remote("doomed", KILLED // 2)
    healthy = [worker.remote(target).put.remote(f"w{n}", KILLED // 4) for n in range(2)]

    async def watch() -> tuple[float, Any, list[LostRollout]]:
        while (await target.statistics()).accepted < KILLED // 4:  # noqa: ASYNC110 - an actor has no event for us
            await asyncio.sleep(0.01)
        cluster.remove_node(node, allow_graceful=False)
        killed = time.perf_counter()
        while label in await target._call("producers"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        noticed = time.perf_counter() - killed
        await asyncio.to_thread(ray.get, healthy)
        await target.end()
        await asyncio.to_thread(ray.get, ranks)
        return noticed, await target.statistics(), await target.lost_rollouts()

    noticed, stats, lost = asyncio.run(watch())
    try:
        ray.get(theirs)
    except ray.exceptions.RayError:
        rows.text("the doomed worker died in its put, as it should")
    trained = [name for one in ray.get(ranks) for name, is_padding in one if not is_padding]
    named = {one.rollout_id for one in lost}
    put_by_others = {name for names in ray.get(healthy) for name in names}
    rows.add("killed node: rollouts accepted", stats.accepted, "")
    rows.add("killed node: trained", len(trained), "")
    rows.add("killed node: lost, and named", len(named), "")
    rows.add("killed node: lost in a step that ranks were at", sum(one.step is not None for one in lost), "")
    rows.add("killed node: trained twice", len(trained) - len(set(trained)), "", 0)
    rows.add("killed node: neither trained nor named", stats.accepted - len({*trained, *named}), "", 0)
    rows.add("killed node: both", len(named.intersection(trained)), "", 0)
    rows.add("killed node: of other nodes and not trained", len(put_by_others.difference(trained)), "", 0)
    rows.add("killed node: named with another node", sum(one.holder != label for one in lost), "", 0)
    rows.add("killed node: noticed, with Ray's own health check", noticed, "s")
    ray.shutdown()
    cluster.shutdown()


# --- start-up --------------------------------------------------------------------------------------------------------


def start_up() -> float:
    began = time.perf_counter()
    held = host(sb.BalancerConfig(dp_size=1, batch_size=8))
    took = time.perf_counter() - began
    ray.kill(held.actor)
    return took


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def compare(rows: Rows) -> None:
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    rows.add("start-up after ray.init", statistics.median(start_up() for _ in range(ROUNDS)), "s", 2.0)
    import transfer_queue as tq
    from omegaconf import OmegaConf

    began = time.perf_counter()
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))  # so that who fetches too early may ask again
    rows.add("start-up after ray.init, TransferQueue", time.perf_counter() - began, "s")
    rounds = [(ours(), theirs(tq), plain_calls()) for _ in range(ROUNDS)]
    mine, other, plain = (medians(side) for side in zip(*rounds, strict=True))
    through = [(through_ours(), through_theirs()) for _ in range(ROUNDS)]
    tq.close()
    for name, value in mine.items():
        rows.add(name, value, "ms" if "latency" in name else "put/s")
    for who, its in (("TransferQueue", other), ("plain actor calls", plain)):
        for name, value in its.items():
            rows.add(f"{name}, {who}", value, "put/s")
        for name, value in its.items():
            rows.add(f"{name}, times {who}", mine[name] / value, "x")
    for number, who in enumerate(("", ", TransferQueue")):
        rows.add(f"from a worker to a rank{who}", statistics.median(pair[number] for pair in through), "/s")
    single, at_once = "one after the other", "64 at a time"
    rows.add("64 at a time over its one after the other", mine[at_once] / other[single], "x", 10.0, at_least=True)
    for kind, bar in (("", None), (", unequal", 2.0)):
        best = [
            max(v for n, v in each.items() if "per call" in n and ("unequal" in n) == bool(kind))
            for each in (mine, other)
        ]
        rows.add(f"best batched rate over its best{kind}", best[0] / best[1], "x", bar, at_least=True)
    ray.shutdown()


def main() -> None:
    options = arguments(__doc__, part="all")
    rows = Rows(options.json, options.results)
    if options.part != "kill":
        compare(rows)
    if options.part != "compare":
        killed_node(rows)


if __name__ == "__main__":
    main()
