"""What pins messages and objects of the serving that is being replaced: it goes with them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import anyio
import pytest
from helpers import Rejoining, kill, settle
from scripted import make_batch, rank_batch
from test_elastic import Trainers, knobs, put
from test_missing_payloads import Run
from test_remote_control import KNOBS, over_memory

import stream_balancer as sb
from stream_balancer.controller.rank_queues import OpenStep, RankQueue
from stream_balancer.errors import RankLostError, WireError
from stream_balancer.testing import MemoryNetwork, make_rollout, make_rollouts
from stream_balancer.testing.transports import ScriptedBalancer
from stream_balancer.transport import Link
from stream_balancer.transport.channel import Outgoing
from stream_balancer.types import Batch
from stream_balancer.wire.messages import PartsDone, PayloadsFetched, Released, StepReport


async def test_nothing_is_shared_out_before_all_have_answered_or_are_lost() -> None:
    ranks = [RankQueue(number) for number in range(4)]
    for rank in ranks:
        rank.link = cast("Link", object())
    step = OpenStep(make_batch(0, 4), ranks, [0.0] * 4)
    step.asks(ranks[0], PartsDone(0, 0))
    assert step.late() == []
    step.asks(ranks[1], PartsDone(0, 0))
    assert step.late() == ranks[2:]
    assert step.late() == [], "each is asked once"
    step.spares(ranks[2], Released(0, 1))
    assert step.take_moved() == ([], [])
    step.stops_asking(ranks[3])
    moved, takers = step.take_moved()
    own = make_batch(0, 4).ranks[2].micro_batches
    assert [one.rollout_id for one in moved] == [one.rollout_id for one in own[-1].rollouts if not one.is_padding]
    assert takers == ranks[:2]
    assert len(step.own_of(ranks[2]).micro_batches) == len(own) - 1
    assert step.take_moved() == ([], []), "each goes to one rank"


@pytest.mark.parametrize("when", ["never asked", "twice", "all of it", "has begun all", "lost"])
async def test_a_rank_gives_back_what_it_was_asked_for_or_nothing(when: str) -> None:
    ranks = [RankQueue(number) for number in range(4)]
    for rank in ranks[: 3 if when == "never asked" else 4]:
        rank.link = cast("Link", object())
    batch = make_batch(0, 4)
    long = tuple(replace(one, micro_batches=one.micro_batches * 2) for one in batch.ranks)
    step = OpenStep(replace(batch, ranks=long), ranks, [0.0] * 4)
    for rank in ranks[:2]:
        step.asks(rank, PartsDone(0, 0))
    step.late()
    own = len(step.own_of(ranks[3]).micro_batches)
    if when == "twice":
        step.spares(ranks[3], Released(0, 1))
    elif when == "has begun all":
        step.asks(ranks[3], PartsDone(0, 0))
    elif when == "lost":
        step.stops_asking(ranks[3])
    step.spares(ranks[3], Released(0, 0))
    with pytest.raises(WireError, match="micro-batches of step 0, which it need not"):
        step.spares(ranks[3], Released(0, own if when == "all of it" else 1))


@pytest.mark.parametrize("report", [StepReport(7, 1.0), PayloadsFetched(0), PartsDone(7, 0), PartsDone(0, 1)], ids=str)
async def test_a_rank_that_breaks_the_protocol_learns_that_it_is_lost(report: Any) -> None:
    """Also where its next incarnation is waited for: it must not wait for batches that never come."""
    async with sb.StreamBalancer(knobs(1)) as balancer, MemoryNetwork(dp_size=1) as transport:
        await put(balancer, "r", 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), balancer, transport)
            port = transport.connect(0)
            feed = sb.RankFeed(port)
            await anext(feed)
            port.report(report)
            with pytest.raises(sb.RankLostError), anyio.fail_after(60.0):
                await anext(feed)
            tasks.start_soon(partial(Trainers(transport).train, 0, incarnation=1))
            balancer.end()
        assert balancer.statistics().acknowledged == 12


@pytest.mark.parametrize("asks", ["before the loss", "while its part is on its way"])
async def test_who_has_a_part_to_do_has_asked_for_nothing(asks: str) -> None:
    """Its question is older than the part: the others would meet without what the part holds."""
    async with sb.StreamBalancer(knobs(3)) as balancer, MemoryNetwork(dp_size=3) as transport:
        await put(balancer, "r", 12)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(sb.serve, on_rank_loss="replan"), balancer, transport)
            ports = [transport.connect(rank) for rank in range(3)]
            feeds = [sb.RankFeed(port) for port in ports]
            for feed in feeds:
                await anext(feed)
            if asks == "before the loss":
                ports[0].report(PartsDone(0, 0))
                await settle()
            kill(feeds[2])
            await settle()
            if asks != "before the loss":
                ports[0].report(PartsDone(0, 0))
            others, done = feeds[1].reassigned(), anyio.Event()

            async def ask() -> None:
                assert len([part async for part in others]) == 1
                done.set()

            tasks.start_soon(ask)
            await settle()
            assert not done.is_set()
            ports[0].report(PartsDone(0, 1))
            await settle()
            assert others.ranks == (0, 1)
            tasks.cancel_scope.cancel()


async def test_a_rank_that_has_fetched_what_is_of_others_alone_is_lost_and_no_other() -> None:
    """It has come since that step was given out."""
    run = Run()
    async with run.balancer as balancer, anyio.create_task_group() as tasks:
        for rollout in make_rollouts([10] * 8):
            await balancer.put(run.kept.remote(rollout))
        tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), balancer, run.transport)
        first = [run.feed(rank) for rank in range(2)]
        for feed in first:
            assert (await anext(feed)).step == 0
        balancer.reconfigure(dp_size=3)
        port = run.transport.connect(2, payloads=run.kept)
        stranger = sb.RankFeed(port)
        port.report(PayloadsFetched(0))
        with pytest.raises(sb.RankLostError), anyio.fail_after(60.0):
            await anext(stranger)
        assert [state.connected for state in balancer.rank_states()] == [True, True, False]
        tasks.cancel_scope.cancel()


async def test_a_rank_that_breaks_the_protocol_does_not_come_again() -> None:
    """Else it would do the same for ever: the connection that ends looks like one that broke."""
    balancer = ScriptedBalancer([make_batch(step, 1) for step in range(3)])
    async with MemoryNetwork(dp_size=1) as transport:
        network = Rejoining(transport)
        with anyio.move_on_after(60) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sb.serve, rejoin_timeout_s=math.inf), balancer, transport)
                async with sb.RankFeed(network.port) as feed:
                    await anext(feed)
                    network.wire.ends[1].send(Outgoing(StepReport(7, 1.0)))
                    with pytest.raises(sb.RankLostError, match="acknowledged step 7, which it was not working on"):
                        [one async for one in feed]
                tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    assert network.joined == 1


async def test_a_share_that_cannot_be_sent_is_told_by_serve() -> None:
    batch = make_batch(0, 1)
    odd = make_rollout(3, "odd")
    first = batch.ranks[0].micro_batches[0]
    mixed = rank_batch([first.rollouts[0], odd])
    bad = Batch(
        step=0, reason="window", ranks=(mixed,), num_rollouts=2, num_tokens=8, loads=(1.0,), finish=1.0, lower_bound=1.0
    )
    balancer = ScriptedBalancer([bad])
    transport = MemoryNetwork(dp_size=1)
    sb.RankFeed(transport.connect(0))
    with pytest.raises(sb.RolloutError, match="'odd' has columns"):
        await sb.serve(balancer, transport)
    assert balancer.acknowledged == []


async def test_statistics_that_are_too_large_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_balancer.wire.statistics.MAX_STATISTICS_BYTES", 100)
    async with over_memory(**KNOBS) as harness:
        with pytest.raises(ValueError, match=r"take .* bytes, more than the 100 that travel"):
            await harness.producer().statistics()
        with pytest.raises(ValueError, match=r"take .* bytes, more than the 100 that travel"):
            await harness.feed().async_statistics()


async def test_the_balancer_failing_ends_serve_with_its_error() -> None:
    class Failing(ScriptedBalancer):
        async def __anext__(self) -> Batch:
            raise LookupError("boom")

    transport = MemoryNetwork(dp_size=1)
    feed = sb.RankFeed(transport.connect(0))
    with pytest.raises(LookupError, match="boom"):
        await sb.serve(Failing([]), transport)
    with pytest.raises(RankLostError):
        await anext(feed)
