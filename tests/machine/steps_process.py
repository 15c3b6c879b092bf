"""A process of a rank: the loop over steps, its gradient and weights, and both directions of its link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import steps_checks as checks
from steps_checks import InvariantError, check

from stream_balancer.client.held import Held, HeldWork, Part
from stream_balancer.core.steps.orders import (
    Behind,
    Order,
    SendDrop,
    SendGo,
    SendRewind,
    SendSeal,
    SendWork,
)
from stream_balancer.core.steps.state import StepSeal
from stream_balancer.errors import WireError
from stream_balancer.net import messages as m

if TYPE_CHECKING:
    from steps_world import World

Act = Callable[[], object]
Place = tuple[int, int]


@dataclass(eq=False)
class Meeting:
    """The collective of one seal. ``index`` among those that came about."""

    number: int
    uid: int
    seal: StepSeal
    members: dict[Place, int]
    """Incarnations."""
    inside: set[Place] = field(default_factory=set)
    index: int | None = None


class Process:
    def __init__(self, world: World, rank: int, seat: int, incarnation: int) -> None:
        self.world, self.rank, self.seat, self.incarnation = world, rank, seat, incarnation
        self.place: Place = (rank, seat)
        config = world.config
        self.held = Held(seats=config.seats, meets=config.meets)
        self.alive, self.linked = True, False
        self.up: deque[tuple[Any, ...]] = deque()
        self.down: deque[Order] = deque()
        self.to_fetch: list[tuple[int, int, int]] = []
        """Step, its uid, and item."""
        self.dropped: list[SendDrop] = []
        self.is_behind = False
        self.weights: dict[int, int] = {}
        """Step to meeting."""
        self.num_saved = 0
        """Steps before this one are in its part of a checkpoint."""
        self.part: Part | None = None
        self.work: HeldWork | None = None
        self.gradient: list[str] = []
        """Rollouts."""
        self.order: list[int] = []
        """Items, as they were computed."""
        self.meeting: Meeting | None = None
        self.speed = 1.0 if world.rng.random() < 0.8 else 0.15

    @property
    def counts(self) -> bool:
        """Alive, and not given up."""
        return self.alive and self.incarnation > self.world.fenced.get(self.rank, -1)

    @property
    def num_trained(self) -> int:
        """Steps before this one are in its weights."""
        return self.held.weights or 0

    def is_in_group(self, uid: int, group: int) -> bool:
        """In front of the collective of its group, and not about to leave it."""
        part, work = self.part, self.work
        if part is None or work is None or part.uid != uid or work.item.group != group:
            return False
        return not part.again and self.held.parts.get(part.number) is part

    # -- the link ------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self.linked = True
        self.up.clear()
        self.down.clear()
        self.up.append(("joined", self.held.has(), self.held.weights))
        self.flush()

    def unlink(self, *, tell: bool = True) -> None:
        has_joined = self.linked and not any(fact[0] == "joined" for fact in self.up)
        self.linked = False
        self.up.clear()
        self.down.clear()
        if has_joined and tell:
            self.world.ledger.lost(self.rank, self.seat)

    def flush(self) -> None:
        if self.linked:
            self.up.extend(map(as_heard, self.held.out))
        self.held.out.clear()

    def receive(self) -> None:
        order = self.down.popleft()
        if isinstance(order, Behind):
            self.is_behind = True
            return
        if isinstance(order, SendDrop):
            self.dropped.append(order)
        if isinstance(order, SendWork):
            self.to_fetch += [(order.step, order.uid, item.id) for item in order.items if item.remote]
        try:
            self.held.take(as_sent(order, meets=self.world.config.meets), getattr(order, "items", ()))
        except WireError as error:
            raise InvariantError("credits", str(error)) from None
        self.flush()
        self.check_credits()

    def check_credits(self) -> None:
        untaken = [part.number for part in self.held.parts.values() if not part.taken]
        check(len(untaken) <= self.world.config.depth, "credits", "{} holds {}, not begun", self.place, untaken)

    # -- what it can do now --------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[Act]:
        if not self.alive:
            return
        if not self.linked:
            yield self.connect
        if self.is_behind:
            yield self.give_in
        elif self.dropped:
            yield self.leave_dropped
        else:
            if self.to_fetch:
                yield self.fetch
            yield from self.moves_in_step() if self.part is not None else self.moves_between_steps()

    def moves_between_steps(self) -> Iterator[Act]:
        held = self.held
        if held.parts and self.may_begin(held.parts[min(held.parts)]) and (part := held.next_step()) is not None:
            self.flush()
            self.begin_step(part)
            return
        self.flush()
        if self.num_trained > held.acked:
            yield self.save
        if self.may_leave():
            yield self.leave

    def may_begin(self, oldest: Part) -> bool:
        """Some plain loops ask what a step is divided by before they begin with it."""
        config = self.world.config
        return config.meets or config.begins_early or oldest.seal is not None

    def moves_in_step(self) -> Iterator[Act]:
        part = self.part
        assert part is not None
        if self.held.parts.get(part.number) is not part or (part.again and self.meeting is None):
            yield self.leave_step
        elif self.meeting is not None:
            yield from self.moves_in_meeting(self.meeting)
        elif self.work is not None:
            partners = self.world.partners(self, self.work)
            if partners:
                yield lambda: self.world.compute(partners)
        elif (work := self.held.next_work(part)) is not None:
            yield lambda: self.begin_work(part, work)
        elif part.is_done:
            seal = self.held.reach_end(part)
            self.flush()
            if seal is not None:
                yield lambda: self.enter(part, self.world.seals[part.number, part.uid, seal.number])

    # -- in a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, part: Part) -> None:
        self.part, self.gradient, self.order = part, [], []
        is_fresh = not any(work.done for work in part.work.values())
        check(is_fresh, "once", "{} begins step {} with work done", self.place, part.number)
        self.check_credits()

    def leave_step(self) -> None:
        self.part = self.work = self.meeting = None
        self.gradient, self.order = [], []

    def begin_work(self, part: Part, work: HeldWork) -> None:
        if self.counts:
            checks.check_not_met(self.world, self, part.number)
        for one in part.work.values() if self.world.config.commits else (work,):
            one.begun = True
        self.work = work
        if work.item.group is not None:
            checks.check_order(self.world, self, part)

    def end_work(self) -> None:
        part, work = self.part, self.work
        assert part is not None
        assert work is not None
        self.work = None
        if part.work.get(work.item.id) is not work or part.again:
            return
        self.order.append(work.item.id)
        masked = work.missing | part.gone
        self.gradient += [rollout for rollout in work.payload.rollouts if rollout not in masked]
        self.held.has_done(part, work)
        self.flush()

    def fetch(self) -> None:
        number, uid, id_ = self.to_fetch.pop(self.world.rng.randrange(len(self.to_fetch)))
        part = self.held.parts.get(number)
        work = None if part is None else part.work.get(id_)
        if work is not None:
            lost = self.world.lost_rollouts.intersection(work.payload.rollouts)
            self.held.fetched(number, uid, id_, dict.fromkeys(lost, "lost"))
            self.flush()

    # -- the meeting ---------------------------------------------------------------------------------------------------

    def enter(self, part: Part, seal: StepSeal) -> None:
        if not self.world.config.meets:
            self.world.trained[part.number, self.rank] = seal, list(self.gradient)
            self.finish_step(part)
            return
        self.meeting = self.world.meeting(part, seal)
        is_member = self.meeting.index is None or self.meeting.members.get(self.place) == self.incarnation
        check(is_member, "seal", "{} enters a meeting that is over: {}", self.place, seal)
        if self.held.weights is None and self.meeting.index is None:
            self.take_weights_of(self.meeting)
        self.meeting.inside.add(self.place)
        self.world.try_to_meet(self.meeting)

    def moves_in_meeting(self, meeting: Meeting) -> Iterator[Act]:
        if meeting.index is not None:
            yield lambda: self.finish(meeting)
        # Some may see a collective fail that others have seen come about.
        if self.world.is_broken(meeting) and (meeting.index is None or self.world.rng.random() < 0.2):
            yield lambda: self.come_back(meeting)

    def finish(self, meeting: Meeting) -> None:
        part, number = self.part, meeting.number
        assert part is not None
        assert meeting.index is not None
        checks.check_weights(self.world, self, number)
        self.weights[number] = meeting.index
        self.finish_step(part)
        if self.world.config.auto_ack and self.counts and self.world.rng.random() < 0.3:
            self.world.write_checkpoint(self)

    def finish_step(self, part: Part) -> None:
        self.held.has_finished(part, ack=self.world.config.auto_ack)
        self.flush()
        self.leave_step()

    def come_back(self, meeting: Meeting) -> None:
        if meeting.index is None:
            meeting.inside.discard(self.place)
        self.meeting = None
        assert self.part is not None
        self.held.meeting_failed(self.part)

    # -- weights -------------------------------------------------------------------------------------------------------

    def copy_weights(self) -> int:
        """Take the weights of the checkpoint, or of the process that is furthest. -> the first step that they lack."""
        self.weights, weights = self.world.newest_weights(self)
        self.held.acked = min(self.world.checkpoint[1], weights) if self.world.config.meets else 0
        return weights

    def take_weights_of(self, meeting: Meeting) -> None:
        """Those of who meets, or those that another had then, or of the checkpoint: a process that has not said its
        weights has none of its own. All who take some take the same."""
        members = [self.world.processes[place] for place in meeting.members]
        there = [other.weights for other in members if other.held.weights is not None or other.place in meeting.inside]
        newest, _ = self.world.newest_weights(self)
        self.weights = dict(there[0]) if there else {n: index for n, index in newest.items() if n < meeting.number}

    def save(self) -> None:
        if self.world.config.meets:
            if not self.counts:
                return
            self.world.write_checkpoint(self)
        else:
            self.world.saved[self.place] = self.num_trained
        self.held.ack(self.num_trained - 1)
        self.flush()

    def leave_dropped(self) -> None:
        drops, self.dropped = self.dropped, []
        if self.part is not None and self.held.parts.get(self.part.number) is not self.part:
            self.leave_step()
        newest = max((drop.step for drop in drops if drop.met), default=-1)
        if self.held.weights is None and self.held.left_behind is None:
            return
        if newest >= 0 and self.world.config.meets:
            if self.num_trained <= newest:
                self.take_other_weights(newest + 1)
            else:
                self.unlink()

    def take_other_weights(self, least: int) -> None:
        """Take those of the living process that is furthest. The controller is told, or hears it when the process joins
        again. Where nobody has them, the rank is started again."""
        if not self.linked:
            return
        weights, newest = self.world.newest_weights(self)
        if self.world.config.all_die or newest < least:
            self.give_in()
            return
        self.weights = weights
        held = self.held
        held.weights, held.parts = newest, {number: part for number, part in held.parts.items() if number >= newest}
        self.held.acked = max(self.held.acked, min(self.world.checkpoint[1], newest))
        if self.part is not None and self.held.parts.get(self.part.number) is not self.part:
            self.leave_step()
        if self.world.rng.random() < 0.5:
            self.unlink()
        else:
            self.held.out += [m.Report("finished", newest - 1, 0), m.Report("acknowledged", self.held.acked - 1)]
            self.flush()

    def give_in(self) -> None:
        """Raise: the launcher starts the rank, or all of them, from weights that can be had."""
        if self.world.config.all_die:
            self.world.kill_all()
        else:
            self.world.kill(self.rank)

    # -- the end -------------------------------------------------------------------------------------------------------

    def may_leave(self) -> bool:
        held = self.held
        is_through = not held.parts and self.num_trained <= held.acked
        return held.ended and self.linked and is_through and not self.up and self.alive

    def leave(self) -> None:
        if all(process.may_leave() for process in self.world.processes_of(self.rank)):
            self.world.kill(self.rank)
            if self.world.ended or self.rank not in self.world.wanted:
                self.world.left.add(self.rank)  # else there are more ranks again: the launcher starts another process


# -- what travels ------------------------------------------------------------------------------------------------------

_SAID = {"acknowledged": 2, "taken": 3, "finished": 3, "done": 4, "fetched": 5}


def as_heard(said: m.Report) -> tuple[Any, ...]:
    """Arguments of the ledger's method."""
    name, *args, raw = msgspec.structs.astuple(said)
    about = msgspec.msgpack.decode(raw)
    return (name, *args[:2], about) if name == "at_barrier" else (name, *args, about)[: _SAID[name]]


def as_sent(order: Order, *, meets: bool) -> m.Message:
    """As the host tells a rank."""
    match order:
        case SendWork():
            items = tuple(m.WorkItem(item.id, item.group, item.remote) for item in order.items)
            head = m.StepHead(1, 0.0, meets) if order.opens else None
            return m.Work(order.step, order.uid, order.attempt, items, head, tuple(order.gone))
        case SendGo():
            return m.Go(order.step, tuple(order.items), tuple(order.gone))
        case SendSeal():
            seal = order.seal
            return m.Seal(seal.step, seal.number, seal.ranks, m.Denominators(0, 0, 0, 0), gone=tuple(seal.gone))
        case SendRewind():
            return m.Rewind(order.step, order.attempt)
        case SendDrop():
            return m.Drop(order.step, order.met)
        case _:
            return m.Notify(end=True)
