"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``.

A slot is a place for rollouts that do not exist yet. How many may begin is counted in
:mod:`stream_balancer.core.throttle`; here is who gets them, in which order, and when a place is given back. A slot's
put is a put like any other (:mod:`stream_balancer.controller.puts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

import anyio.lowlevel

from stream_balancer.controller.lifetime import Lifetime
from stream_balancer.controller.puts import Puts
from stream_balancer.controller.wakeups import PendingReserve, Wakeups
from stream_balancer.core.admission import check_group
from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle, check_reserve
from stream_balancer.errors import ClosedResourceError, RolloutError
from stream_balancer.types import Rollout

__all__ = ["Reservation", "Reservations", "Slot"]


class Reservations:
    """Who may begin: admits slots, first come first served."""

    def __init__(
        self, core: BalancerCore, lifetime: Lifetime, wakeups: Wakeups, throttle: Throttle, puts: Puts
    ) -> None:
        self._core = core
        self._lifetime = lifetime
        self._wakeups = wakeups
        self._throttle = throttle
        self.puts = puts
        """Where slots put."""

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
        # nobody overtakes those who wait
        if not self._wakeups.reserves and (slot := self._try_admit(count)) is not None:
            return slot
        pending = PendingReserve(count)
        self._wakeups.reserves.join(pending)
        self._wakeups.wake_consumer()  # nobody may begin: the window may be as full as it gets
        return await self._wakeups.reserves.wait(pending, partial(self._try_admit, count))

    def _try_admit(self, count: int) -> Slot | None:
        if self._lifetime.closed or self._core.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")
        check_reserve(self._core.config, count)  # the knobs may have changed while it waited
        version = self._core.state.staleness.version or 0
        if self._throttle.room(self._core.state) < count:
            self._wakeups.wake_consumer()
            return None
        return Slot(self, self._throttle.admit(version, count), version, count)

    def settle(self, slot: int, count: int) -> None:
        """So many rollouts of a slot were put, or never will be."""
        if count:
            self._throttle.settle(slot, count)
            self._wakeups.step_done()


class Slot:
    """Places for ``count`` rollouts. Use it in the block that reserved it."""

    def __init__(self, reservations: Reservations, number: int, version: int, count: int) -> None:
        self._reservations, self._number, self._open = reservations, number, True
        self.version = version
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        self.left = count
        """Rollouts that may still be put."""

    async def put(self, rollout: Rollout) -> None:
        """As :meth:`StreamBalancer.put`, in the place that was kept. If it raises or is cancelled, the place is still
        kept. Raises ValueError for more rollouts than were reserved, RolloutError for one older than the slot."""
        await self._put([rollout])

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As :meth:`StreamBalancer.put_group`, in the places that were kept."""
        check_group(rollouts)
        await self._put(rollouts, closed(rollouts[0].group_id) if complete else None)

    def release(self) -> None:
        """Give back the places of rollouts that will not be put; leaving the block does it. May be called twice."""
        if self._open:
            self._open = False
            self._reservations.settle(self._number, self.left)
            self.left = 0

    async def _put(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> None:
        if not self._open:
            raise ClosedResourceError("put() on a slot whose 'async with' block was left: its place is given back")
        if len(rollouts) > self.left:
            raise ValueError(
                f"{len(rollouts)} rollouts for a slot with {self.left} places left. Reserve as many as are put: "
                "reserve(n)"
            )
        dated = [self._dated(rollout) for rollout in rollouts]
        self.left -= len(dated)  # a put under way keeps its places, also if the block is left meanwhile
        try:
            await self._reservations.puts.put(dated, size)
        except BaseException:
            self._take_back(len(dated))
            raise
        self._reservations.settle(self._number, len(dated))

    def _dated(self, rollout: Rollout) -> Rollout:
        if rollout.min_version is None:
            return replace(rollout, version=self.version)
        if rollout.min_version < self.version:
            raise RolloutError(
                f"rollout {rollout.rollout_id!r} began at version {rollout.min_version}, before its slot was admitted "
                f"(version {self.version}): the staleness bound would not hold. Reserve before generating"
            )
        return rollout

    def _take_back(self, count: int) -> None:
        """So many rollouts were not put after all."""
        if self._open:
            self.left += count
        else:
            self._reservations.settle(self._number, count)


class Reservation:
    """What :meth:`StreamBalancer.reserve` returns; enter it to wait for the slot."""

    def __init__(self, reservations: Reservations, count: int) -> None:
        self._reservations, self._count = reservations, count
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        """Wait until so many rollouts may begin, first come first served. If cancelled, nothing was reserved."""
        if self._slot is not None:
            raise ValueError("a reservation is entered once: call reserve() for every slot")
        self._slot = await self._reservations.admit(self._count)
        return self._slot

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self._slot.release()
