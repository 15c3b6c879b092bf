"""Remote control over memory, in virtual time on both loops: what joins again. What holds over every network is in
tests/contract."""

from __future__ import annotations

import math
import random
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from helpers import settle, waiting, wire_of
from served import serving

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout

KNOBS: dict[str, Any] = {"dp_size": 1, "batch_size": 4, "window": 4}
THROTTLED: dict[str, Any] = {"dp_size": 1, "batch_size": 4, "window": 8, "staleness": {"max_versions": 1}}


def over_memory(
    knobs: dict[str, Any] = THROTTLED, **options: Any
) -> AbstractAsyncContextManager[tuple[sb.StreamBalancer, MemoryNetwork, TaskGroup]]:
    return serving(sb.StreamBalancer(sb.BalancerConfig(**knobs), **options), until_end=False)


def connected(network: MemoryNetwork, *, rejoin: bool = False) -> sb.Producer:
    return sb.connect(network.connect_producer(rejoin=rejoin))


# -- joining again, and who counts as the last -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_slots_cuts_and_cancels(seed: int) -> None:
    """What was put is trained on, once and not too old; no place is kept for ever, whoever held it."""
    chance, put, trained, ages = random.Random(seed), list[str](), list[str](), list[int]()
    async with over_memory() as (balancer, network, tasks):
        balancer.set_version(0)
        producers = [connected(network, rejoin=True) for _ in range(3)]

        async def break_some() -> None:
            while True:
                await anyio.sleep(chance.expovariate(1.0))
                wire = wire_of(chance.choice(producers))
                if chance.random() < 0.3:
                    wire.hold()
                    try:
                        await anyio.sleep(chance.random())
                    finally:
                        wire.release()
                else:
                    wire.cut("the network broke", seen_by=chance.choice([(0, 1), (1,), (1, 0)]))

        async def train() -> None:
            feed = sb.RankFeed(network.connect(0))
            async for step in feed:
                trained.extend(one.rollout_id for one in step.rollouts if not one.is_padding)
                ages.extend(step.step - (one.min_version or 0) for one in step.rollouts if not one.is_padding)
                await anyio.sleep(chance.random())
                feed.set_version(step.step + 1)

        async def work(number: int) -> None:
            size = chance.randint(1, 8)
            with anyio.move_on_after(chance.choice([3.0, math.inf])):
                with suppress(sb.errors.BrokenResourceError):  # others have begun in its place
                    async with chance.choice(producers).reserve(size) as slot:
                        for n in range(chance.randint(0, size)):
                            await anyio.sleep(0.2 * chance.random())
                            await slot.put(make_rollout(3, f"{number}.{n}"))
                            put.append(f"{number}.{n}")

        tasks.start_soon(train)
        with anyio.fail_after(1000):
            async with anyio.create_task_group() as others:
                others.start_soon(break_some)
                async with anyio.create_task_group() as workers:
                    for number in range(40):
                        workers.start_soon(work, number)
                        await anyio.sleep(chance.expovariate(2.0))
                others.cancel_scope.cancel()
            for producer in producers:
                await producer.end()
            while balancer.statistics().waiting or balancer.statistics().in_flight:  # noqa: ASYNC110 - in virtual time
                await anyio.sleep(0.1)
        statistics = balancer.statistics()
        assert (statistics.reserved, statistics.blocked_reserves) == (0, 0)
        assert set(put) <= set(trained)
        assert len(set(trained)) == len(trained) == statistics.accepted
        assert max(ages) <= 1


async def test_a_slot_outlives_its_connection() -> None:
    """The controller gives it back with the connection; the producer has it again, at the version it began with."""
    async with over_memory() as (balancer, network, _):
        balancer.set_version(4)
        producer = connected(network, rejoin=True)
        async with producer.reserve(4) as slot:
            await slot.put(make_rollout(3, "a"))
            balancer.set_version(5)
            wire_of(producer).cut("the network broke")
            await settle()
            assert balancer.statistics().reserved == 3
            assert await producer.version_after(4) == 5
            await slot.put(make_rollout(3, "b"))
            assert slot.left == 2
        await settle()
        assert balancer.statistics().reserved == 0
        held = balancer.snapshot().waiting
        assert [(r.rollout_id, r.min_version) for r in held] == [("a", 4), ("b", 4)]


async def test_a_put_that_is_cancelled_gives_its_place_back_to_its_slot() -> None:
    async def accept(_: object) -> bool:
        await anyio.sleep(10)
        return True

    async with over_memory(accept=accept) as (balancer, network, _), connected(network).reserve(2) as slot:
        with anyio.move_on_after(1):
            await slot.put(make_rollout(3, "a"))
        assert (slot.left, balancer.statistics().reserved) == (2, 2)


async def test_a_put_whose_reply_was_lost_has_taken_its_place() -> None:
    async def accept(_: object) -> bool:
        await anyio.sleep(1)
        return True

    async with over_memory(accept=accept) as (balancer, network, tasks):
        producer = connected(network, rejoin=True)
        async with producer.reserve(2) as slot:
            tasks.start_soon(slot.put, make_rollout(3, "a"))
            await anyio.sleep(0.5)
            wire_of(producer).hold()
            await anyio.sleep(1)
            wire_of(producer).cut("the network broke")
            await settle()
            assert (slot.left, balancer.statistics().reserved, waiting(balancer)) == (1, 1, ["a"])


async def test_the_end_of_a_producer_takes_back_what_waits_to_be_reserved() -> None:
    async with over_memory() as (balancer, network, tasks), balancer.reserve(8):
        producer = connected(network)

        async def reserve() -> None:
            with pytest.raises(sb.errors.ClosedResourceError):
                await producer.reserve(3).__aenter__()

        tasks.start_soon(reserve)
        await settle()
        with anyio.fail_after(1):
            await producer.end()


async def test_a_reservation_that_is_cancelled_while_its_reply_is_on_its_way_is_given_back() -> None:
    """Nobody has the slot, and the balancer has admitted it."""
    async with over_memory() as (balancer, network, tasks):
        producer, scope = connected(network), anyio.CancelScope()

        async def reserve() -> None:
            with scope, pytest.raises(sb.errors.BrokenResourceError, match="whether it was accepted is not known"):
                await producer.reserve(3).__aenter__()

        async with balancer.reserve(8):
            tasks.start_soon(reserve)
            await settle()
            wire_of(producer).hold()
        await settle()
        assert balancer.statistics().reserved == 3
        scope.cancel()
        await anyio.sleep(60)
        wire_of(producer).release()
        await settle()
        assert balancer.statistics().reserved == 0


async def test_a_slot_in_whose_place_others_have_begun_is_given_back_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async with over_memory() as (balancer, network, _):
        producer = connected(network, rejoin=True)
        async with producer.reserve(5) as slot:
            await slot.put(make_rollout(3, "a"))
            wire = wire_of(producer)
            wire.cut("the network broke", seen_by=[0])  # the controller's end
            await settle()
            assert "it had reserved and not put. Rollouts: 4" in caplog.text
            async with balancer.reserve(7):
                wire.cut("the network broke", seen_by=[1])
                await settle()
                assert "a slot of version 0 was given back, rollouts still to come: 4; others have begun" in caplog.text
                with pytest.raises(sb.errors.BrokenResourceError, match="its slot was given back"):
                    await slot.put(make_rollout(3, "b"))
        await settle()
        assert balancer.statistics().reserved == 0
        assert waiting(balancer) == ["a"]


async def test_slots_outlive_the_serve_that_admitted_them() -> None:
    config = sb.BalancerConfig(**THROTTLED)
    async with sb.StreamBalancer(config) as balancer, MemoryNetwork(dp_size=1) as transport:
        producer = sb.connect(transport.connect_producer())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            slot = await producer.reserve(2).__aenter__()
            tasks.cancel_scope.cancel()
        assert balancer.statistics().reserved == 2
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sb.serve, balancer, transport)
            await slot.put(make_rollout(3, "a"))
            slot.release()
            await settle()
            assert (balancer.statistics().reserved, waiting(balancer)) == (0, ["a"])
            tasks.cancel_scope.cancel()


async def test_a_slot_that_is_open_when_the_balancer_ends_is_given_back() -> None:
    async with over_memory() as (balancer, network, _), connected(network).reserve(2) as slot:
        feed = sb.RankFeed(network.connect(0))
        feed.end()
        assert [batch async for batch in feed] == []
        await settle()
        assert balancer.statistics().reserved == 0
        with pytest.raises(sb.errors.ClosedResourceError, match="takes no more rollouts"):
            await slot.put(make_rollout(3, "a"))


async def test_the_balancer_ends_once_as_many_producers_have_ended_as_take_part() -> None:
    """However late one of them connects, and though another was lost meanwhile."""
    async with over_memory(KNOBS, num_producers=2) as (balancer, network, _):
        first = connected(network)
        await first.end()
        await first.aclose()
        lost = connected(network)
        await settle()
        wire_of(lost).cut("killed")
        await settle()
        assert not balancer.ended
        assert "producers that have ended: 1 of num_producers=2; no other one is connected" in balancer.why_no_batch()
        await connected(network).end()
        assert balancer.ended


async def test_a_worker_that_has_ended_and_is_started_again_does_not_end_for_another() -> None:
    """As when torchrun starts all workers again, since one has failed."""
    async with over_memory(KNOBS, num_producers=2) as (balancer, network, _):
        first, second = connected(network), connected(network)
        await first.end()
        await first.aclose()
        wire_of(second).cut("killed")
        first, second = connected(network), connected(network)
        await settle()
        await first.end()
        assert not balancer.ended
        assert "connected and not ended: memory" in balancer.why_no_batch()
        await second.put(make_rollout(3, "late"))
        await second.end()
        assert balancer.ended


async def test_producers_that_have_not_come_or_left_are_named() -> None:
    async with over_memory(KNOBS) as (balancer, network, _):
        await settle()
        assert "no producer has connected" in balancer.why_no_batch()
        await balancer.put(make_rollout(3, "own"))
        assert "producer" not in balancer.why_no_batch()
    async with over_memory(KNOBS, num_producers=3) as (balancer, network, _):
        producer = connected(network)
        await settle()
        why = "producers that have ended: 0 of num_producers=3; connected and not ended: memory; not connected yet: 2"
        assert why in balancer.why_no_batch()
        await producer.aclose()
        await settle()
        why = "no other one is connected; left without end() (start them again, or call balancer.end()): memory; not "
        assert why in balancer.why_no_batch()
        ended = [connected(network) for _ in range(2)]
        for one in ended:
            await one.end()
        assert "producers that have ended: 2 of num_producers=3; no other one" in balancer.why_no_batch()
        assert "not connected yet" not in balancer.why_no_batch()


async def test_a_number_of_producers_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="num_producers must be >= 1, not 0"):
        sb.StreamBalancer(sb.BalancerConfig(**KNOBS), num_producers=0)


async def test_a_rank_that_goes_on_from_an_older_checkpoint_may_set_its_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning where it is said: there the newer one is known."""
    async with over_memory(KNOBS) as (balancer, network, _):
        balancer.set_version(7)
        feed = sb.RankFeed(network.connect(0))
        await settle()
        assert feed.version == 7
        feed.set_version(5)
        assert feed.version == 7
        await settle()
        assert balancer.version == 7
        assert caplog.messages == ["set_version(5): the version is 7 already, and stays so"]
        feed.set_version(8)
        await settle()
        assert balancer.version == 8
