"""Waiters for the next policy version, and subscribers that each new one is passed on to. No version is decided on
here.

An :class:`~stream_balancer.core.observer.Observer`: a version comes by ``set_version()``, with a checkpoint, or out of
a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel

from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.lifetime import Lifetime


class Versions(Observer):
    """The policy version of one balancer, as it changes. Belongs to the event loop."""

    def __init__(self, core: BalancerCore, lifetime: Lifetime) -> None:
        self._core, self._lifetime = core, lifetime
        self._changed = anyio.Event()
        self._callbacks: list[Callable[[], object]] = []

    @property
    def current(self) -> int | None:
        """The one last set; None before the first."""
        return self._core.state.staleness.version

    async def after(self, version: int | None) -> int:
        """See :meth:`StreamBalancer.version_after`."""
        self._lifetime.enter("version_after")
        await anyio.lowlevel.checkpoint()
        # in a loop: a checkpoint that is loaded wakes all, perhaps with no newer version
        while (current := self.current) is None or (version is not None and current <= version):
            self._lifetime.check_open("version_after")
            await self._changed.wait()
        return current

    @contextmanager
    def subscribed(self, callback: Callable[[], object]) -> Iterator[None]:
        """Within the block ``callback()`` is called if there is a version, and for every later one."""
        self._callbacks.append(callback)
        if self.current is not None:
            callback()
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    def version_set(self, version: int) -> None:
        self.wake()
        # a copy: a callback may end a subscription
        for callback in [*self._callbacks]:
            callback()

    def restored(self, snapshot: Snapshot) -> None:
        if self.current is not None:
            self.version_set(self.current)

    def wake(self) -> None:
        """Waiters look again; they raise ClosedResourceError once the balancer is closed."""
        self._changed.set()
        self._changed = anyio.Event()
