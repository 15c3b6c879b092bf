"""Steps in flight: who has what of each, and what is to be done next. Pure: no clock, no I/O, no thread, no torch.

Example. Two ranks, one step of four micro-batches; rank 1 dies after its first one::

    planned(0, a b on rank 0; c d on rank 1)   -> Send(0, a b)  Send(1, c d)
    done(0, a) done(0, b) at_barrier(0)        ->                                  rank 0 waits for rank 1
    done(1, c) lost(1) gave_up(1)              -> Replan(c d, over rank 0)         c was in a gradient that is gone
    replanned(c d on rank 0)                   -> Send(0, c d)
    done(0, c) done(0, d) at_barrier(0)        -> Seal(0: divide by 4, meet among [0])
    finished(0) acknowledged(0)                -> Ack(0)

That is the whole interface: *facts* are methods, they only record. :meth:`Ledger.orders` looks at whatever the facts
have touched and says what to do now. It is level-triggered: an order follows from the state and not from the fact that
came last, so there is one path for "send", whether a step is new, a rank came back, a controller was started again, a
micro-batch was moved or a column has arrived.

One item (a micro-batch, or a rank's part of one)::

              planned                Send                  done, of all seats
    (no owner) -----> PLANNED ----------------> SENT ----------------------------> DONE
        ^                ^                       |  \\--kept after a Recall--> BEGUN --^
        |                |   not in joined(has)  |                                |
        |                '-----------------------+--------------------------------'   a trainer's DONE lies in the
        '------ gave_up, released, torn (only while the ranks cannot have met) -------'   gradient of one process

One step of a stage that meets (the trainer's)::

    OPEN --complete--> COMPLETE --all at the barrier, nothing ownerless--> SEALED k --first finished--> MET --all--> Ack
                          ^                                                   |
                          '----- every rank that has seal k came back, or is gone: they have not met

Why "sealed" is not "met": a rank that holds a seal may be in the collective at this moment. Until every holder has said
"finished" or "it failed, I am back at the barrier", or is known to be dead, nobody here knows whether the weights have
the step, so nothing of it is sent again, replanned or rewound (:attr:`Step.uncertain`).

Why DONE is not kept when a trainer's process dies: its gradient dies with it. A role's DONE is kept: its columns are
here. That is the only difference between a role and a trainer (:attr:`Ledger.meets` is the other one: roles do not).

A rank may be several processes, *seats* (tensor, pipeline parallel). All get the same items in the same order; whatever
a rank is said to have done, all its seats have done. Bits of an int: seat 2 is ``1 << 2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

TRAIN = ""
"""The trainer's role. Others compute columns."""


class RankId(NamedTuple):
    role: str
    number: int


class Piece(NamedTuple):
    """What counts once in a gradient: a rollout, or a part of one that several ranks share."""

    rollout: str
    part: int
    tokens: int


class State(IntEnum):
    PLANNED = 0
    SENT = 1
    BEGUN = 2
    DONE = 3


@dataclass(eq=False, slots=True)
class Item:
    """A micro-batch, or a rank's part of one."""

    id: int
    owner: RankId | None
    pieces: tuple[Piece, ...]
    role: str = TRAIN
    needs: tuple[int, ...] = ()
    """Items of roles whose columns it is trained with."""
    group: int | None = None
    """Of items that several ranks compute together, in one collective (context parallel, lock step). Never moved alone."""
    remote: bool = False
    """Payloads lie with producers: the owner fetches them, and says what is gone."""
    payload: Any = None
    sent: int = 0
    fetched: int = 0
    done: int = 0
    begun: bool = False
    columns: Any = None
    agreed: bool = False
    """All seats have said whether they have its payloads."""
    seq: int = 0
    """In which order its owner was sent it; 0: not yet. All seats, and all incarnations, get that order again."""

    def state(self, full: int) -> State:
        if self.done == full:
            return State.DONE
        return State.BEGUN if self.begun or self.done else State.SENT if self.sent else State.PLANNED


class Seal(NamedTuple):
    """The last word before the ranks meet: who meets, and what all divide by."""

    step: int
    number: int
    ranks: tuple[RankId, ...]
    rollouts: int
    tokens: int
    gone: frozenset[str]
    """Masked: their payloads are lost."""


class HeldItem(NamedTuple):
    done: bool
    fetched: bool
    missing: frozenset[str]


class HeldStep(NamedTuple):
    """What a process says on joining that it has of a step. A controller that was started again asks only whether that
    is what was planned for it."""

    uid: int
    attempt: int
    items: Mapping[int, HeldItem]
    taken: bool
    waiting: bool
    came_back: int
    """Number of the seal whose meeting failed; 0: none."""
    seal: Seal | None
    gone: frozenset[str] = frozenset()
    """What it masks."""


# ---- orders ----------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    rank: RankId
    seat: int
    step: int
    uid: int
    attempt: int
    items: tuple[Item, ...]
    gone: frozenset[str]


class Go(NamedTuple):
    """These items may begin: all seats, and all who share them, have their payloads, or mask them."""

    rank: RankId
    seat: int
    step: int
    items: frozenset[int]
    gone: frozenset[str]


class Recall(NamedTuple):
    rank: RankId
    seat: int
    step: int
    attempt: int
    items: tuple[int, ...]
    idle: int
    """So many ranks have nothing to do."""


class SendSeal(NamedTuple):
    rank: RankId
    seat: int
    seal: Seal


class Rewind(NamedTuple):
    """Throw away the gradient of the step and all micro-batches of it: they are sent again."""

    rank: RankId
    seat: int
    step: int
    attempt: int


class Behind(NamedTuple):
    """Your weights lack steps that others' have, and you cannot train on them any more. All ranks go back together, or
    you take others' weights; say by ``weights`` which you have."""

    rank: RankId
    seat: int
    weights: int
    others: Mapping[RankId, int]


class Drop(NamedTuple):
    """You have no part in this step. ``met``: the others have it in their weights; take those."""

    rank: RankId
    seat: int
    step: int
    met: bool


class Replan(NamedTuple):
    """Lay these items out over these ranks; answer with :meth:`Ledger.replanned`."""

    step: int
    items: tuple[Item, ...]
    over: tuple[RankId, ...]


class Ack(NamedTuple):
    step: int
    gone: frozenset[str]


class End(NamedTuple):
    rank: RankId
    seat: int


class Refuse(NamedTuple):
    """It was given up, and others have its work: start it again, with another rank's weights."""

    rank: RankId
    seat: int


Order = Send | Go | Recall | SendSeal | Rewind | Behind | Drop | Replan | Ack | End | Refuse


# ---- state -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Share:
    """What one rank has of one step. Ints are bits of seats."""

    rank: Rank
    step: Step
    items: dict[int, Item] = field(default_factory=dict)  # in the order in which they are trained on
    unsent: dict[int, Item] = field(default_factory=dict)
    attempt: int = 1
    opened: int = 0
    taken: int = 0
    waiting: int = 0
    sealed: int = 0
    back: int = 0  # of those, seats whose meeting has failed
    finished: int = 0
    acked: int = 0
    go: dict[int, int] = field(default_factory=dict)  # seats that were told Go, by item
    recalled: dict[int, int] = field(default_factory=dict)  # items asked for -> seats that gave them back
    answers: int = 0  # seats whose answer to the Recall is due
    num_sent: int = 0


@dataclass(eq=False, slots=True)
class Rank:
    id: RankId
    seats: int = 1
    full: int = 1
    links: int = 0
    incarnation: int = -1
    depth: int = 2
    weights: int = 0
    """Trainer: its weights, of the seat that is least far, have all steps before this one."""
    of_seats: dict[int, int] = field(default_factory=dict)
    given_up: bool = False
    is_warned: bool = False
    ended: int = 0
    active: dict[int, Share] = field(default_factory=dict)  # by step: what it has to do, or to acknowledge

    @property
    def here(self) -> bool:
        return self.links == self.full

    @property
    def room(self) -> int:
        """Steps that may be planned for it. O(its active steps)."""
        return self.depth - sum(share.taken != self.full for share in self.active.values()) if self.here else 0


@dataclass(eq=False, slots=True)
class Step:
    number: int
    uid: int
    """Tells apart two steps of one number, of controllers of which the second has forgotten the first's."""
    items: dict[int, Item] = field(default_factory=dict)
    participants: set[RankId] = field(default_factory=set)  # who meets; only grows when nobody is left
    shares: dict[RankId, Share] = field(default_factory=dict)
    complete: bool = False
    ownerless: dict[int, Item] = field(default_factory=dict)
    at_barrier: set[RankId] = field(default_factory=set)
    recalls: set[RankId] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)  # groups of which a part was lost
    gone: set[str] = field(default_factory=set)
    unfetched: int = 0
    groups: dict[int, dict[int, Item]] = field(default_factory=dict)
    roles_left: dict[str, int] = field(default_factory=dict)
    role_sealed: set[str] = field(default_factory=set)
    waiters: dict[int, list[Item]] = field(default_factory=dict)  # who is trained with the columns of an item
    seal: Seal | None = None
    seals: int = 0
    sealed_to: set[RankId] = field(default_factory=set)  # may be in the collective now
    met: set[RankId] = field(default_factory=set)  # living processes whose weights have it
    is_met: bool = False
    unasked: set[RankId] = field(default_factory=set)  # may have something to spare
    acks: int = 0
    settling: set[RankId] = field(default_factory=set)  # after a restart: who has not said yet what it has
    is_settled: bool = True
    is_changed: bool = False
    """After a restart: somebody has not what was planned for it."""
    is_kept: bool = False
    """Somebody has acknowledged it: it is not given again, whoever dies."""
    attempts: int = 1

    @property
    def uncertain(self) -> bool:
        return bool(self.settling or (self.sealed_to and not self.met and not self.is_kept))


class Ledger:
    """Every step that is planned and not acknowledged, and every rank."""

    def __init__(self, *, meets: bool = True, moves: bool = False, generation: int = 0) -> None:
        """``meets``: trainer's ranks meet once in a step and report at_barrier and finished; else each goes its own way
        and is given again what it has not acknowledged. ``moves``: late moves. ``generation``: of the controller; larger at
        each start."""
        self.meets, self.moves, self.generation = meets, moves, generation
        self.steps: dict[int, Step] = {}
        self.ranks: dict[RankId, Rank] = {}
        self.wanted: dict[str, set[int]] = {TRAIN: set()}
        self.last_acked = -1
        self.fenced: dict[RankId, int] = {}
        """Given up: the last incarnation that must not come back. Belongs in the journal, as plans and acks do."""
        self.ended = False
        self._next_item = generation * 1_000_000
        self._steps_touched: dict[int, None] = {}
        self._ranks_touched: dict[RankId, None] = {}
        self._out: list[Order] = []

    # -- questions -----------------------------------------------------------------------------------------------------

    def new_id(self) -> int:
        self._next_item += 1
        return self._next_item

    def members(self, role: str) -> list[RankId]:
        """Who takes part in the next step. O(ranks)."""
        ids = (RankId(role, number) for number in sorted(self.wanted.get(role, ())))
        return [
            one
            for one in ids
            if (rank := self.ranks.get(one, Rank(one))) is not None
            and not rank.given_up
            and (one not in self.fenced or rank.incarnation > self.fenced[one])
        ]

    @property
    def wants_step(self) -> bool:
        """Everybody has room for one more: the planner may choose as late as this. O(ranks)."""
        everybody = [one for role in self.wanted for one in self.members(role)]
        return all((rank := self.ranks.get(one)) is not None and rank.room > 0 for one in everybody) and all(
            self.members(role) for role in self.wanted
        )

    # -- facts: the planner's ------------------------------------------------------------------------------------------

    def planned(self, number: int, items: Iterable[Item], *, complete: bool = True, uid: int | None = None) -> None:
        step = Step(number, self.generation if uid is None else uid)
        self.steps[number] = step
        step.participants = set(self.members(TRAIN))
        for one in step.participants:
            self._share(step, one)
        self.appended(number, items, complete=complete)

    def appended(self, number: int, items: Iterable[Item], *, complete: bool = False) -> None:
        """More of an open step; ``complete``: no more comes."""
        step = self.steps[number]
        for item in items:
            self._add(step, item)
        step.complete = step.complete or complete
        self._touch(step, everybody=True)

    def replanned(self, number: int, old: Sequence[int], new: Iterable[Item]) -> bool:
        """The answer to a Replan: ``new`` items in place of ``old``; a role's stay as they are but for the owner. False if
        it is out of date: what still has no owner is asked for again."""
        step = self.steps.get(number)
        if step is None or not all(one in step.ownerless for one in old):
            return False
        for one in old:
            item = step.items.pop(one)
            if item.group is not None:
                step.groups[item.group].pop(one)
            del step.ownerless[one]
            step.unfetched -= item.remote and not item.agreed
            if item.role:
                step.roles_left[item.role] -= 1
        self.appended(number, new)
        return True

    def resized(self, role: str, numbers: Iterable[int]) -> None:
        """From the next step on."""
        self.wanted[role] = set(numbers)
        for one in self.ranks:
            self._ranks_touched[one] = None

    def end(self) -> None:
        self.ended = True
        for one in self.ranks:
            self._ranks_touched[one] = None

    # -- facts: ranks that come and go ---------------------------------------------------------------------------------

    def joined(
        self,
        one: RankId,
        seat: int,
        incarnation: int,
        has: Mapping[int, HeldStep],
        *,
        weights: int = 0,
        seats: int = 1,
        depth: int = 2,
    ) -> None:
        """A process has come, or come again, and says what it has; ``weights`` have all steps before that one. A role's
        process has nothing: what it owes is sent again. O(its items, steps in flight and ranks)."""
        rank = self.ranks.setdefault(one, Rank(one))
        if incarnation <= self.fenced.get(one, -1):
            self._out.append(Refuse(one, seat))
            return
        if rank.given_up or rank.seats != seats:
            full, rank.given_up, rank.seats, rank.full, rank.links = rank.full, False, seats, (1 << seats) - 1, 0
            for share in [step.shares[one] for step in self.steps.values() if one in step.shares]:
                share.acked = rank.full if share.acked == full else 0
        is_new = incarnation != rank.incarnation
        if is_new:
            rank.links = 0  # the seats of an older one are superseded
        rank.incarnation, rank.depth, rank.is_warned = incarnation, depth, False
        bit = 1 << seat
        rank.of_seats = {other: rank.of_seats[other] for other in _seats(rank.links) if other in rank.of_seats}
        rank.of_seats[seat] = weights
        rank.weights = min(rank.of_seats.values())
        rank.links |= bit
        rank.ended &= ~bit
        for number, held in has.items():
            step = self.steps.get(number)
            if step is None or step.uid != held.uid:
                self._out.append(Drop(one, seat, number, step is None and number <= self.last_acked))
            elif one not in step.shares:
                self._out.append(Drop(one, seat, number, bool(step.met) or step.is_kept))
        for step in self.steps.values():
            if self.meets and not one.role:
                (step.met.add if max(rank.of_seats.values()) > step.number else step.met.discard)(one)
            if (share := step.shares.get(one)) is not None:
                held = has.get(step.number)
                if is_new and share.acked != rank.full:
                    share.acked = 0
                self._says(step, share, bit, held if held is not None and held.uid == step.uid else None, weights)
                if rank.here:
                    step.settling.discard(one)
            self._touch(step)
        self._ranks_touched.update(dict.fromkeys(self.ranks))

    def _says(self, step: Step, share: Share, bit: int, held: HeldStep | None, weights: int) -> None:
        """What was believed of a process gives way to what it says."""
        one, rank = share.rank.id, share.rank
        if held is not None:
            if not step.is_settled:
                share.attempt = max(share.attempt, held.attempt)
                step.attempts = max(step.attempts, held.attempt)
                step.is_changed |= held.attempt != 1 or list(held.items) != sorted(share.items)
            elif held.attempt != share.attempt and weights <= step.number:
                self._out.append(Rewind(one, bit.bit_length() - 1, step.number, share.attempt))
            step.gone |= held.gone
        is_current = held is not None and held.attempt == share.attempt
        is_past = weights > step.number and not one.role
        for item in share.items.values():
            if item.role and item.done == rank.full:
                continue  # its columns are here
            there = held.items.get(item.id) if is_current else None
            if is_past:
                item.sent, item.done = item.sent | bit, item.done | bit
                self._fetched(step, item, bit, rank.full, ())
                if item.sent == rank.full:
                    share.unsent.pop(item.id, None)
            elif there is None:
                if item.sent & bit and item.group is not None:
                    step.torn.add(item.group)
                step.unfetched += item.agreed
                item.agreed = False
                item.sent, item.done, item.fetched = item.sent & ~bit, item.done & ~bit, item.fetched & ~bit
                share.unsent[item.id] = item
            else:
                item.sent = item.sent | bit
                item.done = item.done | bit if there.done else item.done & ~bit
                if item.sent == rank.full:
                    share.unsent.pop(item.id, None)
                if there.fetched:
                    self._fetched(step, item, bit, rank.full, there.missing)
            item.begun = False

        def flag(mask: int, is_set: bool) -> int:
            return mask | bit if is_set else mask & ~bit

        share.opened = flag(share.opened, is_past or held is not None)
        share.taken = flag(share.taken, is_past or (held is not None and held.taken))
        share.go = {}
        step.unasked.add(one)
        if one.role:
            share.sealed = flag(share.sealed, False)
            self._activate(share)
            return
        share.finished = flag(share.finished, is_past)
        seal = None if held is None else held.seal
        if seal is not None and seal.number > step.seals:
            step.seal, step.seals = seal, seal.number
        has_seal = seal is not None and seal.number == step.seals
        share.sealed = flag(share.sealed, has_seal)
        share.back = flag(share.back, has_seal and held.came_back == step.seals)
        may_meet = self.meets and share.sealed & ~share.back and not share.finished
        (step.sealed_to.add if may_meet else step.sealed_to.discard)(one)
        share.waiting = flag(share.waiting, is_current and held.waiting)
        for id_ in share.recalled:
            share.recalled[id_] = flag(share.recalled[id_], not share.items[id_].sent & bit)
        if share.answers & bit:
            self._gave_back(step, share, bit)
        self._note_waiting(step, share)
        self._activate(share)

    def lost(self, one: RankId, seat: int) -> None:
        """The link to a process is gone. What it has, nobody knows until it joins again or is given up."""
        self.ranks[one].links &= ~(1 << seat)

    def gave_up(self, one: RankId) -> None:
        """It will not come back: what it owes goes to others, where they cannot have met with it."""
        rank = self.ranks[one]
        rank.given_up, rank.links = True, 0
        self.fenced[one] = max(self.fenced.get(one, -1), rank.incarnation)
        rank.active.clear()
        for step in self.steps.values():
            share = step.shares.pop(one, None)
            step.settling.discard(one)
            step.met.discard(one)
            if share is not None:
                step.participants.discard(one)
                step.at_barrier.discard(one)
                step.sealed_to.discard(one)
                step.recalls.discard(one)
                step.acks -= share.acked == rank.full and not one.role
                for item in share.items.values():
                    if item.role and item.done == rank.full:
                        continue
                    if item.group is not None:
                        step.torn.add(item.group)
                    self._reset(step, item)
                    self._own(step, item, None)
                self._touch(step)
        for other in self.ranks:
            self._ranks_touched[other] = None

    # -- facts: what a process reports ---------------------------------------------------------------------------------

    def taken(self, one: RankId, seat: int, number: int, attempt: int) -> None:
        """Its loop has begun with the step: the credit is back."""
        if (share := self._share_of(one, seat, number)) is not None:
            share.taken |= 1 << seat

    def done(
        self, one: RankId, seat: int, number: int, attempt: int, items: Iterable[int], columns: Any = None
    ) -> None:
        share = self._share_of(one, seat, number, attempt)
        if share is None:
            return
        step, bit, full = share.step, 1 << seat, share.rank.full
        for id_ in items:
            item = share.items.get(id_)
            if item is None or item.done == full:
                continue
            self._done(step, item, bit, full, columns)

    def fetched(
        self, one: RankId, seat: int, number: int, attempt: int, items: Iterable[int], missing: Iterable[str]
    ) -> None:
        """It has the payloads of these items, but for those of the ``missing`` rollouts."""
        share = self._share_of(one, seat, number, attempt)
        if share is None:
            return
        gone = frozenset(missing)
        for id_ in items:
            if (item := share.items.get(id_)) is not None:
                self._fetched(share.step, item, 1 << seat, share.rank.full, gone)
        self._touch(share.step, everybody=share.step.unfetched == 0)

    def released(self, one: RankId, seat: int, number: int, attempt: int, items: Iterable[int]) -> None:
        """The answer to a Recall: these it has not begun, and will not."""
        share = self._share_of(one, seat, number, attempt)
        if share is None or not share.answers & 1 << seat:
            return
        step, bit = share.step, 1 << seat
        for id_ in items:
            share.recalled[id_] |= bit
        self._gave_back(step, share, bit)
        self._touch(step)
        self._ranks_touched[one] = None

    def _gave_back(self, step: Step, share: Share, bit: int) -> None:
        """A seat has answered a Recall, or has come again and says what it has."""
        one, full = share.rank.id, share.rank.full
        share.answers &= ~bit
        if share.answers:
            return
        step.recalls.discard(one)
        for id_, seats in share.recalled.items():
            item = share.items[id_]
            if seats == full:
                del share.items[id_]
                share.unsent.pop(id_, None)
                self._reset(step, item)
                self._own(step, item, None)
                step.unasked.add(one)
            elif seats:  # begun by another seat of the rank: all its seats train on it
                item.sent &= ~seats
                share.unsent[id_] = item
            if seats != full:
                item.begun = True
        share.recalled = {}
        self._note_waiting(step, share)

    def at_barrier(self, one: RankId, seat: int, number: int, attempt: int, came_back: int = 0) -> None:
        """It has nothing left to do in the step. ``came_back``: the seal whose meeting has failed."""
        share = self._share_of(one, seat, number, attempt)
        if share is None or not self.meets:
            return
        step, bit = share.step, 1 << seat
        if came_back == step.seals and step.seal is not None:
            share.back |= bit
            if share.back == share.rank.full:
                step.sealed_to.discard(one)
        here = [i for i in share.items.values() if i.sent & bit and not share.recalled.get(i.id, 0) & bit]
        if all(item.done & bit for item in here):  # else something is on its way to it
            share.waiting |= bit
            self._note_waiting(step, share)
        self._touch(step)
        self._ranks_touched[one] = None

    def finished(self, one: RankId, seat: int, number: int, attempt: int) -> None:
        """The ranks have met, and its weights have the step."""
        share = self._share_of(one, seat, number)
        rank = self.ranks[one]
        if not one.role:
            rank.of_seats[seat] = max(rank.of_seats.get(seat, 0), number + 1)
            rank.weights = max(rank.weights, min(rank.of_seats.values()))
        if share is None:
            return
        share.finished |= 1 << seat
        if self.meets:
            share.step.met.add(one)
        self._touch(share.step)
        if len(share.step.met) == 1:
            self._ranks_touched.update(dict.fromkeys(self.ranks))
        self._ranks_touched[one] = None

    def acknowledged(self, one: RankId, seat: int, number: int) -> None:
        """It needs this step, and all before it, no more: they are in weights that it can come back to."""
        rank, bit = self.ranks[one], 1 << seat
        if one.role or not rank.links & bit:
            return
        for share in [share for share in rank.active.values() if share.step.number <= number]:
            if share.acked & bit or not share.finished & bit:
                continue
            share.acked |= bit
            if share.acked == rank.full:
                share.step.acks += 1
                share.step.is_kept = self.meets
                del rank.active[share.step.number]
                self._touch(share.step)
        self._ranks_touched[one] = None

    def acknowledged_by_user(self, number: int) -> None:
        """At a checkpoint: this step and all before it are in saved weights. What ranks say of them counts no more."""
        for step in [one for one in self.steps.values() if one.number <= number]:
            for share in step.shares.values():
                if share.opened and share.finished != share.rank.full and not share.rank.id.role:
                    for seat in _seats(share.rank.links & share.opened & ~share.finished):
                        self._out.append(Drop(share.rank.id, seat, step.number, met=True))
            self._acknowledge(step)

    # -- orders --------------------------------------------------------------------------------------------------------

    def orders(self) -> list[Order]:
        """All that is to be done now; each is given once. O(what facts have touched since): a fact of one rank costs
        its active steps, the seal of a step its ranks and items, once."""
        while self._steps_touched or self._ranks_touched:
            for number in sorted(self._steps_touched):
                del self._steps_touched[number]
                if (step := self.steps.get(number)) is not None:
                    self._look_at_step(step)
            ranks, self._ranks_touched = self._ranks_touched, {}
            for one in ranks:
                if (rank := self.ranks.get(one)) is not None and rank.here:
                    self._look_at_rank(rank)
        out, self._out = self._out, []
        return out

    def _look_at_step(self, step: Step) -> None:
        # There are six cases, in this order: a step that is
        # 1. acknowledged by all who take part, 2. restored, and not all have said what they have, 3. met: whoever is left
        # behind leaves it, 4. perhaps met: wait, 5. restored and changed, or torn: begin again, 6. not met: lay out what
        # nobody owns, ask slow ranks, seal.
        if step.acks == len(step.participants) and (step.is_kept or (step.participants and step.complete)):
            self._acknowledge(step)
            return
        if step.settling:
            return
        if step.met or step.is_kept:
            if not step.is_met:
                step.is_met = True
                self._leave_behind(step)
        elif not step.uncertain:
            if step.is_met:  # all who had it in their weights are gone
                step.is_met = False
                for item in [i for i in step.items.values() if not i.role and i.owner not in step.participants]:
                    self._reset(step, item)
                    self._own(step, item, None)
            if step.seal is not None and self.meets:
                step.seal = None  # the holders are back, or gone: it is void
                self._touch(step, everybody=True)
            if not step.is_settled:
                self._settle(step)
            if step.torn:
                self._rewind(step)
            if not step.participants and (members := self.members(TRAIN)):
                step.participants = set(members)
                for one in members:
                    self._share(step, one)
                    self._ranks_touched[one] = None
            self._replan(step)
            if self.moves:
                self._recall(step)
            if self._may_seal(step):
                self._seal(step)
        for role, left in step.roles_left.items():
            if left == 0 and step.complete and role not in step.role_sealed:
                step.role_sealed.add(role)
                for one in step.shares:
                    if one.role == role:
                        self._ranks_touched[one] = None

    def _replan(self, step: Step) -> None:
        if not step.ownerless or step.recalls:
            return
        for role in {item.role for item in step.ownerless.values()}:
            over = sorted(step.participants) if not role else self.members(role)
            items = tuple(item for item in step.ownerless.values() if item.role == role)
            if over:
                self._out.append(Replan(step.number, items, tuple(over)))

    def _recall(self, step: Step) -> None:
        """Once half of the ranks have nothing left to do, the others are asked for what they have not begun."""
        if not step.at_barrier or 2 * len(step.at_barrier) < len(step.participants) or step.ownerless or step.recalls:
            return
        for one in sorted(step.unasked):
            share = step.shares.get(one)
            if (
                share is not None
                and one not in step.at_barrier
                and not (share.rank.here and share.opened == share.rank.full)
            ):
                continue  # later
            step.unasked.discard(one)
            if share is None or one in step.at_barrier:
                continue
            may = [i for i in share.items.values() if i.group is None and not i.begun and not i.done and i.sent]
            if len(may) < 2:  # it keeps one at least
                continue
            share.recalled = {item.id: 0 for item in may}
            share.answers = share.rank.full
            step.recalls.add(one)
            for seat in _seats(share.rank.full):
                ids = tuple(item.id for item in may if item.sent & 1 << seat)
                self._out.append(Recall(one, seat, step.number, share.attempt, ids, len(step.at_barrier)))

    def _may_seal(self, step: Step) -> bool:
        if not step.complete or step.ownerless or step.unfetched or step.seal is not None or not step.participants:
            return False
        return not self.meets or (len(step.at_barrier) == len(step.participants) and not step.recalls)

    def _seal(self, step: Step) -> None:
        pieces = [p for item in step.items.values() if not item.role for p in item.pieces if p.rollout not in step.gone]
        step.seals = max(step.seals + 1, self.generation * 1000)
        step.seal = Seal(
            step.number,
            step.seals,
            tuple(sorted(step.participants)),
            rollouts=max(len({piece.rollout for piece in pieces}), 1),
            tokens=max(sum(piece.tokens for piece in pieces), 1),
            gone=frozenset(step.gone),
        )
        for one in step.participants:
            share = step.shares[one]
            share.sealed = share.back = 0
            if self.meets:
                step.sealed_to.add(one)  # before it is on its way: from here on nobody knows
            self._ranks_touched[one] = None

    def _rewind(self, step: Step) -> None:
        """A part of something shared was lost with its process. The other parts are in gradients, or half of them are,
        and nothing can be taken out of a gradient: whoever shares with it begins again, and so on."""
        groups, todo, again = step.groups, list(step.torn), set[int]()
        ranks: set[RankId] = set()
        while todo:
            group = todo.pop()
            if group in again or group not in groups:
                continue
            again.add(group)
            for item in groups[group].values():
                if item.owner is not None and item.owner not in ranks:
                    ranks.add(item.owner)
                    others = step.shares[item.owner].items.values()
                    todo += [other.group for other in others if other.group is not None]
        step.torn.clear()
        for group in again:
            parts = list(groups.pop(group).values())
            name = self.new_id()  # nobody meets somebody who has not begun again
            is_whole = all(item.owner is not None for item in parts)
            for item in parts:
                item.group = name
                groups.setdefault(name, {})[item.id] = item
                if not is_whole:
                    if item.owner is not None:
                        del step.shares[item.owner].items[item.id]
                        step.shares[item.owner].unsent.pop(item.id, None)
                        self._note_waiting(step, step.shares[item.owner])
                    self._reset(step, item)
                    self._own(step, item, None)
        step.attempts += 1
        for one in ranks:
            self._begin_again(step, step.shares[one])

    def _begin_again(self, step: Step, share: Share) -> None:
        rank = share.rank
        share.attempt = step.attempts
        share.waiting, share.go, share.recalled, share.answers, share.num_sent = 0, {}, {}, 0, 0
        step.recalls.discard(rank.id)
        step.at_barrier.discard(rank.id)
        step.unasked.add(rank.id)
        for item in share.items.values():
            self._reset(step, item)
            share.unsent[item.id] = item
        for seat in _seats(rank.links & share.opened):
            self._out.append(Rewind(rank.id, seat, step.number, share.attempt))
        self._ranks_touched[rank.id] = None

    def _leave_behind(self, step: Step) -> None:
        """They have met. What others owe is in the weights, or in no gradient that counts."""
        step.ownerless.clear()
        step.torn.clear()
        for one in step.participants - step.met:
            self._ranks_touched[one] = None

    def _look_at_rank(self, rank: Rank) -> None:
        for share in list(rank.active.values()):
            step = share.step
            if rank.id.role:
                if step.settling or not step.is_settled:
                    continue  # who trains may have it in the weights
                self._send(rank, share)
                if rank.id.role in step.role_sealed:
                    self._send_seal(rank, share, Seal(step.number, 1, (), 0, 0, frozenset(step.gone)))
                    rank.active.pop(step.number, None)
                continue
            if self.meets and (step.met or step.is_kept) and share.finished != rank.full:
                if share.sealed & ~share.back & ~share.finished == 0 and (
                    step.is_kept or any(self.ranks[other].here for other in step.met)
                ):
                    self._left_behind(rank, share)
                continue
            if share.finished == rank.full:
                continue
            if self.meets and rank.weights < step.number and self._lacks_weights(rank, step):
                continue
            if step.is_settled and (not step.uncertain or not self.meets):
                self._send(rank, share)
            if step.seal is not None and rank.id in step.seal.ranks and share.opened == rank.full:
                # restored, and others may be in the meeting: it is waited for if it was at the barrier
                is_awaited = step.sealed_to and share.waiting | share.sealed == rank.full
                if not share.unsent if step.is_settled else is_awaited:
                    self._send_seal(rank, share, step.seal)
        if (self.ended or rank.id.number not in self.wanted.get(rank.id.role, ())) and not self._owes(rank):
            for seat in _seats(rank.full & ~rank.ended):
                self._out.append(End(rank.id, seat))
            rank.ended = rank.full

    def _lacks_weights(self, rank: Rank, step: Step) -> bool:
        """Steps before this one are not in its weights, and it will not train on them: others must lack them, too."""
        for number in range(rank.weights, step.number):
            before = self.steps.get(number)
            if before is not None and rank.id in before.shares:
                continue
            if before is not None and not before.met:
                return True  # wait
            others = {one: self.ranks[one].weights for one in step.participants if self.ranks[one].weights > number}
            if before is not None:
                others |= {one: self.ranks[one].weights for one in before.met}
            if others:
                if not rank.is_warned and any(self.ranks[one].here for one in others):
                    rank.is_warned = True
                    for seat in _seats(rank.full):
                        self._out.append(Behind(rank.id, seat, rank.weights, others))
                return True
        return False

    def _left_behind(self, rank: Rank, share: Share) -> None:
        step = share.step
        for seat in _seats(rank.full):
            self._out.append(Drop(rank.id, seat, step.number, met=True))
        self._leave(step, share)

    def _leave(self, step: Step, share: Share) -> None:
        one = share.rank.id
        share.rank.active.pop(step.number, None)
        step.acks -= share.acked == share.rank.full
        del step.shares[one]
        step.participants.discard(one)
        step.at_barrier.discard(one)
        step.sealed_to.discard(one)
        step.recalls.discard(one)
        self._touch(step)

    def _owes(self, rank: Rank) -> bool:
        if not self.steps:
            return False
        if rank.id.role:
            return True  # a controller that is started again asks for columns again
        return any(rank.id in step.participants for step in self.steps.values())

    def _send(self, rank: Rank, share: Share) -> None:
        step = share.step
        if share.recalled:
            return
        ready = [i for i in share.unsent.values() if self._is_ready(step, i)]
        ready.sort(key=lambda item: (item.seq or 1 << 60, item.id))
        is_new = share.opened != rank.full
        if is_new and (not ready and not (step.complete and not share.unsent)):
            return
        if is_new and share.taken != rank.full:
            used = sum(o.opened != 0 and o.taken != rank.full for o in rank.active.values() if o is not share)
            if used >= rank.depth or any(
                number < step.number and o.opened != rank.full and not (o.step.is_met and rank.id.role)
                for number, o in rank.active.items()
            ):
                return  # no credit; or an older step comes first
        # in the plan's order: nothing overtakes an item that waits for its columns, if others share what is behind it
        if any(item.group is not None or item.sent for item in share.unsent.values()):
            ready = _leading(sorted(share.unsent.values(), key=lambda item: (item.seq or 1 << 60, item.id)), ready)
        for seat in _seats(rank.full):
            items = tuple(item for item in ready if not item.sent & 1 << seat)
            if items and not rank.id.role:
                share.waiting &= ~(1 << seat)
            if items or not share.opened & 1 << seat:
                gone = frozenset(step.gone.intersection(p.rollout for item in items for p in item.pieces))
                self._out.append(Send(rank.id, seat, step.number, step.uid, share.attempt, items, gone))
        for item in ready:
            item.sent = rank.full
            share.num_sent += not item.seq
            item.seq = item.seq or share.num_sent
            del share.unsent[item.id]
        share.opened = rank.full
        if ready and not rank.id.role:
            step.unasked.add(rank.id)
            self._note_waiting(step, share)
        self._go(rank, share)

    def _go(self, rank: Rank, share: Share) -> None:
        """Items whose payloads lie elsewhere begin on all who compute them together, with the same masks, or on none."""
        step = share.step
        for item in share.items.values():
            if not item.remote or item.sent != rank.full or share.go.get(item.id, 0) == rank.full:
                continue
            if item.group is None:
                if rank.seats == 1:
                    continue
                parts = [item]
            else:
                parts = list(step.groups[item.group].values())
            if all(p.owner is not None and p.agreed for p in parts):
                gone = frozenset(step.gone.intersection(p.rollout for part in parts for p in part.pieces))
                for seat in _seats(rank.full & ~share.go.get(item.id, 0)):
                    self._out.append(Go(rank.id, seat, step.number, frozenset([item.id]), gone))
                share.go[item.id] = rank.full

    def _send_seal(self, rank: Rank, share: Share, seal: Seal) -> None:
        for seat in _seats(rank.full & ~share.sealed):
            self._out.append(SendSeal(rank.id, seat, seal))
            if self.meets and not rank.id.role:
                share.step.sealed_to.add(rank.id)
        share.sealed = rank.full
        share.waiting &= share.back
        self._note_waiting(share.step, share)

    # -- a controller that was started again ---------------------------------------------------------------------------

    def restore(
        self,
        number: int,
        uid: int,
        items: Iterable[Item],
        participants: Iterable[RankId],
        *,
        complete: bool,
        acked: Iterable[RankId] = (),
        gone: Iterable[str] = (),
    ) -> None:
        """A step as the journal has it: its plan, and who has acknowledged it. Who has it now, ranks will say."""
        step = self.steps[number] = Step(number, uid, complete=complete, is_settled=not self.meets)
        step.participants = set(participants)
        step.settling = set(step.participants)
        for one in step.participants:
            self._share(step, one)
        for item in items:
            self._add(step, item)
        for share in [step.shares[one] for one in acked if one in step.participants]:
            share.acked, step.is_kept = share.rank.full, self.meets
            step.gone |= set(gone)  # what it masked
            step.acks += 1
            self._activate(share)

    def _settle(self, step: Step) -> None:
        """All have said what they have, and nobody has met. Whoever has what was planned goes on, if all have; else all
        begin again. Columns are not here any more."""
        step.is_settled = True
        held = [item for item in step.items.values() if item.sent]
        if step.is_changed or any(item.needs for item in held):
            step.torn.update(step.groups)
            self._rewind(step)
            for share in step.shares.values():
                if not share.rank.id.role and share.attempt != step.attempts:
                    self._begin_again(step, share)
        else:
            step.torn |= {
                item.group
                for item in held
                if item.group is not None
                and any(
                    part.owner is None or part.sent != self.ranks[part.owner].full
                    for part in step.groups[item.group].values()
                )
            }
        self._touch(step, everybody=True)

    # -- in short ------------------------------------------------------------------------------------------------------

    def _share(self, step: Step, one: RankId) -> Share:
        share = step.shares.get(one)
        if share is None:
            rank = self.ranks.setdefault(one, Rank(one))
            share = step.shares[one] = Share(rank, step)
            self._activate(share)
        return share

    def _activate(self, share: Share) -> None:
        active, number = share.rank.active, share.step.number
        if share.acked == share.rank.full and share.acked:
            active.pop(number, None)
        elif number not in active:
            active[number] = share
            if next(reversed(active)) != max(active):
                share.rank.active = dict(sorted(active.items()))

    def _share_of(self, one: RankId, seat: int, number: int, attempt: int | None = None) -> Share | None:
        """None for what counts no more: a process that was lost, a step that is done, an attempt that was thrown away."""
        rank, step = self.ranks.get(one), self.steps.get(number)
        if rank is None or step is None or not rank.links & 1 << seat:
            return None
        share = step.shares.get(one)
        return None if share is None or (attempt is not None and attempt != share.attempt) else share

    def _add(self, step: Step, item: Item) -> None:
        step.items[item.id] = item
        if item.group is not None:
            step.groups.setdefault(item.group, {})[item.id] = item
        step.unfetched += item.remote
        for number in item.needs:
            step.waiters.setdefault(number, []).append(item)
        if item.role:
            step.roles_left[item.role] = step.roles_left.get(item.role, 0) + 1
        self._own(step, item, item.owner)

    def _own(self, step: Step, item: Item, owner: RankId | None) -> None:
        is_there = owner is not None and (
            owner in step.participants if not item.role else owner in self.members(item.role)
        )
        item.owner = owner if is_there else None
        if item.owner is None:
            step.ownerless[item.id] = item
            self._touch(step)
            return
        share = self._share(step, item.owner)
        share.items[item.id] = share.unsent[item.id] = item
        step.at_barrier.discard(item.owner)
        self._ranks_touched[item.owner] = None

    def _is_ready(self, step: Step, item: Item) -> bool:
        """Its columns are here, of all seats."""
        needs = [step.items[number] for number in item.needs if number in step.items]
        return all(one.done and one.owner in self.ranks and one.done == self.ranks[one.owner].full for one in needs)

    def _reset(self, step: Step, item: Item) -> None:
        step.unfetched += item.agreed
        item.agreed = False
        item.sent = item.done = item.fetched = item.seq = 0
        item.begun = False

    def _done(self, step: Step, item: Item, bit: int, full: int, columns: Any) -> None:
        item.done |= bit
        if item.role and item.done == full:  # its columns join whoever waits for them
            item.columns = columns
            step.roles_left[item.role] -= 1
            self._touch(step)
            for one in step.waiters.pop(item.id, ()):
                if one.owner is not None:
                    self._ranks_touched[one.owner] = None

    def _fetched(self, step: Step, item: Item, bit: int, full: int, missing: Iterable[str]) -> None:
        if item.remote:
            item.fetched |= bit
            if item.fetched == full and not item.agreed:
                item.agreed = True
                step.unfetched -= 1
                for part in step.groups[item.group].values() if item.group is not None else (item,):
                    if part.owner is not None:
                        self._ranks_touched[part.owner] = None
            step.gone |= frozenset(missing)

    def _note_waiting(self, step: Step, share: Share) -> None:
        if share.waiting == share.rank.full and not share.unsent:
            step.at_barrier.add(share.rank.id)
        else:
            step.at_barrier.discard(share.rank.id)

    def _acknowledge(self, step: Step) -> None:
        del self.steps[step.number]
        self.last_acked = max(self.last_acked, step.number)
        for share in step.shares.values():
            share.rank.active.pop(step.number, None)
            self._ranks_touched[share.rank.id] = None
            if share.rank.id.role and share.opened and not share.sealed:  # it computes what nobody needs
                self._out.append(Drop(share.rank.id, 0, step.number, met=True))
        self._out.append(Ack(step.number, frozenset(step.gone)))

    def _touch(self, step: Step, *, everybody: bool = False) -> None:
        self._steps_touched[step.number] = None
        if everybody:
            for one in step.shares:
                self._ranks_touched[one] = None


def _seats(mask: int) -> Iterator[int]:
    seat = 0
    while mask:
        if mask & 1:
            yield seat
        mask >>= 1
        seat += 1


def _leading(unsent: Iterable[Item], ready: Sequence[Item]) -> list[Item]:
    """Of those that are ready, the first ones without a gap."""
    leading, there = [], {item.id for item in ready}
    for item in unsent:
        if item.id not in there:
            break
        leading.append(item)
    return leading
