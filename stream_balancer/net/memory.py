"""A connection in memory, for tests in virtual time: handshake, order, ends and checks are the same; no socket, no
thread."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from stream_balancer.net.connection import Connection
from stream_balancer.net.handshake import Handshake
from stream_balancer.net.loops import Io, Job, in_loop
from stream_balancer.net.messages import Join
from stream_balancer.wire.payload import Pool

_TOKEN = b"in one process"


class LoopIo(Io):
    """The caller's event loop in the place of the I/O thread, with its clock."""

    threads = False

    def __init__(self) -> None:
        # nothing of a thread, a selector or a pipe
        self.leaving, self.sockets, self.helpers = set(), {}, []
        self.scratch = memoryview(bytearray(2**18))

    def do(self, job: Job, *, here: bool = False) -> None:
        # trio's loop has ended, where asyncio's ends in silence
        with suppress(RuntimeError):
            in_loop()(job)

    def after(self, seconds: float, job: Job) -> Job:
        with suppress(RuntimeError):
            return asyncio.get_running_loop().call_later(seconds, job).cancel
        # here: trio is optional for who does not use it
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

    def watch(self, sock: _Socket, before: int, events: int, ready: Callable[[int], object]) -> None:
        sock.watch(events, ready)


class Wire:
    """Joins two ends in the current event loop; :meth:`begin` their handshake. One queue for both directions;
    :meth:`hold` lets messages hang in it."""

    def __init__(self, io: LoopIo, pool: Pool, join: Join) -> None:
        self.io = io
        self._queue: deque[Job] = deque()
        self._held = self._broken = self._queued = False
        there, here = self._sockets = _Socket(self), _Socket(self)
        there.peer, here.peer = here, there
        self.ends = (
            Connection(io, there, pool, Handshake(_TOKEN)),
            Connection(io, here, pool, Handshake(_TOKEN, join)),
        )
        """The accepting end and the joining one."""

    def begin(self) -> None:
        for end in self.ends:
            end.begin()

    def hold(self) -> None:
        """From now on messages wait in the wire, both ways."""
        self._held = True

    def release(self) -> None:
        """Held messages arrive, in order."""
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
            self.io.do(self._deliver)

    def _deliver(self) -> None:
        self._queued = False
        # what is sent in answer comes in the next turn, as over a network
        for _ in range(len(self._queue)):
            # a job of this turn may hold or cut the wire
            if self._queue and not self._held:
                self._queue.popleft()()
        self._schedule()


class _Socket:
    """The part of a socket that a connection uses, in memory."""

    peer: _Socket

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._came = bytearray()
        self._is_over = False
        """No more comes."""
        self._events = 0
        self._ready: Callable[[int], object] = lambda _: None

    def fileno(self) -> int:
        return id(self)

    def sendmsg(self, views: Iterable[memoryview]) -> int:
        # copied, as a kernel does: the sender may use its memory again
        data = b"".join(views)
        self._wire.carry(lambda: self.peer._arrive(data))
        return len(data)

    def recvmsg_into(self, views: Iterable[memoryview]) -> tuple[int]:
        if not self._came and not self._is_over:
            raise BlockingIOError
        done = 0
        for view in views:
            part = self._came[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        del self._came[:done]
        return (done,)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self._events = 0
        self._wire.carry(lambda: self.peer._arrive(b"", is_over=True))

    def watch(self, events: int, ready: Callable[[int], object]) -> None:
        self._events, self._ready = events, ready
        if events & selectors.EVENT_WRITE:
            self._wire.io.do(lambda: ready(selectors.EVENT_WRITE))
        self._wire.io.do(self._tell)

    def _arrive(self, data: bytes, *, is_over: bool = False) -> None:
        self._came += data
        self._is_over = self._is_over or is_over
        self._tell()

    def _tell(self) -> None:
        while self._events & selectors.EVENT_READ and (self._came or self._is_over):
            self._ready(selectors.EVENT_READ)
