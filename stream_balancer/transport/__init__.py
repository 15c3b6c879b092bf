"""How a rank batch gets from the controller to its rank: what every transport offers.

::

    serve() --Link.send--> | transport | --Port.take--> RankFeed
    serve() <-Link.report- |           | <-Port.report- RankFeed

A transport delivers each rank's batches in order and exactly once per link, never more than the rank has given credit
for, and tells a lost peer from a patient one. Steps increase, but need not be consecutive: one may have been given up.
Both ends are written once, :class:`~.rank_session.RankSession` and :class:`~.rank_port.RankPort`, above a
:class:`~.channel.Channel`; what remains of a transport is how peers find each other. ``memory`` lives in one event
loop; ``gloo`` joins processes. What all of them must do is written as a test:
:func:`stream_balancer.testing.check_transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import Denominators, PayloadsFetched, StepHeld, StepReport

__all__ = ["Link", "Port", "Report", "Transport"]

Report: TypeAlias = StepReport | StepHeld | PayloadsFetched
"""What a rank says of a step: done; worked through, to be acknowledged later; or that its payloads are there."""


class Link(Protocol):
    """The controller's end of the way to one rank, for one incarnation of it. Used from one event loop."""

    rank: int
    """DP rank at the other end."""
    incarnation: int
    """How often that rank was started before."""

    @property
    def credits(self) -> int:
        """Batches the rank has room for now."""
        ...

    @property
    def live(self) -> bool:
        """False once lost or closed."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` in the event loop, but in no task, whenever credits, reports or health have changed."""
        ...

    def send(self, batch: RankBatch, *, confirm: bool = False) -> None:
        """Start sending ``batch``; never blocks. ``confirm``: the rank answers with PayloadsFetched, and holds the
        batch until :meth:`denominators`; so for every batch some of whose payloads lie elsewhere. Raises WouldBlock
        without a credit, RankLostError on a lost link."""
        ...

    def denominators(self, message: Denominators) -> None:
        """What the step divides by, on all ranks: releases a batch that was sent to be confirmed. Never blocks."""
        ...

    def report(self) -> Report | None:
        """The next report, or None if there is none yet. Raises RankLostError once the link is lost and drained,
        EndOfStream once the rank has closed after :meth:`end`."""
        ...

    def end(self) -> None:
        """Notify the rank that no more batches come; its iterator ends after the ones on their way. Never blocks."""
        ...

    async def aclose(self) -> None:
        """Release everything; threads have ended when this returns, even if it is cancelled. Idempotent."""
        ...


class Transport(Protocol):
    """The controller's side: where ranks connect."""

    dp_size: int
    """DP ranks that take part."""

    async def accept(self) -> Link:
        """The next rank that connects. If cancelled, no link is lost. Raises ClosedResourceError once closed."""
        ...

    async def aclose(self) -> None:
        """Refuse further ranks and close every link. Idempotent."""
        ...


class Port(Protocol):
    """The rank's end. Safe to use from any thread unless the transport says otherwise."""

    rank: int
    """This DP rank."""
    dp_size: int
    """DP ranks that take part."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback()``, in whichever thread notices, whenever :meth:`take` may have something new to say."""
        ...

    def take(self) -> RankBatch | None:
        """The next rank batch, or None if none has come yet; taking it gives the controller a credit. Never blocks.

        Raises EndOfStream at the end, RankLostError if the controller went away (after what had come was taken),
        BusyResourceError or ValueError if the controller refused this rank.
        """
        ...

    def report(self, done: StepReport | StepHeld) -> None:
        """Acknowledge ``done.step``, or say that this will follow. Never blocks; a lost controller is raised by
        :meth:`take`."""
        ...

    def leave(self) -> None:
        """Close gracefully without waiting for the answer, for a rank that has all it wanted. Never blocks.
        Idempotent."""
        ...

    def close(self) -> None:
        """Close gracefully and release everything; threads have ended when this returns. Blocks for a moment.
        Idempotent."""
        ...

    async def aclose(self) -> None:
        """:meth:`close`, without blocking the event loop."""
        ...
