"""Clauses of the transports' contract: the end, a rank or a controller that is gone, refusals, cancellation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from stream_balancer.controller.serve import serve
from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, EndOfStream, RankLostError, RefusedError
from stream_balancer.testing.harness import CLAUSE_TIMEOUT_S, Opener, accepted, collect, drain, loss_of, raises, until
from stream_balancer.testing.scripted import ScriptedBalancer, make_batch
from stream_balancer.transport import Report

__all__ = ["CLAUSES"]


async def leaving_with_something_unacknowledged_is_a_loss(open_harness: Opener) -> None:
    """Also after the end was told."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(3)])

        async def train() -> None:
            feed = harness.connect(0, auto_ack=False)
            batches = [batch async for batch in feed]
            batches[1].ack()
            await feed.aclose()
            batches[0].ack()
            with raises(ClosedResourceError):
                batches[2].ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            with raises(RankLostError) as caught:
                await serve(balancer, harness.transport)
        assert "step 2" in str(caught.error), caught.error
        assert balancer.acknowledged == [0, 1]


async def the_end_is_told_after_what_was_sent(open_harness: Opener) -> None:
    """``end()`` overtakes nothing; the rank's close is an end, not a loss; nothing can be sent any more."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        link.end()
        link.end()
        with raises(ClosedResourceError):
            link.send(make_batch(1, 1).ranks[0])
        assert [batch.step for batch in await drain(feed)] == [0]
        reports: list[Report] = []
        with raises(EndOfStream):
            await until(lambda: collect(link, reports) and False)
        assert len(reports) == 1
        with raises(ClosedResourceError):
            await anext(feed)


async def a_rank_that_leaves_early_is_named(open_harness: Opener) -> None:
    """Closing before the end is a loss for the controller: there were batches to train on."""
    async with open_harness(2) as harness:
        feed = harness.connect(1)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 2).ranks[1])
        await anext(feed)
        await feed.aclose()
        await feed.aclose()
        error = await loss_of(link)
        assert error.rank == 1
        assert not link.live, "a lost link says that it lives"
        with raises(RankLostError):
            link.send(make_batch(1, 2).ranks[1])
        with raises(ClosedResourceError):
            await anext(feed)


async def a_killed_rank_is_noticed_and_may_come_back(open_harness: Opener) -> None:
    """What it had not acknowledged comes again, in the same plan and order; the other rank notices nothing."""
    async with open_harness(2) as harness:
        balancer = ScriptedBalancer([make_batch(step, 2) for step in range(8)])
        steps: dict[int, list[int]] = {0: [], 1: []}

        async def healthy() -> None:
            steps[0] = [batch.step async for batch in harness.connect(0)]

        async def dies_once() -> None:
            first = harness.connect(1)
            for _ in range(3):
                steps[1].append((await anext(first)).step)
            await until(lambda: 1 in balancer.acknowledged)  # its word about step 1 has come through
            harness.kill(first)
            steps[1].pop()  # what it was working on is gone with it
            steps[1] += [batch.step async for batch in harness.connect(1, incarnation=1)]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(healthy)
            tasks.start_soon(dies_once)
            await serve(balancer, harness.transport, rejoin_timeout_s=20)
        assert steps == {0: list(range(8)), 1: list(range(8))}
        assert balancer.acknowledged == list(range(8))


async def a_rank_that_stays_away_is_an_error(open_harness: Opener) -> None:
    """``serve`` names rank and step; what was not acknowledged is still in flight."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(3)], hold=True)

        async def dies() -> None:
            feed = harness.connect(0)
            await anext(feed)
            await anext(feed)
            await until(lambda: balancer.acknowledged == [0])
            harness.kill(feed)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dies)
            with raises(RankLostError) as caught:
                await serve(balancer, harness.transport)
        lost = caught.error
        assert isinstance(lost, RankLostError)
        assert lost.rank == 0
        assert lost.cause
        assert [batch.step for batch in balancer.in_flight()] == [1, 2][: len(balancer.in_flight())]
        assert balancer.acknowledged == [0]


async def a_rank_lost_before_serve_has_not_come_yet(open_harness: Opener) -> None:
    """Its next incarnation is waited for."""
    async with open_harness(1) as harness:
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(2)])
        feed = harness.connect(0)
        await anyio.sleep(0.2)  # time to connect
        harness.kill(feed)
        await anyio.sleep(0.05)  # and to be missed

        async def comes_back() -> None:
            await anyio.sleep(0.05)
            assert [batch.step for batch in await drain(harness.connect(0, incarnation=1))] == [0, 1]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(comes_back)
            await serve(balancer, harness.transport, rejoin_timeout_s=CLAUSE_TIMEOUT_S)
        assert balancer.acknowledged == [0, 1]


async def a_lost_controller_is_noticed(open_harness: Opener) -> None:
    """After what had arrived was handed out."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        assert (await anext(feed)).step == 0
        await harness.transport.aclose()
        with raises(RankLostError) as caught:
            await anext(feed)
        assert isinstance(caught.error, RankLostError)
        assert caught.error.rank == 0
        await feed.aclose()


async def strangers_are_refused(open_harness: Opener) -> None:
    """A second feed for a rank, and one of another world; who is connected notices nothing."""
    async with open_harness(2) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        with raises(AlreadyInUseError) as caught:
            await anext(harness.connect(0))
        assert isinstance(caught.error, RefusedError)
        assert (caught.error.reason, "rank 0" in str(caught.error)) == ("busy", True)
        for rank, dp_size in ((1, 3), (1, 4)):
            with raises(ValueError) as refused:
                await anext(harness.connect(rank, dp_size=dp_size))
            assert isinstance(refused.error, RefusedError)
            assert refused.error.reason == "value"
            assert f"dp_size={dp_size}" in str(refused.error)
            assert "dp_size=2" in str(refused.error)
        link.send(make_batch(0, 2).ranks[0])
        assert (await anext(feed)).step == 0
        newer = harness.connect(0, incarnation=1)
        link = await accepted(harness.transport)
        assert link.incarnation == 1
        link.send(make_batch(0, 2).ranks[0])
        assert (await anext(newer)).step == 0
        with raises(RankLostError):
            await anext(feed)
        await newer.aclose()


async def a_rank_that_cannot_go_on_learns_why(open_harness: Opener) -> None:
    """Though it is connected; after what it was sent."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        link = await accepted(harness.transport)
        link.send(make_batch(0, 1).ranks[0])
        assert (await anext(feed)).step == 0
        why = "rank 0 acknowledged step 7, which it was not working on"
        link.close(RankLostError(why, rank=0, step=7, cause="broke the protocol"))
        assert not link.live
        assert str(await loss_of(link)) == why
        with raises(RankLostError) as caught:
            await anext(feed)
        assert why in str(caught.error)
        await feed.aclose()
        link.close(RankLostError("too late", rank=0, step=7, cause="broke the protocol"))
        assert str(await loss_of(link)) == why


async def cancelling_loses_nothing(open_harness: Opener) -> None:
    """``accept``, the iteration and ``serve``, at their awaits."""
    async with open_harness(1) as harness:
        with anyio.move_on_after(0.02):
            await harness.transport.accept()
        feed = harness.connect(0)
        for _ in range(3):
            with anyio.move_on_after(0.02):
                await anext(feed)
        balancer = ScriptedBalancer([make_batch(step, 1) for step in range(6)], hold=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            assert (await anext(feed)).step == 0
            assert (await anext(feed)).step == 1
            await until(lambda: balancer.acknowledged == [0])
            tasks.cancel_scope.cancel()
        with suppress(RankLostError):
            while True:
                await anext(feed)  # what had arrived before
        await feed.aclose()
        assert balancer.acknowledged == [0]
        again = harness.connect(0, incarnation=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, balancer, harness.transport)
            batches = [await anext(again) for _ in range(5)]
            assert [batch.step for batch in batches] == [1, 2, 3, 4, 5]
            batches[-1].ack()
            await until(lambda: balancer.acknowledged == list(range(6)))
            tasks.cancel_scope.cancel()
        await again.aclose()


async def closing_is_idempotent_and_wakes(open_harness: Opener) -> None:
    """A task that waits in ``accept`` or in the iteration is notified, not left waiting."""
    async with open_harness(1) as harness:
        feed = harness.connect(0)
        outcome: list[type[BaseException]] = []

        async def wait(what: Callable[[], Awaitable[object]]) -> None:
            try:
                await what()
            except Exception as error:  # noqa: BLE001 - recorded and asserted below
                outcome.append(type(error))

        await accepted(harness.transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, harness.transport.accept)
            tasks.start_soon(wait, feed.__anext__)
            await anyio.sleep(0.02)
            with raises(AlreadyInUseError):
                await anext(feed)
            await feed.aclose()
            await harness.transport.aclose()
            await harness.transport.aclose()
        assert outcome == [ClosedResourceError, ClosedResourceError], outcome


CLAUSES = (
    leaving_with_something_unacknowledged_is_a_loss,
    the_end_is_told_after_what_was_sent,
    a_rank_that_leaves_early_is_named,
    a_killed_rank_is_noticed_and_may_come_back,
    a_rank_that_stays_away_is_an_error,
    a_rank_lost_before_serve_has_not_come_yet,
    a_lost_controller_is_noticed,
    strangers_are_refused,
    a_rank_that_cannot_go_on_learns_why,
    cancelling_loses_nothing,
    closing_is_idempotent_and_wakes,
)
