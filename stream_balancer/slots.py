"""Slots for rollouts that are still to be generated: ``async with balancer.reserve() as slot``, or a producer's.

A slot is a place for rollouts that do not exist yet. How many may begin is counted in
:mod:`stream_balancer.core.throttle`, by the balancer; here is what is held of a slot until its block is left, in its
process or in another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from stream_balancer.errors import ClosedResourceError, RolloutError
from stream_balancer.rollouts import Rollout


class Admits(Protocol):
    """Admits rollouts before they are generated: a balancer, or a producer that asks one."""

    async def admit(self, count: int) -> Slot:
        """Wait until ``count`` more may begin. If cancelled, nothing was reserved."""
        ...

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """Put in places that were kept; ``complete`` is None for one rollout by itself. If it raises, nothing was
        accepted."""
        ...

    async def stale(self, slot: Slot) -> None:
        """Wait until a rollout of this slot would be too old."""
        ...

    def settle(self, slot: Slot, count: int) -> None:
        """So many rollouts of a slot were put, or never will be. From any thread in which the slot is used."""
        ...


class Slot:
    """Places for ``count`` rollouts. Use it in the block that reserved it."""

    def __init__(self, home: Admits, number: int, version: int, count: int) -> None:
        self.number = number
        """Number of the slot at its home."""
        self._version, self._left, self._home = version, count, home
        self._open = True
        # in puts that have not returned
        self._under_way = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        return self._version

    @property
    def left(self) -> int:
        """Rollouts that may still be put."""
        return self._left

    async def put(self, rollout: Rollout) -> None:
        """As the balancer's ``put``, in the place that was kept. If it raises or is cancelled, the place is still kept.
        Raises ValueError for more rollouts than were reserved, RolloutError for one older than the slot; in another
        process BrokenResourceError if the slot was lost with its connection."""
        await self._put([rollout], None)

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As the balancer's ``put_group``, in the places that were kept."""
        await self._put(rollouts, complete)

    async def stale(self) -> None:
        """Wait until the policy has moved on so far that what is put here would be evicted as too old
        (``staleness.max_versions``): stop generating then. Waits for ever where no rollout is too old; raises
        ClosedResourceError as ``version_after`` does."""
        await self._home.stale(self)

    def release(self) -> None:
        """Give back the places of rollouts that will not be put; leaving the block does it. Never blocks, may be called
        twice."""
        with self._lock:
            if not self._open:
                return
            left, self._open, self._left = self._left, False, 0
        self._home.settle(self, left)

    async def _put(self, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        dated = self.take(rollouts)
        accepted = False
        try:
            await self._home.put_in(self, dated, complete)
            accepted = True
        finally:
            self.done(len(dated), accepted=accepted)

    # of its home

    @property
    def missing(self) -> int:
        """Rollouts that may still be put, or are on their way."""
        with self._lock:
            return self._left + self._under_way

    @property
    def is_over(self) -> bool:
        """The block was left, and no put is on its way."""
        return not self._open and not self._under_way

    def take(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts, as they are put in these places. A put under way keeps them, also if the block is left
        meanwhile."""
        # before the lock: a rollout that is too old takes no place
        dated = [_dated(rollout, self.version) for rollout in rollouts]
        with self._lock:
            if not self._open:
                raise ClosedResourceError("put() on a slot whose 'with' block was left: its place is given back")
            if len(dated) > self._left:
                raise ValueError(
                    f"{len(dated)} rollouts for a slot with {self._left} places left. Reserve as many as are put: "
                    "reserve(n)"
                )
            # taken before the put is awaited: two puts at once must not use one place
            self._left -= len(dated)
            self._under_way += len(dated)
        return dated

    def done(self, count: int, *, accepted: bool) -> None:
        """A put has returned; if it was not accepted, the slot gets its places back."""
        with self._lock:
            self._under_way -= count
            kept = self._open and not accepted
            if kept:
                self._left += count
        # outside the lock: settling may wake tasks, which ask this slot
        if not kept:
            self._home.settle(self, count)


class Reservation:
    """Result of ``reserve()``; enter it to wait for the slot."""

    def __init__(self, home: Admits, count: int) -> None:
        self._home, self._count = home, count
        self._slot: Slot | None = None

    async def __aenter__(self) -> Slot:
        """Wait until so many rollouts may begin, first come first served. If cancelled, nothing was reserved."""
        if self._slot is not None:
            raise ValueError("a reservation is entered once: call reserve() for every slot")
        self._slot = await self._home.admit(self._count)
        return self._slot

    async def __aexit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()

    def give_back(self, slot: Slot) -> None:
        """A slot that did not reach the thread which waited for it."""
        slot.release()


def check_group(rollouts: Sequence[Rollout]) -> None:
    """Raise RolloutError unless they are siblings, TypeError for what is no Rollout."""
    if not rollouts:
        raise RolloutError("put_group() takes at least one rollout")
    for rollout in rollouts:
        if not isinstance(rollout, Rollout):
            raise TypeError(f"put_group() takes Rollouts, not {type(rollout).__name__}")
    ids = {r.group_id for r in rollouts}
    if len(ids) != 1 or None in ids:
        raise RolloutError(f"put_group() takes siblings that share one group_id, not {sorted(map(str, ids))}")


def _dated(rollout: Rollout, admitted: int) -> Rollout:
    """With the version at which its slot was ``admitted``, if it has none. Raises RolloutError for an older one."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
    if rollout.min_version is None:
        return replace(rollout, version=admitted)
    if rollout.min_version < admitted:
        raise RolloutError(
            f"rollout {rollout.rollout_id!r} began at version {rollout.min_version}, before its slot was admitted "
            f"(version {admitted}): the staleness bound would not hold. Reserve before generating"
        )
    return rollout
