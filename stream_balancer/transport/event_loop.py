"""Into the event loop, and out of it: on asyncio and on trio; and a queue for who arrives there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

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

    Calls are run in order. Once the loop has ended they are dropped.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        token = trio.lowlevel.current_trio_token()

        def call_trio(function: Callable[[], object]) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(function)

        return call_trio

    def call_asyncio(function: Callable[[], object]) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call_asyncio


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
