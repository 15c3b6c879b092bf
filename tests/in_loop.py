"""A journal that writes in the event loop, so that virtual time cannot run away from its thread, and runs repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import pytest

from stream_balancer.host.journal import journal
from stream_balancer.host.journal.log import Change, Log
from stream_balancer.net.loops import in_loop
from stream_balancer.net.memory import LoopIo

__all__ = ["Disk", "journals_in_loop"]


class Disk:
    """Where journals are written."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """How long a write takes."""
        self.is_dead = False
        self.logs: list[_InLoop] = []

    def die(self) -> None:
        """Lose all changes that are not written, and write no more, like a killed process."""
        self.is_dead = True
        for log in self.logs:
            log.is_closed = True
            log.drop()


class _InLoop(Log):
    disk: Disk

    def start(self) -> None:
        self.is_closed, self._in_loop, self._waits = False, in_loop(), False
        self.disk.logs.append(self)

    def enqueue(self, change: Change) -> None:
        super().enqueue(change)
        if not self._waits:
            self._waits = True
            LoopIo().after(self.disk.delay_s, self._write_all)

    def _write_all(self) -> None:
        self._waits, was_closed = False, self.is_closed
        self.is_closed = True
        self._run()
        self.is_closed = was_closed

    def drop(self) -> None:
        while not self._queue.empty():
            self._queue.get()

    def close(self) -> None:
        self._run()
        super().close()


async def _run_here(job: Callable[..., Any], *args: object, **_: object) -> Any:
    await anyio.lowlevel.checkpoint()
    return job(*args)


@contextmanager
def journals_in_loop() -> Iterator[Disk]:
    """Within this context a journal has no thread."""
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "Log", type("Log", (_InLoop,), {"disk": disk}))
        patch.setattr(anyio.to_thread, "run_sync", _run_here)
        yield disk
