"""Ranks and producers of a balancer that lives in a Ray actor.

::

    in the actor      RayTransport: what ``serve`` needs; the actor's _exchange, _poll and _hold are its own
                      _ray_links: its ends of the ways
    in a trainer      _ray_rank: RayPort, for RankFeed
    in a worker       _ray_producer: RayOutlet, for Producer

Payloads lie in the object store of the node where they were put, each object owned by the process that put it; the
actor gets descriptions, and a rank fetches what its share needs. ``integrations/ray.py`` starts the actor.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, RankLostError
from stream_balancer.transport.event_loop import Arrivals
from stream_balancer.transport.put_ledger import Limits
from stream_balancer.transport.ray.channel import Message, Peer, cause_of
from stream_balancer.transport.ray.links import RayIntake, RayLink
from stream_balancer.transport.ray.object_store import Lost
from stream_balancer.transport.ray.producer import RayOutlet
from stream_balancer.transport.ray.rank import RayPort

__all__ = ["RayLink", "RayOutlet", "RayPort", "RayTransport"]

_MAX_LEAVING = 1000  # peers that are over; each asks a last time within milliseconds


class RayTransport:
    """The controller's side, inside the actor. ``serve`` delivers to its ranks and takes its producers' puts."""

    def __init__(
        self,
        *,
        dp_size: int,
        direct: bool = True,
        restarts: bool = False,
        staged_bytes: int = Limits._field_defaults["staged_bytes"],
        max_put_bytes: int = Limits._field_defaults["max_put_bytes"],
    ) -> None:
        """``direct``: tokens stay in the object store until a rank fetches them; else they are fetched here first.
        ``restarts``: should the actor die, it comes back and knows what it had accepted: ranks and producers wait."""
        self.dp_size = dp_size
        self._restarts = restarts
        self.direct = direct
        self._limits = Limits(staged_bytes, max_put_bytes).check()
        self._peers: dict[str, Peer] = {}
        self._leaving: dict[str, Peer] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._links: dict[int, RayLink] = {}
        self._intakes: weakref.WeakSet[RayIntake] = weakref.WeakSet()
        self._arrived: Arrivals[RayLink] = Arrivals()
        self._producers: Arrivals[RayIntake] = Arrivals()
        self._closed = False
        self.on_lost_rollouts: Callable[[int, int, list[Lost]], None] = lambda rank, step, lost: None
        """Called with rank, step and what could not be fetched."""

    @property
    def producers(self) -> list[str]:
        """Labels of those who are connected."""
        return [intake.name for intake in self._intakes if intake.live]

    # for the actor's methods of these names

    async def exchange(self, name: str, number: int, messages: list[Message]) -> Any:
        """See :meth:`Peer.exchange`."""
        return await self._peer(name).exchange(number, messages)

    async def poll(self, name: str) -> Any:
        """See :meth:`Peer.poll`."""
        return await self._peer(name).poll()

    async def hold(self, name: str) -> None:
        """Return once this caller need not be watched any more: what it gets for this call is its lifeline."""
        await self._peer(name).released.wait()

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name) or self._leaving.get(name)
        if peer is None:
            peer = self._peers[name] = Peer()
            peer.handle = partial(self._greet, peer)
            peer.on_finish = partial(self._see_off, name)
        return peer

    def _see_off(self, name: str) -> None:
        """It may still ask for what was said last."""
        self._leaving[name] = self._peers.pop(name)
        if len(self._leaving) > _MAX_LEAVING:
            self._leaving.pop(next(iter(self._leaving)))

    def _greet(self, peer: Peer, hello: Message) -> None:
        match hello:
            case ("rank", int(rank), int(dp_size), int(incarnation), int(depth), int(max_bytes), list(lifeline)):
                self._greet_rank(peer, RayLink(peer, rank, incarnation, depth, max_bytes), dp_size, lifeline)
            case ("producer", str(label), str(node), list(lifeline)):
                intake = RayIntake(peer, label, node, self._limits, direct=self.direct, restarts=self._restarts)
                self._intakes.add(intake)
                self._watch(lifeline, intake.lost)
                if self._closed:
                    peer.put(("lost", "the transport is closed"))
                    peer.finish()
                else:
                    self._producers.add(intake)
            case _:
                peer.put(("lost", "it did not say who it is. Install one stream_balancer everywhere"))
                peer.finish()

    def _greet_rank(self, peer: Peer, link: RayLink, dp_size: int, lifeline: list[Any]) -> None:
        refusal = self._judge(link, dp_size)
        if refusal is not None:
            peer.put(("refused", type(refusal).__name__, str(refusal)))
            peer.finish()
            return
        before = self._links.get(link.rank)
        self._links[link.rank] = link
        if before is not None and before.live:
            before.part(f"superseded by incarnation {link.incarnation}")
            before.lost(f"superseded by incarnation {link.incarnation}")
        link.on_lost_rollouts = lambda step, lost: self.on_lost_rollouts(link.rank, step, lost)
        self._watch(lifeline, link.lost)
        peer.put(("welcome", self._restarts))
        self._arrived.add(link)

    def _judge(self, link: RayLink, dp_size: int) -> Exception | None:
        if self._closed:
            return RankLostError("the transport is closed", rank=link.rank, cause="closed")
        if dp_size != self.dp_size or not 0 <= link.rank < self.dp_size:
            return ValueError(
                f"rank {link.rank} announces dp_size={dp_size}, but the controller balances for "
                f"dp_size={self.dp_size}. Give both the same number of data-parallel ranks"
            )
        before = self._links.get(link.rank)
        if before is not None and before.live and before.incarnation >= link.incarnation:
            return AlreadyInUseError(
                f"rank {link.rank} is already connected (incarnation {before.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation"
            )
        return None

    def _watch(self, lifeline: list[Awaitable[None]], lost: Callable[[str], None]) -> None:
        async def watch() -> None:
            try:
                await lifeline[0]
            except Exception as error:  # noqa: BLE001 - OwnerDiedError and its kin
                lost(cause_of(error))

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    # for serve

    async def accept(self) -> RayLink:
        """See :class:`~stream_balancer.transport.Transport`."""
        return await self._arrived.next()

    async def accept_producer(self) -> RayIntake:
        """The next producer. If cancelled, none is lost."""
        return await self._producers.next()

    def readmit(self, link: Any) -> None:
        """Give a producer back, for the next ``attend``."""
        self._producers.add(link)

    async def aclose(self) -> None:
        """See :class:`~stream_balancer.transport.Transport`."""
        self._closed = True
        for link in self._links.values():
            await link.aclose()
        for intake in list(self._intakes):
            await intake.aclose()
        self._arrived.fail(ClosedResourceError())
        self._producers.fail(ClosedResourceError())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
