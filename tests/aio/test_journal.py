"""A balancer with a journal: durable before a put returns, exact after a crash, honest about a full or failing disk.

Real time, since the disk has a thread of its own. A crash is a copy of the folder as it is at that moment.
"""

from __future__ import annotations

import errno
import logging
import resource
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import helpers
import pytest
from anyio.lowlevel import checkpoint
from guard import GUARD_S
from helpers import fill, until, waiting
from invariants import verify
from served import attended
from test_puts import How, cancelled_after, ways

import stream_balancer as sb
from stream_balancer.core.groups import SiblingGroups
from stream_balancer.core.in_flight import RolloutIds
from stream_balancer.host.journal import log
from stream_balancer.host.records import rollout_key
from stream_balancer.rollouts import Batch
from stream_balancer.testing import make_rollout, make_rollouts

MAX_PASSES = 12


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Virtual time does not know what the journal's thread is busy with. In ``ways`` the parameter is given."""
    return str(request.param)


config = partial(helpers.config, window=4, capacity=100)


def ids_of(batch: Batch) -> list[list[list[str]]]:
    return [[[r.rollout_id for r in mb.rollouts] for mb in share.micro_batches] for share in batch.ranks]


crashes = iter(range(10**9))


async def crash(balancer: sb.StreamBalancer) -> Path:
    """What a kill would leave, once all that was said so far is written."""
    assert balancer.parts.journal is not None
    await balancer.parts.journal.flush()
    return await kill(balancer)


async def kill(balancer: sb.StreamBalancer) -> Path:
    """What a kill would leave."""
    assert balancer.parts.journal is not None
    folder = balancer.parts.journal.path
    to = folder.parent / f"crash{next(crashes)}"
    await anyio.to_thread.run_sync(lambda: shutil.copytree(folder, to))
    return to


class Disk:
    """Stands between the journal and the disk: of every transaction, where it becomes durable."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.commits = 0
        self.error: int | None = None
        """SQLite's code of what the disk says."""

    def commit(self, db: sqlite3.Connection) -> None:
        self.commits += 1
        self.waiting.set()
        self.open.wait(GUARD_S)
        if self.error is not None:
            error = sqlite3.OperationalError("the disk said so")
            error.sqlite_errorcode = self.error
            raise error
        db.execute("commit")

    async def reached(self) -> None:
        """Until a commit waits for the disk."""
        await anyio.to_thread.run_sync(self.waiting.wait, GUARD_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.waiting.clear()
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(log, "_commit", disk.commit)
    monkeypatch.setattr(log, "RETRY_S", 0.01)
    return disk


# -- durable -----------------------------------------------------------------------------------------------------------


async def test_a_put_returns_once_it_is_on_the_disk(tmp_path: Path, disk: Disk) -> None:
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        returned = anyio.Event()

        async def put() -> None:
            await balancer.put(make_rollout(3, "a"))
            returned.set()

        async with anyio.create_task_group() as tasks:
            with disk.stopped():
                tasks.start_soon(put)
                await disk.reached()
                await anyio.sleep(0.02)
                assert not returned.is_set()
                assert not waiting(balancer)
            await returned.wait()
        assert waiting(balancer) == ["a"]
        after = await kill(balancer)  # at once: nothing more is needed
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert waiting(balancer) == ["a"]
        assert balancer.recovered
        assert (balancer.recovered.waiting, balancer.recovered.in_flight) == (1, 0)


async def test_puts_that_wait_share_a_sync(tmp_path: Path, disk: Disk) -> None:
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer, anyio.create_task_group() as tasks:
        with disk.stopped():
            for rollout in make_rollouts([3] * 64):
                tasks.start_soon(balancer.put, rollout)
            await disk.reached()
            before = disk.commits
            for _ in range(5):
                await checkpoint()
        await until(lambda: len(waiting(balancer)) == 64)
        assert disk.commits <= before + 1


async def test_a_journal_may_be_opened_again(tmp_path: Path) -> None:
    for number in range(3):
        async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
            with pytest.raises(sb.errors.AlreadyInUseError):
                async with sb.StreamBalancer(config(), journal=tmp_path):
                    pass
            assert len(waiting(balancer)) == number
            await balancer.put(make_rollout(3))


async def test_a_put_that_cannot_reach_the_disk_says_why(tmp_path: Path) -> None:
    balancer = sb.StreamBalancer(config(), journal=tmp_path)
    with pytest.raises(sb.errors.ClosedResourceError, match="use `async with`"):
        await balancer.put(make_rollout(3))
    async with balancer:
        with pytest.raises(sb.errors.WouldBlock, match="cannot wait for the journal's disk"):
            balancer.put_nowait(make_rollout(3))


# -- after a crash -----------------------------------------------------------------------------------------------------


async def test_the_same_steps_come_again(tmp_path: Path) -> None:
    """In flight: same step, same plan, padding copies too; waiting: still waits; done: refused as done."""
    async with sb.StreamBalancer(config(deadline_s=0.001, min_batch_size=2), journal=tmp_path / "j") as balancer:
        batches = balancer.batches(auto_ack=False)
        given = []
        for number in range(3):
            await fill(balancer, [5, 9, 3, 7][: 4 - number], prefix=f"{number}-")
            given.append(await anext(batches))
        balancer.set_version(7)
        balancer.acknowledge(0)
        await balancer.put(make_rollout(4, "last"))
        before = balancer.statistics()
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        verify(balancer.parts.core)
        stats = balancer.statistics()
        assert (stats.waiting, stats.in_flight, stats.acknowledged, stats.accepted) == (1, 5, 4, 10)
        assert (stats.version, stats.evicted, stats.batches) == (7, before.evicted, before.batches)
        assert stats.oldest_wait_s >= 0
        again = balancer.batches(auto_ack=False)
        for batch in given[1:]:
            assert ids_of(await anext(again)) == ids_of(batch)
        for done in ("0-0", "0-3"):
            with pytest.raises(sb.errors.DuplicateRolloutError, match="accepted before and is done"):
                await balancer.put(make_rollout(3, done))
        with pytest.raises(sb.errors.DuplicateRolloutError, match="already held"):
            await balancer.put(make_rollout(3, "1-0"))
        balancer.end()
        drained = await anext(again)
        assert drained.step == 3
        assert drained.num_padding == 1
        twice = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=twice) as balancer:  # and after the next crash
        assert balancer.recovered
        assert balancer.recovered.torn_bytes == 0
        rest = [batch async for batch in _ended(balancer)]
        assert [ids_of(b) for b in rest] == [ids_of(b) for b in (*given[1:], drained)]


async def _ended(balancer: sb.StreamBalancer) -> Any:
    balancer.end()
    async for batch in balancer.batches():
        yield batch


async def test_a_plan_that_is_on_its_way_to_the_disk_is_made_again_for_other_ranks(tmp_path: Path, disk: Disk) -> None:
    """Who asked gets the batch for the ranks that there are when the disk has it."""
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
        await fill(balancer, [3, 5, 4, 6])
        got: list[sb.Batch] = []

        async def take() -> None:
            got.append(await anext(balancer.batches()))

        async with anyio.create_task_group() as tasks:
            with disk.stopped():
                tasks.start_soon(take)
                await disk.reached()
                balancer.reconfigure(dp_size=3)
        assert [len(batch.ranks) for batch in got] == [3]
        verify(balancer.parts.core)


async def test_an_observer_may_acknowledge_what_it_sees_leave(tmp_path: Path) -> None:
    """The journal hears of the plan first, and so holds none of a step that is done."""

    class Acks(sb.Observer):
        def dispatched(self, batch: Batch) -> None:
            balancer.acknowledge(batch.step)

    balancer = sb.StreamBalancer(config(), journal=tmp_path / "j")
    balancer.observers.append(Acks())
    async with balancer:
        await fill(balancer, [3] * 4)
        await anext(balancer.batches(auto_ack=False))
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert balancer.recovered is not None
        assert (balancer.recovered.damage, balancer.recovered.steps) == ((), ())


@pytest.mark.parametrize("how", ["journal", "damaged journal", "state_dict"])
async def test_a_gap_in_the_steps_in_flight_stays_a_gap(tmp_path: Path, how: str) -> None:
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        batches = balancer.batches(auto_ack=False)
        await fill(balancer, [3] * 14)
        given = [await anext(batches) for _ in range(3)]
        if how != "damaged journal":
            balancer.acknowledge(1)
        state = balancer.state_dict()
        after = await crash(balancer)
    if how == "damaged journal":  # a rollout of step 1 is lost, so its plan is void
        lost = given[1].ranks[0].rollouts[0].rollout_id
        with closing(sqlite3.connect(after / "journal.db")) as db, db:
            db.execute("update rows set data = zeroblob(length(data)) where key = ?", (rollout_key(lost),))
    async with sb.StreamBalancer(config(), journal=None if how == "state_dict" else after) as balancer:
        if how == "state_dict":
            balancer.load_state_dict(state)
        for number in range(20, 24):
            await balancer.put(make_rollout(3, f"r{number}"))
        batches = balancer.batches(auto_ack=False)
        again = [await anext(batches) for _ in range(3)]
        assert [batch.step for batch in again] == [0, 2, 3]
        assert [ids_of(batch) for batch in again[:2]] == [ids_of(given[0]), ids_of(given[2])]


async def test_the_end_is_not_remembered(tmp_path: Path) -> None:
    """The program's own: started again it goes on putting, and says itself when it has ended."""
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
        balancer.end()
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
        await balancer.put(make_rollout(3))


async def test_producers_that_have_ended_are_counted_on(tmp_path: Path) -> None:
    """``end()`` returns once it is on the disk: the producer may be gone when the controller is started again."""
    folder = tmp_path / "j"
    for life in range(3):
        async with attended(sb.StreamBalancer(config(), journal=folder, num_producers=2)) as (balancer, transport, _):
            assert balancer.ended == (life == 2)
            if life < 2:
                producer = sb.connect(transport.connect_producer())
                await producer.put(make_rollout(3, str(life)))
                await producer.end()
                assert balancer.ended == (life == 1)
                after = await kill(balancer)
            else:  # all had ended, and nothing else is to come: what is left is trained on
                assert [b.num_rollouts async for b in balancer.batches()] == [2]
        folder = after if life < 2 else folder
    async with sb.StreamBalancer(config(), journal=folder, num_producers=2) as balancer:
        assert not balancer.ended, "that run was finished: this is another one"
        await balancer.put(make_rollout(3, "new"))


async def test_an_end_that_came_as_the_last_producer_left_is_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    async with attended(sb.StreamBalancer(config(), journal=folder)) as (balancer, transport, _):
        first, second = [sb.connect(transport.connect_producer()) for _ in range(2)]
        await first.put(make_rollout(3, "a"))
        await second.put(make_rollout(3, "b"))
        await first.end()
        assert not balancer.ended
        await second.aclose()
        await until(lambda: balancer.ended)
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert balancer.ended


async def test_a_checkpoint_is_taken_over(tmp_path: Path) -> None:
    async with sb.StreamBalancer(config()) as balancer:
        batches = balancer.batches(auto_ack=False)
        for rollout in make_rollouts([3] * 9):
            balancer.put_nowait(rollout)
        given = [await anext(batches) for _ in range(2)]
        balancer.acknowledge(0)
        state = balancer.state_dict()
        stats = balancer.statistics()
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        balancer.load_state_dict(state)
        balancer.acknowledge_through(-1)
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        with pytest.raises(ValueError, match="newer than a checkpoint"):
            balancer.load_state_dict(state)
        now = balancer.statistics()
        assert (now.waiting, now.in_flight, now.accepted) == (stats.waiting, stats.in_flight, stats.accepted)
        assert ids_of(await anext(balancer.batches())) == ids_of(given[1])
        with pytest.raises(sb.errors.DuplicateRolloutError):
            await balancer.put(make_rollout(3, given[0].rollouts[0].rollout_id))


# -- cancelled ---------------------------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("passes", range(0, 3 * MAX_PASSES, 2))
async def test_a_put_cancelled_on_its_way_is_not_in_the_journal(tmp_path: Path, how: How, passes: int) -> None:
    """Through accept=, the disk, and the wait for room."""

    async def accept(rollouts: Sequence[sb.Rollout]) -> bool:
        await checkpoint()
        return True

    async with sb.StreamBalancer(config(capacity=4), journal=tmp_path / "j", accept=accept) as balancer:
        await fill(balancer, [3] * 4)
        batches = balancer.batches(auto_ack=False)

        async def make_room() -> None:
            await anyio.sleep(0.001 * (passes % 7))
            await anext(batches)

        outcome = await cancelled_after(passes, how, lambda: balancer.put(make_rollout(2, "victim")), make_room)
        assert ("victim" in waiting(balancer)) == outcome.finished
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert ("victim" in waiting(balancer)) == outcome.finished
        assert balancer.statistics().in_flight == 4


@ways
@pytest.mark.parametrize("passes", range(MAX_PASSES))
async def test_a_cancelled_trainer_gets_the_same_batch_later(tmp_path: Path, how: How, passes: int) -> None:
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        await fill(balancer, [3, 9, 5, 7, 2, 8, 4, 6])
        batches = balancer.batches(auto_ack=False)
        outcome = await cancelled_after(passes, how, lambda: anext(batches), checkpoint)
        first = outcome.result if outcome.finished else await anext(batches)
        second = await anext(batches)
        assert (first.step, second.step) == (0, 1)
        assert len({r.rollout_id for b in (first, second) for r in b.rollouts}) == 8
        after = await crash(balancer)
        verify(balancer.parts.core)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        again = balancer.batches()
        assert [ids_of(await anext(again)) for _ in range(2)] == [ids_of(first), ids_of(second)]


async def test_a_put_that_end_or_aclose_overtakes_was_not_accepted(tmp_path: Path, disk: Disk) -> None:
    for stop in ("end", "aclose"):
        folder = tmp_path / stop
        async with sb.StreamBalancer(config(), journal=folder) as balancer:
            put = partial(expect_closed, balancer.put)
            async with anyio.create_task_group() as tasks:
                with disk.stopped():
                    tasks.start_soon(put, make_rollout(3, "being written"))
                    await disk.reached()
                    tasks.start_soon(put, make_rollout(3, "queued"))
                    await checkpoint()
                    await checkpoint()
                    if stop == "end":
                        balancer.end()
                    else:
                        tasks.start_soon(balancer.aclose)
                        await anyio.sleep(0.01)
        async with sb.StreamBalancer(config(), journal=folder) as balancer:
            assert not waiting(balancer)


async def expect_closed(wait: Callable[[Any], Awaitable[object]], what: Any) -> None:
    with pytest.raises(sb.errors.ClosedResourceError):
        await wait(what)


async def test_an_id_that_is_lost_while_its_next_put_is_being_written_is_held(tmp_path: Path, disk: Disk) -> None:
    """A row belongs to one put, so the eviction of the first put's rollout keeps the row of the second."""
    balancer, lost = sb.StreamBalancer(config(), journal=tmp_path / "j"), list[str]()

    class Loses(sb.Observer):
        def accepted(self, rollouts: Sequence[sb.Rollout], now: float) -> None:
            if not lost:
                lost.extend(balancer.parts.core.evict_lost(lambda one: one.rollout_id == "a"))

    balancer.observers.append(Loses())
    async with balancer:
        async with anyio.create_task_group() as tasks:
            with disk.stopped():
                tasks.start_soon(balancer.put, make_rollout(3, "a"))
                await disk.reached()
                tasks.start_soon(balancer.put, make_rollout(3, "a"))
                for _ in range(5):
                    await checkpoint()
        assert lost == waiting(balancer) == ["a"]
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert waiting(balancer) == ["a"]


async def test_two_rows_of_an_id_that_a_crash_left_are_one_rollout(tmp_path: Path) -> None:
    """Two producers put the same id, and the controller dies while both wait for room."""
    async with sb.StreamBalancer(config(capacity=4), journal=tmp_path / "j") as balancer:
        await fill(balancer, [3] * 4)
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(balancer.put, make_rollout(3, "a"))
            await until(lambda: balancer.statistics().blocked_puts == 2)
            during = await kill(balancer)
            tasks.cancel_scope.cancel()
    async with sb.StreamBalancer(config(), journal=during) as balancer:
        assert waiting(balancer) == ["r0", "r1", "r2", "r3", "a"]
        balancer.end()
        assert sum([batch.num_rollouts async for batch in balancer.batches()]) == 5
        after = await crash(balancer)
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert balancer.recovered is not None
        assert (waiting(balancer), balancer.recovered.past_ids) == ([], 5)


# -- the disk ----------------------------------------------------------------------------------------------------------


async def test_a_full_disk_refuses_puts_and_recovers(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """Puts are told; batches, which need a few bytes for their plan, wait; nothing is lost."""
    caplog.set_level(logging.WARNING)
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer, anyio.create_task_group() as tasks:
        await fill(balancer, [3] * 5)
        disk.error = sqlite3.SQLITE_FULL
        for attempt in range(3):
            with pytest.raises(
                sb.errors.JournalError, match=r"is full .* was not accepted. Make room and put it again"
            ) as told:
                await balancer.put(make_rollout(3, f"refused{attempt}"))
            assert told.value.errno == errno.ENOSPC
        given: list[Batch] = []

        async def train() -> None:
            given.append(await anext(balancer.batches(auto_ack=False)))

        tasks.start_soon(train)
        await anyio.sleep(0.05)
        assert not given
        during = await kill(balancer)
        disk.error = None
        await until(lambda: bool(given))
        await balancer.put(make_rollout(3, "refused0"))
        after = await crash(balancer)
    assert [r.getMessage().split(": ")[1] for r in caplog.records if "room" in r.getMessage()] == [
        "the disk is full; puts are refused until there is room",
        "there is room on the disk again",
    ]
    async with sb.StreamBalancer(config(), journal=during) as balancer:
        assert balancer.recovered
        assert balancer.recovered.torn_bytes == 0
        assert len(waiting(balancer)) == 5
    async with sb.StreamBalancer(config(), journal=after) as balancer:
        assert sorted(waiting(balancer))[1:] == ["refused0"]
        assert ids_of(await anext(balancer.batches())) == ids_of(given[0])


async def test_a_real_limit_of_the_operating_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to let a file grow: as on a full disk puts are refused, training goes on, and what is trained
    on makes room; when the log is taken over into the database, too."""
    monkeypatch.setattr(log, "WAL_BYTES", 2**20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trained: list[str] = []
    accepted: list[str] = []
    numbers = iter(range(10**6))
    async with sb.StreamBalancer(config(capacity=1000, max_skips=None), journal=tmp_path / "j") as balancer:

        async def fill() -> int:
            before = len(accepted)
            for number in numbers:
                try:
                    await balancer.put(make_rollout(5_000, f"r{number}"))
                except sb.errors.JournalError as error:
                    full = error
                    break
                accepted.append(f"r{number}")
            assert "is full" in str(full)
            assert full.errno == errno.EFBIG
            return len(accepted) - before

        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 2**20, hard))
        try:
            assert await fill() >= 40  # of 61 kB
            batches = balancer.batches(auto_ack=False)
            for _ in range(3):
                for _ in range(5):
                    with anyio.fail_after(GUARD_S):
                        batch = await anext(batches)
                    trained += [r.rollout_id for r in batch.rollouts]
                    balancer.acknowledge(batch.step)
                assert await fill() >= 10
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await balancer.put(make_rollout(20_000, "large"))
        after = await crash(balancer)
    async with sb.StreamBalancer(config(capacity=1000), journal=after) as balancer:
        assert sorted(trained + waiting(balancer)) == sorted([*accepted, "large"])


async def test_a_batch_that_waits_for_a_full_disk_is_not_handed_out_at_the_end(tmp_path: Path, disk: Disk) -> None:
    """Its plan is not written: another one may be made after a restart."""
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer, anyio.create_task_group() as tasks:
        await fill(balancer, [3] * 4)
        disk.error = sqlite3.SQLITE_FULL
        tasks.start_soon(expect_closed, anext, balancer.batches())
        await until(lambda: balancer.statistics().in_flight == 4)
        await balancer.aclose()
    disk.error = None
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
        assert len(waiting(balancer)) == 4


async def test_a_failed_sync_ends_all_promises(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """After a failed fsync the page cache may be clean and the disk not: trying again would prove nothing."""
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        await fill(balancer, [3] * 4)
        disk.error = sqlite3.SQLITE_IOERR_FSYNC
        with pytest.raises(
            sb.errors.JournalError, match=r"cannot be written any more .* Start the balancer again"
        ) as told:
            await balancer.put(make_rollout(3, "x"))
        assert told.value.errno == errno.EIO
        disk.error = None
        with pytest.raises(sb.errors.JournalError):
            await balancer.put(make_rollout(3, "y"))
        with pytest.raises(sb.errors.JournalError):
            await anext(balancer.batches())
        assert sorted(waiting(balancer)) == []
        assert balancer.statistics().in_flight == 4  # kept, for whoever can write again
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    async with sb.StreamBalancer(config(), journal=tmp_path / "j") as balancer:
        assert set(waiting(balancer)) >= {"r0", "r1", "r2", "r3"}  # x may or may not be there


async def test_no_room_to_start(tmp_path: Path, disk: Disk) -> None:
    disk.error = sqlite3.SQLITE_FULL
    with pytest.raises(sb.errors.JournalError, match="no room to start"):
        async with sb.StreamBalancer(config(), journal=tmp_path):
            pass
    disk.error = None
    async with sb.StreamBalancer(config(), journal=tmp_path) as balancer:
        await balancer.put(make_rollout(3))


# -- its size ----------------------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_the_folder_is_bounded_by_what_ever_waited_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much goes through, one rollout stays: what is free in the database is used again."""
    monkeypatch.setattr(log, "WAL_BYTES", 400_000)
    monkeypatch.setattr(RolloutIds, "remember", 10)
    monkeypatch.setattr(SiblingGroups, "remember", 10)
    knobs = config(groups=sb.Groups(size=2), capacity=1000)
    async with sb.StreamBalancer(knobs, journal=tmp_path / "j") as balancer:
        batches = balancer.batches()
        await balancer.put_group([make_rollout(50, "kept", group_id="kept")])

        async def put(number: int) -> None:
            names = [f"{number}-{n}" for n in range(2)]
            await balancer.put_group([make_rollout(200, name, group_id=f"g{number}") for name in names])

        sizes = []
        for burst in range(5):
            async with anyio.create_task_group() as tasks:
                for number in range(60):
                    tasks.start_soon(put, 1000 * burst + number)
            sizes.append(size_of(tmp_path / "j"))
            while balancer.statistics().waiting > 4:
                await anext(batches)
        after = await crash(balancer)
    # once in the log, once in the database
    assert max(sizes) < 4 * sizes[0], sizes
    async with sb.StreamBalancer(knobs, journal=after) as balancer:
        assert "kept" in waiting(balancer)
        assert balancer.statistics().in_flight == 4


def declared(balancer: sb.StreamBalancer) -> dict[str, tuple[int | None, bool]]:
    """Sizes of groups that were told, and whether no more of them comes."""
    return {name: (one.size, one.closed) for name, one in balancer.snapshot().groups.items()}


async def test_groups_of_another_size_survive(tmp_path: Path) -> None:
    """What was declared and closed, with the rollouts of the same put."""
    knobs = config(groups=sb.Groups(size=4), window=4, capacity=16)
    async with sb.StreamBalancer(knobs, journal=tmp_path / "j") as balancer:
        await balancer.expect_group("e", 3)
        await balancer.put_group([make_rollout(3, f"e{n}", group_id="e") for n in range(2)])
        await balancer.put_group([make_rollout(3, f"c{n}", group_id="c") for n in range(2)], complete=True)
        after = await kill(balancer)  # at once: what has returned is on the disk
    async with sb.StreamBalancer(knobs, journal=after) as balancer:
        assert declared(balancer) == {"e": (3, False), "c": (2, True)}
        verify(balancer.parts.core)


@pytest.mark.parametrize("where", ["on its way to the disk", "waiting for room"])
async def test_a_put_that_is_cancelled_declares_nothing(tmp_path: Path, disk: Disk, where: str) -> None:
    knobs = config(groups=sb.Groups(size=4), window=4, capacity=4)
    async with sb.StreamBalancer(knobs, journal=tmp_path / "j") as balancer:
        await balancer.put_group([make_rollout(3, f"f{n}", group_id="f") for n in range(4)])
        await balancer.expect_group("g", 3)
        async with anyio.create_task_group() as tasks:
            put = partial(balancer.put_group, [make_rollout(3, "g0", group_id="g")], complete=True)
            if where == "waiting for room":
                tasks.start_soon(put)
                await until(lambda: balancer.statistics().blocked_puts == 1)
                tasks.cancel_scope.cancel()
            else:
                with disk.stopped():
                    tasks.start_soon(put)
                    await disk.reached()
                    tasks.cancel_scope.cancel()
                    with anyio.CancelScope(shield=True):
                        for _ in range(20):
                            await checkpoint()
        after = await crash(balancer)
    async with sb.StreamBalancer(knobs, journal=after) as balancer:
        assert (declared(balancer), len(waiting(balancer))) == ({"g": (3, False)}, 4)
