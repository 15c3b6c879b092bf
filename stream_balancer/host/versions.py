"""Waiters for the next policy version. No version is decided on here.

An :class:`~stream_balancer.core.observer.Observer`: a version comes by ``set_version()``, with a checkpoint, or out of
a journal.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.lifetime import Lifetime


class Versions(Observer):
    """The policy version of one balancer, as it changes. Belongs to the event loop."""

    def __init__(self, core: BalancerCore, lifetime: Lifetime) -> None:
        self._core, self._lifetime = core, lifetime
        self._changed = anyio.Event()

    @property
    def current(self) -> int | None:
        """The one last set; None before the first."""
        return self._core.staleness.version

    async def after(self, version: int | None) -> int:
        """See :meth:`StreamBalancer.version_after`."""
        self._lifetime.enter("version_after")
        await anyio.lowlevel.checkpoint()
        # in a loop: a checkpoint that is loaded wakes all, perhaps with no newer version
        while (current := self.current) is None or (version is not None and current <= version):
            await self.changed()
        return current

    async def changed(self) -> None:
        """Wait for a version, or for other knobs."""
        self._lifetime.check_open("version_after")
        await self._changed.wait()

    def version_set(self, version: int) -> None:
        self.wake()

    def reconfigured(self, before: BalancerConfig) -> None:
        self.wake()

    def restored(self, snapshot: Snapshot) -> None:
        self.wake()

    def wake(self) -> None:
        """Waiters look again; they raise ClosedResourceError once the balancer is closed."""
        self._changed.set()
        self._changed = anyio.Event()
