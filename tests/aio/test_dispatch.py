"""``serve``: late binding, credits, acknowledgements, ranks that go and come, and what cancellation leaves behind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import anyio
import pytest
from helpers import kill, settle
from scripted import Filled

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout


def feeds_of(transport: MemoryNetwork, *, depth: int = 2) -> list[sb.RankFeed]:
    return [sb.RankFeed(transport.connect(rank, depth=depth)) for rank in range(transport.dp_size)]


async def test_a_rank_that_joins_again_before_its_loss_is_known_is_not_busy() -> None:
    got: list[str] = []
    config = sb.BalancerConfig(dp_size=1, batch_size=2, window=4)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=1) as transport:
        network = transport.connect(0, rejoin=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, rejoin_timeout_s=1.0), balancer, transport)
            for n in range(12):
                tasks.start_soon(balancer.put, make_rollout(3, str(n)))
            async for share in sb.RankFeed(network):
                got += [r.rollout_id for r in share.rollouts if not r.is_padding]
                if share.step < 3:
                    network.cut("the network broke", seen_by=[1])
                    await anyio.sleep(0.1)
                elif share.step == 3:
                    balancer.end()
    assert sorted(got, key=int) == [str(n) for n in range(12)]
    assert network.joined == 4
    assert balancer.statistics().acknowledged == 12


@pytest.mark.parametrize("report_is_lost", [False, True])
async def test_a_connection_that_breaks_after_the_end_is_joined_again(report_is_lost: bool) -> None:
    """Else ``serve`` would wait for ever for what the rank has done."""
    got: list[int] = []
    async with Filled(3, 1) as filled, MemoryNetwork(dp_size=1) as transport:
        network = transport.connect(0, rejoin=True)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), filled.balancer, transport)
                async with sb.RankFeed(network) as feed:
                    async for share in feed:
                        got.append(share.step)
                        await settle()
                        if share.step == 2:
                            if report_is_lost:
                                network.hold()
                                share.ack()
                            network.cut("the network broke", seen_by=[1])
    assert got == [0, 1, 2]
    assert filled.acknowledged_steps == [0, 1, 2]
    assert network.joined == 2


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
        assert len(filled.plans) == 2, "rank 0 has room for two"
        for _ in range(2):
            await anext(second)
        await settle()
        assert len(filled.plans) == 2, "rank 0 still has no room"
        await anext(first)
        await settle()
        assert len(filled.plans) == 3
        assert filled.acknowledged_steps == []
        await anext(first)
        await settle()
        assert filled.acknowledged_steps == [0], "both ranks are past step 0"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"rejoin_timeout_s": value}, "rejoin_timeout_s must be >= 0") for value in (-1.0, math.nan)),
        *(({"report_after_s": value}, "report_after_s must be > 0") for value in (0.0, -1.0, math.nan)),
        ({"on_rank_loss": "wait"}, "must be 'raise' or 'replan'"),
    ],
    ids=str,
)
async def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        await sb.serve(sb.StreamBalancer(a_config()), MemoryNetwork(dp_size=2), **options)


async def test_nothing_wakes_up_while_idle() -> None:
    transport = MemoryNetwork(dp_size=2)
    async with Filled(1, 2, hold=True) as filled, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, filled.balancer, transport)
        feeds = feeds_of(transport)
        for feed in feeds:
            await anext(feed)
        before = anyio.current_time()
        await anyio.sleep(10_000_000)  # noqa: ASYNC116 - with a periodic wake-up of any kind this would take for ever
        assert anyio.current_time() - before >= 10_000_000
        tasks.cancel_scope.cancel()


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stream_balancer.dispatch"]


async def test_a_stall_is_explained_and_again_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=8)
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(config) as balancer, transport, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, transport)
        first = sb.RankFeed(transport.connect(0, depth=1))
        for number in range(3):
            balancer.put_nowait(make_rollout(3, f"r{number}"))
        await anyio.sleep(61)
        why = "3 rollouts wait (window 8), the oldest for 60 s; no deadline_s is set"
        assert reports(caplog) == [f"no batch for 60 s: rank 1 has not connected in 60 s; {why}"]
        second = sb.RankFeed(transport.connect(1, depth=1))
        await anyio.sleep(178)
        why = why.replace("60 s", "120 s")
        assert reports(caplog)[1:] == [f"no batch for 120 s: {why}"]
        await anyio.sleep(2)
        assert len(reports(caplog)) == 3, "after 60, 120 and 240 s"
        for number in range(3, 12):
            balancer.put_nowait(make_rollout(3, f"r{number}"))
        await anyio.sleep(600)
        held = "has given no credit for 480 s; the oldest step it has not acknowledged is 0"
        assert reports(caplog)[-1].startswith(f"no batch for 480 s: rank 0 {held}; rank 1 {held}; 8 rollouts wait")
        assert len(reports(caplog)) == 7, "and after 60, 120, 240 and 480 s of the second stall"
        assert first.waiting_s == 0.0
        balancer.end()
        for feed in (first, second):
            tasks.start_soon(drain, feed)


async def drain(feed: sb.RankFeed) -> None:
    async for _ in feed:
        pass


async def test_ranks_that_do_not_finish_are_named(caplog: pytest.LogCaptureFixture) -> None:
    transport = MemoryNetwork(dp_size=2)

    async def slow() -> None:
        async for _ in sb.RankFeed(transport.connect(1)):
            await anyio.sleep(100)

    async with Filled(1, 2) as filled, anyio.create_task_group() as tasks:
        tasks.start_soon(slow)
        tasks.start_soon(drain, sb.RankFeed(transport.connect(0)))
        await sb.serve(filled.balancer, transport, report_after_s=30)
    assert reports(caplog) == [
        f"all batches were sent {seconds} s ago; not yet done with them: rank 1" for seconds in (30, 60)
    ]


def test_a_trainer_cannot_have_computed_for_less_than_nothing() -> None:
    (feed,) = feeds_of(MemoryNetwork(dp_size=1))
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="add_compute_s"):
            feed.add_compute_s(seconds)
    feed.add_compute_s(1.0)  # with no batch in hand it says nothing


# -- what the user does with steps that ranks have, or that serve() finds ----------------------------------------------


def a_config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(dp_size=2, batch_size=2, window=2, **knobs)


async def filled(balancer: sb.StreamBalancer, steps: int) -> None:
    for number in range(2 * steps):
        await balancer.put(make_rollout(4, f"r{number}"))


async def all_steps(feeds: list[sb.RankFeed]) -> list[list[int]]:
    """What each feed still gives, side by side."""
    got: list[list[int]] = [[] for _ in feeds]

    async def collect(feed: sb.RankFeed, into: list[int]) -> None:
        into.extend([batch.step async for batch in feed])

    with anyio.fail_after(1000):
        async with anyio.create_task_group() as tasks:
            for feed, into in zip(feeds, got, strict=True):
                tasks.start_soon(collect, feed, into)
    return got


@pytest.mark.parametrize("how", ["acknowledge", "nack"])
async def test_a_step_that_was_given_up_leaves_a_gap_and_one_that_is_given_back_comes_in_its_place(how: str) -> None:
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(a_config(capacity=64)) as balancer:
        await filled(balancer, 4)
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


@pytest.mark.parametrize("how", ["acknowledge", "acknowledge_through"])
async def test_the_user_and_the_ranks_may_both_acknowledge(how: str) -> None:
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(a_config(capacity=64)) as balancer:
        await filled(balancer, 3)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            feeds = feeds_of(transport)
            for feed in feeds:
                assert (await anext(feed)).step == 0
            await settle()
            getattr(balancer, how)(0)  # a checkpoint holds it; the ranks say so a moment later
            assert await all_steps(feeds) == [[1, 2], [1, 2]]
        assert balancer.statistics().acknowledged == 6


async def test_what_a_checkpoint_holds_is_not_delivered_to_a_rank_that_comes_back() -> None:
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(a_config(capacity=64)) as balancer:
        await filled(balancer, 3)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, balancer, transport, rejoin_timeout_s=math.inf))
            healthy, victim = feeds_of(transport, depth=4)
            for feed in (healthy, victim):
                for step in range(2):
                    assert (await anext(feed)).step == step
            await settle()
            kill(victim)
            balancer.acknowledge_through(1)
            again = sb.RankFeed(transport.connect(1, incarnation=1))
            assert await all_steps([again, healthy]) == [[2], [2]]
        stats = balancer.statistics()
        assert (stats.acknowledged, stats.in_flight) == (6, 0)


async def test_nack_while_serve_delivers_is_refused_where_it_is_called() -> None:
    transport = MemoryNetwork(dp_size=2)
    async with sb.StreamBalancer(a_config(capacity=64)) as balancer:
        await filled(balancer, 2)
        balancer.end()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            feeds = feeds_of(transport)
            await settle()
            with pytest.raises(ValueError, match="next incarnation"):
                balancer.nack(0)
            assert await all_steps(feeds) == [[0, 1], [0, 1]]
