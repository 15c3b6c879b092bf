"""Steps in flight, as one process of a rank has them, and the one loop that works on them. Pure: no clock, I/O or
thread; whoever shares it puts one lock around it.

The loop is the same for every feature of the library and for none of them::

    for step in feed:                                # next_step
        optimizer.zero_grad()
        for micro_batch in step:                     # next_work, has_done: own, taken over
            loss_sum(micro_batch).backward()
        end = step.finish()                          # reach_end: the seal says who meets and what to divide by
        if end is None:
            continue                                 # rewound: the same step comes again. Dropped: the next one comes
        all_reduce(gradients, among=end.ranks)       # if that fails: meeting_failed, then the loop over the step again
        optimizer.step_divided_by(end.tokens)        # has_finished

The connection gives what the controller says to :meth:`Held.take` and reports what stands in ``out``; :meth:`Held.has`
is what the process says when it joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stream_balancer.core.steps.state import HeldItem, HeldStep, StepSeal
from stream_balancer.errors import WireError
from stream_balancer.net import messages as m
from stream_balancer.rollouts import Denominators


@dataclass(eq=False, slots=True)
class HeldWork:
    """An item of this process."""

    item: m.WorkItem
    payload: Any
    """Content of the item, as the host made it."""
    begun: bool = False
    """Given to the trainer's code, which sets it: the item stays with this rank."""
    done: bool = False
    fetched: bool = False
    missing: frozenset[str] = frozenset()
    may_begin: bool = False
    """All who compute it together have its payloads, or mask them."""
    made: Any = None
    """The trainer's micro-batch, the same each time: a loop that begins again must not lay out everything twice."""


@dataclass(eq=False, slots=True)
class Part:
    """A step, as this process has it."""

    number: int
    uid: int
    attempt: int
    head: m.StepHead
    work: dict[int, HeldWork] = field(default_factory=dict)
    """In the order of training."""
    gone: set[str] = field(default_factory=set)
    """Rollouts that are masked."""
    taken: bool = False
    waiting: bool = False
    """Has said that nothing is left to do."""
    sizes: Denominators | None = None
    """Sizes of the step as it was planned, once all of it is here."""
    seal: m.Seal | None = None
    came_back: int = 0
    """Number of the seal whose meeting has failed."""
    again: bool = False
    """Rewound since the loop began with it."""
    dropped: str | None = None
    """Why it was taken away."""

    @property
    def is_done(self) -> bool:
        return all(work.done for work in self.work.values())

    @property
    def is_whole(self) -> bool:
        """All of it is here, as far as it was planned."""
        return self.sizes is not None or self.seal is not None

    @property
    def is_remote(self) -> bool:
        return any(work.item.remote for work in self.work.values())

    @property
    def is_fetched(self) -> bool:
        """All owners have answered, so every missing payload is known."""
        return all(work.fetched or not work.item.remote for work in self.work.values())


class Held:
    """The steps of one process."""

    def __init__(self, *, seats: int = 1, meets: bool = False, weights: int | None = None) -> None:
        """``meets``: the ranks meet through the feed; the controller says so with each step. ``weights`` have all steps
        before that one; None: that is not known."""
        self.seats, self.meets = seats, meets
        self.parts: dict[int, Part] = {}
        self.weights, self.acked = weights, 0
        """All steps before ``acked`` are acknowledged."""
        self.left_behind: m.Drop | None = None
        """The others have a step in their weights that these lack."""
        self.ended = False
        self.out: list[m.Report] = []
        """Facts for the controller, in order."""

    # -- from the controller -------------------------------------------------------------------------------------------

    def take(self, message: m.Message, payloads: Any = None) -> None:
        """``payloads``: of Work, one for each item. Raises WireError for what no controller says."""
        if isinstance(message, m.Work):
            self._add(message, payloads)
        elif isinstance(message, m.Notify):
            self.ended = self.ended or message.end
        elif isinstance(message, m.Drop):
            self._drop(message)
        elif not isinstance(message, m.Seal | m.Go | m.Rewind):
            raise WireError(f"a {type(message).__name__} message for a rank")
        elif (part := self.parts.get(message.step)) is None:
            # of a step that is over here
            return
        elif isinstance(message, m.Rewind):
            # an old one may come behind the new one after a reconnect
            if message.attempt > part.attempt:
                part.attempt, part.waiting, part.again, part.work = message.attempt, False, part.taken, {}
        elif isinstance(message, m.Go):
            part.gone.update(message.gone)
            for id_ in part.work.keys() & message.items:
                part.work[id_].may_begin = True
        else:
            part.seal, part.waiting = message, False
            part.gone.update(message.gone)
            self._check_mini_batches(part)

    def _add(self, work: m.Work, payloads: Any) -> None:
        part = self.parts.get(work.step)
        # another plan of the same number: what was done of the old one is void
        if part is None or part.uid != work.uid:
            if work.head is None:
                raise WireError(f"step {work.step} begins, and nothing is said of it")
            part = self.parts[work.step] = Part(work.step, work.uid, work.attempt, work.head)
        # the first Work of a step has it, and the first after a join
        if work.head is not None:
            part.head, self.meets = work.head, work.head.meets
        part.sizes = work.sizes or part.sizes
        part.gone.update(work.gone)
        # more to do: this rank is not at the barrier any more
        part.waiting = part.waiting and not work.items
        for item, payload in zip(work.items, payloads or (None,) * len(work.items), strict=True):
            if item.id in part.work:
                raise WireError(f"item {item.id} of step {part.number} was sent twice")
            # who computes alone begins when its own payloads are here; others wait for all
            may_begin = not item.remote or (item.group is None and self.seats == 1)
            part.work[item.id] = HeldWork(item, payload, may_begin=may_begin)
        self._check_mini_batches(part)

    def _check_mini_batches(self, part: Part) -> None:
        """Sizes of mini-batches must cover all micro-batches, where these are known: a step is trained on whole."""
        planned, left = part.head.mini_batches, part.seal.mini_batches if part.seal is not None else ()
        counts = [one.micro_batches for one in planned]
        is_all = not planned or not part.is_whole or (all(counts) and sum(counts) == len(part.work))
        if not (is_all and len(left) in (0, len(planned))):
            del self.parts[part.number]
            raise WireError(f"the mini-batches of step {part.number} do not make up its micro-batches")

    def _drop(self, drop: m.Drop) -> None:
        part = self.parts.pop(drop.step, None)
        if part is not None:
            part.dropped = drop.text or "others have it"
        # Its weights lack a step that the others have: going on would train on the wrong ones. One that never had the
        # step, and has not said its weights, takes those that its first step needs.
        lacks = part is not None if self.weights is None else drop.step >= self.weights
        if drop.met and self.meets and lacks:
            self.left_behind = drop

    def fetched(self, number: int, uid: int, id_: int, missing: Mapping[str, str]) -> None:
        """The payloads of an item are here, but for those of the ``missing`` rollouts, with why. Ignored are a second
        answer, and one for another plan of that number."""
        part = self.parts.get(number)
        work = part.work.get(id_) if part is not None and part.uid == uid else None
        if part is not None and work is not None and not work.fetched:
            work.fetched, work.missing = True, frozenset(missing)
            part.gone |= work.missing
            self._say("fetched", number, part.attempt, (id_,), missing)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def next_step(self) -> Part | None:
        """The oldest step that is not through. None: nothing yet, or the end."""
        part = self.oldest
        if part is not None:
            # the loop begins with it again, and whatever was rewound has been seen
            part.again = False
            if not part.taken:
                part.taken = True
                self._say("taken", part.number, part.attempt)
        return part

    @property
    def oldest(self) -> Part | None:
        """The step that is next."""
        return self.parts.get(min(self.parts, default=-1))

    def is_complete(self, part: Part) -> bool:
        """A loop over ``micro_batches`` can have it now, or never can."""
        return part.is_fetched and (part.is_whole or self.meets)

    def next_work(self, part: Part) -> HeldWork | None:
        """The next item that can begin now."""
        if not self.is_current(part):
            return None
        # in order: seats of one rank must begin the same items, or their collectives would not match
        work = next((work for work in part.work.values() if not work.done), None)
        if work is None or not work.may_begin or (work.item.remote and not work.fetched):
            return None
        return work

    def is_current(self, part: Part) -> bool:
        """The step was not taken away, rewound or finished since the loop began with it."""
        return not part.again and self.parts.get(part.number) is part

    def has_done(self, part: Part, work: HeldWork) -> None:
        work.done = True
        self._say("done", part.number, part.attempt, (work.item.id,))

    def reach_end(self, part: Part) -> m.Seal | None:
        """The seal, once it is here. Says once that nothing is left to do."""
        if not self.meets or (part.seal is not None and part.seal.number > part.came_back):
            return part.seal
        if not part.waiting and part.is_done:
            part.waiting = True
            self._say("at_barrier", part.number, part.attempt, about=part.came_back)
        return None

    def meeting_failed(self, part: Part) -> None:
        """The collective of the seal did not come about, and the loop over the step runs again."""
        part.came_back = part.seal.number if part.seal else part.came_back
        part.waiting = False

    def has_finished(self, part: Part, *, ack: bool, times: Any = None) -> None:
        """The weights have the step. ``times``: what the rank measured."""
        # The part goes last: an interrupt before that has all of it said again, which changes nothing.
        self.weights = max(self.weights or 0, part.number + 1)
        self._say("finished", part.number, part.attempt, about=times)
        if ack:
            self.ack(part.number)
        self.parts.pop(part.number, None)

    def ack(self, number: int) -> None:
        """Acknowledge this step and all before it."""
        # once: a second one would say nothing
        if number >= self.acked:
            self._say("acknowledged", number)
            self.acked = number + 1

    def load(self, weights: int, *, ack: bool) -> None:
        """The weights contain all steps before this one: they are a checkpoint's, or another rank's."""
        self.weights = weights
        # weights that contain the step it was left behind in are up to date
        if self.left_behind is not None and self.left_behind.step < weights:
            self.left_behind = None
        if weights:
            self._say("finished", weights - 1, 0)
            if ack:
                self.ack(weights - 1)

    # -- joining -------------------------------------------------------------------------------------------------------

    def has(self) -> dict[int, HeldStep]:
        """Steps to name when the process joins, instead of all that it has said before, but for acknowledgements."""
        # what waited there is part of what is said now
        self.out.clear()
        # an acknowledgement is not state of a step, so it is said again
        if self.acked:
            self._say("acknowledged", self.acked - 1)
        return {part.number: _held(part) for part in self.parts.values()}

    def _say(self, fact: str, step: int, attempt: int = 1, items: tuple[int, ...] = (), about: Any = None) -> None:
        self.out.append(m.Report(fact, step, attempt, items, msgspec.Raw(msgspec.msgpack.encode(about))))


def _held(part: Part) -> HeldStep:
    items = {id_: HeldItem(work.done, work.fetched, work.missing) for id_, work in part.work.items()}
    gone, seal = frozenset(part.gone), None
    if part.seal is not None:
        seal = StepSeal(part.number, part.seal.number, part.seal.ranks, frozenset(part.seal.gone))
    return HeldStep(part.uid, part.attempt, items, part.taken, part.waiting, part.came_back, seal, gone)
