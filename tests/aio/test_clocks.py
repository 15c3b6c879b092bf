"""The virtual clocks: exact, quick, and still woken by what should wake them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

from stream_balancer.testing import AutojumpEventLoop, count_wakeups, virtual_time_backend


async def test_clock_starts_at_zero_and_lands_exactly_on_a_deadline() -> None:
    assert anyio.current_time() == 0.0
    with anyio.move_on_after(30.0) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert anyio.current_time() == 30.0


@pytest.mark.parametrize("offset", [0.1, 1 / 3, 86_399.7, 1e6 + 0.3])
async def test_clock_lands_exactly_on_absolute_times(offset: float) -> None:
    await anyio.sleep(offset)
    target = anyio.current_time() + 0.7
    await anyio.sleep_until(target)
    assert anyio.current_time() == target


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


@pytest.mark.slow
async def test_31_000_virtual_seconds_in_as_many_sleeps() -> None:
    for _ in range(31_000):
        await anyio.sleep(1.0)
    assert anyio.current_time() == 31_000.0


async def test_a_year_passes() -> None:
    """Past the day that asyncio sleeps at most, and past where a nanosecond is rounded away."""
    await anyio.sleep(365 * 86_400.0)
    await anyio.sleep(0.001)
    assert anyio.current_time() == pytest.approx(365 * 86_400.0 + 0.001, rel=1e-15)


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


async def test_time_stands_still_while_tasks_run() -> None:
    for _ in range(1_000):
        await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0.0


async def test_idle_means_no_wakeups() -> None:
    event = anyio.Event()

    async def setter() -> None:
        await anyio.sleep(10_000.0)
        event.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setter)
        await anyio.lowlevel.checkpoint()
        with count_wakeups() as wakeups:
            await event.wait()
    assert 1 <= wakeups.count <= 4


async def test_polling_is_counted() -> None:
    with count_wakeups() as wakeups:
        for _ in range(100):
            await anyio.sleep(0.01)
    counted = wakeups.count
    assert counted >= 100
    await anyio.sleep(1.0)
    assert wakeups.count == counted, "counts nothing after the block"


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


@pytest.mark.parametrize("name", ["asyncio", "trio"])
def test_grace_lets_a_thread_in_before_the_clock_jumps(name: str) -> None:
    release = threading.Event()

    async def main() -> tuple[bool, float]:
        done = anyio.Event()

        def work(wake: Any) -> None:
            release.wait()
            wake()

        if name == "asyncio":
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, done.set)
        else:
            wake = partial(trio.lowlevel.current_trio_token().run_sync_soon, done.set)
        thread = threading.Thread(target=work, args=(wake,), daemon=True)
        thread.start()
        with anyio.move_on_after(3_600.0):
            release.set()
            await done.wait()
        thread.join()
        return done.is_set(), anyio.current_time()

    backend, options = virtual_time_backend(name, grace_s=5.0)
    assert anyio.run(main, backend=backend, backend_options=options) == (True, 0.0)


def test_count_wakeups_refuses_a_loop_it_cannot_look_into() -> None:
    async def main() -> None:
        with count_wakeups():
            pass

    with pytest.raises(RuntimeError, match="Run the test on an AutojumpEventLoop"):
        asyncio.run(main())


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match=r"no event loop is called 'curio'; use one of asyncio, trio"):
        virtual_time_backend("curio")


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
def test_bad_grace_is_refused(grace_s: float) -> None:
    with pytest.raises(ValueError, match="grace_s must be a finite number >= 0"):
        AutojumpEventLoop(grace_s)
