"""Slots of a producer that a balancer in another process has admitted (:mod:`stream_balancer.slots`)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from stream_balancer.net.session import Session
from stream_balancer.rollouts import Rollout
from stream_balancer.slots import Slot
from stream_balancer.wire.payload import reader

_log = logging.getLogger("stream_balancer.net")
_int_of = reader(int, "a reply")

PutHead: TypeAlias = tuple[int | None, bool | None, bool]
"""Number of a slot, whether the group is complete (None: a rollout by itself), and whether the put may wait."""


class RemoteSlots:
    """The slots of one producer, under its own numbers."""

    def __init__(self, session: Session, put: Callable[[PutHead, Sequence[Rollout]], Awaitable[None]]) -> None:
        self._session, self._put = session, put
        self._numbers = itertools.count()
        self._open: dict[int, Slot] = {}

    async def admit(self, count: int) -> Slot:
        """See :class:`~stream_balancer.slots.Admits`."""
        # given here, so that a lost reply can be asked for again by it
        number = next(self._numbers)
        try:
            answered = await self._session.ask("reserve", (number, count), waits_for="no more may begin")
            version = _int_of(answered.value)
        except BaseException:
            # it may have been admitted, and nobody has it
            self._release(number)
            raise
        slot = self._open[number] = Slot(self, number, version, count)
        return slot

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """See :class:`~stream_balancer.slots.Admits`."""
        await self._put((slot.number, complete, True), rollouts)

    async def stale(self, slot: Slot) -> None:
        """See :class:`~stream_balancer.slots.Admits`."""
        await self._session.ask("stale", slot.number, waits_for="no rollout is too old")

    def settle(self, slot: Slot, count: int) -> None:
        """See :class:`~stream_balancer.slots.Admits`. The balancer counts what was put by itself."""
        # the balancer has counted each put by itself: it needs to hear of the end only
        if slot.is_over:
            self._open.pop(slot.number, None)
            self._release(slot.number)

    def _release(self, number: int) -> None:
        self._session.tell("release", number)

    def open(self) -> list[tuple[int, int, int]]:
        """Slots to ask for again when a controller is joined again: number, rollouts still to come, version."""
        return [(one.number, one.missing, one.version) for one in list(self._open.values()) if one.missing]

    def lost(self, numbers: Iterable[int]) -> None:
        """Slots that were given back with the connection, and others have begun in their place."""
        for number in numbers:
            slot = self._open.get(number)
            if slot is not None:
                _log.warning(
                    "a slot of version %d was given back, rollouts still to come: %d; others have begun in their place",
                    slot.version,
                    slot.missing,
                )
