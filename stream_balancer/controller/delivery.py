"""Delivery: what each rank has been given and has not acknowledged, and which ranks there are.

::

    add(batch)     a rank batch into every rank's queue
    attach(link)   a rank has come, or come again: its queue is sent from the front
    advance(link)  take in its reports, send while it has credits
    resize(n)      the next batch is for so many ranks
    give_up(b)     go on without a lost rank: the others take over what it owes

A queue outlives its link: what a lost rank had not acknowledged is sent again to its next incarnation, same plan, same
order. What a rank's reports mean is in :mod:`stream_balancer.controller.open_steps`. Every method is called in the
event loop and returns at once; waiting, tasks and the life of links are :mod:`stream_balancer.controller.serve`'s.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

import anyio

from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.open_steps import Acknowledged, OpenSteps, RoleSource
from stream_balancer.controller.rank_queues import RankQueue
from stream_balancer.core.diagnosis import RankState
from stream_balancer.errors import EndOfStream, RankLostError
from stream_balancer.transport import Link
from stream_balancer.types import Batch
from stream_balancer.wire.messages import PolicyVersion

__all__ = ["Delivery"]

logger = logging.getLogger("stream_balancer.dispatch")


class Delivery:
    """All ranks of the trainer, or of a role, in one run of ``serve``."""

    def __init__(
        self,
        balancer: Acknowledged,
        dp_size: int,
        rejoin_timeout_s: float,
        *,
        on_change: Callable[[], None],
        role: RoleSource | None = None,
        move_late: bool = False,
    ) -> None:
        """``balancer``: whom steps are reported to, the ``role`` if the ranks have one. ``on_change()`` is called when
        a condition that somebody waits for may hold now. ``move_late``: as :func:`serve`'s."""
        self._steps = OpenSteps(balancer, role, self._lose, self._send_parts, move_late=move_late)
        self._role_name = "" if role is None else role.name
        self._rejoin_timeout_s = rejoin_timeout_s
        self._on_change = on_change
        self._ranks: list[RankQueue] = []  # those of the next batch, ascending
        self._leaving: list[RankQueue] = []  # those that are no more, and owe something or do not know it yet
        self._of_link: dict[Link, RankQueue] = {}  # for each present link
        self._ending = False
        self._version: int | None = None
        self.num_places = 0
        """Ranks have numbers below this; some may be missing, where a lost rank was given up."""
        self.failure: Exception | None = None
        """A rank batch that cannot be sent: its own error."""
        self.resize(dp_size)

    # questions

    def has_room(self, num_held: int = 0) -> bool:
        """Every rank has everything, and room for one more than so many."""
        return all(rank.room > num_held for rank in self._ranks)

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
        """The next batch is for so many ranks.

        The highest ranks leave: they do what they were given, and are told of the end behind it. New ones begin with
        the next batch. After :meth:`end` nothing changes: there is no next batch.
        """
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
        """A rank of this number takes part in the next batch. One that is leaving stays, unless it knows already that
        it leaves; else the rank is new."""
        back = [rank for rank in self._leaving if rank.rank == number and not rank.end_sent]
        self._leaving = [rank for rank in self._leaving if rank not in back]
        rank = back[0] if back else RankQueue(number, self._role_name)
        rank.leaving = False
        insort(self._ranks, rank, key=attrgetter("rank"))
        return rank

    def add(self, batch: Batch, all_ready_at: float, roles_s: float = 0.0) -> None:
        """A batch for all ranks, the last of which was ready at ``all_ready_at``; it was with other roles for so
        long."""
        ready_s = [max(all_ready_at - rank.since, 0.0) for rank in self._ranks]
        self._steps.add(batch, self._ranks, ready_s, roles_s)
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
        """A rank has come, or come again: it is sent what it owes, from the front.

        One that was given up takes part again from the next batch on. One for which there is no place any more is told
        of the end.
        """
        rank = next((one for one in self._ranks if one.rank == link.rank), None)
        if rank is None and link.rank < self.num_places and not self._ending:
            rank = self._insert(link.rank)
        if rank is None:
            rank = RankQueue(link.rank, self._role_name)
            rank.leaving = True
            self._leaving.append(rank)
        if rank.link is not None:
            self._of_link.pop(rank.link, None)
        self._of_link[link] = rank
        rank.attach(link)
        self._steps.begins_again(rank)
        if self._version is not None:
            link.notify(PolicyVersion(self._version))
        self._steps.drop_acknowledged(rank)
        self.advance(link)

    def advance(self, link: Link) -> None:
        """Take in what a rank reports, and send what it has room for."""
        rank = self._of_link.get(link)
        if rank is None:  # another incarnation of the rank has come since: what this link still says is void
            return
        try:
            # a loss is raised behind the last report, so no acknowledgement is dropped with its rank
            while (report := link.report()) is not None:
                self._steps.take_in(rank, report)
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
            given = rank.unacknowledged[rank.sent]
            step = self._steps[given.step]
            link.send(step.own_of(rank, given), confirm=step.agreement is not None)
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

    def _send_parts(self, rank: RankQueue) -> None:
        # a lost link says so itself, behind what it still reports
        if rank.link is not None and rank.link.live:
            self._send(rank, rank.link)

    def _lose(self, rank: RankQueue, error: RankLostError) -> None:
        if rank.link is not None:
            if rank.link.live:
                rank.link.close(error)
            del self._of_link[rank.link]
        rank.link, rank.error, rank.since = None, error, anyio.current_time()
        self._steps.lost(rank)
        # a rank that owes nothing after the end need not come back
        if not (rank.leaving and rank.finished):
            may_come_back = rank not in self._leaving
            rank.give_up_at = anyio.current_time() + (self._rejoin_timeout_s if may_come_back else 0.0)

    def give_up(self, balancer: StreamBalancer) -> bool:
        """Go on without the lost rank whose time is over: the others take over what it owes, unless they had met with
        it already. False if they cannot: it was the last one, or payloads lie with producers. Nothing has changed
        then."""
        lost = min(self._everybody, key=lambda rank: rank.give_up_at)
        self._steps.drop_acknowledged(lost)
        unmet = [step for step in self._steps.of_rank(lost) if not step.met]
        alone = not any(rank is not lost for rank in self._ranks)
        if alone or any(step.owing == {lost} or not step.may_be_reassigned for step in unmet):
            return False
        planned_again = self._steps.hand_over(balancer, lost)
        (self._leaving if lost in self._leaving else self._ranks).remove(lost)
        logger.warning(
            "rank %d is given up: %s. What it owed of steps %s is for the other ranks",
            lost.rank,
            lost.error and lost.error.cause,
            planned_again,
        )
        self._advance_all()
        return True


def _left_owing(rank: int, step: int) -> RankLostError:
    return RankLostError(
        f"rank {rank} closed its feed after the end without acknowledging step {step}, which is still held. Ask for "
        "the next batch until there is none, or call batch.ack(), before closing; or restart the rank",
        rank=rank,
        step=step,
        cause="the rank closed its feed",
    )
