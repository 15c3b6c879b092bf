"""Peers of one run of ``serve``: joins, calls, reports and ends become facts of the ledger, in the order in which they
came. Reports of a rank::

    taken, released, at_barrier, acknowledged   as they are
    done          of a role: with the columns of one item
    fetched       payloads are there, but for those that are gone with their owner: named in the log, and masked
    finished      with the seconds that the rank computed and waited

A report that is against the protocol raises WireError: its rank counts as lost. What belongs to an attempt, a step or
an item that the rank has no more is no fault, since it may have been on its way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import anyio
import msgspec

from stream_balancer.core.step_times import StepTiming
from stream_balancer.core.steps.state import Item, Share
from stream_balancer.errors import WireError
from stream_balancer.host.producers import Producers
from stream_balancer.host.ranks import Member, forget
from stream_balancer.host.records import Came
from stream_balancer.host.sending import InFlight
from stream_balancer.net.errors import ConnectionEnd
from stream_balancer.net.messages import Join, Report
from stream_balancer.net.service import Peer, Service
from stream_balancer.wire.codec import remote_of
from stream_balancer.wire.payload import Memory

logger = logging.getLogger("stream_balancer.dispatch")
_COLUMN_BYTES = 2**32  # of one micro-batch; what comes is then checked against its tokens
_MOST_NAMED = 5
_OF_WEIGHTS = ("finished", "acknowledged")  # also of steps that it was not given: it took over another rank's weights


class Times(NamedTuple):
    """Times that a rank reports of its step."""

    seconds: float
    compute_s: float | None
    waited_s: float | None


class Peers:
    """Ranks and producers, while they are attended to."""

    def __init__(
        self, here: InFlight, service: Service, changed: Callable[[], object], joined: Callable[[], object]
    ) -> None:
        """``changed()`` is called after each fact, ``joined()`` when a rank has come in."""
        self._here, self._service, self._changed, self._joined = here, service, changed, joined
        self._producers = Producers(here.balancer, service, direct=True)

    async def attend(self) -> None:
        """Serve peers until cancelled."""
        # versions come in the order in which they are set, also those of calls that are answered meanwhile
        await self._producers.attend(self._admit, self._on_peer)

    def leave(self) -> None:
        """End of attending: ranks see a loss, and may come to the next ``serve``."""
        # producers stay: their puts go on, and the next serve() answers what is left
        for peer in [peer for peer in self._service.peers.values() if peer.kind == "rank"]:
            forget(peer)
            peer.abort()

    # who comes and goes

    def _admit(self, peer: Peer, join: Join) -> Any:
        if join.kind == "rank":
            self._here.ranks.admit(join)
            return None
        if join.kind != "producer":
            raise WireError(f"a {join.kind} joins, and nobody here expects one")
        return self._producers.admit(peer, join)

    def _on_peer(self, peer: Peer) -> None:
        if peer.kind != "rank":
            self._producers.on_peer(peer)
            return
        member, seat = self._here.ranks.attach(peer)
        peer.on_report = partial(self._on_report, member, seat, peer)
        peer.on_end = partial(self._on_end, member, seat)
        role, roles = member.id.role, self._here.columns.names
        # after attach(): its number must be known, so that who waits for it is told why
        if role and role not in roles:
            text = (
                f"{member.name} is asked for nothing: serve() has the roles {list(roles)}. Name it in serve(roles=), "
                "with its columns"
            )
            self._break(member, seat, peer, text, "nobody asks for its columns")
            return
        # only a role sends columns; from others not a byte is taken into memory
        peer.max_report_bytes = _COLUMN_BYTES if role else 0
        self._here.handed.note(Came(*member.id, member.rank.incarnation, False, sorted(member.fenced)))
        self._producers.tell_version(peer)
        # a rank is through with all steps that its weights contain, whichever controller it has told
        for number in [number for number in self._here.ledger.steps if number < member.rank.furthest]:
            self._note_through(number)
        self._joined()
        self._note_readiness(member)

    def _on_end(self, member: Member, seat: int, end: ConnectionEnd) -> None:
        self._here.ranks.detach(member, seat, end)
        self._changed()

    def _break(self, member: Member, seat: int, peer: Peer, text: str, cause: str, step: int | None = None) -> None:
        """A rank cannot go on, though it is connected. It does not join again, or it would come with the same."""
        forget(peer)
        peer.close(text)
        self._here.ranks.lose(member, seat, member.lost(cause, text, step))
        self._changed()

    def _note_readiness(self, member: Member) -> None:
        member.note_readiness(ready=self._here.ledger.room(member.id) > 0)

    # what ranks report

    def _on_report(self, member: Member, seat: int, peer: Peer, report: Report, memory: Memory | None) -> None:
        try:
            self._take_in(member, seat, report, memory)
        # the fault of one rank is its loss, not the end of serve()
        except WireError as error:
            self._break(member, seat, peer, f"{error}. Restart it", "broke the protocol", report.step)
        self._note_readiness(member)
        self._changed()

    def _take_in(self, member: Member, seat: int, report: Report, memory: Memory | None) -> None:
        """Raises WireError for what the rank cannot mean."""
        ledger, who, fact = self._here.ledger, member.name, report.fact
        if memory is not None and (fact != "done" or not member.id.role):
            raise WireError(f"{who} reports {fact!r} with columns, and has no role or none to give")
        # by this controller, or by one before it
        given = report.step in ledger.steps or report.step <= ledger.last_acked or report.step in member.rank.stale
        if not given and fact not in _OF_WEIGHTS:
            raise WireError(f"{who} reports {fact!r} of step {report.step}, which it was not given")
        # the attempt tells what was on its way when the step began again from what belongs to it
        of_share = member.id, seat, report.step, report.attempt
        match fact:
            case "taken":
                ledger.taken(*of_share)
            case "done":
                if member.id.role and len(report.items) != 1:
                    raise WireError(f"{who} gives columns of {len(report.items)} micro-batches at once")
                for item in self._items(member, report) if member.id.role else ():
                    self._here.columns.add(report.step, member.id.role, item.payload, report.about, memory)
                ledger.done(*of_share, report.items)
            case "fetched":
                missing: dict[str, str] = _read(report, dict[str, str])
                if missing and (items := self._items(member, report)):
                    self._miss(who, report.step, missing, items)
                ledger.fetched(*of_share, report.items, missing)
            case "released":
                share = self._share(member, report.step)
                # it may give back what it was asked for, and no more: else it could throw work away
                if share is not None and share.answers >> seat & 1 and not share.recalled.keys() >= {*report.items}:
                    raise WireError(f"{who} gives back micro-batches of step {report.step} that it was not asked for")
                ledger.released(*of_share, report.items)
            case "at_barrier":
                ledger.at_barrier(*of_share, _read(report, int | None) or 0)
            case "finished":
                self._finished(member, seat, report)
            case "acknowledged":
                ledger.acknowledged(member.id, seat, report.step)
            case _:
                raise WireError(f"{who} reports {fact!r}, which nobody knows")

    def _share(self, member: Member, step: int) -> Share | None:
        there = self._here.ledger.steps.get(step)
        return None if there is None else there.shares.get(member.id)

    def _items(self, member: Member, report: Report) -> list[Item]:
        """Items that the report names, and that are still the rank's own."""
        share = self._share(member, report.step)
        if share is None or share.attempt != report.attempt:
            return []
        # those that were taken away meanwhile are another rank's to report
        return [share.items[id_] for id_ in report.items if id_ in share.items]

    def _miss(self, who: str, step: int, missing: dict[str, str], items: list[Item]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        there = {one.rollout_id: one for one in chain.from_iterable(item.payload.rollouts for item in items)}
        # or a rank could mask what others train on
        if not there.keys() >= missing.keys():
            raise WireError(f"{who} misses rollouts of step {step} that it was not given")
        named = [(there[name], cause) for name, cause in missing.items() if not there[name].is_padding]
        self._here.balancer.parts.core.mark_missing(step, [one.rollout_id for one, _ in named])
        texts = []
        for rollout, cause in named[:_MOST_NAMED]:
            remote = remote_of(rollout)
            texts.append(f"{rollout.rollout_id!r} (put by {remote and remote.handle.owner.label}: {cause})")
        logger.warning(
            "step %d, %s: %d rollouts are gone with their producer and are masked: %s%s",
            step, who, len(named), ", ".join(texts), ", ..." if len(named) > _MOST_NAMED else "",
        )  # fmt: skip

    def _finished(self, member: Member, seat: int, report: Report) -> None:
        times: Times | None = _read(report, Times | None)
        # one NaN would spoil the learned costs of all ranks
        if times is not None and not all(0.0 <= one < math.inf for one in times if one is not None):
            raise WireError(f"{member.name} reports impossible durations: {times}")
        share = self._share(member, report.step)
        # once for all seats of a rank: they work at the same time
        if times is not None and not member.id.role and share is not None and not share.finished:
            self._record(member, report.step, times)
        self._here.ledger.finished(member.id, seat, report.step, report.attempt)
        self._note_through(report.step)

    def _note_through(self, number: int) -> None:
        step = self._here.ledger.steps.get(number)
        if step is not None and all(step.shares[one].finished for one in step.participants):
            # with the last rank's, another step may leave that is as old
            self._here.balancer.parts.consumer.worked_through(number)

    def _record(self, member: Member, step: int, times: Times) -> None:
        plan, now = self._here.plans[step], anyio.current_time()
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
            roles_s=plan.begun_at.get(member.id, now) - plan.planned_at if self._here.columns.names else 0.0,
            worked_on=plan.worked_on(place, self._here.ledger.items_of(step, member.id)),
        )
        self._here.balancer.parts.core.record_step(timing, now)


def _read(report: Report, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(report.about, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"what is said of {report.fact!r} cannot be read: {error}") from None
