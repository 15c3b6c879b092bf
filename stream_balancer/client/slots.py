"""Slots of a producer that a balancer in another process has admitted (:mod:`stream_balancer.slots`)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from stream_balancer.net.calls import Pending
from stream_balancer.slots import Slot
from stream_balancer.types import Rollout

__all__ = ["RemoteSlots"]

_log = logging.getLogger("stream_balancer.net")
_int_of = msgspec.msgpack.Decoder(int).decode


class RemoteSlots:
    """The slots of one producer, under its own numbers."""

    def __init__(
        self, ask: Callable[[Pending], Awaitable[msgspec.Raw]],
        put: Callable[[str, object, Sequence[Rollout]], Awaitable[None]], release: Callable[[int], object],
    ) -> None:  # fmt: skip
        self._ask, self._put, self._release = ask, put, release
        self._numbers = itertools.count()
        self._open: dict[int, Slot] = {}

    async def admit(self, count: int) -> Slot:
        """See :class:`~stream_balancer.slots.Admits`."""
        # given here, so that a lost reply can be asked for again by it
        number = next(self._numbers)
        reserve = Pending("reserve", (number, count), undo=lambda: self._release(number))
        version = _int_of(await self._ask(reserve))
        slot = self._open[number] = Slot(self, number, version, count)
        return slot

    async def put_in(self, slot: Slot, rollouts: Sequence[Rollout], complete: bool | None) -> None:
        """See :class:`~stream_balancer.slots.Admits`."""
        await self._put("put_in", (slot.number, complete), rollouts)

    def settle(self, slot: Slot, count: int) -> None:
        """See :class:`~stream_balancer.slots.Admits`. The balancer counts what was put by itself."""
        # the balancer has counted each put by itself: it needs to hear of the end only
        if slot.is_over:
            self._open.pop(slot.number, None)
            self._release(slot.number)

    def open(self) -> list[tuple[int, int, int]]:
        """Slots to ask for again when a controller is joined again: number, rollouts still to come, version."""
        return [(one.number, one.missing, one.version) for one in list(self._open.values()) if one.missing]

    def lost(self, numbers: Iterable[int]) -> None:
        """Slots that were given back with the connection, and others have begun in their place."""
        for number in numbers:
            slot = self._open.get(number)
            if slot is not None:
                _log.warning(
                    "a slot for %d rollouts was given back: %d rollouts begun at version %d: others have begun in "
                    "their place meanwhile",
                    slot.missing, slot.missing, slot.version,
                )  # fmt: skip
