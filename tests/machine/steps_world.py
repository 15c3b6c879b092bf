"""A world around the ledger: processes that die and come back, links that break, a controller that is started again.

One random number generator chooses what happens next: any message at the head of any link, any process's next move, any
fault that is left. So every order of events is possible, and a seed replays one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import steps_checks as checks
from steps_checks import InvariantError, check
from steps_config import Config
from steps_planner import Planner
from steps_play import say_to
from steps_process import Act, Meeting, Place, Process
from steps_random_faults import faults_of, give_up

from stream_balancer.client.held import HeldWork, Part
from stream_balancer.core.steps.ledger import Ledger
from stream_balancer.core.steps.orders import Ack, Note, SendGo, SendRewind, SendSeal, SendWork
from stream_balancer.core.steps.state import Item, StepSeal

Plan = tuple[int, list[Item], list[int]]
"""uid, items and participants."""


class Journal:
    """Plans, notes on steps, and incarnations, which outlive the controller."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.notes: dict[int, tuple[set[int], set[int], set[str]]] = {}
        """Who is left of a step, who of these has acknowledged it, and what is masked."""
        self.incarnations: dict[int, int] = {}
        self.acked: set[int] = set()


class World:
    def __init__(self, config: Config, make_ledger: Callable[..., Ledger] = Ledger) -> None:
        self.config, self.make_ledger = config, make_ledger
        self.rng = random.Random(config.seed)
        self.planner = Planner(config, self.rng)
        self.journal = Journal()
        self.fenced: dict[int, int] = {}
        """Incarnations that were given up."""
        self.processes: dict[Place, Process] = {}
        self.left: set[int] = set()
        """Ranks that will not be started again."""
        self.plans: dict[int, Plan] = {}
        self.rollouts: dict[int, set[str]] = {}
        """Rollouts of each step."""
        self.lost_rollouts: set[str] = set()
        self.checkpoint: tuple[dict[int, int], int] = ({}, 0)
        """Weights, and the first step that they lack."""
        self.saved: dict[Place, int] = {}
        """The same of plain loops, by process."""
        self.meetings: list[Meeting] = []
        self.meeting_of: dict[tuple[int, int, int], Meeting] = {}
        self.seals: dict[tuple[int, int, int], StepSeal] = {}
        self.trained: dict[tuple[int, int], tuple[StepSeal, list[str]]] = {}
        """By plain loops."""
        self.some_acked: set[int] = set()
        self.next_step, self.num_uids, self.generation = 0, 0, 0
        self.faults_left = config.num_faults
        self.ended = False
        self.num_idle = 0
        self.wanted = set(range(config.ranks))
        self.start_controller()
        for rank in self.wanted:
            self.start(rank, 0)

    # -- the controller ------------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        config, journal = self.config, self.journal
        ledger = self.ledger = self.make_ledger(self.lay_out, meets=config.meets, generation=self.generation)
        self.generation += 1
        ledger.resized(self.wanted)
        for one, incarnation in journal.incarnations.items():
            ledger.restore_rank(one, incarnation, fenced=self.fenced.get(one, -1) >= incarnation)
        ledger.last_acked = max(journal.acked, default=-1)
        for number in sorted(journal.plans):
            uid, items, participants = journal.plans[number]
            left, acked, gone = journal.notes.get(number, (participants, (), ()))
            there = [one for one in participants if one in left]
            ledger.restore(number, uid, map(copy_of, items), there, acked=acked, gone=gone)
        if self.ended:
            ledger.end()

    def plan(self, number: int) -> None:
        self.num_uids += 1
        items = self.planner.items(self.ledger.members)
        self.rollouts[number] = {rollout for item in items for rollout in item.rollouts}
        self.plans[number] = self.num_uids, list(map(copy_of, items)), self.ledger.members
        self.ledger.planned(number, items, uid=self.num_uids)
        self.journal.plans[number] = self.plans[number]

    def plan_next(self) -> None:
        self.next_step += 1
        self.plan(self.next_step - 1)

    def lay_out(self, step: int, items: list[Item], over: list[int]) -> list[Item]:
        checks.check_certain(self, step, items)
        return self.planner.replanned(self.ledger, items, over)

    def note(self, number: int) -> None:
        """As the host does: all that is so now."""
        if (step := self.ledger.steps.get(number)) is not None:
            acked = {one for one in step.participants if step.shares[one].is_acked}
            self.journal.notes[number] = set(step.participants), acked, set(step.gone)

    def end(self) -> None:
        self.ended = True
        self.ledger.end()

    def carry_out(self) -> None:
        for order in self.ledger.orders():
            if isinstance(order, Note):
                self.note(order.step)
            elif isinstance(order, Ack):
                self.acknowledge(order)
            else:
                self.send(order)

    def send(self, order: Any) -> None:
        if isinstance(order, SendWork):
            order = order._replace(items=tuple(map(copy_of, order.items)))
        if isinstance(order, SendWork | SendRewind):
            checks.check_certain(self, order.step, order)
        if isinstance(order, SendSeal):
            seal = order.seal
            known = self.seals.setdefault((seal.step, self.plans[seal.step][0], seal.number), seal)
            check(known == seal, "seal", "one number, two seals: {} {}", known, seal)
        process = self.processes.get((order.rank, order.seat))
        if process is not None and process.linked:
            is_work = isinstance(order, SendWork | SendSeal | SendGo)
            check(process.counts or not is_work, "fence", "{} for {}, which was given up", order, process.place)
            process.down.append(order)

    def acknowledge(self, order: Ack) -> None:
        number = order.step
        check(number not in self.journal.acked, "acknowledged", "step {} twice", number)
        self.journal.acked.add(number)
        self.journal.plans.pop(number, None)
        if not self.config.meets:
            checks.check_plain(self, order)
            return
        has_met = any(meeting.number == number for meeting in self.meetings)
        check(has_met, "acknowledged", "step {}, and nobody has met", number)
        if not self.config.auto_ack:
            check(number in self.checkpoint[0], "acknowledged", "step {}, and no checkpoint has it", number)

    def hear(self, process: Process) -> None:
        fact, *args = process.up.popleft()
        who, ledger = process.place, self.ledger
        if fact == "joined":
            # the host refuses one that was given up, and renumbers a new process
            if process.incarnation <= ledger.fenced.get(process.rank, -1):
                self.kill(process.rank)
                return
            has, weights = args
            config = self.config
            ledger.joined(*who, process.incarnation, has, weights=weights, seats=config.seats, depth=config.depth)
            if process.counts:
                self.journal.incarnations[process.rank] = process.incarnation
            return
        if fact == "acknowledged":
            self.some_acked.update(range(args[0] + 1))
        say_to(ledger, fact, *who, *args[: 3 if fact == "done" else None])

    # -- processes -----------------------------------------------------------------------------------------------------

    def processes_of(self, rank: int) -> list[Process]:
        return [self.processes[rank, seat] for seat in range(self.config.seats)]

    def start(self, rank: int, incarnation: int) -> None:
        for seat in range(self.config.seats):
            self.processes[rank, seat] = Process(self, rank, seat, incarnation)
        seats = self.processes_of(rank)
        saved = min(self.saved.get(process.place, 0) for process in seats)
        says_weights = saved and self.rng.random() < 0.5
        is_silent = self.config.silent and incarnation > 0 and self.rng.random() < 0.5
        # Weights of a checkpoint that has a step which may be given again are none that its first step needs.
        is_silent = is_silent and self.checkpoint[0].keys() <= self.journal.acked
        for process in seats:
            if is_silent:
                continue
            if self.config.meets:
                process.held.weights = process.copy_weights()
            elif says_weights:
                process.held.weights = process.held.acked = saved

    def kill(self, rank: int) -> None:
        for process in self.processes_of(rank):
            process.alive = False
            process.unlink()

    def kill_all(self) -> None:
        for rank in sorted({process.rank for process in self.processes.values()}):
            self.kill(rank)

    def newest_weights(self, process: Process) -> tuple[dict[int, int], int]:
        weights, number = self.checkpoint
        for other in self.processes.values():
            may_ask = other.counts and other.rank != process.rank and not self.config.all_die
            if may_ask and other.num_trained > number:
                weights, number = other.weights, other.num_trained
        return dict(weights), number

    def write_checkpoint(self, process: Process) -> None:
        """A process writes its part, and a rank's last one makes it a checkpoint."""
        process.num_saved = process.num_trained
        number = min(seat.num_saved for seat in self.processes_of(process.rank))
        if number > self.checkpoint[1]:
            self.checkpoint = {step: index for step, index in process.weights.items() if step < number}, number

    def partners(self, process: Process, work: HeldWork) -> list[Process]:
        """All who compute the item in one collective, once all have reached it."""
        group, part = work.item.group, process.part
        if group is None:
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

    def compute(self, processes: list[Process]) -> None:
        """Run one collective."""
        for process in processes:
            process.end_work()

    # -- meetings ------------------------------------------------------------------------------------------------------

    def meeting(self, part: Part, seal: StepSeal) -> Meeting:
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
        checks.check_meeting(self, meeting, members)
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
        gone = {one for one in self.left if self.config.meets or not ledger.rank(one).active}
        for one in sorted(dead.keys() - gone):
            rank = ledger.ranks.get(one)
            if one in self.wanted or (rank is not None and rank.active):
                yield (lambda one=one: self.start(one, dead[one] + 1)), 0.5
        for one in sorted(self.left):
            rank = ledger.ranks.get(one)
            if rank is None or rank.is_given_up or rank.is_here or not self.config.meets:
                continue
            if one in self.wanted or any(one in step.shares for step in ledger.steps.values()):
                yield (lambda one=one: give_up(self, one)), 0.3

    def moves_of_planner(self) -> Iterator[tuple[Act, float]]:
        ledger = self.ledger
        if self.next_step < self.config.steps:
            if ledger.wants_step:
                yield self.plan_next, 2
        elif not self.ended:
            yield self.end, 1

    def run(self, limit: int = 20_000) -> None:
        """Until all is done. Raises InvariantError."""
        for _ in range(limit):
            self.carry_out()
            moves = list(self.moves())
            if self.faults_left > 0 and self.rng.random() < 0.03 and (faults := list(faults_of(self))):
                self.faults_left -= 1
                self.rng.choice(faults)()
                continue
            if self.ended and not self.ledger.steps and len(self.journal.acked) == self.next_step:
                checks.check_end(self)
                return
            # A look at what a process can do may itself have moved it: only the third time without a move is a stall.
            self.num_idle = 0 if moves else self.num_idle + 1
            if self.num_idle == 3:
                raise InvariantError("stall", self.describe())
            if moves:
                acts, weights = zip(*moves, strict=True)
                self.rng.choices(acts, weights)[0]()
        raise InvariantError("stall", f"no end after {limit} moves: {self.describe()}")

    def describe(self) -> str:
        """For a schedule that came to a stand."""
        parts = [part for process in self.processes.values() for part in (process.place, *process.held.parts.values())]
        return "\n".join(map(repr, (self.config, self.left, self.fenced, *self.ledger.steps.values(), *parts)))


def copy_of(item: Item) -> Item:
    """As it was planned: nothing of what the ledger knows of it travels."""
    return Item(item.id, item.owner, item.rollouts, item.group, item.remote)
