"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``.

A slot is a place for a rollout that does not exist yet. The rule is in
:mod:`stream_balancer.core.staleness`; who waits, and who wakes whom, is the balancer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from stream_balancer.core.admission import check_group
from stream_balancer.errors import ClosedResourceError, RolloutError
from stream_balancer.types import Rollout

if TYPE_CHECKING:
    from stream_balancer.controller.balancer import StreamBalancer

__all__ = ["Reservation", "Slot"]


class Slot:
    """Room for ``count`` rollouts. Use it in the block that reserved it."""

    def __init__(self, balancer: StreamBalancer, number: int, version: int, count: int) -> None:
        self._balancer, self._number, self._open = balancer, number, True
        self.version = version
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        self.left = count
        """Rollouts that may still be put."""

    async def put(self, rollout: Rollout) -> None:
        """As :meth:`StreamBalancer.put`, in the place that was kept. If it raises or is cancelled, the place is still
        kept. Raises ValueError for more rollouts than were reserved, RolloutError for one older than the slot."""
        await self._put([rollout])

    async def put_group(self, rollouts: Sequence[Rollout]) -> None:
        """As :meth:`StreamBalancer.put_group`, in the places that were kept."""
        check_group(rollouts)
        await self._put(rollouts)

    async def _put(self, rollouts: Sequence[Rollout]) -> None:
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
            await self._balancer._put(dated)
        except BaseException:
            self._take_back(len(dated))
            raise
        self._balancer._settle(self._number, len(dated))

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
            self._balancer._settle(self._number, count)

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._balancer._settle(self._number, self.left)
            self.left = 0


class Reservation:
    """What :meth:`StreamBalancer.reserve` returns; enter it to wait for the slot."""

    def __init__(self, balancer: StreamBalancer, count: int) -> None:
        self._balancer, self._count = balancer, count
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        """Wait until so many rollouts may begin, first come first served. If cancelled, nothing was reserved."""
        if self._slot is not None:
            raise ValueError("a reservation is entered once: call reserve() for every slot")
        self._slot = await self._balancer._admit(self._count)
        return self._slot

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self._slot._leave()
