"""The journal's folder: numbered files that are only ever appended to, and a lock.

Knows bytes, records and disks, not what the records mean. One thread at a time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from stream_balancer.controller.journal.records import MAGIC, Found, read
from stream_balancer.errors import AlreadyInUseError, JournalError

__all__ = ["Damage", "DiskFullError", "Segments"]

_SUFFIX = ".journal"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_write = os.write  # named here so that tests can put failing disks in their place
_sync = getattr(os, "fdatasync", os.fsync)
_open_here: weakref.WeakSet[Segments] = weakref.WeakSet()


class DiskFullError(JournalError):
    """There is no room; what was to be written was not."""


class Damage(NamedTuple):
    """Bytes of a segment that are not a record."""

    segment: int
    start: int
    stop: int
    torn: bool
    """Nothing valid follows in the last segment: an append that a crash cut short."""


class Segments:
    """Append-only files ``00000001.journal, 00000002.journal, ...`` in one folder, opened by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[int, int] = {}
        """Bytes by number, oldest first; the last one is appended to."""
        self._fd = -1
        self._lock_fd = -1

    # -- in and out ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock and look what is there. Raises AlreadyInUseError, naming the process that has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        self._lock()
        try:
            numbers = sorted(int(path.stem) for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())
            self.sizes = {number: self._path(number).stat().st_size for number in numbers}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything; in a forked child, only its copies. Idempotent."""
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)  # the lock goes with the last copy of its descriptor
        _open_here.discard(self)

    def _lock(self) -> None:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # not lockf(): such a lock goes when its process closes any descriptor of the file, after copying the folder
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError as error:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise AlreadyInUseError(
                f"the journal {self.folder} is in use by process {holder}"
                + (" (this one). " if holder == str(os.getpid()) else ". ")
                + "Two controllers on one journal would lose rollouts: end that one, or use another path"
            ) from None
        self._lock_fd = fd
        _open_here.add(self)

    # -- reading -------------------------------------------------------------------------------------------------------

    def scan(self, number: int) -> Iterator[tuple[int, Found] | Damage]:
        """Every undamaged record with its offset, and every stretch between that is none. O(bytes).

        Records are views of the file.
        """
        size = self.sizes[number]
        if not size:
            return
        salt, last = salt_of(number), number == self.last
        mapped = self.mapped(number)
        data = memoryview(mapped)
        at = bad = 0
        while at < size:
            found = read(salt, data, at)
            if found is None:
                at = mapped.find(MAGIC, at + 1)
                at = size if at < 0 else at
                continue
            if bad < at:
                yield Damage(number, bad, at, torn=False)
            yield at, found
            at = bad = at + found.size
        if bad < size:
            yield Damage(number, bad, size, torn=last)

    def mapped(self, number: int) -> mmap.mmap:
        """The bytes of a segment that has some; the mapping goes with the last view of it."""
        with open(self._path(number), "rb") as file:
            return mmap.mmap(file.fileno(), self.sizes[number], access=mmap.ACCESS_READ)

    def read(self, number: int, at: int, size: int) -> bytes:
        """The bytes of a record that :meth:`scan` or :meth:`append` gave the place of."""
        fd = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, at)
        finally:
            os.close(fd)

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """Number of the segment that is appended to."""
        return next(reversed(self.sizes))

    @property
    def first(self) -> int:
        """Number of the oldest segment."""
        return next(iter(self.sizes))

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.sizes.values())

    def begin(self) -> int:
        """Start a new segment; its number. Raises DiskFullError, changing nothing."""
        number = self.last + 1 if self.sizes else 1
        with _told_as_full(self.folder):
            fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self.sizes[number] = 0
        self._sync_folder()
        return number

    def append(self, pieces: Sequence[memoryview | bytes]) -> int:
        """Write at the end and make it durable; the offset. Raises DiskFullError: then nothing was written; or OSError:
        then nobody knows, and nothing more may be written."""
        number = self.last
        start = self.sizes[number]
        data = memoryview(b"".join(pieces))
        try:
            with _told_as_full(self.folder):
                written = 0
                while written < len(data):
                    written += _write(self._fd, data[written:])
        except DiskFullError:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise
        _sync(self._fd)
        self.sizes[number] = start + len(data)
        return start

    def drop_first(self) -> None:
        """Delete the oldest segment, durably, so that a later one never goes before it."""
        self._path(self.first).unlink(missing_ok=True)
        del self.sizes[self.first]
        self._sync_folder()

    def cut(self, damage: Damage) -> None:
        """Take a torn tail off."""
        fd = os.open(self._path(damage.segment), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, damage.start)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.sizes[damage.segment] = damage.start

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}{_SUFFIX}"

    def _sync_folder(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # some file systems cannot, and need not
                os.fsync(fd)
        finally:
            os.close(fd)


def _close_in_child() -> None:
    """A forked child must not hold the lock of a controller that dies."""
    for segments in list(_open_here):
        with suppress(OSError):
            segments.close()


os.register_at_fork(after_in_child=_close_in_child)


def salt_of(number: int) -> int:
    """What the checksums of a segment start from."""
    return zlib.crc32(number.to_bytes(8, "little"))


@contextmanager
def _told_as_full(folder: Path) -> Iterator[None]:
    """Out of space, out of quota, above the file size limit: DiskFullError. Other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(
            error.errno,
            f"the disk of the journal {folder} is full ({error.strerror}): the rollout was not accepted. Make room and "
            "put it again",
        ) from None
