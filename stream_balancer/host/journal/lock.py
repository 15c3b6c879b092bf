"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from stream_balancer.errors import AlreadyInUseError

__all__ = ["lock_folder"]


def lock_folder(folder: Path) -> int:
    """A descriptor that keeps others out until its last copy is closed, however its process ends.

    Raises AlreadyInUseError, naming the process that has it.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
            f"the journal {folder} is in use by process {holder}"
            + (" (this one). " if holder == str(os.getpid()) else ". ")
            + "Two controllers on one journal would lose rollouts: end that one, or use another path"
        ) from None
    return fd
