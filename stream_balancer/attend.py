"""Producers' puts into the balancer: ``serve`` attends by itself; without it run :func:`attend` as a task.

Each producer has a task that takes its puts in order. What has room goes in at once; the rest is parked in the
balancer's own first-come-first-served queue, one task each, so backpressure is the verdict that has not come yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio

from stream_balancer.errors import BrokenResourceError, ClosedResourceError, EndOfStream, WouldBlock
from stream_balancer.transport._producers import GlooIntake, Mode, Offer, Withdrawal, Withdrawn
from stream_balancer.transport.memory import MemoryIntake
from stream_balancer.types import Rollout

__all__ = ["ProducerTransport", "Sink", "attend"]


@runtime_checkable
class Sink(Protocol):
    """What ``attend`` asks of a balancer."""

    @property
    def ended(self) -> bool:
        """No more rollouts are taken."""
        ...

    async def put(self, rollout: Rollout) -> None:
        """See :meth:`StreamBalancer.put`."""
        ...

    async def put_group(self, rollouts: Sequence[Rollout]) -> None:
        """See :meth:`StreamBalancer.put_group`."""
        ...

    def put_nowait(self, rollout: Rollout) -> None:
        """See :meth:`StreamBalancer.put_nowait`."""
        ...


@runtime_checkable
class ProducerTransport(Protocol):
    """Where producers connect."""

    async def accept_producer(self) -> MemoryIntake | GlooIntake:
        """The next producer. Raises ClosedResourceError once closed."""
        ...

    def readmit(self, link: MemoryIntake | GlooIntake) -> None:
        """Give a producer back, for the next ``attend``."""
        ...


async def attend(balancer: Sink, transport: ProducerTransport) -> None:
    """Put what producers offer, until cancelled or the transport is closed.

    If the balancer has ended by then, producers are told so; else their puts stay where they are, and the next
    ``attend`` takes them up.
    """
    async with anyio.create_task_group() as tasks:
        try:
            while True:
                tasks.start_soon(_Attendant(balancer, transport, await transport.accept_producer()).run)
        except (ClosedResourceError, BrokenResourceError):
            tasks.cancel_scope.cancel()


class _Attendant:
    """One producer's puts."""

    def __init__(self, balancer: Sink, transport: ProducerTransport, link: MemoryIntake | GlooIntake) -> None:
        self._balancer, self._transport, self._link = balancer, transport, link
        self._parked: dict[int, anyio.CancelScope] = {}
        self._news = anyio.Event()

    async def run(self) -> None:
        left = False
        try:
            self._link.subscribe(lambda: self._news.set(), self._try)
            async with anyio.create_task_group() as tasks:
                try:
                    while True:
                        self._news = anyio.Event()
                        while (item := self._link.take()) is not None:
                            self._handle(item, tasks.start_soon)
                        await self._news.wait()
                except (BrokenResourceError, EndOfStream):
                    left = True
                    tasks.cancel_scope.cancel()  # a dead producer's parked puts are withdrawn
        finally:
            with anyio.CancelScope(shield=True):
                if left or self._balancer.ended:
                    if not left:
                        self._link.end()
                    await self._link.aclose()
                else:
                    self._transport.readmit(self._link)

    def _handle(self, item: Offer | Withdrawal, start_soon: Callable[..., Any]) -> None:
        if isinstance(item, Withdrawal):
            scope = self._parked.get(item.number)
            if scope is not None:
                scope.cancel()
        elif not self._try(item):
            scope = self._parked[item.number] = anyio.CancelScope()
            start_soon(self._park, item, scope)

    def _try(self, offer: Offer) -> bool:
        """Put at once; False if it has to wait."""
        if offer.mode is Mode.GROUP:
            return False
        error: Exception | None = None
        try:
            self._balancer.put_nowait(offer.rollouts[0])
        except WouldBlock as full:
            if offer.mode is Mode.PUT:
                return False
            error = full
        except Exception as refusal:  # noqa: BLE001 - told to the producer
            error = refusal
        self._link.answer(offer.number, error)
        return True

    async def _park(self, offer: Offer, scope: anyio.CancelScope) -> None:
        accepted, error = False, None
        try:
            with scope:
                if offer.mode is Mode.GROUP:
                    await self._balancer.put_group(offer.rollouts)
                else:
                    await self._balancer.put(offer.rollouts[0])
                accepted = True
        except Exception as refusal:  # noqa: BLE001 - told to the producer
            error = refusal
        finally:
            del self._parked[offer.number]
            if accepted or error is not None:
                self._link.answer(offer.number, error)
            elif scope.cancel_called:
                self._link.answer(offer.number, Withdrawn())
