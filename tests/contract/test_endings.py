"""The end; a rank or a controller that is gone; refusals; cancellation."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from networks import drain, kill, open_network, until
from scripted import Filled

import stream_balancer as sb


async def test_leaving_with_something_unacknowledged_is_a_loss(kind: str) -> None:
    """Also after the end was told."""
    async with Filled(3, 1, capacity=64) as filled, open_network(kind, 1) as network:

        async def train() -> None:
            feed = network.feed(auto_ack=False)
            steps = await drain(feed)
            steps[1].ack()
            await feed.aclose()
            with pytest.raises(sb.errors.ClosedResourceError):
                steps[2].ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            with pytest.raises(sb.errors.RankLostError, match="step 2"):
                await sb.serve(filled.balancer, network.transport)
        assert filled.acknowledged_steps == [0, 1]


async def test_a_rank_that_stays_away_is_an_error(kind: str) -> None:
    """``serve`` names rank and cause; what was not acknowledged is still in flight."""
    async with Filled(3, 1, hold=True) as filled, open_network(kind, 1) as network, anyio.create_task_group() as tasks:

        async def dies() -> None:
            feed = network.feed()
            await anext(feed)
            await anext(feed)
            await until(lambda: filled.acknowledged_steps == [0])
            kill(feed)

        tasks.start_soon(dies)
        with pytest.raises(sb.errors.RankLostError) as caught:
            await sb.serve(filled.balancer, network.transport)
        assert caught.value.rank == 0
        assert caught.value.cause
        assert [batch.step for batch in filled.balancer.in_flight()][:1] == [1]
        assert filled.acknowledged_steps == [0]


async def test_a_lost_controller_is_noticed(kind: str) -> None:
    """After what had arrived was handed out."""
    async with Filled(1, 1, hold=True) as filled, open_network(kind, 1) as network:
        feed = network.feed()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, filled.balancer, network.transport)
            assert (await anext(feed)).step == 0
            tasks.cancel_scope.cancel()
        await network.transport.aclose()
        with pytest.raises(sb.errors.RankLostError) as caught:
            await anext(feed)
        assert caught.value.rank == 0


async def test_strangers_are_refused(kind: str) -> None:
    """A second feed for a rank, and one of another world; who is connected notices nothing."""
    async with Filled(4, 2, hold=True) as filled, open_network(kind, 2) as network, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sb.serve, rejoin_timeout_s=1000), filled.balancer, network.transport)
        feed, other = network.feed(0), network.feed(1)
        assert (await anext(feed)).step == 0
        with pytest.raises(sb.errors.AlreadyInUseError, match="rank 0") as busy:
            await anext(network.feed(0))
        assert isinstance(busy.value, sb.errors.RefusedError)
        assert busy.value.reason == "busy"
        for rank, dp_size in ((1, 3), (2, 4)):
            with pytest.raises(ValueError, match=f"dp_size={dp_size}.*dp_size=2") as refused:
                await anext(network.feed(rank, dp_size=dp_size))
            assert isinstance(refused.value, sb.errors.RefusedError)
            assert refused.value.reason == "value"
        assert (await anext(other)).step == 0
        newer = network.feed(0, incarnation=1)
        assert (await anext(newer)).step == 0
        with pytest.raises(sb.errors.RankLostError):
            await drain(feed)
        tasks.cancel_scope.cancel()
