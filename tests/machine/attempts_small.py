"""A small world for the search over all states: two ranks of one seat, a few steps, and every fault.

Both directions of a connection are ordered queues. A join is a message on its way. A connection breaks after every
prefix of its messages, and a controller dies between every two orders. `Small.form` is the normal form of a state:
nested tuples of numbers and strings, with attempts, connections and incarnations in canonical numbers. Equal forms
behave equally. ``flip`` exchanges the two ranks, and the two rollouts of each step.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import Any

from stream_balancer.steps.held import Held, HeldStep
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import (
    Behind,
    Claim,
    Commit,
    Drop,
    End,
    Meets,
    Order,
    PeerRow,
    Phase,
    PlanRow,
    Process,
    Rank,
    Release,
    Seat,
    State,
    Step,
    Weights,
    Work,
    WritePeer,
    WritePlan,
)

RANKS = (0, 1)
NONE, OPEN, HALF = range(3)
"""A process is not connected; connected; or connected to a controller that does not hear it any more."""
MOST_ORDERS = 6
"""Crash points of one turn: the controller dies before the order 0 to 5."""
MOST_JOINS = 2
"""Joins of one rank on their way. A refused plain loop would restart its peers without end before they are heard."""
NEW_ATTEMPT = 1000
"""Above every canonical attempt."""


class Violation(Exception):  # noqa: N818 - the word of the search
    """The state breaks a promise."""


class Refused:
    """Last message of a connection: the controller has refused the process."""

    step = -1


REFUSED = Refused()


def lay_out(step: int, rollouts: tuple[str, ...], ranks: list[int]) -> dict[int, tuple[str, ...]]:
    """Rollout ``a`` belongs to rank 0, ``b`` to rank 1; an absent rank's rollouts go to the other rank."""
    home = {"a": 0, "b": 1}
    return {rank: tuple(one for one in rollouts if len(ranks) == 1 or home[one[-1]] == rank) for rank in ranks}


class Slot:
    """One rank: its process (``held`` is None after its death), and the messages on their way."""

    def __init__(self, incarnation: int = 0, held: Held | None = None, linked: int = NONE) -> None:
        self.incarnation, self.held, self.linked, self.saved, self.last_link = incarnation, held, linked, -1, 0
        self.history: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
        """(step, attempt, evicted rollouts) of the steps in the weights."""
        self.up: list[tuple[int, tuple[Any, ...]]] = []
        self.down: list[Any] = []


class Meeting:
    """One collective."""

    def __init__(self, what: tuple[int, int, tuple[str, ...]], ranks: tuple[int, ...]) -> None:
        self.what, self.ranks, self.is_broken = what, ranks, False
        self.entered: dict[int, str] = {}
        """in, ok, failed or dead, by rank."""
        self.parts: dict[int, tuple[str, ...]] = {}
        self.replaced: set[int] = set()

    def is_full(self) -> bool:
        return set(self.entered) == set(self.ranks)


Event = tuple[str, int, tuple[Any, ...]]
"""Name, cost in faults, arguments."""


class Small:
    """The world in one state."""

    meets, num_steps, auto_ack, remote, depth = Meets.BARRIER, 1, False, False, 2

    def __init__(self) -> None:
        self.ledger = Ledger(lay_out, meets=self.meets)
        self.log_next, self.peers, self.plans = 0, {}, {}
        self.slots = [Slot(0, self.held()) for _ in RANKS]
        self.meetings: dict[Any, Meeting] = {}
        self.lost: set[str] = set()
        self.wanted = set(RANKS)
        self.saved: tuple[Any, Weights] = ((), Weights())
        self.released: dict[int, tuple[str, ...]] = {}
        self.went_back, self.user_acked = False, -1
        self.act()

    def held(self, weights: Weights = Weights(), acked: int = -1) -> Held:  # noqa: B008
        return Held(weights, acked, self.meets is Meets.BARRIER)

    # The controller.

    def act(self, crash: int | None = None) -> bool:
        """Carry out orders until there are none. ``crash``: the controller dies before that order.

        False: there were fewer orders, so the crash is the same event as another.
        """
        ledger = self.ledger
        ledger.wanted = set(self.wanted)
        while ledger.next_step < self.num_steps and ledger.wants_step():
            ledger.planned([f"{ledger.next_step}{letter}" for letter in "ab"], remote=self.remote)
        ledger.is_ended = ledger.next_step >= self.num_steps
        for _ in range(20):
            orders = ledger.orders()
            if not orders:
                return crash is None
            for order in orders:
                if crash == 0:
                    self.restart()
                    return True
                crash = crash and crash - 1
                self.carry_out(order)
        raise Violation("orders without end")

    def carry_out(self, order: Order) -> None:
        match order:
            case WritePlan(row):
                whole = sorted([one for part in row.parts.values() for one in part] + list(row.gone))
                if whole != sorted(row.rollouts):
                    raise Violation("a plan is not whole")
                self.plans[row.step] = row
                self.log_next = max(self.log_next, row.step + 1)
            case WritePeer(row):
                self.peers[row.rank] = row
            case Release():
                if order.step in self.released:
                    raise Violation("released twice")
                self.released[order.step] = tuple(sorted(order.gone))
                del self.plans[order.step]
            case _:
                slot, seat = self.slots[order.to.rank], self.ledger.ranks[order.to.rank].seats.get(0)
                if slot.held is not None and slot.linked == OPEN and seat is not None and seat.link == slot.held.link:
                    slot.down.append(order)

    def restart(self) -> None:
        for slot in self.slots:
            slot.up.clear()
            slot.linked = HALF if slot.linked else NONE
        self.ledger = Ledger(
            lay_out,
            meets=self.meets,
            first_attempt=self.ledger._state.attempts,
            next_step=self.log_next,
            plans=[self.plans[one] for one in sorted(self.plans)],
            peers=self.peers.values(),
        )
        self.ledger.acknowledged_by_user([one for one in self.ledger.steps if one <= self.user_acked])
        self.act()

    def hear(self, rank: int, crash: int | None = None) -> bool:
        slot, ledger, process = self.slots[rank], self.ledger, Process(rank)
        link, (kind, *body) = slot.up.pop(0)
        if kind == "join":
            incarnation, claim = body
            if claim.is_start and self.released and claim.weights.next_step <= max(self.released):
                self.went_back = True
            refusal = ledger.joined(process, incarnation, link, claim, depth=self.depth)
        else:
            refusal = getattr(ledger, kind)(process, link, *body)
        if refusal is not None:
            ledger.lost(process, link)
            if slot.held is not None and slot.held.link == link and slot.linked == OPEN:
                slot.linked, slot.up, slot.down = HALF, [], [*slot.down, REFUSED]
        return self.act(crash)

    # Processes.

    def join(self, rank: int) -> None:
        slot = self.slots[rank]
        slot.last_link += 1
        claim = slot.held.join(slot.last_link)
        slot.held.obeys(0)
        slot.linked, slot.down = OPEN, []
        slot.up.append((slot.last_link, ("join", slot.incarnation, claim)))

    def receive(self, rank: int) -> None:
        slot = self.slots[rank]
        order, held = slot.down.pop(0), slot.held
        if order is REFUSED:
            self.stop(rank)
            return
        try:
            held.take(held.link, order)
        except RuntimeError as error:
            raise Violation(str(error)) from error
        if isinstance(order, Work):
            given = held.steps.get(order.step)
            if given is not None and given.attempt == order.attempt:
                lost = [one for one in given.part if one in self.lost and one not in given.gone]
                held.fetched(order.step, order.attempt, lost)
        self.flush(slot)

    def flush(self, slot: Slot) -> None:
        if slot.linked == OPEN:
            slot.up += [(slot.held.link, (type(fact).__name__.lower(), *fact)) for fact in slot.held.out]
        slot.held.out.clear()

    def stop(self, rank: int) -> None:
        """The process raises. A plain loop's launcher stops all processes."""
        for one in RANKS if self.meets is Meets.OWN else (rank,):
            if self.slots[one].held is not None:
                self.die(one, len(self.slots[one].up), True)

    def die(self, rank: int, keep: int, mark: bool) -> None:
        slot = self.slots[rank]
        self.cut(rank, keep, mark)
        slot.held, slot.saved = None, -1
        for meeting in self.meetings.values():
            if rank in meeting.entered:
                meeting.entered[rank] = "dead"
            meeting.replaced.add(rank)
        if self.meets is Meets.OWN and all(one.held is None for one in self.slots):
            self.meetings.clear()

    def cut(self, rank: int, keep: int, mark: bool) -> None:
        """``keep`` messages still arrive; then the controller hears of the end, if ``mark``."""
        slot = self.slots[rank]
        slot.up = slot.up[:keep] + ([(slot.held.link, ("lost",))] if mark else [])
        slot.linked, slot.down = NONE, []

    def start(self, rank: int, source: int) -> None:
        slot, (history, weights) = self.slots[rank], self.sources(rank)[source]
        slot.incarnation = max(slot.incarnation, self.ledger.ranks[rank].fenced) + 1
        is_saved = source == 0 and not self.auto_ack
        slot.held, slot.history = self.held(weights, weights.next_step - 1 if is_saved else -1), history

    def sources(self, rank: int) -> list[Any]:
        """The checkpoint, and the weights of living peers."""
        peers = [(one.history, one.held.weights) for one in self.living() if one is not self.slots[rank]]
        return list(dict.fromkeys([self.saved, *(peers if self.meets is not Meets.OWN else ())]))

    def living(self) -> Iterator[Slot]:
        """Processes that were not given up."""
        for rank, slot in enumerate(self.slots):
            known = self.ledger.ranks[rank]
            if slot.held is not None and slot.incarnation > known.fenced and slot.incarnation >= known.incarnation:
                yield slot

    def is_alive(self, rank: int) -> bool:
        return any(slot is self.slots[rank] for slot in self.living())

    # The loop.

    def key(self, rank: int) -> Any:
        """The meeting that the process enters next, or has entered; None: the loop waits."""
        held = self.slots[rank].held
        given = held.oldest() if held is not None else None
        if given is None or given.phase is not Phase.COMMITTED:
            return None
        return len(self.slots[rank].history) if self.meets is Meets.OWN else (given.number, given.attempt)

    def enter(self, rank: int) -> None:
        slot, key = self.slots[rank], self.key(rank)
        given = slot.held.oldest()
        what = (given.number, given.attempt, tuple(sorted(given.gone)))
        meeting = self.meetings.setdefault(key, Meeting(what, given.ranks))
        if meeting.what != what:
            raise Violation("two steps, attempts or denominators in one meeting")
        if any(step >= given.number for step, _, _ in slot.history):
            raise Violation("trains again what the weights have")
        for other, at in meeting.entered.items():
            if at == "in" and self.slots[other].history != slot.history:
                raise Violation("weights of the meeting differ")
        meeting.entered[rank], meeting.parts[rank] = "in", given.part
        if meeting.is_full():
            parts = sorted(one for part in meeting.parts.values() for one in part)
            if parts != [f"{given.number}{letter}" for letter in "ab" if f"{given.number}{letter}" not in given.gone]:
                raise Violation("the meeting does not sum the whole step")

    def leave(self, rank: int, ok: bool) -> None:
        slot, meeting = self.slots[rank], self.meetings[self.key(rank)]
        given = slot.held.oldest()
        meeting.entered[rank] = "ok" if ok else "failed"
        if ok:
            slot.history = (*slot.history, (given.number, given.attempt, tuple(sorted(given.gone))))
            slot.held.met(given)
            if self.auto_ack:
                slot.held.ack(given.number)
        elif self.meets is Meets.OWN:
            self.stop(rank)
            return
        else:
            slot.held.failed(given)
        self.flush(slot)

    def outcomes(self, meeting: Meeting) -> list[tuple[bool, int]]:
        """How the meeting may end for a process inside: (ok, cost)."""
        at = set(meeting.entered.values())
        if meeting.is_full():
            if meeting.is_broken or "dead" in at:
                return [(True, 0), (False, 0)]
            return [(False, 0)] if "failed" in at and "ok" not in at else [(True, 0)]
        absent = set(meeting.ranks) - set(meeting.entered)
        never = (
            self.meets is Meets.TRAINER or at & {"failed", "dead"} or any(self.never(one, meeting) for one in absent)
        )
        return [(False, 0 if never else 1)]

    def never(self, rank: int, meeting: Meeting) -> bool:
        """The rank cannot enter any more."""
        slot, (number, attempt, _) = self.slots[rank], meeting.what
        if slot.held is None or rank in meeting.replaced or slot.held.weights.next_step > number:
            return True
        given = slot.held.steps.get(number)
        is_other = given.attempt != attempt if given is not None else self.meets is Meets.BARRIER
        return is_other or not self.is_alive(rank)

    # Events.

    def events(self) -> Iterator[Event]:
        """Every possible next event."""
        for rank in RANKS:
            yield from self.events_of(rank)
        if self.may_save():
            yield "save", 0, ()
        if len(self.wanted) < len(RANKS):
            yield "wants", 0, (RANKS,)

    def events_of(self, rank: int) -> Iterator[Event]:
        slot, held = self.slots[rank], self.slots[rank].held
        if slot.up:
            yield "hear", 0, (rank,)
        if held is None:
            yield from (("start", 0, (rank, source)) for source in range(len(self.sources(rank))))
            return
        if slot.down:
            yield "receive", 0, (rank,)
        if slot.linked == NONE and sum(message[0] == "join" for _, message in slot.up) < MOST_JOINS:
            yield "join", 0, (rank,)
        if slot.linked == HALF:
            yield "notice", 0, (rank,)
        given = held.oldest()
        if given is not None and given.phase is Phase.SENT and held.barrier:
            yield "computed", 0, (rank,)
        if (key := self.key(rank)) is not None:
            meeting = self.meetings.get(key)
            at = meeting.entered.get(rank) if meeting else None
            if meeting and at == "in":
                yield from (("leave", cost, (rank, ok)) for ok, cost in self.outcomes(meeting))
            elif at is None and not (meeting and set(meeting.entered.values()) - {"in", "dead"}):
                yield "enter", 0, (rank,)
            else:
                yield "too_late", 0, (rank,)
        through = held.weights.next_step - 1 if self.auto_ack else slot.saved
        if through > held.acked:
            yield "ack", 0, (rank, through)
        if held.behind is not None and slot.linked == OPEN:
            yield "again", 0, (rank,)
            peer = self.slots[1 - rank]
            if self.meets is not Meets.OWN and self.is_alive(1 - rank) and peer.held.weights > held.weights:
                yield "load", 0, (rank,)
        if held.is_ended and slot.linked == OPEN and not slot.up and held.acked >= held.weights.next_step - 1:
            yield "go", 0, (rank,)

    def faults(self) -> Iterator[Event]:
        """Every possible fault."""
        yield "restart", 1, ()
        own = self.meets is Meets.OWN
        for rank, slot in enumerate(self.slots):
            if slot.held is None:
                continue
            ends = [(keep, mark) for keep in range(len(slot.up) + 1) for mark in (False, True)]
            if slot.linked == OPEN:
                yield "deaf", 1, (rank,)
                yield from (("cut", 1, (rank, *end)) for end in ends)
            if own:
                yield "stop", 1, (rank,)
            else:
                yield from (("die", 1, (rank, *end)) for end in (ends if slot.linked else [(len(slot.up), False)]))
                if len(self.ledger.members()) > 1 and self.ledger.ranks[rank].incarnation >= 0:
                    yield "give_up", 1, (rank,)
                if len(self.wanted) > 1:
                    yield "wants", 1, ((rank,),)
        for key, meeting in self.meetings.items():
            if not meeting.is_broken and meeting.is_full() and set(meeting.entered.values()) == {"in"}:
                yield "breaks", 1, (key,)
        if self.remote:
            for step in self.ledger.steps.values():
                yield from (("lose", 1, (one,)) for one in step.rollouts if one not in self.lost)
        if self.saved[0] and not self.auto_ack and self.user_acked < self.saved[1].next_step - 1:
            yield "user", 1, ()

    def crashes(self) -> Iterator[Event]:
        """The controller hears one message, and dies between two orders."""
        for rank, slot in enumerate(self.slots):
            if slot.up:
                yield from (("hear", 1, (rank, crash)) for crash in range(MOST_ORDERS))

    def happen(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """False: the event is the same as another one."""
        return getattr(self, name)(*arguments) is not False

    def notice(self, rank: int) -> None:
        self.slots[rank].linked, self.slots[rank].down = NONE, []

    def computed(self, rank: int) -> None:
        slot = self.slots[rank]
        slot.held.computed(slot.held.oldest())
        self.flush(slot)

    def too_late(self, rank: int) -> None:
        """The other ranks have left the meeting."""
        if self.meets is Meets.OWN:
            self.stop(rank)
            return
        slot = self.slots[rank]
        slot.held.failed(slot.held.oldest())
        self.flush(slot)

    def ack(self, rank: int, through: int) -> None:
        self.slots[rank].held.ack(through)
        self.flush(self.slots[rank])

    def again(self, rank: int) -> None:
        self.stop(rank)

    def load(self, rank: int) -> None:
        slot, peer = self.slots[rank], self.slots[1 - rank]
        slot.history = peer.history
        slot.held.load(peer.held.weights)
        self.flush(slot)

    def go(self, rank: int) -> None:
        self.die(rank, 0, True)

    def savers(self) -> list[Slot]:
        """Living processes that save together. A process that was told End does not hold the others up."""
        living = list(self.living())
        newest = max((len(one.history) for one in living), default=0)
        going = [one for one in living if not one.held.is_ended]
        return going or [one for one in living if len(one.history) == newest]

    def may_save(self) -> bool:
        """The savers have equal weights, which are newer than the checkpoint or not yet confirmed to a process."""
        savers = self.savers()
        if len({one.history for one in savers}) != 1 or not savers[0].history:
            return False
        equal = [one for one in self.living() if one.history == savers[0].history]
        is_told = self.auto_ack or all(one.saved >= one.held.weights.next_step - 1 for one in equal)
        newer = len(savers[0].history) - len(self.saved[0])
        return newer > 0 or (newer == 0 and not is_told)

    def save(self) -> None:
        first = self.savers()[0]
        self.saved = (first.history, first.held.weights)
        for one in self.living():
            if not self.auto_ack and one.history == first.history:
                one.saved = one.held.weights.next_step - 1

    def wants(self, ranks: tuple[int, ...]) -> None:
        self.wanted = set(ranks)
        self.act()

    def deaf(self, rank: int) -> None:
        """The controller loses the connection, and the process does not know."""
        slot = self.slots[rank]
        self.ledger.lost(Process(rank), slot.held.link)
        slot.linked, slot.up = HALF, []
        self.act()

    def give_up(self, rank: int) -> None:
        slot = self.slots[rank]
        self.ledger.gave_up(rank)
        slot.up = []
        slot.linked = HALF if slot.linked else NONE
        self.act()

    def breaks(self, key: Any) -> None:
        self.meetings[key].is_broken = True

    def lose(self, rollout: str) -> None:
        self.lost.add(rollout)

    def user(self) -> None:
        self.user_acked = self.saved[1].next_step - 1
        self.ledger.acknowledged_by_user([one for one in self.ledger.steps if one <= self.user_acked])
        self.act()

    # The end.

    def is_end(self) -> bool:
        return len(self.released) == self.num_steps and not self.ledger.steps

    def check_end(self) -> None:
        for gone in self.released.values():
            if not self.lost.issuperset(gone):
                raise Violation("evicted without a reason")
        living = [slot for rank, slot in enumerate(self.slots) if rank in self.wanted and self.is_known(rank)]
        if not living or self.went_back:
            return
        # A process that was not told End may have an older checkpoint.
        if any(one.held.weights.next_step <= max(self.released) and not one.held.is_ended for one in living):
            return
        histories = sorted((one.history for one in living), key=len)
        if any(histories[-1][: len(one)] != one for one in histories):
            raise Violation("weights differ at the end")
        have = {number: gone for number, _, gone in histories[-1]}
        for number, gone in self.released.items():
            is_void = len(gone) == len("ab")
            if number <= self.user_acked or (not is_void and number in have and set(have[number]) <= set(gone)):
                continue
            if is_void != (number not in have):
                raise Violation("a void step was trained" if is_void else f"step {number} is not in the weights")
            if not is_void:
                raise Violation("left out, and not reported")

    def is_known(self, rank: int) -> bool:
        """The ledger has let this process in, and has not given it up."""
        slot, seat = self.slots[rank], self.ledger.ranks[rank].seats.get(0)
        return self.is_alive(rank) and seat is not None and (seat.link == slot.held.link or slot.held.is_ended)

    # Normal form.

    def form(self, flip: bool = False) -> tuple[Any, ...]:
        """Normal form of the state. Attempts are numbered in the order of their first appearance."""
        ledger, number_of = self.ledger, {0: 0}
        ranks_in_order = RANKS[::-1] if flip else RANKS

        def number(attempt: int) -> int:
            return number_of.setdefault(attempt, len(number_of))

        def weights(one: Weights) -> tuple[int, int]:
            return (one.next_step, number(one.attempt))

        def names(some: Any) -> tuple[str, ...]:
            if flip:
                some = [one[:-1] + ("b" if one[-1] == "a" else "a") for one in some]
            return tuple(sorted(some))

        def of(rank: int) -> int:
            return 1 - rank if flip else rank

        def by_rank(some: Any, value: Any = lambda one: one) -> tuple[Any, ...]:
            return tuple(sorted((of(rank), value(one)) for rank, one in some.items()))

        def past(history: Any) -> tuple[Any, ...]:
            return tuple((step, number(attempt), names(gone)) for step, attempt, gone in history)

        def fact(message: tuple[Any, ...], incarnation_of: dict[int, int]) -> tuple[Any, ...]:
            kind, *body = message
            if kind == "join":
                incarnation, claim = body
                has = tuple((step, number(at), int(phase)) for step, (at, phase) in sorted(claim.holds.items()))
                return (kind, incarnation_of[incarnation], weights(claim.weights), claim.acked, has, claim.is_start)
            if kind == "loaded":
                return (kind, weights(body[0]))
            if kind == "missing":
                return (kind, body[0], number(body[1]), names(body[2]))
            if kind in ("reported", "finished"):
                return (kind, body[0], number(body[1]), *map(int, body[2:]))
            return message

        def order(one: Any) -> tuple[Any, ...]:
            match one:
                case Work(_, step, attempt, part, gone, ranks, needs):
                    over = tuple(sorted(map(of, ranks)))
                    return ("Work", step, number(attempt), names(part), names(gone), over, needs)
                case Commit(_, step, attempt, masked):
                    return ("Commit", step, number(attempt), names(masked))
                case Drop(_, step, attempt, lacking):
                    # The process does not read the attempt of a Drop.
                    return ("Drop", step, lacking)
                case Behind(_, step):
                    return ("Behind", step)
            return (type(one).__name__,)

        steps = tuple(
            (
                step.number,
                step.remote,
                number(step.attempt),
                by_rank(step.parts, names),
                names(step.planned_gone),
                names(step.gone),
                by_rank({one.rank: int(phase) for one, phase in step.phases.items() if phase}),
                step.is_lossy,
                step.is_spent,
                step.was_committed,
            )
            for _, step in sorted(ledger.steps.items())
        )
        ranks, peers, slots = [], [], []
        for place in ranks_in_order:
            slot, rank, peer = self.slots[place], ledger.ranks[place], self.peers.get(place)
            incarnations = {slot.incarnation, rank.incarnation, *([peer.incarnation] if peer else ())}
            incarnations |= {message[1] for _, message in slot.up if message[0] == "join"}
            # Only the order of incarnations counts. A fence stands for the newest incarnation that it refuses.
            known = sorted(incarnations - {-1})
            incarnation_of = {one: at for at, one in enumerate(known)} | {-1: -1}
            fence = bisect(known, rank.fenced) - 1
            seat, held = rank.seats.get(0), slot.held
            up, heard = [], {seat.link if seat is not None else None}
            for link, message in slot.up:
                if message[0] == "join":
                    heard.add(link)
                # The ledger ignores messages of an older connection.
                if link in heard:
                    up.append((link, message))
            links = {link for link, _ in up}
            links |= {one.link for one in (held, seat) if one is not None}
            link_of = {link: at + 1 for at, link in enumerate(sorted(links - {None, -1}))} | {None: None, -1: -1}
            ranks.append(
                (
                    incarnation_of[rank.incarnation],
                    fence,
                    rank.is_ended,
                    seat
                    and (
                        link_of[seat.link],
                        weights(seat.weights),
                        seat.acked,
                        seat.is_fresh,
                        seat.warned,
                        seat.is_forgetting,
                    ),
                )
            )
            peers.append(peer and (incarnation_of[peer.incarnation], bisect(known, peer.fenced) - 1, peer.ended))
            slots.append(
                (
                    incarnation_of[slot.incarnation],
                    slot.linked,
                    slot.saved,
                    past(slot.history) if held is not None else (),
                    tuple((link_of[link], fact(message, incarnation_of)) for link, message in up),
                    tuple(map(order, slot.down)),
                    held
                    and (
                        weights(held.weights),
                        held.acked,
                        link_of[held.link],
                        held.term,
                        held.behind,
                        held.is_ended,
                        tuple(
                            (
                                one.number,
                                number(one.attempt),
                                names(one.part),
                                names(one.gone),
                                tuple(sorted(map(of, one.ranks))),
                                one.needs_commit,
                                int(one.phase),
                                one.is_fetched,
                                one.is_missing,
                            )
                            for _, one in sorted(held.steps.items())
                        ),
                    ),
                )
            )
        saved = (past(self.saved[0]), weights(self.saved[1]))
        meetings = tuple(
            sorted(
                (
                    key if self.meets is Meets.OWN else (key[0], number_of[key[1]]),
                    (one.what[0], number_of[one.what[1]], names(one.what[2])),
                    one.ranks if not flip else tuple(sorted(map(of, one.ranks))),
                    by_rank(one.entered),
                    by_rank(one.parts, names),
                    tuple(sorted(map(of, one.replaced))),
                    one.is_broken,
                )
                for key, one in self.meetings.items()
                if self.is_open(one)
            )
        )
        released = tuple((step, names(gone)) for step, gone in sorted(self.released.items()))
        wanted = tuple(sorted(map(of, self.wanted)))
        return (
            steps,
            tuple(ranks),
            tuple(peers),
            tuple(slots),
            saved,
            meetings,
            names(self.lost),
            wanted,
            released,
            self.went_back,
            self.user_acked,
            ledger.next_step,
            self.log_next,
            ledger.is_ended,
            tuple(sorted(ledger._state.void)),
        )

    def is_open(self, meeting: Meeting) -> bool:
        """A process may still enter or leave the meeting."""
        attempt = meeting.what[1]
        if any(step.attempt == attempt for step in self.ledger.steps.values()):
            return True
        for slot in self.slots:
            if slot.held is not None and any(given.attempt == attempt for given in slot.held.steps.values()):
                return True
            if any(isinstance(order, Work | Commit) and order.attempt == attempt for order in slot.down):
                return True
        return False

    @classmethod
    def of(cls, form: tuple[Any, ...]) -> Small:
        """The world of a normal form."""
        steps, ranks, peers, slots, saved, meetings, lost, wanted, released, went_back, *rest = form
        user, next_step, log, ended, void = rest
        world = cls.__new__(cls)
        world.ledger = ledger = Ledger(lay_out, meets=cls.meets, first_attempt=NEW_ATTEMPT, next_step=next_step)
        state: State = ledger._state
        state.wanted, state.void, ledger.is_ended = set(wanted), set(void), ended
        world.plans = {}
        for number, remote, attempt, parts, planned_gone, gone, phases, is_lossy, is_spent, was_committed in steps:
            step = ledger.steps[number] = Step(
                number,
                (f"{number}a", f"{number}b"),
                remote,
                attempt,
                dict(parts),
                frozenset(planned_gone),
                frozenset(gone),
                {Process(rank): Phase(at) for rank, at in phases},
                is_lossy,
                is_spent,
                was_committed,
                is_saved=number <= user,
            )
            world.plans[number] = PlanRow(number, step.rollouts, attempt, step.parts, step.planned_gone, remote)
        world.peers, world.slots = {}, []
        for place, (incarnation, fenced, is_ended, seat) in enumerate(ranks):
            seats = {}
            if seat is not None:
                link, has, *rest = seat
                acked, is_fresh, warned, is_forgetting = rest
                seats[0] = Seat(link, Weights(*has), acked, is_fresh, cls.depth, warned, is_forgetting)
            ledger.ranks[place] = Rank(incarnation, fenced, 1, seats, is_ended)
            if (peer := peers[place]) is not None:
                world.peers[place] = PeerRow(place, peer[0], 1, peer[1], peer[2])
        world.slots = [cls._slot(place, *one) for place, one in enumerate(slots)]
        world.meetings = {}
        for key, what, over, entered, parts, replaced, is_broken in meetings:
            meeting = world.meetings[key] = Meeting(what, over)
            meeting.entered, meeting.parts = dict(entered), dict(parts)
            meeting.replaced, meeting.is_broken = set(replaced), is_broken
        world.saved = (saved[0], Weights(*saved[1]))
        world.lost, world.wanted, world.released = set(lost), set(wanted), dict(released)
        world.went_back, world.user_acked, world.log_next = went_back, user, log
        return world

    @classmethod
    def _slot(cls, place: int, incarnation: int, linked: int, saved: int, history: Any, *rest: Any) -> Slot:
        up, down, held = rest
        slot = Slot(incarnation, None, linked)
        slot.saved, slot.history, slot.last_link = saved, history, 9
        for link, (kind, *body) in up:
            if kind == "join":
                one, has, acked, holds, is_start = body
                holds = {step: (attempt, Phase(at)) for step, attempt, at in holds}
                body = [one, Claim(Weights(*has), acked, holds, is_start)]
            elif kind == "loaded":
                body = [Weights(*body[0])]
            elif kind == "reported":
                body = [*body[:2], Phase(body[2])]
            slot.up.append((link, (kind, *body)))
        to = Process(place)
        for kind, *body in down:
            match kind:
                case "Work":
                    step, attempt, part, gone, ranks, needs = body
                    slot.down.append(Work(to, step, attempt, part, frozenset(gone), ranks, needs))
                case "Commit":
                    slot.down.append(Commit(to, body[0], body[1], frozenset(body[2])))
                case "Drop":
                    slot.down.append(Drop(to, body[0], 0, body[1]))
                case "Behind":
                    slot.down.append(Behind(to, body[0]))
                case "End":
                    slot.down.append(End(to))
                case _:
                    slot.down.append(REFUSED)
        if held is not None:
            has, acked, link, term, behind, is_ended, given = held
            steps = {}
            for number, attempt, part, gone, over, needs, phase, is_fetched, is_missing in given:
                at = Phase(phase)
                steps[number] = HeldStep(
                    number, attempt, part, frozenset(gone), over, needs, at, is_fetched, is_missing
                )
            slot.held = Held(Weights(*has), acked, cls.meets is Meets.BARRIER, steps, [], link, term, behind, is_ended)
        return slot
