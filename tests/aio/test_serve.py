"""``serve``: who may come in, what ranks say of their weights, what is no report."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from crew import Crew
from helpers import settle
from served import serving

import stream_balancer as sb
from stream_balancer.net.messages import Report
from stream_balancer.net.session import Session
from stream_balancer.testing import MemoryNetwork, make_rollout


def knobs(dp_size: int = 2, **more: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": dp_size, "batch_size": 4, "window": 4, **more})


async def put(balancer: sb.StreamBalancer, number: int) -> None:
    for n in range(number):
        await balancer.put(make_rollout(1 + n % 7, f"r{n}"))


async def test_ranks_that_say_different_weights_are_refused_with_the_lowest_common_ones() -> None:
    async with sb.StreamBalancer(knobs()) as balancer, anyio.create_task_group() as tasks:
        network = MemoryNetwork(dp_size=2)
        tasks.start_soon(partial(sb.serve, balancer, network, rejoin_timeout_s=math.inf))
        feeds = [sb.RankFeed(network.connect(rank), auto_ack=False) for rank in range(2)]
        tasks.start_soon(put, balancer, 40)
        for _ in range(5):
            for feed in feeds:
                await anext(feed)
        for rank in range(2):
            network_peer = feeds[rank]._port
            await network_peer.session.aclose()
        await settle()
        first = sb.RankFeed(network.connect(0, incarnation=1), next_step=4)
        assert (await anext(first)).step == 4
        with pytest.raises(
            sb.errors.RefusedError, match="of rank 1 contain all steps before 2, and rank 0's all before 4"
        ) as e:
            await anext(sb.RankFeed(network.connect(1, incarnation=1), next_step=2))
        assert "before step 2 or earlier" in str(e.value)
        assert (await anext(sb.RankFeed(network.connect(1, incarnation=1), next_step=4))).step == 4
        tasks.cancel_scope.cancel()


async def test_weights_that_differ_by_one_step_are_refused_whichever_rank_comes_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rank was killed before its checkpoint of a step was there, the other after it."""
    async with serving(sb.StreamBalancer(knobs()), rejoin_timeout_s=60) as (balancer, network, tasks):
        await put(balancer, 8)
        feeds = [sb.RankFeed(network.connect(rank), auto_ack=False) for rank in range(2)]
        for feed in feeds:
            assert (await anext(feed)).step == 0
            await feed._port.session.aclose()
        await settle()
        assert "rank 1 was lost, and may come back within 60 s: the rank closed its feed" in caplog.text
        late = sb.RankFeed(network.connect(0, incarnation=1), auto_ack=False, next_step=0)
        assert (await anext(late)).step == 0
        with pytest.raises(sb.errors.RefusedError, match="of rank 1 contain all steps before 1, and rank 0's all befo"):
            await anext(sb.RankFeed(network.connect(1, incarnation=1), auto_ack=False, next_step=1))
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_rank_that_says_its_weights_does_not_meet_one_that_begins_with_another_step(
    order: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says next_step=4. Rank 1 says nothing: its weights are new."""
    async with serving(sb.StreamBalancer(knobs()), rejoin_timeout_s=60) as (balancer, network, tasks):
        tasks.start_soon(put, balancer, 40)
        feeds = [sb.RankFeed(network.connect(rank), auto_ack=False) for rank in range(2)]
        for _ in range(5):
            for feed in feeds:
                await anext(feed)
        for feed in feeds:
            await feed._port.session.aclose()
        await settle()

        def come(rank: int) -> sb.RankFeed:
            return sb.RankFeed(network.connect(rank, incarnation=1), auto_ack=False, next_step=0 if rank else 4)

        first = come(order[0])
        assert (await anext(first)).step == (0 if order[0] else 4)
        steps = {0: 4, 1: 0}
        text = (
            f"of rank {order[1]} contain all steps before {steps[order[1]]}, and rank {order[0]}'s all before "
            f"{steps[order[0]]}: .* before step 0"
        )
        with pytest.raises(sb.errors.RefusedError, match=text):
            await anext(come(order[1]))
        tasks.cancel_scope.cancel()


ABOUT = {"rank": 0, "dp_size": 1, "incarnation": 0, "depth": 2}


@pytest.mark.parametrize(
    ("about", "report", "says"),
    [
        *((about, None, "") for about in [None, {}, {**ABOUT, "more": 1}, {**ABOUT, "holds": {0: [1]}}]),
        *(({**ABOUT, **wrong}, None, "") for wrong in [{"rank": 7}, {"depth": 0}]),
        (ABOUT, Report("invented", 0), "which nobody knows"),
        (ABOUT, Report("finished", 10**9), "step 1000000000, and the next step here is"),
        (ABOUT, Report("loaded", 10**9), "the next step here is"),
        (ABOUT, Report("missing", 0, about=msgspec.Raw(b"\xc1")), "cannot be read"),
        (ABOUT, Report("finished", 0, about=msgspec.Raw(msgspec.msgpack.encode("soon"))), "cannot be read"),
    ],
    ids=lambda one: one.fact if isinstance(one, Report) else str(one),
)
async def test_who_talks_nonsense_is_told_and_no_other_rank_minds(about: Any, report: Report | None, says: str) -> None:
    """Who does not say who it is does not come in."""
    async with serving(sb.StreamBalancer(knobs(1)), rejoin_timeout_s=math.inf) as (balancer, network, tasks):
        ends: list[Exception] = []
        session = Session(
            network.dialer(), "rank", about=about, on_end=ends.append, admit=lambda *_: None, on_message=lambda *_: None
        )
        session.begin()
        await put(balancer, 4)
        for _ in range(2):
            await settle()
        if report is not None:
            session.send(report)
            for _ in range(2):
                await settle()
        [end] = ends
        assert says in str(end)
        assert isinstance(end, sb.errors.RefusedError) or report is not None
        crew = Crew(network)
        tasks.start_soon(partial(crew.train, 0, incarnation=1))
        balancer.end()
    crew.check(balancer, 4)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
async def test_a_rank_that_reports_seconds_that_cannot_be_is_told_and_serve_goes_on(seconds: float) -> None:
    async with serving(sb.StreamBalancer(knobs(1)), rejoin_timeout_s=math.inf) as (balancer, network, tasks):
        ends: list[Exception] = []

        def on_message(message: Any, _: object) -> None:
            times = msgspec.Raw(msgspec.msgpack.encode((seconds, None, None)))
            session.send(Report("finished", message.step, message.attempt, times))

        session = Session(
            network.dialer(), "rank", about=ABOUT, on_end=ends.append, admit=lambda *_: None, on_message=on_message
        )
        session.begin()
        await put(balancer, 4)
        await settle()
        await settle()
        [end] = ends
        assert "seconds of a rank must be >= 0 and finite" in str(end)
        crew = Crew(network)
        tasks.start_soon(partial(crew.train, 0, incarnation=1))
        balancer.end()
    crew.check(balancer, 4)


async def test_a_transport_is_an_address_or_for_as_many_ranks() -> None:
    with pytest.raises(TypeError, match="takes a StreamBalancer, in its event loop, not a BlockingBalancer"):
        await sb.serve(sb.blocking(knobs()), MemoryNetwork(dp_size=2))  # type: ignore[arg-type]
    async with sb.StreamBalancer(knobs()) as balancer:
        with pytest.raises(ValueError, match="transport is for dp_size=3 ranks, but the balancer plans for dp_size=2"):
            await sb.serve(balancer, MemoryNetwork(dp_size=3))
        with pytest.raises(ValueError, match="is not an address"):
            await sb.serve(balancer, "localhost")
        with pytest.raises(ValueError, match="without a token"):
            await sb.serve(balancer, "tcp://0.0.0.0:29400")


async def test_a_second_serve_is_refused_and_the_first_one_goes_on() -> None:
    async with serving(sb.StreamBalancer(knobs(1))) as (balancer, network, tasks):
        await settle()
        with pytest.raises(sb.errors.AlreadyInUseError, match=r"another serve\(\) delivers this balancer's batches"):
            await sb.serve(balancer, MemoryNetwork(dp_size=1))
        crew = Crew(network)
        tasks.start_soon(crew.train, 0)
        await put(balancer, 4)
        balancer.end()
    crew.check(balancer, 4)


async def test_a_network_that_nobody_uses_any_more_is_freed() -> None:
    network = MemoryNetwork(dp_size=1)
    async with sb.StreamBalancer(knobs(1)) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(sb.serve, balancer, network)
        async with sb.connect(network.connect_producer()) as producer:
            await producer.put(make_rollout(3))
        tasks.cancel_scope.cancel()
    left = weakref.ref(network)
    del network, balancer, tasks, producer
    await settle()
    gc.collect()
    assert left() is None


async def test_a_feed_that_is_not_closed_keeps_serve_for_a_minute_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sb.StreamBalancer(knobs(), report_after_s=40) as balancer:
        network = MemoryNetwork(dp_size=2)
        with anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sb.serve, balancer, network)
                feeds = [sb.RankFeed(network.connect(rank), auto_ack=False) for rank in range(2)]
                await put(balancer, 4)
                for feed in feeds:
                    (await anext(feed)).ack()
                balancer.end()
                await settle()
                # what is asked after the last acknowledgement is answered
                assert (await feeds[0].async_statistics()).in_flight == 0
                await feeds[1].aclose()
        stalled, left = caplog.messages
        assert stalled.startswith("all batches were sent 40 s ago; not yet done with them: rank 0")
        assert left.startswith("rank 0: all is done, and the feed was not closed for 60 s")
        # what it was told before the controller left counts
        with pytest.raises(StopAsyncIteration):
            await anext(feeds[0])
