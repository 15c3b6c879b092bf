"""Ray Direct Transport: tokens stay in the workers' memory, and NIXL reads them into the ranks', past the stores."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import anyio.to_thread
import pytest
from guard import GUARD_S
from scripted import same_rollout

ray = pytest.importorskip("ray")
pytest.importorskip("nixl")

from ray_cluster import Worker, host_among_others  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.client.object_store import INLINE_BYTES  # noqa: E402
from stream_balancer.ray import host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402

STORED = INLINE_BYTES  # tokens that make a rollout stay with its worker
CONFIG = sb.BalancerConfig(dp_size=1, batch_size=4, window=4)
pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def balancer() -> Any:
    balancer, stop = host_among_others(CONFIG, tensor_transport="nixl")
    yield balancer
    stop()


@pytest.fixture
def worker(balancer: Any) -> Any:
    worker = ray.remote(num_cpus=0, enable_tensor_transport=True)(Worker).remote(balancer)
    yield worker
    ray.kill(worker)


async def asked(ref: Any) -> Any:
    return await anyio.to_thread.run_sync(lambda: ray.get(ref, timeout=GUARD_S))


async def test_ranks_read_the_worker_s_memory_and_it_is_freed(balancer: Any, worker: Any) -> None:
    with anyio.fail_after(GUARD_S):
        names = await asked(worker.put.remote([f"d{n}" for n in range(7)], STORED))
        names += await asked(worker.put.remote(["small"], 5))
        assert await asked(worker.transports.remote()) == ["NIXL"] * 7
        await balancer.end()
        trained = [rollout async for batch in balancer.feed(rank=0) for rollout in batch.rollouts]
        assert await asked(worker.released.remote()) == 0
    assert sorted(rollout.rollout_id for rollout in trained) == sorted(names)
    for rollout in trained:
        assert same_rollout(rollout, make_rollout(rollout.num_tokens, rollout.rollout_id))


async def test_what_a_dead_worker_had_is_lost_by_name(balancer: Any, worker: Any) -> None:
    with anyio.fail_after(GUARD_S):
        names = await asked(worker.put.remote([f"k{n}" for n in range(3)], STORED))
        os.kill(await asked(worker.pid.remote()), signal.SIGKILL)
        while len(await balancer.lost_rollouts()) < 3:  # noqa: ASYNC110 - an actor has no event for a test
            await anyio.sleep(0.05)
        assert sorted(one.rollout_id for one in await balancer.lost_rollouts()) == sorted(names)


def test_transports_that_cannot_be_put_into_are_refused() -> None:
    with pytest.raises(ValueError, match="two-sided RDT transport 'GLOO'"):
        host(CONFIG, tensor_transport="gloo")
    with pytest.raises(ValueError, match="Invalid tensor transport"):
        host(CONFIG, tensor_transport="pigeons")
    with pytest.raises(sb.errors.ConfigError, match="tensor_transport='nixl' with a journal"):
        host(CONFIG, tensor_transport="nixl", journal="/nowhere")
