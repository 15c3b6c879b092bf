"""Peers of one run of ``serve``: joins, calls, reports and ends become facts of the ledger, in the order in which they
came. Reports of a rank::

    taken, done, at_barrier, acknowledged   as they are
    fetched       payloads are there, but for those that are gone with their owner: named in the log, and masked
    finished      with the seconds that the rank computed and waited

A report that cannot be read raises WireError: its rank counts as lost. What belongs to an attempt, a step or an item
that the rank has no more is no fault, since it may have been on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import anyio
import msgspec

from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.steps.state import Item
from stream_balancer.errors import WireError
from stream_balancer.host.producers import Producers
from stream_balancer.host.ranks import Member
from stream_balancer.host.sending import Sender
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import Join, Report
from stream_balancer.net.service import Host, Peer
from stream_balancer.wire.codec import RemoteRollout

logger = logging.getLogger("stream_balancer.dispatch")
_MOST_NAMED = 5


class ReportedTimes(NamedTuple):
    """Times that a rank reports of its step."""

    seconds: float
    compute_s: float | None
    waited_s: float | None


class Peers(Sender, Host):
    """Steps in flight, and what ranks and producers say while they are attended to."""

    async def attend(self) -> None:
        """Serve peers until cancelled."""
        self._producers = Producers(self.balancer, self.transport.service)
        self.methods = self._producers.methods
        # versions come in the order in which they are set, also those of calls that are answered meanwhile
        await self._producers.attend(self)

    is_over = False
    """Every rank has all, and was told of the end."""

    def leave(self) -> None:
        """End of attending. Unless all is over, ranks see a loss, and may come to the next ``serve``."""
        # producers stay: their puts go on, and the next serve() answers what is left
        for peer in [peer for member in self.ranks.connected for peer in member.peers.values()]:
            if self.is_over:
                # the news of the end arrives before
                peer.close("all is done")
            else:
                peer.abort()

    # who comes and goes

    def admit(self, peer: Peer, join: Join) -> Any:
        """See :class:`Host`, as all that follow."""
        if join.kind not in ("rank", "producer"):
            raise WireError(f"a {join.kind} joins, and nobody here expects one")
        return (self.ranks if join.kind == "rank" else self._producers).admit(peer, join)

    def on_peer(self, peer: Peer) -> None:
        """A producer or a process of a rank has come in."""
        if peer.kind == "producer":
            self._producers.on_peer(peer)
            return
        member = self.ranks.attach(peer)
        self.handed.note(member.came)
        self._producers.tell_version(peer)
        # a rank is through with all steps that its weights contain, whichever controller it has told; one that begins
        # says so when it asks for its first step, when the version of its weights is set
        if peer.data.goes_on:
            self._note_through(self._steps_before(member.rank.furthest))
        member.note_readiness()
        self.wake()

    def on_end(self, peer: Peer, end: ConnectionEnd) -> None:
        """A producer is gone, or a process of a rank."""
        if peer.kind == "producer":
            self._producers.on_end(peer, end)
        elif (place := self._place_of(peer)) is not None:
            self.ranks.detach(*place, end)
            self.wake()

    def on_gone(self, peer: Peer, end: ConnectionEnd) -> None:
        """A producer does not come back."""
        if peer.kind == "producer":
            self._producers.on_gone(peer, end)

    def _place_of(self, peer: Peer) -> tuple[Member, int] | None:
        """The rank and the seat of a process, if it has them: one that was superseded, given up, or left by the serve()
        before this one is lost already."""
        member, seat = self.ranks.get(peer.data.rank), peer.data.seat
        return None if member is None or member.peers.get(seat) is not peer else (member, seat)

    # what ranks report

    def on_report(self, peer: Peer, report: Report) -> None:
        """Raises WireError for what the rank cannot mean: the service ends its connection, and it is lost."""
        place = self._place_of(peer)
        if place is None:
            return
        member, seat = place
        match report.fact:
            case "taken":
                self.ledger.taken(member.id, seat, report.step, report.attempt)
            case "done" | "fetched" | "at_barrier":
                self._on_work(member, seat, report)
            case "finished":
                self._finished(member, seat, report)
            case "acknowledged":
                self.ledger.acknowledged(member.id, seat, report.step)
            case _:
                raise WireError(f"{member.name} reports {report.fact!r}, which nobody knows")
        member.note_readiness()
        self.wake()

    def _on_work(self, member: Member, seat: int, report: Report) -> None:
        ledger = self.ledger
        # the attempt tells what was on its way when the step began again from what belongs to it
        share = ledger.share_of(member.id, seat, report.step, report.attempt)
        if share is None:
            return
        match report.fact:
            case "done":
                ledger.done(share, seat, report.items)
            case "fetched":
                missing: dict[str, str] = _read(report, dict[str, str])
                # those that were taken away meanwhile are another rank's to report
                self._miss(member, report, share.own(report.items), missing)
                ledger.fetched(share, seat, report.items, missing)
            case "at_barrier":
                ledger.at_barrier(share, seat, _read(report, int | None) or 0)

    def _miss(self, member: Member, report: Report, items: list[Item], missing: dict[str, str]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        there = chain.from_iterable(item.payload.rollouts for item in items)
        lost = {one.rollout_id: one for one in there if one.rollout_id in missing and not one.is_padding}
        if not lost:
            return
        self.core.mark_missing(report.step, [*lost])
        texts = []
        for name, rollout in [*lost.items()][:_MOST_NAMED]:
            label = rollout.handle.owner.label if isinstance(rollout, RemoteRollout) else None
            texts.append(f"{name!r} (put by {label}: {missing[name]})")
        logger.warning(
            "step %d, %s: %d rollouts are gone with their producer and are masked: %s%s",
            report.step, member.name, len(lost), ", ".join(texts), ", ..." if len(lost) > _MOST_NAMED else "",
        )  # fmt: skip

    def _finished(self, member: Member, seat: int, report: Report) -> None:
        times: ReportedTimes | None = _read(report, ReportedTimes | None)
        share = member.rank.active.get(report.step)
        # once for all seats of a rank: they work at the same time
        if times is not None and share is not None and not share.finished:
            self._record(member, report.step, times)
        self.ledger.finished(member.id, seat, report.step, report.attempt)
        # 0: by weights that were loaded
        self._note_through([report.step] if report.attempt else self._steps_before(report.step + 1))

    def _steps_before(self, number: int) -> list[int]:
        return [step for step in self.ledger.steps if step < number]

    def _note_through(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            step = self.ledger.steps.get(number)
            if step is not None and all(step.shares[one].finished for one in step.participants):
                # with the last rank's, another step may leave that is as old
                self.shell.worked_through(number)

    def _record(self, member: Member, step: int, times: ReportedTimes) -> None:
        plan, now = self.plans[step], anyio.current_time()
        place = plan.place_of(member.id)
        if place is None:
            return
        timing = StepTiming(
            step,
            place,
            times.seconds if times.compute_s is None else times.compute_s,
            own=times.compute_s is not None,
            waited_s=times.waited_s,
            ready_s=plan.ready_s.get(member.id, 0.0),
            worked_on=plan.worked_on(place, self.ledger.items_of(step, member.id)),
        )
        self.core.record_step(timing, now)


def _read(report: Report, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(report.about, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"what is said of {report.fact!r} cannot be read: {error}") from None
