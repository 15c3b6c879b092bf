"""The journal's thread: what is enqueued in the event loop, onto the disk.

All that waits goes into one transaction, and whoever waits for it is woken together. The queue is what both threads
touch, under its lock; everything else belongs to one of them.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import anyio

from stream_balancer.errors import ClosedResourceError, JournalError, to_raise
from stream_balancer.host.journal.store import DiskFullError, Statement, Store, add, remove, retract
from stream_balancer.host.records import Fact, HeldRollout, row_name, write_row
from stream_balancer.net.loops import in_loop

COMMIT_BYTES = 64 * 2**20  # most that is written together
LOG_BYTES = 32 * 2**20  # of the write-ahead log before it is taken over
RETRY_S = 0.5  # how often to try again on a full disk, if nothing else happens

CLOSED = "the journal is closed, or not open yet: use `async with` on the balancer"

_log = logging.getLogger("stream_balancer.journal")


@dataclass(slots=True, eq=False)
class Writing:
    """Changes to be written together, and the tasks that wait for them and for all before."""

    rows: Sequence[HeldRollout | Fact] = ()
    """New rows, each fact in place of the one with its key. They become bytes in the thread."""
    void: Sequence[str] = ()
    """Keys of rows that hold no more."""
    retracted: range = range(0)
    """Numbers of rows that hold no more, whatever others of the same key do."""
    may_be_refused: bool = False
    """A put; all else describes what has happened."""
    number: int = 0
    """Number of the first new row."""
    settled: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None

    async def written(self) -> None:
        """Return once they are on the disk; waits while that is full. Raises JournalError if it is failing, or has
        refused a put; ClosedResourceError if it is full and the journal is closed."""
        await self.settled.wait()
        if self.error is not None:
            raise to_raise(self.error)

    @property
    def nbytes(self) -> int:
        return sum(one.rollout.nbytes + 1024 for one in self.rows if isinstance(one, HeldRollout))

    def statements(self) -> list[Statement]:
        """Statements that make the changes; none, and the ``error``, for a put whose rollouts cannot be written."""
        numbered = enumerate(self.rows, self.number)
        try:
            rows = [(number, one.key, write_row(row_name(number, one.key), [one])) for number, one in numbered]
        except Exception as error:
            # what has happened cannot be refused: a journal without it would say something else
            if not self.may_be_refused:
                raise
            self.error = error  # and the journal goes on
            return []
        facts = [one.key for one in self.rows if not isinstance(one, HeldRollout)]
        made = [remove([*self.void, *facts]), retract(self.retracted), add(rows)]
        return [(sql, values) for sql, values in made if values]


class Writer:
    """Writes one journal, from :meth:`start` to :meth:`close`. Made in the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queued = threading.Condition()
        self._queue: deque[Writing] = deque()  # guarded by _queued
        self.leaving = self._closing = False
        """The end is near: who waits for a full disk gets ClosedResourceError."""
        # the event loop's own
        self._in_loop, self._waking = in_loop(), False
        # the thread's own
        self._kept: list[Writing] = []  # there was no room for these
        self._full = False
        self._broken: JournalError | None = None
        self._thread = threading.Thread(target=self._run, name=f"sb-journal-{store.folder.name}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

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
                self._break(error)
            # Woken before the log is taken over: nobody has to wait for that.
            self._settle(items)
            try:
                if self._broken is None and self._store.log_bytes > LOG_BYTES:
                    self._store.checkpoint()
            except DiskFullError:
                self._note_full(True)
            except Exception as error:  # noqa: BLE001 - as above
                self._break(error)

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
            while self._queue and size < COMMIT_BYTES:
                items.append(self._queue.popleft())
                size += items[-1].nbytes
        return items

    def _write(self, items: Sequence[Writing]) -> None:
        """Write and sync. Puts that there is no room for are refused, all else is kept."""
        if self._broken is not None:
            raise self._broken
        try:
            # Before rollouts fill the disk: plans and acknowledgements, which make room, need some. Without rollouts,
            # too: else what makes room would fill the log, and with it what is in reserve.
            num_bytes = sum(item.nbytes for item in items)
            try:
                self._store.check_room(num_bytes)
            except DiskFullError:
                with suppress(DiskFullError):
                    self._store.checkpoint()
                self._store.check_room(num_bytes)
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
                self._kept = rest

    def _commit(self, items: Sequence[Writing]) -> None:
        if statements := [one for item in items for one in item.statements()]:
            self._store.commit(statements)

    def _note_full(self, full: bool) -> None:
        if full != self._full:
            full_text = "the disk is full; puts are refused until there is room"
            _log.warning("journal %s: %s", self._store.folder, full_text if full else "there is room on the disk again")
        self._full = full

    def _break(self, error: Exception) -> None:
        if self._broken is None:
            # of whatever kind it is: those who put see an error of the disk
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            self._broken = JournalError(
                number,
                f"the journal {self._store.folder} cannot be written any more ({error}): after a failed write nobody "
                "knows what is on the disk. Start the balancer again, with a disk that works",
            )
            _log.error("%s", self._broken, exc_info=error)

    def _settle(self, items: Sequence[Writing]) -> None:
        """Wake whoever waits for these, in one go."""
        for item in items:
            # the first error is the cause: what was refused before stays refused for its own reason
            item.error = item.error or self._broken
        kept = set(self._kept)
        if self.leaving:
            # nobody waits for a full disk any more, and a batch whose plan is not on it must not be handed out
            for item in kept:
                item.error = ClosedResourceError(CLOSED)
            kept = set()
        # One call into the loop for all of them: each would be a wake-up of it.
        self._in_loop(partial(_set_all, [item.settled for item in items if item not in kept]))


def _set_all(events: Sequence[anyio.Event]) -> None:
    for event in events:
        event.set()
