"""Reports of ranks become facts of the ledger of steps.

::

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
from itertools import chain
from typing import Any, NamedTuple

import anyio
import msgspec

from stream_balancer.core.step_times import StepTiming
from stream_balancer.core.steps.state import Item
from stream_balancer.errors import WireError
from stream_balancer.host.plans import Plan
from stream_balancer.host.ranks import Member
from stream_balancer.host.sending import InFlight
from stream_balancer.net.messages import Report
from stream_balancer.wire.codec import remote_of
from stream_balancer.wire.payload import Memory

__all__ = ["Reports"]

logger = logging.getLogger("stream_balancer.dispatch")
_MOST_NAMED = 5
_OF_WEIGHTS = ("finished", "acknowledged")  # also of steps that it was not given: it took over another rank's weights


class Times(NamedTuple):
    """Times that a rank reports of its step."""

    seconds: float
    compute_s: float | None
    waited_s: float | None


class Reports:
    """Takes in what ranks report, in the event loop."""

    def __init__(self, here: InFlight) -> None:
        self._here = here

    def take_in(self, member: Member, seat: int, report: Report, memory: Memory | None) -> None:
        """Raises WireError for what the rank cannot mean."""
        if memory is not None and report.fact != "done":
            raise WireError(f"{member.name} reports {report.fact!r} with columns")
        if report.fact not in _OF_WEIGHTS and not self._was_given(member, report.step):
            raise WireError(f"{member.name} reports {report.fact!r} of step {report.step}, which it was not given")
        # the attempt tells what was on its way when the step began again from what belongs to it
        of_share = member.id, seat, report.step, report.attempt
        match report.fact:
            case "taken":
                self._here.ledger.taken(*of_share)
            case "done":
                self._take_columns(member, report, memory)
                self._here.ledger.done(*of_share, report.items)
            case "fetched":
                missing: dict[str, str] = _read(report, dict[str, str])
                if missing and (items := self._items(member, report)):
                    self._miss(member, report.step, missing, items)
                self._here.ledger.fetched(*of_share, report.items, missing)
            case "released":
                self._check_released(member, seat, report)
                self._here.ledger.released(*of_share, report.items)
            case "at_barrier":
                self._here.ledger.at_barrier(*of_share, _read(report, int | None) or 0)
            case "finished":
                self._finished(member, seat, report)
            case "acknowledged":
                self._here.ledger.acknowledged(member.id, seat, report.step)
            case _:
                raise WireError(f"{member.name} reports {report.fact!r}, which nobody knows")

    def _was_given(self, member: Member, step: int) -> bool:
        """By this controller, or by one before it."""
        ledger = self._here.ledger
        last_step = -1 if member.last_step is None else member.last_step
        return (
            step in ledger.steps or step <= max(last_step, ledger.last_acked) or step in ledger.ranks[member.id].stale
        )

    def _items(self, member: Member, report: Report) -> list[Item]:
        """Items that the report names, and that are still the rank's own."""
        step = self._here.ledger.steps.get(report.step)
        share = None if step is None else step.shares.get(member.id)
        if share is None or share.attempt != report.attempt:
            return []
        # those that were taken away meanwhile are another rank's to report
        return [share.items[id_] for id_ in report.items if id_ in share.items]

    def _take_columns(self, member: Member, report: Report, memory: Memory | None) -> None:
        if member.id.role:
            if len(report.items) != 1:
                raise WireError(f"{member.name} gives columns of {len(report.items)} micro-batches at once")
            for item in self._items(member, report):
                self._here.columns.add(report.step, member.id.role, item.payload, report.about, memory)
        elif memory is not None:
            raise WireError(f"{member.name} gives columns, and has no role")

    def _check_released(self, member: Member, seat: int, report: Report) -> None:
        step = self._here.ledger.steps.get(report.step)
        share = None if step is None else step.shares.get(member.id)
        # it may give back what it was asked for, and no more: else it could throw work away
        if share is not None and share.answers >> seat & 1 and not share.recalled.keys() >= {*report.items}:
            raise WireError(f"{member.name} gives back micro-batches of step {report.step} that it was not asked for")

    # payloads

    def _miss(self, member: Member, step: int, missing: dict[str, str], items: list[Item]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        there = {one.rollout_id: one for one in chain.from_iterable(item.payload.rollouts for item in items)}
        # or a rank could mask what others train on
        if not there.keys() >= missing.keys():
            raise WireError(f"{member.name} misses rollouts of step {step} that it was not given")
        named = [(there[name], cause) for name, cause in missing.items() if not there[name].is_padding]
        self._here.balancer.parts.core.mark_missing(step, [one.rollout_id for one, _ in named])
        texts = []
        for rollout, cause in named[:_MOST_NAMED]:
            remote = remote_of(rollout)
            texts.append(f"{rollout.rollout_id!r} (put by {remote and remote.handle.owner.label}: {cause})")
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        logger.warning(
            "step %d, %s: %d rollouts are gone with their producer and are masked: %s%s",
            step,
            member.name,
            len(named),
            ", ".join(texts),
            more,
        )

    # times

    def _finished(self, member: Member, seat: int, report: Report) -> None:
        times: Times | None = _read(report, Times | None)
        # one NaN would spoil the learned costs of all ranks
        if times is not None and not all(0.0 <= one < math.inf for one in times if one is not None):
            raise WireError(f"{member.name} reports impossible durations: {times}")
        here, plan = self._here, self._here.plans.get(report.step)
        here.ledger.finished(member.id, seat, report.step, report.attempt)
        # reports of a former connection may come late, and weights do not go back
        member.next_step = max(report.step + 1, member.next_step or 0)
        if plan is not None and not member.id.role:
            # once for all seats of a rank: they work at the same time
            if times is not None and member.id not in plan.finished:
                self._record(member, plan, report.step, times)
            self._through(member, plan, report.step)

    def joined(self, member: Member) -> None:
        """A rank is through with all steps that its weights contain, whichever controller it has told."""
        for number, plan in list(self._here.plans.items()):
            if number < (member.next_step or 0):
                self._through(member, plan, number)

    def _through(self, member: Member, plan: Plan, number: int) -> None:
        plan.finished.add(member.id)
        step = self._here.ledger.steps.get(number)
        if step is not None and plan.finished >= step.participants:
            # with the last rank's, another step may leave that is as old
            self._here.balancer.parts.consumer.worked_through(number)

    def _record(self, member: Member, plan: Plan, step: int, times: Times) -> None:
        place, planned = plan.place_of(member.id), plan.rank_batch(member.id)
        if place is None or planned is None:
            return
        now = anyio.current_time()
        begun_at = plan.begun_at.get(member.id, now)
        timing = StepTiming(
            step,
            place,
            times.seconds if times.compute_s is None else times.compute_s,
            own=times.compute_s is not None,
            waited_s=times.waited_s,
            ready_s=plan.ready_s.get(member.id, 0.0),
            roles_s=begun_at - plan.planned_at if self._here.columns.names else 0.0,
            worked_on=plan.worked_on(member.id, self._here.ledger.items_of(step, member.id)),
        )
        self._here.balancer.parts.core.record_step(timing, now)


def _read(report: Report, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(report.about, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"what is said of {report.fact!r} cannot be read: {error}") from None
