"""The journal's database: SQLite in a folder. Knows a table of rows, transactions and disks, not what the rows mean.

One process, one connection, and one thread at a time. The write-ahead log is always cut to nothing when it has been
taken over into the database, so what of it SQLite does not accept after a crash is a commit that was cut short, or
damage. A database is untrusted: nothing of it is run, its schema must be the one below, a value is not read if it
claims to be larger than the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from stream_balancer.errors import AlreadyInUseError, JournalError, WireError
from stream_balancer.host.records import FORMAT

_APPLICATION = int.from_bytes(b"SBJ1")
# As SQLite keeps it, with the first two words in capitals.
_SCHEMA = (
    "CREATE TABLE rows (number integer primary key, key text, data blob)",
    "CREATE INDEX keys on rows (key)",  # holds keys and numbers a second time: what is lost can be named
)
_RESERVED_BYTES = 4 * 2**20  # of the disk, for plans and acknowledgements: these make room
PAGE_BYTES = 16384  # a rollout of 1,000 tokens touches few pages, a small one writes few bytes
_PRAGMAS = (
    "trusted_schema=off",
    "cell_size_check=on",
    "locking_mode=exclusive",  # no shared memory, which network file systems have not
    "synchronous=full",
    "wal_autocheckpoint=0",  # at a time of our choice: after those who wait have been woken
    "secure_delete=off",  # would write what is done a second time, as zeros
)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# SQLite says the latter of every write that failed for another cause than a full disk: a quota, a file size limit.
# Nothing was committed then, as is not certain of a sync that failed.
_NOT_WRITTEN = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR_WRITE: errno.EDQUOT}
_MAX_VALUE_BYTES = 10**9  # SQLite's default
_MAX_VARIABLES = 999  # SQLite's default before 3.32

Row: TypeAlias = tuple[int, str, bytes | bytearray]
"""Number, key, data."""
Statement: TypeAlias = tuple[str, Sequence[Sequence[Any]]]
"""SQL in which ``?`` stands for ``(?, ...), (?, ...), ...``, and these rows. It may be executed in parts."""


def add(rows: Sequence[Row]) -> Statement:
    """New rows."""
    return "insert into rows values ?", rows


def remove(keys: Iterable[str]) -> Statement:
    """Rows of these keys hold no more."""
    return "delete from rows where key in (values ?)", [(key,) for key in keys]


def retract(numbers: Iterable[int]) -> Statement:
    """Rows of these numbers hold no more, whatever others of the same key do."""
    return "delete from rows where number in (values ?)", [(number,) for number in numbers]


class DiskFullError(JournalError):
    """There is no room; what was to be written was not."""


def _commit(db: sqlite3.Connection) -> None:
    """The one place where a transaction becomes durable; named so that tests can put failing disks in its place."""
    db.execute("commit")


class Store:
    """Rows in ``journal.db`` of one folder, opened by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.torn_bytes = 0
        """Bytes of the commit that a crash cut short; after :meth:`open`."""
        self.lost_commits = ""
        """More than that which is damaged in the write-ahead log, a sentence; after :meth:`open`."""
        self.db: Any = None
        """The connection, while it is open."""
        self._lock_fd = -1

    # -- in and out ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, and look what is there. Raises AlreadyInUseError, naming the process that has it; WireError
        for another version's journal, JournalError where something cannot be read."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self.folder)
        except OSError as error:
            what = f"the journal {self.folder} cannot be opened: {error.strerror}. Give a folder that can be written"
            raise JournalError(error.errno, what) from None
        self.folder = self.folder.resolve()
        self._path, self._log_path = self.folder / "journal.db", self.folder / "journal.db-wal"
        _open_here.add(self)
        try:
            with self._reading(), self._writing():
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        log_bytes = self.log_bytes
        self.db = db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        db.text_factory = lambda data: data.decode(errors="replace")  # checksums find what is no text
        for pragma in _PRAGMAS:
            db.execute(f"pragma {pragma}").fetchall()
        self._check_log(log_bytes)
        size = max(self._path.stat().st_size + log_bytes, 2**20)
        # a damaged length would have SQLite ask for a gigabyte
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(size, _MAX_VALUE_BYTES))
        schema = [sql for (sql,) in db.execute("select sql from sqlite_master where sql is not null order by rowid")]
        application, version = self._number("application_id"), self._number("user_version")
        if (application, version, schema) == (0, 0, []):
            self._create(db)
        elif application != _APPLICATION:
            raise WireError(f"{self._path} is not a stream_balancer's journal. Use another path")
        elif version != FORMAT:
            raise WireError(
                f"{self._path} was written in format {version}, and this version reads {FORMAT}. Let the version that "
                "wrote it finish what it holds, or use another path"
            )
        # a view or trigger in a database from elsewhere would run with our statements
        elif schema != [*_SCHEMA]:
            raise sqlite3.DatabaseError("its tables are not those of a journal")
        # pages that point nowhere end the whole reading: which rows are lost could not be said
        elif (found := db.execute("pragma quick_check(1)").fetchone()) != ("ok",):
            raise sqlite3.DatabaseError(found[0])

    def _create(self, db: sqlite3.Connection) -> None:
        for pragma in (f"page_size={PAGE_BYTES}", "journal_mode=wal"):
            db.execute(f"pragma {pragma}").fetchall()
        db.execute("begin immediate")
        for sql in (*_SCHEMA, f"pragma application_id={_APPLICATION}", f"pragma user_version={FORMAT}"):
            db.execute(sql)
        _commit(db)
        self.checkpoint()
        fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        with suppress(OSError):  # some file systems cannot, and need not
            # the name of the database is in the folder, which has to reach the disk, too
            os.fsync(fd)
        os.close(fd)

    def close(self) -> None:
        """Release everything; in a forked child, only the lock. Idempotent."""
        db, self.db = self.db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()
        # last: until here nobody else may open the database
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
        _open_here.discard(self)

    def _check_log(self, size: int) -> None:
        """Bytes that SQLite does not accept of the write-ahead log. More than one commit: a crash does not look so."""
        ((_, frames, _),) = self.db.execute("pragma wal_checkpoint(passive)").fetchall()
        frame_bytes = 24 + self._number("page_size")
        accepted = 32 + frames * frame_bytes if frames > 0 else 0
        self.torn_bytes, self.lost_commits, commits = max(size - accepted, 0), "", 0
        if not self.torn_bytes:
            return
        with self._log_path.open("rb") as log:
            for at in range(max(accepted, 32), size, frame_bytes):
                log.seek(at + 4)
                commits += any(log.read(4))  # pages of the database after a commit; 0 in its other frames
        if commits > 1:
            self.lost_commits = f"bytes {accepted} to {size} of {self._log_path.name}: {commits} commits"

    # -- reading -------------------------------------------------------------------------------------------------------

    def rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Rows that a query finds, untrusted. Raises JournalError where the database cannot be read."""
        with self._reading():
            yield from self.db.execute(sql)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Errors of SQLite have the path and the way out."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: the message quotes what is no text
            raise JournalError(
                errno.EIO,
                f"{self._path} cannot be read ({error}). Nothing in it was changed. Put a copy of its folder in its "
                "place; or, to start without what it holds, use another path: producers put again what waited",
            ) from error

    def _number(self, pragma: str) -> int:
        ((value,),) = self.db.execute(f"pragma {pragma}").fetchall()
        return int(value)

    def begin(self, damaged: Sequence[Statement] = ()) -> None:
        """All is read. ``damaged`` takes away rows that cannot be used; the files as they were are kept then, also
        where commits are lost. Raises like :meth:`commit`."""
        self.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        with self._writing():
            if damaged or self.lost_commits:
                kept = next(path for n in count(1) if not (path := self.folder / f"damaged-{n}.db").exists())
                # before anything changes: somebody may want to look for the rest by hand
                shutil.copyfile(self._path, kept)
                if self.log_bytes:
                    shutil.copyfile(self._log_path, f"{kept}-wal")
                # an index that disagrees with its table would name damage again at every start
                self.db.execute("reindex")
                self.commit(damaged)
        self.checkpoint()

    # -- writing -------------------------------------------------------------------------------------------------------

    def commit(self, statements: Iterable[Statement]) -> None:
        """Execute in this order, durably, all or none. Raises DiskFullError: then nothing was written; or OSError or
        sqlite3.Error: then nobody knows, and nothing more may be written."""
        with self._writing():
            try:
                self.db.execute("begin immediate")
                # Neighbours with the same SQL become one statement of many rows, in the order in which they came.
                for sql, same in groupby(statements, itemgetter(0)):
                    self._execute(sql, [row for _, rows in same for row in rows])
                _commit(self.db)
            except BaseException:
                with suppress(sqlite3.Error):
                    self.db.rollback()
                raise

    def _execute(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        # Many rows at a time: between two calls another thread may take its turn, of milliseconds.
        width = len(rows[0]) if rows else 1
        most, marks = _MAX_VARIABLES // width, f"({','.join('?' * width)})"
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            self.db.execute(sql.replace("?", ",".join([marks] * len(some))), [value for row in some for value in row])

    def checkpoint(self) -> None:
        """Take the write-ahead log over into the database, and cut it to nothing. Raises like :meth:`commit`."""
        with self._writing():
            self.db.execute("pragma wal_checkpoint(truncate)").fetchall()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Out of space, above a quota or the file size limit: DiskFullError. Other errors pass."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            # an error that Python's module raises by itself has no code
            code = getattr(error, "sqlite_errorcode", 0)
            number = error.errno if isinstance(error, OSError) else _NOT_WRITTEN.get(code)
            if number not in _NO_ROOM:
                raise
            raise self._full(number, error) from None

    def _full(self, number: int, cause: object) -> DiskFullError:
        return DiskFullError(
            number,
            f"the disk of the journal {self.folder} is full or takes nothing ({cause}): the rollout was not accepted. "
            "Make room and put it again",
        )

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def log_bytes(self) -> int:
        """Size of the write-ahead log."""
        return self._log_path.stat().st_size if self._log_path.exists() else 0

    @property
    def total_bytes(self) -> int:
        """Size of the database, once the log is taken over."""
        return self._number("page_count") * PAGE_BYTES

    def check_room(self, num_bytes: int) -> None:
        """Raise DiskFullError unless the disk takes so many bytes of rollouts, and then what is written beside them.
        Every byte goes to the log and, when that is taken over, to the database, where it first takes the pages that
        hold nothing."""
        total, log_bytes = self.total_bytes, self.log_bytes
        grows = max(num_bytes - self._number("freelist_count") * PAGE_BYTES, 0) + _RESERVED_BYTES
        # asked before: SQLite could not say that it was this limit
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and max(total + grows, log_bytes + num_bytes + _RESERVED_BYTES) > limit:
            raise self._full(errno.EFBIG, os.strerror(errno.EFBIG))
        # f_bavail, not f_bfree: the rest is for root
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < num_bytes + max(total - self._path.stat().st_size, 0) + grows:
            raise self._full(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(folder: Path) -> int:
    """A descriptor that keeps other processes out until its last copy is closed, however its process ends. Raises
    AlreadyInUseError, naming the process that has it."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # not lockf(): such a lock goes when its process closes any descriptor of the file, after copying the folder
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyInUseError(
            f"the journal {folder} is in use by process {holder}. Two controllers on one journal would lose rollouts: "
            "end that one, or use another path"
        ) from None
    # the name of a holder that died is still in it
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


_open_here: weakref.WeakSet[Store] = weakref.WeakSet()


def _leave_in_child() -> None:
    """A forked child must not hold the lock of a controller that dies. Nor may it close the database, at its end for
    instance: that would take the write-ahead log away from the controller."""
    for store in list(_open_here):
        if store.db is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store.db))
            store.db = None
        store.close()


os.register_at_fork(after_in_child=_leave_in_child)
