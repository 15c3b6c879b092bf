"""Into the event loop: from any thread, on asyncio and on trio; and a queue for who arrives there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
import trio

from stream_balancer.errors import to_raise

__all__ = ["Arrivals", "loop_caller"]

T = TypeVar("T")


def loop_caller() -> Callable[[Callable[[], object]], None]:
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
