"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``.

How many may begin is counted in :mod:`stream_balancer.core.throttle`; here is who gets them, in which order, and when a
place is given back. A slot's put is a put like any other (:mod:`stream_balancer.host.puts`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import anyio.lowlevel

from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle, check_reserve
from stream_balancer.errors import ClosedResourceError
from stream_balancer.host.lifetime import Lifetime
from stream_balancer.host.puts import Puts
from stream_balancer.host.versions import Versions
from stream_balancer.host.wakeups import Waiter, Wakeups
from stream_balancer.slots import Reservation, Slot
from stream_balancer.types import Rollout


class Reservations:
    """Admission of slots, first come first served."""

    def __init__(
        self, core: BalancerCore, lifetime: Lifetime, wakeups: Wakeups, throttle: Throttle, puts: Puts,
        versions: Versions,
    ) -> None:  # fmt: skip
        self._core = core
        self._lifetime = lifetime
        self._wakeups = wakeups
        self._throttle = throttle
        self._versions = versions
        self.puts = puts
        """Puts of slots go here."""

    @property
    def running(self) -> int:
        """Rollouts that may begin, or have begun, and were not put yet."""
        return self._throttle.running

    def reserve(self, count: int) -> Reservation:
        """A reservation that was not entered yet. Raises like :meth:`StreamBalancer.reserve`."""
        check_reserve(self._core.config, count)
        return Reservation(self, count)

    async def admit(self, count: int) -> Slot:
        """Wait until ``count`` more may begin. If cancelled, nothing was reserved."""
        self._lifetime.enter("reserve")
        await anyio.lowlevel.checkpoint()
        begun = self.begin(count)
        return begun if isinstance(begun, Slot) else await begun

    def begin(self, count: int) -> Slot | Coroutine[Any, Any, Slot]:
        """A slot; or a place in the queue, and what is returned must be awaited for it. Raises as :meth:`admit`."""
        # nobody overtakes those who wait
        if not self._wakeups.reserves and (slot := self._try_admit(count)) is not None:
            return slot
        waiter = Waiter()
        waiter.group_id, waiter.count = None, count
        rest = self._wakeups.reserves.wait(waiter, partial(self._try_admit, count))
        self._wakeups.wake_consumer()  # nobody may begin: the window may be as full as it gets
        return rest

    def resume(self, count: int, version: int) -> Slot | None:
        """A slot that was admitted at ``version``, and given back because its producer was taken for lost, which has
        generated on meanwhile. None if others have begun since, so that it would break the bound."""
        return self._try_admit(count, version)

    def _try_admit(self, count: int, began: int | None = None) -> Slot | None:
        if self._lifetime.closed or self._core.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")
        # who resumes was admitted under the knobs of that time
        if began is None:
            check_reserve(self._core.config, count)  # the knobs may have changed while it waited
        now = self._core.staleness.version or 0
        # never newer than now: a restarted controller may know an older version than the producer
        version = now if began is None else min(began, now)
        if self._throttle.room(self._core, version) < count:
            self._wakeups.wake_consumer()
            return None
        return Slot(self, self._throttle.admit(version, count), version, count)

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """See :class:`Admits`."""
        await self.puts.put(rollouts, complete=complete)

    async def stale(self, slot: Slot) -> None:
        """See :class:`Admits`."""
        while not self._core.staleness.is_too_old(slot.version):
            await self._versions.changed()

    def settle(self, slot: Slot, count: int) -> None:
        """See :class:`Admits`."""
        if count:
            self._throttle.settle(slot.number, count)
            self._wakeups.changed()
