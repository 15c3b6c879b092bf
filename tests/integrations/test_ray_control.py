"""Remote control over Ray, and workers that are killed while they hold slots."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
from guard import GUARD_S

ray = pytest.importorskip("ray")

from ray_cluster import ReservingWorker  # noqa: E402

import stream_balancer as sb  # noqa: E402
from stream_balancer.ray import host  # noqa: E402
from stream_balancer.testing import make_rollout  # noqa: E402

logger = logging.getLogger("tests")
BATCH_SIZE = 8
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


def _drill(total: int, kill_every: int, delay_s: float) -> tuple[Counter[int], int]:
    """Trains here, and kills workers, each in a process of its own. -> ages at training, and how many were killed."""
    balancer = host(
        sb.BalancerConfig(
            dp_size=1, batch_size=BATCH_SIZE, window=2 * BATCH_SIZE, staleness=sb.Staleness(max_versions=1)
        )
    )
    chance, ages, ids, numbers = random.Random(3), Counter[int](), [], iter(range(10_000))

    def started() -> tuple[int, Any]:
        worker = ray.remote(ReservingWorker).options(num_cpus=0).remote(balancer, next(numbers), delay_s)
        return ray.get(worker.pid.remote(), timeout=GUARD_S), (worker, worker.work.remote(BATCH_SIZE))

    workers, num_killed = [started() for _ in range(2)], 0
    with balancer.feed(rank=0) as feed:
        feed.set_version(0)
        for batch in feed:
            ages.update((feed.version or 0) - (r.min_version or 0) for r in batch.rollouts if not r.is_padding)
            ids += [r.rollout_id for r in batch.rollouts if not r.is_padding]
            if len(ids) // kill_every > num_killed and len(ids) < total:
                num_killed += 1
                os.kill(workers.pop(chance.randrange(2))[0], signal.SIGKILL)
                workers.append(started())
            feed.set_version((feed.version or 0) + 1)
            if len(ids) >= total:
                feed.end()
    for _, (_, work) in workers:
        assert ray.get(work, timeout=GUARD_S) >= 0
    assert len(set(ids)) == len(ids) >= total
    ray.kill(balancer.actor)
    return ages, num_killed


def test_nothing_older_than_max_staleness_is_trained_on_though_workers_are_killed() -> None:
    ages, num_killed = _drill(total=240, kill_every=100, delay_s=0.002)
    assert max(ages) <= 1
    assert num_killed == 2


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_nothing_of_ten_thousand_rollouts_is_older_than_max_staleness() -> None:
    ages, num_killed = _drill(total=10_000, kill_every=500, delay_s=0.003)
    logger.info("ages at training: %s; workers killed: %d", sorted(ages.items()), num_killed)
    assert max(ages) <= 1
