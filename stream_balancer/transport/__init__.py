"""How a rank batch gets from the controller to its rank: what every transport offers.

::

    serve() --Link.send--> | transport | --Port.take--> RankFeed
    serve() <-Link.report- |           | <-Port.report- RankFeed

A transport delivers each rank's batches in order and exactly once per link, never more than the rank has given credit
for, and distinguishes a lost peer from a patient one. Steps increase, but need not be consecutive: one may have been
given up.
Both ends are written once, :class:`~.rank_session.RankSession` and :class:`~.rank_port.RankPort`, above a
:class:`~.channel.Channel`; what remains of a transport is how peers find each other. ``memory`` lives in one event
loop; ``gloo`` joins processes. What all of them must do is written as a test:
:func:`stream_balancer.testing.check_transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor

from stream_balancer.errors import RankLostError
from stream_balancer.transport.late_columns import GivenColumns
from stream_balancer.transport.rank_control import RankControl
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import (
    Denominators,
    EndBalancer,
    PartsDone,
    PayloadsFetched,
    PolicyVersion,
    Release,
    Released,
    StatisticsReply,
    StatisticsRequest,
    StepComplete,
    StepHeld,
    StepReport,
)

__all__ = ["Asked", "Link", "Port", "Report", "Transport"]

_NOT_FOR_MESH = (
    "{} is for ranks of one process each: of a model-parallel rank (mesh=) the other processes would not get the part. "
    "Let serve() wait for a lost rank instead, and leave move_late out"
)
Report: TypeAlias = StepReport | GivenColumns | StepHeld | PayloadsFetched | PartsDone | Released
"""What a rank says of a step: done, with its columns where it has a role; worked through, to be acknowledged later;
that its payloads are there; that its parts are done, and whether there are more; or which micro-batches it can
spare."""
Asked: TypeAlias = PolicyVersion | EndBalancer | StatisticsRequest
"""What a rank asks of the balancer: to set a version, to end, to report statistics."""


class Link(Protocol):
    """The controller's end of the way to one rank, for one incarnation of it. Used from one event loop."""

    rank: int
    """DP rank at the other end."""
    role: str
    """Which columns it computes; empty: it is the trainer's."""
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

    def reassign(self, part: RankBatch) -> None:
        """Start sending a part that another rank owed, of a step that this one has; needs no credit. Never blocks.
        Raises RankLostError on a lost link."""
        ...

    def complete(self, message: StepComplete) -> None:
        """The reply to a rank whose parts are done, as are all others'. Never blocks."""
        ...

    def denominators(self, message: Denominators) -> None:
        """What the step divides by, on all ranks: releases a batch that was sent to be confirmed. Never blocks."""
        ...

    def notify(self, message: PolicyVersion | StatisticsReply | Release) -> None:
        """What it learns besides. Never blocks; dropped if the rank is gone."""
        ...

    def report(self) -> Report | Asked | None:
        """The next report, or what the rank asks for, in the order in which they came; None if there is none yet.
        Raises RankLostError once the link is lost and drained, EndOfStream once the rank has closed after
        :meth:`end`."""
        ...

    def end(self) -> None:
        """Notify the rank that no more batches come; its iterator ends after the ones on their way. Never blocks."""
        ...

    def close(self, error: RankLostError) -> None:
        """The rank cannot go on, though it is connected: this link is over with ``error``, and the rank raises
        RankLostError with the same text. It does not join again (``rejoin=True``), or it would come with the same for
        ever. Never blocks; without effect on a link that is over."""
        ...

    async def aclose(self) -> None:
        """Release everything; threads have ended when this returns, even if it is cancelled. The rank sees a loss, and
        may come again. Idempotent."""
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
    role: str = ""
    """Which columns this rank computes; empty: it is the trainer's."""
    control: RankControl
    """The policy version, the end, statistics."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback()``, in whichever thread notices, whenever :meth:`take` may have something new to say."""
        ...

    def take(self) -> RankBatch | None:
        """The next rank batch, or None if none has come yet; taking it gives the controller a credit. Never blocks.

        Raises EndOfStream at the end, RankLostError if the controller went away (after what had come was taken),
        BusyResourceError or ValueError if the controller refused this rank.
        """
        ...

    def next_part(self, step: int) -> RankBatch | StepComplete | None:
        """What the rank takes over of lost ranks in this step, which it has; or that there is no more, on any rank.
        None: asked, and no reply has come yet. Never blocks. Raises RankLostError if the controller went away."""
        raise ValueError(_NOT_FOR_MESH.format("reassigned()"))

    def begin(self, step: int, number: int) -> int | None:
        """The trainer begins the next of the ``number`` micro-batches that its rank batch of this step has: that one's
        index, from 0. None: no more of them are its own. What it has begun stays with it. Never blocks."""
        raise ValueError(_NOT_FOR_MESH.format("micro_batches()"))

    def report(self, done: StepReport | StepHeld, columns: Mapping[str, Tensor] | None = None) -> None:
        """Acknowledge ``done.step``, or say that this will follow. ``columns``: ``[T]`` each of the rank batch, on the
        CPU, from a rank that has a role. Never blocks; a lost controller is raised by
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
