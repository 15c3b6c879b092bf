"""A rank's side of a step: what one process holds, and the one loop that works on it. Pure, as :mod:`steps`.

The trainer's loop, with every feature of the library and without any of them::

    for step in feed:
        optimizer.zero_grad()
        for micro_batch in step:                     # own ones, appended ones, taken over ones; ends when nothing is left
            loss_sum(micro_batch).backward()
        end = step.finish()                          # waits for the seal: what to divide by, and who meets
        if end is None:
            continue                                 # rewound: the same step comes again. Dropped: the next one comes
        all_reduce(gradients, among=end.ranks)       # if that fails: `for micro_batch in step` again, then finish() again
        optimizer.step_divided_by(end.tokens)

:class:`Held` is what that loop and the connection share; it is also what the process says when it joins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stream_balancer.core.steps.ledger import (
    Behind,
    Drop,
    End,
    Go,
    HeldItem,
    HeldStep,
    Item,
    Piece,
    RankId,
    Recall,
    Rewind,
    Seal,
    Send,
    SendSeal,
)


@dataclass(eq=False, slots=True)
class Work:
    """One micro-batch."""

    id: int
    pieces: tuple[Piece, ...]
    group: int | None
    needs: tuple[int, ...]
    remote: bool
    begun: bool = False
    done: bool = False
    fetched: bool = False
    missing: frozenset[str] = frozenset()
    columns: Any = None


@dataclass(eq=False, slots=True)
class Part:
    """What the process has of one step."""

    number: int
    uid: int
    attempt: int
    work: dict[int, Work] = field(default_factory=dict)  # in the order in which it came
    gone: set[str] = field(default_factory=set)
    may_begin: set[int] = field(default_factory=set)  # items that were told Go
    taken: bool = False
    waiting: bool = False
    seal: Seal | None = None
    came_back: int = 0
    again: bool = False
    """Rewound since the loop has begun with it."""
    finished: bool = False


class Held:
    """One process. ``out``: facts for the controller, in order; ``wanted``: items whose payloads it is to fetch."""

    def __init__(
        self, rank: RankId, seat: int = 0, *, seats: int = 1, meets: bool = True, commits: bool = False
    ) -> None:
        """``commits``: its loop takes ``step.micro_batches`` at once, so that nothing can be moved away."""
        self.rank, self.seat, self.seats, self.meets, self.commits = rank, seat, seats, meets, commits
        self.parts: dict[int, Part] = {}
        self.weights = 0  # they have all steps before this one
        self.acked = 0  # and it has acknowledged all before this one
        self.ended = False
        self.dropped: list[Drop] = []
        self.behind: Behind | None = None
        self.out: list[tuple[Any, ...]] = []
        self.wanted: list[tuple[int, int]] = []

    # -- from the controller -------------------------------------------------------------------------------------------

    def take(self, order: Any) -> None:
        if isinstance(order, Send):
            part = self.parts.get(order.step)
            if part is None or part.uid != order.uid:
                part = self.parts[order.step] = Part(order.step, order.uid, order.attempt)
            part.gone |= order.gone
            for item in order.items:
                self._add(part, item)
            if order.items:
                part.waiting = False
        elif isinstance(order, End):
            self.ended = True
        elif isinstance(order, Behind):
            self.behind = order
        elif (part := self.parts.get(order.seal.step if isinstance(order, SendSeal) else order.step)) is not None:
            if isinstance(order, SendSeal):
                part.seal, part.waiting = order.seal, False
                if self.rank.role:
                    del self.parts[part.number]
            elif isinstance(order, Go):
                part.gone |= order.gone
                part.may_begin |= order.items
            elif isinstance(order, Recall):
                self._release(part, order)
            elif isinstance(order, Rewind) and order.attempt > part.attempt:
                part.attempt, part.waiting, part.may_begin = order.attempt, False, set()
                part.again = part.taken
                part.work = {}
            elif isinstance(order, Drop):
                del self.parts[part.number]
                self.dropped.append(order)
        elif isinstance(order, Recall):
            self._say("released", order.step, order.attempt, ())
        elif isinstance(order, Drop):
            self.dropped.append(order)

    def _add(self, part: Part, item: Item) -> None:
        assert item.id not in part.work, f"sent twice: {item.id} of step {part.number} to {self.rank}"
        part.work[item.id] = Work(item.id, item.pieces, item.group, item.needs, item.remote)
        if item.remote:
            self.wanted.append((part.number, item.id))

    def _release(self, part: Part, order: Recall) -> None:
        """Give back the last ones; keep as many as each idle rank gets, rounded down."""
        free = [one for one in part.work.values() if not one.begun and one.group is None]
        moved = [] if self.commits and part.taken else free[len(free) // (order.idle + 1) :]
        ids = [one.id for one in moved if one.id in order.items] if order.attempt == part.attempt else []
        for id_ in ids:
            del part.work[id_]
        self._say("released", part.number, order.attempt, tuple(ids))

    def fetched(self, number: int, id_: int, missing: Iterable[str]) -> None:
        part = self.parts.get(number)
        work = None if part is None else part.work.get(id_)
        if work is not None and not work.fetched:
            work.fetched, work.missing = True, frozenset(missing)
            part.gone |= work.missing
            self._say("fetched", number, part.attempt, (id_,), work.missing)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def next_step(self) -> Part | None:
        """``for step in feed``: the oldest that is not through. None: nothing yet, or the end."""
        for number in sorted(self.parts):
            part = self.parts[number]
            if self.rank.role and all(work.done for work in part.work.values()):
                continue
            if not self.meets and not self.rank.role and part.seal is None:
                return None  # batch.micro_batches, denominators at once
            part.again = False
            if not part.taken:
                part.taken = True
                self._say("taken", number, part.attempt)
            return part
        return None

    def next_work(self, part: Part) -> Work | None:
        """``for micro_batch in step``: the next that can begin now."""
        if part.again:
            return None
        for work in part.work.values():
            if work.done:
                continue
            if work.remote and not work.fetched:
                return None
            if work.remote and (work.group is not None or self.seats > 1) and work.id not in part.may_begin:
                return None
            return work
        return None

    def begin(self, part: Part, work: Work) -> None:
        """It is given to the trainer's code: from now on it stays with this rank."""
        for one in part.work.values() if self.commits else (work,):
            one.begun = True

    def has_done(self, part: Part, work: Work, columns: Any = None) -> None:
        work.done, work.columns = True, columns
        args = (part.number, part.attempt, (work.id,))
        self._say("done", *args, columns) if self.rank.role else self._say("done", *args)

    def reach_end(self, part: Part) -> Seal | None:
        """``step.finish()``: the seal, once it is here; says once that nothing is left."""
        if not self.meets:
            return part.seal
        if part.seal is not None and part.seal.number > part.came_back:
            return part.seal
        if not part.waiting and all(work.done for work in part.work.values()):
            part.waiting = True
            self._say("at_barrier", part.number, part.attempt, part.came_back)
        return None

    def meeting_failed(self, part: Part) -> None:
        """``for micro_batch in step`` once more, after a seal."""
        part.came_back = part.seal.number if part.seal else part.came_back
        part.waiting = False

    def has_finished(self, part: Part, *, ack: bool) -> None:
        part.finished = True
        self.weights = max(self.weights, part.number + 1)
        self.parts.pop(part.number, None)
        self._say("finished", part.number, part.attempt)
        if ack:
            self.ack(part.number)

    def ack(self, number: int) -> None:
        """``step.ack()``: this step, and all before it."""
        if number >= self.acked:
            self.acked = number + 1
            self._say("acknowledged", number)

    # -- joining -------------------------------------------------------------------------------------------------------

    def has(self) -> dict[int, HeldStep]:
        """What it says when it joins, instead of everything it has said before; that it has acknowledged, it says again."""
        self.out.clear()
        if self.rank.role:  # nothing in it is dear
            self.parts.clear()
            return {}
        if self.acked:
            self._say("acknowledged", self.acked - 1)
        return {
            part.number: HeldStep(
                part.uid,
                part.attempt,
                {w.id: HeldItem(w.done, w.fetched, w.missing) for w in part.work.values()},
                part.taken,
                part.waiting,
                part.came_back,
                part.seal,
                frozenset(part.gone),
            )
            for part in self.parts.values()
        }

    def _say(self, fact: str, *args: Any) -> None:
        self.out.append((fact, *args))
