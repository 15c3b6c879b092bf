"""The journal's folder: one owner, and what damage does: noticed wherever it is, nothing before it lost."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import anyio
import pytest
from forked import Python, run_python

import stream_balancer as sb
from stream_balancer.controller.journal import Journal, Recovered
from stream_balancer.controller.journal.segments import Damage, Segments
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.testing import make_rollout, token_checksum

CONFIG = sb.BalancerConfig(dp_size=2, batch_size=4, window=8, capacity=1000)
TAIL_BYTES = 4096


def reopened(folder: Path) -> tuple[Snapshot, Recovered]:
    """What a journal holds. Writes a segment, as every opening does."""
    journal = Journal(folder)
    try:
        return journal.open(100)
    finally:
        anyio.run(journal.aclose)


def last_segment(folder: Path) -> Path:
    return max(folder.glob("*.journal"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a crash leaves it: 60 puts, two steps in flight, one acknowledged, all in its last segment."""
    folder = tmp_path_factory.mktemp("journal")

    async def write() -> None:
        async with sb.StreamBalancer(CONFIG, journal=folder / "live") as balancer:
            batches = balancer.batches(auto_ack=False)
            for number in range(60):
                await balancer.put(make_rollout(3 + number % 7, f"r{number}", seed=number))
                if number in (20, 30, 40):
                    await anext(batches)
            balancer.acknowledge(0)
            await balancer.put(make_rollout(5, "r60", seed=60))
            shutil.copytree(folder / "live", folder / "crashed")  # what a kill leaves: nothing was said at the end

    anyio.run(write)
    return folder / "crashed"


def records_of(folder: Path) -> list[tuple[int, int, list[str]]]:
    """(offset, end, ids put) of every record of the last segment."""
    segments = Segments(folder)
    segments.sizes = {1: last_segment(folder).stat().st_size}
    found = []
    for item in segments.scan(1):
        assert not isinstance(item, Damage)
        at, record = item
        found.append((at, at + record.size, getattr(record.head, "ids", [])))
    return found


def check_damage_at(written: Path, folder: Path, offset: int, damage: str) -> None:
    """Damage one byte, or cut there; everything in records before it must be there, whole, and the damage told."""
    folder.mkdir()
    path = folder / "00000001.journal"
    data = bytearray(last_segment(written).read_bytes())
    if damage == "cut":
        del data[offset:]
    else:
        data[offset] ^= 0xFF
    path.write_bytes(data)
    records = records_of(written)
    before = [name for _, end, ids in records if end <= offset for name in ids if name.startswith("r")]
    done = next(ids for at, _, ids in records if len(ids) == 4)
    snapshot, recovered = reopened(folder)
    at_a_boundary = damage == "cut" and any(offset == at for at, _, _ in records)
    assert (recovered.torn_bytes > 0 or bool(recovered.damage)) != at_a_boundary
    held = {r.rollout_id: r for r in snapshot.waiting}
    held |= {r.rollout_id: r for batch in snapshot.in_flight for r in batch.rollouts}
    assert held.keys() | set(snapshot.past_ids) >= set(before)
    assert snapshot.past_ids in ((), tuple(done))
    for name, rollout in held.items():
        number = int(name[1:])
        expected = make_rollout(5 if number == 60 else 3 + number % 7, name, seed=number)
        assert token_checksum(rollout) == token_checksum(expected)


def offsets(written: Path, step: int) -> range:
    size = last_segment(written).stat().st_size
    assert size > TAIL_BYTES
    return range(size - TAIL_BYTES, size, step)


@pytest.mark.parametrize("damage", ["flip", pytest.param("cut", marks=pytest.mark.slow)])
def test_damage_in_the_last_4_kib(written: Path, tmp_path: Path, damage: str) -> None:
    for offset in offsets(written, 41):
        check_damage_at(written, tmp_path / str(offset), offset, damage)


@pytest.mark.soak
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_at_every_byte_of_the_last_4_kib(written: Path, tmp_path: Path, damage: str) -> None:
    for offset in offsets(written, 1):
        check_damage_at(written, tmp_path / "journal", offset, damage)
        shutil.rmtree(tmp_path / "journal")


def test_damage_is_told(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(written, tmp_path / "j")
    path = last_segment(tmp_path / "j")
    data = bytearray(path.read_bytes())
    (_, _, _), (start, stop, ids), *_ = records_of(written)
    data[start + 30] ^= 1
    path.write_bytes(data + b"half a record")
    snapshot, recovered = reopened(tmp_path / "j")
    assert recovered.damage[0] == f"bytes {start} to {stop} of segment 1"
    assert recovered.torn_bytes == 13
    assert ids[0] not in {r.rollout_id for r in snapshot.waiting}
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert errors[0].getMessage().endswith(f"records are lost: bytes {start} to {stop} of segment 1")
    assert any("the last 13 bytes are no whole record. Taken off" in r.getMessage() for r in caplog.records)
    again, told = reopened(tmp_path / "j")
    assert told.torn_bytes == 0  # it was taken off
    assert told.damage[0] == recovered.damage[0]  # this stays until its segment goes
    assert len(again.waiting) == len(snapshot.waiting)


def test_a_damaged_start_of_the_last_segment_costs_nothing(written: Path, tmp_path: Path) -> None:
    """All but the puts is said again at the start of each segment; the one before is kept in case that is damaged."""
    shutil.copytree(written, tmp_path / "j")
    before, _ = reopened(tmp_path / "j")
    path = last_segment(tmp_path / "j")
    path.write_bytes(bytes(path.stat().st_size))
    after, recovered = reopened(tmp_path / "j")
    assert recovered.torn_bytes > 0
    assert (after.past_ids, after.next_step, after.counts) == (before.past_ids, before.next_step, before.counts)
    assert [b.step for b in after.in_flight] == [b.step for b in before.in_flight] == [1, 2]


def test_a_drained_journal_still_knows_what_is_done_when_its_start_is_damaged(written: Path, tmp_path: Path) -> None:
    async def drain() -> None:
        async with sb.StreamBalancer(CONFIG, journal=tmp_path / "j") as balancer:
            balancer.end()
            async for batch in balancer.batches(auto_ack=False):
                balancer.acknowledge(batch.step)

    shutil.copytree(written, tmp_path / "j")
    anyio.run(drain)
    for _ in range(3):  # only what is said at the start of segments is left
        before, _ = reopened(tmp_path / "j")
    path = last_segment(tmp_path / "j")
    path.write_bytes(bytes(path.stat().st_size))
    after, _ = reopened(tmp_path / "j")
    assert len(after.past_ids) == 61
    assert (after.past_ids, after.next_step) == (before.past_ids, before.next_step)


def test_bytes_of_another_segment_are_not_records_of_this_one(written: Path, tmp_path: Path) -> None:
    """As when a disk gives old blocks for new ones."""
    shutil.copytree(written, tmp_path / "j")
    shutil.copy(tmp_path / "j" / "00000001.journal", tmp_path / "j" / "00000002.journal")
    snapshot, recovered = reopened(tmp_path / "j")
    assert recovered.torn_bytes == last_segment(written).stat().st_size
    assert len(snapshot.waiting) + recovered.in_flight == 61 - 4


def test_an_empty_segment_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "00000003.journal").touch()
    snapshot, recovered = reopened(tmp_path)
    assert not recovered.found
    assert not snapshot.waiting
    assert last_segment(tmp_path).name == "00000004.journal"


# -- one owner ---------------------------------------------------------------------------------------------------------

HOLD = """
import os, shutil, sys, time
from pathlib import Path
from stream_balancer.controller.journal.segments import Segments
os.setsid()
segments = Segments(Path(sys.argv[1]))
segments.open()
if sys.argv[2] == "fork" and os.fork():
    time.sleep(60)  # the child reports, once it runs
if sys.argv[2] == "copy":
    shutil.copytree(sys.argv[1], sys.argv[1] + "-copy")
print(os.getpid(), flush=True)
time.sleep(60)
"""


def holder(folder: Path, how: str = "") -> Python:
    process = Python("-c", HOLD, folder, how)
    process.stdout.readline()
    return process


@pytest.mark.parametrize("how", ["", "copy"])
def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path, how: str) -> None:
    """Also once the first has opened and closed every file in the folder, as a copy does."""
    tmp_path /= "journal"
    process = holder(tmp_path, how)
    try:
        with pytest.raises(sb.AlreadyInUseError, match=f"{tmp_path} is in use by process {process.pid}"):
            Segments(tmp_path).open()
    finally:
        process.kill()
        process.communicate()
    segments = Segments(tmp_path)
    segments.open()
    segments.close()


def test_a_child_forked_by_a_dead_controller_does_not_keep_the_lock(tmp_path: Path) -> None:
    process = holder(tmp_path, "fork")
    process.kill()
    process.wait()
    try:
        segments = Segments(tmp_path)
        segments.open()
        segments.close()
    finally:
        os.killpg(process.pid, 9)  # the child
        process.communicate()


def test_the_same_process_is_refused_too_and_the_lock_outlives_the_attempt(tmp_path: Path) -> None:
    first = Segments(tmp_path)
    first.open()
    with pytest.raises(sb.AlreadyInUseError, match=f"in use by process {os.getpid()} \\(this one\\)"):
        Segments(tmp_path / "." / "x" / "..").open()
    code = "import sys; from pathlib import Path; from stream_balancer.controller.journal.segments import Segments; "
    code += "Segments(Path(sys.argv[1])).open()"
    refused = run_python("-c", code, tmp_path)
    assert f"in use by process {os.getpid()}" in refused.stderr
    first.close()
    first.close()


def test_a_child_that_ends_does_not_release_the_lock(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    segments.open()
    child = multiprocessing.get_context("fork").Process(target=segments.close)
    child.start()
    child.join()
    with pytest.raises(sb.AlreadyInUseError):
        Segments(tmp_path).open()
    segments.close()


def test_a_failed_opening_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.journal").touch()  # not one of ours
    (tmp_path / "00000001.journal").symlink_to("nowhere")
    journal = Journal(tmp_path)
    with pytest.raises(FileNotFoundError):
        journal.open(100)
    (tmp_path / "00000001.journal").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Segments, "begin", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            journal.open(100)
    again = Journal(tmp_path)
    again.open(100)
    anyio.run(again.aclose)


def test_an_unopened_journal_closes(tmp_path: Path) -> None:
    anyio.run(Journal(tmp_path).aclose)


@pytest.mark.parametrize("max_bytes", [0, 2**20 - 1])
def test_a_journal_too_small_to_turn_around_in_is_refused(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(sb.ConfigError, match="max_bytes of a journal must be >= 1048576"):
        Journal(tmp_path, max_bytes=max_bytes)


def test_threads_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with sb.StreamBalancer(CONFIG, journal=tmp_path):
            assert any(thread.name.startswith("sb-journal") for thread in threading.enumerate())

    anyio.run(run)
    time.sleep(0)
    assert not any(thread.name.startswith("sb-journal") for thread in threading.enumerate())
