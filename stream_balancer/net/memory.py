"""A connection in memory, for tests in virtual time: handshake, order, ends and checks are the same; no socket, no
thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from stream_balancer.errors import RefusedError, WireError
from stream_balancer.net.connection import Base
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.loops import Job
from stream_balancer.net.messages import Join, Refused, Welcome, frame
from stream_balancer.net.pool import Pool

__all__ = ["LoopIo", "MemoryConnection", "Wire", "pair"]

_TOKEN = b"in one process"


class LoopIo:
    """What the I/O thread is elsewhere: the event loop of who calls, with its clock."""

    def __init__(self) -> None:
        self.threads = False
        self.leaving: set[object] = set()

    def do(self, job: Job, *, here: bool = False) -> None:
        loop = _asyncio_loop()
        if loop is not None:
            loop.call_soon(job)
        else:
            import trio  # here: trio is optional for who does not use it

            with suppress(RuntimeError):  # the loop has ended, as asyncio's does in silence
                trio.lowlevel.current_trio_token().run_sync_soon(job)

    def after(self, seconds: float, job: Job) -> Job:
        loop = _asyncio_loop()
        if loop is not None:
            return loop.call_later(seconds, job).cancel
        import trio

        scope = trio.CancelScope()

        async def later() -> None:
            with scope:
                await trio.sleep(seconds)
                job()

        with suppress(RuntimeError):
            trio.lowlevel.spawn_system_task(later)
        return scope.cancel

    def hold(self, job: Job) -> None:
        job()

    def work(self, job: Job) -> None:
        self.do(job)


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Wire:
    """Joins two ends. One queue for both directions; :meth:`hold` lets messages hang in it."""

    def __init__(self, io: LoopIo, pool: Pool, join: Join) -> None:
        self._io = io
        self._queue: deque[Job] = deque()
        self._held = self._broken = self._queued = False
        self.ends = (
            MemoryConnection(self, 0, io, pool, Handshake(_TOKEN)),
            MemoryConnection(self, 1, io, pool, Handshake(_TOKEN, join)),
        )
        """The accepting end and the joining one."""

    def begin(self) -> None:
        for end in self.ends:
            end.begin()

    def hold(self) -> None:
        """From now on messages wait in the wire, both ways."""
        self._held = True

    def release(self) -> None:
        """They arrive, in order."""
        self._held = False
        self._schedule()

    def cut(self, cause: str = "the network broke", *, seen_by: Iterable[int] = (0, 1)) -> None:
        """The connection breaks: what is in the wire is lost, and these ends see the loss (0 the accepting one, 1 the
        joining one). The other does not know yet that nothing arrives any more."""
        self._broken = True
        self._queue.clear()
        for side in seen_by:
            self.ends[side].fail(ConnectionResetError(cause))

    def carry(self, job: Job) -> None:
        if not self._broken:
            self._queue.append(job)
            self._schedule()

    def _schedule(self) -> None:
        if self._queue and not self._held and not self._queued:
            self._queued = True
            self._io.do(self._deliver)

    def _deliver(self) -> None:
        self._queued = False
        for _ in range(len(self._queue)):
            if self._queue and not self._held:
                self._queue.popleft()()
        self._schedule()


class MemoryConnection(Base):
    """One end."""

    def __init__(self, wire: Wire, side: int, io: LoopIo, pool: Pool, handshake: Handshake) -> None:
        super().__init__(io, pool, handshake)
        self.wire, self._side = wire, side

    @property
    def _peer(self) -> MemoryConnection:
        return self.wire.ends[1 - self._side]

    def _flush(self) -> None:
        if self.over:
            return
        if self._outgoing:
            data, peer = b"".join(view for view, _ in self._outgoing), self._peer
            self._took(len(data))
            self.wire.carry(lambda: peer._arrive(data))
        self._end_if_both_closed()

    def _arrive(self, data: bytes) -> None:
        if self.over:
            return
        if self.paused:
            self._unread += data
            return
        try:
            self._feed(memoryview(data))
            self._end_if_both_closed()
        except Exception as error:  # noqa: BLE001 - the peer's, or the handler's: this one is over
            self.fail(error)

    def _release(self, error: BaseException) -> None:
        peer = self._peer
        if isinstance(error, (WireError, RefusedError)) and not self._close_sent:
            reason = error.reason if isinstance(error, RefusedError) else "protocol"
            data = frame(Refused(reason, str(error)[:1000]))
            self.wire.carry(lambda: peer._arrive(data))
        self.wire.carry(lambda: peer.fail(ConnectionResetError("connection closed by peer")))


def pair(
    join: Join, arrived: Callable[[Base, Join], object], welcomed: Callable[[Base, Welcome], object], *,
    io: LoopIo | None = None, pool: Pool | None = None,
) -> Wire:  # fmt: skip
    """Two ends in the current event loop, that are about to meet: ``begin()`` their handshake."""
    wire = Wire(io or LoopIo(), pool or Pool(), join)
    there, here = wire.ends
    there.arrived, here.welcomed = arrived, welcomed
    return wire
