"""What the parts of a delivery are: the queue of one rank, and a step that some rank has not done.

Data, and questions about one of them. What follows from a report, or from a loss, for all of them is decided in
:mod:`stream_balancer.controller.delivery` and :mod:`stream_balancer.controller.open_steps`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import anyio

from stream_balancer.controller.denominators import StepAgreement
from stream_balancer.core.diagnosis import RankState
from stream_balancer.errors import RankLostError, WireError, rank_name
from stream_balancer.transport import Link
from stream_balancer.types import Batch, RankBatch, Rollout
from stream_balancer.wire.messages import PartsDone, Released, StepComplete
from stream_balancer.wire.partial_batch import is_remote

__all__ = ["OpenStep", "RankQueue"]


class RankQueue:
    """One rank: its batches that are not acknowledged, and the link they go through, if there is one."""

    def __init__(self, rank: int, role: str = "") -> None:
        self.rank, self.role = rank, role
        self.link: Link | None = None
        self.unacknowledged: deque[RankBatch] = deque()
        self.sent = 0
        """How many of ``unacknowledged``, from the front, the present link has been given."""
        self.fetched: set[int] = set()
        """Steps that the present link has fetched the payloads of, and does not know the denominators of."""
        self.sent_parts: dict[int, int] = {}
        """By step, how many of the parts that it takes over the present link has been given."""
        self.leaving = False
        """No more batches come for it: it learns of the end behind its last one."""
        self.end_sent = False
        """Its present link knows that no more batches come."""
        self.left = False
        """It closed its feed after the end."""
        self.error: RankLostError | None = None
        """Why it is missing, if it was there before."""
        self.give_up_at = math.inf
        """When to give up on it, on the event loop's clock."""
        self.since = anyio.current_time()
        """When it last became ready, or ceased to be."""
        self._was_ready = False

    def rows_of(self, step: int) -> list[RankBatch]:
        """What it has not acknowledged of a step: one rank batch, or several where the step came in rows."""
        return [one for one in self.unacknowledged if one.step == step]

    def drop(self, step: int) -> int:
        """It owes a step no more. -> rank batches that were of it."""
        before = len(self.unacknowledged)
        self.unacknowledged = deque(one for one in self.unacknowledged if one.step != step)
        return before - len(self.unacknowledged)

    @property
    def name(self) -> str:
        """What people read."""
        return rank_name(self.rank, self.role)

    @property
    def room(self) -> int:
        """Batches that could be sent to it at once; 0 without a link, and while others are still to be sent."""
        return 0 if self.link is None or self.sent < len(self.unacknowledged) else self.link.credits

    @property
    def ready(self) -> bool:
        """There is room for one more."""
        return self.room > 0

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
            role=self.role,
        )

    def attach(self, link: Link) -> None:
        """It has come, or come again: everything is to be sent, from the front."""
        self.link, self.sent, self.left, self.end_sent = link, 0, False, False
        self.error, self.give_up_at, self.since = None, math.inf, anyio.current_time()
        self.fetched.clear()
        self.sent_parts.clear()


class OpenStep:
    """A step that some rank has not done."""

    def __init__(
        self, batch: Batch, ranks: Sequence[RankQueue], ready_s: Sequence[float], roles_s: float = 0.0
    ) -> None:
        """``ready_s``: for each rank, seconds it had been ready when the last one was; ``roles_s``: seconds that the
        batch was with other roles."""
        self.batch = batch
        self.position = {rank: number for number, rank in enumerate(ranks)}
        """Of each rank in the batch."""
        self.owing = set(ranks)
        """Ranks that have not acknowledged it."""
        self.busy = set(ranks)
        """Ranks whose trainer is not through with it."""
        self.ready_s = dict(zip(ranks, ready_s, strict=True))
        self.roles_s = roles_s
        elsewhere = any(is_remote(rank_batch) for rank_batch in batch.ranks)
        self.agreement = StepAgreement(batch) if elsewhere else None
        """What the ranks have fetched, where payloads lie with producers."""
        self._has_shared = batch.has_shared
        self._reassigned: dict[RankQueue, list[RankBatch]] = {}  # what ranks have taken over
        self._through: set[RankQueue] = set()
        self._asking: set[RankQueue] = set()
        self._spares: dict[RankQueue, int] = {}  # how many of its own micro-batches were moved to others
        self._was_asked: set[RankQueue] = set()  # what it can spare; or it has nothing left that it could
        self._may_spare: set[RankQueue] = set()
        self._answers_due: set[RankQueue] = set()
        self._moved: list[Rollout] = []  # what no rank has now: moved from one, and not yet to another

    @property
    def may_be_reassigned(self) -> bool:
        """Ranks meet once in it, all of it is here, and nobody shares a rollout with another."""
        return self.agreement is None and not self.batch.ranks[0].mini_batch_sizes and not self._has_shared

    def own_of(self, rank: RankQueue, given: RankBatch | None = None) -> RankBatch:
        """Of what it was given in the plan, all that was not moved to others. ``given``: a row."""
        given, spares = given or self.batch.ranks[self.position[rank]], self._spares.get(rank, 0)
        return replace(given, micro_batches=given.micro_batches[:-spares]) if spares else given

    def parts_of(self, rank: RankQueue) -> list[RankBatch]:
        """What it has taken over of other ranks."""
        return self._reassigned.get(rank, [])

    def take_over(self, rank: RankQueue, part: RankBatch) -> None:
        """It is given more; what it has asked before is answered by that."""
        self._reassigned.setdefault(rank, []).append(part)
        self._asking.discard(rank)

    def owed_by(self, rank: RankQueue) -> list[Rollout]:
        """Rollouts that it was given, or has taken over."""
        return [one for given in self.work_of(rank) for one in given.rollouts if not one.is_padding]

    def work_of(self, rank: RankQueue) -> tuple[RankBatch, ...]:
        """All that it works on in the step."""
        return (self.own_of(rank), *self.parts_of(rank))

    def asks(self, rank: RankQueue, report: PartsDone) -> None:
        """Its trainer has worked on so many parts, and asks for more."""
        if report.parts == len(self.parts_of(rank)):  # else the next one is on its way
            self._asking.add(rank)
        self._was_asked.add(rank)
        self._spares_no_more(rank)

    def stops_asking(self, rank: RankQueue) -> None:
        """It is lost."""
        self._asking.discard(rank)
        self._spares_no_more(rank)

    def begins_again(self, rank: RankQueue) -> None:
        """Its next incarnation works on all of it, from the beginning."""
        self._asking.discard(rank)
        if rank in self.owing:
            self._through.discard(rank)

    def is_through(self, rank: RankQueue) -> None:
        """Its trainer asks for the next step, or has acknowledged this one."""
        self.busy.discard(rank)
        self._asking.discard(rank)
        self._through.add(rank)

    @property
    def asking(self) -> list[RankQueue]:
        """Ranks that wait for the others before they meet."""
        return sorted(self._asking, key=attrgetter("rank"))

    @property
    def met(self) -> bool:
        """Some rank is through with it, so all ranks had met: what each of them owed is in the weights."""
        return bool(self._through)

    def leave(self, rank: RankQueue) -> None:
        """It has done the step, or will not do it."""
        self.owing.discard(rank)
        self.busy.discard(rank)
        self._reassigned.pop(rank, None)

    # micro-batches that are moved late

    def late(self) -> list[RankQueue]:
        """Ranks to be asked what they have not begun: once half of those that owe the step have nothing left to do, all
        others that are there, each once."""
        if not self._asking or 2 * len(self._asking) < len(self.owing):
            return []
        late = {rank for rank in self.owing - self._was_asked if rank.link is not None}
        self._was_asked |= late
        self._may_spare |= late
        self._answers_due |= late
        return sorted(late, key=attrgetter("rank"))

    def _spares_no_more(self, rank: RankQueue) -> None:
        self._may_spare.discard(rank)
        self._answers_due.discard(rank)

    def spares(self, rank: RankQueue, report: Released) -> None:
        """It was asked, and will not begin the last ones of its own. Raises WireError for more than it may spare."""
        own = self.own_of(rank).micro_batches
        if report.moved and (rank not in self._may_spare or report.moved >= len(own)):
            raise WireError(
                f"rank {rank.rank} gives back {report.moved} of {len(own)} micro-batches of step {report.step}, which "
                "it need not"
            )
        self._answers_due.discard(rank)
        if report.moved:
            self._spares_no_more(rank)
            self._spares[rank] = report.moved
            self._moved += [one for each in own[-report.moved :] for one in each.rollouts if not one.is_padding]

    def take_moved(self) -> tuple[list[Rollout], list[RankQueue]]:
        """What is to be planned again, and the ranks that take it over; once all have answered, and some rank asks."""
        if self._answers_due or not self._moved or not self._asking:
            return [], []
        moved, self._moved = self._moved, []
        return moved, self.asking

    def replies(self) -> list[tuple[RankQueue, StepComplete]]:
        """Once all that owe the step ask, and nothing is left to be taken over: that it is complete."""
        if self._moved or not self.owing <= self._asking:
            return []
        self._asking.clear()
        left = sorted(self.owing, key=attrgetter("rank"))
        complete = StepComplete(self.batch.step, tuple(rank.rank for rank in left))
        return [(rank, complete) for rank in left]
