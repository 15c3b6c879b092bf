"""Shared memory whose other end is no honest peer: what may be mapped, and what is refused. Both ends in one process,
without a connection."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from stream_balancer.errors import WireError
from stream_balancer.net.connection import Connection
from stream_balancer.net.messages import Close, Envelope, Message, MoverNote
from stream_balancer.net.movers.shared_memory import SharedMemory
from stream_balancer.wire.payload import Memory, Payload

pytestmark = pytest.mark.skipif(not SharedMemory.available(), reason="needs memfd")
SIZE = 1000


class Wire:
    """What a mover needs of a connection: here the notes wait until the test passes them on."""

    over = False

    def __init__(self) -> None:
        self.io = self
        self.notes: deque[bytes] = deque()

    def do(self, job: Callable[[], object]) -> None:
        job()

    work = do

    def send(self, message: Message) -> None:
        assert isinstance(message, MoverNote)
        self.notes.append(message.body)


class Ends:
    """A writer, and a reader that has not yet heard of it."""

    def __init__(self) -> None:
        self.wires = Wire(), Wire()
        self.writer, self.reader = (SharedMemory(cast("Connection", wire)) for wire in self.wires)
        self.writer.begin()

    def agree(self) -> None:
        self.reader.note(self.wires[0].notes.popleft())
        self.writer.note(self.wires[1].notes.popleft())
        assert self.writer.ready

    def written(self) -> tuple[int, ...]:
        where: list[Any] = []
        assert self.writer.send(Payload.of(bytes(range(100)) * (SIZE // 100)), where.append)
        return tuple(where[0])

    def read(self, where: tuple[int, ...], total: int = SIZE) -> Memory:
        got: list[Memory] = []
        self.reader.receive(Envelope(Close(), total, (0, total), 1, where), got.append)
        return got[0]


@pytest.fixture
def ends() -> Ends:
    ends = Ends()
    ends.agree()
    return ends


def test_what_one_writes_the_other_reads(ends: Ends) -> None:
    seen = ends.read(ends.written())
    assert np.array_equal(seen, np.tile(np.arange(100, dtype=np.uint8), SIZE // 100))
    del seen
    ends.writer.note(ends.wires[1].notes.popleft())  # free
    with pytest.raises(WireError, match="makes no sense"):  # a second time
        ends.writer.note(msgspec.msgpack.encode(("free", 1)))


def test_another_machine_says_no() -> None:
    """There may be a process of that number there, and a file, but not that nonce."""
    ends = Ends()
    what, pid, fd, nonce = msgspec.msgpack.decode(ends.wires[0].notes.popleft())
    for wrong in ((pid, fd, bytes(len(nonce))), (2**22 + 1, fd, nonce), (pid, 2**20, nonce)):
        ends.reader.note(msgspec.msgpack.encode((what, *wrong)))
        assert msgspec.msgpack.decode(ends.wires[1].notes[-1]) == ["probed", False]
    ends.writer.note(ends.wires[1].notes[-1])
    assert not ends.writer.ready
    with pytest.raises(WireError, match="before it was agreed"):
        ends.read((1, fd, 0, 4096))


def test_a_file_that_could_shrink_is_refused(ends: Ends) -> None:
    """It would end the reader with a bus error."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(WireError, match="not sealed"):
            ends.read((9, fd, os.fstat(fd).st_ino, 4096))
    finally:
        os.close(fd)


def test_a_buffer_that_is_not_what_it_says_is_refused(ends: Ends) -> None:
    number, fd, inode, size = where = ends.written()
    for wrong in ((number, fd, inode, size + mmap.PAGESIZE), (number, fd, inode, 2**61), (number, fd, inode + 1, size)):
        with pytest.raises(WireError, match="not what it was said to be"):
            ends.read(wrong)
    assert ends.read(where)[-1] == 99
    with pytest.raises(WireError, match="in a buffer of"):
        ends.read(where, size + 1)
    for wrong in ((), (number,), (*where, 1)):
        with pytest.raises(WireError, match="before it was agreed"):
            ends.read(wrong)


def test_a_peer_that_closed_a_buffer_first_is_gone(ends: Ends) -> None:
    """No fault of the protocol: it has given the connection up, or died, between the message and the mapping."""
    number, _, inode, size = ends.written()
    with pytest.raises(ConnectionResetError, match="the peer is gone"):
        ends.read((number, 2**20, inode, size))


@pytest.mark.parametrize("body", [b"", b"\x93", ("free", 7), ("free", "x"), ("probe", 1), ("forget",), ("no", 1), 3])
def test_notes_that_make_no_sense_are_refused(ends: Ends, body: object) -> None:
    with pytest.raises(WireError, match="makes no sense"):
        ends.reader.note(body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
