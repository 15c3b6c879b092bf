"""The way into an event loop: in order, one wake-up for calls that come together, nothing lost on the way."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
import trio
from guard import GUARD_S

from stream_balancer.transport.event_loop import loop_caller

Backend = Literal["asyncio", "trio"]
both = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def count_wake_ups(patch: pytest.MonkeyPatch) -> list[None]:
    """Of the running loop, from now on."""
    try:
        owner, name = type(asyncio.get_running_loop()), "call_soon_threadsafe"
    except RuntimeError:
        owner, name = trio.lowlevel.TrioToken, "run_sync_soon"
    wake_ups: list[None] = []
    wake = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        wake_ups.append(None)
        return wake(*args, **options)

    patch.setattr(owner, name, counted)
    return wake_ups


def in_a_thread(function: Callable[[], object]) -> None:
    """While the loop stands still."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


@both
def test_calls_that_come_together_wake_the_loop_once(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each comes from a caller of its own, as the replies to many puts do."""
    seen: list[int] = []

    async def main() -> None:
        wake_ups = count_wake_ups(monkeypatch)
        calls = [(loop_caller(), partial(seen.append, n)) for n in range(100)]
        in_a_thread(lambda: [in_loop(call) for in_loop, call in calls])
        while len(seen) < 100:
            await anyio.lowlevel.checkpoint()
        assert len(wake_ups) == 1
        loop_caller()(partial(seen.append, 100))
        while len(seen) < 101:
            await anyio.lowlevel.checkpoint()

    anyio.run(main, backend=backend)
    assert seen == list(range(101))


@both
def test_a_call_that_ctrl_c_cuts_off_does_not_hold_up_the_next(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread, which alone gets interrupts, may be stopped just before it wakes the loop."""
    seen: list[int] = []

    async def main() -> None:
        in_loop = loop_caller()
        with monkeypatch.context() as patch:
            patch.setattr(type(in_loop), "_wake", interrupted)
            with pytest.raises(KeyboardInterrupt):
                in_loop(partial(seen.append, 0))
        in_a_thread(partial(in_loop, partial(seen.append, 1)))
        with anyio.fail_after(GUARD_S):
            while len(seen) < 2:
                await anyio.lowlevel.checkpoint()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    anyio.run(main, backend=backend)
    assert seen == [0, 1]


@both
def test_calls_of_many_threads_all_come_each_threads_in_order(backend: Backend) -> None:
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        in_loop, done = loop_caller(), anyio.Event()

        def call(thread: int) -> None:
            for n in range(500):
                in_loop(partial(seen.append, (thread, n)))

        def last() -> None:
            for thread in threads:
                thread.join()
            in_loop(done.set)

        threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        await anyio.to_thread.run_sync(last)
        await done.wait()

    anyio.run(main, backend=backend)
    assert all([n for t, n in seen if t == thread] == list(range(500)) for thread in range(4))


def test_a_call_that_raises_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        in_loop, done = loop_caller(), asyncio.Event()
        in_loop(lambda: 1 / 0)
        in_loop(done.set)
        await done.wait()
        assert len(problems) == 1

    asyncio.run(main())


@both
def test_calls_into_a_loop_that_has_ended_are_dropped_and_keep_nothing_alive(backend: Backend) -> None:
    async def main() -> Any:
        return loop_caller()

    in_loop = anyio.run(main, backend=backend)
    for _ in range(2):
        call = partial(print)
        in_loop(call)
        gone = weakref.ref(call)
        del call
        gc.collect()
        assert gone() is None
