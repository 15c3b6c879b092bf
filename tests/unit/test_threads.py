"""The wrong thread, the wrong process, an event loop that would be blocked: refused at once, with what to do."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest
from helpers import config

import stream_balancer as sb
from stream_balancer.testing import BACKENDS, MemoryNetwork, make_rollout, make_rollouts
from stream_balancer.transport.threads import ThreadEvent


def test_an_event_wakes_all_who_wait_and_those_who_come_later() -> None:
    event = ThreadEvent()
    assert not event.wait(0)
    threads = [threading.Thread(target=event.wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    event.set()
    event.set()
    for thread in threads:
        thread.join()
    assert event.is_set()
    assert event.wait()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocking_in_an_event_loop_is_refused(backend: Any) -> None:
    with sb.blocking(config(), backend=backend) as balancer:
        batches = balancer.batches()
        transport = MemoryNetwork(dp_size=1)
        feed, producer = (
            sb.RankFeed(transport.connect(0)),
            sb.BlockingProducer(sb.connect(transport.connect_producer())),
        )
        uses: list[tuple[Callable[[], object], str]] = [
            (lambda: sb.blocking(config()).__enter__(), "async with sb.StreamBalancer"),
            (lambda: balancer.put(make_rollout(2)), "async with sb.StreamBalancer"),
            (lambda: next(batches), "async with sb.StreamBalancer"),
            (balancer.statistics, "asyncio.to_thread"),
            (lambda: next(feed), "async for"),
            (lambda: producer.put(make_rollout(2)), "await put"),
            (lambda: producer.put_nowait(make_rollout(2)), "await put"),
        ]

        async def try_all() -> None:
            for use, instead in uses:
                with pytest.raises(RuntimeError, match=rf"runs an event loop \({backend}\).*{instead}"):
                    use()
            await anyio.to_thread.run_sync(balancer.put, make_rollout(2))

        anyio.run(try_all, backend=backend)
        assert balancer.statistics().waiting == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_async_balancer_in_another_thread_is_refused_and_unchanged(backend: Any) -> None:
    async def main() -> None:
        async with sb.StreamBalancer(config()) as balancer:
            for rollout in make_rollouts([2] * 8):
                await balancer.put(rollout)
            batch = await anext(balancer.batches(auto_ack=False))
            uses: list[Callable[[], object]] = [
                lambda: balancer.put_nowait(make_rollout(2)),
                lambda: balancer.acknowledge(batch.step),
                lambda: balancer.acknowledge_through(batch.step),
                lambda: balancer.nack(batch.step),
                lambda: balancer.set_version(7),
                lambda: balancer.reconfigure(window=16),
                lambda: balancer.load_state_dict({}),
                lambda: anyio.run(balancer.put, make_rollout(2)),
                lambda: anyio.run(balancer.aclose),
                balancer.end,
                balancer.batches,
                balancer.statistics,
                balancer.state_dict,
            ]
            for use in uses:
                with pytest.raises(RuntimeError, match=r"another thread.*sb.blocking\(config\).*sb.connect"):
                    await anyio.to_thread.run_sync(use)
            after = balancer.statistics()
            assert (after.waiting, after.in_flight, after.version, balancer.ended) == (4, 4, None, False)

    anyio.run(main, backend=backend)


def test_a_closed_balancer_may_be_read_anywhere() -> None:
    balancer = sb.StreamBalancer(config())

    async def main() -> int:
        async with balancer:
            await balancer.put(make_rollout(2))
        return balancer.statistics().waiting

    assert anyio.run(main) == 1
    thread = threading.Thread(target=lambda: waiting.append(anyio.run(read)), daemon=True)
    waiting: list[int] = []

    async def read() -> int:
        return balancer.statistics().waiting

    thread.start()
    thread.join()
    assert waiting == [1]


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy])
def test_what_belongs_to_a_process_says_what_to_do_in_another(how: Callable[[object], object]) -> None:
    transport = MemoryNetwork(dp_size=1)
    feed = sb.RankFeed(transport.connect(0))
    producer = sb.Producer(transport.connect_producer())
    for one, instead in [
        (sb.StreamBalancer(config()), "sb.connect"),
        (sb.blocking(config()), "sb.connect"),
        (producer, "sb.connect"),
        (sb.BlockingProducer(producer), "sb.connect"),
        (feed, "RankFeed"),
    ]:
        with pytest.raises(TypeError, match=f"{type(one).__name__} belongs to the process.*{instead}"):
            how(one)
