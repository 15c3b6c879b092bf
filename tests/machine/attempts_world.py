"""A random world around the ledger and its processes: links break, processes die, controllers are started again.

    python tests/machine/attempts_world.py FIRST LAST      schedules FIRST to LAST - 1, and the failures
    python tests/machine/attempts_world.py SEED            one schedule, order by order

Each world draws a way to meet, ranks, seats, depth, remote payloads, acknowledgements, and a number of faults. After
the last fault the run must end within a bounded number of events. The seed decides everything.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stream_balancer.steps.held import Acked, Finished, Forgot, Held, Loaded, Missing, Reported
from stream_balancer.steps.ledger import Ledger
from stream_balancer.steps.state import (
    Commit,
    Meets,
    Order,
    Phase,
    Release,
    Weights,
    Work,
    WritePeer,
    WritePlan,
)
from stream_balancer.steps.state import Process as Proc

NUM_STEPS = 5


class Halt(Exception):  # noqa: N818 - an event of the world, no error
    """The controller could not write a row: another one has the log."""


def lay_out(step, rollouts, over):
    parts = {one: [] for one in over}
    for at, one in enumerate(rollouts):
        parts[over[at % len(over)]].append(one)
    return {one: tuple(its) for one, its in parts.items()}


@dataclass
class Log:
    plans: dict = field(default_factory=dict)
    peers: dict = field(default_factory=dict)
    next_step: int = 0
    term: int = 0


@dataclass
class Link:
    id: int
    process: Process
    controller: Controller
    down: list = field(default_factory=list)
    up: list = field(default_factory=list)
    is_open: bool = True


class Process:
    def __init__(self, proc, incarnation, history, weights, acked, barrier):
        self.proc, self.incarnation, self.history, self.alive = proc, incarnation, list(history), True
        self.held = Held(weights, acked, barrier)
        self.link = None
        self.unfetched = []
        self.sequence = 0


class Controller:
    def __init__(self, world):
        self.world, self.links, self.halted = world, {}, False
        log = world.log
        log.term += 1
        self.term, self.is_due = log.term, True
        self.ledger = Ledger(
            lay_out, meets=world.meets, first_attempt=self.term << 20, next_step=log.next_step,
            plans=[log.plans[one] for one in sorted(log.plans)], peers=log.peers.values(),
        )  # fmt: skip
        self.ledger.wanted = set(world.wanted)

    def act(self, now=False):
        world, ledger = self.world, self.ledger
        if self.halted:
            return
        # half of the worlds ask for orders once for several facts
        self.is_due = True
        if world.batch and self is world.controller and not now:
            return
        self.is_due = False
        ledger.wanted = set(world.wanted)
        for _ in range(60):
            self.plan()
            orders = ledger.orders()
            if not orders:
                return
            for order in orders:
                if world.crash_in is not None and self is world.controller:
                    world.crash_in -= 1
                    if world.crash_in < 0:
                        world.crash_in = None
                        world.restart_controller(crashed=True)
                        return
                try:
                    self.carry_out(order)
                except Halt:
                    self.halted = True
                    return
        raise AssertionError("orders without end")

    def plan(self):
        world, ledger = self.world, self.ledger
        while ledger.next_step < NUM_STEPS and ledger.wants_step() and world.log.term == self.term:
            n = ledger.next_step
            ledger.planned([f"{n}.{i}" for i in range(world.per_step)], remote=n in world.remote_steps)
        ledger.is_ended = ledger.next_step >= NUM_STEPS

    def carry_out(self, order):
        world, log = self.world, self.world.log
        world.note("order", order)
        if isinstance(order, WritePlan | WritePeer | Release):
            if log.term != self.term:
                raise Halt
            world.counts[type(order).__name__] += 1
            if isinstance(order, WritePlan):
                row = order.row
                assert (row.step, row.attempt) not in world.truth, "one attempt, two plans"
                world.truth[row.step, row.attempt] = row
                whole = sorted([x for part in row.parts.values() for x in part] + list(row.gone))
                assert whole == sorted(row.rollouts), "a plan is not whole"
                world.attempts[row.step] += 1
                log.plans[row.step] = row
                log.next_step = max(log.next_step, row.step + 1)
            elif isinstance(order, WritePeer):
                log.peers[order.row.rank] = order.row
            else:
                parts = world.truth[order.step, order.attempt].parts
                lost = {one for rank in order.lost_ranks for one in parts[rank]}
                assert order.step not in world.released, "released twice"
                world.released[order.step] = (order.attempt, order.gone, lost)
                del log.plans[order.step]
            return
        link = self.links.get(order.to)
        if link is not None and link.is_open:
            link.down.append(order)


class World:
    is_shown = False
    """Print every event."""

    def note(self, *what: Any) -> None:
        if self.is_shown:
            sys.stdout.write(" ".join(map(str, what)) + "\n")

    def __init__(self, seed, **fixed):
        r = self.r = random.Random(seed)

        def draw(name: str, value: Any) -> Any:
            return fixed.get(name, value)

        self.meets = draw("meets", r.choice([Meets.BARRIER, Meets.BARRIER, Meets.TRAINER, Meets.OWN, Meets.OWN]))
        self.lone = draw("lone", self.meets is Meets.OWN and r.random() < 0.4)
        self.n = draw("n", r.choice([1, 2, 2, 3]))
        self.seats = draw("seats", r.choice([1, 1, 1, 2]))
        self.depth = draw("depth", r.choice([1, 2, 2, 3]))
        self.per_step = draw("per_step", r.choice([2, 4, 5]))
        self.auto_ack = draw("auto_ack", r.random() < 0.5)
        self.silent = draw("silent", r.random() < 0.1)
        self.auto_ack = self.auto_ack or self.silent
        self.partial_numbers = r.random() < 0.3
        self.remote_steps = {n for n in range(NUM_STEPS) if r.random() < draw("remote", r.choice([0, 0, 0.5, 1]))}
        self.faults = draw("faults", r.choice([0, 1, 2, 3, 4, 6, 8]))
        self.lost_payloads, self.lose = set(), 0.0
        self.log, self.truth, self.attempts, self.released = Log(), {}, Counter(), {}
        self.counts, self.collectives, self.ghosts = Counter(), {}, []
        self.wanted, self.crash_in, self.went_back = set(range(self.n)), None, False
        self.ckpt = ([], Weights())
        self.next_link, self.world, self.doomed, self.zombies = 0, 0, False, []
        self.user_acked = -1
        self.barrier = self.meets is Meets.BARRIER
        self.processes = {}
        self.own_ckpt, self.own_ckpts = {}, {}
        for rank in range(self.n):
            self.start_rank(rank, 0)
        self.old = []
        self.batch = r.random() < 0.5
        self.controller = Controller(self)
        self.num_trained = 0

    # processes

    def procs_of(self, rank):
        return [Proc(rank, seat) for seat in range(self.seats)]

    def start_rank(self, rank, incarnation, source=None):
        """Restarts all processes of a rank from one source of weights."""
        if source is None:
            source = self.own_ckpt.get(rank, ([], Weights())) if self.lone else self.ckpt
        history, weights = source
        for proc in self.procs_of(rank):
            old = self.processes.get(proc)
            if old is not None:
                self.kill(old)
            say = Weights(weights.next_step, 0) if self.partial_numbers else weights
            if self.silent and incarnation:
                say = Weights()
            new = Process(proc, incarnation, history, say, -1, self.barrier)
            # the source of its weights was saved
            if weights.next_step and source is self.ckpt and not self.auto_ack:
                new.held.acked = say.next_step - 1
            self.processes[proc] = new

    def kill(self, process):
        if process.alive:
            process.alive = False
            self.cut(process)

    def cut(self, process):
        link = process.link
        if link is None:
            return
        process.link, link.is_open = None, False
        # messages on the way arrive late, or never
        link.up = [*link.up[: self.r.randrange(len(link.up) + 1)], None]
        link.down = link.down[: self.r.randrange(len(link.down) + 1)]
        self.ghosts.append(link)

    def living_peers(self, rank):
        return [p for p in self.processes.values() if p.alive and p.proc.rank != rank and not self.is_fenced(p)]

    def is_fenced(self, process):
        rank = self.controller.ledger.ranks.get(process.proc.rank)
        return rank is not None and (process.incarnation <= rank.fenced or process.incarnation < rank.incarnation)

    def die(self, rank):
        """One rank dies and is started again."""
        p = self.processes[Proc(rank, 0)]
        ledger_rank = self.controller.ledger.ranks.get(rank)
        fresh = max(p.incarnation, ledger_rank.fenced if ledger_rank else 0) + 1
        if self.meets is Meets.OWN and not self.lone:
            self.doom()
            return
        if self.lone:
            self.note_back(self.own_ckpt.get(rank, ([], Weights()))[1], p)
            self.start_rank(rank, fresh)
            return
        peers = self.living_peers(rank)
        if peers and self.r.random() < 0.8:
            q = max(peers, key=lambda q: q.held.weights.next_step) if self.r.random() < 0.7 else self.r.choice(peers)
            self.start_rank(rank, fresh, (q.history, q.held.weights))
        else:
            self.start_rank(rank, fresh)
        self.note_back(self.ckpt[1], p)

    def note_back(self, weights, p):
        if self.auto_ack and p.held.acked >= weights.next_step:
            self.went_back = True

    def doom(self):
        """torchrun: all processes are stopped, and then started from the checkpoint."""
        self.doomed = True

    def restart_all(self):
        self.doomed = False
        self.world += 1
        if self.auto_ack or self.silent:
            self.went_back = True
        if self.lone:
            # every lone rank has its own checkpoints: all go back to the newest common step
            zero = {0: ([], Weights())}
            n = max(set.intersection(*(set(self.own_ckpts.get(rank, zero)) for rank in range(self.n))))
            for rank in range(self.n):
                self.own_ckpt[rank] = self.own_ckpts.get(rank, zero)[n]
            if any(p.held.acked >= n for p in self.processes.values()):
                self.went_back = True
        if self.r.random() < 0.3 and not self.lone:
            self.wanted = set(range(self.r.randrange(1, self.n + 1)))
        for rank in range(self.n):
            known = self.controller.ledger.ranks.get(rank)
            inc = max(self.processes[Proc(rank, 0)].incarnation, known.fenced if known else 0) + 1
            if rank in self.wanted or self.lone:
                self.start_rank(rank, inc, (lambda c: c)(self.ckpt) if not self.lone else None)

    # controllers

    def restart_controller(self, crashed=False):
        old = self.controller
        survives = not crashed and self.r.random() < 0.3
        for link in list(old.links.values()):
            if link.is_open and not (survives and self.r.random() < 0.6):
                self.cut(link.process)
        if survives:
            self.old.append(old)
        else:
            old.halted = True
        self.controller = Controller(self)

    def join(self, process, controller):
        if controller.halted:
            return
        claim = process.held.join(self.next_link)
        if not process.held.obeys(controller.term):
            return
        if self.released and claim.weights.next_step <= max(self.released) and claim.is_start:
            # weights that lack a released step: this is the trainer's choice
            self.went_back = True
        link = Link(self.next_link, process, controller)
        self.next_link += 1
        refusal = controller.ledger.joined(
            process.proc, process.incarnation, link.id, claim, num_seats=self.seats, depth=self.depth
        )
        self.note("join", self.next_link - 1, tuple(process.proc), process.incarnation, claim, refusal)
        self.counts["refused" if refusal else "joined"] += 1
        if refusal is not None:
            self.refused(process, refusal)
            return
        old = controller.links.get(process.proc)
        if old is not None and old.is_open:
            self.cut(old.process)
        # superseded processes are shown out
        for proc, other in list(controller.links.items()):
            if proc.rank == process.proc.rank and other.process.incarnation < process.incarnation and other.is_open:
                self.cut(other.process)
        controller.links[process.proc] = link
        process.link = link
        if process.held.acked >= 0:
            link.up.append(Acked(process.held.acked))
        controller.act()

    def refused(self, process, why):
        """The process raises, and whoever runs it starts it again."""
        self.counts["refusal: " + why.split(":")[0][:34]] += 1
        rank = process.proc.rank
        if process is not self.processes.get(process.proc):
            self.kill(process)
            return
        if self.meets is Meets.OWN:
            self.doom()
        else:
            self.die(rank)

    # messages

    def hear(self, link, message):
        ledger, proc = link.controller.ledger, link.process.proc
        self.note("   hear", link.id, tuple(proc), message)
        why = None
        match message:
            case Reported():
                ledger.reported(proc, link.id, *message)
            case Missing():
                ledger.missing(proc, link.id, *message)
            case Finished():
                why = ledger.finished(proc, link.id, *message)
            case Forgot():
                ledger.forgot(proc, link.id)
            case Loaded():
                why = ledger.loaded(proc, link.id, *message)
            case Acked():
                ledger.acked(proc, link.id, *message)
        if why is not None and link.is_open:
            self.cut(link.process)
            self.refused(link.process, why)
        link.controller.act()

    def receive(self, link, order: Order):
        process = link.process
        self.note("   recv", link.id, order)
        if link.id == process.held.link and isinstance(order, Work):
            process.unfetched.append((order.step, order.attempt))
        process.held.take(link.id, order)
        if link.id == process.held.link:
            if isinstance(order, Commit):
                row = self.truth[order.step, order.attempt]
                h = process.held.steps.get(order.step)
                if h is not None and h.attempt == order.attempt:
                    assert h.part == row.parts[process.proc.rank]
            assert len(process.held.steps) <= self.depth + 1, "more steps than depth on a rank"
        self.flush(process)

    def flush(self, process):
        link = process.link
        if link is not None:
            link.up += process.held.out
            process.held.out.clear()

    def fetch(self, process):
        step, attempt = process.unfetched.pop(self.r.randrange(len(process.unfetched)))
        held = process.held.steps.get(step)
        if held is None or held.attempt != attempt:
            return
        missing = []
        if step in self.remote_steps:
            for one in held.part:
                if self.lose and self.r.random() < self.lose:
                    self.lost_payloads.add(one)
            missing = [one for one in held.part if one in self.lost_payloads and one not in held.gone]
        process.held.fetched(step, attempt, missing)
        self.flush(process)

    # the loop

    def compute(self, process):
        held, given = process.held, process.held.oldest()
        if given is None:
            return
        if given.phase is Phase.SENT and self.barrier:
            self.num_trained += len(given.part)
            held.computed(given)
        elif given.phase is Phase.COMMITTED:
            self.meet(process, given)
        self.flush(process)

    def meet(self, process, given):
        held, row = process.held, self.truth[given.number, given.attempt]
        assert given.part == row.parts[process.proc.rank], "another part than planned"
        assert given.gone == row.gone, "other rollouts are left out than planned"
        if self.lone:
            if any(s == given.number for s, _ in process.history):
                assert self.silent, "trained twice"
            self.apply(process, given)
            return
        is_own = self.meets is Meets.OWN
        key = ("ddp", self.world, process.sequence) if is_own else (given.number, given.attempt)
        c = self.collectives.setdefault(
            key,
            {
                "entered": {},
                "left": {},
                "full": False,
                "broken": False,
                "incs": {p: q.incarnation for p, q in self.processes.items()},
                "what": (given.number, given.attempt),
                "gone": given.gone,
            },
        )
        if key[0] == "ddp":
            assert c["what"] == (given.number, given.attempt), "ranks of a plain loop meet in two different steps"
        assert c["gone"] == given.gone, "two denominators in one meeting"
        need = {proc for rank in given.ranks for proc in self.procs_of(rank)}
        if process.proc not in c["entered"] and not c["full"] and not c["left"]:
            c["entered"][process.proc] = process
            others = list(c["entered"].values())
            assert len({q.held.weights.next_step for q in others}) == 1 or self.silent, "weights of the meeting differ"
            content = {self.content(q) for q in others}
            assert len(content) == 1 or self.silent, "histories of the meeting differ"
            if set(c["entered"]) == need:
                c["full"] = True
                if self.faults > 0 and self.r.random() < 0.03:
                    self.faults -= 1
                    c["broken"] = True
            return
        mine = c["entered"].get(process.proc) is process
        if mine and c["full"]:
            broken = c["broken"] or any(not q.alive for q in c["entered"].values())
            ok = not broken or self.r.random() < 0.5
        elif not mine or c["left"]:
            ok = False
        else:
            absent = [self.processes.get(p) for p in need - set(c["entered"])]
            gone = any(self.never_comes(one, c, given) for one in absent)
            gone = gone or any(not q.alive for q in c["entered"].values())
            # a collective that does not fill ends by its timeout
            if not gone and self.r.random() > 0.02:
                return
            if not gone:
                self.faults -= 1
            ok = False
        c["left"][process.proc] = ok
        if ok:
            self.apply(process, given)
        elif self.meets is Meets.OWN:
            self.doom()
        else:
            held.failed(given)

    def never_comes(self, one, c, given):
        """An absent process of a collective cannot enter any more."""
        if one is None or not one.alive or c["incs"].get(one.proc) != one.incarnation or self.is_fenced(one):
            return True
        held = one.held.steps.get(given.number)
        is_other = (held is not None or self.barrier) and getattr(held, "attempt", None) != given.attempt
        return one.held.weights.next_step > given.number or is_other

    def apply(self, process, given):
        if not self.silent:
            assert all(s < given.number for s, _ in process.history), "trained again what the weights have"
        process.history.append((given.number, given.attempt))
        process.sequence += 1
        process.held.met(given)

    def is_current(self, process):
        return process.alive and process is self.processes.get(process.proc) and not process.held.is_ended

    def save(self):
        """All ranks save equal weights, and acknowledge one by one."""
        if self.lone:
            for rank in range(self.n):
                ps = [self.processes[p] for p in self.procs_of(rank)]
                if all(p.alive for p in ps) and len({tuple(p.history) for p in ps}) == 1:
                    self.own_ckpt[rank] = (list(ps[0].history), ps[0].held.weights)
                    self.own_ckpts.setdefault(rank, {0: ([], Weights())})[ps[0].held.weights.next_step] = self.own_ckpt[
                        rank
                    ]
                    if not self.auto_ack:
                        for p in ps:
                            p.saved = p.held.weights.next_step - 1
            return
        live = [p for p in self.processes.values() if p.alive and not self.is_fenced(p) and (not p.held.is_ended)]
        if not live:
            live = [p for p in self.processes.values() if p.alive and not self.is_fenced(p)]
            live = [p for p in live if p.held.weights.next_step == max(q.held.weights.next_step for q in live)]
        if not live or len({self.content(p) for p in live}) > 1 or self.doomed:
            return
        weights = max(p.held.weights for p in live)
        self.ckpt = (list(live[0].history), weights)
        if not self.auto_ack:
            for p in self.processes.values():
                if p.alive and self.content(p) == self.content(live[0]):
                    p.saved = p.held.weights.next_step - 1

    def content(self, process):
        """Steps in the weights. A bare number agrees with every attempt: the steps hold the same rollouts."""
        return tuple(step if self.partial_numbers else (step, attempt) for step, attempt in process.history)

    def ack(self, process):
        process.held.ack(process.held.weights.next_step - 1 if self.auto_ack else process.saved)
        self.flush(process)

    def behind(self, process):
        """The weights lack a step of another rank: the process loads newer weights, or restarts with them."""
        rank = process.proc.rank
        if (
            self.lone
            and not self.silent
            and (
                peers := [
                    q for q in self.living_peers(rank) if q.held.weights.next_step > process.held.weights.next_step
                ]
            )
        ):
            q = self.r.choice(peers)
            self.start_rank(rank, process.incarnation + 1, (q.history, q.held.weights))
            return
        if self.meets is Meets.OWN:
            self.refused(process, "behind")
            return
        better = [
            q
            for q in self.living_peers(rank)
            + [
                q
                for q in self.processes.values()
                if q.alive and q.proc.rank == rank and q is not process and not self.is_fenced(q)
            ]
            if q.held.weights.next_step > process.held.weights.next_step
        ]
        if (
            better
            and self.r.random() < 0.5
            and not any(h.phase is Phase.COMMITTED for h in process.held.steps.values())
        ):
            q = self.r.choice(better)
            process.history = list(q.history)
            process.held.load(q.held.weights)
            self.flush(process)
        elif not self.r.random() < 0.5:
            self.die(rank)

    # faults

    def fault(self):
        kind = self.r.choice(
            [
                "die",
                "die",
                "die",
                "cut",
                "cut",
                "controller",
                "crash",
                "give_up",
                "give_up",
                "resize",
                "missing",
                "all",
                "user",
                "fenced_copy",
                "elsewhere",
            ]
        )
        rank = self.r.randrange(self.n)
        process = self.processes[Proc(rank, self.r.randrange(self.seats))]
        self.counts["fault " + kind] += 1
        self.note("FAULT", kind, rank)
        ledger = self.controller.ledger
        if kind == "die":
            self.die(rank)
        elif kind == "cut":
            self.cut(process)
        elif kind == "controller":
            self.restart_controller()
        elif kind == "crash":
            self.crash_in = self.r.randrange(6)
        elif kind == "give_up":
            others = [x for x in ledger.members() if x != rank]
            if (
                others and rank in ledger.ranks and ledger.ranks[rank].incarnation >= 0 and self.meets is not Meets.OWN
            ) or (self.lone and others):
                self.give_up(rank)
        elif kind == "missing":
            self.lose = 0.15
        elif kind == "all":
            if self.meets is Meets.OWN:
                self.doom()
            else:
                for p in self.processes.values():
                    self.kill(p)
                self.restart_all()
        elif kind == "resize" and (self.meets is not Meets.OWN or self.lone):
            self.wanted = set(range(self.r.randrange(1, self.n + 1)))
            self.controller.act()
        elif kind == "user" and self.ckpt[0] and not self.auto_ack and not self.lone:
            ledger.acknowledged_by_user([one for one in ledger.steps if one < self.ckpt[1].next_step])
            self.user_acked = max(self.user_acked, self.ckpt[1].next_step - 1)
            self.controller.act()
        elif kind == "fenced_copy" and self.zombies and self.meets is not Meets.OWN:
            # weights of a given-up process: another rank may have discarded them
            z = self.r.choice(self.zombies)
            other = self.r.randrange(self.n)
            known = ledger.ranks.get(other)
            inc = max(self.processes[Proc(other, 0)].incarnation, known.fenced if known else 0) + 1
            w = z.held.weights
            if w.attempt:
                partial, self.partial_numbers = self.partial_numbers, False
                self.start_rank(other, inc, (z.history, w))
                self.partial_numbers = partial

    def give_up(self, rank):
        ledger = self.controller.ledger
        ledger.gave_up(rank)
        for proc, link in list(self.controller.links.items()):
            if proc.rank == rank and link.is_open:
                self.cut(link.process)
        # its processes live on, and may be in collectives; a new incarnation comes later
        self.zombies += [p for p in self.processes.values() if p.proc.rank == rank and p.alive]
        self.controller.act()

    def replace_fenced(self, process):
        if self.meets is Meets.OWN and not self.lone:
            self.doom()
        else:
            rank = process.proc.rank
            self.die_hidden(rank) if self.r.random() < 0.5 else self.die(rank)

    def die_hidden(self, rank):
        """The old processes stay alive somewhere; new ones take the place."""
        old = [self.processes[p] for p in self.procs_of(rank)]
        for p in old:
            self.cut(p)
            del self.processes[p.proc]
        for p in old:
            self.processes[p.proc] = p
        keep = {p: p.alive for p in old}
        self.die(rank)
        for p, was in keep.items():
            if was and p is not self.processes[p.proc]:
                p.alive = True
                self.zombies.append(p)

    # events

    def events(self):
        out = []
        for p in self.processes.values():
            if not p.alive:
                continue
            link = p.link
            if link is not None:
                if link.down:
                    out.append((lambda link=link: self.receive(link, link.down.pop(0)), 3))
                if link.up:
                    out.append((lambda link=link: self.hear(link, link.up.pop(0)), 3))
            elif not (p.held.is_ended and self.all_acked(p)) and not (
                self.doomed and not self.lone and self.r.random() < 0.7
            ):
                target = self.controller
                rank = target.ledger.ranks.get(p.proc.rank)
                if rank is not None and p.incarnation <= rank.fenced:
                    out.append((lambda p=p: self.replace_fenced(p), 1))
                    # it does not know, and tries to come in
                    out.append((lambda p=p, c=target: self.join(p, c), 1))
                elif p.proc.rank in self.wanted or any(p.proc.rank in s.parts for s in target.ledger.steps.values()):
                    out.append((lambda p=p, c=target: self.join(p, c), 2))
                    if self.old and self.r.random() < 0.1:
                        c = self.r.choice(self.old)
                        out.append((lambda p=p, c=c: self.join(p, c), 1))
            elif link is not None and link.controller is not self.controller:
                out.append((lambda p=p: self.cut(p), 1))
            if p.unfetched:
                out.append((lambda p=p: self.fetch(p), 3))
            given = p.held.oldest()
            if given is not None and (given.phase is Phase.COMMITTED or (given.phase is Phase.SENT and self.barrier)):
                out.append((lambda p=p: self.compute(p), 3))
            if p.held.behind is not None and link is not None:
                out.append((lambda p=p: self.behind(p), 1))
            if link is not None and link.controller is not self.controller:
                out.append((lambda p=p: self.cut(p), 1))
            through = p.held.weights.next_step - 1 if self.auto_ack else getattr(p, "saved", -1)
            if through > p.held.acked:
                out.append((lambda p=p: self.ack(p), 1 if not self.silent else 2))
            if p.held.is_ended and p.proc.rank in self.wanted and not self.controller.ledger.is_ended:
                out.append((lambda p=p: self.die(p.proc.rank), 1))
        for z in self.zombies[-4:]:
            if z.alive and z is not self.processes.get(z.proc):
                given = z.held.oldest()
                if given is not None and given.phase is Phase.COMMITTED and not self.lone:
                    out.append((lambda z=z: self.compute(z), 1))
        if self.controller.is_due and self.batch:
            out.append((lambda: self.controller.act(now=True), 4))
        if self.ghosts:
            out.append((self.ghost, 2))
        if self.doomed:
            living = [p for p in self.processes.values() if p.alive]
            if living:
                chosen = self.r.choice(living)
                out.append((lambda: self.kill(chosen), 3))
            else:
                out.append((self.restart_all, 3))
        dead = [rank for rank in self.wanted if not any(self.processes[p].alive for p in self.procs_of(rank))]
        out += [(lambda rank=rank: self.die(rank), 2) for rank in dead if not self.doomed]
        if not self.auto_ack or self.r.random() < 0.2:
            out.append((self.save, 1))
        ledger = self.controller.ledger
        for number, rank in ledger.ranks.items():
            if rank.is_ended and not rank.is_here and ledger.steps and number in self.wanted and not rank.is_given_up:
                # the steps need a rank that has left: it is started once more
                out.append((lambda number=number: self.die(number), 1))
            if (
                number not in self.wanted
                and not rank.is_here
                and rank.may_live
                and rank.incarnation >= 0
                and not any(self.processes[p].alive for p in self.procs_of(number))
            ):
                out.append((lambda number=number: self.give_up(number), 1))
        return out

    def all_acked(self, p):
        """A process leaves after the controller has heard its last acknowledgement."""
        rank = self.controller.ledger.ranks.get(p.proc.rank)
        heard = rank.seats.get(p.proc.seat) if rank else None
        if heard is not None and heard.acked < p.held.acked:
            return False
        return p.held.acked >= p.held.weights.next_step - 1

    def ghost(self):
        """A broken connection delivers a prefix of its messages late."""
        link = self.r.choice(self.ghosts)
        if link.down and self.r.random() < 0.5:
            order = link.down.pop(0)
            if link.process.alive:
                self.receive(link, order)
        elif link.up:
            message = link.up.pop(0)
            if message is None:
                link.controller.ledger.lost(link.process.proc, link.id)
                link.controller.act()
            else:
                self.hear(link, message)
        if not link.up and not link.down:
            self.ghosts.remove(link)

    def run(self, limit=4000):
        self.controller.act()
        idle = 0
        for turn in range(limit):
            if self.faults > 0 and self.r.random() < 0.05:
                self.faults -= 1
                self.fault()
            if self.faults <= 0 and turn > 300:
                self.lose, self.wanted, self.crash_in = 0.0, set(range(self.n)), None
            events = self.events()
            if (
                self.controller.ledger.is_ended
                and not self.faults
                and all(self.all_acked(p) for p in self.processes.values())
                and all(p.held.is_ended for p in self.processes.values())
                and all(p.link is None for p in self.processes.values())
            ):
                return turn
            if not events:
                idle += 1
                assert idle < 200 or self.faults > 0, "stall: nothing can happen"
                continue
            weight = sum(w for _, w in events)
            at = self.r.random() * weight
            for event, one in events:  # noqa: B007 - the chosen event stays
                at -= one
                if at < 0:
                    break
            event()
            if (
                self.log.next_step >= NUM_STEPS
                and not self.controller.ledger.steps
                and not self.log.plans
                and len(self.released) == NUM_STEPS
            ):
                self.check_end()
                return turn
        raise AssertionError("stall")

    def show(self) -> None:
        """Print the state of the ledger and of each process."""
        ledger = self.controller.ledger
        for what in (*ledger.steps.values(), *ledger.ranks.items()):
            self.note(what)
        for process in self.processes.values():
            self.note(
                process.proc, process.incarnation, "alive" if process.alive else "dead", process.history, process.held
            )

    def check_end(self):
        if self.silent:
            return
        for number in range(NUM_STEPS):
            attempt, gone, lost = self.released[number]
            row = self.truth[number, attempt]
            if len(gone) == self.per_step:
                continue
            assert gone <= self.lost_payloads, "evicted without a reason"
        living = [
            p
            for p in self.processes.values()
            if p.alive and not self.is_fenced(p) and p.held.term >= 0 and p.proc.rank in self.wanted
        ]
        if self.lone:
            for p in living:
                done = [s for s, _ in p.history]
                assert len(done) == len(set(done)), "twice"
            for number in range(NUM_STEPS):
                attempt, gone, lost = self.released[number]
                row = self.truth[number, attempt]
                for rank, part in row.parts.items():
                    if len(gone) == self.per_step or set(part) <= lost | gone or self.went_back:
                        continue
                    p = self.processes[Proc(rank, 0)]
                    if p in living and not p.held.is_ended:
                        assert (
                            (number, attempt) in p.history
                            or number >= p.held.weights.next_step
                            or not part
                            or not self.was_live(p, number)
                        ), "lost from a lone rank"
            return
        histories = [tuple((s, 0 if self.partial_numbers else a) for s, a in p.history) for p in living]
        if not histories:
            return
        longest = max(histories, key=len)
        for h in histories:
            k = min(len(h), len(longest))
            if not self.went_back:
                assert h[:k] == longest[:k], "weights differ at the end"
        if self.went_back or any(
            p.held.weights.next_step <= max(self.released) and not p.held.is_ended for p in living
        ):
            return
        have = dict(longest)
        for number in range(NUM_STEPS):
            attempt, gone, lost = self.released[number]
            if number <= self.user_acked and number not in have:
                continue
            if len(gone) == self.per_step:
                assert number not in have, "a void step was trained"
            else:
                assert number in have, f"step {number} is not in the weights"
                if self.partial_numbers:
                    continue
                row = self.truth[number, have[number]]
                assert row.gone <= gone, "left out, and not reported"
                assert row.gone == gone or have[number] != attempt, "reported as left out, but trained"

    def was_live(self, p, number):
        return p.incarnation == 0


def main(first: int, last: int | None) -> None:
    World.is_shown = last is None
    failed = 0
    for seed in range(first, first + 1 if last is None else last):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            failed += 1
            sys.stdout.write(f"schedule {seed} ({world.meets.value}): {error}\n")
        world.show()
    sys.stdout.write(f"{failed} failed\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
