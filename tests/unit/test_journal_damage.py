"""The journal's folder: one owner, and what damage does: noticed wherever it is, named, and the rest is there."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest
import torch
from forked import Python, run_python

import stream_balancer as sb
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal import Journal, Recovered
from stream_balancer.host.journal.store import PAGE_BYTES, Store
from stream_balancer.host.records import FORMAT, rollout_key, row_name
from stream_balancer.testing import make_rollout

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
    ("sql", "kind", "message"),
    [
        (
            "pragma user_version=1",
            sb.errors.WireError,
            f"in format 1, and this version reads {FORMAT}. Let the version that",
        ),
        ("pragma application_id=7", sb.errors.WireError, "is not a stream_balancer's journal"),
        (
            "create trigger t after insert on rows begin delete from rows; end",
            sb.errors.JournalError,
            "its tables",
        ),
        ("create view v as select * from rows", sb.errors.JournalError, "its tables"),
        ("drop index keys", sb.errors.JournalError, "its tables"),
        ("alter table rows add column more", sb.errors.JournalError, "its tables"),
    ],
)
def test_another_database_is_refused_by_name(
    closed: Path, tmp_path: Path, sql: str, kind: type[Exception], message: str
) -> None:
    shutil.copytree(closed, tmp_path / "j")
    with closing(sqlite3.connect(tmp_path / "j" / "journal.db")) as db, db:
        db.execute(sql)
    with pytest.raises(kind, match=message) as told:
        reopened(tmp_path / "j")
    assert str(tmp_path / "j" / "journal.db") in str(told.value)


def test_what_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"notes" * 1000)
    with pytest.raises(sb.errors.JournalError, match=r"cannot be read .* Nothing in it was changed"):
        reopened(tmp_path)
    assert (tmp_path / "journal.db").read_bytes() == b"notes" * 1000


# -- one owner ---------------------------------------------------------------------------------------------------------

HOLD = """
import os, shutil, sys, time
from pathlib import Path
from stream_balancer.host.journal.store import Store, add
store = Store(Path(sys.argv[1]))
store.open()
store.commit([add([(0, "ended", b"")])])
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
    store = Store(folder)
    store.open()
    try:
        return len(list(store.rows("select * from rows")))
    finally:
        store.close()


@pytest.mark.parametrize("holder", ["", "copy", "exit"], indirect=True)
def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path, holder: Python) -> None:
    """Also once the first has opened and closed every file in the folder, as a copy does, or a child has ended."""
    tmp_path /= "journal"
    with pytest.raises(sb.errors.AlreadyInUseError, match=f"{tmp_path} is in use by process {holder.pid}"):
        Store(tmp_path).open()
    assert (tmp_path / "journal.db-wal").stat().st_size
    holder.kill()
    holder.wait()
    assert facts_of(tmp_path) == 1


@pytest.mark.parametrize("holder", ["fork"], indirect=True)
def test_a_child_forked_by_a_dead_controller_does_not_keep_the_lock(tmp_path: Path, holder: Python) -> None:
    holder.kill()
    holder.wait()
    assert facts_of(tmp_path / "journal") == 1


def test_the_same_process_is_refused_too_and_the_lock_outlives_the_attempt(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.open()
    with pytest.raises(sb.errors.AlreadyInUseError, match=f"in use by process {os.getpid()}"):
        Store(tmp_path / "." / "x" / "..").open()
    code = "import sys; from pathlib import Path; from stream_balancer.host.journal.store import Store; "
    code += "Store(Path(sys.argv[1])).open()"
    refused = run_python("-c", code, tmp_path)
    assert f"in use by process {os.getpid()}" in refused.stderr
    first.close()
    first.close()
