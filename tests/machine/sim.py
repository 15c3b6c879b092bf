"""A world around the ledger: processes that die and come back, links that break, a controller that is started again.

One random number generator chooses which enabled event is next: any message at the head of any link, any process's next
move, any fault that is left. So every order of events is possible, and a seed replays one.
"""

from __future__ import annotations

import random
import re
import sys
from collections import deque
from dataclasses import dataclass

import stream_balancer.core.steps.ledger as S
from stream_balancer.client.held import Held
from stream_balancer.core.steps.ledger import Item, Ledger, Piece, RankId


class Bug(AssertionError):
    pass


def check(ok, text):
    if not ok:
        raise Bug(text() if callable(text) else text)


@dataclass
class Config:
    seed: int = 0
    ranks: int = 3
    seats: int = 1
    steps: int = 4
    depth: int = 2
    meets: bool = True
    moves: bool = False
    open: bool = False
    roles: tuple = ()
    role_ranks: int = 2
    remote: bool = False
    shared: bool = False
    lockstep: bool = False
    auto_ack: bool = True
    torchrun: bool = False
    commits: bool = False
    faults: tuple = ()  # kinds
    num_faults: int = 4


class Proc:
    def __init__(self, world, rank, seat, incarnation):
        self.world, self.rank, self.seat, self.incarnation = world, rank, seat, incarnation
        c = world.c
        self.held = Held(rank, seat, seats=world.seats_of(rank), meets=c.meets, commits=c.commits)
        self.alive, self.linked = True, False
        self.up, self.down = deque(), deque()
        self.link = 0
        self.hand = None
        self.attempt = 0
        self.gradient = []
        self.stuck = None
        self.doing = None
        self.coll = None
        self.weights = {}
        self.speed = 1 if world.rng.random() < 0.8 else 0.15
        if not rank.role and c.meets:
            world.copy_weights(self)

    @property
    def key(self):
        return (self.rank, self.seat)

    @property
    def fenced(self):
        return self.incarnation <= self.world.ledger_fenced.get(self.rank, -1)


class World:
    def __init__(self, c: Config, ledger_class=Ledger):
        self.c, self.rng = c, random.Random(c.seed)
        self.ledger_class = ledger_class
        self.ledger_fenced = {}
        self.disk = ({}, 0)
        self.some_acked = set()
        self.procs = {}
        self.meetings = []  # (step, content, seal)
        self.colls = {}
        self.truth = {}  # step -> set of pieces
        self.trained = {}  # meets=False
        self.acked = {}
        self.seal_of = {}
        self.lost_rollouts = set()
        self.computed = set()
        self.journal = {}
        self.next_step, self.ended, self.generation = 0, False, 0
        self.open_left = {}
        self.faults_left = c.num_faults
        self.gone = set()
        self.wanted = {"": set(range(c.ranks)), **{r: set(range(c.role_ranks)) for r in c.roles}}
        self.counts = {}
        self.new_ledger()
        for role, numbers in self.wanted.items():
            for n in numbers:
                self.start(RankId(role, n), 0)
        self.replans = []
        self.log = []
        self.idle = 0

    def new_ledger(self):
        c = self.c
        old = getattr(self, "ledger", None)
        L = self.ledger = self.ledger_class(meets=c.meets, moves=c.moves, generation=self.generation)
        self.generation += 1
        L.fenced = dict(self.ledger_fenced)
        for role, numbers in self.wanted.items():
            L.resized(role, numbers)
        L.last_acked = max(self.acked, default=-1)
        for number, (uid, items, participants, complete) in sorted(self.journal.items()):
            L.restore(
                number,
                uid,
                [self.copy(i) for i in items],
                participants,
                complete=complete,
                acked=[o for o, sh in old.steps[number].shares.items() if sh.acked == sh.rank.full and not o.role],
                gone=old.steps[number].gone,
            )
        if self.ended:
            L.end()
        self.replans = []

    def copy(self, i):
        return Item(i.id, i.owner, i.pieces, i.role, i.needs, i.group, i.remote)

    def seats_of(self, rank):
        return 1 if rank.role else self.c.seats

    def start(self, rank, incarnation):
        for seat in range(self.seats_of(rank)):
            self.procs[rank, seat] = Proc(self, rank, seat, incarnation)

    def copy_weights(self, proc):
        best = self.disk
        if not self.c.torchrun:
            for p in self.procs.values():
                if (
                    p is not proc
                    and p.alive
                    and not p.fenced
                    and not p.rank.role
                    and p.held.weights > best[1]
                    and p.rank != proc.rank
                ):
                    best = (p.weights, p.held.weights)
        proc.weights, proc.held.weights = dict(best[0]), best[1]
        proc.held.acked = min(self.disk[1], best[1])

    # ---- planning
    def make_items(self, number, base):
        rng, c, L = self.rng, self.c, self.ledger
        over = L.members("")
        items = []
        k = 0

        def new(**kw):
            it = Item(L.new_id(), **kw)
            return it

        todo = []
        rounds = rng.randint(1, 3)
        for n in range(rounds):
            if c.lockstep:
                g = L.new_id()
                for r in over:
                    todo.append((r, (Piece(f"{number}.{base}.{k}", 0, rng.randint(1, 9)),), g))
                    k += 1
                continue
            if c.shared and len(over) > 1 and rng.random() < 0.5:
                g = L.new_id()
                name = f"{number}.{base}.{k}"
                k += 1
                for part, r in enumerate(sorted(rng.sample(over, rng.randint(2, len(over))))):
                    todo.append((r, (Piece(name, part, rng.randint(1, 9)),), g))
            for r in over:
                if rng.random() < 0.75:
                    ps = tuple(
                        Piece(f"{number}.{base}.{k + j}", 0, rng.randint(1, 9)) for j in range(rng.randint(1, 2))
                    )
                    k += len(ps)
                    todo.append((r, ps, None))
        for r, ps, g in todo:
            needs = []
            remote = c.remote and ((g % 2 == 0) if g is not None else rng.random() < 0.6)
            for role in c.roles:
                ro = rng.choice(L.members(role))
                it = new(owner=ro, pieces=ps, role=role, remote=remote)
                items.append(it)
                needs.append(it.id)
            items.append(new(owner=r, pieces=ps, needs=tuple(needs), group=g, remote=remote))
        return items

    def plan(self):
        n, L = self.next_step, self.ledger
        self.next_step += 1
        items = self.make_items(n, 0)
        complete = not self.c.open
        uid = self.generation * 1000 + n
        self.truth[n] = {p for i in items if not i.role for p in i.pieces}
        self.open_left[n] = 0 if complete else self.rng.randint(0, 2)
        self.journal[n] = (uid, [self.copy(i) for i in items], list(L.members("")), complete)
        L.planned(n, items, complete=complete, uid=uid)

    def append(self, n):
        L = self.ledger
        uid, old, part, _ = self.journal[n]
        left = self.open_left[n]
        self.open_left[n] -= 1
        items = self.make_items(n, left + 1) if left > 0 else []
        over = L.steps[n].participants
        complete = left <= 0
        self.truth[n] |= {p for i in items if not i.role for p in i.pieces}
        self.journal[n] = (uid, old + [self.copy(i) for i in items], part, complete)
        L.appended(n, items, complete=complete)

    def replan(self, o):
        rng, L = self.rng, self.ledger
        new, role = [], o.items[0].role
        if role:
            # columns stay with their micro-batch: another owner, no new cut
            step = L.steps.get(o.step)
            if step is None:
                return
            for i in o.items:
                i.owner = rng.choice(o.over)
            L.replanned(o.step, [i.id for i in o.items], o.items)
            return
        groups, alone = {}, []
        for i in o.items:
            if i.group is None:
                alone.append(i)
            else:
                groups.setdefault(i.group, []).append(i)
        for i in alone:  # cut anew: one item per piece at random
            cut = [i.pieces] if rng.random() < 0.5 else [(p,) for p in i.pieces]
            for ps in cut:
                new.append(Item(L.new_id(), rng.choice(o.over), ps, "", i.needs, None, i.remote))
        for g, parts in groups.items():
            g2 = L.new_id()
            pieces = [p for i in parts for p in i.pieces]
            over = rng.sample(o.over, min(len(o.over), len(pieces))) if not self.c.lockstep else list(o.over)
            need = tuple({n for i in parts for n in i.needs})
            rem = any(i.remote for i in parts)
            by = {}
            for k, p in enumerate(pieces):
                by.setdefault(over[k % len(over)], []).append(p)
            for r in over if self.c.lockstep else by:
                new.append(Item(L.new_id(), r, tuple(by.get(r, ())), "", need, g2 if len(over) > 1 else None, rem))
        L.replanned(o.step, [i.id for i in o.items], new)

    # ---- controller
    def carry_out(self):
        for o in self.ledger.orders():
            self.log.append(o) if self.c.num_faults < 0 else None
            self.counts[type(o).__name__] = self.counts.get(type(o).__name__, 0) + 1
            if isinstance(o, S.Replan):
                self.replans.append(o)
            elif isinstance(o, S.Ack):
                self.on_ack(o)
            else:
                p = self.procs.get((o.rank, o.seat))
                if isinstance(o, S.Send):
                    for i in o.items:
                        for n in i.needs:
                            check(n in self.computed, lambda: f"item {i.id} sent before its column {n}")
                    o = o._replace(items=tuple(self.copy_sent(i) for i in o.items))
                if isinstance(o, S.SendSeal) and not o.rank.role:
                    known = self.seal_of.setdefault(
                        (o.seal.step, self.ledger.steps[o.seal.step].uid, o.seal.number), o.seal
                    )
                    check(known == o.seal, lambda: f"two seals of one number: {known} {o.seal}")
                if p is not None and p.linked:
                    p.down.append(o)

    def copy_sent(self, i):
        return self.copy(i)

    def on_ack(self, o):
        n = o.step
        check(n not in self.acked, f"step {n} acknowledged twice")
        self.acked[n] = True
        self.journal.pop(n, None)
        if self.c.meets:
            check(any(m[0] == n for m in self.meetings), lambda: f"step {n} acknowledged, and nobody has met")
            if not self.c.auto_ack:
                check(n < self.disk[1], lambda: f"step {n} acknowledged before anybody has saved it")
                check(self.meetings[self.disk[0][n]][0] == n, "wrong meeting")
        else:
            got = [p for (s, r), ps in self.trained.items() if s == n for p in ps]
            want = sorted(p for p in self.truth[n] if p.rollout not in o.gone)
            check(
                sorted(p for p in got if p.rollout not in o.gone) == want,
                lambda: f"step {n}: trained {sorted(got)} want {want}",
            )

    def fact(self, p, f):
        L = self.ledger
        if f[0] == "joined":
            L.joined(p.rank, p.seat, p.incarnation, f[1], weights=f[2], seats=self.seats_of(p.rank), depth=self.c.depth)
        elif f[0] == "acknowledged":
            self.some_acked.update(range(f[1] + 1))
            L.acknowledged(p.rank, p.seat, f[1])
        elif f[0] == "done":
            if p.rank.role:
                self.computed.update(f[3])
            getattr(L, f[0])(p.rank, p.seat, *f[1:])
        else:
            getattr(L, f[0])(p.rank, p.seat, *f[1:])

    # ---- processes
    def connect(self, p):
        p.linked = True
        p.up.clear()
        p.down.clear()
        p.up.append(("joined", p.held.has(), p.held.weights))
        self.flush(p)

    def unlink(self, p, tell=True):
        was, p.linked = p.linked, False
        joined = not any(m[0] == "joined" for m in p.up)
        p.up.clear()
        p.down.clear()
        if was and joined and tell:
            self.ledger.lost(p.rank, p.seat)

    def kill(self, rank):
        for seat in range(self.seats_of(rank)):
            p = self.procs[rank, seat]
            p.alive = False
            self.unlink(p)

    def flush(self, p):
        if p.linked:
            p.up.extend(p.held.out)
        p.held.out.clear()

    def drop_hand(self, p):
        p.hand = None
        p.gradient = []
        p.stuck = None
        p.doing = None
        p.coll = None

    def moves_of(self, p):
        """-> what this process can do now, as callables"""
        if not p.alive:
            return []
        h, out = p.held, []
        if not p.linked:
            out.append(lambda: self.connect(p))
        if h.behind is not None:
            return [lambda: self.on_behind(p)]
        if p.held.dropped:
            return [lambda: self.on_drop(p)]
        if h.wanted:
            out.append(lambda: self.fetch(p))
        if p.hand is not None:
            part = p.hand
            if h.parts.get(part.number) is not part:
                return [lambda: self.drop_hand(p)]
            if p.coll is not None:
                return out + self.coll_moves(p)
            if part.again:
                return [lambda: self.drop_hand(p)]
            if p.stuck is not None:
                ready = self.partners(p)
                if ready is not None:
                    out.append(lambda: self.together(ready))
                return out
            if p.doing is not None:
                return out + [lambda: self.complete_work(p, p.doing)]
            w = h.next_work(part)
            if w is not None:
                out.append(lambda: self.begin(p, part, w))
            elif p.rank.role:
                if all(x.done for x in part.work.values()):
                    out.append(lambda: self.drop_hand(p))
            else:
                if all(x.done for x in part.work.values()):
                    seal = h.reach_end(part)
                    self.flush(p)
                    if seal is not None:
                        out.append(lambda: self.enter(p, part, seal))
        else:
            part = None
            if any(True for _ in h.parts):
                part = h.next_step()
                self.flush(p)
            if part is not None:
                self.take(p, part)
                return out + [lambda: None]
            if h.weights > h.acked and not p.rank.role:
                out.append(lambda: self.save(p))
            if h.ended and p.linked and not h.parts and h.weights <= h.acked and not p.up:
                out.append(lambda: self.leave(p))
        return out

    def leave(self, p):
        for seat in range(self.seats_of(p.rank)):
            q = self.procs[p.rank, seat]
            if not (q.held.ended and q.linked and not q.held.parts and not q.up and q.alive):
                return
        self.kill(p.rank)
        self.gone.add(p.rank)

    def take(self, p, part):
        p.hand, p.gradient = part, []
        # done before: its gradient is this process's own; a new loop over a rewound step begins at zero
        check(
            not any(w.done for w in part.work.values()), "a step is begun with work done"
        ) if not p.rank.role else None
        u = sum(not x.taken for x in p.held.parts.values())
        check(u <= self.c.depth, f"{p.rank}: {u} steps above its credits")

    def on_drop(self, p):
        drops, p.held.dropped = p.held.dropped, []
        if p.hand is not None and p.held.parts.get(p.hand.number) is not p.hand:
            self.drop_hand(p)
        if any(d == "refused" for d in drops):
            return
        if any(d.met for d in drops) and not p.rank.role and self.c.meets:
            newest = max(d.step for d in drops if d.met)
            if p.held.weights <= newest:
                self.other_weights(p)
            else:
                self.unlink(p)

    def other_weights(self, p):
        if self.c.torchrun:  # all go back together
            for r in sorted({q.rank for q in self.procs.values() if q.alive and not q.rank.role}):
                self.kill(r)
            return
        self.copy_weights(p)
        p.held.parts = {n: x for n, x in p.held.parts.items() if n >= p.held.weights}
        if p.hand is not None and p.hand.number not in p.held.parts:
            self.drop_hand(p)
        self.unlink(p)

    def on_behind(self, p):
        p.held.behind = None
        if p.linked:
            self.other_weights(p)

    def begin(self, p, part, w):
        n = part.number
        if self.c.meets and not p.rank.role and not p.fenced:
            for q in self.procs.values():
                check(
                    not (q.alive and not q.fenced and n in q.weights),
                    lambda: f"{p.key} trains on step {n}, which {q.key} has in its weights",
                )
        p.held.begin(part, w)
        if w.group is not None and not p.rank.role:
            p.stuck = (part, w)
        else:
            p.doing = (part, w)

    def partners(self, p):
        part, w = p.stuck
        step = self.ledger.steps.get(part.number)
        same = [
            q
            for q in self.procs.values()
            if q.alive
            and q.stuck
            and q.stuck[1].group == w.group
            and q.seat == p.seat
            and q.hand is q.stuck[0]
            and q.held.parts.get(part.number) is q.hand
            and not q.hand.again
        ]
        size = self.sizes.get(w.group)
        return same if len(same) == size else None

    @property
    def sizes(self):
        # how many parts each group has, as planned
        L, out = self.ledger, {}
        for s in L.steps.values():
            for i in s.items.values():
                if i.group is not None:
                    out[i.group] = out.get(i.group, 0) + 1
        return out

    def together(self, procs):
        for q in procs:
            part, w = q.stuck
            q.stuck = None
            self.complete_work(q, (part, w))

    def complete_work(self, p, doing):
        part, w = doing
        p.doing = None
        if w.id not in part.work or part.work[w.id] is not w or part.again:
            return
        if p.rank.role:
            p.held.has_done(part, w, "column")
        else:
            p.gradient += [(w.id, x) for x in w.pieces if x.rollout not in w.missing and x.rollout not in part.gone]
            p.held.has_done(part, w)
        self.flush(p)

    def fetch(self, p):
        n, i = p.held.wanted.pop(self.rng.randrange(len(p.held.wanted)))
        part = p.held.parts.get(n)
        w = part.work.get(i) if part else None
        if w is None:
            return
        p.held.fetched(n, i, {x.rollout for x in w.pieces if x.rollout in self.lost_rollouts})
        self.flush(p)

    # ---- the meeting
    def enter(self, p, part, seal):
        if not self.c.meets:
            self.trained[part.number, p.rank] = [x for _, x in p.gradient]
            p.held.has_finished(part, ack=self.c.auto_ack)
            self.flush(p)
            self.drop_hand(p)
            return
        key = (part.number, part.uid, seal.number)
        coll = self.colls.get(key)
        if coll is None:
            members = {(r, s) for r in seal.ranks for s in range(self.seats_of(r))}
            coll = self.colls[key] = dict(
                seal=seal, members={m: self.procs[m].incarnation for m in members}, inside=set(), met=None
            )
        check(coll["members"].get(p.key) == p.incarnation or coll["met"] is None, "enters a meeting that is over")
        coll["inside"].add(p.key)
        p.coll = key
        if coll["inside"] == set(coll["members"]) and coll["met"] is None:
            self.meet(part, coll)

    def meet(self, part, coll):
        seal, n = coll["seal"], part.number
        for (r, s), inc in coll["members"].items():
            q = self.procs[r, s]
            if not q.alive or q.incarnation != inc:
                return
        content = []
        first = self.procs[seal.ranks[0], 0].weights
        for m in coll["members"]:
            check(
                self.procs[m].weights == first,
                lambda: f"step {n}: different weights meet: {m} {self.procs[m].weights} {first}",
            )
        for r in seal.ranks:
            lists = [self.procs[r, s].gradient for s in range(self.seats_of(r))]
            check(
                all([a for a, _ in l] == [a for a, _ in lists[0]] for l in lists),
                lambda: f"seats of {r} trained differently: {lists}",
            )
            content += [x for x in lists[0]]
        want = sorted(x for x in self.truth[n] if x.rollout not in seal.gone)
        got = sorted(x for _, x in content if x.rollout not in seal.gone)
        check(
            got == want,
            lambda: (
                f"step {n}, seal {seal.number}: gradient has {got}\n want {want}\n missing {set(want) - set(got)} gone {seal.gone}"
            ),
        )
        extra = [x for _, x in content if x.rollout in seal.gone]
        check(not extra, lambda: f"step {n}: masked, and yet in the gradient: {extra}")
        check(seal.tokens == max(sum(x.tokens for x in want), 1), "wrong denominator")
        check(not self.open_left.get(n, 0) > 0, "met before it was complete")
        for q in self.procs.values():
            check(not (q.alive and not q.fenced and n in q.weights), lambda: f"{q.key} had met in {n} before")
        coll["met"] = len(self.meetings)
        self.meetings.append((n, tuple(content), seal))

    def coll_moves(self, p):
        coll = self.colls[p.coll]
        part = p.hand
        broken = any(
            (q := self.procs[m]).incarnation != inc
            or not q.alive
            or (
                m not in coll["inside"]
                and (
                    (x := q.held.parts.get(part.number)) is None
                    or x.uid != part.uid
                    or x.came_back >= coll["seal"].number
                )
            )
            or (m in coll["inside"] and coll["met"] is None and q.coll != p.coll)
            for m, inc in coll["members"].items()
        )
        out = []
        if coll["met"] is not None:
            out.append(lambda: self.finish(p, coll))
        if broken and (coll["met"] is None or self.rng.random() < 0.2):
            out.append(lambda: self.come_back(p, coll))
        return out

    def finish(self, p, coll):
        part = p.hand
        n = part.number
        p.weights[n] = coll["met"]
        check(
            p.held.weights == n or (self.c.auto_ack and self.some_acked.issuperset(range(p.held.weights, n))),
            lambda: f"{p.key} meets in step {n} with weights {p.held.weights}",
        )
        if self.c.auto_ack and not p.fenced and n + 1 > self.disk[1] and self.rng.random() < 0.3:
            self.disk = (dict(p.weights), n + 1)
        p.held.has_finished(part, ack=self.c.auto_ack)
        self.flush(p)
        self.drop_hand(p)

    def come_back(self, p, coll):
        coll["inside"].discard(p.key) if coll["met"] is None else None
        part = p.hand
        p.coll = None
        p.held.meeting_failed(part)

    def save(self, p):
        if not self.c.meets:
            p.held.ack(p.held.weights - 1)
            self.flush(p)
            return
        if p.fenced:
            return
        if p.held.weights > self.disk[1]:
            self.disk = (dict(p.weights), p.held.weights)
        p.held.ack(p.held.weights - 1)
        self.flush(p)

    # ---- faults
    def fault_moves(self):
        c, out, L = self.c, [], self.ledger
        live = sorted({p.rank for p in self.procs.values() if p.alive})
        for kind in c.faults:
            if kind == "kill" and live and not c.torchrun:
                out.append(lambda: self.kill(self.rng.choice(live)))
            elif kind == "torchrun" and live:
                out.append(lambda: [self.kill(r) for r in live if not r.role])
            elif kind == "flap" and live:
                out.append(
                    lambda: self.unlink(self.procs[(r := self.rng.choice(live)), self.rng.randrange(self.seats_of(r))])
                )
            elif kind == "restart":
                out.append(self.restart)
            elif kind == "give_up":
                out.append(self.give_up_one)
            elif kind == "resize" and not self.ended:
                out.append(self.resize)
            elif kind == "lose" and c.remote:
                out.append(self.lose)
            elif kind == "user_ack" and c.meets and self.disk[1]:
                out.append(lambda: self.ledger.acknowledged_by_user(self.disk[1] - 1))
        return out

    def restart(self):
        for p in self.procs.values():
            self.unlink(p, tell=False)
        self.new_ledger()

    def may_go(self, rank):
        others = [
            p.rank
            for p in self.procs.values()
            if p.rank.role == rank.role
            and p.rank != rank
            and p.rank not in self.gone
            and p.rank.number in self.wanted[rank.role]
        ]
        return bool(others)

    def give_up_one(self):
        cand = [
            r
            for r, k in self.ledger.ranks.items()
            if not k.here and k.incarnation >= 0 and not k.given_up and self.may_go(r) and (r.role or self.c.meets)
        ]
        if not cand or self.c.torchrun:
            return
        r = self.rng.choice(cand)
        self.give_up(r)
        if self.rng.random() < 0.5 and not self.procs[r, 0].alive:
            self.gone.add(r)

    def give_up(self, r):
        self.ledger.gave_up(r)
        self.ledger_fenced[r] = max(
            self.ledger.fenced[r],
            self.procs[r, 0].incarnation
            if self.procs[r, 0].alive and not any(m[0] == "joined" for m in self.procs[r, 0].up)
            else self.ledger.fenced[r],
        )
        self.ledger.fenced[r] = self.ledger_fenced[r]

    def resize(self):
        n = self.rng.randint(1, 4)
        self.wanted[""] = set(range(n))
        self.ledger.resized("", self.wanted[""])
        for k in range(n):
            r = RankId("", k)
            if (r, 0) not in self.procs:
                self.start(r, 0)
            elif r in self.gone:
                self.gone.discard(r)

    def lose(self):
        rs = sorted({p.rollout for n, ps in self.truth.items() if n not in self.acked for p in ps})
        if rs:
            if not self.c.meets and any(True for _ in self.seal_of):
                return
            self.lost_rollouts.update(self.rng.sample(rs, min(2, len(rs))))

    # ---- run
    def run(self, limit=20000):
        rng = self.rng
        for tick in range(limit):
            self.carry_out()
            acts, weights = [], []
            for p in self.procs.values():
                if p.linked and p.alive:
                    if p.down:
                        acts.append(lambda p=p: self.deliver_down(p))
                        weights.append(2)
                    if p.up:
                        acts.append(lambda p=p: self.deliver_up(p))
                        weights.append(2)
                for m in self.moves_of(p):
                    acts.append(m)
                    weights.append(p.speed)
            for rank in {p.rank for p in self.procs.values() if not p.alive and p.rank not in self.gone}:
                if (
                    rank.number in self.wanted[rank.role]
                    or rank in self.ledger.ranks
                    and self.ledger.ranks[rank].active
                ):
                    acts.append(lambda r=rank: self.start(r, self.procs[r, 0].incarnation + 1))
                    weights.append(0.5)
            L = self.ledger
            for rank in self.gone:
                k = L.ranks.get(rank)
                if (
                    k is not None
                    and not k.given_up
                    and not k.here
                    and (L._owes(k) or rank.number in L.wanted.get(rank.role, ()))
                    and (rank.role or self.c.meets)
                ):
                    acts.append(lambda r=rank: self.give_up(r))
                    weights.append(0.3)
            if self.next_step < self.c.steps:
                if L.wants_step:
                    acts.append(self.plan)
                    weights.append(2)
            elif not self.ended and not any(
                v >= 0 and n in L.steps and not L.steps[n].complete for n, v in self.open_left.items()
            ):
                acts.append(self.end)
                weights.append(1)
            for n, s in L.steps.items():
                if not s.complete and L.members("") and all(L.members(r) for r in self.c.roles):
                    acts.append(lambda n=n: self.append(n))
                    weights.append(0.6)
            if self.replans:
                acts.append(lambda: self.replan(self.replans.pop(rng.randrange(len(self.replans)))))
                weights.append(2)
            if self.faults_left > 0 and rng.random() < 0.03:
                f = self.fault_moves()
                if f:
                    self.faults_left -= 1
                    rng.choice(f)()
                    continue
            if self.done:
                self.final()
                return tick
            self.idle = 0 if acts else self.idle + 1
            check(self.idle < 3, lambda: "stall: " + self.describe())
            if not acts:
                continue
            rng.choices(acts, weights)[0]()
        raise Bug("no end: " + self.describe())

    def end(self):
        self.ended = True
        self.ledger.end()

    def deliver_down(self, p):
        o = p.down.popleft()
        if isinstance(o, S.Refuse):
            self.kill(p.rank)
            return
        if isinstance(o, S.Send):
            if p.hand is not None:
                pass
        p.held.take(o)
        self.flush(p)
        u = sum(not x.taken for x in p.held.parts.values())
        check(u <= self.c.depth, lambda: f"{p.rank}: {u} steps above its credits")

    def deliver_up(self, p):
        self.fact(p, p.up.popleft())

    @property
    def done(self):
        return self.ended and not self.ledger.steps and all(n in self.acked for n in range(self.next_step))

    def final(self):
        if not self.c.meets:
            return
        if self.c.auto_ack:
            return
        for n in range(self.c.steps):
            check(n in self.disk[0], f"step {n} is in no weights")
        for p in self.procs.values():
            if p.alive and not p.rank.role and not p.fenced:
                for n, m in p.weights.items():
                    check(self.disk[0].get(n, m) == m, lambda: f"{p.key} has another step {n}")

    def describe(self):
        L = self.ledger
        t = [f"{self.c}", f"wanted {self.wanted} gone {self.gone} fenced {self.ledger_fenced} replans {self.replans}"]
        for s in L.steps.values():
            t.append(
                f"step {s.number} complete {s.complete} part {sorted(s.participants)} barrier {s.at_barrier} seal {s.seal and s.seal.number}/{s.seals} to {s.sealed_to} met {s.met} acks {s.acks} ownerless {list(s.ownerless)} recalls {s.recalls} settling {s.settling} unfetched {s.unfetched} torn {s.torn} kept {s.is_kept} settled {s.is_settled} changed {s.is_changed} gone {s.gone}"
            )
            for sh in s.shares.values():
                t.append(
                    f"   {sh.rank.id} items {[(i.id, i.sent, i.done, i.group) for i in sh.items.values()]} unsent {list(sh.unsent)} att {sh.attempt} open {sh.opened} tak {sh.taken} wait {sh.waiting} sealed {sh.sealed} fin {sh.finished} ack {sh.acked} active {s.number in sh.rank.active}"
                )
        for p in self.procs.values():
            t.append(
                f"{p.key} inc {p.incarnation} alive {p.alive} linked {p.linked} hand {p.hand and p.hand.number} stuck {p.stuck and p.stuck[1].group} coll {p.coll} w {p.held.weights} ended {p.held.ended} parts { {n: (x.attempt, x.taken, x.waiting, x.seal and x.seal.number, x.came_back, [(w.id, w.done, w.begun) for w in x.work.values()]) for n, x in p.held.parts.items()} } up {len(p.up)} down {len(p.down)} here {L.ranks.get(p.rank) and L.ranks[p.rank].here} gu {L.ranks.get(p.rank) and L.ranks[p.rank].given_up}"
            )
        return "\n".join(t)


def random_config(seed):
    r = random.Random(seed * 7919 + 13)
    meets = r.random() < 0.85
    torchrun = meets and r.random() < 0.15
    lockstep = meets and r.random() < 0.1
    c = Config(
        seed=seed,
        ranks=r.randint(1, 4),
        seats=r.choice([1, 1, 2]),
        steps=r.randint(1, 4),
        depth=r.randint(1, 2),
        meets=meets,
        moves=meets and r.random() < 0.5,
        open=r.random() < 0.4,
        roles=r.choice([(), (), ("ref",), ("ref", "value")]),
        role_ranks=r.randint(1, 2),
        remote=r.random() < 0.4,
        shared=meets and not lockstep and r.random() < 0.4,
        lockstep=lockstep,
        auto_ack=r.random() < 0.6,
        torchrun=torchrun,
        commits=r.random() < 0.15,
    )
    kinds = ["flap", "restart"] + (["torchrun"] if torchrun else ["kill", "kill", "give_up", "give_up"]) + ["lose"]
    if meets and not torchrun:
        kinds += ["resize"]
    if meets:
        kinds += ["user_ack"]
    c.faults = tuple(k for k in kinds if r.random() < 0.7)
    c.num_faults = r.choice([0, 1, 2, 3, 5, 8])
    return c


if __name__ == "__main__":
    a, b = int(sys.argv[1]), int(sys.argv[2])
    import collections
    import time
    import traceback

    t0 = time.time()
    fails = collections.Counter()
    first = {}
    counts = collections.Counter()
    done = 0
    for seed in range(a, b):
        w = World(random_config(seed))
        try:
            w.run()
            done += 1
        except Exception as e:
            tb = traceback.extract_tb(e.__traceback__)[-1]
            k = (
                type(e).__name__,
                re.sub(r"[0-9]+", "N", str(e)[:70].split(chr(10))[0].split("Config")[0])[:48],
                tb.name,
                tb.lineno,
            )
            fails[k] += 1
            first.setdefault(k, seed)
        counts.update(w.counts)
        if sum(fails.values()) > 400:
            break
    print(f"{done} of {seed + 1 - a} runs, {time.time() - t0:.1f} s", dict(counts))
    for k, n in fails.most_common(12):
        print(n, k, "first seed", first[k])
