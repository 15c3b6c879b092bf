"""The log: rows in an SQLite file, and the thread that writes them. The log does not know what a row means.

::

    event loop   enqueue(change)  enqueue(change)  ...          change.written() returns, or raises
                        |                |                                    ^
    thread              `----------------`--> one transaction, one fsync -----'

A row has a number, a key and bytes. A number is given once, so a transaction first adds all its rows and then deletes
numbers. Example: 64 puts wait while the disk syncs; the next transaction has the rows of all 64, and one fsync.

The file may be damaged, or come from elsewhere. The schema must be the one below, so no foreign trigger runs. An index
has each number and key a second time, to name a lost row. The write-ahead log is cut to zero bytes whenever it was
copied into the database, so bytes that SQLite rejects are a torn commit, or damage.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import queue
import resource
import shutil
import sqlite3
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from stream_balancer.errors import AlreadyInUseError, ClosedResourceError, JournalError, WireError, to_raise
from stream_balancer.host.records import FORMAT, Fact, HeldRollout, row_name, write_row
from stream_balancer.net.loops import in_loop

COMMIT_BYTES = 64 * 2**20  # Limit of one transaction: the first of many puts does not wait for the last.
WAL_BYTES = 32 * 2**20  # The thread copies a larger write-ahead log into the database.
RETRY_S = 0.5  # Seconds between attempts to write facts to a full disk.
PAGE_BYTES = 16384  # A rollout of 1,000 tokens touches few pages, and a small one writes few bytes.

_CLOSED = "the journal is closed, or not open yet: use `async with` on the balancer"
_RESERVED_BYTES = 4 * 2**20  # Room for plans and acknowledgements, which free more room.
_APPLICATION = int.from_bytes(b"SBJ1")
# As SQLite keeps it, with the first two words in capitals.
_TABLE = "CREATE TABLE rows (number integer primary key, key text, data blob)"
_INDEX = "CREATE INDEX keys on rows (key)"
_CREATE = f"""pragma page_size={PAGE_BYTES}; pragma journal_mode=wal; begin; {_TABLE}; {_INDEX};
    pragma application_id={_APPLICATION}; pragma user_version={FORMAT}; commit"""
_FORMAT = (_APPLICATION, FORMAT, _TABLE, _INDEX)
_PRAGMAS = (
    "trusted_schema=off",
    "cell_size_check=on",
    "locking_mode=exclusive",  # SQLite then needs no shared memory, which network file systems lack.
    "synchronous=full",
    "wal_autocheckpoint=0",  # The thread copies the log after it has woken the waiting puts.
    "secure_delete=off",  # Otherwise SQLite writes zeros over each deleted row.
)
# SQLite reports IOERR_WRITE for a quota and for a file size limit. A failed write commits nothing; a failed sync may.
_NO_ROOM = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR_WRITE: errno.EDQUOT}

Rows: TypeAlias = Sequence[Fact | HeldRollout]

_log = logging.getLogger("stream_balancer.journal")


@dataclass(slots=True, eq=False)
class Change:
    """Rows that one call adds and deletes, and the event that its caller waits for."""

    number: int = 0
    """Number of the first new row."""
    rows: Rows = ()
    """New rows. The thread encodes them."""
    gone: Sequence[int] = ()
    """Numbers of rows to delete."""
    is_put: bool = False
    """A full disk refuses a put. All other changes describe the past, and wait for room."""
    settled: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None

    async def written(self) -> None:
        """Return once this change and all earlier ones are on the disk. Waits while the disk is full.

        Raises JournalError if the disk fails or refused this put; ClosedResourceError if the journal was closed."""
        await self.settled.wait()
        if self.error is not None:
            raise to_raise(self.error)

    @property
    def nbytes(self) -> int:
        return sum(row.rollout.nbytes + 1024 for row in self.rows if isinstance(row, HeldRollout))


def no_room(error: Exception) -> int:
    """``errno`` of an error that says the disk takes no more bytes, after which nothing was written; otherwise 0."""
    number = getattr(error, "errno", None) or _NO_ROOM.get(getattr(error, "sqlite_errorcode", 0), 0)
    return number if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else 0


def _commit(db: sqlite3.Connection) -> None:
    """Make a transaction durable. Tests put a failing disk here."""
    db.execute("commit")


class Log:
    """Rows in ``journal.db`` of one folder. One process at a time opens it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path, self._wal_path = folder, folder / "journal.db", folder / "journal.db-wal"
        self.db: Any = None
        """The connection, while the log is open."""
        self.is_closed = True
        """A new change gets ClosedResourceError, and no change waits for a full disk."""
        self._lock_fd = -1
        self._queue = queue.SimpleQueue[Change]()
        self._thread = threading.Thread(target=self._run, name=f"sb-journal-{folder.name}", daemon=True)
        self._broken: Exception | None = None
        self._is_full = False
        _all.add(self)

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> tuple[int, list[str]]:
        """Take the lock and check the database. -> bytes of a torn commit, and a sentence if several commits are lost.

        Raises AlreadyInUseError, naming the process that has the lock; WireError for another version's journal; OSError
        or sqlite3.Error."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(self.folder)
        wal = self._wal_path.read_bytes() if self.wal_bytes else b""
        self.db = db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        db.text_factory = lambda data: data.decode(errors="replace")  # A checksum finds a damaged key.
        for pragma in _PRAGMAS:
            db.execute(f"pragma {pragma}").fetchall()
        # A crash tears one commit; two are damage. Bytes 4 to 8 of a frame are 0, except at the end of a commit.
        ((_, frames, _),) = db.execute("pragma wal_checkpoint(passive)")
        frame_bytes, size = 24 + self._number("page_size"), len(wal)
        accepted = min(32 + frames * frame_bytes, size) if frames > 0 else 0
        commits = sum(any(wal[at + 4 : at + 8]) for at in range(max(accepted, 32), size, frame_bytes))
        schema = db.execute("select sql from sqlite_master where sql is not null order by rowid")
        found = (self._number("application_id"), self._number("user_version"), *chain.from_iterable(schema))
        if found == (0, 0):
            db.executescript(_CREATE)
        # A foreign view or trigger would run with our statements.
        elif found != _FORMAT:
            raise WireError(
                f"{self._path} is no journal of format {FORMAT}, which this version reads: expected {_FORMAT}, found "
                f"{found}. Let the version that wrote it finish what it holds, put a copy of its folder in its place, "
                "or use another path"
            )
        # A page that points nowhere would end the reading, and the lost rows could not be named.
        ((check,),) = db.execute("pragma quick_check(1)")
        if check != "ok":
            raise sqlite3.DatabaseError(check)
        lost = [f"bytes {accepted} to {size} of {self._wal_path.name}: {commits} commits"] if commits > 1 else []
        return size - accepted, lost

    def repair(self, gone: Collection[int], *, is_damaged: bool) -> None:
        """Delete unusable rows after reading. First copy damaged files."""
        if is_damaged:
            kept = next(path for n in count(1) if not (path := self.folder / f"damaged-{n}.db").exists())
            shutil.copyfile(self._path, kept)
            if self.wal_bytes:
                shutil.copyfile(self._wal_path, f"{kept}-wal")
            # Otherwise an index that disagrees with its table would report the damage at every start.
            self.db.execute("reindex")
        self.commit([], gone)
        self.copy_wal()

    def start(self) -> None:
        """Begin to write. Called in the event loop that waits for changes."""
        self.is_closed, self._in_loop = False, in_loop()
        self._thread.start()

    def close(self) -> None:
        """Write all enqueued changes, end the thread, and release the lock. Blocks; idempotent.

        The event loop sets ``is_closed`` before, so that no change follows."""
        if self._thread.ident is not None:
            self._queue.put(Change())
            self._thread.join()
        if self.db is not None:
            with suppress(sqlite3.Error):
                self.db.close()
        # Another process may open the database only after it was closed.
        self.unlock()

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # -- transactions --------------------------------------------------------------------------------------------------

    def commit(self, rows: Sequence[tuple[int, str, bytes | bytearray]], gone: Collection[int] = ()) -> None:
        """Add rows and then delete numbers, in one durable transaction. Raises OSError or sqlite3.Error. Nothing was
        written if :func:`no_room` knows the error; otherwise the state of the disk is unknown."""
        with self.db:
            self.db.execute("begin immediate")
            self.db.executemany("insert into rows values (?,?,?)", rows)
            self.db.execute(f"delete from rows where number in ({','.join(map(str, gone))})")
            _commit(self.db)

    def copy_wal(self) -> None:
        """Copy the write-ahead log into the database, and cut the log to zero bytes. Raises like :meth:`commit`."""
        self.db.execute("pragma wal_checkpoint(truncate)").fetchall()

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log."""
        return self._wal_path.stat().st_size if self._wal_path.exists() else 0

    def _number(self, pragma: str) -> int:
        ((value,),) = self.db.execute(f"pragma {pragma}")
        return int(value)

    def _check_room(self, num_bytes: int, reserve: int) -> None:
        """Raise OSError unless the disk has room for ``num_bytes`` of rollouts and ``reserve`` bytes more. Each byte
        goes to the write-ahead log and later to the database, which uses its free pages first."""
        total, free = (PAGE_BYTES * self._number(pages) for pages in ("page_count", "freelist_count"))
        grows, disk, full = max(num_bytes - free, 0) + reserve, os.statvfs(self.folder), 0
        # f_bavail excludes the blocks that only root may use.
        if disk.f_bavail * disk.f_frsize < num_bytes + max(total - self._path.stat().st_size, 0) + grows:
            full = errno.ENOSPC
        # Without this check SQLite would report a quota. The limit is -1 if there is none.
        if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < max(total + grows, self.wal_bytes + num_bytes + reserve):
            full = errno.EFBIG
        if full:
            raise OSError(full, os.strerror(full))

    # -- changes -------------------------------------------------------------------------------------------------------

    def enqueue(self, change: Change) -> None:
        """Write a change after all earlier ones. Called in the event loop."""
        if self.is_closed:
            _settle([change], ClosedResourceError(_CLOSED))
        else:
            self._queue.put(change)

    def _run(self) -> None:
        changes: list[Change] = []
        while changes or not (self.is_closed and self._queue.empty()):
            num_bytes = 0
            with suppress(queue.Empty):
                changes.append(self._queue.get(timeout=RETRY_S if changes else None))
                while (num_bytes := num_bytes + changes[-1].nbytes) < COMMIT_BYTES:
                    changes.append(self._queue.get_nowait())
            for reserve in (_RESERVED_BYTES, 0):
                changes = changes and self._write(changes, num_bytes, reserve)
                num_bytes = 0

    def _write(self, changes: list[Change], num_bytes: int, reserve: int) -> list[Change]:
        """Write, sync, and wake the callers. -> changes that wait for room on the disk; puts do not wait but raise."""
        error = self._broken
        try:
            if error is None:
                self._commit(changes, num_bytes, reserve)
                self._note_full(not reserve)
            self._wake(changes, error)
            # The callers do not wait for this copy.
            changes = []
            if error is None and self.wal_bytes > WAL_BYTES:
                self.copy_wal()
        except Exception as cause:  # noqa: BLE001 - an unknown error means an unknown state of the disk
            if full := no_room(cause):
                self._note_full(True)
                text = f"the disk of the journal {self.folder} is full or takes nothing ({cause}): the rollout was not "
                error = JournalError(full, f"{text}accepted. Make room and put it again")
                self._wake([change for change in changes if change.is_put], error)
                changes = [change for change in changes if not change.is_put]
                if reserve or not self.is_closed:
                    return changes
                # A batch whose plan is not on the disk must not be handed out.
                error = ClosedResourceError(_CLOSED)
            else:
                error = self._broken = JournalError(
                    getattr(cause, "errno", None) or errno.EIO,
                    f"the journal {self.folder} cannot be written any more ({cause}): after a failed write the state "
                    "of the disk is unknown. Start the balancer again, with a disk that works",
                )
                _log.error("%s", error, exc_info=cause)
            self._wake(changes, error)
        return []

    def _commit(self, changes: Sequence[Change], num_bytes: int, reserve: int) -> None:
        try:
            self._check_room(num_bytes, reserve)
        except OSError:
            self.copy_wal()
            self._check_room(num_bytes, reserve)
        rows: list[tuple[int, str, bytearray]] = []
        for change in changes:
            try:
                rows += [
                    (n, row.key, write_row(row_name(n, row.key), [row]))
                    for n, row in enumerate(change.rows, change.number)
                ]
            except Exception as error:
                # A put is refused alone. Without a fact the rows would describe another past.
                if not change.is_put:
                    raise
                change.error = error
        gone = [number for change in changes for number in change.gone]
        if rows or gone:
            self.commit(rows, gone)

    def _note_full(self, is_full: bool) -> None:
        if is_full != self._is_full:
            text = (
                "the disk is full; puts are refused until there is room"
                if is_full
                else "there is room on the disk again"
            )
            _log.warning("journal %s: %s", self.folder, text)
        self._is_full = is_full

    def _wake(self, changes: Sequence[Change], error: Exception | None) -> None:
        self._in_loop(partial(_settle, changes, error))


def _settle(changes: Sequence[Change], error: Exception | None) -> None:
    for change in changes:
        change.error = change.error or error
        change.settled.set()


def _lock(folder: Path) -> int:
    """A descriptor that locks the folder until its last copy is closed. Raises AlreadyInUseError, naming the process
    that has the lock."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Not lockf(): a process that copies the folder closes a descriptor of the file, and would lose such a lock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyInUseError(
            f"the journal {folder} is in use by process {holder}. Two controllers on one journal would lose rollouts: "
            "end that one, or use another path"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


_all: weakref.WeakSet[Log] = weakref.WeakSet()


def _leave_in_child() -> None:
    """Release the locks in a forked child, which may outlive a killed controller. The connection is leaked: closing it
    would delete the controller's write-ahead log."""
    for log in list(_all):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(log.db))
        log.db = None
        log.unlock()


os.register_at_fork(after_in_child=_leave_in_child)
