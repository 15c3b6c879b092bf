"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``.

A slot is a place for rollouts that do not exist yet. How many may begin is counted in
:mod:`stream_balancer.core.throttle`; here is who gets them, in which order, and when a place is given back. A slot's
put is a put like any other (:mod:`stream_balancer.controller.puts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import anyio.lowlevel

from stream_balancer.controller.lifetime import Lifetime
from stream_balancer.controller.puts import PendingPut, Puts, Stage
from stream_balancer.controller.wakeups import PendingReserve, Wakeups
from stream_balancer.core.admission import check_group
from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import SLOT_CLOSED, TOO_MANY, Throttle, check_reserve, dated
from stream_balancer.errors import ClosedResourceError
from stream_balancer.types import Rollout

__all__ = ["Reservation", "Reservations", "Slot", "SlotPut"]


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
        begun = self.begin(count)
        return begun if isinstance(begun, Slot) else await self.finish(begun)

    def begin(self, count: int) -> Slot | PendingReserve:
        """A slot; or a place in the queue, and then :meth:`finish` must follow. Raises as :meth:`admit`."""
        # nobody overtakes those who wait
        if not self._wakeups.reserves and (slot := self._try_admit(count)) is not None:
            return slot
        pending = PendingReserve(count)
        self._wakeups.reserves.join(pending)
        self._wakeups.wake_consumer()  # nobody may begin: the window may be as full as it gets
        return pending

    async def finish(self, pending: PendingReserve) -> Slot:
        """Wait until it is admitted. If cancelled, nothing was reserved."""
        return await self._wakeups.reserves.wait(pending, partial(self._try_admit, pending.count))

    def resume(self, count: int, version: int) -> Slot | None:
        """A slot that was admitted at ``version``, and given back because its producer was taken for lost, which has
        generated on meanwhile. None if others have begun since, so that it would break the bound."""
        return self._try_admit(count, version)

    def _try_admit(self, count: int, began: int | None = None) -> Slot | None:
        if self._lifetime.closed or self._core.ended:
            raise ClosedResourceError("reserve() after end() or aclose(): the balancer takes no more rollouts")
        if began is None:
            check_reserve(self._core.config, count)  # the knobs may have changed while it waited
        now = self._core.state.staleness.version or 0
        version = now if began is None else min(began, now)
        if self._throttle.room(self._core.state, version) < count:
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

    def begin(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> SlotPut:
        """As :meth:`Puts.begin`, in the places that were kept: for producers in other processes."""
        with self._holding(rollouts) as held:
            pending = self._reservations.puts.begin(held, size)
        return SlotPut(self, pending, len(held))

    async def _put(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> None:
        with self._holding(rollouts) as held:
            await self._reservations.puts.put(held, size)
        self.settle(len(held))

    @contextmanager
    def _holding(self, rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
        """A put under way keeps its places, also if the block is left meanwhile; if it is not accepted, the slot gets
        them back."""
        if not self._open:
            raise ClosedResourceError(SLOT_CLOSED)
        if len(rollouts) > self.left:
            raise ValueError(TOO_MANY.format(count=len(rollouts), left=self.left))
        held = [dated(rollout, self.version) for rollout in rollouts]
        self.left -= len(held)
        try:
            yield held
        except BaseException:
            self.take_back(len(held))
            raise

    def settle(self, count: int) -> None:
        """So many of the rollouts that were put are accepted."""
        self._reservations.settle(self._number, count)

    def take_back(self, count: int) -> None:
        """So many were not, after all."""
        if self._open:
            self.left += count
        else:
            self.settle(count)


class SlotPut:
    """A put in a slot that has gone as far as it can without waiting."""

    def __init__(self, slot: Slot, pending: PendingPut, count: int) -> None:
        self._slot, self._pending, self._count = slot, pending, count
        if pending.stage == "done":
            slot.settle(count)

    @property
    def stage(self) -> Stage:
        """As :attr:`PendingPut.stage`."""
        return self._pending.stage

    async def finish(self) -> None:
        """As :meth:`PendingPut.finish`."""
        try:
            await self._pending.finish()
        except BaseException:
            self._slot.take_back(self._count)
            raise
        self._slot.settle(self._count)


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
