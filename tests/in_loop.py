"""A journal that writes in the event loop, so that virtual time cannot run away from its thread, and runs repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import pytest

from stream_balancer.host.journal import journal
from stream_balancer.host.journal.writer import Writer
from stream_balancer.net.memory import LoopIo

__all__ = ["Disk", "journals_in_loop"]


class Disk:
    """Where journals are written."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        """How long a write takes."""
        self.is_dead = False
        self.writers: list[_InLoop] = []

    def die(self) -> None:
        """What is not written yet is lost, and nothing of these journals is written any more: a killed process."""
        self.is_dead = True
        for writer in self.writers:
            writer.leaving = writer._closing = True
            writer._queue.clear()


class _IdleError(Exception):
    """The writer would wait for more to write."""


class _InLoop(Writer):
    disk: Disk

    def start(self) -> None:
        self.disk.writers.append(self)
        self._queued.wait = self._idle  # type: ignore[method-assign]

    def close(self) -> None:
        self._closing = True
        self._work()

    def _wake(self) -> None:
        LoopIo().after(self.disk.delay_s, self._write_all)

    def _write_all(self) -> None:
        super()._wake()
        self._work()

    def _work(self) -> None:
        with suppress(_IdleError):
            self._run()

    @staticmethod
    def _idle(timeout: float | None = None) -> bool:
        raise _IdleError


async def _run_here(job: Callable[..., Any], *args: object, **_: object) -> Any:
    await anyio.lowlevel.checkpoint()
    return job(*args)


@contextmanager
def journals_in_loop() -> Iterator[Disk]:
    """Every journal that is opened meanwhile has no thread."""
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "Writer", type("Writer", (_InLoop,), {"disk": disk}))
        patch.setattr(anyio.to_thread, "run_sync", _run_here)
        yield disk
