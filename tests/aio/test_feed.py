"""A rank's loop: what it acknowledges, what it is refused, when it leaves, and when it comes again."""

from __future__ import annotations

import gc
import math
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from helpers import config, fill, settle
from scripted import Filled
from served import drain, serving

import stream_balancer as sb
from stream_balancer.net import messages as m
from stream_balancer.net.connection import Connection
from stream_balancer.rollouts import MicroBatch
from stream_balancer.testing import MemoryNetwork, make_rollout
from stream_balancer.wire.codec import encode

one_rank = partial(config, dp_size=1, batch_size=2, window=2)


async def test_a_plain_loop_where_steps_may_change_is_told_what_to_do() -> None:
    async with serving(sb.StreamBalancer(one_rank()), on_rank_loss="replan") as (balancer, network, _):
        await fill(balancer, [3, 4])
        feed = sb.RankFeed(network.connect(0))
        batch = await anext(feed)
        assert sum(len(one.rollouts) for one in batch.micro_batches) == 2
        with pytest.raises(sb.errors.ConfigError, match=r"end = step\.finish"):
            await anext(feed)
        with pytest.raises(sb.errors.ConfigError, match=r"end = step\.finish"):
            batch.ack()


@pytest.mark.parametrize("auto_ack", [True, False])
@pytest.mark.parametrize("how", ["next_step", "load_state_dict"])
async def test_what_the_weights_contain_is_not_trained_on_again(how: str, auto_ack: bool) -> None:
    """Other ranks' weights are no checkpoint: a step would be gone that nobody has saved. A number that the feed was
    opened with is a checkpoint's."""
    is_checkpoint, network = how == "next_step", MemoryNetwork(dp_size=1)
    async with Filled(3, 1) as filled, anyio.create_task_group() as tasks:
        before = filled.balancer.batches(auto_ack=False)
        for _ in range(3):
            await anext(before)
        tasks.start_soon(sb.serve, filled.balancer, network)
        feed = sb.RankFeed(network.connect(0, depth=3), auto_ack=auto_ack, next_step=2 if is_checkpoint else 0)
        await settle()
        if not is_checkpoint:
            feed.load_state_dict({"next_step": 2})
        step = await anext(feed)
        assert step.step == 2
        await settle()
        assert filled.acknowledged_steps == ([0, 1] if auto_ack or is_checkpoint else [])
        with pytest.raises(ValueError, match="lack step 1"):
            feed.load_state_dict({"next_step": 1})
        step.ack()
        await settle()
        assert filled.acknowledged_steps == [0, 1, 2]
        assert feed.state_dict()["next_step"] == 3
        await drain(feed)


@pytest.mark.parametrize(
    "state", [None, -1, 1.5, True, "4", {}, {"next_step": "3"}, {"next_step": 3, "attempt": -1}, {"feed": {}}], ids=str
)
def test_weights_that_are_no_number_and_no_state_are_refused(state: Any) -> None:
    peer = MemoryNetwork(dp_size=1).connect(0)
    with pytest.raises(ValueError, match=r"the weights are described by a feed's state_dict\(\)"):
        sb.RankFeed(peer, next_step=state)
    with pytest.raises(ValueError, match="or by the number of the first step that they lack"):
        sb.RankFeed(peer).load_state_dict(state)


async def test_without_auto_ack_it_leaves_with_the_last_acknowledgement() -> None:
    async with Filled(2, 1) as filled, anyio.create_task_group() as tasks:
        network = MemoryNetwork(dp_size=1)
        tasks.start_soon(sb.serve, filled.balancer, network)
        feed = sb.RankFeed(network.connect(0), auto_ack=False)
        steps: list[Any] = []
        for _ in range(2):  # after the end there is nothing more
            await drain(feed, steps)
        for _ in range(2):
            steps[0].ack()
        await settle()
        assert filled.acknowledged_steps == [0]
        assert filled.balancer.rank_states()[0].connected
        feed.acknowledge_through(10**9)
    assert filled.acknowledged_steps == [0, 1]
    assert anyio.current_time() < 60, "it was waited for"
    assert len(steps[0].rollouts) == 4, "it may be read when all is over"


async def test_a_feed_that_is_dropped_leaves_and_one_of_whose_steps_somebody_holds_stays() -> None:
    async with serving(sb.StreamBalancer(one_rank()), rejoin_timeout_s=math.inf) as (balancer, network, _):
        await fill(balancer, [3, 4])
        feed = sb.RankFeed(network.connect(0))
        step = await anext(feed)
        del feed
        gc.collect()
        await settle()
        assert balancer.rank_states()[0].connected
        del step
        gc.collect()
        await settle()
        assert not balancer.rank_states()[0].connected


async def test_two_tasks_cannot_iterate_one_feed() -> None:
    feed = sb.RankFeed(MemoryNetwork(dp_size=1).connect(0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, feed)
        await settle()
        with pytest.raises(sb.errors.AlreadyInUseError, match="two threads or tasks"):
            await anext(feed)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("counts", "most_bytes", "says"),
    [
        *((counts, 10**6, "mini-batches of step 0 do not make up its") for counts in [(2, 1), (1,), (2, 0), (3,)]),
        ((2,), 100, r"more than max_batch_bytes \(100\)\. Raise max_batch_bytes"),
    ],
    ids=str,
)
async def test_work_that_cannot_be_is_refused(counts: tuple[int, ...], most_bytes: int, says: str) -> None:
    """Mini-batches that are not all of a step; more bytes than the rank takes, before there is memory for them."""
    sizes = tuple(m.MiniBatchSize(count, 1.0, 2, 20, 20, 2) for count in counts)
    encoded = encode([MicroBatch.of([make_rollout(5)]) for _ in range(2)])

    class Controller:
        def __init__(self, connection: Connection, _: object) -> None:
            connection.handler = self
            about = msgspec.Raw(msgspec.msgpack.encode(m.Admitted(0, 1, has_barrier=False)))
            connection.let_in(m.Welcome(about=about))
            work = m.Work(0, 7, (0,), 0, False, 2.5, m.Denominators(4, 100, 50, 3), sizes, encoded.header)
            connection.send(work, encoded.payload)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    network = MemoryNetwork(dp_size=1)
    network.listen(Controller)
    with pytest.raises(sb.errors.WireError, match=says):
        await anext(sb.RankFeed(network.connect(0), max_batch_bytes=most_bytes))


# -- again -------------------------------------------------------------------------------------------------------------


async def test_a_controller_without_its_journal_is_not_joined() -> None:
    """Else its steps 0, 1, ... would count as trained on, and nobody would have trained on them."""
    network, got = MemoryNetwork(dp_size=1), []
    peer = network.connect(0, rejoin=True)
    feed = sb.RankFeed(peer)

    async def serve(filled: Filled, scope: anyio.CancelScope) -> None:
        with scope:
            await sb.serve(filled.balancer, network)

    async def train() -> None:
        async for step in feed:
            got.append(step.step)  # noqa: PERF401 - those before an error count

    async with Filled(3, 1, hold=True) as first, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, first, scope := anyio.CancelScope())
        with anyio.move_on_after(5):
            await train()
        scope.cancel()
    assert got == [0, 1, 2]
    async with Filled(1, 1, hold=True) as second, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, second, scope := anyio.CancelScope())
        with pytest.raises(sb.errors.RefusedError, match="without its journal"), anyio.fail_after(60):
            await train()
        scope.cancel()
    assert got == [0, 1, 2]


@pytest.mark.parametrize("reason", ["busy", "value"])
async def test_who_is_refused_does_not_come_again(reason: str) -> None:
    async with serving(sb.StreamBalancer(one_rank()), rejoin_timeout_s=math.inf) as (_, network, _):
        first = sb.RankFeed(network.connect(0))
        await settle()
        peer = network.connect(0, rejoin=True, **({"dp_size": 3} if reason == "value" else {}))
        with pytest.raises(sb.errors.RefusedError) as raised:
            await anext(sb.RankFeed(peer))
        assert raised.value.reason == reason
        await anyio.sleep(100)
        assert peer.joined <= 1
        assert first.waiting_s == 0.0


@pytest.mark.parametrize("how", ["closed", "ended", "not asked to"])
async def test_who_has_left_or_is_not_to_does_not_come_again(how: str) -> None:
    async with serving(sb.StreamBalancer(one_rank()), rejoin_timeout_s=math.inf) as (balancer, network, _):
        peer = network.connect(0, rejoin=how != "not asked to")
        feed = sb.RankFeed(peer)
        await settle()
        if how == "not asked to":
            peer.cut()
            with pytest.raises(sb.errors.RankLostError, match="open a new RankFeed"):
                await anext(feed)
        else:
            if how == "ended":
                balancer.end()
                await drain(feed)
            await feed.aclose()
            peer.cut()
        await anyio.sleep(100)
        assert peer.joined == 1
