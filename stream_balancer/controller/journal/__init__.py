"""The journal: what was accepted survives the controller. A put returns once its rollout is on the disk.

::

    put --write--> queue  --> writer thread: all that wait, one transaction, one fsync --> puts return, together
    batches() --flush-->  `   acknowledgements and evictions are in the same transaction

``changes`` (what happens, as rows), ``rows`` (their bytes), ``contents`` (what rows add up to), ``store`` (the
database, the disk), ``lock``, and this one: who waits for whom. The event loop never touches the disk. docs/journal.md
has the promise, the protocol and the measurements.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias, TypeGuard

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream_balancer.controller.journal.changes import Changes, Statement
from stream_balancer.controller.journal.contents import Contents, Held, contents_of
from stream_balancer.controller.journal.rows import Group, fact_of, rollout_of, rollout_row
from stream_balancer.controller.journal.store import DiskFullError, Store
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.errors import ClosedResourceError, ConfigError, JournalError, RolloutError, to_raise
from stream_balancer.field_docs import documented
from stream_balancer.transport.event_loop import InLoop, loop_caller
from stream_balancer.types import Rollout
from stream_balancer.wire.share import OtherProtocolError

__all__ = ["Journal", "Recovered", "Writing"]

COMMIT_BYTES = 64 * 2**20  # most that is written together
LOG_BYTES = 32 * 2**20  # of the write-ahead log before it is taken over
FREE_BYTES = 64 * 2**20  # of free pages in the database before some are given back
LEAST_MAX_BYTES = 2**20
MAX_ROLLOUT_BYTES = 9 * 10**8  # SQLite takes 10 ** 9 bytes a row
VACUUM_PAGES = 512  # how much is moved at a time, so that puts wait for less
RETRY_S = 0.5  # how often to try again on a full disk, if nothing else happens

_log = logging.getLogger("stream_balancer.journal")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal held when it was opened."""

    waiting: int
    """Rollouts that wait again."""
    in_flight: int
    """Rollouts whose batches will be delivered again, with the same plan."""
    steps: tuple[int, ...]
    """Steps of these batches."""
    past_ids: int
    """Rollouts remembered as done."""
    next_step: int
    """Number of the next new batch."""
    torn_bytes: int
    """Bytes of a commit that a crash cut short: of puts that had not returned. They were taken off."""
    damage: tuple[str, ...]
    """What was damaged, and the rollouts and plans that could not be read because of it, a sentence each; everything
    else is here. The database as it was is kept beside the new one, as ``damaged-1.db``."""
    seconds: float
    """How long it took."""

    @property
    def found(self) -> bool:
        """Whether it held anything, as after a crash or an earlier run."""
        return bool(self.waiting or self.steps or self.past_ids or self.next_step)


@dataclass(slots=True, eq=False)
class Writing:
    """A put on its way to the disk."""

    number: int
    """Of its first row."""
    rollouts: Sequence[Rollout]
    arrived_at: float
    step: int
    settled: anyio.Event | None
    """None: nobody waits, and it may not be refused."""
    declared: list[Statement] = field(default_factory=list)
    """What is declared of their group with them."""
    error: Exception | None = None
    withdrawn: bool = False

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes + 1024 for r in self.rollouts)


@dataclass(slots=True, eq=False)
class _Flush:
    """Somebody waits until all that was enqueued before is on the disk."""

    settled: anyio.Event
    error: Exception | None = None


_Item: TypeAlias = Writing | _Flush | list[Statement]


class Journal:
    """A folder that holds what a balancer has accepted and not yet finished. One process at a time.

    ``max_bytes`` bounds the folder: puts wait while it is full of rollouts that are still needed. Without it the
    folder stays below twice what is needed plus a few times 64 MiB.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < LEAST_MAX_BYTES:
            raise ConfigError(
                f"max_bytes of a journal must be >= {LEAST_MAX_BYTES}, not {max_bytes}: rollouts are written before "
                "others are deleted. Raise max_bytes"
            )
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._commit_bytes = COMMIT_BYTES if max_bytes is None else min(COMMIT_BYTES, max_bytes // 8)
        self._log_bytes = LOG_BYTES if max_bytes is None else min(LOG_BYTES, max_bytes // 8)
        self._store = Store(self.path)
        self._queued = threading.Condition()
        self._queue: deque[_Item] = deque()  # guarded by _queued
        self._refusing = self._closing = False  # guarded by _queued
        self._thread: threading.Thread | None = None
        # the event loop's own
        self._in_loop: InLoop = _nothing
        self._on_blocked: Callable[[], object] = _nothing
        self._waking = False
        self.changes = Changes()
        """What to :meth:`change` for each event."""
        # the writer's own
        self._kept: list[_Item] = []  # could not be written yet: no room
        self._full = self._blocked = False
        self._broken: JournalError | None = None

    # -- opening and closing; these block ------------------------------------------------------------------------------

    def open(self, remember_ids: int) -> tuple[Snapshot, Recovered]:
        """Take the lock, and read what is held. Call :meth:`start` afterwards, in the event loop.

        Raises AlreadyInUseError if another process has it, JournalError if its disk is full or nothing can be read,
        WireError for another version's. O(bytes).
        """
        began = time.monotonic()
        store = self._store
        try:
            store.open()
            self._refusing = self._closing = self._full = self._blocked = self._waking = False
            self._broken, self._kept = None, []
            try:
                snapshot, torn_bytes, damage = self._go_on(remember_ids)
            except BaseException:
                store.close()
                raise
        except DiskFullError as error:
            message = f"the journal {self.path} has no room to start. Make room first"
            raise DiskFullError(error.errno, message) from None
        recovered = Recovered(
            waiting=len(snapshot.waiting),
            in_flight=sum(batch.num_rollouts for batch in snapshot.in_flight),
            steps=tuple(batch.step for batch in snapshot.in_flight),
            past_ids=len(snapshot.past_ids),
            next_step=snapshot.next_step,
            torn_bytes=torn_bytes,
            damage=tuple(damage),
            seconds=time.monotonic() - began,
        )
        self._log_recovered(recovered)
        return snapshot, recovered

    def _go_on(self, remember_ids: int) -> tuple[Snapshot, int, list[str]]:
        """From what is held: in the same database, or, if that is damaged, in a new one. -> it, torn bytes, damage."""
        contents, damage = self._read()
        torn_bytes = self._store.torn_bytes
        snapshot, broken = contents.snapshot(time.time(), remember_ids)
        damage += [f"step {plan.step}: its plan names rollouts that are lost" for plan in broken]
        if damage:
            self.changes.follow(Contents(), remember_ids)
            items = self._adopted(contents_of(snapshot, time.time()))
            parts = iter(lambda: list(islice(items, 256)), [])
            self._store.replace(self._statements(part) for part in parts)
        else:
            self.changes.follow(contents, remember_ids)
        self._store.begin()
        return snapshot, torn_bytes, damage

    def _read(self) -> tuple[Contents, list[str]]:
        """What can be read, and sentences about the rest."""
        contents, bad = Contents(), []
        for row in self._store.facts():
            try:
                contents.add(row[1], fact_of(row))
            except Exception as error:  # noqa: BLE001 - one bad row never prevents the others from being read
                bad.append(f"{row[0]} {row[1]}: {error}")
        held = []
        for row in self._store.rollouts():
            try:
                held.append((row[0], Held(rollout_of(row), row[2], row[3])))
            except OtherProtocolError:
                raise
            except RolloutError as error:
                bad.append(f"row {row[0]}: {error}")
            except Exception as error:  # noqa: BLE001 - as above
                bad.append(f"row {row[0]}: rollout {row[1]!r}: {error}")
        for number, one in sorted(held, key=itemgetter(0)):
            contents.hold(number, one)
        return contents, self._store.damage + bad

    def _log_recovered(self, recovered: Recovered) -> None:
        for where in recovered.damage:
            _log.error("journal %s: damaged, rows are lost: %s", self.path, where)
        if recovered.torn_bytes:
            _log.warning(
                "journal %s: the last %d bytes are no whole commit. Taken off. A crash in the middle of a write looks "
                "so, and no put that had returned is in such an end; otherwise the disk has damaged it",
                self.path,
                recovered.torn_bytes,
            )
        if recovered.waiting or recovered.in_flight:
            _log.warning(
                "journal %s: recovered %d waiting rollouts and %d in flight (steps %s) in %.2f s",
                self.path,
                recovered.waiting,
                recovered.in_flight,
                list(recovered.steps),
                recovered.seconds,
            )

    def start(self, on_blocked: Callable[[], object]) -> None:
        """Begin to write, from the event loop's thread. ``on_blocked()`` is called in the loop when puts have to wait
        for ``max_bytes``."""
        self._in_loop, self._on_blocked = loop_caller(), on_blocked
        self._thread = threading.Thread(target=self._run, name=f"sb-journal-{self.path.name}", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """Write what is enqueued, and release the lock. Puts that are not being written yet get ClosedResourceError.
        Idempotent; also where :meth:`start` was not called."""
        if self._thread is not None and not self._closing:
            with self._queued:
                self._refusing = True
            with suppress(JournalError):
                await self.flush()
            await anyio.lowlevel.checkpoint()  # puts that were just written notice the end, and retract
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        with self._queued:
            self._closing = True
            self._queued.notify()
        if self._thread is not None:
            self._thread.join()
        self._store.close()

    # -- enqueueing; in the event loop ---------------------------------------------------------------------------------

    def write(self, rollouts: Sequence[Rollout], step: int, size: GroupSize | None = None) -> Writing:
        """Rollouts that are about to be accepted take the last place in the queue, with the ``size`` that is declared
        of their group; :meth:`written` must follow.

        Raises RolloutError if they could never fit, ClosedResourceError once closed.
        """
        if rollouts:
            self._check_fits(rollouts)
        item = self._writing(rollouts, time.time(), step, anyio.Event())
        if size is not None:
            group = Group(size.group_id, size.size, "closed" if size.size is None else "open")
            item.declared = self.changes.group(group)
        self._enqueue(item)
        return item

    def _writing(
        self, rollouts: Sequence[Rollout], arrived_at: float, step: int, settled: anyio.Event | None
    ) -> Writing:
        number = self.changes.next_number
        self.changes.next_number += len(rollouts)
        return Writing(number, rollouts, arrived_at, step, settled)

    async def written(self, item: Writing) -> None:
        """Return once they are on the disk. If cancelled, or on an error, they are not in the journal.

        Raises JournalError if the disk is full or failing, ClosedResourceError if the journal is closed meanwhile.
        """
        assert item.settled is not None
        try:
            await item.settled.wait()
        except BaseException:
            item.withdrawn = True  # if it is still in time; else it is written, and deleted again
            self.retract(item)
            raise
        if item.error is not None:
            raise to_raise(item.error)

    def _check_fits(self, rollouts: Sequence[Rollout]) -> None:
        size, most = sum(r.nbytes for r in rollouts), self._max_bytes
        if most is not None and size > most // 4:
            raise RolloutError(
                f"rollout {rollouts[0].rollout_id!r} (with its siblings {size} bytes) is too large for a journal of "
                f"max_bytes ({most}): a put may take {most // 4}. Raise max_bytes"
            )
        largest = max(rollouts, key=lambda r: r.nbytes)
        if largest.nbytes > MAX_ROLLOUT_BYTES:
            raise RolloutError(
                f"rollout {largest.rollout_id!r} ({largest.nbytes} bytes) is too large for a journal, which takes "
                f"{MAX_ROLLOUT_BYTES}. Put large tensors elsewhere, and their names into metadata"
            )

    def retract(self, item: Writing) -> None:
        """What was written has not been accepted after all."""
        if item.rollouts:
            self.change(self.changes.retracted(range(item.number, item.number + len(item.rollouts))))

    def change(self, statements: list[Statement]) -> None:
        """Something has happened. On the disk by the time the next put or :meth:`flush` returns."""
        with suppress(ClosedResourceError):  # after the end nobody writes any more; it will be delivered again
            self._enqueue(statements)

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint that was loaded. On the disk by the time the next put returns."""
        for item in self._adopted(contents_of(snapshot, time.time())):
            self._enqueue(item)

    def _adopted(self, contents: Contents) -> Iterator[_Item]:
        yield list(self.changes.adopted(contents))
        for held in contents.held.values():
            yield self._writing([held.rollout], held.arrived_at, held.step, None)

    async def flush(self) -> None:
        """Return once all that was enqueued so far is on the disk. Waits while it is full; raises JournalError if it is
        failing."""
        item = _Flush(anyio.Event())
        self._enqueue(item)
        await item.settled.wait()
        if item.error is not None:
            raise to_raise(item.error)

    def _enqueue(self, item: _Item) -> None:
        with self._queued:
            if self._thread is None or self._closing:
                raise ClosedResourceError("the journal is closed, or not open yet: use `async with` on the balancer")
            self._queue.append(item)
        if not self._waking:  # once all tasks that can run now have put theirs
            self._waking = True
            self._in_loop(self._wake)

    def _wake(self) -> None:
        self._waking = False
        with self._queued:
            self._queued.notify()

    # -- writing; in the journal's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (items := self._take()) is not None:
            try:
                self._write(items)
            except Exception as error:  # noqa: BLE001 - whatever it is: nothing may be promised any more
                self._break(error, items)
            self._settle(items)
            self._tidy()

    def _take(self) -> list[_Item] | None:
        """All that is to be written next; None at the end."""
        with self._queued:
            while not self._queue and not self._closing:
                if not self._queued.wait(RETRY_S if self._kept else None):
                    break  # try again what there was no room for
            if self._closing and not self._queue:
                return None
            items, self._kept = self._kept, []
            size = 0
            while self._queue and size < self._commit_bytes:
                item = self._queue.popleft()
                items.append(item)
                size += item.nbytes if isinstance(item, Writing) else 0
        return items

    def _write(self, items: Sequence[_Item]) -> None:
        """Write, sync, take in. What there is no room for is refused (puts, on a full disk) or kept."""
        if self._broken is not None:
            raise self._broken
        items = self._admit(items)
        try:
            self._leave_room(items)
            self._commit(items)
            self._note_full(False)
        except DiskFullError as error:
            self._note_full(True)
            rest = [item for item in items if not _may_be_refused(item)]
            for item in filter(_may_be_refused, items):
                item.error = JournalError(*error.args)
            try:
                self._commit(rest)
            except DiskFullError:
                self._kept += rest

    def _leave_room(self, items: Iterable[_Item]) -> None:
        """Raise DiskFullError before rollouts fill the disk: plans and acknowledgements, which make room, need some."""
        num_bytes = sum(item.nbytes for item in items if isinstance(item, Writing))
        if not self._store.has_room(num_bytes):
            self._store.checkpoint()
            if not self._store.has_room(num_bytes):
                raise self._store.full()

    def _commit(self, items: Iterable[_Item]) -> None:
        if statements := self._statements(items):
            self._store.commit(statements)

    def _statements(self, items: Iterable[_Item]) -> list[Statement]:
        statements: list[Statement] = []
        for item in items:
            if isinstance(item, Writing):
                try:
                    rows = [
                        rollout_row(number, rollout, item.arrived_at, item.step)
                        for number, rollout in enumerate(item.rollouts, item.number)
                    ]
                except Exception as error:  # noqa: BLE001 - the put is refused, and the journal goes on
                    item.error = error
                else:
                    statements += [*(self.changes.added(rows) if rows else []), *item.declared]
            elif not isinstance(item, _Flush):
                statements += item
        return statements

    def _admit(self, items: Sequence[_Item]) -> list[_Item]:
        """Without the puts that were withdrawn, and those that ``max_bytes`` holds back."""
        admitted: list[_Item] = []
        size, blocked = 0, False
        for item in items:
            if _may_be_refused(item):
                if self._refusing:
                    item.error = ClosedResourceError("the journal was closed before this put was written")
                if item.withdrawn or item.error is not None:
                    continue
                size += item.nbytes
                if blocked or not self._has_room(size):
                    blocked = True
                    self._kept.append(item)
                    continue
            admitted.append(item)
        if blocked:
            self._in_loop(self._on_blocked)
        if blocked and not self._blocked:
            _log.warning(
                "journal %s: puts wait, most of max_bytes (%d) belongs to rollouts that wait, or were not acknowledged",
                self.path,
                self._max_bytes,
            )
        self._blocked = blocked
        return admitted

    def _has_room(self, num_bytes: int) -> bool:
        """A quarter is left for what is written beside puts. Every byte is written to the log, then to the database."""
        if self._max_bytes is None:
            return True
        most = self._max_bytes * 3 // 4 - 2 * num_bytes
        if self._store.total_bytes > most:
            self._store.checkpoint(vacuum_pages=2**30)
        return self._store.total_bytes <= most

    def _tidy(self) -> None:
        """Nobody waits for this: take the log over into the database, and give back what is free there."""
        store = self._store
        try:
            if self._broken is None and store.log_bytes > self._log_bytes:
                much = max(FREE_BYTES, store.total_bytes // 2)
                store.checkpoint(vacuum_pages=VACUUM_PAGES if store.free_bytes > much else 0)
        except DiskFullError:
            self._note_full(True)
        except Exception as error:  # noqa: BLE001 - as in _run
            self._break(error, ())

    def _note_full(self, full: bool) -> None:
        if full and not self._full:
            _log.warning("journal %s: the disk is full; puts are refused until there is room", self.path)
        if self._full and not full:
            _log.warning("journal %s: there is room on the disk again", self.path)
        self._full = full

    def _break(self, error: Exception, items: Sequence[_Item]) -> None:
        if self._broken is None:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            self._broken = JournalError(
                number,
                f"the journal {self.path} cannot be written any more ({error}): after a failed write nobody knows what "
                "is on the disk. Start the balancer again, with a disk that works",
            )
            _log.error("%s", self._broken, exc_info=error)
        for item in (*items, *self._kept):
            if not isinstance(item, list):
                item.error = item.error or self._broken
        self._kept = []

    def _settle(self, items: Sequence[_Item]) -> None:
        """Wake whoever waits for these, in one go."""
        kept = set() if self._refusing else set(map(id, self._kept))
        events = [
            item.settled
            for item in items
            if isinstance(item, (Writing, _Flush)) and item.settled is not None and id(item) not in kept
        ]
        if events:
            self._in_loop(partial(_set_all, events))


def _may_be_refused(item: _Item) -> TypeGuard[Writing]:
    return isinstance(item, Writing) and item.settled is not None


def _set_all(events: Sequence[anyio.Event]) -> None:
    for event in events:
        event.set()


def _nothing(*_: object) -> None:
    pass
