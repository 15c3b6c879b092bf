"""Rows and what they add up to: bytes there and back, damage noticed, a journal's database against a model."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal import Journal, journal
from stream_balancer.host.journal.store import Store
from stream_balancer.host.journal.writer import Writing
from stream_balancer.host.plan_rows import PlanRow, plan_of
from stream_balancer.host.records import (
    Acked,
    Came,
    Done,
    Ended,
    Fact,
    Group,
    HeldRollout,
    Records,
    Totals,
    read_row,
    write_row,
)
from stream_balancer.testing import make_rollout


def plan(step: int, *micro_batches: list[str]) -> PlanRow:
    """For one rank."""
    return PlanRow(step, "window", [[(1.0, [(1, names) for names in micro_batches])]], [], [1.0], 1.0, 1.0, [])


FACTS: list[Fact] = [
    plan(3, ["a"], ["b", "c"]),
    Done(7, ["a"]),
    Group("g", None, closed=True),
    Totals(2, None, {"batches": {"window": 1}, "acknowledged": 4}, {"g": 2}),
    Acked(3, 2**60, [0, 2], ["a"]),
    Came("ref", 1, 7, True, [b"\x00\xff"]),
    Ended([b"\x00\xff"], True),
]


def as_array(row: bytes | bytearray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(row), dtype=np.uint8)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_facts_come_back_and_every_byte_is_checked(fact: Fact) -> None:
    assert {type(fact) for fact in FACTS} == set(get_args(Fact))
    assert len({fact.key for fact in FACTS}) == len(FACTS)
    row = write_row("row 7", [fact])
    assert read_row("row 7", as_array(row))[0] == [fact]
    check_every_byte(row)


def check_every_byte(row: bytearray) -> None:
    others = [row[:at] + bytes([row[at] ^ 0x40]) + row[at + 1 :] for at in range(len(row))]
    for damaged in [*others, *(row[:at] for at in range(len(row)))]:
        records = Records()
        records.take("row 7", as_array(damaged))
        assert "row 7: its bytes were damaged" in records.damage["row 7"]
    with pytest.raises(sb.errors.WireError, match="damaged"):
        read_row("row 8", as_array(row))


def test_rollouts_come_back_and_every_byte_is_checked() -> None:
    before = [make_rollout(n, group_id="g", version=(2, 3), cost=4.5, seed=n) for n in (1, 5, 3)]
    row = write_row("row 7", [HeldRollout(one, float(n), n) for n, one in enumerate(before)])
    records = Records()
    records.take("row 7", as_array(row))
    after = records.held.values()
    for n, (one, (other, arrived_at, step)) in enumerate(zip(before, after, strict=True)):
        assert (repr(one), one.scalars, one.cost) == (repr(other), other.scalars, other.cost)
        assert (arrived_at, step) == (n, n)
        for name, column in one.tokens.items():
            assert torch.equal(column, other.tokens[name])
            assert column.dtype == other.tokens[name].dtype
    check_every_byte(row)


@pytest.mark.parametrize("value", [None, "x", 1, 10**15, 1.5, b"x", b""], ids=repr)
def test_a_value_of_any_type_is_damage_and_no_error(value: object) -> None:
    """A column of a database may hold one; and no memory is taken for it."""
    records = Records()
    records.take("row 5", value)
    assert len(records.damage) == 1


# -- what rows add up to -----------------------------------------------------------------------------------------------


def held(*rollouts: sb.Rollout, arrived_at: float = 0.0, step: int = 0) -> Records:
    records = Records()
    for number, one in enumerate(rollouts):
        name = f"row {number}"
        records.take(name, as_array(write_row(name, [HeldRollout(one, arrived_at, step)])))
    return records


def test_a_plan_whose_rollout_is_lost_is_not_kept() -> None:
    records = held(make_rollout(3, "a"), make_rollout(3, "b"))
    records.add(plan(0, ["a"], ["lost"]))
    snapshot = records.snapshot(0.0)
    assert [r.rollout_id for r in snapshot.waiting] == ["a", "b"]
    assert snapshot.set_aside == ("step 0: its plan names rollouts that are lost",)
    assert records.damage.keys() == {"plan 0"}
    assert snapshot.next_step == 1


def test_ages_survive() -> None:
    records = Records()
    for number, (arrived_at, step) in enumerate([(10.0, 0), (9.0, 2), (12.0, 3)]):  # a wall clock may step back
        row = write_row(str(number), [HeldRollout(make_rollout(3, str(number)), arrived_at, step)])
        records.take(str(number), as_array(row))
    snapshot = records.snapshot(11.0)
    assert snapshot.waited_s.tolist() == [1.0, 1.0, 0.0]
    assert snapshot.skips.tolist() == [3, 1, 0]


@pytest.mark.parametrize("planned", [False, True])
def test_a_group_closed_by_a_put_that_was_cut_short_has_what_is_there(planned: bool) -> None:
    """The put's rows say that it is closed; with how many follows once they are held."""
    records = held(*(make_rollout(3, f"r{number}", group_id="g") for number in range(3)))
    records.add(Group("g", None, closed=False))
    if planned:
        records.add(plan(0, ["r0"], ["r1", "r2"]))
    snapshot = records.snapshot(1.0)
    assert len(snapshot.in_flight) == int(planned)
    assert snapshot.groups == {"g": (3, True)}


# -- the journal's rows, after anything that may happen ----------------------------------------------------------------


OFTEN = ["put"] * 6 + ["plan", "done"]
EVENTS = [*OFTEN, "twice", "plan", "done", "lost", "void", "version", "close", "abandon", "filtered"]


class AtOnce:
    """Writes what is enqueued at once, in place of the journal's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.db.execute("pragma synchronous=off")

    def enqueue(self, item: Writing) -> None:
        self._store.commit(item.statements())

    def start(self) -> None: ...


class Run:
    """A core with a journal, and what may happen to it."""

    def __init__(self, folder: Path, config: sb.BalancerConfig, chance: Random) -> None:
        self.folder, self.config, self.chance, self.puts = folder, config, chance, 0
        self.open()

    def open(self) -> Snapshot:
        self.journal, self.core = Journal(self.folder), BalancerCore(self.config)
        snapshot = self.journal.open()
        assert self.journal.recovered is not None
        assert not self.journal.recovered.damage
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "Writer", AtOnce)
            self.journal.start(self.core)
        self.journal._restoring = snapshot
        self.core.restore(snapshot, 0.0)
        return snapshot

    def rows(self, kind: str) -> int:
        """Facts of a kind that the journal holds."""
        ((count,),) = self.journal._store.db.execute("select count(*) from rows where key like ?", (f"{kind} %",))
        return int(count)

    def ids(self) -> list[str]:
        return [r.rollout_id for r in self.core.snapshot(0.0).waiting]

    def put(self, name: str, group_id: str | None, version: int) -> None:
        rollout = make_rollout(1 + self.puts % 5, name, group_id=group_id, version=version)
        self.puts += 1
        written = self.journal.write([rollout], self.core.state.in_flight.next_step)
        try:
            self.core.add(rollout, 0.0)
        except ValueError:  # a duplicate, or its group takes no more
            self.journal.retract(written)

    def happen(self) -> None:
        core, chance = self.core, self.chance
        flying = [batch.step for batch in core.in_flight()]
        version = core.state.staleness.version or 0
        group = f"g{chance.randrange(8)}"
        match chance.choice(EVENTS):
            case "put":
                self.put(f"r{self.puts}", chance.choice([group, None]), version)
            case "twice" if self.ids():
                self.put(chance.choice(self.ids()), None, version)
            case "plan":
                core.force_flush()
                core.poll(0.0)
            case "done" if flying:
                batch = chance.choice(core.in_flight())
                missing = [r.rollout_id for r in batch.rollouts if chance.random() < 0.2]
                core.mark_missing(batch.step, missing)
                core.acknowledge(batch.step)
                assert not {*missing} & core.state.ids.past.keys(), "they may be put again"
            case "filtered":
                core.filter_out([make_rollout(2, f"bad{self.puts}", version=version, group_id=f"bad{self.puts}")], 0.0)
                self.puts += 1
            case "void" if flying:
                core.nack(chance.choice(flying))
            case "lost" if self.ids():  # and its producer puts it again
                name = chance.choice(self.ids())
                core.evict_lost(lambda one: one.rollout_id == name)
                self.put(name, None, version)
            case "version":
                core.set_version(version + 1)
            case "close" if self.config.groups.size:
                size = GroupSize(group, None)
                declared = core.state.buffer.groups.declared(group)
                if declared is None or not declared.closed:
                    self.journal.write([], core.state.in_flight.next_step, size)
                core.add_all([], 0.0, size)
            case "abandon" if self.config.groups.size:
                core.abandon_group(group)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_happened(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    group_size, remember_ids = chance.choice([(None, 0), (None, 5), (4, 3), (4, 1000)])
    config = sb.BalancerConfig(
        dp_size=2, batch_size=4, window=4, capacity=1000, staleness=sb.Staleness(max_versions=3), max_skips=None,
        groups=sb.Groups(size=group_size), remember_ids=remember_ids,
    )  # fmt: skip
    run = Run(tmp_path, config, chance)
    for _ in range(4):
        for _ in range(chance.randrange(40)):
            run.happen()
        verify(run.core)
        before = run.core.snapshot(0.0)
        assert run.rows("done") <= config.remember_ids
        assert run.rows("group") <= config.remember_ids + sum(not one.closed for one in before.groups.values())
        run.journal._store.close()
        after = run.open()
        assert [r.rollout_id for r in after.waiting] == [r.rollout_id for r in before.waiting]
        assert [plan_of(batch) for batch in after.in_flight] == [plan_of(batch) for batch in before.in_flight]
        assert (after.skips >= before.skips).all(), "who could not go was not passed over, and a journal cannot know"
        assert run.core.snapshot(0.0).past_ids == before.past_ids
        assert (after.next_step, after.version) == (before.next_step, before.version)
        if config.groups.size:
            assert dict(after.group_departures) == dict(before.group_departures)
        assert after.groups == before.groups
        for name in ("accepted", "acknowledged", "evicted"):
            assert after.counts[name] == before.counts[name], name
        verify(run.core)
    run.journal._store.close()
