"""From any thread into the event loop, on asyncio and on trio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import trio

__all__ = ["loop_caller"]


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
