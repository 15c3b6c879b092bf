"""The steps that some rank has not done, and what follows from what the ranks report of them.

::

    StepHeld         a rank's trainer is through with a step; with the last rank's, the next may be as old
    StepReport       a rank has done a step; with the last rank's, the step is acknowledged to the balancer
    GivenColumns     the same of a rank that has a role, with what it has computed
    PartsDone        a rank asks what it takes over of others, before the ranks meet
    Released         a rank spares micro-batches that it has not begun, since others have nothing left to do
    PayloadsFetched  a rank has the payloads that lay with producers; with the last rank's, all learn what to divide by

A report that is against the protocol raises RankLostError: its rank counts as lost. What is given to which rank, and
when, is decided in :mod:`stream_balancer.controller.delivery`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.rank_queues import OpenStep, RankQueue
from stream_balancer.core.batching import reassign
from stream_balancer.core.step_times import StepTiming
from stream_balancer.errors import RankLostError, WireError
from stream_balancer.transport import Asked, Report
from stream_balancer.transport.late_columns import GivenColumns
from stream_balancer.types import Batch, Rollout
from stream_balancer.wire.messages import (
    EndBalancer,
    MissingRollout,
    PartsDone,
    PayloadsFetched,
    Release,
    Released,
    StatisticsRequest,
    StepColumns,
    StepHeld,
    StepReport,
)
from stream_balancer.wire.statistics import reply_to

__all__ = ["Acknowledged", "OpenSteps", "RoleSource", "Source"]

logger = logging.getLogger("stream_balancer.dispatch")


class Acknowledged(Protocol):
    """Whom steps are reported to: a balancer, or a role."""

    def acknowledge(self, step: int) -> None: ...

    def in_flight(self) -> tuple[Batch, ...]: ...

    def record_step(self, timing: StepTiming) -> None: ...


class Source(Acknowledged, Protocol):
    """What ``serve`` asks of a balancer: of a :class:`StreamBalancer`, or of a script of batches in tests."""

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]: ...

    def nack(self, step: int) -> None: ...


class RoleSource(Acknowledged, Protocol):
    """What is reported to a role besides: see :mod:`stream_balancer.controller.roles`."""

    name: str
    balancer: Source

    def give(self, step: int, position: int, columns: Mapping[str, Tensor]) -> None: ...

    def missed(self, step: int, missing: Sequence[MissingRollout]) -> None: ...


class OpenSteps:
    """All steps that some rank of the trainer, or of a role, has not done, in one run of ``serve``."""

    def __init__(
        self,
        balancer: Acknowledged,
        role: RoleSource | None,
        lose: Callable[[RankQueue, RankLostError], None],
        send_parts: Callable[[RankQueue], None],
        *,
        move_late: bool,
    ) -> None:
        """``balancer``: whom steps are reported to, the ``role`` if there is one. ``lose(rank, error)`` is called for a
        rank that cannot do its step any more, though it is connected; ``send_parts(rank)`` for one that has taken over
        something. ``move_late``: as :func:`serve`'s."""
        self._balancer, self._role = balancer, role
        asked = balancer if role is None else role.balancer
        self._asked = asked if isinstance(asked, StreamBalancer) else None  # what ranks set, end and ask
        self._lose = lose
        self._send_parts = send_parts
        self._move_late = move_late
        self._steps: dict[int, OpenStep] = {}
        self._slow: tuple[int, int] | None = None  # rank and step of the straggler that was logged

    def __getitem__(self, number: int) -> OpenStep:
        """Raises KeyError for a step that all ranks have done."""
        return self._steps[number]

    def add(self, batch: Batch, ranks: Sequence[RankQueue], ready_s: Sequence[float], roles_s: float) -> None:
        """These ranks are given a batch, or another row of its step; ``ready_s``: for each, seconds it had been ready
        when the last one was; ``roles_s``: seconds it was with other roles."""
        step = self._steps.setdefault(batch.step, OpenStep(batch, ranks, ready_s, roles_s))
        step.batch = batch

    def of_rank(self, rank: RankQueue) -> list[OpenStep]:
        """Those it was given and has not acknowledged, oldest first."""
        return [self._steps[rank_batch.step] for rank_batch in rank.unacknowledged]

    # ranks that are lost, and that come again

    def lost(self, rank: RankQueue) -> None:
        """The others go on with their steps; what this rank owes of them waits for its next incarnation."""
        for step in self.of_rank(rank):
            step.stops_asking(rank)
            if step.agreement is not None:
                step.agreement.lost(step.position[rank])

    def begins_again(self, rank: RankQueue) -> None:
        """It has come, or come again: it works on all that it owes from the beginning."""
        for step in self._steps.values():
            step.begins_again(rank)

    def drop_acknowledged(self, rank: RankQueue) -> None:
        """A rank that comes back does not get what the user has acknowledged meanwhile: its checkpoint holds it."""
        in_flight = {batch.step for batch in self._balancer.in_flight()}
        # a step is in flight once its last row has left; until then nobody can have acknowledged it
        complete = [one.step for one in rank.unacknowledged if one.is_last]
        for number in [one for one in complete if one not in in_flight]:
            rank.drop(number)
            step = self._steps[number]
            if step.agreement is not None:  # the others wait for its answer, which will not come
                step.agreement.fetched(step.position[rank], ())
                self._release(step)
            self._settle(rank, step)

    def hand_over(self, balancer: StreamBalancer, lost: RankQueue) -> list[int]:
        """What a rank owed is for the others: planned over them where they have not met yet, dropped where they have.
        -> the numbers of the steps that were planned again."""
        owed = self.of_rank(lost)
        unmet = [step for step in owed if not step.met]
        for step in unmet:
            _reassign(balancer, step, step.owed_by(lost), [rank for rank in step.owing if rank is not lost])
        for step in owed:
            self._settle(lost, step)
        lost.unacknowledged.clear()
        return [step.batch.step for step in unmet]

    # reports

    def take_in(self, rank: RankQueue, report: Report | Asked) -> None:
        if isinstance(report, StepHeld):
            self._worked_through(rank, report.step)
        elif isinstance(report, StepReport):
            self._acknowledge(rank, report)
        elif isinstance(report, GivenColumns):
            self._take_columns(rank, report)
        elif isinstance(report, PartsDone):
            self._parts_done(rank, report)
        elif isinstance(report, Released):
            self._released(rank, report)
        elif isinstance(report, PayloadsFetched):
            self._fetched(rank, report)
        elif self._asked is not None:
            self._control(self._asked, rank, report)

    def _control(self, balancer: StreamBalancer, rank: RankQueue, asked: Asked) -> None:
        """A rank sets, ends or asks, as the controller's own process could."""
        if isinstance(asked, EndBalancer):
            balancer.end()
        elif isinstance(asked, StatisticsRequest):
            if rank.link is not None:
                rank.link.notify(reply_to(asked.number, balancer.statistics()))
        elif balancer.version is None or asked.version >= balancer.version:
            balancer.set_version(asked.version)
        else:  # where all ranks set the same, one may be late
            logger.warning(
                "rank %d set version %d, which is %d by now: passed over", rank.rank, asked.version, balancer.version
            )

    def _take_columns(self, rank: RankQueue, report: GivenColumns) -> None:
        assert self._role is not None  # the session of a trainer's rank takes none
        _check_works_on(rank, report.step)
        try:
            self._role.give(report.step, self._steps[report.step].position[rank], report.columns)
        except ValueError as error:
            raise _broke_protocol(rank.rank, report.step, str(error)) from error
        self._acknowledge(rank, report.done)

    def _acknowledge(self, rank: RankQueue, report: StepReport | StepColumns) -> None:
        _check_works_on(rank, report.step)
        # The report is checked above to be of the first: ranks work in order, so anything else would acknowledge what
        # nobody has trained on.
        rank.sent -= rank.drop(report.step)
        rank.sent_parts.pop(report.step, None)
        step = self._steps[report.step]
        planned, work = (step.batch.ranks[step.position[rank]],), step.work_of(rank)
        self._balancer.record_step(
            StepTiming(
                report.step,
                step.position[rank],
                report.seconds if report.compute_s is None else report.compute_s,
                own=report.compute_s is not None,
                waited_s=report.waited_s,
                ready_s=step.ready_s[rank],
                roles_s=step.roles_s,
                worked_on=None if work == planned else work,
            )
        )
        self._is_through(rank, step)
        self._settle(rank, step)

    def _worked_through(self, rank: RankQueue, number: int) -> None:
        step = self._steps.get(number)
        if step is not None:
            self._is_through(rank, step)
            self._note_worked(step)

    def _is_through(self, rank: RankQueue, step: OpenStep) -> None:
        step.is_through(rank)
        for other in step.asking:
            self._lose(other, _met_without(other.rank, step.batch.step))

    def _note_worked(self, step: OpenStep) -> None:
        """Once all ranks are through with a step, and ask for the next, another may leave that is as old."""
        if not step.busy and isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.worked_through(step.batch.step)

    def _settle(self, rank: RankQueue, step: OpenStep) -> None:
        """A rank has done a step, or need not do it. Once that is so for all, the balancer need not keep it."""
        number = step.batch.step
        step.leave(rank)
        if step.owing:
            self._note_worked(step)
            self._reply(step)
            return
        del self._steps[number]
        with suppress(ValueError):  # the user was first: acknowledge_through() at a checkpoint
            self._balancer.acknowledge(number)
        self._log_straggler()

    def _parts_done(self, rank: RankQueue, report: PartsDone) -> None:
        """A rank asks what it takes over in a step, before the ranks meet."""
        step = self._steps.get(report.step)
        if step is None or rank not in step.owing:
            text = f"rank {rank.rank} asks for more of step {report.step}, which it does not owe"
            raise _broke_protocol(rank.rank, report.step, text)
        if report.parts > len(step.parts_of(rank)):
            text = f"rank {rank.rank} has done {report.parts} parts of step {report.step}, which it was not given"
            raise _broke_protocol(rank.rank, report.step, text)
        if step.met:
            raise _met_without(rank.rank, report.step)
        step.asks(rank, report)
        self._reply(step)

    def _released(self, rank: RankQueue, report: Released) -> None:
        """A rank spares micro-batches of a step, or says that it has begun all."""
        step = self._steps.get(report.step)
        if step is None or rank not in step.owing:  # it was through with the step before it was asked
            return
        try:
            step.spares(rank, report)
        except WireError as error:
            raise _broke_protocol(rank.rank, report.step, str(error)) from error
        self._reply(step)

    def _move(self, balancer: StreamBalancer, step: OpenStep) -> None:
        """Whoever has nothing left to do takes over what others have not begun."""
        for rank in step.late():
            if rank.link is not None:
                rank.link.notify(Release(step.batch.step, len(step.asking)))
        moved, takers = step.take_moved()
        _reassign(balancer, step, moved, takers)
        for rank in takers:
            self._send_parts(rank)

    def _reply(self, step: OpenStep) -> None:
        if self._move_late and isinstance(self._balancer, StreamBalancer) and step.may_be_reassigned:
            self._move(self._balancer, step)
        for rank, complete in step.replies():
            if rank.link is not None:
                rank.link.complete(complete)

    def _log_straggler(self) -> None:
        """Once for each that is found."""
        straggler = self._balancer.straggler() if isinstance(self._balancer, StreamBalancer) else None
        slow = None if straggler is None else (straggler.rank, straggler.since_step)
        if slow is not None and slow != self._slow:
            logger.warning("%s", straggler)
        self._slow = slow

    # payloads that lie with producers

    def _fetched(self, rank: RankQueue, report: PayloadsFetched) -> None:
        """A rank has the payloads of a step, but for those that are gone with their producer.

        Once all ranks have theirs, each of them learns what to divide by. A rank that comes again fetches again, and
        learns it then.
        """
        step = self._steps.get(report.step)
        agreement = None if step is None else step.agreement
        try:
            # a rank that has come since the step was given out has no part in it
            if step is None or agreement is None or rank not in step.position or report.step in rank.fetched:
                raise WireError(f"rank {rank.rank} says that it has fetched step {report.step}, which it need not")
            gone = agreement.fetched(step.position[rank], report.missing)
        except WireError as error:
            raise _broke_protocol(rank.rank, report.step, str(error)) from error
        rank.fetched.add(report.step)
        if gone:
            self._mask(rank, report, {rollout.rollout_id for rollout in gone})
        self._release(step)

    def _release(self, step: OpenStep) -> None:
        """Send to all who wait for it what the step divides by, once that is final."""
        final = None if step.agreement is None else step.agreement.final
        for rank in step.position:
            if final is not None and rank.link is not None and final.step in rank.fetched:
                rank.fetched.discard(final.step)
                rank.link.denominators(final)

    def _mask(self, rank: RankQueue, report: PayloadsFetched, rollout_ids: set[str]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        if self._asked is not None:
            self._asked.parts.core.mark_missing(report.step, rollout_ids)
        named = [one for one in report.missing if one.rollout_id in rollout_ids]
        if self._role is not None:
            self._role.missed(report.step, named)
        text = ", ".join(f"{one.rollout_id!r} (put by {one.owner}: {one.cause})" for one in named[:5])
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        logger.warning(
            "step %d, %s: %d rollouts are gone with their producer and are masked: %s%s",
            report.step,
            rank.name,
            len(named),
            text,
            more,
        )


def _check_works_on(rank: RankQueue, step: int) -> None:
    rows = rank.rows_of(step)
    if not rows or rank.sent < len(rows) or rank.unacknowledged[0].step != step or not rows[-1].is_last:
        text = f"{rank.name} acknowledged step {step}, which it was not working on"
        raise _broke_protocol(rank.rank, step, text)


def _reassign(balancer: StreamBalancer, step: OpenStep, rollouts: list[Rollout], takers: list[RankQueue]) -> None:
    """These ranks take over what others had: planned over them, within the step."""
    by_position = {step.position[rank]: rank for rank in takers}
    parts = reassign(balancer.parts.core.state, step.batch, rollouts, sorted(by_position)) if rollouts else {}
    for position, part in parts.items():
        step.take_over(by_position[position], part)


def _met_without(rank: int, step: int) -> RankLostError:
    return RankLostError(
        f"rank {rank} asks what it takes over in step {step}, with which another rank is through: the ranks have met "
        "without it. Restart it, with the weights of another rank",
        rank=rank,
        step=step,
        cause="the ranks have met without it",
    )


def _broke_protocol(rank: int, step: int, text: str) -> RankLostError:
    return RankLostError(f"{text}. Restart it", rank=rank, step=step, cause="broke the protocol")
