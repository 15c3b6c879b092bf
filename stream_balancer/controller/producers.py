"""Producers' puts into the balancer: ``serve`` attends by itself; without it run :func:`attend` as a task.

Each producer has a task that takes its puts in order. What has room goes in at once; the rest waits in the balancer's
own first-come-first-served queue, one task each, so backpressure is the reply that has not come yet. So do reservers.
Every policy version is passed on to each producer as it is set.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.errors import BrokenResourceError, ClosedResourceError, EndOfStream, RolloutError
from stream_balancer.slots import Slot
from stream_balancer.transport.admission import AdmittingTransport
from stream_balancer.transport.offers import Item, Offer
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.requests import Mode, RequestCancelled
from stream_balancer.wire.messages import Cancel, ReleaseSlot
from stream_balancer.wire.partial_batch import RemoteRollout
from stream_balancer.wire.statistics import reply_to

__all__ = ["attend"]

logger = logging.getLogger("stream_balancer.transport")


async def attend(balancer: StreamBalancer, transport: AdmittingTransport, *, direct: bool = False) -> None:
    """Put what producers offer, until cancelled or the transport is closed.

    ``direct``: producers may keep the payloads; True in ``serve``, whose ranks fetch them.

    If the balancer has ended by then, producers are notified; else their puts stay where they are, and the next
    ``attend`` takes them.
    """
    async with anyio.create_task_group() as tasks:
        try:
            while True:
                tasks.start_soon(_Attended(balancer, transport, await transport.accept_producer(), direct).run)
        except (ClosedResourceError, BrokenResourceError):
            tasks.cancel_scope.cancel()


class _Put(Protocol):
    """A put that has gone as far as it can without waiting."""

    @property
    def stage(self) -> str: ...

    async def finish(self) -> None: ...


class _SlotPut:
    """A put in a slot that has gone as far as it can without waiting."""

    def __init__(self, slot: Slot, rollouts: Any, size: Any, balancer: StreamBalancer) -> None:
        self._slot, self._count = slot, len(rollouts)
        try:
            self._pending = balancer.parts.puts.begin(rollouts, size)
        except BaseException:
            slot.done(self._count, accepted=False)
            raise
        self.stage: str = self._pending.stage
        if self.stage == "done":
            slot.done(self._count, accepted=True)

    async def finish(self) -> None:
        accepted = False
        try:
            await self._pending.finish()
            accepted = True
        finally:
            self._slot.done(self._count, accepted=accepted)


class _Attended:
    """One producer's puts."""

    def __init__(
        self, balancer: StreamBalancer, transport: AdmittingTransport, session: ProducerSession, direct: bool
    ) -> None:
        self._balancer, self._transport, self._session, self._direct = balancer, transport, session, direct
        self._producer = balancer.parts.producers.join(session)
        self._waiting: dict[int, anyio.CancelScope] = {}  # puts and reservers
        self._reserving: set[int] = set()  # of these, the reservers
        self._ending: list[int] = []
        self._news = anyio.Event()

    async def run(self) -> None:
        gone = lost = False
        try:
            self._session.subscribe(lambda: self._news.set(), self._put_now)
            versions = self._balancer.parts.versions.subscribed(self._session.push_version)
            async with anyio.create_task_group() as tasks:
                try:
                    with versions:
                        while True:
                            # before looking: what comes while an item is handled must set this one
                            self._news = anyio.Event()
                            while (item := self._session.take()) is not None:
                                self._handle(item, tasks.start_soon)
                            await self._news.wait()
                except (BrokenResourceError, EndOfStream) as error:
                    gone, lost = True, isinstance(error, BrokenResourceError)
                    tasks.cancel_scope.cancel()  # what still waits of a producer that is gone is cancelled
        finally:
            with anyio.CancelScope(shield=True):
                if gone:
                    self._evict_what_it_kept()
                    self._balancer.parts.producers.leave(self._producer, lost=lost)
                    await self._session.aclose()
                # one that keeps payloads must stay: ranks may still fetch from it
                elif self._balancer.ended and not self._session.keeps_payloads:
                    self._balancer.parts.producers.leave(self._producer, lost=False)
                    self._session.end()
                    await self._session.aclose()
                else:
                    self._session.subscribe()
                    self._transport.readmit(self._session)

    def _handle(self, item: Item, start_soon: Callable[..., Any]) -> None:
        if isinstance(item, Cancel):
            self._cancel(item.number)
        elif isinstance(item, ReleaseSlot):
            slot = self._producer.slots.pop(item.slot, None)
            if slot is not None:
                slot.release()
        elif item.mode is Mode.NOWAIT:
            self._put_now(item)
        elif item.mode is Mode.ABANDON:
            self._abandon(item)
        elif item.mode is Mode.RESERVE:
            self._reserve(item, start_soon)
        elif item.mode is Mode.END:
            self._end(item.number)
        elif item.mode is Mode.STATISTICS:
            self._session.send_statistics(reply_to(item.number, self._balancer.statistics()))
        else:
            self._put(item, start_soon)

    def _cancel(self, number: int) -> None:
        scope = self._waiting.get(number)
        if scope is not None:
            scope.cancel()

    def _evict_what_it_kept(self) -> None:
        owner = self._session.owner
        if owner is None:
            return
        lost = self._balancer.parts.puts.evict_lost(lambda r: isinstance(r, RemoteRollout) and r.owner == owner)
        if lost:
            names = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
            logger.warning("producer %s took %d waiting rollouts with it: %s", owner.label, len(lost), names)

    def _check(self, offer: Offer) -> None:
        if offer.refusal is not None:
            raise RolloutError(offer.refusal)
        kept = next((rollout for rollout in offer.rollouts if isinstance(rollout, RemoteRollout)), None)
        if kept is None:
            return
        if not self._direct:
            problem = "nobody here could fetch it: only serve() delivers such rollouts"
        elif self._balancer.parts.puts.journal is not None:
            problem = "this balancer writes what it accepts to a journal, and has not got the tokens"
        else:
            return
        raise RolloutError(
            f"rollout {kept.rollout_id!r} stays with its producer (hand_over='direct'), but {problem}. "
            "Connect without hand_over='direct'"
        )

    # A refusal is answered where it is caught: a name that outlived the block would tie it and its frame, and with
    # them the rollout, into a circle that only the garbage collector undoes.

    def _put_now(self, offer: Offer) -> None:
        try:
            self._check(offer)
            self._balancer.put_nowait(offer.rollouts[0])
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            self._session.answer(offer.number, refusal)
        else:
            self._session.answer(offer.number, None)

    def _abandon(self, offer: Offer) -> None:
        assert offer.declared is not None
        try:
            self._balancer.abandon_group(offer.declared.group_id)
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            self._session.answer(offer.number, refusal)
        else:
            self._session.answer(offer.number, None)

    def _put(self, offer: Offer, start_soon: Callable[..., Any]) -> None:
        """What finds no room, or goes to a journal, takes its place in the balancer's queue now, and waits there in a
        task of its own."""
        try:
            self._check(offer)
            pending = self._begin(offer)
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            self._session.answer(offer.number, refusal)
            return
        if pending.stage == "done":
            self._session.answer(offer.number, None)
        else:
            start_soon(self._wait, offer.number, self._scope(offer.number), pending.finish, self._accepted)

    def _begin(self, offer: Offer) -> _Put:
        if offer.slot is None:
            return self._balancer.parts.puts.begin(offer.rollouts, offer.declared)
        slot = self._producer.slots.get(offer.slot)
        if slot is not None:
            return _SlotPut(slot, slot.take(offer.rollouts), offer.declared, self._balancer)
        # perhaps it was accepted before the connection was lost, and only its reply was not
        self._balancer.parts.core.check(offer.rollouts, offer.declared)
        raise BrokenResourceError(
            "its slot was given back when the connection was lost, and others have begun in its place. It was not "
            "accepted; reserve again before generating, or put it without a slot, where it may be evicted as stale"
        )

    def _reserve(self, offer: Offer, start_soon: Callable[..., Any]) -> None:
        assert offer.reserve is not None
        reservations = self._balancer.parts.reservations
        number, count, version = offer.number, offer.reserve.count, offer.reserve.version
        try:
            begun = reservations.begin(count) if version is None else reservations.resume(count, version)
            if begun is None:
                raise BrokenResourceError(
                    f"{count} rollouts begun at version {version}: others have begun in their place meanwhile"
                )
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            self._session.answer(number, refusal)
            return
        if isinstance(begun, Slot):
            self._admitted(number, begun)
        else:
            self._reserving.add(number)
            start_soon(self._wait, number, self._scope(number), partial(reservations.finish, begun), self._admitted)

    def _end(self, number: int) -> None:
        """Once all that was asked before has its reply."""
        self._ending.append(number)
        for reserving in self._reserving:
            self._cancel(reserving)
        self._end_if_settled()

    def _end_if_settled(self) -> None:
        if self._ending and not self._waiting:
            self._balancer.parts.producers.end(self._producer)
            while self._ending:
                self._session.answer(self._ending.pop(), None)

    def _scope(self, number: int) -> anyio.CancelScope:
        scope = self._waiting[number] = anyio.CancelScope()
        return scope

    def _accepted(self, number: int, _: None) -> None:
        self._session.answer(number, None)

    def _admitted(self, number: int, slot: Slot) -> None:
        self._producer.slots[number] = slot
        self._session.admit_slot(number, slot.version)

    async def _wait(
        self,
        number: int,
        scope: anyio.CancelScope,
        finish: Callable[[], Awaitable[Any]],
        accepted: Callable[[int, Any], None],
    ) -> None:
        done = refused = False
        result = None
        try:
            with scope:
                result = await finish()
                done = True
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            refused = True
            self._session.answer(number, refusal)
        finally:
            del self._waiting[number]
            self._reserving.discard(number)
            if done:
                accepted(number, result)
            elif scope.cancel_called and not refused:
                self._session.answer(number, RequestCancelled())
            if done or refused or scope.cancel_called:  # else the producer is gone, or this task's time is over
                self._end_if_settled()
