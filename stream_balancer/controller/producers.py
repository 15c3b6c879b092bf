"""Producers' puts into the balancer: ``serve`` attends by itself; without it run :func:`attend` as a task.

Each producer has a task that takes its puts in order. What has room goes in at once; the rest waits in the balancer's
own first-come-first-served queue, one task each, so backpressure is the reply that has not come yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.puts import PendingPut
from stream_balancer.errors import BrokenResourceError, ClosedResourceError, EndOfStream, RolloutError
from stream_balancer.transport.admission import AdmittingTransport
from stream_balancer.transport.producer_session import Offer, ProducerSession
from stream_balancer.transport.put_ledger import Mode, PutCancelled
from stream_balancer.wire.messages import Cancel
from stream_balancer.wire.partial_share import RemoteRollout

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


class _Attended:
    """One producer's puts."""

    def __init__(
        self, balancer: StreamBalancer, transport: AdmittingTransport, session: ProducerSession, direct: bool
    ) -> None:
        self._balancer, self._transport, self._session, self._direct = balancer, transport, session, direct
        self._waiting: dict[int, anyio.CancelScope] = {}
        self._news = anyio.Event()

    async def run(self) -> None:
        gone = False
        try:
            self._session.subscribe(lambda: self._news.set(), self._put_now)
            async with anyio.create_task_group() as tasks:
                try:
                    while True:
                        # before looking: what comes while an item is handled must set this one
                        self._news = anyio.Event()
                        while (item := self._session.take()) is not None:
                            self._handle(item, tasks.start_soon)
                        await self._news.wait()
                except (BrokenResourceError, EndOfStream):
                    gone = True
                    tasks.cancel_scope.cancel()  # what still waits of a producer that is gone is cancelled
        finally:
            with anyio.CancelScope(shield=True):
                if gone:
                    self._evict_what_it_kept()
                    await self._session.aclose()
                # one that keeps payloads must stay: ranks may still fetch from it
                elif self._balancer.ended and not self._session.keeps_payloads:
                    self._session.end()
                    await self._session.aclose()
                else:
                    self._session.subscribe()
                    self._transport.readmit(self._session)

    def _handle(self, item: Offer | Cancel, start_soon: Callable[..., Any]) -> None:
        if isinstance(item, Cancel):
            scope = self._waiting.get(item.number)
            if scope is not None:
                scope.cancel()
        elif item.mode is Mode.NOWAIT:
            self._put_now(item)
        elif item.mode is Mode.ABANDON:
            self._abandon(item)
        else:
            self._put(item, start_soon)

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
            pending = self._balancer.parts.puts.begin(offer.rollouts, offer.declared)
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            self._session.answer(offer.number, refusal)
            return
        if pending.stage == "done":
            self._session.answer(offer.number, None)
        else:
            scope = self._waiting[offer.number] = anyio.CancelScope()
            start_soon(self._wait, offer.number, pending, scope)

    async def _wait(self, number: int, pending: PendingPut, scope: anyio.CancelScope) -> None:
        accepted = refused = False
        try:
            with scope:
                await pending.finish()
                accepted = True
        except Exception as refusal:  # noqa: BLE001 - the reply to the producer
            refused = True
            self._session.answer(number, refusal)
        finally:
            del self._waiting[number]
            if accepted:
                self._session.answer(number, None)
            elif scope.cancel_called and not refused:
                self._session.answer(number, PutCancelled())
