"""Rows and what they add up to: checkpoints through torch.save and DCP, a journal against a model, damage."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cores import saved
from forked import Python, run_python
from helpers import config
from invariants import verify
from scripted import awkward_micro_batches, same_rollout

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize, SiblingGroups
from stream_balancer.core.in_flight import RolloutIds
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.host.journal import Change, Journal, Recovered, journal
from stream_balancer.host.journal.log import PAGE_BYTES, Log
from stream_balancer.host.records import (
    FORMAT,
    Attempt,
    Done,
    Ended,
    Fact,
    Group,
    HeldRollout,
    PeerFact,
    PlanRow,
    Records,
    Totals,
    plan_of,
    read_row,
    rollout_key,
    row_name,
    write_row,
)
from stream_balancer.testing import make_rollout


def rich_rollout(n: int) -> sb.Rollout:
    """Something in every field, and bytes of every dtype."""
    first = awkward_micro_batches()[0][0]
    tokens = {name: column.repeat(n + 1, *[1] * (column.ndim - 1)) for name, column in first.tokens.items()}
    return replace(first, tokens=tokens, rollout_id=f"r{n}", version=(n, n + 1), cost=None if n % 3 else float(n))


def busy_core() -> BalancerCore:
    """Five rollouts wait, four are in flight, four are done."""
    core = BalancerCore(config(deadline_s=100.0))
    for n in range(13):
        core.add(rich_rollout(n), float(n))
        batch = core.poll(float(n))
        if batch is not None and batch.step == 0:
            core.acknowledge(0)
    assert (core.statistics(20.0).waiting, core.statistics(20.0).in_flight) == (5, 4)
    return core


def test_everything_comes_back_through_torch_save() -> None:
    core = busy_core()
    before = core.snapshot(20.0)
    after = saved(core, 20.0)
    assert all(same_rollout(a, b) for a, b in zip(before.waiting, after.waiting, strict=True))
    assert after.waited_s.tolist() == before.waited_s.tolist()
    assert after.skips.tolist() == before.skips.tolist()
    assert after.past_ids == before.past_ids
    assert (after.version, after.next_step) == (before.version, before.next_step)
    assert [plan_of(batch) for batch in after.in_flight] == [plan_of(batch) for batch in before.in_flight]
    for x, y in zip(before.in_flight, after.in_flight, strict=True):
        assert all(same_rollout(a, b) for a, b in zip(x.rollouts, y.rollouts, strict=True))
        assert (x.num_tokens, x.ranks[1].denominators) == (y.num_tokens, y.ranks[1].denominators)


def test_knobs_that_refuse_a_rollout_say_which_and_change_nothing() -> None:
    fresh = BalancerCore(config(micro_batches=sb.MicroBatches(max_tokens=8), sync="step"))
    with pytest.raises(sb.errors.RolloutError, match=r"has \d+ tokens, above micro_batches.max_tokens \(8\)"):
        fresh.restore(busy_core().snapshot(20.0), 0.0)
    assert fresh.statistics(0.0).accepted == 0
    verify(fresh)


@pytest.mark.filterwarnings("ignore")  # DCP's own, without a process group
def test_dcp_saves_and_loads_it(tmp_path: Path) -> None:
    with sb.blocking(config()) as balancer:
        for n in range(5):
            balancer.put(rich_rollout(n))
        dcp.save({"balancer": balancer.state_dict()}, checkpoint_id=tmp_path)
        like = balancer.state_dict()
    dcp.load({"balancer": like}, checkpoint_id=tmp_path)
    with sb.blocking(config()) as balancer:
        balancer.load_state_dict(like)
        assert balancer.statistics().waiting == 5
        balancer.end()
        (first, *_) = balancer.batches()
        assert first.num_rollouts == 4


@pytest.mark.parametrize("at", [0, 8, 40, 120])
def test_a_damaged_row_is_set_aside_and_the_rest_comes_back(
    at: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a batch in flight is void without its rollouts, and the others of it wait again, as the oldest."""
    monkeypatch.setattr("stream_balancer.host.checkpoint._ROLLOUTS_TOGETHER", 3)
    core = busy_core()
    (batch,) = core.in_flight.delivered()
    state = state_dict(core.snapshot(20.0))
    state["rollouts"][0][at] ^= 255
    with sb.blocking(config()) as balancer:
        lost, void = balancer.load_state_dict(state)
        assert "rollouts 0 to 2: its bytes were damaged" in lost
        assert void == f"step {batch.step}: its plan names rollouts that are lost"
        assert lost in caplog.text
        assert void in caplog.text
        statistics = balancer.statistics()
        assert (statistics.waiting, statistics.in_flight, statistics.accepted) == (6, 0, 10)
        balancer.end()
        again = [r.rollout_id for b in balancer.batches() for r in b.rollouts if not r.is_padding]
    assert len(set(again) & {r.rollout_id for r in batch.rollouts}) == 1


@pytest.mark.parametrize("at", [0, 20, -1])
def test_damaged_facts_are_named_and_rollouts_come_back(at: int) -> None:
    state = state_dict(busy_core().snapshot(20.0))
    state["facts"][at] ^= 255
    snapshot = read_state_dict(state)[0]
    assert snapshot.set_aside
    held = [*snapshot.waiting, *(r for batch in snapshot.in_flight for r in batch.rollouts)]
    assert len(held) == 9
    restored = BalancerCore(config())
    restored.restore(snapshot, 20.0)
    verify(restored)


def test_other_dicts_are_refused() -> None:
    for nonsense in (None, [], "state"):
        with pytest.raises(ValueError, match=f"format is None, expected {FORMAT}"):
            read_state_dict(nonsense)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"format is None, expected {FORMAT}"):
        read_state_dict({})
    with pytest.raises(
        ValueError, match=rf"format is 2, expected {FORMAT}\. Load it with the stream_balancer that wrote it"
    ):
        read_state_dict({"format": 2})
    for name in ("rollouts", "facts"):
        state = state_dict(busy_core().snapshot(20.0))
        del state[name]
        with pytest.raises(ValueError, match=f"has no '{name}'"):
            read_state_dict(state)[0]


def plan_row(step: int, *micro_batches: list[str]) -> PlanRow:
    """For one rank."""
    return PlanRow(step, "window", [[(1.0, list(micro_batches))]], [], 1.0, 1.0, [])


FACTS: list[Fact] = [
    plan_row(3, ["a"], ["b", "c"]),
    Done(7, ["a"]),
    Group("g", None, closed=True),
    Totals(2, None, {"batches": {"window": 1}, "acknowledged": 4}, {"g": 2}),
    Attempt(3, 2**60, [0, 2]),
    PeerFact(1, 7, 2, 6, True),
    Ended([b"\x00\xff"], True),
]


def as_array(row: bytes | bytearray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(row), dtype=np.uint8)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_facts_come_back_and_every_byte_is_checked(fact: Fact) -> None:
    assert {type(fact) for fact in FACTS} == set(Fact.__subclasses__())
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


def held_rows(*rollouts: sb.Rollout, arrived_at: float = 0.0, step: int = 0) -> Records:
    records = Records()
    for number, one in enumerate(rollouts):
        name = f"row {number}"
        records.take(name, as_array(write_row(name, [HeldRollout(one, arrived_at, step)])))
    return records


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
    records = held_rows(*(make_rollout(3, f"r{number}", group_id="g") for number in range(3)))
    records.add(Group("g", None, closed=False))
    if planned:
        records.add(plan_row(0, ["r0"], ["r1", "r2"]))
    snapshot = records.snapshot(1.0)
    assert len(snapshot.in_flight) == int(planned)
    assert snapshot.groups == {"g": (3, True, False)}


# -- the journal's rows, after anything that may happen ----------------------------------------------------------------


OFTEN = ["put"] * 6 + ["plan", "done"]
EVENTS = [*OFTEN, "twice", "plan", "done", "lost", "void", "version", "close", "cut", "abandon", "filtered"]


class AtOnce(Log):
    """A log that writes in the caller's thread."""

    def start(self) -> None:
        self.db.execute("pragma synchronous=off")

    def enqueue(self, change: Change) -> None:
        self._commit([change], 0, 0)


class Run:
    """A core with a journal, and what may happen to it."""

    def __init__(self, folder: Path, config: sb.BalancerConfig, chance: Random) -> None:
        self.folder, self.config, self.chance, self.puts = folder, config, chance, 0
        self.open()

    def open(self) -> Snapshot:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "Log", AtOnce)
            self.journal, self.core = Journal(self.folder), BalancerCore(self.config)
        snapshot = self.journal.open()
        assert self.journal.recovered is not None
        assert not self.journal.recovered.damage
        self.journal.start(self.core)
        self.core.restore(snapshot, 0.0)
        return snapshot

    def rows(self, kind: str) -> int:
        """Facts of a kind that the journal holds."""
        ((count,),) = self.journal.log.db.execute("select count(*) from rows where key like ?", (f"{kind} %",))
        return int(count)

    def ids(self) -> list[str]:
        return [r.rollout_id for r in self.core.snapshot(0.0).waiting]

    def put(self, name: str, group_id: str | None, version: int) -> None:
        rollout = make_rollout(1 + self.puts % 5, name, group_id=group_id, version=version)
        self.puts += 1
        put, accepted = self.journal.write([rollout], self.core.in_flight.next_step), False
        with suppress(ValueError):  # a duplicate, or its group takes no more
            self.core.add(rollout, 0.0)
            accepted = True
        self.journal.settle(put, accepted=accepted)

    def happen(self) -> None:
        core, chance = self.core, self.chance
        flying = [batch.step for batch in core.in_flight.delivered()]
        version = core.staleness.version or 0
        group = f"g{chance.randrange(8)}"
        match chance.choice(EVENTS):
            case "put":
                self.put(f"r{self.puts}", chance.choice([group, None]), version)
            case "twice" if self.ids():
                self.put(chance.choice(self.ids()), None, version)
            case "plan":
                core.triggers.force_flush()
                core.poll(0.0)
            case "done" if flying:
                batch = chance.choice(core.in_flight.delivered())
                missing = [r.rollout_id for r in batch.rollouts if chance.random() < 0.2]
                core.mark_missing(batch.step, missing)
                core.acknowledge(batch.step)
                assert not {*missing} & core.ids.past.keys(), "they may be put again"
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
                declared = core.buffer.groups.declared(group)
                put = self.journal.write([], core.in_flight.next_step, None if declared and declared.closed else size)
                core.add_all([], 0.0, size)
                self.journal.settle(put, accepted=True)
            case "cut":
                core.cut_stragglers(0.0)
            case "abandon" if self.config.groups.size:
                core.abandon_group(group)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = Random(seed)
    group_size, remember = chance.choice([(None, 0), (None, 5), (4, 3), (4, 1000)])
    config = sb.BalancerConfig(
        dp_size=2, batch_size=4, window=4, capacity=1000, staleness=sb.Staleness(max_versions=3), max_skips=None,
        groups=sb.Groups(size=group_size, min_size=2, patience=0.0) if group_size else sb.Groups(),
    )  # fmt: skip
    for kept in (RolloutIds, SiblingGroups):
        monkeypatch.setattr(kept, "remember", remember)
    run = Run(tmp_path, config, chance)
    for _ in range(4):
        for _ in range(chance.randrange(40)):
            run.happen()
        verify(run.core)
        before = run.core.snapshot(0.0)
        assert run.rows("done") <= remember
        assert run.rows("group") <= remember + sum(not one.closed for one in before.groups.values())
        run.journal.log.close()
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
    run.journal.log.close()


CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, capacity=1000)
TAIL_BYTES = 4096
FRAME_BYTES = PAGE_BYTES + 24
EVERY = {f"r{number}" for number in range(61)}


def expected(name: str) -> sb.Rollout:
    number = int(name[1:])
    return make_rollout(3 + 300 * (number % 7), name, seed=number)


def reopened(folder: Path) -> tuple[Snapshot, Recovered]:
    """What a journal holds."""
    journal = Journal(folder)
    try:
        snapshot = journal.open()
    finally:
        anyio.run(journal.aclose)
    assert journal.recovered is not None
    return snapshot, journal.recovered


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a crash leaves it, all in its write-ahead log: 61 puts, two steps in flight, one acknowledged."""
    folder = tmp_path_factory.mktemp("journal")

    async def write() -> None:
        async with sb.StreamBalancer(CONFIG, journal=folder / "live") as balancer:
            batches = balancer.batches(auto_ack=False)
            for number in range(60):
                await balancer.put(expected(f"r{number}"))
                if number in (20, 30, 40):
                    await anext(batches)
            balancer.acknowledge(0)
            await balancer.put(expected("r60"))
            shutil.copytree(folder / "live", folder / "crashed")  # what a kill leaves

    anyio.run(write)
    return folder / "crashed"


@pytest.fixture(scope="module")
def closed(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, all in its database."""
    folder = tmp_path_factory.mktemp("closed") / "journal"
    shutil.copytree(written, folder)
    reopened(folder)
    assert not (folder / "journal.db-wal").exists()
    return folder


def damaged(source: Path, folder: Path, file: str, offset: int, damage: str) -> Path:
    """A copy in which one byte is changed, or all from there on is cut."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    data = bytearray((folder / file).read_bytes())
    if damage == "cut":
        del data[offset:]
    else:
        data[offset] ^= 0xFF
    (folder / file).write_bytes(data)
    return folder


def held_in(snapshot: Snapshot) -> set[str]:
    """Ids that are held or done; what is held is as it was put."""
    held = [*snapshot.waiting, *(r for batch in snapshot.in_flight for r in batch.rollouts)]
    for rollout in held:
        assert torch.equal(rollout.tokens["input_ids"], expected(rollout.rollout_id).tokens["input_ids"])
    return {r.rollout_id for r in held} | set(snapshot.past_ids)


def check_database(closed: Path, folder: Path, offset: int) -> int | None:
    """Whatever byte of the database is changed: it is refused by name and left as it was, or what is lost is named, all
    else is there, and the next time all is well. -> rollouts lost; None if it was refused."""
    damaged(closed, folder, "journal.db", offset, "flip")
    before = (folder / "journal.db").read_bytes()
    try:
        snapshot, recovered = reopened(folder)
    except (sb.errors.JournalError, sb.errors.WireError) as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert str(folder / "journal.db") in refusal
        assert "use another path" in refusal.lower()
        assert (folder / "journal.db").read_bytes() == before
        return None
    lost = EVERY - held_in(snapshot)
    unnamed = {name for name in lost if not any(repr(name) in sentence for sentence in recovered.damage)}
    assert not unnamed or any(": done" in sentence for sentence in recovered.damage)
    assert not lost or recovered.damage
    if recovered.damage:
        assert (folder / "damaged-1.db").read_bytes() == before
        assert not (folder / "damaged-1.db-wal").exists()
        again, after = reopened(folder)
        assert not after.damage
        assert held_in(again) == held_in(snapshot)
    return len(lost)


def places(data: bytes, part: str) -> list[int]:
    size, schema = len(data), data.index(b"CREATE")
    return {
        "some": [40, 100, *range(PAGE_BYTES, size, size // 40)],
        # SQLite's message quotes the damaged name, which may be no text.
        "schema": [*range(schema - 60, schema + 40, 2)],
        "id": [found.start() + 2 for found in re.finditer(rb"r42", data)],
        "first": [*range(TAIL_BYTES)],
        "all": [*range(0, size, size // TAIL_BYTES)],
    }[part]


@pytest.mark.parametrize(
    "part", ["some", "schema", "id", *(pytest.param(one, marks=pytest.mark.soak) for one in ("first", "all"))]
)
def test_changed_bytes_of_the_database(closed: Path, tmp_path: Path, part: str) -> None:
    offsets = places((closed / "journal.db").read_bytes(), part)
    lost = [check_database(closed, tmp_path / "j", offset) for offset in offsets]
    assert len(lost) >= 2, "an id is in its row, and in the index"
    if part == "some":
        assert lost[1] is None  # of the first page
        assert max(number for number in lost if number) == 1, "most bytes are those of a rollout"


def check_log(written: Path, folder: Path, offset: int, damage: str) -> None:
    """Whatever byte of the log is changed: commits before it are there, and it is told what became of those after."""
    damaged(written, folder, "journal.db-wal", offset, damage)
    size = (folder / "journal.db-wal").stat().st_size
    snapshot, recovered = reopened(folder)
    held = held_in(snapshot)
    lost = EVERY - held
    assert held >= {f"r{number}" for number in range(60 - len(lost) + 1)}
    if damage == "flip":
        assert recovered.torn_bytes > 0
        assert bool(recovered.damage) == (len(lost) > 1 or recovered.torn_bytes > 10 * FRAME_BYTES)
        if recovered.damage:
            assert "commits" in recovered.damage[0]
            assert (folder / "damaged-1.db-wal").stat().st_size == size
    else:  # cut where one ends, it is a shorter log
        assert not recovered.damage
        assert recovered.torn_bytes < 10 * FRAME_BYTES


@pytest.mark.parametrize("damage", ["flip", "cut"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.soak), 1001])
def test_a_damaged_log(written: Path, tmp_path: Path, damage: str, every: int) -> None:
    size = (written / "journal.db-wal").stat().st_size
    for offset in (*range(0, size, size // 8), *range(size - TAIL_BYTES, size, every)):
        check_log(written, tmp_path / "journal", offset, damage)
        assert offset < size - TAIL_BYTES or EVERY - held_in(reopened(tmp_path / "journal")[0]) <= {"r60"}


def test_damage_is_told(closed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(closed, tmp_path / "j")
    with closing(sqlite3.connect(tmp_path / "j" / "journal.db")) as db, db:
        number = {key: number for number, key in db.execute("select number, key from rows")}
        db.execute("update rows set data = zeroblob(5) where key in (?, 'plan 1')", (rollout_key("r50"),))
        db.execute("update rows set number = 1000 where key = ?", (rollout_key("r51"),))
    _, recovered = reopened(tmp_path / "j")
    names = [row_name(number["plan 1"], "plan 1"), row_name(number["rollout 'r50'"], "rollout 'r50'")]
    sentences = [f"{name}: its bytes were damaged" for name in (*names, "row 1000: rollout 'r51'")]
    assert list(recovered.damage) == sentences
    assert (recovered.waiting, recovered.in_flight) == (61 - 4 - 4 - 2, 4)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [message.split("rows are lost: ")[1] for message in errors] == sentences


# -- what is not a journal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "pragma user_version=1",
        "pragma application_id=7",
        "create trigger t after insert on rows begin delete from rows; end",
        "create view v as select * from rows",
        "drop index keys",
        "alter table rows add column more",
    ],
)
def test_another_database_is_refused_by_name(closed: Path, tmp_path: Path, sql: str) -> None:
    shutil.copytree(closed, tmp_path / "j")
    with closing(sqlite3.connect(tmp_path / "j" / "journal.db")) as db, db:
        db.execute(sql)
    path = tmp_path / "j" / "journal.db"
    said = rf"{path} is no journal of format {FORMAT}.* found .*\. Let the version that wrote it finish"
    with pytest.raises(sb.errors.WireError, match=said):
        reopened(tmp_path / "j")


def test_what_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"notes" * 1000)
    with pytest.raises(sb.errors.JournalError, match=r"cannot be read .* Nothing in it was changed"):
        reopened(tmp_path)
    assert (tmp_path / "journal.db").read_bytes() == b"notes" * 1000


# -- one owner ---------------------------------------------------------------------------------------------------------

HOLD = """
import os, shutil, sys, time
from pathlib import Path
from stream_balancer.host.journal.log import Log
log = Log(Path(sys.argv[1]))
log.open()
log.commit([(0, "ended", b"")])
if sys.argv[2] == "fork" and os.fork():
    time.sleep(60)  # the child reports, once it runs
if sys.argv[2] == "exit" and not os.fork():
    sys.exit()  # the interpreter ends, and closes what it has
elif sys.argv[2] == "exit":
    os.wait()
if sys.argv[2] == "copy":
    shutil.copytree(sys.argv[1], sys.argv[1] + "-copy")
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Python]:
    """Another process that has the journal."""
    process = Python("-c", HOLD, tmp_path / "journal", request.param, finalize=request.param == "exit")
    process.stdout.readline()
    yield process
    process.end()
    process.communicate()


def facts_of(folder: Path) -> int:
    log = Log(folder)
    log.open()
    try:
        return len(list(log.db.execute("select * from rows")))
    finally:
        log.close()


@pytest.mark.parametrize("holder", ["", "copy", "exit"], indirect=True)
def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path, holder: Python) -> None:
    """Also once the first has opened and closed every file in the folder, as a copy does, or a child has ended."""
    tmp_path /= "journal"
    with pytest.raises(sb.errors.AlreadyInUseError, match=f"{tmp_path} is in use by process {holder.pid}"):
        Log(tmp_path).open()
    assert (tmp_path / "journal.db-wal").stat().st_size
    holder.kill()
    holder.wait()
    assert facts_of(tmp_path) == 1


@pytest.mark.parametrize("holder", ["fork"], indirect=True)
def test_a_child_forked_by_a_dead_controller_does_not_keep_the_lock(tmp_path: Path, holder: Python) -> None:
    holder.kill()
    holder.wait()
    assert facts_of(tmp_path / "journal") == 1


def test_a_journal_is_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("no folder")
    with pytest.raises(sb.errors.JournalError, match=rf"cannot be read .*File exists: '{path}'.* use another path"):
        reopened(path)
    assert path.read_text() == "no folder"


def test_the_same_process_is_refused_too_and_the_lock_outlives_the_attempt(tmp_path: Path) -> None:
    first = Log(tmp_path)
    first.open()
    with pytest.raises(sb.errors.AlreadyInUseError, match=f"in use by process {os.getpid()}"):
        Log(tmp_path / "." / "x" / "..").open()
    code = "import sys; from pathlib import Path; from stream_balancer.host.journal.log import Log; "
    code += "Log(Path(sys.argv[1])).open()"
    refused = run_python("-c", code, tmp_path)
    assert f"in use by process {os.getpid()}" in refused.stderr
    first.close()
    first.close()
