"""``serve``: late binding, credits, acknowledgements, ranks that go and come, what it learns of them, and silence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import helpers
import pytest
from helpers import fill, settle
from scripted import Filled
from served import drain, feeds_of, serving

import stream_balancer as sb
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.rollouts import Batch
from stream_balancer.testing import MemoryNetwork, make_rollout

config = partial(helpers.config, batch_size=2, window=2, capacity=64)


@pytest.mark.parametrize("lost", ["before it is known", "after the end", "with a report"])
async def test_a_connection_that_breaks_is_joined_again(lost: str) -> None:
    """Before the controller knows of it, the rank is not busy; after the end, ``serve`` waits for what it has done."""
    got: list[int] = []
    async with Filled(3, 1) as filled, MemoryNetwork(dp_size=1) as transport:
        network = transport.connect(0, rejoin=True)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sb.serve, rejoin_timeout_s=1.0), filled.balancer, transport)
                async with sb.RankFeed(network) as feed:
                    async for share in feed:
                        got.append(share.step)
                        await settle()
                        if lost == "with a report" and share.step == 2:
                            network.hold()
                            share.ack()
                        if (lost == "before it is known") == (share.step < 2):
                            network.cut("the network broke", seen_by=[1])
                            await anyio.sleep(0.1)
    assert got == filled.acknowledged_steps == [0, 1, 2]
    assert network.joined == (3 if lost == "before it is known" else 2)


async def test_a_batch_is_taken_only_when_every_rank_has_room() -> None:
    transport = MemoryNetwork(dp_size=2)
    async with Filled(10, 2, capacity=80) as filled, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, filled.balancer, transport)
        await settle()
        assert len(filled.plans) == 0, "no rank is there yet"
        first = sb.RankFeed(transport.connect(0, depth=2))
        await settle()
        assert len(filled.plans) == 0, "only one of two ranks is there"
        second = sb.RankFeed(transport.connect(1, depth=5))
        await settle()
        assert len(filled.plans) == 3, "rank 0 has room for two, and for one in use"
        for _ in range(2):
            await anext(second)
        await settle()
        assert len(filled.plans) == 3, "rank 0 still has no room"
        await anext(first)
        await settle()
        assert len(filled.plans) == 3
        assert filled.acknowledged_steps == []
        await anext(first)
        await settle()
        assert filled.acknowledged_steps == [0], "both ranks are past step 0"
        tasks.cancel_scope.cancel()


async def test_rollouts_of_the_present_are_prefetched_as_far_as_they_may() -> None:
    """``max_versions`` bounds the age at training, and no more."""
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=2, capacity=40, staleness=sb.Staleness(max_versions=2))
    transport = MemoryNetwork(dp_size=1)
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(5)
        for n in range(20):
            await balancer.put(make_rollout(3, f"r{n}", version=5))
        tasks.start_soon(sb.serve, balancer, transport)
        feed = sb.RankFeed(transport.connect(0, depth=9))
        await anyio.sleep(1.0)
        assert len(balancer.in_flight()) == 3  # trained at versions 5, 6 and 7
        for step in range(3):
            await anext(feed)
            await anyio.sleep(1.0)  # it trains; that it is through with the one before has been told by now
            balancer.set_version(6 + step)
            await anyio.sleep(1.0)
            assert len(balancer.in_flight()) == (3 if step == 0 else 2 if step == 1 else 1)
        stats = balancer.statistics()
        assert (stats.evicted["stale"], stats.waiting) == (14, 0)
        assert stats.training_age is not None
        assert stats.training_age.max == 2
        await feed.aclose()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"rejoin_timeout_s": value}, "rejoin_timeout_s must be >= 0") for value in (-1.0, math.nan)),
        ({"on_rank_loss": "wait"}, "must be 'raise' or 'replan'"),
    ],
    ids=str,
)
async def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        await sb.serve(sb.StreamBalancer(config()), MemoryNetwork(dp_size=2), **options)


async def test_nothing_wakes_up_while_idle() -> None:
    transport = MemoryNetwork(dp_size=2)
    async with Filled(1, 2, hold=True) as filled, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, filled.balancer, transport)
        for feed in feeds_of(transport):
            tasks.start_soon(drain, feed)
        before = anyio.current_time()
        await anyio.sleep(10_000_000)  # noqa: ASYNC116 - with a periodic wake-up of any kind this would take for ever
        assert anyio.current_time() - before >= 10_000_000
        tasks.cancel_scope.cancel()


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stream_balancer.dispatch"]


async def test_a_stall_is_explained_and_again_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(sb.StreamBalancer(config(batch_size=4, window=8))) as (balancer, transport, tasks):
        first = sb.RankFeed(transport.connect(0, depth=1))
        await fill(balancer, [3] * 3)
        await anyio.sleep(61)
        why = "3 rollouts wait (window 8), the oldest for 60 s; no deadline_s is set"
        assert reports(caplog) == [f"no batch for 60 s: rank 1 has not connected in 60 s; {why}"]
        second = sb.RankFeed(transport.connect(1, depth=1))
        await anyio.sleep(178)
        why = why.replace("60 s", "120 s")
        assert reports(caplog)[1:] == [f"no batch for 120 s: {why}"]
        await anyio.sleep(2)
        assert len(reports(caplog)) == 3, "after 60, 120 and 240 s"
        await fill(balancer, [3] * 9, prefix="more")
        await anyio.sleep(600)
        held = "has given no credit for 480 s; the oldest step it has not acknowledged is 0"
        assert reports(caplog)[-1].startswith(f"no batch for 480 s: rank 0 {held}; rank 1 {held}; 4 rollouts wait")
        assert len(reports(caplog)) == 7, "and after 60, 120, 240 and 480 s of the second stall"
        assert first.waiting_s == 0.0
        balancer.end()
        for feed in (first, second):
            tasks.start_soon(drain, feed)


def test_a_trainer_cannot_have_computed_for_less_than_nothing() -> None:
    (feed,) = feeds_of(MemoryNetwork(dp_size=1))
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="add_compute_s"):
            feed.add_compute_s(seconds)
    feed.add_compute_s(1.0)  # with no batch in hand it says nothing


# -- what the user does with steps that ranks have, or that serve() finds ----------------------------------------------


async def all_steps(feeds: list[sb.RankFeed]) -> list[list[int]]:
    """What each feed still gives, side by side."""
    got: list[list[Any]] = [[] for _ in feeds]
    with anyio.fail_after(1000):
        async with anyio.create_task_group() as tasks:
            for feed, into in zip(feeds, got, strict=True):
                tasks.start_soon(drain, feed, into)
    return [[step.step for step in into] for into in got]


@pytest.mark.parametrize("how", ["acknowledge", "nack"])
async def test_a_step_that_was_given_up_leaves_a_gap_and_one_that_is_given_back_comes_in_its_place(how: str) -> None:
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(config()) as balancer:
        await fill(balancer, [4] * 8)
        taken = balancer.batches(auto_ack=False)
        for _ in range(3):
            await anext(taken)
        getattr(balancer, how)(1)
        balancer.end()
        steps = [0, 2, 3] if how == "acknowledge" else [0, 1, 2, 3]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            assert await all_steps(feeds_of(transport)) == [steps, steps]
        assert balancer.statistics().acknowledged == 8


@pytest.mark.parametrize("how", ["acknowledge", "acknowledge_through", "nack"])
async def test_the_user_and_the_ranks_may_both_acknowledge_and_a_step_they_have_is_not_given_back(how: str) -> None:
    async with serving(sb.StreamBalancer(config())) as (balancer, transport, _):
        await fill(balancer, [4] * 6)
        balancer.end()
        feeds = feeds_of(transport)
        for feed in feeds:
            assert (await anext(feed)).step == 0
        await settle()
        if how == "nack":
            with pytest.raises(ValueError, match="next incarnation"):
                balancer.nack(0)
        else:
            getattr(balancer, how)(0)  # a checkpoint holds it; the ranks say so a moment later
        assert await all_steps(feeds) == [[1, 2], [1, 2]]
    assert balancer.statistics().acknowledged == 6


# -- what it learns of its ranks ---------------------------------------------------------------------------------------


class Timings(sb.Observer):
    """What ranks have reported."""

    def __init__(self) -> None:
        self.all: list[StepTiming] = []

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        """An event of the balancer."""
        self.all += timings


async def test_serve_hands_on_how_long_each_rank_had_been_ready() -> None:
    async with serving(sb.StreamBalancer(config())) as (balancer, transport, tasks):
        balancer.observers.append(told := Timings())
        await anyio.sleep(0.001)
        early = sb.RankFeed(transport.connect(0, depth=1))
        await anyio.sleep(7.0)
        late = sb.RankFeed(transport.connect(1, depth=1))
        await fill(balancer, [3, 4])
        balancer.end()
        for feed in (early, late):
            tasks.start_soon(drain, feed)
    assert [one.ready_s for one in told.all] == pytest.approx([7.0, 0.0], abs=0.01)


async def test_serve_names_a_slow_rank_once(caplog: pytest.LogCaptureFixture) -> None:
    async def train(feed: sb.RankFeed) -> None:
        async for batch in feed:
            feed.add_compute_s(batch.num_tokens * (1.5 if feed.rank == 1 else 1.0))

    async with serving(sb.StreamBalancer(config(dp_size=3, batch_size=3, window=3))) as (balancer, transport, tasks):
        for feed in feeds_of(transport, depth=1):
            tasks.start_soon(train, feed)
        for number in range(10 * 3):
            await balancer.put(make_rollout(8, f"r{number}"))
        balancer.end()
    (said,) = reports(caplog)
    assert said.startswith("rank 1 takes 1.50 times as long as the median rank for the same work, since step 0")
