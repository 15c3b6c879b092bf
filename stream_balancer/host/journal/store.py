"""The journal's database: SQLite in a folder. Knows tables, transactions and disks, not what the rows mean.

One connection, and one thread at a time. The write-ahead log is always cut to nothing when it has been taken over into
the database, so what of it SQLite does not accept after a crash is a commit that was cut short, or damage. A database
is untrusted: nothing of it is run, its schema must be the one below, a value is not read if it claims to be larger than
the file. What it cannot give is named.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from stream_balancer.errors import JournalError
from stream_balancer.host.journal.changes import Statement
from stream_balancer.host.journal.lock import lock_folder
from stream_balancer.wire.codec import OtherFormatError

__all__ = ["SCHEMA", "DiskFullError", "Store", "execute"]

FORMAT = 1
"""Of the tables; of what is in a rollout's bytes the wire has its own."""
_APPLICATION = int.from_bytes(b"SBJ1")
SCHEMA = (
    "create table rollouts"
    " (number integer primary key, id text, arrived_at real, step integer, data blob, crc integer)",
    "create index ids on rollouts (id)",  # holds ids and numbers a second time: what is lost can be named
    "create table facts (kind text, key integer, data blob, crc integer, primary key (kind, key)) without rowid",
)
RESERVED_BYTES = 4 * 2**20  # of the disk, for plans and acknowledgements: these make room
PAGE_BYTES = 16384  # a rollout of 1,000 tokens touches few pages, a small one writes few bytes
_PRAGMAS = (
    "trusted_schema=off",
    "cell_size_check=on",
    "locking_mode=exclusive",  # no shared memory, which network file systems have not
    "synchronous=full",
    "wal_autocheckpoint=0",  # at a time of our choice: after those who wait have been woken
    "secure_delete=off",  # would write what is done a second time, as zeros
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FAILED_WRITES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter: SQLite's message quotes a damaged name that is no text
_MAX_VALUE_BYTES = 10**9  # SQLite's default
_MAX_VARIABLES = 999  # SQLite's default before 3.32


class DiskFullError(JournalError):
    """There is no room; what was to be written was not."""


def _commit(db: sqlite3.Connection) -> None:
    """The one place where a transaction becomes durable; named so that tests can put failing disks in its place."""
    db.execute("commit")


def execute(db: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
    """A :data:`Statement`. Many rows at a time: between two calls another thread may take its turn, of milliseconds."""
    width = len(rows[0]) if rows else 1
    most, marks = _MAX_VARIABLES // width, f"({','.join('?' * width)})"
    for first in range(0, len(rows), most):
        some = rows[first : first + most]
        db.execute(sql.replace("?", ",".join([marks] * len(some))), [value for row in some for value in row])


class Store:
    """Rows in ``journal.db`` of one folder, opened by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torn_bytes = 0
        """Of the commit that a crash cut short; after :meth:`open`."""
        self.damage: list[str] = []
        """What could not be read, a sentence each."""
        self._db: sqlite3.Connection | None = None
        self._lock_fd = -1

    # -- in and out ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, and look what is there. Raises AlreadyInUseError, naming the process that has it;
        OtherFormatError for another version's journal, JournalError where nothing can be read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        self._lock_fd = lock_folder(self.folder)
        _open_here.add(self)
        try:
            self._refuse_segments()
            self.connect("journal.db")
        except BaseException:
            self.close()
            raise

    def connect(self, name: str) -> None:
        """Open a database of this name, or make it."""
        self.path, self._log_path = self.folder / name, self.folder / f"{name}-wal"
        self.damage, self.torn_bytes = [], 0
        log_bytes = self.log_bytes
        try:
            self._db = db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=0)
            db.text_factory = _as_text
            with self._raised_as_full(0):
                for pragma in _PRAGMAS:
                    db.execute(f"pragma {pragma}").fetchall()
                self._check_log(log_bytes)
                self._check(log_bytes)
        except _UNREADABLE as error:
            raise JournalError(
                errno.EIO,
                f"{self.path} cannot be read ({error}). Nothing in it was changed. `sqlite3 {self.path} .recover` may "
                "give its rows back; to start without them, use another path",
            ) from error

    def close(self) -> None:
        """Release everything; in a forked child, only the lock. Idempotent."""
        self._disconnect()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
        _open_here.discard(self)

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection."""
        assert self._db is not None
        return self._db

    def _refuse_segments(self) -> None:
        segments = sorted(path.name for path in self.folder.glob("*.journal") if path.stem.isdecimal())
        if segments:
            raise OtherFormatError(
                f"the journal {self.folder} has {segments[0]}, of a stream_balancer that wrote its own files. Let that "
                "version finish what it holds, or use another path"
            )

    def _check(self, log_bytes: int) -> None:
        """Refuse what is not a journal of this version; make the tables where there is nothing."""
        size = max(self.path.stat().st_size + log_bytes, 2**20)
        self.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(size, _MAX_VALUE_BYTES))
        application, version = (self._number(f"pragma {name}") for name in ("application_id", "user_version"))
        if (application, version) == (0, 0) and not _schema_of(self.db):
            self._create()
        elif application != _APPLICATION:
            raise OtherFormatError(f"{self.path} is not a stream_balancer's journal. Use another path")
        elif version != FORMAT:
            raise OtherFormatError(
                f"{self.path} was written in format {version}, and this version reads {FORMAT}. Let the version that "
                "wrote it finish what it holds, or use another path"
            )
        elif _schema_of(self.db) != _expected_schema():
            raise sqlite3.DatabaseError("its tables are not those of a journal")
        elif self.db.execute("pragma quick_check(1)").fetchall() != [("ok",)]:
            self.damage.append(f"{self.path.name}: pages of the database")

    def _create(self) -> None:
        for pragma in (f"page_size={PAGE_BYTES}", "auto_vacuum=incremental", "journal_mode=wal"):
            self.db.execute(f"pragma {pragma}").fetchall()
        self.db.execute("begin immediate")
        for sql in (*SCHEMA, f"pragma application_id={_APPLICATION}", f"pragma user_version={FORMAT}"):
            self.db.execute(sql)
        _commit(self.db)
        self.checkpoint()
        self._sync_folder()

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # some file systems cannot, and need not
                os.fsync(fd)
        finally:
            os.close(fd)

    def _check_log(self, size: int) -> None:
        """What SQLite does not accept of the write-ahead log. More than one commit: a crash does not look so."""
        ((_, frames, _),) = self.db.execute("pragma wal_checkpoint(passive)").fetchall()
        frame_bytes = 24 + self._number("pragma page_size")
        accepted = 32 + frames * frame_bytes if frames > 0 else 0
        self.torn_bytes = max(size - accepted, 0)
        if not self.torn_bytes:
            return
        commits = 0
        with self._log_path.open("rb") as log:
            for at in range(max(accepted, 32), size, frame_bytes):
                log.seek(at + 4)
                commits += any(log.read(4))  # pages of the database after a commit; 0 in its other frames
        if commits > 1:
            self.damage.append(f"bytes {accepted} to {size} of {self._log_path.name}: {commits} commits")

    # -- reading -------------------------------------------------------------------------------------------------------

    def rollouts(self) -> Iterator[tuple[Any, ...]]:
        """Every row of a rollout that can be reached, untrusted; the oldest first, what lies behind damage last."""
        names = dict(self._reached("select number, id from rollouts indexed by ids order by id {0}, number {0}"))
        for row in self._reached("select * from rollouts order by number {0}"):
            name = names.pop(row[0], row[1])
            if name != row[1]:
                self.damage.append(f"row {row[0]}: rollout {name!r} in the index, {row[1]!r} in the row")
            yield row
        self.damage += [f"row {number}: rollout {name!r} cannot be reached" for number, name in names.items()]

    def facts(self) -> Iterator[tuple[Any, ...]]:
        """Every other row that can be reached, untrusted; by kind and key."""
        yield from self._reached("select * from facts order by kind {0}, key {0}")

    def _reached(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """From the first row to the first damage; then from the last."""
        seen = set()
        # A damaged page ends a scan; what lies behind it is reached from the other end.
        for order in ("asc", "desc"):
            try:
                for row in self.db.execute(sql.format(order)):
                    if row[:2] in seen:
                        return
                    seen.add(row[:2])
                    yield row
                return
            except _UNREADABLE as error:
                self.damage.append(f"{sql.split()[3]} in {self.path.name}: {error}")

    def _number(self, sql: str) -> int:
        ((value,),) = self.db.execute(sql).fetchall()
        return int(value)

    def begin(self) -> None:
        """All is read; what may be written is not bounded by what was there. Raises like :meth:`checkpoint`."""
        self.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self.checkpoint()

    # -- writing -------------------------------------------------------------------------------------------------------

    def commit(self, statements: Sequence[Statement]) -> None:
        """Execute in this order, durably, all or none. Raises DiskFullError: then nothing was written; or OSError: then
        nobody knows, and nothing more may be written."""
        db = self.db
        num_bytes = sum(len(v) for _, rows in statements for row in rows for v in row if type(v) is bytes)
        with self._raised_as_full(num_bytes):
            try:
                db.execute("begin immediate")
                # Neighbours with the same SQL become one statement of many rows, in the order in which they came.
                for sql, same in groupby(statements, itemgetter(0)):
                    execute(db, sql, [row for _, rows in same for row in rows])
                _commit(db)
            except BaseException:
                with suppress(sqlite3.Error):
                    db.rollback()
                raise

    def checkpoint(self, vacuum_pages: int = 0) -> None:
        """Take the write-ahead log over into the database, and cut it to nothing; give so many free pages back to the
        file system. Raises like :meth:`commit`."""
        with self._raised_as_full(self.log_bytes):
            if vacuum_pages:
                self.db.execute(f"pragma incremental_vacuum({vacuum_pages})").fetchall()
            self.db.execute("pragma wal_checkpoint(truncate)").fetchall()

    @property
    def log_bytes(self) -> int:
        """Of the write-ahead log."""
        try:
            return self._log_path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def free_bytes(self) -> int:
        """Of pages of the database that hold nothing."""
        return self._number("pragma freelist_count") * PAGE_BYTES

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk takes so many bytes of rollouts, and then what is written beside them. Every byte goes to
        the log and, when that is taken over, to the database, where it first takes the pages that hold nothing."""
        disk = os.statvfs(self.folder)
        grows = self._number("pragma page_count") * PAGE_BYTES - self.path.stat().st_size
        needed = num_bytes + max(grows, 0) + max(num_bytes - self.free_bytes, 0) + RESERVED_BYTES
        return disk.f_bavail * disk.f_frsize >= needed

    @property
    def total_bytes(self) -> int:
        """Of the folder, once the log is taken over; and the log."""
        return self._number("pragma page_count") * PAGE_BYTES + self.log_bytes

    def replace(self, statements: Iterable[Sequence[Statement]]) -> None:
        """Write all this, a commit each, into a new database that takes the place of this one, which is kept under
        another name: what is damaged is not written to, and ``sqlite3 damaged-1.db .recover`` may find more. Raises
        like :meth:`commit`; this one is still there then."""
        for leftover in self.folder.glob("rebuilt.db*"):
            leftover.unlink()
        new = Store(self.folder)
        try:
            new.connect("rebuilt.db")
            new.begin()
            for some in statements:
                new.commit(some)
            new.checkpoint()
        finally:
            new.close()
        kept = next(path for n in count(1) if not (path := self.folder / f"damaged-{n}.db").exists())
        # Links, not renames: at every moment there is a database under the usual name, the old one or the new.
        os.link(self.path, kept)
        if self.log_bytes:
            os.link(self._log_path, f"{kept}-wal")
        self._disconnect()
        self._log_path.unlink(missing_ok=True)  # it is not the new one's
        os.replace(new.path, self.path)
        self._sync_folder()
        self.connect(self.path.name)

    @contextmanager
    def _raised_as_full(self, num_bytes: int) -> Iterator[None]:
        """Out of space, out of quota, above the file size limit: DiskFullError. Other errors pass."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) not in _FAILED_WRITES:
                raise
            full = self._refused(num_bytes) or (errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else 0)
            if full not in _FULL:
                raise
            raise self.full(full) from None

    def full(self, number: int = errno.ENOSPC) -> DiskFullError:
        """The error of a put that this disk has no room for."""
        return DiskFullError(
            number,
            f"the disk of the journal {self.folder} is full ({os.strerror(number)}): the rollout was not accepted. "
            "Make room and put it again",
        )

    def _refused(self, num_bytes: int) -> int:
        """What the operating system says to so many bytes more, which SQLite does not pass on; 0: nothing."""
        probe = self.folder / "probe"
        try:
            with probe.open("wb") as file:
                os.posix_fallocate(file.fileno(), max(self.log_bytes, self.path.stat().st_size), num_bytes + PAGE_BYTES)
        except OSError as error:
            return error.errno or 0
        finally:
            probe.unlink(missing_ok=True)
        return 0


def _schema_of(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    return db.execute("select type, name, tbl_name, sql from sqlite_master order by name").fetchall()


def _expected_schema() -> list[tuple[Any, ...]]:
    db = sqlite3.connect(":memory:")
    for sql in SCHEMA:
        db.execute(sql)
    expected = _schema_of(db)
    db.close()
    return expected


def _as_text(data: bytes) -> str:
    return data.decode(errors="replace")  # the checksum finds what is no text


_open_here: weakref.WeakSet[Store] = weakref.WeakSet()


def _leave_in_child() -> None:
    """A forked child must not hold the lock of a controller that dies. Nor may it close the database, at its end for
    instance: that would take the write-ahead log away from the controller."""
    for store in list(_open_here):
        if store._db is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._db))
            store._db = None
        store.close()


os.register_at_fork(after_in_child=_leave_in_child)
