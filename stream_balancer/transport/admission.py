"""Which ranks may come in: one incarnation of each. Decided in one place, whatever a rank comes through.

A rank has proven that it knows the token before it is judged here (:mod:`stream_balancer.transport.handshake`). Belongs
to the event loop; no socket, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeAlias
from weakref import WeakSet

from stream_balancer.errors import ClosedResourceError, rank_name
from stream_balancer.transport import Transport
from stream_balancer.transport.event_loop import Arrivals
from stream_balancer.transport.producer_session import ProducerSession
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.wire.messages import JoinRank, Refused

__all__ = ["CLOSED", "Admission", "AdmittingTransport"]


CLOSED = Refused("closed", "the controller has closed its transport. Start it again")


Place: TypeAlias = tuple[str, int]
"""Role and rank."""


class Admission:
    """Judges the ranks of one transport, and hands their sessions to ``accept()``."""

    def __init__(self, dp_size: int) -> None:
        self.dp_size = dp_size
        self.sessions: dict[Place, RankSession] = {}
        """The newest one of each rank, lost or not."""
        self.closed = False
        self._arrived: Arrivals[RankSession] = Arrivals()
        self._connecting: set[tuple[Place, int]] = set()  # and incarnation
        self._on_hold: list[tuple[JoinRank, Callable[[], object]]] = []

    def refusal(self, request: JoinRank) -> Refused | None:
        """Why a rank may not come in, now."""
        if self.closed:
            return CLOSED
        before, who = self.sessions.get(_place_of(request)), rank_name(request.rank, request.role)
        same_feed = before is not None and before.is_of(request)
        # of a feed that was in before: there may be more ranks since, or fewer
        if request.dp_size != self.dp_size and not same_feed:
            return Refused(
                "value",
                f"{who} announces dp_size={request.dp_size}, but the controller balances for "
                f"dp_size={self.dp_size}. Give both the same number of data-parallel ranks"
                + (": those of a role work on the trainer's plan" if request.role else ""),
            )
        if not 0 <= request.rank < self.dp_size or request.depth < 1 or request.incarnation < 0:
            return Refused(
                "value",
                f"{who} announces depth={request.depth}, incarnation={request.incarnation}, but ranks go "
                f"from 0 to {self.dp_size - 1}, depth is at least 1 and incarnation at least 0",
            )
        is_there = before is not None and before.live and not same_feed
        if before is not None and is_there and before.incarnation >= request.incarnation:
            return Refused(
                "busy",
                f"{who} is already connected (incarnation {before.incarnation}). One RankFeed per rank: "
                "close the other one first, or start the rank again under a higher incarnation",
            )
        return None

    def begin(self, request: JoinRank, again: Callable[[], object]) -> bool:
        """Whether a rank that is not refused may build its connection now, which :meth:`settle` must follow. If one of
        at least its incarnation is about to, ``again`` is called once that one has settled."""
        place = _place_of(request)
        if any(other == place and number >= request.incarnation for other, number in self._connecting):
            self._on_hold.append((request, again))
            return False
        self._connecting.add((place, request.incarnation))
        return True

    def settle(self, request: JoinRank) -> None:
        """Its connection was built, or could not be. If it was, :meth:`admit` comes before this."""
        place = _place_of(request)
        self._connecting.discard((place, request.incarnation))
        held = [again for waiting, again in self._on_hold if _place_of(waiting) == place]
        self._on_hold = [(waiting, again) for waiting, again in self._on_hold if _place_of(waiting) != place]
        for again in held:
            again()

    def admit(self, session: RankSession) -> bool:
        """It is in, in place of an older incarnation. False if a newer one was faster, or all is closed."""
        place = _place_of(session)
        before = self.sessions.get(place)
        if self.closed or (before is not None and before.live and before.incarnation > session.incarnation):
            return False
        self.sessions[place] = session
        if before is not None:
            before.supersede(session.incarnation)
        self._arrived.add(session)
        return True

    async def accept(self) -> RankSession:
        """The next rank that has come in. If cancelled, none is lost. Raises ClosedResourceError once closed."""
        return await self._arrived.next()

    def close(self) -> None:
        """Nobody comes in any more. Idempotent."""
        self.closed = True
        self._arrived.fail(ClosedResourceError())
        held, self._on_hold = self._on_hold, []
        for _, again in held:  # to be refused
            again()


def _place_of(one: JoinRank | RankSession) -> Place:
    return one.role, one.rank


class AdmittingTransport(Transport):
    """What all transports have in common: who has come in is handed to ``serve`` and to ``attend``."""

    def __init__(self, dp_size: int) -> None:
        self.dp_size = dp_size
        self.admission = Admission(dp_size)
        """Judges ranks: ``refusal`` before a session is made, ``admit`` once it is."""
        self._producers: Arrivals[ProducerSession] = Arrivals()
        self._producer_sessions: WeakSet[ProducerSession] = WeakSet()

    def resize(self, dp_size: int) -> None:
        """There are so many ranks from now on; ``serve`` calls it when the balancer's ``dp_size`` changes. Who is in
        stays so. In the event loop."""
        self.dp_size = self.admission.dp_size = dp_size

    def _open(self) -> None:
        """The event loop runs now."""

    async def accept(self) -> RankSession:
        self._open()
        return await self.admission.accept()

    async def accept_producer(self) -> ProducerSession:
        """The next producer. If cancelled, none is lost. Raises ClosedResourceError once closed."""
        self._open()
        return await self._producers.next()

    def readmit(self, session: ProducerSession) -> None:
        """Give a producer back, for the next ``attend``."""
        self._producers.add(session)

    async def aclose(self) -> None:
        self.admission.close()
        self._producers.fail(ClosedResourceError())
        for rank in self.admission.sessions.values():
            await rank.aclose()
        for producer in [*self._producer_sessions]:
            await producer.aclose()

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
