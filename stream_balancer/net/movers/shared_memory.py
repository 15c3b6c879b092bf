"""Bytes in memory that both processes map. On one machine they pass no socket.

::

    writer   note probe(pid, fd, nonce)  -->         can you open my file, and is the nonce at its start?
             <--  note probed(yes)                   writer and reader: this way is ready
             message, where = (number, fd, inode, size)  -->   the reader maps what it has not mapped yet
             <--  note free(numbers)                 the last view of those died: they may be written again

Files are anonymous (nothing is left after a kill) and sealed (a peer cannot make a mapping fault).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stream_balancer.errors import WireError
from stream_balancer.net.movers import note
from stream_balancer.net.pool import Memory, _room

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection, Payload
    from stream_balancer.net.messages import Envelope

__all__ = ["SharedMemory", "available"]

_KEEP = 4
"""Idle buffers of one size and link that are kept."""
_MAX_MAPPED = 1024


def available() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _make(size: int) -> int:
    fd = os.memfd_create("stream_balancer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


class _Buffer:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.fd = number, size, _make(size)
        weakref.finalize(self, os.close, self.fd)
        self.inode = os.fstat(self.fd).st_ino
        self.memory: Memory = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)


class SharedMemory:
    """One end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.ready = False
        self._nonce = secrets.token_bytes(16)
        self._probe_fd = _make(16)
        weakref.finalize(self, os.close, self._probe_fd)
        os.pwrite(self._probe_fd, self._nonce, 0)
        self._numbers = 0
        self._idle: dict[int, list[_Buffer]] = {}
        self._lent: dict[int, _Buffer] = {}
        self._peer: int | None = None
        self._mapped: dict[int, Memory] = {}
        self._freed: deque[int] = deque()

    def begin(self) -> None:
        self._note("probe", os.getpid(), self._probe_fd, self._nonce)

    def _note(self, *what: Any) -> None:
        note(self._connection, "shared_memory", msgspec.msgpack.encode(what))

    def note(self, body: bytes) -> None:
        try:
            match msgspec.msgpack.decode(body):
                case ["probe", int(pid), int(fd), bytes(nonce)]:
                    self._note("probed", self._probe(pid, fd, nonce))
                case ["probed", bool(yes)]:
                    self.ready = yes
                case ["free", *numbers]:
                    for number in numbers:
                        buffer = self._lent.pop(number)
                        idle = self._idle.setdefault(buffer.size, [])
                        if len(idle) < _KEEP:
                            idle.append(buffer)
                        else:
                            self._note("forget", number)
                case ["forget", int(number)]:
                    self._mapped.pop(number, None)
                case _:
                    raise WireError("a note that memfd does not know")
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"a note that memfd does not know: {error!r}") from None

    # writing

    def send(self, payload: Payload, sent: Callable[[], object] | None, go: Callable[[Sequence[int]], None]) -> None:
        room = _room(payload.total)
        idle = self._idle.get(room)
        if idle:
            buffer = idle.pop()
        else:
            self._numbers += 1
            buffer = _Buffer(self._numbers, room)
        self._lent[buffer.number] = buffer
        io = self._connection.io

        def pack() -> None:  # in the thread that packs: large copies, which let go of the interpreter's lock
            targets = iter(_ranges(payload.runs))
            at = stop = 0
            for piece in payload.pieces:
                source = np.frombuffer(piece, dtype=np.uint8)
                while source.size:
                    if at == stop:
                        at, stop = next(targets)
                    count = min(stop - at, source.size)
                    buffer.memory[at : at + count] = source[:count]
                    at, source = at + count, source[count:]
            if sent is not None:
                io.do(sent)
            io.do(lambda: go((buffer.number, buffer.fd, buffer.inode, buffer.size)))

        io.work(pack)

    # reading

    def _probe(self, pid: int, fd: int, nonce: bytes) -> bool:
        with suppress(OSError, OverflowError):
            found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if len(nonce) == 16 and os.pread(found, 17, 0) == nonce:
                    self._peer = pid
            finally:
                os.close(found)
        return self._peer is not None

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        if self._peer is None or len(envelope.where) != 4:
            raise WireError("shared memory was used before it was agreed on")
        number, fd, inode, size = envelope.where
        if number not in self._mapped:
            if len(self._mapped) >= _MAX_MAPPED:
                raise WireError("too many batches are held: keep copies, or let them go")
            self._mapped[number] = self._map(fd, inode, size)
        memory = self._mapped[number]
        if envelope.total > memory.size:
            raise WireError(f"{envelope.total} bytes in a buffer of {memory.size}")
        lease = memory[: envelope.total]
        weakref.finalize(lease, self._on_free, number).atexit = False
        ready(lease)

    def _map(self, fd: int, inode: int, size: int) -> Memory:
        try:
            found = os.open(f"/proc/{self._peer}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                file = os.fstat(found)
                if file.st_ino != inode or file.st_size != size:
                    raise WireError("a shared buffer is not what it was said to be")
                if not fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise WireError("a shared buffer is not sealed")
                return np.frombuffer(mmap.mmap(found, size), dtype=np.uint8)
            finally:
                os.close(found)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:  # the latter: of a dead process
            raise ConnectionResetError(f"the peer is gone: {error}") from None
        except OSError as error:
            raise WireError(f"a shared buffer cannot be mapped: {error}") from None

    def _on_free(self, number: int) -> None:
        """In any thread, even inside a garbage collection: takes no lock."""
        self._freed.append(number)
        self._connection.io.do(self._tell_free)

    def _tell_free(self) -> None:
        if self._freed and not self._connection.over:
            self._note("free", *(self._freed.popleft() for _ in range(len(self._freed))))

    def close(self) -> None:
        self._idle.clear()
        self._lent.clear()
        self._mapped.clear()


def _ranges(runs: Sequence[int]) -> list[tuple[int, int]]:
    return [(offset, offset + size) for offset, size in zip(runs[::2], runs[1::2], strict=True)]
