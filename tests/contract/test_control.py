"""What producers and ranks elsewhere set, reserve, end and ask of a balancer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from networks import Network, kill, open_network

import stream_balancer as sb
from stream_balancer.errors import ClosedResourceError, RolloutError
from stream_balancer.testing import make_rollout

KNOBS: dict[str, Any] = {"batch_size": 4, "window": 4}
THROTTLED: dict[str, Any] = {"batch_size": 4, "window": 8, "staleness": {"max_versions": 1}}


@asynccontextmanager
async def served(kind: str, **knobs: Any) -> AsyncIterator[Network]:
    config = sb.BalancerConfig(**{"dp_size": 1, **knobs})
    async with (
        sb.StreamBalancer(config) as balancer,
        open_network(kind, 1) as network,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sb.serve, balancer, network.transport)
        yield network
        tasks.cancel_scope.cancel()


async def _until_closed(feed: sb.RankFeed) -> list[str]:
    """Train on all there is. -> ids."""
    return [r.rollout_id async for batch in feed for r in batch.rollouts if not r.is_padding]


async def _until(producer: sb.Producer, condition: Callable[[sb.Statistics], bool]) -> None:
    while not condition(await producer.statistics()):  # noqa: ASYNC110 - nobody is notified of others' waiting
        await anyio.sleep(0.01)


async def test_a_version_reaches_every_producer(kind: str) -> None:
    """What a rank sets, producers see: those who wait for it, and those who connect later. It never goes backwards."""
    async with served(kind, **KNOBS) as network:
        feed, producer = network.feed(), network.producer()
        feed.set_version(3)
        assert await producer.version_after(None) == 3
        assert producer.version == feed.version == 3
        feed.set_version(2)
        assert feed.version == 3
        async with anyio.create_task_group() as tasks:
            seen: list[int] = []

            async def follow() -> None:
                while not seen or seen[-1] < 7:
                    seen.append(await producer.version_after(seen[-1] if seen else 3))

            tasks.start_soon(follow)
            for version in (4, 4, 5, 7):
                feed.set_version(version)
        assert seen[-1] == 7
        assert seen == sorted(set(seen))
        late = network.producer()
        assert await late.version_after(None) == 7
        for one in (producer, late):
            await one.aclose()
            with pytest.raises(ClosedResourceError):
                await one.version_after(7)


async def test_the_balancer_ends_with_its_last_producer(kind: str) -> None:
    """Who has ended puts no more; the others go on. What waits is drained, and the rank's iteration ends."""
    async with served(kind, **KNOBS) as network:
        feed, first, last = network.feed(), network.producer(), network.producer()
        await first.put(make_rollout(3, "a"))
        await last.put(make_rollout(3, "b"))
        await first.end()
        with pytest.raises(ClosedResourceError):
            await first.put(make_rollout(3, "late"))
        await first.end()  # may be called twice
        await last.put(make_rollout(3, "c"))
        await last.end()
        assert sorted(await _until_closed(feed)) == ["a", "b", "c"]
        await first.aclose()
        await last.aclose()


async def test_a_producers_end_waits_for_its_puts(kind: str) -> None:
    """A put that is parked when its producer ends is accepted first."""
    async with served(kind, **KNOBS, capacity=4) as network:
        producer = network.producer()
        for n in range(4):
            await producer.put(make_rollout(3, f"r{n}"))
        async with anyio.create_task_group() as tasks:
            for n in range(4, 8):
                tasks.start_soon(producer.put, make_rollout(3, f"r{n}"))
            await _until(producer, lambda statistics: statistics.blocked_puts == 4)
            tasks.start_soon(producer.end)
            assert sorted(await _until_closed(network.feed())) == [f"r{n}" for n in range(8)]
        await producer.aclose()


async def test_a_rank_ends_the_balancer(kind: str) -> None:
    """Its trainer has done all its steps: puts are refused, whoever makes them, and what waits is drained."""
    async with served(kind, **KNOBS) as network:
        feed, producer = network.feed(), network.producer()
        await producer.put(make_rollout(3, "a"))
        feed.end()
        with pytest.raises(ClosedResourceError):  # noqa: PT012 - the end takes a moment
            while True:
                await producer.put(make_rollout(3))
                await anyio.sleep(0.01)
        with pytest.raises(ClosedResourceError):
            async with producer.reserve():
                pass
        await producer.end()  # it has
        assert "a" in await _until_closed(feed)
        await producer.aclose()


async def test_a_slot_keeps_its_place_and_gives_it_back(kind: str) -> None:
    """What was not put is given back when the block is left, however it is left."""
    async with served(kind, **THROTTLED) as network:
        feed, producer = network.feed(), network.producer()
        feed.set_version(2)
        await producer.version_after(None)
        async with producer.reserve(8) as slot:
            assert (slot.version, slot.left) == (2, 8)
            assert (await producer.statistics()).reserved == 8
            await slot.put(make_rollout(3, "a"))
            with pytest.raises(RolloutError):
                await slot.put(make_rollout(3, "old", version=1))
            with pytest.raises(RolloutError):
                await slot.put(make_rollout(3, "a"))
            with pytest.raises(ValueError, match="8"):
                await slot.put_group([make_rollout(3, f"g{n}", group_id="g") for n in range(8)])
            await slot.put_group([make_rollout(3, f"g{n}", group_id="g") for n in range(2)])
            assert slot.left == 5
            statistics = await producer.statistics()
            assert (statistics.reserved, statistics.waiting) == (5, 3)
        with pytest.raises(ClosedResourceError):
            await slot.put(make_rollout(3, "z"))
        assert (await producer.statistics()).reserved == 0
        with suppress(KeyError):
            async with producer.reserve(5):
                raise KeyError("generation failed")
        assert (await producer.statistics()).reserved == 0
        await producer.aclose()


async def test_a_slot_says_when_its_rollout_would_be_too_old(kind: str) -> None:
    """Generation stops then, and another begins in its place: what was put would have been evicted."""
    async with served(kind, **THROTTLED) as network:
        feed, producer = network.feed(), network.producer()
        feed.set_version(2)
        await producer.version_after(None)
        stopped: list[int] = []

        async def work() -> None:
            async with producer.reserve() as slot:
                await slot.stale()
                stopped.append(producer.version or 0)
                await slot.put(make_rollout(3, "late"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await _until(producer, lambda statistics: statistics.reserved == 1)
            feed.set_version(3)
            await producer.version_after(2)
            assert not stopped
            async with producer.reserve() as young:
                with anyio.move_on_after(0.05):
                    await young.stale()
                    stopped.append(-2)
            feed.set_version(4)
        assert stopped == [4]
        statistics = await producer.statistics()
        assert (statistics.evicted["stale"], statistics.reserved) == (1, 0)
        await producer.aclose()


async def test_a_dead_producer_gives_back_what_it_had_reserved(kind: str) -> None:
    """Others begin in its place."""
    async with served(kind, **THROTTLED) as network:
        doomed, other = network.producer(), network.producer()
        await doomed.reserve(6).__aenter__()
        async with anyio.create_task_group() as tasks:
            admitted = anyio.Event()

            async def wait() -> None:
                async with other.reserve(8):
                    admitted.set()

            tasks.start_soon(wait)
            await _until(other, lambda statistics: statistics.blocked_reserves == 1)
            assert not admitted.is_set()
            kill(doomed)
            await admitted.wait()
        await other.aclose()
