"""Producers in other processes: who is connected, what each has reserved, and who has ended. Outlives connections.

A producer that connects again (``rejoin``) is the same one, whether or not its former connection is known to be lost.
Who is lost, or closes, gives back what it had reserved. Here is only who there is: what producers ask for is
:mod:`stream_balancer.controller.producers`'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stream_balancer.slots import Slot
from stream_balancer.transport.producer_session import ProducerSession

__all__ = ["ConnectedProducer", "ProducerRegistry"]

logger = logging.getLogger("stream_balancer.transport")


class ConnectedProducer:
    """One producer, and what it has reserved."""

    def __init__(self, session: ProducerSession) -> None:
        self.session = session
        self.slots: dict[int, Slot] = {}
        """By the number of the request that reserved it."""

    def release_all(self) -> int:
        """Give back what it has reserved. -> how many rollouts that were still to come."""
        left = sum(slot.left for slot in self.slots.values())
        while self.slots:
            self.slots.popitem()[1].release()
        return left


class ProducerRegistry:
    """The producers of one balancer."""

    def __init__(self, end: Callable[[], object], num_producers: int | None) -> None:
        """``end()`` ends the balancer: once ``num_producers`` have ended; None: once one has, and all others that are
        connected."""
        if num_producers is not None and num_producers < 1:
            raise ValueError(
                f"num_producers must be >= 1, not {num_producers}: give None where only balancer.end() ends"
            )
        self._end, self._num_producers = end, num_producers
        self._connected: dict[bytes, ConnectedProducer] = {}
        self._names: dict[bytes, str] = {}  # of those that are connected, by session
        self._ended: set[bytes] = set()
        self._any_came = False

    def joined(self, session: bytes, name: str) -> None:
        """A producer is connected, perhaps again."""
        self._names[session] = name
        self._any_came = True

    def left(self, session: bytes, *, lost: bool) -> None:
        """It has closed, or was lost. One that was lost ends nothing."""
        self._names.pop(session, None)
        if not lost:
            self._end_if_last()

    def ended(self, session: bytes) -> None:
        """It puts no more."""
        self._ended.add(session)
        self._end_if_last()

    # until the transports that have sessions of their own are gone

    def join(self, session: ProducerSession) -> ConnectedProducer:
        """It is connected; or attended to again, with what it has reserved."""
        before = self._connected.get(session.producer_id)
        if before is not None and before.session is session:
            return before
        if before is not None:  # only the producer knows yet that this connection is lost
            before.release_all()
            before.session.supersede()
        producer = self._connected[session.producer_id] = ConnectedProducer(session)
        self._any_came = True
        return producer

    def leave(self, producer: ConnectedProducer, *, lost: bool) -> None:
        """It has closed, or was lost: others may begin in its place."""
        left = producer.release_all()
        if lost and left:
            logger.warning(
                "producer %s was lost with %d rollouts that it had reserved and not put: others may begin in their "
                "place",
                producer.session.name,
                left,
            )
        if self._connected.get(producer.session.producer_id) is producer:
            del self._connected[producer.session.producer_id]
        if not lost:
            self._end_if_last()

    def end(self, producer: ConnectedProducer) -> None:
        """It will put no more."""
        self._ended.add(producer.session.producer_id)
        self._end_if_last()

    def why_not_ended(self) -> str:
        """Which producers the end waits for, once one has ended, or all have left without; empty before."""
        if not self._ended:
            left = self._any_came and not self._connected and not self._names
            return "no producer is connected any more, and none has called end()" if left else ""
        names = [one.session.name for one in self._connected.values() if one.session.producer_id not in self._ended]
        names += [name for session, name in self._names.items() if session not in self._ended]
        of = "" if self._num_producers is None else f" of num_producers={self._num_producers}"
        others = f"connected and not ended: {', '.join(names[:5])}" if names else "no other one is connected"
        return f"{len(self._ended)}{of} producers have ended; {others}"

    def _end_if_last(self) -> None:
        if self._num_producers is not None:
            is_last = len(self._ended) >= self._num_producers
        else:
            is_last = bool(self._ended) and self._ended >= self._connected.keys() | self._names.keys()
        if is_last:
            self._end()
