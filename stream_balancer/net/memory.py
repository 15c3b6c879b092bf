"""A connection in memory, for tests in virtual time: the same order, ends, encoding and checks; no socket, no thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from stream_balancer.net.connection import Base, Handler, _bytes_of, _Out
from stream_balancer.net.errors import Ended
from stream_balancer.net.loops import Job, in_loop
from stream_balancer.net.messages import HEADER_BYTES, SOCKET, Close, Envelope, frame, read_envelope, read_header
from stream_balancer.net.pool import Pool

__all__ = ["LoopIo", "MemoryConnection", "pair"]


class LoopIo:
    """What the I/O thread is elsewhere: the current event loop, with its clock."""

    def __init__(self, tasks: Any) -> None:
        self.work: Callable[[Job], None] = in_loop()
        self._tasks = tasks

    def do(self, job: Job, *, here: bool = False) -> None:
        self.work(job)

    def after(self, seconds: float, job: Job) -> Job:
        scope = anyio.CancelScope()

        async def later() -> None:
            with scope:
                await anyio.sleep(seconds)
                job()

        self._tasks.start_soon(later)
        return scope.cancel


class MemoryConnection(Base):
    """One end."""

    peer: MemoryConnection

    def __init__(self, io: LoopIo) -> None:
        super().__init__(io, Pool())

    def _put(self, out: _Out, via: int, where: Sequence[int]) -> None:
        raw = frame(out.message, out.payload.total, out.payload.runs, via, where)
        bytes_ = b"".join(_bytes_of(piece) for piece in out.payload.pieces) if via == SOCKET else b""
        self._close_sent = isinstance(out.message, Close)
        peer, sent = self.peer, out.sent
        self.io.do(lambda: peer._arrive(raw, bytes_))
        if sent is not None:
            sent()

    def _flush(self) -> None:
        if self._close_sent and self._close_seen and not self._held:
            self._fail(Ended("closed"))

    def _arrive(self, raw: bytes, bytes_: bytes) -> None:
        if self.over:
            return
        try:
            size, crc = read_header(raw[:HEADER_BYTES])
            envelope: Envelope = read_envelope(raw[HEADER_BYTES : HEADER_BYTES + size], crc)
            at = 0
            for space in self._on_envelope(envelope):
                space[:] = bytes_[at : at + len(space)]
                at += len(space)
        except Exception as error:  # noqa: BLE001 - the handler's: this one is over
            self._fail(error)

    def _release(self, error: BaseException) -> None:
        peer, kind = self.peer, "refused" if not isinstance(error, (Ended, OSError)) else "lost"
        if not (self._close_sent and self._close_seen):
            self.io.do(lambda: peer._fail(Ended(kind, str(error))))


def pair(
    tasks: Any, here: Handler | None = None, there: Handler | None = None
) -> tuple[MemoryConnection, MemoryConnection]:
    """Two ends in the current event loop."""
    io = LoopIo(tasks)
    one, other = MemoryConnection(io), MemoryConnection(io)
    one.peer, other.peer = other, one
    one.handler, other.handler = here, there
    return one, other
