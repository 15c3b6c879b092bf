"""A small Ray cluster for tests, and actors that tests put into it. Sent to the workers by value."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import anyio
import ray
import torch.distributed as dist
from guard import GUARD_S
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed.device_mesh import init_device_mesh

from stream_balancer.client.object_store import Keeper
from stream_balancer.config import BalancerConfig
from stream_balancer.ray import RayBalancer, _BalancerActor
from stream_balancer.testing import make_rollout

STORE_BYTES = 100 * 2**20
KEEPER = "keeper of the tests"
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
        keeper.cache_clear()
        ray.shutdown()
        started.shutdown()


def kill(actor: Any) -> None:
    """Its process, at once; without a word to Ray."""
    while True:
        with suppress(ray.exceptions.ActorUnavailableError):  # Ray is starting it again
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=GUARD_S), signal.SIGKILL)
            return
        time.sleep(0.05)


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
        left = iter(names)

        async def put() -> None:
            for name in left:
                await self._balancer.put(make_rollout(length, name))
                accepted.append(name)

        anyio.run(_at_once, at_once, put)
        return accepted

    def transports(self) -> list[str]:
        """What carries each object of this worker's that the tests' keeper holds; by itself that is the store."""
        kept = self._balancer.producer._kept
        owner = kept.owner.address.rpartition("/")[2]
        boxes = ray.get(ray.get_actor(KEEPER).give.remote(owner, list({key >> 24 for key in kept._kept})))
        return [box[0].tensor_transport() for box in boxes]

    def released(self) -> int:
        """Waits until nothing is needed here any more, and returns how many tensors Ray holds here for others."""
        anyio.run(self._balancer.producer.released)
        deadline = time.monotonic() + GUARD_S
        store = ray._private.worker.global_worker.rdt_manager.rdt_store
        while store.get_num_objects() and time.monotonic() < deadline:
            time.sleep(0.05)
        return store.get_num_objects()


async def _at_once(number: int, job: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(number):
            tasks.start_soon(job)


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
        return SimpleNamespace(remote=functools.partial(self._actor.call.remote, self._number, method))


class Hosts:
    """Balancers in one actor."""

    def __init__(self) -> None:
        self._hosts: list[_BalancerActor | None] = []

    async def start(self, *options: Any) -> int:
        """Its number."""
        self._hosts.append(_BalancerActor(*options))
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


def actor(kind: type, name: str | None = None) -> Any:
    """One of this kind, on the node that no test kills, for any number of calls at a time."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here, name=name).remote()


@functools.cache
def keeper() -> Any:
    """The actor that keeps references for all balancers of :func:`hosts`."""
    return actor(Keeper, KEEPER)


def host_among_others(config: BalancerConfig, **given: Any) -> tuple[RayBalancer, Callable[[], None]]:
    """As :func:`host`, in the shared actor; and what stops it."""
    folder = given.get("journal")
    transport = given.get("tensor_transport")
    kept = None if folder is not None else (keeper(), f"{ray.get_runtime_context().namespace}/{KEEPER}", transport)
    options = (
        config,
        kept,
        {"journal": folder and os.fspath(folder)},
        {"rejoin_timeout_s": given.get("rejoin_timeout_s", math.inf)},
        {name: given[name] for name in ("staged_bytes",) if name in given},
    )
    number = ray.get(hosts().start.remote(*options), timeout=GUARD_S)
    balancer = RayBalancer(OneOf(hosts(), number), config.dp_size, config.loss_mask_column, kept)
    return balancer, lambda: ray.get(hosts().stop.remote(number), timeout=GUARD_S)
