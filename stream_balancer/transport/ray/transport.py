"""Ranks and producers of a balancer that lives in a Ray actor: the controller's side.

::

    in the actor      RayTransport: what ``serve`` needs; the actor's _join, _exchange, _poll and _hold are its own
    in a trainer      rank: open_port, for RankFeed
    in a worker       producer: RayProducerPort, for Producer

Sessions and ports are those of every transport, above :mod:`channel`. Payloads lie in the object store of the node
where they were put, each object owned by the process that put it (:mod:`bundles`); the actor gets descriptions, and a
rank reads what its batch needs. ``integrations/ray`` starts the actor.
"""

from __future__ import annotations

from collections.abc import Callable

from stream_balancer.transport.admission import CLOSED, AdmittingTransport
from stream_balancer.transport.channel import either
from stream_balancer.transport.event_loop import at_once
from stream_balancer.transport.rank_session import RankSession
from stream_balancer.transport.ray.actor import ActorChannel, ActorChannels
from stream_balancer.transport.ray.producer import RayProducerSession
from stream_balancer.transport.request_ledger import Limits
from stream_balancer.wire.messages import (
    Join,
    JoinProducer,
    JoinRank,
    PayloadsFetched,
    Refused,
    Welcome,
    WelcomeProducer,
    WelcomeRank,
)

__all__ = ["RayTransport"]


class _RankSession(RankSession):
    on_missing: Callable[[PayloadsFetched], object]

    def _on_fetched(self, message: PayloadsFetched, *_: object) -> None:
        if message.missing:
            self.on_missing(message)
        super()._on_fetched(message)

    actions = RankSession.actions | either((PayloadsFetched, _on_fetched))


class RayTransport(AdmittingTransport):
    """The controller's side, inside the actor. ``serve`` delivers to its ranks and takes its producers' puts."""

    def __init__(
        self,
        *,
        dp_size: int,
        staged_bytes: int = Limits._field_defaults["staged_bytes"],
        max_put_bytes: int = Limits._field_defaults["max_put_bytes"],
    ) -> None:
        super().__init__(dp_size)
        self._limits = Limits(staged_bytes, max_put_bytes).check()
        self.channels = ActorChannels(self._judge)
        """For the actor's methods."""
        self.on_missing: Callable[[PayloadsFetched], object] = lambda fetched: None
        """Called when a rank could not fetch everything."""

    @property
    def producers(self) -> list[str]:
        """Labels of those who are connected."""
        return [session.name for session in self._producer_sessions if session.live]

    def _judge(self, channel: ActorChannel, request: Join) -> Welcome | Refused:
        if isinstance(request, JoinRank):
            return self.admission.refusal(request) or self._admit_rank(channel, request)
        if not isinstance(request, JoinProducer):
            return Refused("value", f"a {type(request).__name__} cannot be answered here")
        if self.admission.closed:
            return CLOSED
        session = RayProducerSession(channel, request, self._limits, at_once)
        channel.start(session)
        self._producer_sessions.add(session)
        self._producers.add(session)
        return WelcomeProducer(*self._limits)

    def _admit_rank(self, channel: ActorChannel, request: JoinRank) -> WelcomeRank:
        session = _RankSession(channel, request, at_once)
        session.on_missing = lambda fetched: self.on_missing(fetched)
        channel.start(session)
        self.admission.admit(session)
        return WelcomeRank()
