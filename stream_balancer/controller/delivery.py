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
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.denominators import StepAgreement
from stream_balancer.core.diagnosis import RankState
from stream_balancer.core.step_times import StepTiming
from stream_balancer.errors import EndOfStream, RankLostError, WireError
from stream_balancer.transport import Link, Report
from stream_balancer.types import Batch, RankBatch
from stream_balancer.wire.messages import PayloadsFetched, StepHeld, StepReport
from stream_balancer.wire.partial_share import is_remote

__all__ = ["Delivery", "Source"]

logger = logging.getLogger("stream_balancer.dispatch")


class Source(Protocol):
    """What ``serve`` asks of a balancer: of a :class:`StreamBalancer`, or of a script of batches in tests."""

    def batches(self, *, auto_ack: bool = True) -> AsyncIterator[Batch]: ...

    def acknowledge(self, step: int) -> None: ...

    def nack(self, step: int) -> None: ...

    def in_flight(self) -> tuple[Batch, ...]: ...

    def record_step(self, timing: StepTiming) -> None: ...


class _RankQueue:
    """One rank: its batches that are not acknowledged, and the link they go through, if there is one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link: Link | None = None
        self.unacknowledged: deque[RankBatch] = deque()
        self.sent = 0
        """How many of ``unacknowledged``, from the front, the present link has been given."""
        self.fetched: set[int] = set()
        """Steps that the present link has fetched the payloads of, and does not know the denominators of."""
        self.left = False
        """It closed its feed after the end."""
        self.error: RankLostError | None = None
        """Why it is missing, if it was there before."""
        self.give_up_at = math.inf
        """When to give up on it, on the event loop's clock."""
        self.since = anyio.current_time()
        """When it last became ready, or ceased to be."""
        self._was_ready = False

    @property
    def ready(self) -> bool:
        """It has a link, everything was sent, and there is room for one more."""
        return self.link is not None and self.sent == len(self.unacknowledged) and self.link.credits > 0

    @property
    def finished(self) -> bool:
        """Nothing is left to deliver and nobody is left to notify of the end."""
        return not self.unacknowledged and (self.left or self.error is not None)

    def note_readiness(self) -> None:
        """Remember since when it is ready, or is not."""
        if self.ready != self._was_ready:
            self._was_ready, self.since = self.ready, anyio.current_time()

    def state(self, now: float) -> RankState:
        """For the report of a stall."""
        return RankState(
            rank=self.rank,
            ready=self.ready,
            since_s=now - self.since,
            connected=self.link is not None,
            lost=None if self.error is None else self.error.cause,
            queue=len(self.unacknowledged),
            step=self.unacknowledged[0].step if self.unacknowledged else None,
        )

    def attach(self, link: Link) -> None:
        """It has come, or come again: everything is to be sent, from the front."""
        self.link, self.sent, self.left = link, 0, False
        self.error, self.give_up_at, self.since = None, math.inf, anyio.current_time()
        self.fetched.clear()


class _OpenStep:
    """A step that some rank has not done."""

    def __init__(self, batch: Batch, ready_s: list[float]) -> None:
        ranks = range(len(batch.ranks))
        self.owing = set(ranks)
        """Ranks that have not acknowledged it."""
        self.busy = set(ranks)
        """Ranks whose trainer is not through with it."""
        self.ready_s = ready_s
        """For each rank, seconds it had been ready when the last one was."""
        elsewhere = any(is_remote(rank_batch) for rank_batch in batch.ranks)
        self.agreement = StepAgreement(batch) if elsewhere else None
        """What the ranks have fetched, where payloads lie with producers."""


class Delivery:
    """All ranks of one run of ``serve``."""

    def __init__(
        self, balancer: Source, dp_size: int, rejoin_timeout_s: float, *, on_change: Callable[[], None]
    ) -> None:
        """``on_change()`` is called when a condition that somebody waits for may hold now."""
        self._balancer = balancer
        self._rejoin_timeout_s = rejoin_timeout_s
        self._on_change = on_change
        self._ranks = [_RankQueue(rank) for rank in range(dp_size)]
        self._steps: dict[int, _OpenStep] = {}
        self._ending = False
        self._slow: tuple[int, int] | None = None  # rank and step of the straggler that was logged
        self.failure: Exception | None = None
        """A rank batch that cannot be sent: its own error."""

    # questions

    @property
    def all_ready(self) -> bool:
        """Every rank has everything, and room for one more."""
        return all(rank.ready for rank in self._ranks)

    @property
    def all_finished(self) -> bool:
        """After :meth:`end`: everything is acknowledged, and every rank knows of the end."""
        return all(rank.finished for rank in self._ranks)

    @property
    def owing(self) -> list[int] | None:
        """After :meth:`end`: the ranks that are not finished. Before it: None."""
        return [rank.rank for rank in self._ranks if not rank.finished] if self._ending else None

    @property
    def next_to_give_up(self) -> tuple[float, RankLostError | None]:
        """When to give up on the lost rank whose time is over first, on the event loop's clock, and its error."""
        first = min(self._ranks, key=lambda rank: rank.give_up_at)
        return first.give_up_at, first.error

    def uses(self, link: Link) -> bool:
        """Whether it is the present link of its rank."""
        return any(rank.link is link for rank in self._ranks)

    def states(self) -> list[RankState]:
        """For the report of a stall, by rank."""
        now = anyio.current_time()
        return [rank.state(now) for rank in self._ranks]

    # what happens

    def add(self, batch: Batch, all_ready_at: float) -> None:
        """A batch for all ranks, the last of which was ready at ``all_ready_at``."""
        ready_s = [max(all_ready_at - rank.since, 0.0) for rank in self._ranks]
        self._steps[batch.step] = _OpenStep(batch, ready_s)
        for rank, rank_batch in zip(self._ranks, batch.ranks, strict=True):
            rank.unacknowledged.append(rank_batch)
        self._advance_all()

    def end(self) -> None:
        """No more batches: each rank learns of the end behind its last one."""
        self._ending = True
        self._advance_all()

    def attach(self, link: Link) -> None:
        """A rank has come, or come again."""
        rank = self._ranks[link.rank]
        rank.attach(link)
        self._drop_acknowledged(rank)
        self.advance(link)

    def advance(self, link: Link) -> None:
        """Take in what a rank reports, and send what it has room for."""
        rank = self._ranks[link.rank]
        # another incarnation of the rank has come since: what this link still says is void
        if rank.link is not link:
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
        self._on_change()

    def _advance_all(self) -> None:
        for rank in self._ranks:
            if rank.link is not None:
                self.advance(rank.link)

    def _send(self, rank: _RankQueue, link: Link) -> None:
        while link.credits > 0 and rank.sent < len(rank.unacknowledged):
            rank_batch = rank.unacknowledged[rank.sent]
            link.send(rank_batch, confirm=self._steps[rank_batch.step].agreement is not None)
            rank.sent += 1
        if self._ending and rank.sent == len(rank.unacknowledged):
            link.end()  # behind the last batch, so that the rank still gets that

    def _lose(self, rank: _RankQueue, error: RankLostError) -> None:
        rank.link, rank.error, rank.since = None, error, anyio.current_time()
        for step in self._steps.values():
            if step.agreement is not None:
                step.agreement.lost(rank.rank)
        # a rank that owes nothing after the end need not come back
        if not (self._ending and rank.finished):
            rank.give_up_at = anyio.current_time() + self._rejoin_timeout_s

    def _drop_acknowledged(self, rank: _RankQueue) -> None:
        """A rank that comes back does not get what the user has acknowledged meanwhile: its checkpoint holds it."""
        in_flight = {batch.step for batch in self._balancer.in_flight()}
        for rank_batch in [one for one in rank.unacknowledged if one.step not in in_flight]:
            rank.unacknowledged.remove(rank_batch)
            agreement = self._steps[rank_batch.step].agreement
            if agreement is not None:  # the others wait for its answer, which will not come
                agreement.fetched(rank.rank, ())
                self._release(agreement)
            self._settle(rank.rank, rank_batch.step)

    # reports

    def _take_in(self, rank: _RankQueue, report: Report) -> None:
        if isinstance(report, StepHeld):
            self._note_worked(rank.rank, report.step)
        elif isinstance(report, StepReport):
            self._acknowledge(rank, report)
        else:
            self._fetched(rank, report)

    def _acknowledge(self, rank: _RankQueue, report: StepReport) -> None:
        if rank.sent == 0 or rank.unacknowledged[0].step != report.step:
            text = f"rank {rank.rank} acknowledged step {report.step}, which it was not working on"
            raise _broke_protocol(rank.rank, report.step, text)
        rank.unacknowledged.popleft()
        rank.sent -= 1
        self._balancer.record_step(
            StepTiming(
                report.step,
                rank.rank,
                report.seconds if report.compute_s is None else report.compute_s,
                own=report.compute_s is not None,
                waited_s=report.waited_s,
                ready_s=self._steps[report.step].ready_s[rank.rank],
            )
        )
        self._settle(rank.rank, report.step)

    def _note_worked(self, rank: int, number: int) -> None:
        """A rank is through with a step, and asks for the next. Once all are, another may leave that is as old."""
        step = self._steps.get(number)
        if step is None:
            return
        step.busy.discard(rank)
        if not step.busy and isinstance(self._balancer, StreamBalancer):
            self._balancer.parts.consumer.worked_through(number)

    def _settle(self, rank: int, number: int) -> None:
        """A rank has done a step, or need not do it. Once that is so for all, the balancer need not keep it."""
        step = self._steps[number]
        step.owing.discard(rank)
        if step.owing:
            self._note_worked(rank, number)
            return
        del self._steps[number]
        with suppress(ValueError):  # the user was first: acknowledge_through() at a checkpoint
            self._balancer.acknowledge(number)
        self._log_straggler()

    def _log_straggler(self) -> None:
        """Once for each that is found."""
        straggler = self._balancer.straggler() if isinstance(self._balancer, StreamBalancer) else None
        slow = None if straggler is None else (straggler.rank, straggler.since_step)
        if slow is not None and slow != self._slow:
            logger.warning("%s", straggler)
        self._slow = slow

    # payloads that lie with producers

    def _fetched(self, rank: _RankQueue, report: PayloadsFetched) -> None:
        """A rank has the payloads of a step, but for those that are gone with their producer. Once all ranks have, each
        learns what to divide by; a rank that comes again, once it has fetched again."""
        step = self._steps.get(report.step)
        agreement = None if step is None else step.agreement
        try:
            if agreement is None or report.step in rank.fetched:
                raise WireError(f"rank {rank.rank} says that it has fetched step {report.step}, which it need not")
            gone = agreement.fetched(rank.rank, report.missing)
        except WireError as error:
            raise _broke_protocol(rank.rank, report.step, str(error)) from error
        rank.fetched.add(report.step)
        if gone:
            self._mask(rank.rank, report, {rollout.rollout_id for rollout in gone})
        self._release(agreement)

    def _release(self, agreement: StepAgreement) -> None:
        """Once it is final what the step divides by, send it to all who wait for it."""
        final = agreement.final
        for rank in self._ranks:
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


def _broke_protocol(rank: int, step: int, text: str) -> RankLostError:
    return RankLostError(f"{text}. Restart it", rank=rank, step=step, cause="broke the protocol")
