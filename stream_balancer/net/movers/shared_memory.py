"""Bytes in memory that both processes map. On one machine they pass no socket.

::

    writer   note probe(pid, fd, nonce)  -->         can you open my file, and is the nonce at its start?
             <--  note probed(yes)                   writer and reader: this way is ready
             message, where = (number, fd, inode, size)  -->   the reader maps what it has not mapped yet
             <--  note free(numbers)                 the last view of those died: they may be written again
             note forget(number)  -->                the reader may unmap it

Files are anonymous (nothing is left after a kill) and sealed (a peer cannot make a mapping fault). A descriptor is kept
until the reader has mapped its file; an idle buffer has none.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stream_balancer.errors import WireError
from stream_balancer.net.movers.common import Mover
from stream_balancer.wire.payload import Memory, Shelf, lease, room_for

if TYPE_CHECKING:
    from stream_balancer.net.connection import Connection
    from stream_balancer.net.messages import Envelope
    from stream_balancer.wire.payload import Payload

_KEEP_BYTES = 2**28
"""Idle buffers of one connection that are kept."""
_MAX_MAPPED = 1024
_NONCE_BYTES = 16


class _File:
    """An anonymous file, as long as it is open."""

    def __init__(self, size: int) -> None:
        # anonymous: nothing is left of it after a kill
        self.fd = os.memfd_create("stream_balancer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        """Idempotent. Mappings stay."""
        os.ftruncate(self.fd, size)
        # a file that shrinks under a mapping kills the reader by SIGBUS
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


class _MappedBuffer:
    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.file = number, size, _File(size)
        self.memory = _mapped(self.file.fd, size)
        # with the inode: a number of a descriptor is used again, and the reader must not map another file
        self.where = (number, self.file.fd, os.fstat(self.file.fd).st_ino, size)


class SharedMemory(Mover):
    """An end of the mover."""

    name, number = "shared_memory", 1

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._probe_file: _File | None = None
        self._numbers = count()
        self._idle: Shelf[_MappedBuffer] = Shelf(_KEEP_BYTES)
        self._lent: dict[int, _MappedBuffer] = {}
        self._peer: int | None = None
        self._mapped: dict[int, Memory] = {}
        self._freed: deque[int] = deque()

    @staticmethod
    def available() -> bool:
        return sys.platform == "linux" and hasattr(os, "memfd_create")

    def begin(self) -> None:
        """Ask whether the other end can open a file of this process."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            self._probe_file = _File(_NONCE_BYTES)
        except OSError as error:
            self._warn(error)
            return
        # random, so that a file of another machine's process under the same numbers is told apart
        os.pwrite(self._probe_file.fd, nonce, 0)
        self._note("probe", os.getpid(), self._probe_file.fd, nonce)

    def close(self) -> None:
        """The connection is over: nothing of it stays open, but for what is still looked at."""
        self.ready = False
        self._idle = Shelf(0)
        # mappings live on as long as views of them do
        self._lent, self._mapped, self._probe_file = {}, {}, None

    def _note(self, *what: Any) -> None:
        self._tell(msgspec.msgpack.encode(what))

    def note(self, body: bytes) -> None:
        try:
            match msgspec.msgpack.decode(body):
                case ["probe", int(pid), int(fd), bytes(nonce)]:
                    self._note("probed", self._probe(pid, fd, nonce))
                case ["probed", bool(yes)]:
                    self.ready, self._probe_file = yes, None
                case ["free", *numbers]:
                    for number in numbers:
                        # KeyError for one that was not lent: a peer may not free what it has not got
                        self._take_back(self._lent.pop(number))
                case ["forget", int(number)]:
                    self._mapped.pop(number, None)
                case _:
                    raise ValueError(body)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"a note that makes no sense for shared memory: {error!r}") from None

    # writing

    def send(self, payload: Payload, go: Callable[[Sequence[int]], None]) -> bool:
        """Copied in the thread that packs: large copies let go of the interpreter's lock."""
        room = room_for(payload.total)
        # warm pages: fresh ones cost as much in faults as the copy itself
        idle = self._idle.take(room)
        try:
            buffer = idle or _MappedBuffer(next(self._numbers), room)
        except (OSError, RuntimeError) as error:
            # too many open files, or no memory
            self._warn(error)
            return False
        # before the copy: it is kept alive by this until the reader frees it
        self._lent[buffer.number] = buffer

        def copy() -> None:
            _copy(payload, buffer.memory)
            self._connection.io.do(lambda: go(buffer.where))

        self._pack(copy)
        return True

    def _take_back(self, buffer: _MappedBuffer) -> None:
        # the reader has mapped it
        buffer.file.close()
        for gone in self._idle.put(buffer):
            self._note("forget", gone.number)

    # reading

    def _probe(self, pid: int, fd: int, nonce: bytes) -> bool:
        with suppress(OSError, OverflowError):
            found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if len(nonce) == _NONCE_BYTES and os.pread(found, _NONCE_BYTES + 1, 0) == nonce:
                    self._peer = pid
            finally:
                os.close(found)
        return self._peer is not None

    def receive(self, envelope: Envelope, ready: Callable[[Memory], None]) -> None:
        """Maps what is new."""
        if self._peer is None or len(envelope.where) != 4:
            raise WireError("shared memory was used before it was agreed on")
        number, fd, inode, size = envelope.where
        if number not in self._mapped:
            # mappings of a process are limited, and a trainer that keeps all its batches would use them up
            if len(self._mapped) >= _MAX_MAPPED:
                raise WireError("too many batches are held: keep copies, or let them go")
            self._mapped[number] = self._map(fd, inode, size)
        memory = self._mapped[number]
        if envelope.total > memory.size:
            raise WireError(f"{envelope.total} bytes in a buffer of {memory.size}")
        ready(lease(memory, envelope.total, lambda: self._on_free(number)))

    def _map(self, fd: int, inode: int, size: int) -> Memory:
        try:
            found = os.open(f"/proc/{self._peer}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                file = os.fstat(found)
                if file.st_ino != inode or file.st_size != size:
                    raise WireError("a shared buffer is not what it was said to be")
                if not fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise WireError("a shared buffer is not sealed")
                return _mapped(found, size)
            finally:
                os.close(found)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            # the latter: of a dead process
            raise ConnectionResetError(f"the peer is gone: {error}") from None
        except (OSError, OverflowError, RuntimeError) as error:
            raise WireError(f"a shared buffer cannot be mapped: {error}") from None

    def _on_free(self, number: int) -> None:
        # neither takes a lock: a last view may die inside a garbage collection, in any thread
        self._freed.append(number)
        self._connection.io.do(self._tell_free)

    def _tell_free(self) -> None:
        if self._freed and not self._connection.over:
            # all that died since the last turn go in one message
            self._note("free", *(self._freed.popleft() for _ in range(len(self._freed))))


def _mapped(fd: int, size: int) -> Memory:
    """Torch's mapping, because Python's keeps a descriptor."""
    import torch

    memory: Memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8).numpy()
    return memory


def _copy(payload: Payload, memory: Memory) -> None:
    """The pieces into their runs."""
    pieces = deque(payload.views())
    for at, size in zip(payload.runs[::2], payload.runs[1::2], strict=True):
        stop = at + size
        while at < stop:
            piece = pieces.popleft()
            # numpy lets go of the interpreter's lock, as memoryviews do not
            part = np.frombuffer(piece[: stop - at], dtype=np.uint8)
            memory[at : at + part.size] = part
            at += part.size
            # it goes on in the next run
            if part.size < len(piece):
                pieces.appendleft(piece[part.size :])
