"""Rows and what they add up to: bytes there and back, damage noticed, every event's statements against a model."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.journal.changes import Changes, Statement
from stream_balancer.host.journal.contents import Contents, Held
from stream_balancer.host.journal.rows import (
    Acked,
    Came,
    Done,
    Fact,
    Group,
    Plan,
    State,
    batch_of,
    fact_of,
    fact_row,
    plan_of,
    rollout_of,
    rollout_row,
)
from stream_balancer.host.journal.store import SCHEMA, execute
from stream_balancer.testing import make_rollout, make_rollouts
from stream_balancer.types import Batch

PLAN = Plan(3, "window", [[["a"], ["b", "c"]], [["d"], ["p"]]], ["p"], [1.0, 2.0], 2.0, 1.5, ["g"])
FACTS: list[Fact] = [
    PLAN,
    Done(["a"], 3),
    Group("g", None, "abandoned"),
    State(2, None, {"batches": {"window": 1}}, {"g": 2}, 4, {"stale": 1}),
    Acked(3, 2**60, [0, 2], ["a"]),
    Came("ref", 1, 7, True, [b"\x00\xff"]),
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_facts_come_back(fact: Fact) -> None:
    assert {type(fact) for fact in FACTS} == set(get_args(Fact))
    assert fact_of(tuple(fact_row(fact, 5))) == fact


def test_rollouts_come_back() -> None:
    for before in (make_rollout(n, group_id="g", version=(2, 3), cost=4.5, seed=n) for n in (1, 5, 3)):
        after = rollout_of(tuple(rollout_row(0, before, 1.0, 2)))
        assert repr(before) == repr(after)
        assert (before.scalars, before.cost) == (after.scalars, after.cost)
        for name, column in before.tokens.items():
            assert torch.equal(column, after.tokens[name])
            assert column.dtype == after.tokens[name].dtype


@pytest.mark.parametrize("row", [rollout_row(7, make_rollout(3), 12.5, 3), fact_row(PLAN, 3)], ids=["rollout", "fact"])
def test_every_value_of_a_row_is_checked(row: tuple[object, ...]) -> None:
    read = rollout_of if len(row) == 6 else fact_of
    for place, value in enumerate(row):
        others: list[object] = [None, "x", 1, 1.5, b"x"]
        if isinstance(value, bytes):
            others += [value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :] for at in range(len(value))]
            others += [value[:at] for at in range(len(value))]
        for other in others:
            with pytest.raises(sb.WireError, match="damaged"):
                read((*row[:place], other, *row[place + 1 :]))


def test_plans_come_back_with_their_padding_copies() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=4, batch_size=4))
    rollouts = {r.rollout_id: r for r in make_rollouts([9, 4])}
    for rollout in rollouts.values():
        core.add(rollout, 0.0)
    core.end()
    batch = core.poll(0.0)
    assert batch is not None
    assert batch.num_padding == 2
    again = batch_of(plan_of(batch), rollouts)
    assert repr(again) == repr(batch)
    assert (again.loads, again.finish, again.lower_bound) == (batch.loads, batch.finish, batch.lower_bound)
    assert again.num_padding == batch.num_padding
    for before, after in zip(batch.ranks, again.ranks, strict=True):
        assert repr(before) == repr(after)
        assert before.global_num_loss_tokens == after.global_num_loss_tokens
        assert [repr(r) for r in before.rollouts] == [repr(r) for r in after.rollouts]


# -- what rows add up to -----------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What should be there."""

    waiting: dict[str, int] = field(default_factory=dict)
    """Number of its row, by id."""
    flying: dict[int, list[str]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    num_acknowledged: int = 0
    num_evicted: int = 0
    step: int = 0


class Rows:
    """A database in memory, and what happens to it."""

    def __init__(self, db: sqlite3.Connection, remember_ids: int) -> None:
        self.db, self.remember_ids = db, remember_ids
        for sql in SCHEMA:
            db.execute(sql)
        self.changes = Changes()
        self.changes.follow(Contents(), remember_ids)

    def apply(self, statements: list[Statement]) -> None:
        for sql, rows in statements:
            execute(self.db, sql, rows)

    def put(self, ids: list[str], step: int) -> list[int]:
        first = self.changes.next_number
        self.changes.next_number += len(ids)
        numbers = list(range(first, first + len(ids)))
        self.apply(
            self.changes.added(
                [rollout_row(n, make_rollout(1, i), 0.0, step) for n, i in zip(numbers, ids, strict=True)]
            )
        )
        return numbers

    def read(self) -> Contents:
        contents = Contents()
        for row in self.db.execute("select * from facts order by kind, key"):
            contents.add(row[1], fact_of(row))
        for row in self.db.execute("select * from rollouts order by number"):
            contents.hold(row[0], Held(rollout_of(row), row[2], row[3]))
        return contents


def batch_with(step: int, ids: list[str]) -> Batch:
    """A batch for one rank."""
    plan = Plan(step, "window", [[ids]], [], [1.0], 1.0, 1.0, [])
    return batch_of(plan, {name: make_rollout(1, name) for name in ids})


ACTIONS = ["put", "group", "twice", "retract", "plan", "done", "stale", "lost", "void", "restart"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=30), st.randoms(use_true_random=False), st.sampled_from([0, 3, 100]))
def test_what_is_read_is_what_happened(actions: list[str], chance: Random, remember_ids: int) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        rows, model, puts = Rows(db, remember_ids), Model(), 0
        for action in actions:
            if action in ("put", "group"):
                ids = [f"{puts}.{k}" for k in range(1 if action == "put" else 3)]
                model.waiting |= zip(ids, rows.put(ids, model.step), strict=True)
                puts += 1
            elif action == "twice" and model.waiting:  # a second put of one id, which is refused
                rows.apply(rows.changes.retracted(rows.put([chance.choice(list(model.waiting))], model.step)))
            elif action == "retract" and model.waiting:
                name = chance.choice(list(model.waiting))
                rows.apply(rows.changes.retracted([model.waiting.pop(name)]))
            elif action == "plan" and model.waiting:
                ids = chance.sample(list(model.waiting), 1 + len(model.waiting) // 2)
                model.flying[model.step] = ids
                rows.apply(rows.changes.dispatched(batch_with(model.step, ids), {}, {}))
                for name in ids:
                    del model.waiting[name]
                model.step += 1
            elif action == "done" and model.flying:
                step = chance.choice(list(model.flying))
                ids = model.flying.pop(step)
                model.done += ids
                model.num_acknowledged += len(ids)
                rows.apply(rows.changes.acknowledged(batch_with(step, ids), ids, model.num_acknowledged))
            elif action == "void" and model.flying:
                step = chance.choice(list(model.flying))
                numbers = dict(db.execute("select id, number from rollouts"))
                model.waiting |= {name: numbers[name] for name in model.flying.pop(step)}
                rows.apply(rows.changes.returned(step))
            elif action in ("stale", "lost") and model.waiting:
                name = chance.choice(list(model.waiting))
                del model.waiting[name]
                rows.apply(rows.changes.evicted(name, "stale" if action == "stale" else "lost", {}))
                model.num_evicted += 1
                if action == "stale":
                    model.done.append(name)
                else:  # and its producer puts it again
                    model.waiting |= zip([name], rows.put([name], model.step), strict=True)
            elif action == "restart":
                rows.changes = Changes()
                rows.changes.follow(rows.read(), remember_ids)
            contents = rows.read()
            snapshot, broken = contents.snapshot(0.0, remember_ids)
            assert not broken
            expected = sorted(model.waiting, key=model.waiting.__getitem__)
            assert [r.rollout_id for r in snapshot.waiting] == expected
            assert {b.step: [r.rollout_id for r in b.rollouts] for b in snapshot.in_flight} == model.flying
            assert snapshot.past_ids == tuple(model.done[-remember_ids:] if remember_ids else ())
            assert snapshot.next_step == model.step
            assert snapshot.counts["acknowledged"] == model.num_acknowledged
            assert sum(snapshot.counts["evicted"].values()) == model.num_evicted
            assert len(contents.past_ids) <= remember_ids + 3 * max(1, len(model.done))


def test_old_ids_go() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        rows = Rows(db, remember_ids=10)
        for number in range(100):
            rows.apply(rows.changes.evicted(f"r{number}", "stale", {}))
        assert db.execute("select count(*) from facts where kind = 'done'").fetchall() == [(10,)]


def held(*ids: str) -> Contents:
    contents = Contents()
    for number, name in enumerate(ids):
        contents.hold(number, Held(make_rollout(3, name), 0.0, 0))
    return contents


def test_a_second_put_of_an_id_does_not_hide_the_first() -> None:
    contents = held("a")
    contents.hold(1, Held(make_rollout(5, "a"), 0.0, 2))
    snapshot, _ = contents.snapshot(0.0, 0)
    assert [(r.rollout_id, r.num_tokens) for r in snapshot.waiting] == [("a", 3)]
    assert snapshot.skips.tolist() == [2]
    assert contents.next_number == 2


def test_a_plan_whose_rollout_is_lost_is_not_kept() -> None:
    contents = held("a", "b")
    contents.add(0, Plan(0, "window", [[["a"], ["lost"]]], [], [1.0], 1.0, 1.0, []))
    snapshot, broken = contents.snapshot(0.0, 0)
    assert [r.rollout_id for r in snapshot.waiting] == ["a", "b"]
    assert [plan.step for plan in broken] == [0]
    assert snapshot.next_step == 1


def test_steps_go_on_though_the_state_is_lost() -> None:
    contents = held("a")
    contents.add(0, Done(["x"], 7))
    contents.add(5, Plan(5, "window", [[["a"]]], [], [1.0], 1.0, 1.0, []))
    assert contents.snapshot(0.0, 10)[0].next_step == 7


def test_ages_survive() -> None:
    contents = Contents()
    for number, (arrived_at, step) in enumerate([(10.0, 0), (9.0, 2), (12.0, 3)]):  # a wall clock may step back
        contents.hold(number, Held(make_rollout(3, str(number)), arrived_at, step))
    snapshot, _ = contents.snapshot(11.0, 0)
    assert snapshot.waited_s.tolist() == [1.0, 1.0, 0.0]
    assert snapshot.skips.tolist() == [3, 1, 0]


@pytest.mark.parametrize("planned", [False, True])
def test_a_group_closed_by_a_put_that_was_cut_short_has_what_is_there(planned: bool) -> None:
    """The put's rows say that it is closed; with how many follows once they are held."""
    contents = Contents()
    for number in range(3):
        contents.hold(number, Held(make_rollout(3, f"r{number}", group_id="g"), 0.0, 0))
    contents.add(0, Group("g", None, "closed"))
    if planned:
        contents.add(1, Plan(0, "window", [[["r0"], ["r1", "r2"]]], [], [1.0], 1.0, 1.0, []))
    snapshot, _ = contents.snapshot(1.0, 10)
    assert len(snapshot.in_flight) == int(planned)
    assert snapshot.closed_groups == {"g": 3}
