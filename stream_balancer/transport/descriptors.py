"""What a forked child must not keep: as long as it holds a copy of our socket, nobody learns that this process died.

A DataLoader's workers, a subprocess: all begin with a copy of every open descriptor, and a connection ends when the
last copy of it is closed. So the child replaces its copies by ``/dev/null`` before it runs any code of its own;
programs it executes never see them. Closing would free the numbers, which objects that were copied too may still use.

Descriptors are recognised by what they refer to, so nobody has to take one off the list when it is closed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

__all__ = ["keep_from_children", "keep_sockets_from_children", "packed_ends", "sockets_at"]

_ours: dict[int, tuple[int, int]] = {}  # descriptor -> device and inode of what it refers to


def keep_from_children(fd: int) -> None:
    """Children that this process forks from now on get ``/dev/null`` in place of ``fd``. From any thread."""
    os.set_inheritable(fd, False)
    _ours[fd] = _identity(fd)


def keep_sockets_from_children(addresses: bytes) -> None:
    """The same for every socket of this process with an end at one of ``addresses``, ``sockaddr`` in any surroundings.

    For sockets that a library opened, which does not say their descriptors. Where there is no ``/proc``, a child keeps
    them.
    """
    for fd in sockets_at(addresses):
        with suppress(OSError):  # closed by another thread meanwhile
            keep_from_children(fd)


def sockets_at(addresses: bytes) -> list[int]:
    """Descriptors of this process's TCP sockets with an end at one of ``addresses``, ``sockaddr`` in any surroundings.
    None where there is no ``/proc``."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # no socket, or closed by another thread meanwhile
                if any(end in addresses for end in packed_ends(int(name))):
                    found.append(int(name))
    return found


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def packed_ends(fd: int) -> list[bytes]:
    """The addresses of a TCP socket as the system packs them, its own and its peer's: the start of a ``sockaddr_in`` or
    ``sockaddr_in6``. Empty for anything else. Raises OSError if ``fd`` is not open."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return []
    sock = socket.socket(fileno=fd)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return []
        ends = [_packed(sock.family, sock.getsockname())]
        with suppress(OSError):  # it listens
            ends.append(_packed(sock.family, sock.getpeername()))
        return ends
    finally:
        sock.detach()


def _packed(family: int, address: tuple[str, int]) -> bytes:
    """How the system writes it: the start of a ``sockaddr_in`` or ``sockaddr_in6``."""
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + socket.inet_pton(family, address[0])


def _forget_in_child() -> None:
    if not _ours:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, identity in _ours.items():
        with suppress(OSError):  # it was closed before
            if _identity(fd) == identity:
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _ours.clear()


os.register_at_fork(after_in_child=_forget_in_child)
