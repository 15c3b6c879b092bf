"""Every way to put is one way: accept= first, then room, and cancelled at either it was not accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from helpers import attend, fill, settle
from invariants import verify

import stream_balancer as sb
from stream_balancer.testing import MemoryNetwork, make_rollout

WAYS = ["put", "put_group", "slot", "slot_group", "producer", "producer_group"]
LATE = ["late0", "late1"]


@asynccontextmanager
async def full_balancer(way: str) -> AsyncIterator[tuple[sb.StreamBalancer, Callable[[], Awaitable[None]]]]:
    """A balancer without room, whose ``accept=`` takes 10 s for late rollouts; and a put of such, in this way."""

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        await anyio.sleep(10.0 if rollouts[0].rollout_id in LATE else 0.0)
        return True

    group = way.endswith("group")
    rollouts = [make_rollout(3, name, group_id="g" if group else None) for name in LATE[: 1 + group]]
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=4, capacity=4)
    async with (
        sb.StreamBalancer(config, accept=accept) as balancer,
        MemoryNetwork(dp_size=2) as transport,
        anyio.create_task_group() as tasks,
        balancer.reserve(2) as slot,
    ):
        tasks.start_soon(attend, balancer, transport)
        by = {"put": balancer, "slot": slot, "producer": sb.connect(transport.connect_producer())}[
            way.partition("_")[0]
        ]
        await fill(balancer, [3] * 4)
        yield balancer, (lambda: by.put_group(rollouts)) if group else (lambda: by.put(rollouts[0]))
        tasks.cancel_scope.cancel()


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
        assert [r.rollout_id for r in balancer.snapshot().waiting] == LATE[: 1 + way.endswith("group")]
        assert balancer.statistics().blocked_puts == 0


@pytest.mark.parametrize("groups", [[], ["g", "h"], ["g", None]])
async def test_a_group_from_elsewhere_that_is_none_is_refused(groups: list[str | None]) -> None:
    """put_group() checks where it is called; a message from elsewhere may say anything."""
    async with sb.StreamBalancer(sb.BalancerConfig(dp_size=2, batch_size=4)) as balancer:
        with pytest.raises(sb.errors.RolloutError, match=r"put_group\(\) takes"):
            await balancer.parts.puts.put([make_rollout(3, group_id=group) for group in groups])
        assert balancer.statistics().accepted == 0


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
