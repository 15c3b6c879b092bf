"""Buffers in memory that two processes of one machine share: the rank reads where the controller packed.

The bytes never pass a socket; the pair carries only messages. ::

    controller   ProbeMemory(pid, fd, nonce)  -->   rank   may it open /proc/<pid>/fd/<fd>, and is the nonce there?
    controller   <--  ProbeResult(yes or no)        rank
    controller   MapBuffer(number, file, size) -->   rank   maps it; size 0: forgets it
    controller   SharedBuffers(numbers)       -->   rank   the next message's tensors are views of the mappings
    controller   <--  ReleaseBuffers(numbers)       rank   the last of those views has died: they may be written

Buffers are anonymous (memfd): no name to clash or to leak, nothing left after SIGKILL, no limit of /dev/shm. Their size
is sealed, so a peer cannot make a mapping fault. Their descriptors are closed once both sides have mapped them, so
batches that a trainer holds cost memory and no descriptors. A link has buffers of its own, so an old incarnation that
still looks at its tensors never sees them change. Where any step fails (another machine, container, user or system)
the answer is no and the link uses its sockets.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stream_balancer.errors import WireError
from stream_balancer.transport.buffers import Pool
from stream_balancer.wire.messages import MapBuffer, ProbeMemory

__all__ = ["OfferedBuffers", "SharedViews", "available"]

_MAX_BUFFERS = 2**15  # that one controller may have mapped: half of what Linux allows a process (vm.max_map_count)
_NONCE_BYTES = 8


def available() -> bool:
    """Whether this system can share memory in this way (Linux)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _make(size: int) -> int:
    """A file of ``size`` bytes that has no name and cannot shrink."""
    fd = os.memfd_create("stream_balancer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # A mapping beyond the end of a file that was cut short is a fatal fault for who reads it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, size: int) -> Tensor:
    """``[size]`` uint8: the file's memory. Not by ``mmap``, which keeps a descriptor of its own. Raises OSError."""
    try:
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).split("\n", 1)[0]) from error


class _Shared(NamedTuple):
    number: int
    """By which both ends name it."""
    memory: Tensor
    """``[nbytes]`` uint8."""

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class _Descriptor:
    """Closed when nobody keeps it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Lent(NamedTuple):
    """A buffer that nobody reads, to be written and announced."""

    number: int
    memory: Tensor
    """[size] uint8."""
    news: list[MapBuffer]
    """To be sent to the rank before the buffer is used."""
    keep: object
    """To be kept until the rank has seen them and the message behind them."""


class OfferedBuffers:
    """The controller's side of one link. :meth:`lend` is for the thread that packs, :meth:`give_back` for the one that
    reads what the rank says."""

    def __init__(self, keep: int) -> None:
        """``keep``: how many idle buffers are kept. Raises OSError where memory cannot be shared."""
        self._pool = Pool(keep, self._new, self._forget)
        self._last = 0
        self._lent: dict[int, _Shared] = {}
        self._news: list[MapBuffer] = []  # not sent to the rank yet
        self._opened: _Descriptor | None = None  # of the buffer that was made last
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._probe_fd = _make(_NONCE_BYTES)
        os.pwrite(self._probe_fd, self._nonce, 0)

    def probe(self) -> ProbeMemory:
        """Asks the rank whether it can share memory with this process."""
        return ProbeMemory(os.getpid(), self._probe_fd, self._nonce)

    def lend(self, size: int) -> Lent:
        """A buffer of ``size`` bytes. Raises OSError if there is no memory, or no descriptor, for a new one."""
        buffer = self._pool.take(size)
        self._lent[buffer.number] = buffer
        news, self._news = self._news, []
        opened, self._opened = self._opened, None
        return Lent(buffer.number, buffer.memory[:size], news, opened)

    def give_back(self, number: int) -> None:
        """The rank has let go of a buffer. Raises WireError if it did not have it."""
        buffer = self._lent.pop(number, None)
        if buffer is None:
            raise WireError(f"the rank gave back buffer {number}, which it did not have")
        self._pool.give_back(buffer)

    def close(self) -> None:
        """Release everything; what the rank has mapped lives on there. Idempotent."""
        self._pool.clear()
        self._lent.clear()
        probe_fd, self._probe_fd = self._probe_fd, -1
        if probe_fd >= 0:
            os.close(probe_fd)

    def _new(self, size: int) -> _Shared:
        opened = _Descriptor(_make(size))
        memory = _map(opened.number, size)
        self._last += 1
        self._opened = opened
        self._news.append(MapBuffer(self._last, opened.number, size, os.fstat(opened.number).st_ino))
        return _Shared(self._last, memory)

    def _forget(self, buffer: _Shared) -> None:
        self._news.append(MapBuffer(buffer.number, 0, 0))


class SharedViews:
    """The rank's side of one link. For the thread that reads the link."""

    def __init__(self, on_free: Callable[[int], object]) -> None:
        """``on_free(number)`` is called when the last tensor over a buffer has died: in any thread, even in the middle
        of a garbage collection, so it must not take a lock."""
        self._on_free = on_free
        self._peer: int | None = None
        self._maps: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def probe(self, message: ProbeMemory) -> bool:
        """Whether memory of the process that sent this can be mapped here."""
        if not available():
            return False
        with suppress(OSError):
            fd = os.open(_path(message.pid, message.fd), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.pread(fd, _NONCE_BYTES + 1, 0) == message.nonce:
                    self._peer = message.pid
            finally:
                os.close(fd)
        return self._peer is not None

    def announce(self, message: MapBuffer) -> None:
        """Map the buffer, or forget it.

        Raises WireError if it is not what it says, ConnectionResetError if the peer has closed it: it closes a file
        that was announced and not yet mapped only when it gives the link up, or dies.
        """
        number, size = message.number, message.size
        if size == 0:
            self._maps.pop(number, None)
            return
        if self._peer is None or number in self._maps:
            raise WireError(f"buffer {number} was announced out of turn")
        if len(self._maps) >= _MAX_BUFFERS:
            raise WireError(
                f"the trainer holds tensors of {_MAX_BUFFERS} batches. Keep copies (.clone()), or let them go"
            )
        try:
            fd = os.open(_path(self._peer, message.fd), os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:  # the latter: of a dead process
            raise ConnectionResetError(f"the peer closed buffer {number} before it was mapped: {error}") from None
        except OSError as error:
            raise WireError(f"buffer {number} cannot be opened: {error}{_advice(error)}") from None
        try:
            file = os.fstat(fd)
            # Descriptor numbers are used again: by now this one may be another file.
            if file.st_ino != message.inode:
                raise ConnectionResetError(f"the peer closed buffer {number} before it was mapped")
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or file.st_size != size:
                raise WireError(f"buffer {number} is not a sealed file of {size} bytes")
            self._maps[number] = _map(fd, size).numpy()
        except ConnectionError:
            raise
        except OSError as error:
            raise WireError(f"buffer {number} cannot be mapped: {error}{_advice(error)}") from None
        finally:
            os.close(fd)

    def lend(self, number: int, size: int) -> Tensor:
        """``[size]`` uint8: the buffer's memory. Its death is reported. Raises WireError if there is no such buffer."""
        memory = self._maps.get(number)
        if memory is None or memory.size < size:
            raise WireError(f"there is no buffer {number} of {size} bytes")
        # An array of its own, whose death is that of the last view; the mapping lives on in the table.
        lease = memory[:size]
        weakref.finalize(lease, self._on_free, number).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)


def _advice(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ". This process has too many files open: raise its limit (ulimit -n)"
    return ""


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
