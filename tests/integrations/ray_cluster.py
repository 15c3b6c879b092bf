"""A small Ray cluster for tests, and actors that tests put into it. Sent to the workers by value."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import fields
from typing import Any

import anyio
import ray
import torch.distributed as dist
from guard import GUARD_S
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed.device_mesh import init_device_mesh

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ClosedResourceError
from stream_balancer.ray import RayBalancer, host
from stream_balancer.ray.actor import Host, Options
from stream_balancer.rank.feed import RankFeed
from stream_balancer.testing import make_rollout
from stream_balancer.testing.channels import CLAUSES as CHANNEL_CLAUSES
from stream_balancer.testing.transports import CLAUSES
from stream_balancer.transport.channel import Channel
from stream_balancer.transport.ray.actor import ActorChannel, ActorChannels
from stream_balancer.transport.ray.caller import CallingChannel
from stream_balancer.transport.ray.rank import open_port
from stream_balancer.transport.ray.transport import RayTransport
from stream_balancer.wire.messages import JoinPeer, JoinRank, WelcomePeer

STORE_BYTES = 100 * 2**20
HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A head node; dead nodes are noticed in 2 s instead of 15."""
    started = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            # by itself Ray lets its workers wait behind whatever else the machine does
            "_system_config": {**HEALTH, "worker_niceness": 0},
        },
    )
    ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield started
    finally:
        hosts.cache_clear()
        ray.shutdown()
        started.shutdown()


def kill(actor: Any) -> None:
    """Its process, at once; without a word to Ray."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=GUARD_S), signal.SIGKILL)


class Worker:
    """A rollout worker, to be killed."""

    def __init__(self, balancer: RayBalancer) -> None:
        self._balancer = balancer

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def label(self) -> str:
        """What lost rollouts are named with."""
        return self._balancer.label

    def put(self, names: list[str], length: int, at_once: int = 16) -> list[str]:
        """The names that were accepted."""
        accepted: list[str] = []

        async def put(name: str) -> None:
            await self._balancer.put(make_rollout(length, name))
            accepted.append(name)

        async def main() -> None:
            limiter = anyio.CapacityLimiter(at_once)

            async def limited(name: str) -> None:
                async with limiter:
                    await put(name)

            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(limited, name)

        anyio.run(main)
        return accepted


class MeshRank:
    """One process of a mesh of 2 x 2: two DP ranks of two model-parallel peers."""

    def __init__(self, port: int, world_rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world_rank, world_size=4)
        self._mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def train(self, balancer: RayBalancer) -> list[list[tuple[str, int]]]:
        """For each step, the rollouts and the sums of their tokens."""
        return [
            [(one.rollout_id, int(one.tokens["input_ids"].sum())) for one in batch.rollouts if not one.is_padding]
            for batch in balancer.feed(mesh=self._mesh)
        ]


class OneOf:
    """One of those that live in an actor (``call(number, method, *arguments)``), as if it were an actor of its own.
    Every actor is a process that imports torch, so tests that kill none share one."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor, self._number = actor, number

    def __reduce__(self) -> tuple[Any, ...]:
        return OneOf, (self._actor, self._number)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return _Method(self._actor, self._number, method)


class _Method:
    def __init__(self, actor: Any, number: int, name: str) -> None:
        self._called = actor, number, name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor, number, name = self._called
        return actor.call.remote(number, name, *args, **kwargs)


class Hosts:
    """Balancers in one actor."""

    def __init__(self) -> None:
        self._hosts: list[Host | None] = []

    async def start(self, options: Options) -> int:
        """Its number."""
        self._hosts.append(Host(options))
        return len(self._hosts) - 1

    async def call(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._hosts[number], method)(*args, **kwargs)

    async def stop(self, number: int) -> None:
        """What it had in memory is gone."""
        host, self._hosts[number] = self._hosts[number], None
        if host is not None and host._serving is not None:
            host._serving.cancel()
            await asyncio.wait([host._serving])


@functools.cache
def hosts() -> Any:
    """The actor that tests share."""
    return actor(Hosts)


def actor(kind: type) -> Any:
    """One of this kind, on the node that no test kills, for any number of calls at a time."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote()


def host_among_others(config: BalancerConfig, **given: Any) -> tuple[RayBalancer, Callable[[], None]]:
    """As :func:`host`, in the shared actor; and what stops it."""
    knobs = {field.name for field in fields(Options)}
    defaults = {name: one.default for name, one in inspect.signature(host).parameters.items() if name in knobs}
    if given.get("journal") is not None:
        given["journal"] = os.fspath(given["journal"])
    number = ray.get(hosts().start.remote(Options(**defaults | {"config": config} | given)), timeout=GUARD_S)
    balancer = RayBalancer(
        OneOf(hosts(), number), config.dp_size, config.loss_mask_column, restarts=given.get("journal") is not None
    )
    return balancer, lambda: ray.get(hosts().stop.remote(number), timeout=GUARD_S)


class _Harness:
    def __init__(self, transport: RayTransport, actor: OneOf) -> None:
        self.transport, self._actor = transport, actor
        self.feeds: list[RankFeed] = []

    def connect(self, rank: int, *, dp_size: int | None = None, auto_ack: bool = True, **options: Any) -> RankFeed:
        wanted: dict[str, Any] = {"incarnation": 0, "depth": 2, "max_batch_bytes": 2**32, "role": ""}
        wanted |= {name: options.pop(name) for name in wanted.keys() & options.keys()}
        port = open_port(
            self._actor,
            JoinRank(rank, dp_size or self.transport.dp_size, **wanted),
            linger_s=GUARD_S + 5,  # a good-bye that is not answered shows as a hang
            **options,
        )
        self.feeds.append(RankFeed(port, auto_ack=auto_ack))
        return self.feeds[-1]

    def kill(self, feed: RankFeed) -> None:
        feed._port.abort()  # type: ignore[attr-defined]


class ContractHost:
    """Both ends of a transport in one actor: what passes between them are the actor's calls to itself."""

    def __init__(self) -> None:
        self._transports: list[RayTransport] = []

    async def call(self, number: int, method: str, *args: Any) -> Any:
        return await getattr(self._transports[number].channels, method.removeprefix("_"))(*args)

    @asynccontextmanager
    async def _open(self, dp_size: int) -> AsyncIterator[_Harness]:
        transport = RayTransport(dp_size=dp_size)
        self._transports.append(transport)
        actor = OneOf(ray.get_runtime_context().current_actor, len(self._transports) - 1)
        harness = _Harness(transport, actor)
        async with transport:
            try:
                yield harness
            finally:
                with anyio.CancelScope(shield=True):
                    for feed in harness.feeds:
                        await feed.aclose()
        with anyio.fail_after(GUARD_S):
            while transport.channels.open:  # noqa: ASYNC110 - nothing of anybody may be left
                await anyio.sleep(0.01)

    async def clause(self, name: str) -> None:
        """One clause of the contract."""
        [clause] = [one for one in CLAUSES if one.__name__ == name]
        with anyio.fail_after(GUARD_S):
            await clause(self._open)


class ChannelHost:
    """Both ends of a channel in one actor, as in :class:`ContractHost`."""

    def __init__(self) -> None:
        self._arrived: list[ActorChannel] = []
        self._channels = ActorChannels(self._judge)

    def _judge(self, channel: ActorChannel, request: object) -> WelcomePeer:
        self._arrived.append(channel)
        return WelcomePeer()

    async def _join(self, *call: Any) -> Any:
        return await self._channels.join(*call)

    async def _exchange(self, *call: Any) -> Any:
        return await self._channels.exchange(*call)

    async def _poll(self, *call: Any) -> Any:
        return await self._channels.poll(*call)

    async def _hold(self, *call: Any) -> None:
        await self._channels.hold(*call)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[Channel, Channel]]:
        calling = CallingChannel(ray.get_runtime_context().current_actor, JoinPeer("a pair", 0))
        with anyio.CancelScope(shield=True):
            while not self._arrived:  # noqa: ASYNC110 - it comes by a call of this actor
                await anyio.sleep(0.001)
        called = self._arrived.pop()
        try:
            yield called, calling
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(calling.abort)
                called.abort()
        assert not self._channels.open

    async def clause(self, name: str) -> None:
        """One clause of the contract of channels."""
        [clause] = [one for one in CHANNEL_CLAUSES if one.__name__ == name]
        for turned in (False, True):

            @asynccontextmanager
            async def open_pair(turned: bool = turned) -> AsyncIterator[tuple[Channel, Channel]]:
                async with self._open() as (one, other):
                    yield (other, one) if turned else (one, other)

            with anyio.fail_after(GUARD_S):
                await clause(open_pair)


class ReservingWorker:
    """Reserves, generates and puts until the balancer has ended, or it is killed."""

    def __init__(self, balancer: RayBalancer, number: int, delay_s: float) -> None:
        self._balancer, self._number, self._delay_s = balancer, number, delay_s

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def work(self, workers: int) -> int:
        """So many at the same time. -> rollouts put."""
        chance, num_put = random.Random(self._number), 0

        async def generate(worker: int) -> None:
            nonlocal num_put
            with suppress(ClosedResourceError):
                while True:
                    async with self._balancer.reserve() as slot:
                        await anyio.sleep(min(self._delay_s * chance.paretovariate(1.2), 50 * self._delay_s))
                        await slot.put(make_rollout(chance.randrange(1, 40), f"{self._number}.{worker}.{num_put}"))
                        num_put += 1

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                for worker in range(workers):
                    tasks.start_soon(generate, worker)

        anyio.run(main)
        return num_put
