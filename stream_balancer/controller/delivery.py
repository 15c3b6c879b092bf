"""Delivery: what each rank has been given and has not acknowledged, and what follows from what it reports.

::

    add(batch)     a rank batch into every rank's queue
    attach(link)   a rank has come, or come again: its queue is sent from the front
    advance(link)  take in its reports, send while it has credits
    StepReport     the rank's batch leaves its queue; with the last rank's, the step is acknowledged to the balancer

A queue outlives its link: what a lost rank had not acknowledged is sent again to its next incarnation, same plan, same
order. Every method is called in the event loop and returns at once; waiting, tasks and the life of links are
:mod:`stream_balancer.controller.serve`'s.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Protocol

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.denominators import StepAgreement
from stream_balancer.controller.rank_queues import OpenStep, RankQueue
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.step_times import StepTiming
from stream_balancer.errors import EndOfStream, RankLostError, WireError
from stream_balancer.transport import Asked, Link, Report
from stream_balancer.types import Batch
from stream_balancer.wire.messages import (
    EndBalancer,
    PartsDone,
    PayloadsFetched,
    PolicyVersion,
    StatisticsRequest,
    StepHeld,
    StepReport,
)
from stream_balancer.wire.statistics import reply_to

__all__ = ["Delivery", "Source"]

logger = logging.getLogger("stream_balancer.dispatch")


class Source(Protocol):
    """What ``serve`` asks of a balancer: of a :class:`StreamBalancer`, or of a script of batches in tests."""

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]: ...

    def acknowledge(self, step: int) -> None: ...

    def nack(self, step: int) -> None: ...

    def in_flight(self) -> tuple[Batch, ...]: ...

    def record_step(self, timing: StepTiming) -> None: ...


class Delivery:
    """All ranks of one run of ``serve``."""

    def __init__(
        self, balancer: Source, dp_size: int, rejoin_timeout_s: float, *, on_change: Callable[[], None]
    ) -> None:
        """``on_change()`` is called when a condition that somebody waits for may hold now."""
        self._balancer = balancer
        self._rejoin_timeout_s = rejoin_timeout_s
        self._on_change = on_change
        self._ranks: list[RankQueue] = []  # those of the next batch, ascending
        self._leaving: list[RankQueue] = []  # those that are no more, and owe something or do not know it yet
        self._of_link: dict[Link, RankQueue] = {}  # for each present link
        self._steps: dict[int, OpenStep] = {}
        self._ending = False
        self._version: int | None = None
        self._slow: tuple[int, int] | None = None  # rank and step of the straggler that was logged
        self.num_places = 0
        """Ranks have numbers below this; some may be missing, where a lost rank was given up."""
        self.broken: list[Link] = []
        """Links of ranks that are lost though they are connected, to be closed: else they would wait for ever."""
        self.failure: Exception | None = None
        """A rank batch that cannot be sent: its own error."""
        self.resize(dp_size)

    # questions

    @property
    def all_ready(self) -> bool:
        """Every rank has everything, and room for one more."""
        return all(rank.ready for rank in self._ranks)

    def fits(self, batch: Batch) -> bool:
        """Whether it is for as many ranks as there are, and all of them have come at some time."""
        return len(batch.ranks) == len(self._ranks) and all(rank.link or rank.error for rank in self._ranks)

    @property
    def all_finished(self) -> bool:
        """After :meth:`end`: everything is acknowledged, and every rank knows of the end."""
        return all(rank.finished for rank in self._everybody)

    @property
    def owing(self) -> list[int] | None:
        """After :meth:`end`: the ranks that are not finished. Before it: None."""
        return [rank.rank for rank in self._everybody if not rank.finished] if self._ending else None

    @property
    def next_to_give_up(self) -> tuple[float, RankLostError | None]:
        """When to give up on the lost rank whose time is over first, on the event loop's clock, and its error."""
        first = min(self._everybody, key=lambda rank: rank.give_up_at)
        return first.give_up_at, first.error

    def uses(self, link: Link) -> bool:
        """Whether it is the present link of its rank."""
        return link in self._of_link

    @property
    def dp_size(self) -> int:
        """Ranks of the next batch."""
        return len(self._ranks)

    @property
    def ranks(self) -> list[int]:
        """Their numbers, ascending."""
        return [rank.rank for rank in self._ranks]

    def states(self) -> list[RankState]:
        """For the report of a stall, by rank."""
        now = anyio.current_time()
        return [rank.state(now) for rank in self._ranks]

    @property
    def _everybody(self) -> list[RankQueue]:
        return [*self._ranks, *self._leaving]

    # what happens

    def resize(self, dp_size: int) -> None:
        """The next batch is for so many ranks. One that is no more does what it was given, and learns of the end then;
        a new one begins with the next batch. After the end there is none."""
        if self._ending or dp_size == len(self._ranks):
            return
        while len(self._ranks) > dp_size:
            self._leaving.insert(0, self._ranks.pop())
        there = self.ranks
        for number in [one for one in range(dp_size) if one not in there][: dp_size - len(there)]:
            self._insert(number)
        self.num_places = self._ranks[-1].rank + 1
        self._leaving = [rank for rank in self._leaving if rank.link is not None or rank.unacknowledged]
        for rank in self._everybody:
            rank.leaving = rank in self._leaving
            if rank.leaving and rank.error is not None:
                rank.give_up_at = anyio.current_time()  # nobody comes back to a place that is no more
        self._advance_all()

    def _insert(self, number: int) -> RankQueue:
        """A rank of this number takes part in the next batch: one that is leaving and does not know it yet, or a new
        one."""
        back = [rank for rank in self._leaving if rank.rank == number and not rank.end_sent]
        self._leaving = [rank for rank in self._leaving if rank not in back]
        rank = back[0] if back else RankQueue(number)
        rank.leaving = False
        insort(self._ranks, rank, key=attrgetter("rank"))
        return rank

    def add(self, batch: Batch, all_ready_at: float) -> None:
        """A batch for all ranks, the last of which was ready at ``all_ready_at``."""
        ready_s = [max(all_ready_at - rank.since, 0.0) for rank in self._ranks]
        self._steps[batch.step] = OpenStep(batch, self._ranks, ready_s)
        for rank, rank_batch in zip(self._ranks, batch.ranks, strict=True):
            rank.unacknowledged.append(rank_batch)
        self._advance_all()

    def end(self) -> None:
        """No more batches: each rank learns of the end behind its last one."""
        self._ending = True
        for rank in self._ranks:
            rank.leaving = True
        self._advance_all()

    def attach(self, link: Link) -> None:
        """A rank has come, or come again; perhaps one that was given up, which takes part from the next batch on; or
        there is no such rank any more, which it learns."""
        rank = next((one for one in self._ranks if one.rank == link.rank), None)
        if rank is None and link.rank < self.num_places and not self._ending:
            rank = self._insert(link.rank)
        if rank is None:
            rank = RankQueue(link.rank)
            rank.leaving = True
            self._leaving.append(rank)
        if rank.link is not None:
            self._of_link.pop(rank.link, None)
        self._of_link[link] = rank
        rank.attach(link)
        for step in self._steps.values():
            step.begins_again(rank)
        if self._version is not None:
            link.notify(PolicyVersion(self._version))
        self._drop_acknowledged(rank)
        self.advance(link)

    def advance(self, link: Link) -> None:
        """Take in what a rank reports, and send what it has room for."""
        rank = self._of_link.get(link)
        if rank is None:  # another incarnation of the rank has come since: what this link still says is void
            return
        try:
            # a loss is raised behind the last report, so no acknowledgement is dropped with its rank
            while (report := link.report()) is not None:
                self._take_in(rank, report)
            self._send(rank, link)
        except EndOfStream:
            rank.left = True
            if rank.unacknowledged:
                self._lose(rank, _left_owing(rank.rank, rank.unacknowledged[0].step))
        except RankLostError as error:
            self._lose(rank, error)
        except Exception as error:  # noqa: BLE001 - a rank batch that cannot be sent; raised by serve()
            self.failure = error
        rank.note_readiness()
        if rank in self._leaving and rank.finished:
            self._leaving.remove(rank)
        self._on_change()

    def push_version(self, version: int) -> None:
        """The policy moved on: every rank learns of it."""
        self._version = version
        for rank in self._ranks:
            if rank.link is not None:
                rank.link.notify(PolicyVersion(version))

    def _advance_all(self) -> None:
        for rank in self._everybody:
            if rank.link is not None:
                self.advance(rank.link)

    def _send(self, rank: RankQueue, link: Link) -> None:
        while link.credits > 0 and rank.sent < len(rank.unacknowledged):
            rank_batch = rank.unacknowledged[rank.sent]
            link.send(rank_batch, confirm=self._steps[rank_batch.step].agreement is not None)
            # Counted after send(), which raises if the link is lost: then this one is still to be sent.
            rank.sent += 1
        for rank_batch in islice(rank.unacknowledged, rank.sent):
            parts = self._steps[rank_batch.step].parts_of(rank)
            for part in parts[rank.sent_parts.get(rank_batch.step, 0) :]:
                link.reassign(part)
            rank.sent_parts[rank_batch.step] = len(parts)
        if rank.leaving and rank.sent == len(rank.unacknowledged):
            rank.end_sent = True
            link.end()  # behind the last batch, so that the rank still gets that

    def _lose(self, rank: RankQueue, error: RankLostError) -> None:
        if rank.link is not None:
            if rank.link.live:
                self.broken.append(rank.link)
            del self._of_link[rank.link]
        rank.link, rank.error, rank.since = None, error, anyio.current_time()
        # The others go on with the step; what this rank owes of it waits for its next incarnation.
        for step in [self._steps[rank_batch.step] for rank_batch in rank.unacknowledged]:
            step.stops_asking(rank)
            if step.agreement is not None:
                step.agreement.lost(step.position[rank])
        # a rank that owes nothing after the end need not come back
        if not (rank.leaving and rank.finished):
            may_come_back = rank not in self._leaving
            rank.give_up_at = anyio.current_time() + (self._rejoin_timeout_s if may_come_back else 0.0)

    def _drop_acknowledged(self, rank: RankQueue) -> None:
        """A rank that comes back does not get what the user has acknowledged meanwhile: its checkpoint holds it."""
        in_flight = {batch.step for batch in self._balancer.in_flight()}
        for rank_batch in [one for one in rank.unacknowledged if one.step not in in_flight]:
            rank.unacknowledged.remove(rank_batch)
            step = self._steps[rank_batch.step]
            if step.agreement is not None:  # the others wait for its answer, which will not come
                step.agreement.fetched(step.position[rank], ())
                self._release(step.agreement)
            self._settle(rank, step)

    # reports

    def _take_in(self, rank: RankQueue, report: Report | Asked) -> None:
        if isinstance(report, StepHeld):
            self._worked_through(rank, report.step)
        elif isinstance(report, StepReport):
            self._acknowledge(rank, report)
        elif isinstance(report, PartsDone):
            self._parts_done(rank, report)
        elif isinstance(report, PayloadsFetched):
            self._fetched(rank, report)
        elif isinstance(self._balancer, StreamBalancer):
            self._control(self._balancer, rank, report)

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

    def _acknowledge(self, rank: RankQueue, report: StepReport) -> None:
        if rank.sent == 0 or rank.unacknowledged[0].step != report.step:
            text = f"rank {rank.rank} acknowledged step {report.step}, which it was not working on"
            raise _broke_protocol(rank.rank, report.step, text)
        # The report is checked above to be of the first: ranks work in order, so anything else would acknowledge what
        # nobody has trained on.
        rank.unacknowledged.popleft()
        rank.sent -= 1
        rank.sent_parts.pop(report.step, None)
        step = self._steps[report.step]
        self._balancer.record_step(
            StepTiming(
                report.step,
                step.position[rank],
                report.seconds if report.compute_s is None else report.compute_s,
                own=report.compute_s is not None,
                waited_s=report.waited_s,
                ready_s=step.ready_s[rank],
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

    # ranks that are lost for good

    def give_up(self, balancer: StreamBalancer) -> bool:
        """Go on without the lost rank whose time is over: the others take over what it owes, unless they had met with
        it already. False if they cannot: it was the last one, or payloads lie with producers. Nothing has changed
        then."""
        lost = min(self._everybody, key=lambda rank: rank.give_up_at)
        self._drop_acknowledged(lost)
        steps = [self._steps[rank_batch.step] for rank_batch in lost.unacknowledged]
        unmet = [step for step in steps if not step.met]
        alone = not any(rank is not lost for rank in self._ranks)
        if alone or any(step.owing == {lost} or not step.may_be_reassigned for step in unmet):
            return False
        for step in unmet:
            self._reassign(balancer, step, lost)
        for step in steps:
            self._settle(lost, step)
        lost.unacknowledged.clear()
        (self._leaving if lost in self._leaving else self._ranks).remove(lost)
        logger.warning(
            "rank %d is given up: %s. What it owed of steps %s is for the other ranks",
            lost.rank,
            lost.error and lost.error.cause,
            [step.batch.step for step in unmet],
        )
        self._advance_all()
        return True

    def _reassign(self, balancer: StreamBalancer, step: OpenStep, lost: RankQueue) -> None:
        takers = {step.position[rank]: rank for rank in step.owing if rank is not lost}
        rollouts = step.owed_by(lost)
        if rollouts:
            parts = balancer.parts.core.reassign(step.batch, rollouts, sorted(takers))
            for position, part in parts.items():
                step.take_over(takers[position], part)

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

    def _reply(self, step: OpenStep) -> None:
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
        """A rank has the payloads of a step, but for those that are gone with their producer. Once all ranks have, each
        learns what to divide by; a rank that comes again, once it has fetched again."""
        step = self._steps.get(report.step)
        agreement = None if step is None else step.agreement
        try:
            if step is None or agreement is None or report.step in rank.fetched:
                raise WireError(f"rank {rank.rank} says that it has fetched step {report.step}, which it need not")
            gone = agreement.fetched(step.position[rank], report.missing)
        except WireError as error:
            raise _broke_protocol(rank.rank, report.step, str(error)) from error
        rank.fetched.add(report.step)
        if gone:
            self._mask(rank.rank, report, {rollout.rollout_id for rollout in gone})
        self._release(agreement)

    def _release(self, agreement: StepAgreement) -> None:
        """Once it is final what the step divides by, send it to all who wait for it."""
        final = agreement.final
        for rank in self._everybody:
            if final is not None and rank.link is not None and final.step in rank.fetched:
                rank.fetched.discard(final.step)
                rank.link.denominators(final)

    def _mask(self, rank: int, report: PayloadsFetched, rollout_ids: set[str]) -> None:
        """Rollouts take part as padding copies of weight 0: logged here, counted with the step's acknowledgement."""
        if isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.core.mark_missing(report.step, rollout_ids)
        named = [one for one in report.missing if one.rollout_id in rollout_ids]
        text = ", ".join(f"{one.rollout_id!r} (put by {one.owner}: {one.cause})" for one in named[:5])
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        logger.warning(
            "step %d, rank %d: %d rollouts are gone with their producer and are masked: %s%s",
            report.step,
            rank,
            len(named),
            text,
            more,
        )


def _left_owing(rank: int, step: int) -> RankLostError:
    return RankLostError(
        f"rank {rank} closed its feed after the end without acknowledging step {step}, which is still held. Ask for "
        "the next batch until there is none, or call batch.ack(), before closing; or restart the rank",
        rank=rank,
        step=step,
        cause="the rank closed its feed",
    )


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
