"""The journal's thread: what is enqueued in the event loop, onto the disk.

All that waits goes into one transaction, and whoever waits for it is woken together. The queue is what both threads
touch, under its lock; everything else belongs to one of them.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import anyio

from stream_balancer.errors import ClosedResourceError, JournalError
from stream_balancer.host.journal.store import DiskFullError, Statement, Store, add
from stream_balancer.host.records import Held, write_rollouts
from stream_balancer.net.loops import in_loop

__all__ = ["Writer", "Writing"]

COMMIT_BYTES = 64 * 2**20  # most that is written together
LOG_BYTES = 32 * 2**20  # of the write-ahead log before it is taken over
FREE_BYTES = 64 * 2**20  # of free pages in the database before some are given back
VACUUM_PAGES = 512  # how much is moved at a time, so that puts wait for less
RETRY_S = 0.5  # how often to try again on a full disk, if nothing else happens

CLOSED = "the journal is closed, or not open yet: use `async with` on the balancer"

_log = logging.getLogger("stream_balancer.journal")


@dataclass(slots=True, eq=False)
class Writing:
    """Rows to be written together, and the tasks that wait for them and for all before."""

    statements: Sequence[Statement] = ()
    held: Sequence[Held] = ()
    """Rollouts, whose rows are made in the thread."""
    number: int = 0
    """Number of the first rollout's row."""
    settled: anyio.Event | None = field(default_factory=anyio.Event)
    """None: nobody waits."""
    may_be_refused: bool = False
    """A put; all else describes what has happened."""
    error: Exception | None = None
    withdrawn: bool = False

    @property
    def nbytes(self) -> int:
        return sum(one.rollout.nbytes + 1024 for one in self.held)

    def all_statements(self) -> list[Statement]:
        """With the rows of the rollouts; none, and the ``error``, where these cannot be written."""
        try:
            rows = [
                (number, one.rollout.rollout_id, write_rollouts(number, [one]))
                for number, one in enumerate(self.held, self.number)
            ]
        except Exception as error:  # noqa: BLE001 - the put is refused, and the journal goes on
            self.error = error
            return []
        return [*([add(rows)] if rows else []), *self.statements]


class Writer:
    """Writes one journal, from :meth:`start` to :meth:`close`. Made in the event loop."""

    def __init__(self, store: Store, max_bytes: int | None, on_blocked: Callable[[], object]) -> None:
        self._store, self._path, self._max_bytes = store, store.folder, max_bytes
        # small parts of the bound: one transaction is in log and database at once
        self._commit_bytes = COMMIT_BYTES if max_bytes is None else min(COMMIT_BYTES, max_bytes // 8)
        self._log_bytes = LOG_BYTES if max_bytes is None else min(LOG_BYTES, max_bytes // 8)
        self._queued = threading.Condition()
        self._queue: deque[Writing] = deque()  # guarded by _queued
        self._refusing = self._closing = False  # guarded by _queued
        # the event loop's own
        self._in_loop, self._on_blocked = in_loop(), on_blocked
        self._waking = False
        # the thread's own
        self._kept: list[Writing] = []  # could not be written yet: no room
        self._full = self._blocked = False
        self._broken: JournalError | None = None
        self._thread = threading.Thread(target=self._run, name=f"sb-journal-{self._path.name}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closing

    def refuse(self) -> None:
        """Refuse puts that are not being written yet."""
        with self._queued:
            self._refusing = True

    def close(self) -> None:
        """Write what is enqueued, and end the thread. Blocks; idempotent."""
        with self._queued:
            self._closing = True
            self._queued.notify()
        self._thread.join()

    def enqueue(self, item: Writing) -> None:
        """Take the last place in the queue; from the event loop. Raises ClosedResourceError once closed."""
        with self._queued:
            if self._closing:
                raise ClosedResourceError(CLOSED)
            self._queue.append(item)
        if not self._waking:  # once all tasks that can run now have put theirs
            self._waking = True
            self._in_loop(self._wake)

    def _wake(self) -> None:
        self._waking = False
        with self._queued:
            self._queued.notify()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # to the end of the queue, also when it is closing: somebody waits for each of them
        while (items := self._take()) is not None:
            try:
                self._write(items)
            except Exception as error:  # noqa: BLE001 - whatever it is: nothing may be promised any more
                self._break(error, items)
            # Woken before the log is tidied: nobody has to wait for that.
            self._settle(items)
            self._tidy()

    def _take(self) -> list[Writing] | None:
        """All that is to be written next; None at the end."""
        with self._queued:
            # In a loop, since a condition may wake for nothing.
            while not self._queue and not self._closing:
                if not self._queued.wait(RETRY_S if self._kept else None):
                    break  # try again what there was no room for
            # what there was no room for is given up: after a restart it happens again
            if self._closing and not self._queue:
                return None
            items, self._kept = self._kept, []
            size = 0
            # a bound on a transaction, so that the first of many puts does not wait for all of them
            while self._queue and size < self._commit_bytes:
                items.append(self._queue.popleft())
                size += items[-1].nbytes
        return items

    def _write(self, items: Sequence[Writing]) -> None:
        """Write, sync, take in. What there is no room for is refused (puts, on a full disk) or kept."""
        if self._broken is not None:
            raise self._broken
        items = self._admit(items)
        try:
            self._leave_room(sum(item.nbytes for item in items))
            self._commit(items)
            self._note_full(False)
        except DiskFullError as error:
            self._note_full(True)
            for item in items:
                if item.may_be_refused:
                    item.error = JournalError(*error.args)
            # Plans, acknowledgements and evictions describe what has happened: they cannot be refused, and they make
            # room. There are bytes in reserve for them.
            rest = [item for item in items if not item.may_be_refused]
            try:
                self._commit(rest)
            except DiskFullError:
                self._kept += rest

    def _leave_room(self, num_bytes: int) -> None:
        """Raise DiskFullError before rollouts fill the disk: plans and acknowledgements, which make room, need some."""
        try:
            self._store.check_room(num_bytes)
        except DiskFullError:
            self._store.checkpoint()
            self._store.check_room(num_bytes)

    def _commit(self, items: Iterable[Writing]) -> None:
        if statements := [one for item in items for one in item.all_statements()]:
            self._store.commit(statements)

    def _admit(self, items: Sequence[Writing]) -> list[Writing]:
        """Without the puts that were withdrawn, and those that ``max_bytes`` holds back."""
        admitted: list[Writing] = []
        size, blocked = 0, False
        for item in items:
            if item.may_be_refused:
                if self._refusing:
                    item.error = ClosedResourceError("the journal was closed before this put was written")
                # its put is over: written, it would be retracted at once
                if item.withdrawn or item.error is not None:
                    continue
                size += item.nbytes
                # nor those behind it: a small put must not overtake a large one for ever
                if blocked or not self._is_below_max(size):
                    blocked = True
                    self._kept.append(item)
                    continue
            admitted.append(item)
        if blocked:
            # a batch must leave then, since only acknowledgements make room
            self._in_loop(self._on_blocked)
        if blocked and not self._blocked:
            _log.warning(
                "journal %s: puts wait, most of max_bytes (%d) belongs to rollouts that wait, or were not acknowledged",
                self._path,
                self._max_bytes,
            )
        self._blocked = blocked
        return admitted

    def _is_below_max(self, num_bytes: int) -> bool:
        """A quarter is left for what is written beside puts. Every byte is written to the log, then to the database."""
        if self._max_bytes is None:
            return True
        most = self._max_bytes * 3 // 4 - 2 * num_bytes
        # the log may hold what the database has let go of: only then is it known how large both are
        if self._store.total_bytes > most:
            with suppress(DiskFullError):
                self._store.checkpoint(vacuum_pages=2**30)
        return self._store.total_bytes <= most

    def _tidy(self) -> None:
        """Take the log over into the database, and give back what is free there; nobody waits for this."""
        store = self._store
        try:
            if self._broken is None and store.log_bytes > self._log_bytes:
                much = max(FREE_BYTES, store.total_bytes // 2)
                store.checkpoint(vacuum_pages=VACUUM_PAGES if store.free_bytes > much else 0)
        except DiskFullError:
            self._note_full(True)
        except Exception as error:  # noqa: BLE001 - as in _run
            # puts that max_bytes held back are in no transaction that would wake them
            kept = self._kept
            self._break(error, ())
            self._settle(kept)

    def _note_full(self, full: bool) -> None:
        if full and not self._full:
            _log.warning("journal %s: the disk is full; puts are refused until there is room", self._path)
        if self._full and not full:
            _log.warning("journal %s: there is room on the disk again", self._path)
        self._full = full

    def _break(self, error: Exception, items: Sequence[Writing]) -> None:
        if self._broken is None:
            # of whatever kind it is: those who put see an error of the disk
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            self._broken = JournalError(
                number,
                f"the journal {self._path} cannot be written any more ({error}): after a failed write nobody knows "
                "what is on the disk. Start the balancer again, with a disk that works",
            )
            _log.error("%s", self._broken, exc_info=error)
        for item in (*items, *self._kept):
            # The first error is the cause; what was refused before stays refused for its own reason.
            item.error = item.error or self._broken
        self._kept = []

    def _settle(self, items: Sequence[Writing]) -> None:
        """Wake whoever waits for these, in one go."""
        # At the end nobody is left waiting, not even for a disk that is full.
        kept = set() if self._refusing else set(map(id, self._kept))
        events = [item.settled for item in items if item.settled is not None and id(item) not in kept]
        if events:
            # One call into the loop for all of them: each would be a wake-up of it.
            self._in_loop(partial(_set_all, events))


def _set_all(events: Sequence[anyio.Event]) -> None:
    for event in events:
        event.set()
