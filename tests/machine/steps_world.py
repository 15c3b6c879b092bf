"""A world around the ledger: processes that die and come back, links that break, a controller that is started again.

One random number generator chooses what happens next: any message at the head of any link, any process's next move, any
fault that is left. So every order of events is possible, and a seed replays one:

    python tests/machine/steps_world.py 0 1000        # seeds 0 to 999: how many failed, and how
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from steps_config import Config, random_config
from steps_invariants import Broken, check
from steps_planner import Planner
from steps_process import Act, Meeting, Place, Process

from stream_balancer.client.held import Part, Work
from stream_balancer.core.steps import (
    TRAIN,
    Ack,
    Item,
    Ledger,
    Mask,
    Order,
    Piece,
    RankAck,
    RankId,
    Replan,
    Rewind,
    Seal,
    Send,
    SendSeal,
)

Plan = tuple[int, list[Item], list[RankId]]
"""uid, items and participants."""


class Journal:
    """What outlives the controller: plans, acknowledgements, masks, incarnations."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.rank_acks = defaultdict[int, list[RankId]](list)
        self.masks: dict[int, frozenset[str]] = {}
        self.incarnations: dict[RankId, int] = {}
        self.acked: set[int] = set()


class World:
    def __init__(self, config: Config, make_ledger: Callable[..., Ledger] = Ledger) -> None:
        self.config, self.make_ledger = config, make_ledger
        self.rng = random.Random(config.seed)
        self.planner = Planner(config, self.rng)
        self.journal = Journal()
        self.fenced: dict[RankId, int] = {}
        """Incarnations that were given up."""
        self.processes: dict[Place, Process] = {}
        self.left: set[RankId] = set()
        """Ranks that will not be started again."""
        self.plans: dict[int, Plan] = {}
        self.rows_left: dict[int, int] = {}
        """Of open steps."""
        self.pieces: dict[int, set[Piece]] = {}
        """What a step consists of."""
        self.lost_rollouts: set[str] = set()
        self.columns: set[tuple[int, int]] = set()
        """Step and item of a role: computed, and known to the controller."""
        self.checkpoint: tuple[dict[int, int], int] = ({}, 0)
        """Weights, and the first step that they lack."""
        self.saved: dict[Place, int] = {}
        """The same of plain loops, by process."""
        self.meetings: list[Meeting] = []
        self.meeting_of: dict[tuple[int, int, int], Meeting] = {}
        self.seals: dict[tuple[int, int, int], Seal] = {}
        self.trained: dict[tuple[int, RankId], list[Piece]] = {}
        """By plain loops."""
        self.some_acked: set[int] = set()
        self.group_orders = defaultdict[tuple[int, int], dict[int, Process]](dict)
        self.next_step, self.num_uids, self.generation = 0, 0, 0
        self.faults_left = config.num_faults
        self.ended = False
        self.num_idle = 0
        self.counts = Counter[str]()
        self.wanted = {TRAIN: set(range(config.ranks))} | {role: set(range(config.role_ranks)) for role in config.roles}
        self.start_controller()
        for role, numbers in self.wanted.items():
            for number in numbers:
                self.start(RankId(role, number), 0)

    # -- the controller ------------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        config, journal = self.config, self.journal
        ledger = self.ledger = self.make_ledger(meets=config.meets, moves=config.moves, generation=self.generation)
        self.generation += 1
        self.replans: list[Replan] = []
        self.columns.clear()
        for role, numbers in self.wanted.items():
            ledger.resized(role, numbers)
        for one, incarnation in journal.incarnations.items():
            ledger.restore_rank(one, incarnation, fenced=self.fenced.get(one, -1) >= incarnation)
        ledger.last_acked = max(journal.acked, default=-1)
        for number in sorted(journal.plans):
            uid, items, participants = journal.plans[number]
            acked, gone = journal.rank_acks[number], journal.masks.get(number, ())
            ledger.restore(number, uid, map(copy_of, items), participants, acked=acked, gone=gone)
        for number in sorted(self.plans.keys() - journal.plans.keys() - journal.acked):
            self.plan(number)  # an open step begins anew
        if self.ended:
            ledger.end()

    def plan(self, number: int) -> None:
        self.num_uids += 1
        items = self.planner.items(self.ledger, self.ledger.members(TRAIN), is_new=True)
        self.pieces[number] = {piece for item in items for piece in item.pieces}
        self.rows_left[number] = self.rng.randint(1, 3) if self.config.is_open else 0
        self.plans[number] = self.num_uids, list(map(copy_of, items)), self.ledger.members(TRAIN)
        self.ledger.planned(number, items, complete=not self.config.is_open, uid=self.num_uids)
        self.write_plan(number)

    def append(self, number: int) -> None:
        self.rows_left[number] -= 1
        is_last = not self.rows_left[number]
        over = sorted(self.ledger.steps[number].participants)
        items = [] if is_last else self.planner.items(self.ledger, over, is_new=False)
        self.pieces[number] |= {piece for item in items for piece in item.pieces}
        self.plans[number][1].extend(map(copy_of, items))
        self.ledger.appended(number, items, complete=is_last)
        self.write_plan(number)

    def write_plan(self, number: int) -> None:
        if not self.rows_left[number]:
            self.journal.plans[number] = self.plans[number]

    def plan_next(self) -> None:
        self.next_step += 1
        self.plan(self.next_step - 1)

    def replan(self) -> None:
        order = self.replans.pop(self.rng.randrange(len(self.replans)))
        news = self.planner.replanned(self.ledger, order)
        self.ledger.replanned(order.step, [item.id for item in order.items], news)

    def end(self) -> None:
        self.ended = True
        self.ledger.end()

    def carry_out(self) -> None:
        for order in self.ledger.orders():
            self.counts[type(order).__name__] += 1
            if isinstance(order, Replan):
                self.check_certain(order.step, order)
                self.replans.append(order)
            elif isinstance(order, Mask):
                self.journal.masks[order.step] = order.gone
            elif isinstance(order, RankAck):
                self.journal.rank_acks[order.step].append(order.rank)
            elif isinstance(order, Ack):
                self.acknowledge(order)
            else:
                self.send(order)

    def send(self, order: Any) -> None:
        if isinstance(order, Send):
            for item in order.items:
                is_ready = all((order.step, needed) in self.columns for needed in item.needs)
                check(is_ready, "columns", lambda: f"{order} before its columns")  # noqa: B023
            order = order._replace(items=tuple(map(copy_of, order.items)))
        if isinstance(order, Send | Rewind) and not order.rank.role:
            self.check_certain(order.step, order)
        if isinstance(order, SendSeal) and not order.rank.role:
            seal = order.seal
            known = self.seals.setdefault((seal.step, self.plans[seal.step][0], seal.number), seal)
            check(known == seal, "seal", lambda: f"one number, two seals: {known} {seal}")
        process = self.processes.get((order.rank, order.seat))
        if process is not None and process.linked:
            process.down.append(order)

    def acknowledge(self, order: Ack) -> None:
        number = order.step
        check(number not in self.journal.acked, "acknowledged", lambda: f"step {number} twice")
        self.journal.acked.add(number)
        self.journal.plans.pop(number, None)
        if not self.config.meets:
            self.check_plain(order)
            return
        has_met = any(meeting.number == number for meeting in self.meetings)
        check(has_met, "acknowledged", lambda: f"step {number}, and nobody has met")
        if not self.config.auto_ack:
            check(number in self.checkpoint[0], "acknowledged", lambda: f"step {number}, and no checkpoint has it")

    def hear(self, process: Process) -> None:
        fact, *args = process.up.popleft()
        who, ledger = process.place, self.ledger
        if fact == "joined":
            has, weights = args
            seats, depth = self.seats_of(process.rank), self.config.depth
            ledger.joined(*who, process.incarnation, has, weights=weights, seats=seats, depth=depth)
            if process.counts:
                self.journal.incarnations[process.rank] = process.incarnation
            return
        if fact == "acknowledged":
            self.some_acked.update(range(args[0] + 1))
        getattr(ledger, fact)(*who, *args)
        if fact == "done" and process.rank.role and (step := ledger.steps.get(args[0])) is not None:
            self.columns.update((args[0], id_) for id_ in args[2] if id_ in step.items and step.items[id_].has_columns)

    # -- processes -----------------------------------------------------------------------------------------------------

    def seats_of(self, rank: RankId) -> int:
        return self.config.role_seats if rank.role else self.config.seats

    def processes_of(self, rank: RankId) -> list[Process]:
        return [self.processes[rank, seat] for seat in range(self.seats_of(rank))]

    def start(self, rank: RankId, incarnation: int) -> None:
        for seat in range(self.seats_of(rank)):
            self.processes[rank, seat] = Process(self, rank, seat, incarnation)
        if rank.role:
            return
        seats = self.processes_of(rank)
        saved = min(self.saved.get(process.place, 0) for process in seats)
        says_weights = saved and self.rng.random() < 0.5
        for process in seats:
            if self.config.meets:
                process.held.weights = process.copy_weights()
            elif says_weights:
                process.held.weights = process.held.acked = saved

    def kill(self, rank: RankId) -> None:
        for process in self.processes_of(rank):
            process.alive = False
            process.unlink()

    def kill_all(self) -> None:
        for rank in sorted({process.rank for process in self.processes.values() if process.is_trainer}):
            self.kill(rank)

    def newest_weights(self, process: Process) -> tuple[dict[int, int], int]:
        weights, number = self.checkpoint
        for other in self.processes.values():
            may_ask = other.is_trainer and other.counts and other.rank != process.rank and not self.config.all_die
            if may_ask and other.num_trained > number:
                weights, number = other.weights, other.num_trained
        return dict(weights), number

    def write_checkpoint(self, weights: dict[int, int], number: int) -> None:
        if number > self.checkpoint[1]:
            self.checkpoint = dict(weights), number

    def partners(self, process: Process, work: Work) -> list[Process]:
        """All who compute the item in one collective, once all have reached it."""
        group, part = work.item.group, process.part
        if group is None or not process.is_trainer:
            return [process]
        assert part is not None
        step = self.ledger.steps.get(part.number)
        size = 0 if step is None or step.uid != part.uid else len(step.groups.get(group, ()))
        there = [
            other
            for other in self.processes.values()
            if other.alive and other.seat == process.seat and other.is_in_group(part.uid, group)
        ]
        return there if len(there) == size else []

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meeting(self, part: Part, seal: Seal) -> Meeting:
        key = (part.number, part.uid, seal.number)
        if key not in self.meeting_of:
            places = [process.place for rank in seal.ranks for process in self.processes_of(rank)]
            members = {place: self.processes[place].incarnation for place in places}
            self.meeting_of[key] = Meeting(part.number, part.uid, seal, members)
        return self.meeting_of[key]

    def try_to_meet(self, meeting: Meeting) -> None:
        members = [self.processes[place] for place in meeting.members]
        are_there = all(
            process.alive and process.incarnation == incarnation
            for process, incarnation in zip(members, meeting.members.values(), strict=True)
        )
        if meeting.index is not None or len(meeting.inside) < len(members) or not are_there:
            return
        self.check_meeting(meeting, members)
        meeting.index = len(self.meetings)
        self.meetings.append(meeting)

    def is_broken(self, meeting: Meeting) -> bool:
        """A member is gone, or will not come."""
        for place, incarnation in meeting.members.items():
            process = self.processes[place]
            if not process.alive or process.incarnation != incarnation:
                return True
            if place in meeting.inside:
                if meeting.index is None and process.meeting is not meeting:
                    return True
                continue
            part = process.held.parts.get(meeting.number)
            if part is None or part.uid != meeting.uid or part.came_back >= meeting.seal.number:
                return True
        return False

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_meeting(self, meeting: Meeting, members: list[Process]) -> None:
        number, seal = meeting.number, meeting.seal
        check(not self.rows_left[number], "once", lambda: f"step {number} has met before it was complete")
        weights = members[0].weights
        for process in members:
            self.check_not_met(process, number)
            text = lambda: f"step {number}: {process.place} has {process.weights}, not {weights}"  # noqa: B023, E731
            check(process.weights == weights, "weights", text)
        content = list[Piece]()
        for rank in seal.ranks:
            seats = [process.gradient for process in self.processes_of(rank)]
            same = all([id_ for id_, _ in seat] == [id_ for id_, _ in seats[0]] for seat in seats)
            check(same, "order", lambda: f"step {number}: seats of {rank} trained differently: {seats}")  # noqa: B023
            content += [piece for _, piece in seats[0]]
        want = sorted(piece for piece in self.pieces[number] if piece.rollout not in seal.gone)
        check(sorted(content) == want, "once", lambda: f"step {number}, {seal}: {sorted(content)}, not {want}")
        sizes = max(len({piece.rollout for piece in want}), 1), max(sum(piece.tokens for piece in want), 1)
        check((seal.rollouts, seal.tokens) == sizes, "denominators", lambda: f"step {number}: {seal}, not {sizes}")

    def check_plain(self, order: Ack) -> None:
        number = order.step
        got = [piece for (step, _), pieces in self.trained.items() if step == number for piece in pieces]
        want = sorted(piece for piece in self.pieces[number] if piece.rollout not in order.gone)
        check(sorted(got) == want, "once", lambda: f"step {number}: trained {sorted(got)}, not {want}")

    def check_not_met(self, process: Process, number: int) -> None:
        for other in self.processes.values():
            has = other.counts and number in other.weights
            check(not has, "again", lambda: f"{process.place} trains on step {number}, {other.place} has it")  # noqa: B023

    def check_certain(self, number: int, order: Order) -> None:
        """No living process may be in the meeting of the step."""
        is_new = isinstance(order, Send) and not order.items
        if not self.config.meets or is_new:
            return
        uid = self.plans[number][0]
        for other in self.processes.values():
            part = other.held.parts.get(number)
            if other.is_trainer and other.counts and part is not None and part.uid == uid and part.seal is not None:
                is_back = part.came_back >= part.seal.number
                check(is_back, "again", lambda: f"{order}, and {other.place} holds {part.seal}")  # noqa: B023

    def check_order(self, process: Process, part: Part, group: int) -> None:
        """Shared items are computed in one order by all who share them."""
        process.groups.append(group)
        for other in self.processes.values():
            if other is process or other.seat != process.seat or other.part is None or other.part.uid != part.uid:
                continue
            common = set(process.groups) & set(other.groups)
            orders = [[one for one in groups if one in common] for groups in (process.groups, other.groups)]
            check(orders[0] == orders[1], "order", lambda: f"{process.place}, {other.place}: {orders}")  # noqa: B023

    def check_weights(self, process: Process, number: int) -> None:
        lacks = range(process.num_trained, number)
        is_known = process.num_trained == number or (self.config.auto_ack and self.some_acked.issuperset(lacks))
        check(is_known, "weights", lambda: f"{process.place} meets in step {number}, lacks {list(lacks)}")

    def check_end(self) -> None:
        if not self.config.meets or self.config.auto_ack:
            return
        weights = self.checkpoint[0]
        for number in range(self.config.steps):
            check(number in weights, "acknowledged", lambda: f"step {number} is in no weights")  # noqa: B023
        for process in self.processes.values():
            if process.is_trainer and process.counts:
                same = all(weights[number] == index for number, index in process.weights.items())
                check(same, "weights", lambda: f"{process.place} has {process.weights}, the checkpoint {weights}")  # noqa: B023

    # -- faults --------------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[Act]:
        config, rng = self.config, self.rng
        alive = sorted({process.rank for process in self.processes.values() if process.alive})
        for kind in config.faults:
            if kind in ("kill", "flap") and alive:
                rank = rng.choice(alive)
                seat = rng.randrange(self.seats_of(rank))
                yield (lambda: self.kill(rank)) if kind == "kill" else self.processes[rank, seat].unlink  # noqa: B023
            elif kind == "all_die":
                yield self.kill_all
            elif kind == "restart":
                yield self.restart
            elif kind == "give_up" and (ranks := [one for one in self.ledger.ranks if self.may_give_up(one)]):
                yield lambda: self.give_up(rng.choice(ranks))  # noqa: B023
            elif kind == "resize" and not self.ended:
                yield self.resize
            elif kind == "lose" and config.remote and (config.meets or not self.seals):
                yield self.lose_rollouts
            elif kind == "user_ack" and self.checkpoint[1]:
                yield lambda: self.ledger.acknowledged_by_user(self.checkpoint[1] - 1)

    def restart(self) -> None:
        for process in self.processes.values():
            process.unlink(tell=False)
        self.start_controller()

    def may_give_up(self, one: RankId) -> bool:
        rank = self.ledger.ranks[one]
        if rank.is_here or rank.is_given_up or rank.incarnation < 0 or not (one.role or self.config.meets):
            return False
        return any(
            other.role == one.role and other != one and other not in self.left and other.number in self.wanted[one.role]
            for other, _ in self.processes
        )

    def give_up(self, one: RankId) -> None:
        self.ledger.gave_up(one)
        self.fenced[one] = max(self.fenced.get(one, -1), self.journal.incarnations.get(one, -1))
        if self.rng.random() < 0.5 and not self.processes[one, 0].alive:
            self.left.add(one)

    def resize(self) -> None:
        self.wanted[TRAIN] = set(range(self.rng.randint(1, 4)))
        self.ledger.resized(TRAIN, self.wanted[TRAIN])
        for number in self.wanted[TRAIN]:
            one = RankId(TRAIN, number)
            if (one, 0) not in self.processes:
                self.start(one, 0)
            self.left.discard(one)

    def lose_rollouts(self) -> None:
        numbers = self.pieces.keys() - self.journal.acked
        rollouts = sorted({piece.rollout for number in numbers for piece in self.pieces[number]})
        self.lost_rollouts.update(self.rng.sample(rollouts, min(2, len(rollouts))))

    # -- the run -------------------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[tuple[Act, float]]:
        for process in list(self.processes.values()):
            if process.alive and process.linked and process.down:
                yield process.receive, 2
            if process.alive and process.linked and process.up:
                yield (lambda process=process: self.hear(process)), 2
            for move in process.moves():
                yield move, process.speed
        yield from self.moves_of_launcher()
        yield from self.moves_of_planner()

    def moves_of_launcher(self) -> Iterator[tuple[Act, float]]:
        """Dead ranks are started again, or given up where they will not be."""
        ledger = self.ledger
        dead = {process.rank: process.incarnation for process in self.processes.values() if not process.alive}
        for one in sorted(dead.keys() - self.left):
            rank = ledger.ranks.get(one)
            if one.number in self.wanted[one.role] or (rank is not None and rank.active):
                yield (lambda one=one: self.start(one, dead[one] + 1)), 0.5
        for one in sorted(self.left):
            rank = ledger.ranks.get(one)
            if rank is None or rank.is_given_up or rank.is_here or not (one.role or self.config.meets):
                continue
            if one.number in self.wanted[one.role] or any(one in step.shares for step in ledger.steps.values()):
                yield (lambda one=one: self.give_up(one)), 0.3

    def moves_of_planner(self) -> Iterator[tuple[Act, float]]:
        ledger = self.ledger
        open_steps = [number for number, step in ledger.steps.items() if not step.is_complete]
        if self.next_step < self.config.steps:
            if ledger.wants_step and not open_steps:
                yield self.plan_next, 2
        elif not self.ended and not open_steps:
            yield self.end, 1
        if all(map(ledger.members, self.wanted)):
            for number in open_steps:
                yield (lambda number=number: self.append(number)), 0.6
        if self.replans:
            yield self.replan, 2

    def run(self, limit: int = 20_000) -> None:
        """Until all is done. Raises Broken."""
        for _ in range(limit):
            self.carry_out()
            moves = list(self.moves())
            if self.faults_left > 0 and self.rng.random() < 0.03 and (faults := list(self.faults())):
                self.faults_left -= 1
                self.rng.choice(faults)()
                continue
            if self.ended and not self.ledger.steps and len(self.journal.acked) == self.next_step:
                self.check_end()
                return
            # A look at what a process can do may itself have moved it: only the third time without a move is a stall.
            self.num_idle = 0 if moves else self.num_idle + 1
            check(self.num_idle < 3, "stall", self.describe)
            if moves:
                acts, weights = zip(*moves, strict=True)
                self.rng.choices(acts, weights)[0]()
        check(False, "stall", lambda: f"no end after {limit} moves: {self.describe()}")

    def describe(self) -> str:
        ledger, lines = self.ledger, [f"{self.config}", f"left {self.left} fenced {self.fenced} wanted {self.wanted}"]
        for step in ledger.steps.values():
            lines.append(
                f"step {step.number} complete {step.is_complete} of {sorted(step.participants)} barrier {step.at_barrier} "
                f"seal {step.seal} ({step.seals}) holders {step.holders} met {step.met} acks {step.acks} ownerless "
                f"{list(step.ownerless)} recalls {step.recalls} settling {step.settling} unfetched {step.num_unfetched} "
                f"torn {step.torn} kept {step.is_kept} settled {step.is_settled} changed {step.is_changed} gone {step.gone}"
            )
            for share in step.shares.values():
                items = [(item.id, item.sent, item.done, item.group, item.place) for item in share.items.values()]
                lines.append(
                    f"   {share.rank.id} items {items} unsent {list(share.unsent)} attempt {share.attempt} opened "
                    f"{share.opened} taken {share.taken} waiting {share.waiting} sealed {share.sealed} back {share.back} "
                    f"finished {share.finished} acked {share.acked} recalled {share.recalled} answers {share.answers}"
                )
        for process in self.processes.values():
            rank = ledger.ranks.get(process.rank)
            parts = [
                (part.number, part.attempt, part.taken, part.waiting, part.came_back, part.seal and part.seal.number)
                + tuple((work.item.id, work.begun, work.done) for work in part.work.values())
                for part in process.held.parts.values()
            ]
            lines.append(
                f"{process.place} incarnation {process.incarnation} alive {process.alive} linked {process.linked} in "
                f"{process.part and process.part.number} work {process.work and process.work.item.id} meeting "
                f"{process.meeting and process.meeting.seal.number} weights {process.held.weights} ended "
                f"{process.held.ended} parts {parts} up {list(process.up)} down {len(process.down)} here "
                f"{rank and rank.is_here} given up {rank and rank.is_given_up} weights {rank and rank.weights_of}"
            )
        return "\n".join(lines)


def copy_of(item: Item) -> Item:
    """As it was planned: nothing of what the ledger knows of it travels."""
    return Item(item.id, item.owner, item.pieces, item.role, item.needs, item.group, item.remote)


def main(first: int, last: int) -> int:
    """Runs many schedules. Returns how many failed."""
    failures, seeds, counts, started = Counter[str](), dict[str, int](), Counter[str](), time.monotonic()
    for seed in range(first, last):
        world = World(random_config(seed))
        try:
            world.run()
        except Exception as error:  # noqa: BLE001
            kind = error.invariant if isinstance(error, Broken) else repr(error)
            failures[kind] += 1
            seeds.setdefault(kind, seed)
        counts += world.counts
    print(
        f"{last - first} schedules, {time.monotonic() - started:.0f} s, {failures.total()} failed: {dict(failures)}, {seeds}; orders {dict(counts)}"
    )  # noqa: T201, E501
    return failures.total()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
