"""reserve(): slots for rollouts still to be generated, in virtual time on both loops."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import anyio
import helpers
import pytest
from anyio.lowlevel import checkpoint
from helpers import settle
from wakeups import count_wakeups

import stream_balancer as sb
from stream_balancer.testing import make_rollout

config = partial(helpers.config, window=8, staleness=sb.Staleness(max_versions=1))


async def test_reservers_are_admitted_in_order_and_do_not_poll() -> None:
    async with sb.StreamBalancer(config(), report_after_s=math.inf) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        slots: list[int] = []
        leave = anyio.Event()

        async def work(number: int) -> None:
            async with balancer.reserve():
                slots.append(number)
                await leave.wait()

        for number in range(12):
            tasks.start_soon(work, number)
            await settle()
        stats = balancer.statistics()
        assert (stats.reserved, stats.blocked_reserves) == (8, 4)
        with count_wakeups() as wakeups:
            await anyio.sleep(80_000.0)
        assert wakeups.count <= 4
        leave.set()
        await settle()
        assert slots == list(range(12))
        assert balancer.statistics().reserved == 0


async def test_a_slot_hears_that_rollouts_may_be_less_old_from_now_on() -> None:
    async with sb.StreamBalancer(config(staleness={"max_versions": 4})) as balancer:
        balancer.set_version(0)
        done: list[sb.Slot] = []
        async with balancer.reserve() as slot, anyio.create_task_group() as tasks:
            balancer.set_version(2)

            async def wait() -> None:
                await slot.stale()
                done.append(slot)

            tasks.start_soon(wait)
            await settle()
            assert not done
            balancer.reconfigure(staleness={"max_versions": 1})
            await settle()
            assert done
            tasks.cancel_scope.cancel()


async def test_statistics_say_how_long_rollouts_waited_for_room_and_for_a_slot() -> None:
    """Of tasks that wait still, that have what they waited for, and that were cancelled."""
    waiting = partial(make_rollout, 3, version=0)
    async with sb.StreamBalancer(config(capacity=8)) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        for n in range(8):
            await balancer.put(waiting(f"r{n}"))
        assert balancer.statistics().producer_idle_seconds == {"put": 0.0, "reserve": 0.0}
        with anyio.move_on_after(3.0):
            await balancer.put_group([waiting(f"a{n}", group_id="a") for n in range(4)])
        tasks.start_soon(balancer.put, waiting("b"))
        tasks.start_soon(balancer.reserve(2).__aenter__)
        await anyio.sleep(5.0)
        assert balancer.statistics().producer_idle_seconds == pytest.approx({"put": 3.0 * 4 + 5.0, "reserve": 5.0 * 2})
        await anext(balancer.batches())
        await settle()
        assert balancer.statistics().blocked_puts == 0
        await anyio.sleep(7.0)
        idle_s = balancer.statistics().producer_idle_seconds
        assert idle_s["put"] == pytest.approx(17.0, abs=0.5)
        assert "17.0 s idle in put()" in str(balancer.statistics())
        tasks.cancel_scope.cancel()


async def test_a_reserver_that_waits_wakes_a_trainer_that_waits_for_the_window() -> None:
    """Nobody generates and nobody may begin, so the window is as full as it gets."""
    async with sb.StreamBalancer(config()) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        for n in range(4):
            await balancer.put(make_rollout(3, f"r{n}", version=0))
        tasks.start_soon(anext, balancer.batches())
        await settle()
        assert balancer.statistics().in_flight == 0
        tasks.start_soon(balancer.reserve(8).__aenter__)
        await settle()
        assert balancer.statistics().in_flight == 4
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("passes", range(10))
async def test_a_cancelled_reserver_passes_its_turn_on(passes: int) -> None:
    async with sb.StreamBalancer(config(batch_size=2, window=2, staleness=sb.Staleness(max_versions=0))) as balancer:
        balancer.set_version(0)
        first = balancer.reserve(2)
        await first.__aenter__()
        got: list[str] = []

        async def work(name: str) -> None:
            async with balancer.reserve(2):
                got.append(name)

        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as victim:
                victim.start_soon(work, "victim")
                await settle()
                tasks.start_soon(work, "next")
                await settle()
                await first.__aexit__(None, None, None)
                for _ in range(passes):
                    await checkpoint()
                victim.cancel_scope.cancel()
            with anyio.fail_after(1000):
                while "next" not in got:
                    await checkpoint()
        stats = balancer.statistics()
        assert (stats.reserved, stats.blocked_reserves) == (0, 0)


async def test_a_slot_dates_its_rollouts() -> None:
    async with sb.StreamBalancer(config(staleness=sb.Staleness(max_versions=3))) as balancer:
        balancer.set_version(5)
        async with balancer.reserve(3) as slot:
            balancer.set_version(6)
            assert slot.version == 5
            await slot.put(sb.Rollout(tokens={"input_ids": [1]}, rollout_id="plain"))
            await slot.put(sb.Rollout(tokens={"input_ids": [1]}, rollout_id="newer", version=(5, 6)))
            with pytest.raises(sb.errors.RolloutError, match="began at version 4, before its slot"):
                await slot.put(sb.Rollout(tokens={"input_ids": [1]}, rollout_id="older", version=4))
            await slot.put(sb.Rollout(tokens={"input_ids": [1]}, rollout_id="last", version=6))  # the place was kept
            with pytest.raises(ValueError, match="0 places left"):
                await slot.put(make_rollout(3, "more"))
        assert [r.version for r in balancer.snapshot().waiting] == [5, (5, 6), 6]


async def test_groups_that_lack_a_sibling_do_not_hold_up_those_who_would_begin_others() -> None:
    """A worker that dies leaves a group short; nothing could leave to make room."""
    async with sb.StreamBalancer(
        config(groups=sb.Groups(size=4), capacity=8, staleness=sb.Staleness(max_versions=None))
    ) as balancer:
        for group in "abc":
            with anyio.fail_after(10.0):
                async with balancer.reserve(4) as slot:
                    for _ in range(3):
                        await slot.put(sb.Rollout(tokens={"input_ids": [1]}, group_id=group))
        assert balancer.statistics().waiting == 9


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_put_that_waits_while_its_slot_is_left_keeps_its_place(cancelled: bool) -> None:
    """It is accepted once there is room, and until then nobody else may begin in its place."""
    async with sb.StreamBalancer(config(window=4, capacity=4)) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        for n in range(4):
            await balancer.put(make_rollout(3, f"r{n}", version=0))
        scope = anyio.CancelScope()

        async def put(slot: Any) -> None:
            with scope:
                await slot.put(make_rollout(3, "late"))

        async with balancer.reserve(2) as slot:
            tasks.start_soon(put, slot)
            await settle()
        assert balancer.statistics().reserved == 1
        if cancelled:
            scope.cancel()
        else:
            await anext(balancer.batches())
        await settle()
        stats = balancer.statistics()
        assert (stats.reserved, stats.waiting, stats.accepted) == ((0, 4, 4) if cancelled else (0, 1, 5))
        with pytest.raises(sb.errors.ClosedResourceError, match="whose 'with' block was left"):
            await slot.put(make_rollout(3))


async def test_slots_that_are_given_back_together_send_no_short_batch_past_who_is_admitted_then() -> None:
    """As when a worker dies. The reserver that waits is admitted, so what waits leaves with what it generates: a short
    batch would make one version more than the bound allows for."""
    async with sb.StreamBalancer(config()) as balancer, anyio.create_task_group() as tasks:
        balancer.set_version(0)
        batches = balancer.batches()
        first, other = await balancer.reserve(4).__aenter__(), await balancer.reserve(4).__aenter__()
        for n in range(3):
            await first.put(make_rollout(3, f"r{n}"))
        sizes: list[int] = []

        async def train() -> None:
            sizes.append((await anext(batches)).num_rollouts)

        async def late() -> None:
            async with balancer.reserve(5) as slot:
                await anyio.sleep(1)
                for n in range(5):
                    await slot.put(make_rollout(3, f"late{n}"))

        tasks.start_soon(late)
        await settle()
        other.release()
        first.release()
        tasks.start_soon(train)
        await settle()
        assert sizes == []
        await anyio.sleep(2)
        assert sizes == [4]
