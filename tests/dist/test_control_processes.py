"""Remote control over sockets: blocking methods, and workers, a rank and a controller that are killed."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from guard import GUARD_S
from processes import Child, served

import stream_balancer as sb
from stream_balancer.testing import make_rollout

logger = logging.getLogger("tests")

WORKERS, THREADS = 2, 8
BATCH_SIZE = 8


async def test_threads_reserve_wait_and_ask_with_blocking_methods() -> None:
    async with served(sb.serve) as (_, transport):

        def work(producer: sb.Producer, feed: sb.RankFeed) -> sb.Statistics:
            feed.set_version(2)
            blocking = producer.blocking
            assert blocking.version_after(None, timeout_s=GUARD_S) == blocking.version == 2
            says = r"version_after\(\) had no answer within 0.01 s: no version was set"
            with pytest.raises(TimeoutError, match=says):
                blocking.version_after(2, timeout_s=0.01)
            with blocking.reserve(2) as slot:
                slot.put(make_rollout(3, "a"))
                assert (slot.version, slot.left) == (2, 1)
                assert feed.statistics(timeout_s=GUARD_S).waiting == 1
            with blocking.reserve(8), pytest.raises(TimeoutError, match=r"reserve\(\) had no answer within 0.05 s"):
                blocking.reserve(8, timeout_s=0.05).__enter__()
            statistics = blocking.statistics()
            blocking.end()
            return statistics

        async with sb.connect(transport.address) as producer, sb.RankFeed(transport.address, rank=0, dp_size=1) as feed:
            statistics = await anyio.to_thread.run_sync(work, producer, feed)
            assert (statistics.accepted, statistics.reserved, statistics.version) == (1, 0, 2)
            assert [r.rollout_id async for batch in feed for r in batch.rollouts] == ["a"]


# -- workers, rank and controller in processes of their own ------------------------------------------------------------


def run_worker(address: str, number: int, delay_s: float, pipe: Any) -> None:
    """Generates until the balancer has ended, or it is killed."""

    def generate(producer: Any, thread: int) -> None:
        chance, turn = random.Random(f"{number}/{thread}"), 0
        with suppress(sb.errors.ClosedResourceError):
            while True:
                with producer.reserve() as slot:
                    time.sleep(min(delay_s * chance.paretovariate(1.2), 50 * delay_s))
                    slot.put(make_rollout(chance.randrange(1, 40), f"{number}.{thread}.{turn}"))
                turn += 1

    with sb.connect(address, connect_timeout_s=GUARD_S) as producer:
        pipe.send("connected")
        threads = [threading.Thread(target=generate, args=(producer, n), daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def run_rank(address: str, next_step: int, total: int, step_s: float, pipe: Any) -> None:
    """Trains until ``total`` rollouts were trained on; every step makes a version, which is saved before it is said."""
    chance, seen = random.Random(next_step), 0
    with sb.RankFeed(address, rank=0, dp_size=1, auto_ack=False, next_step=next_step) as feed:
        feed.set_version(next_step)
        for batch in feed:
            time.sleep(chance.uniform(0, 2 * step_s))
            rollouts = [r for r in batch.rollouts if not r.is_padding]
            ages = [batch.step - (r.min_version or 0) for r in rollouts]
            pipe.send((batch.step, ages, [r.rollout_id for r in rollouts]))
            seen = pipe.recv()  # what the test has counted over all incarnations; it may kill us now
            pipe.send("saved")
            feed.set_version(batch.step + 1)
            batch.ack()
            if seen >= total:
                feed.end()
    pipe.send("ended")


class Drill:
    """Counts what is trained on, and kills at random moments."""

    def __init__(self, address: str, *, total: int, kill_every: int, delay_s: float, seed: int) -> None:
        self.address, self.total, self.delay_s = address, total, delay_s
        self._chance, self._kill_every, self._next_kill = random.Random(seed), kill_every, kill_every
        self.ages: Counter[int] = Counter()
        self.ids: list[str] = []
        self.killed: Counter[str] = Counter()
        self._num_workers = 0
        self.workers = [self._worker() for _ in range(WORKERS)]

    def _worker(self) -> Child:
        self._num_workers += 1
        worker = Child(run_worker, self.address, self._num_workers, self.delay_s)
        # connected, and not left waiting for a controller that has ended
        worker.hear()
        return worker

    def _rank(self, next_step: int) -> Child:
        return Child(run_rank, self.address, next_step, self.total, self.delay_s)

    def run(self) -> None:
        """Until the rank has trained on everything."""
        rank, saved = self._rank(0), 0
        told: dict[int, Any] = {}
        while (news := rank.hear()) != "ended":
            if news == "saved":
                saved += 1
            else:
                step, ages, ids = news
                assert step == saved
                if step not in told:
                    self.ids += ids
                    self._kill_a_worker()
                assert told.setdefault(step, (ages, ids)) == (ages, ids)
                self.ages.update(ages)
            if self._chance.random() < 0.1 * BATCH_SIZE / self._kill_every:
                self.killed["rank"] += 1
                rank.kill()
                rank.process.join()
                rank = self._rank(saved)
            elif news != "saved":
                rank.pipe.send(len(self.ids))
        for worker in self.workers:
            worker.process.join(GUARD_S)
            assert worker.process.exitcode == 0

    def _kill_a_worker(self) -> None:
        if self._next_kill <= len(self.ids) < self.total - self._kill_every:
            self._next_kill += self._kill_every
            self.killed["worker"] += 1
            self.workers.pop(self._chance.randrange(WORKERS)).kill()
            self.workers.append(self._worker())


async def _drill(guard_s: float = GUARD_S, **options: Any) -> Drill:
    serve = partial(sb.serve, rejoin_timeout_s=GUARD_S)
    knobs = {"batch_size": BATCH_SIZE, "window": 2 * BATCH_SIZE, "staleness": sb.Staleness(max_versions=1)}
    async with served(serve, guard_s=guard_s, **knobs) as (balancer, transport):
        balancer.set_version(0)
        drill = await anyio.to_thread.run_sync(partial(Drill, transport.address or "", **options))
        await anyio.to_thread.run_sync(drill.run)
    statistics = balancer.statistics()
    assert sum(statistics.evicted.values()) == 0
    assert (statistics.reserved, statistics.waiting, statistics.in_flight) == (0, 0, 0)
    assert statistics.training_age is not None
    assert statistics.training_age.max <= 1
    assert max(drill.ages) <= 1
    assert len(set(drill.ids)) == len(drill.ids) == statistics.accepted >= options["total"]
    return drill


@pytest.mark.processes
async def test_nothing_older_than_max_staleness_is_trained_on_though_workers_and_the_rank_are_killed() -> None:
    drill = await _drill(total=240, kill_every=60, delay_s=0.002, seed=1)
    assert drill.killed["worker"] >= 2


@pytest.mark.soak
@pytest.mark.timeout(3000)
async def test_nothing_of_ten_thousand_rollouts_is_older_than_max_staleness() -> None:
    drill = await _drill(2900, total=10_000, kill_every=200, delay_s=0.003, seed=2)
    logger.info("ages at training: %s; killed: %s", sorted(drill.ages.items()), dict(drill.killed))
    assert drill.killed["worker"] >= 48
    assert drill.killed["rank"] >= 1
