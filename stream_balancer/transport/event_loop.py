"""Into the event loop, and out of it: on asyncio and on trio; and a queue for who arrives there."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import trio

from stream_balancer.errors import to_raise

__all__ = ["Arrivals", "InLoop", "at_once", "beside_the_loop", "loop_caller"]

T = TypeVar("T")
InLoop: TypeAlias = Callable[[Callable[[], object]], None]
"""Runs a function in the event loop, in the order of the calls."""


def at_once(function: Callable[[], object]) -> None:
    """The :data:`InLoop` of a channel that lives in the event loop: it is there already."""
    function()


async def beside_the_loop(function: Callable[[], object], *, threads: bool) -> None:
    """Call what may block for a moment; it is not interrupted by a cancellation. ``threads`` False: here, because it
    belongs to the event loop."""
    if not threads:
        function()
        return
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))


def loop_caller() -> InLoop:
    """A function that runs a function in the current event loop soon, callable from any thread without waiting for it.

    Calls are run in order, whoever of this loop's callers makes them, and those that come together cost it one wake-up.
    Once the loop has ended they are dropped.
    """
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        loop = trio.lowlevel.current_trio_token()
    caller = _CALLERS.get(loop)
    if caller is None:
        caller = _CALLERS[loop] = _LoopCaller(loop)
    return caller


class _LoopCaller:
    """The one queue of calls into one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | trio.lowlevel.TrioToken) -> None:
        self._loop = weakref.ref(loop)  # or it would keep itself alive in _CALLERS
        self._calls: deque[Callable[[], object]] = deque()
        self._is_woken = False

    def __call__(self, function: Callable[[], object]) -> None:
        self._calls.append(function)
        if threading.current_thread() is threading.main_thread():
            self._wake()  # Ctrl-C may come between the flag and the wake-up, and nobody would wake the loop again
        elif not self._is_woken:
            self._is_woken = True
            self._wake()

    def _wake(self) -> None:
        loop = self._loop()
        with suppress(RuntimeError):  # it has ended
            if isinstance(loop, asyncio.AbstractEventLoop):
                loop.call_soon_threadsafe(self._run)
                return
            if loop is not None:
                loop.run_sync_soon(self._run)
                return
        self._calls.clear()
        self._is_woken = False

    def _run(self) -> None:
        # First of all: whoever sees it set has appended before this, and whoever does not wakes the loop again.
        self._is_woken = False
        try:
            for _ in range(len(self._calls)):  # what these add comes after the loop's other tasks
                self._calls.popleft()()
        finally:
            if self._calls:  # one has raised; or a wake-up too many
                self._wake()


_CALLERS: weakref.WeakKeyDictionary[Any, _LoopCaller] = weakref.WeakKeyDictionary()


class Arrivals(Generic[T]):
    """Who has arrived and was not accepted yet. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: list[T] = []
        self._news = anyio.Event()
        self._error: Exception | None = None

    def add(self, item: T) -> None:
        """Somebody has arrived."""
        self._waiting.append(item)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Nobody will arrive any more; the first reason counts."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> T:
        """The first who waits. If cancelled, nobody is lost. Raises what :meth:`fail` was given, once nobody waits."""
        await anyio.lowlevel.checkpoint()
        while not self._waiting:
            if self._error is not None:
                raise to_raise(self._error)
            self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.pop(0)
