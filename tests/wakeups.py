"""How often an event loop wakes up, to assert that nothing polls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sniffio
import trio


class PassCount(trio.abc.Instrument):
    """Passes of an event loop; read it during or after the block."""

    def __init__(self) -> None:
        self.count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


@contextmanager
def count_wakeups() -> Iterator[PassCount]:
    """Count the passes of the running event loop. A test's own sleep costs one or two::

    with count_wakeups() as wakeups:
        await anyio.sleep(10_000)
    assert wakeups.count <= 4
    """
    passes = PassCount()
    if sniffio.current_async_library() == "trio":
        trio.lowlevel.add_instrument(passes)
        try:
            yield passes
        finally:
            trio.lowlevel.remove_instrument(passes)
        return
    selector: Any = getattr(asyncio.get_running_loop(), "_selector")  # noqa: B009 - asyncio has no name for it
    select = selector.select

    def counted(timeout: float | None = None) -> Any:
        passes.count += 1
        return select(timeout)

    selector.select = counted
    try:
        yield passes
    finally:
        del selector.select
