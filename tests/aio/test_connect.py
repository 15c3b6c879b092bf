"""Puts from elsewhere, over the memory twin, and every other way to put: accept= first, then room, and cancelled at
either it was not accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from helpers import attend, fill, settle, waiting
from invariants import verify
from served import attended
from test_cancellation import config

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout

WAYS = ["put", "put_group", "slot", "slot_group", "producer", "producer_group"]
LATE = ["late0", "late1"]


async def test_the_controller_checks_a_group_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer may be a program of another make."""
    monkeypatch.setattr("stream_balancer.client.producer.check_group", lambda _: None)
    async with attended(sb.StreamBalancer(config())) as (balancer, transport, _):
        producer = sb.connect(transport.connect_producer())
        for group in ([make_rollout(3, "a", group_id="g"), make_rollout(3, "b", group_id="h")], [make_rollout(3, "a")]):
            with pytest.raises(sb.errors.RolloutError, match="siblings that share one group_id"):
                await producer.put_group(group)
        assert balancer.statistics().accepted == 0
        await producer.put_group([make_rollout(3, name, group_id="g") for name in "ab"])
        assert balancer.statistics().accepted == 2


async def test_a_put_that_waited_for_room_waits_on_for_who_attends_next() -> None:
    async with sb.StreamBalancer(config()) as balancer, MemoryNetwork(dp_size=2) as transport:
        producer = sb.connect(transport.connect_producer())
        async with anyio.create_task_group() as puts:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attend, balancer, transport)
                for n in range(6):
                    puts.start_soon(producer.put, make_rollout(3, str(n)))
                await settle()
                assert balancer.statistics().blocked_puts == 2
                tasks.cancel_scope.cancel()
            assert balancer.statistics().blocked_puts == 0
            await anext(balancer.batches())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attend, balancer, transport)
                await settle()
                assert len(waiting(balancer)) == 2
                tasks.cancel_scope.cancel()


# -- every way to put --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def full_balancer(way: str) -> AsyncIterator[tuple[sb.StreamBalancer, Callable[[], Awaitable[None]]]]:
    """A balancer without room, whose ``accept=`` takes 10 s for late rollouts; and a put of such, in this way."""

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        await anyio.sleep(10.0 if rollouts[0].rollout_id in LATE else 0.0)
        return True

    by, group = way.partition("_")[::2]
    rollouts = [make_rollout(3, name, group_id="g" if group else None) for name in LATE[: 2 if group else 1]]
    async with (
        attended(sb.StreamBalancer(config(), accept=accept)) as (balancer, transport, _),
        balancer.reserve(2) as slot,
    ):
        to = {"put": balancer, "slot": slot, "producer": sb.connect(transport.connect_producer())}[by]
        await fill(balancer, [3] * 4)
        yield balancer, (lambda: to.put_group(rollouts)) if group else (lambda: to.put(rollouts[0]))


@pytest.mark.parametrize("way", WAYS)
async def test_it_is_filtered_and_then_waits_for_room(way: str) -> None:
    async with full_balancer(way) as (balancer, put), anyio.create_task_group() as tasks:
        tasks.start_soon(put)
        await anyio.sleep(9.0)
        assert balancer.statistics().blocked_puts == 0
        await anyio.sleep(2.0)
        assert balancer.statistics().blocked_puts == 1
        assert balancer.statistics().accepted == 4
        await anext(balancer.batches())
        await settle()
        assert waiting(balancer) == LATE[: 1 + way.endswith("group")]
        assert balancer.statistics().blocked_puts == 0


@pytest.mark.parametrize("after_s", [5.0, 15.0])
@pytest.mark.parametrize("way", WAYS)
async def test_cancelled_on_the_way_it_was_not_accepted(way: str, after_s: float) -> None:
    async with full_balancer(way) as (balancer, put):
        with anyio.move_on_after(after_s):
            await put()
        await settle()
        await anext(balancer.batches())
        await anyio.sleep(20.0)
        stats = balancer.statistics()
        assert (stats.accepted, stats.waiting, stats.blocked_puts, stats.reserved) == (4, 0, 0, 2)
        verify(balancer.parts.core)
