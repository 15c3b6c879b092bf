"""The virtual clocks: exact, quick, and still woken by what should wake them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest
import trio

import stream_balancer as sb
from stream_balancer.testing import AutojumpEventLoop, make_rollout, virtual_time_backend


async def test_clock_starts_at_zero_and_lands_exactly_on_a_deadline() -> None:
    for _ in range(1_000):  # time stands still while tasks run
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0.0
    with anyio.move_on_after(30.0) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() == 30.0


def test_a_timer_is_exact_where_now_plus_the_time_to_it_is_not() -> None:
    start, deadline = 2.0**-20 + 2.0**-37, 2.0**16 + 1 + 2.0**-36
    assert start + (deadline - start) != deadline, "a tie, rounded twice to even"

    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(start)
        fired = loop.create_future()
        loop.call_at(deadline, lambda: fired.set_result(loop.time()))
        return float(await fired)

    with asyncio.Runner(loop_factory=AutojumpEventLoop) as runner:
        assert runner.run(main()) == deadline


async def test_timers_fire_in_order_and_cancelled_ones_do_not_hold_the_clock() -> None:
    order: list[tuple[float, float]] = []

    async def sleeper(delay: float) -> None:
        await anyio.sleep(delay)
        order.append((delay, anyio.current_time()))

    async with anyio.create_task_group() as tasks:
        for delay in (5.0, 1.0, 3.0):
            tasks.start_soon(sleeper, delay)
        with anyio.move_on_after(1_000.0):
            await anyio.sleep(2.0)
    assert order == [(1.0, 1.0), (3.0, 3.0), (5.0, 5.0)]
    assert anyio.current_time() == 5.0


def test_call_soon_threadsafe_wakes_a_loop_without_timers() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        thread = threading.Thread(target=partial(loop.call_soon_threadsafe, event.set), daemon=True)
        thread.start()
        await event.wait()
        thread.join()
        return loop.time()

    with asyncio.Runner(loop_factory=AutojumpEventLoop) as runner:
        assert runner.run(main()) == 0.0


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"no event loop is called 'curio'; use one of asyncio, trio"):
        virtual_time_backend("curio")


def test_a_balancer_in_trio_that_is_asyncios_guest_goes_by_trio() -> None:
    async def put_and_take() -> int:
        async with sb.StreamBalancer(sb.BalancerConfig(dp_size=1, batch_size=1)) as balancer:
            await balancer.put(make_rollout(3))
            balancer.end()
            return (await anext(balancer.batches())).num_rollouts

    async def host() -> int:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        wake = loop.call_soon_threadsafe
        trio.lowlevel.start_guest_run(put_and_take, run_sync_soon_threadsafe=wake, done_callback=done.set_result)
        return int((await done).unwrap())

    assert asyncio.run(host()) == 1
