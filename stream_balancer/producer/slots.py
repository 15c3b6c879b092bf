"""Slots for rollouts that are still to be generated, reserved from another process: ``async with producer.reserve()``.

The controller admits, and keeps the bound (:mod:`stream_balancer.controller.reservations`); here is what a producer
holds of a slot until its block is left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from stream_balancer.core.groups import GroupSize, closed
from stream_balancer.slots import _dated as dated
from stream_balancer.slots import check_group
from stream_balancer.transport.producer_port import ProducerPort
from stream_balancer.transport.requests import HeldSlot, Mode, Request
from stream_balancer.types import Rollout

__all__ = ["BlockingRemoteReservation", "BlockingRemoteSlot", "RemoteReservation", "RemoteSlot"]

Ready: TypeAlias = Callable[[Sequence[Rollout]], list[Rollout]]
"""Rollouts as they are sent; TypeError for what is none."""


class _Slot:
    """What both kinds have in common."""

    def __init__(self, port: ProducerPort, ready: Ready, held: HeldSlot) -> None:
        self._port, self._ready, self._held = port, ready, held

    @property
    def version(self) -> int:
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        return self._held.version

    @property
    def left(self) -> int:
        """Rollouts that may still be put."""
        return self._held.left

    def release(self) -> None:
        """Give back the places of rollouts that will not be put; leaving the block does it. Never blocks, may be called
        twice."""
        self._port.release(self._held)

    @contextmanager
    def _putting(self, mode: Mode, rollouts: Sequence[Rollout], complete: bool = False) -> Iterator[Request]:
        """A put under way keeps its places; if it is not accepted, the slot gets them back."""
        held, declared = self._held, None
        rollouts = [dated(rollout, held.version) for rollout in self._ready(rollouts)]
        if mode is Mode.GROUP:
            check_group(rollouts)
            declared = _closed(rollouts, complete)
        held.put(len(rollouts))
        accepted = False
        try:
            yield Request(mode, rollouts, declared, held)
            accepted = True
        finally:
            held.settle(len(rollouts), accepted=accepted)
            if not held.open:
                self.release()


def _closed(rollouts: Sequence[Rollout], complete: bool) -> GroupSize | None:
    return closed(rollouts[0].group_id) if complete else None


class RemoteSlot(_Slot):
    """As :class:`~stream_balancer.controller.reservations.Slot`, in another process."""

    def __init__(
        self, port: ProducerPort, ready: Ready, ask: Callable[[Request], Awaitable[Any]], held: HeldSlot
    ) -> None:
        super().__init__(port, ready, held)
        self._ask = ask

    async def put(self, rollout: Rollout) -> None:
        """As :meth:`Producer.put`, in the place that was kept. Raises ValueError for more rollouts than were reserved,
        RolloutError for one older than the slot, BrokenResourceError if the slot was lost with its connection."""
        with self._putting(Mode.PUT, [rollout]) as request:
            await self._ask(request)

    async def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As :meth:`Producer.put_group`, in the places that were kept."""
        with self._putting(Mode.GROUP, rollouts, complete) as request:
            await self._ask(request)


class RemoteReservation:
    """What :meth:`Producer.reserve` returns; enter it to wait for the slot."""

    def __init__(self, port: ProducerPort, ready: Ready, ask: Callable[[Request], Awaitable[Any]], count: int) -> None:
        self._port, self._ready, self._ask, self._count = port, ready, ask, count
        self._slot: RemoteSlot | None = None

    async def __aenter__(self) -> RemoteSlot:
        """Wait until so many rollouts may begin, first come first served. If cancelled, nothing was reserved."""
        if self._slot is not None:
            raise ValueError(_ENTERED_TWICE)
        held = await self._ask(Request(Mode.RESERVE, places=_plain(self._count)))
        self._slot = RemoteSlot(self._port, self._ready, self._ask, held)
        return self._slot

    async def __aexit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()


class BlockingRemoteSlot(_Slot):
    """:class:`RemoteSlot` with blocking methods."""

    def __init__(
        self, port: ProducerPort, ready: Ready, ask: Callable[[Request, float | None], Any], held: HeldSlot
    ) -> None:
        super().__init__(port, ready, held)
        self._ask = ask

    def put(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        """As :meth:`RemoteSlot.put`. TimeoutError after ``timeout_s``: it was not accepted."""
        with self._putting(Mode.PUT, [rollout]) as request:
            self._ask(request, timeout_s)

    def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False, timeout_s: float | None = None) -> None:
        """As :meth:`RemoteSlot.put_group`."""
        with self._putting(Mode.GROUP, rollouts, complete) as request:
            self._ask(request, timeout_s)


class BlockingRemoteReservation:
    """What :meth:`BlockingProducer.reserve` returns; enter it to wait for the slot."""

    def __init__(
        self,
        port: ProducerPort,
        ready: Ready,
        ask: Callable[[Request, float | None], Any],
        count: int,
        timeout_s: float | None,
    ) -> None:
        self._port, self._ready, self._ask, self._count, self._timeout_s = port, ready, ask, count, timeout_s
        self._slot: BlockingRemoteSlot | None = None

    def __enter__(self) -> BlockingRemoteSlot:
        """Block until so many rollouts may begin. If interrupted, or the time is over, nothing was reserved."""
        if self._slot is not None:
            raise ValueError(_ENTERED_TWICE)
        held = self._ask(Request(Mode.RESERVE, places=_plain(self._count)), self._timeout_s)
        self._slot = BlockingRemoteSlot(self._port, self._ready, self._ask, held)
        return self._slot

    def __exit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()


_ENTERED_TWICE = "a reservation is entered once: call reserve() for every slot"


def _plain(count: int) -> int:
    """What a message can carry; whether so many can be reserved is for the balancer to say."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"reserve({count!r}): at least 1 rollout is reserved at a time")
    return count
