"""Ray's own ways: remote control, meshes of model-parallel ranks, and
Ray Direct Transport, where tokens stay in the workers' memory and NIXL reads them into the ranks', past the stores."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from forked import free_port
from guard import GUARD_S
from scripted import same_rollout

ray = pytest.importorskip("ray")

from ray_cluster import MeshRank, Worker, host_among_others, kill  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.client.object_store import INLINE_BYTES as STORED  # noqa: E402
from stream_balancer.ray import find, host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_accept_runs_in_the_actor_and_the_last_of_so_many_producers_ends_it() -> None:
    def is_rewarded(rollouts: Sequence[sb.Rollout]) -> bool:
        return rollouts[0].scalars["reward"] > 0

    balancer = host(sb.BalancerConfig(dp_size=1, batch_size=2, window=2), accept=is_rewarded, num_producers=1)
    with anyio.fail_after(GUARD_S):
        for reward in (0.0, 1.0, 2.0):
            await balancer.put(replace(make_rollout(3, f"r{reward}"), scalars={"reward": reward}))
        assert (await balancer.statistics()).evicted["filtered"] == 1
        await balancer.producer.end()
        trained = [r.rollout_id async for batch in balancer.feed(rank=0) for r in batch.rollouts]
        await balancer.producer.aclose()
        late = pickle.loads(pickle.dumps(balancer))  # noqa: S301 - as Ray does with a handle that is an argument
        with pytest.raises(sb.errors.ClosedResourceError):
            await late.put(make_rollout(3, "late"))
    assert sorted(trained) == ["r1.0", "r2.0"]
    ray.kill(balancer.actor)


# --- model-parallel ranks ---------------------------------------------------------------------------------------------

LENGTHS = [1 + 37 * n for n in range(14)] + [STORED, STORED + 7]  # two go to the object store


@pytest.fixture(scope="module")
def ranks(nodes: Any) -> list[Any]:
    port = free_port()
    return [ray.remote(MeshRank).options(num_cpus=0).remote(port, number) for number in range(4)]


def _expected(told: list[Any]) -> None:
    """Peers got what their leader got, and all of it was put."""
    assert told[0] == told[1]
    assert told[2] == told[3]
    trained = sorted(one for rank in (told[0], told[2]) for step in rank for one in step)
    made = [make_rollout(length, f"m{n}") for n, length in enumerate(LENGTHS)]
    assert trained == sorted((one.rollout_id, int(one.tokens["input_ids"].sum())) for one in made)


@pytest.mark.parametrize("journal", [False, True], ids=["store", "journal"])
def test_peers_get_what_their_leader_gets(journal: bool, ranks: list[Any], tmp_path: Path) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=8)
    balancer = host(config, name="of the mesh", journal=tmp_path / "journal" if journal else None)
    training = [rank.train.remote(find("of the mesh")) for rank in ranks]
    for n, length in enumerate(LENGTHS):
        balancer.blocking.put(make_rollout(length, f"m{n}"))
        if journal and n == len(LENGTHS) // 2:  # the leaders wait for it, and their peers notice nothing
            kill(balancer.actor)
    ray.get(balancer.actor._call.remote("end"), timeout=GUARD_S)
    _expected(ray.get(training, timeout=GUARD_S))
    balancer.blocking.close()
    ray.kill(balancer.actor)


# --- Ray Direct Transport ---------------------------------------------------------------------------------------------

CONFIG = sb.BalancerConfig(dp_size=1, batch_size=4, window=4)


@pytest.fixture
def balancer() -> Any:
    pytest.importorskip("nixl")
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
    pytest.importorskip("nixl")
    with pytest.raises(ValueError, match="two-sided RDT transport 'GLOO'"):
        host(CONFIG, tensor_transport="gloo")
    with pytest.raises(ValueError, match="Invalid tensor transport"):
        host(CONFIG, tensor_transport="pigeons")
    with pytest.raises(sb.errors.ConfigError, match="tensor_transport='nixl' with a journal"):
        host(CONFIG, tensor_transport="nixl", journal="/nowhere")
