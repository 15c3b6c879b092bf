"""Steps in flight, as one process of a rank has them, and the one loop that works on them. Pure: no clock, I/O, thread,
torch; whoever shares it puts one lock around it.

The loop is the same for every feature of the library and for none of them::

    for step in feed:                                # next_step
        optimizer.zero_grad()
        for micro_batch in step:                     # next_work, has_done: own, appended, taken over
            loss_sum(micro_batch).backward()
        end = step.finish()                          # reach_end: the seal says who meets and what to divide by
        if end is None:
            continue                                 # rewound: the same step comes again. Dropped: the next one comes
        all_reduce(gradients, among=end.ranks)       # if that fails: meeting_failed, then the loop over the step again
        optimizer.step_divided_by(end.tokens)        # has_finished

The connection gives orders to :meth:`Held.take` and sends what stands in ``out``; :meth:`Held.has` is what the process
says when it joins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stream_balancer.core.steps.orders import (
    Order,
    SendDrop,
    SendEnd,
    SendGo,
    SendRecall,
    SendRewind,
    SendSeal,
    SendWork,
)
from stream_balancer.core.steps.state import HeldItem, HeldStep, Item, RankId, StepSeal

__all__ = ["Held", "Part", "Work"]


@dataclass(eq=False, slots=True)
class Work:
    """An item of this process."""

    item: Item
    begun: bool = False
    """Given to the trainer's code, which sets it: the item stays with this rank."""
    done: bool = False
    fetched: bool = False
    missing: frozenset[str] = frozenset()
    may_begin: bool = False
    """All who compute it together have its payloads, or mask them."""


@dataclass(eq=False, slots=True)
class Part:
    """A step, as this process has it."""

    number: int
    uid: int
    attempt: int
    work: dict[int, Work] = field(default_factory=dict)
    """In the order of training."""
    gone: set[str] = field(default_factory=set)
    """Rollouts that are masked."""
    taken: bool = False
    waiting: bool = False
    """Has said that nothing is left to do."""
    seal: StepSeal | None = None
    came_back: int = 0
    """Number of the seal whose meeting has failed."""
    again: bool = False
    """Rewound since the loop began with it."""

    @property
    def is_done(self) -> bool:
        return all(work.done for work in self.work.values())


class Held:
    """The steps of one process."""

    def __init__(
        self,
        rank: RankId,
        seat: int = 0,
        *,
        seats: int = 1,
        meets: bool = True,
        weights: int | None = None,
        acked: int = 0,
    ) -> None:
        """``meets``: the ranks meet through the feed, as the controller says. ``weights`` have all steps before that
        one (None: that is not known), and those before ``acked`` are acknowledged."""
        self.rank, self.seat, self.seats, self.meets = rank, seat, seats, meets
        self.parts: dict[int, Part] = {}
        self.weights, self.acked = weights, acked
        self.ended = False
        self.out: list[tuple[Any, ...]] = []
        """Facts for the controller: name and arguments, in order."""

    # -- from the controller -------------------------------------------------------------------------------------------

    def take(self, order: Order) -> None:
        if isinstance(order, SendWork):
            self._add(order)
        elif isinstance(order, SendEnd):
            self.ended = True
        elif isinstance(order, SendDrop):
            self.parts.pop(order.step, None)
        elif isinstance(order, SendRecall):
            self._release(order)
        elif isinstance(order, SendSeal):
            if (part := self.parts.get(order.seal.step)) is not None:
                part.seal, part.waiting = order.seal, False
                part.gone |= order.seal.gone
                if self.rank.role:
                    del self.parts[part.number]
        elif isinstance(order, SendGo | SendRewind) and (part := self.parts.get(order.step)) is not None:
            if isinstance(order, SendRewind):
                _rewind(part, order.attempt)
                return
            part.gone |= order.gone
            for work in [part.work[id_] for id_ in order.items if id_ in part.work]:
                work.may_begin = True

    def _add(self, order: SendWork) -> None:
        part = self.parts.get(order.step)
        # another plan of the same number: what was done of the old one is void
        if part is None or part.uid != order.uid:
            part = self.parts[order.step] = Part(order.step, order.uid, order.attempt)
        part.gone |= order.gone
        # more to do: this rank is not at the barrier any more
        part.waiting = part.waiting and not order.items
        for item in order.items:
            if item.id in part.work:
                raise ValueError(
                    f"item {item.id} of step {part.number} was sent twice to {self.rank}, seat {self.seat}"
                )
            # who computes alone begins when its own payloads are here; others wait for all
            may_begin = not item.remote or (item.group is None and self.seats == 1)
            part.work[item.id] = Work(item, may_begin=may_begin)

    def _release(self, order: SendRecall) -> None:
        """Give back the last ones; keep as many as each idle rank gets, rounded down."""
        part, ids = self.parts.get(order.step), list[int]()
        if part is not None and part.attempt == order.attempt:
            free = list[int]()
            # without a gap, so that all seats keep one order
            for id_, work in reversed(part.work.items()):
                if work.begun or id_ not in order.items:
                    break
                free.append(id_)
            # each of those that are idle, and this one, get the same share
            ids = free[: len(free) - len(free) // (order.idle + 1)]
            for id_ in ids:
                del part.work[id_]
        self._say("released", order.step, order.attempt, tuple(ids))

    def fetched(self, number: int, uid: int, id_: int, missing: Iterable[str]) -> None:
        """The payloads of an item are here, but for those of the ``missing`` rollouts. Ignored are a second answer, and
        one for another plan of that number."""
        part = self.parts.get(number)
        work = part.work.get(id_) if part is not None and part.uid == uid else None
        if part is not None and work is not None and not work.fetched:
            work.fetched, work.missing = True, frozenset(missing)
            part.gone |= work.missing
            self._say("fetched", number, part.attempt, (id_,), work.missing)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def next_step(self) -> Part | None:
        """The oldest step that is not through. None: nothing yet, or the end. Of an open one, more may come."""
        for number in sorted(self.parts):
            part = self.parts[number]
            if self.rank.role and part.is_done:
                continue
            # the loop begins with it again, and whatever was rewound has been seen
            part.again = False
            if not part.taken:
                part.taken = True
                self._say("taken", number, part.attempt)
            return part
        return None

    def next_work(self, part: Part) -> Work | None:
        """The next item that can begin now."""
        if part.again or self.parts.get(part.number) is not part:
            return None
        # in order: seats of one rank must begin the same items, or their collectives would not match
        work = next((work for work in part.work.values() if not work.done), None)
        if work is None or not work.may_begin or (work.item.remote and not work.fetched):
            return None
        return work

    def has_done(self, part: Part, work: Work, columns: Any = None) -> None:
        work.done = True
        args = (part.number, part.attempt, (work.item.id,))
        self._say("done", *args, columns) if self.rank.role else self._say("done", *args)

    def reach_end(self, part: Part) -> StepSeal | None:
        """The seal, once it is here. Says once that nothing is left to do."""
        if not self.meets or (part.seal is not None and part.seal.number > part.came_back):
            return part.seal
        if not part.waiting and part.is_done:
            part.waiting = True
            self._say("at_barrier", part.number, part.attempt, part.came_back)
        return None

    def meeting_failed(self, part: Part) -> None:
        """The collective of the seal did not come about, and the loop over the step runs again."""
        part.came_back = part.seal.number if part.seal else part.came_back
        part.waiting = False

    def has_finished(self, part: Part, *, ack: bool) -> None:
        """The weights have the step."""
        # The part goes last: an interrupt before that has all of it said again, which changes nothing.
        self.weights = max(self.weights or 0, part.number + 1)
        self._say("finished", part.number, part.attempt)
        if ack:
            self.ack(part.number)
        self.parts.pop(part.number, None)

    def ack(self, number: int) -> None:
        """Acknowledge this step and all before it."""
        # once: a second one would say nothing
        if number >= self.acked:
            self._say("acknowledged", number)
            self.acked = number + 1

    # -- joining -------------------------------------------------------------------------------------------------------

    def has(self) -> dict[int, HeldStep]:
        """Steps to name when the process joins, instead of all that it has said before, but for acknowledgements."""
        # what waited there is part of what is said now
        self.out.clear()
        # nothing in it is dear
        if self.rank.role:
            self.parts.clear()
            return {}
        # an acknowledgement is not state of a step, so it is said again
        if self.acked:
            self._say("acknowledged", self.acked - 1)
        return {part.number: _held(part) for part in self.parts.values()}

    def _say(self, fact: str, *args: Any) -> None:
        self.out.append((fact, *args))


def _rewind(part: Part, attempt: int) -> None:
    # an old order may come behind the new one after a reconnect
    if attempt > part.attempt:
        part.attempt, part.waiting, part.again, part.work = attempt, False, part.taken, {}


def _held(part: Part) -> HeldStep:
    items = {id_: HeldItem(work.done, work.fetched, work.missing) for id_, work in part.work.items()}
    gone = frozenset(part.gone)
    return HeldStep(part.uid, part.attempt, items, part.taken, part.waiting, part.came_back, part.seal, gone)
