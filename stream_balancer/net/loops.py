"""The process's one I/O thread; into an event loop and out of it; what a coroutine or a thread waits for."""

from __future__ import annotations

import asyncio
import atexit
import heapq
import logging
import multiprocessing.util
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count, islice
from typing import Any

import anyio
import anyio.lowlevel

_log = logging.getLogger(__name__)
Job = Callable[[], object]
_TURNS = 2
"""Turns of the event loop after a call that must wait, before the next one: who takes a batch needs one to hear that
there is one, and one to take it. Without them calls fill the balancer faster than it is emptied, and nearly all of them
wait, each in a task: the loop then spends half as much again on a put."""
_TOGETHER = 16
"""Calls whose replies wake the I/O thread once."""
# a peer that does not answer must not keep a process from ending
_LEAVE_S = 1.0
_turn = threading.local()
"""``.inside`` while this thread runs jobs, or what hands in some: it looks at them before it is through. ``.wakes``, in
the I/O thread: event loops that are to be woken then."""
blocking_deadline = threading.local()
"""``.at`` is set, to a time or None, while :mod:`stream_balancer.facade` runs a coroutine in a plain thread."""


class Io:
    """The thread for every socket of the process. All state of connections and calls belongs to it; other threads hand
    in jobs. One lock is held while state is touched and never while waiting, so a short job may run in the thread that
    hands it in, which saves two of the four thread switches of a call."""

    _current: Io | None = None
    _guard = threading.Lock()
    threads = True
    """The jobs run in a thread of their own; not so in a test's event loop, with a clock of its own."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._selector_fd = [self.selector.fileno()] if hasattr(self.selector, "fileno") else []
        self.scratch = memoryview(bytearray(2**18))
        """Where what comes ahead of its place is read."""
        self._jobs: deque[Job] = deque()
        self._num_turns, self._woken_in = 0, -1
        """Turns of the I/O thread, and the last in which it was sent a byte: it will look at the jobs once more."""
        self._timers: list[tuple[float, int, list[Job]]] = []
        self._numbers = count()
        # a pipe in the selector: select() has no other way to be woken from another thread
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.selector.register(self._reader, selectors.EVENT_READ, self._on_wake)
        self._stopping = self._stopped = False
        self._lock = threading.Lock()
        self.leaving: set[object] = set()
        """Connections that were closed and whose peer has not answered yet."""
        self.sockets: dict[int, Job] = {}
        """Descriptors, which a forked child must not keep or a peer would not see this process's death; and how the end
        of this process ends them."""
        self.helpers: list[threading.Thread] = []
        """Threads that end with their connections. Joined at the end: a daemon inside torch while the interpreter goes
        away would abort the process."""
        self._work: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="stream_balancer-io", daemon=True)
        self._thread.start()
        # a child of multiprocessing runs no atexit
        multiprocessing.util.Finalize(None, _stop, exitpriority=0)

    @classmethod
    def current(cls) -> Io:
        """The process's own."""
        with cls._guard:
            if cls._current is None:
                cls._current = cls()
            return cls._current

    def do(self, job: Job, *, here: bool = False) -> None:
        """Run it in the I/O thread, in the order of the calls. From any thread; never blocks. ``here``: it is short,
        and may run in this thread if nothing else is going on."""
        with suppress(IndexError):
            # the last one is this, and will be run: nothing was handed in since that must come first
            if self._jobs[-1] is job and self._woken_in == self._num_turns:
                return
        # before the lock is tried: whoever holds it may run the job in our place
        self._jobs.append(job)
        if here and _uninterrupted() and self._lock.acquire(blocking=False):
            try:
                self.hold(self._run_jobs)
            finally:
                self._lock.release()
        elif not hasattr(_turn, "inside"):
            self._wake()

    def hold(self, job: Job) -> None:
        """Run it in this thread; all that it hands in here wakes the I/O thread once, when it is through."""
        is_outer = not hasattr(_turn, "inside")
        _turn.inside = True
        try:
            job()
        finally:
            if is_outer:
                del _turn.inside
                if self._jobs:
                    self._wake()

    def _wake(self) -> None:
        # read first: a turn that ends meanwhile is another, so that nobody relies on a byte that it may have taken
        if (turn := self._num_turns) != self._woken_in:
            # full: it will wake
            with suppress(OSError):
                self._writer.send(b"\0")
            # last: Ctrl-C before it may have kept the I/O thread asleep
            self._woken_in = turn

    def _run_jobs(self) -> None:
        # twice, for what those have added: a message that is to be sent. Not until there are none, because jobs that
        # add jobs must not keep the sockets waiting.
        for _ in range(2):
            _run_all(islice(iter(self._jobs.popleft, None), len(self._jobs)))

    def after(self, seconds: float, job: Job) -> Job:
        """Run it later; what is returned takes that back. In the I/O thread only."""
        cell = [job]
        # the number decides between equal times: cells cannot be compared
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), cell))
        # in a job that runs elsewhere: select() waits too long
        if threading.current_thread() is not self._thread:
            self._wake()
        return cell.clear

    def watch(self, sock: Any, before: int, events: int, ready: Callable[[int], object]) -> None:
        """Wait for these events of a socket, in place of those before. In the I/O thread only."""
        if not before:
            self.selector.register(sock.fileno(), events, ready)
        elif events:
            self.selector.modify(sock.fileno(), events, ready)
        else:
            self.selector.unregister(sock.fileno())

    def work(self, job: Job) -> None:
        """Run it in the one thread that packs for movers, in the order of the calls."""
        if self._worker is None:
            # one for all connections: more would compete for the memory's bandwidth
            self._worker = threading.Thread(
                target=_run_all, args=(iter(self._work.get, None),), name="stream_balancer-pack", daemon=True
            )
            self._worker.start()
        self._work.put(job)

    def stop(self) -> None:
        """End both threads: one that is inside torch while the interpreter goes away would abort the process. Closed
        connections have a second to say so."""
        self.do(self._stop_soon)
        self._thread.join(5.0)
        self._work.put(None)
        for thread in (self._worker, *self.helpers):
            if thread is not None:
                thread.join(5.0)

    def _stop_soon(self) -> None:
        self._stopping = True
        self.after(_LEAVE_S, self.leaving.clear)

    def _run(self) -> None:
        wakes: dict[_LoopCaller, None] = {}
        _turn.wakes, _turn.inside = wakes, True
        while not self._stopped:
            idle_s = 0.0 if self._jobs else None
            if self._timers and idle_s is None:
                idle_s = max(self._timers[0][0] - time.monotonic(), 0.0)
            events = self.selector.select(idle_s)
            # not while select() waits: short jobs of other threads run meanwhile
            with self._lock:
                for key, mask in events:
                    _run_all([partial(key.data, mask)])
                # before the jobs are looked at: who appends later wakes again
                self._num_turns += 1
                self._run_jobs()
                while self._timers and self._timers[0][0] <= time.monotonic():
                    _run_all(heapq.heappop(self._timers)[2])
            # a list of last turn's events would keep closed connections alive until the next one
            del events
            while wakes:
                wakes.popitem()[0]._wake()
            self._stopped = self._stopping and not self.leaving and not self._jobs
        # whoever still waits for a reply hears of the end, since nobody is left to answer
        _run_all(list(self.sockets.values()))

    def _on_wake(self, _: int) -> None:
        with suppress(BlockingIOError):
            self._reader.recv(4096)


def _run_all(jobs: Iterable[Job]) -> None:
    """Run them, one after the other; what one raises is logged, because this thread must go on."""
    for job in jobs:
        try:
            job()
        except Exception:  # noqa: BLE001
            _log.exception("a job of the I/O thread failed")
        # waiting for the next must not keep its objects alive
        del job


def _uninterrupted() -> bool:
    """True if no KeyboardInterrupt can come in the middle of a job: asyncio turns the first into a cancellation."""
    return threading.current_thread() is not threading.main_thread() or asyncio._get_running_loop() is not None


def _forget_in_child() -> None:
    """A forked child has none of the threads, so what it hands in waits for ever. Its sockets become /dev/null: closing
    them would free numbers that objects which were copied too may still use."""
    io, Io._current, Io._guard = Io._current, None, threading.Lock()
    if io is None:
        return
    io._lock = threading.Lock()
    # for good: no job of the child may run here and touch the parent's connections
    io._lock.acquire()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (*io.sockets, io._reader.fileno(), io._writer.fileno(), *io._selector_fd):
        os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def _stop() -> None:
    if Io._current is not None:
        Io._current.stop()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop)


class Signal:
    """Set once, by any thread; waited for by coroutines of asyncio and trio, and by threads."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[Job] = []

    def set(self) -> None:
        """Wake all who wait. Idempotent."""
        # first: who appends too late to be found below sees the flag
        self.is_set = True
        with suppress(IndexError):
            while True:
                self._waiters.pop()()

    def then(self, job: Job) -> None:
        """Call the job when this is set: now, or in the thread that sets it."""
        # before the flag is looked at: who sets it later finds the job, who set it before is seen below
        self._waiters.append(job)
        if self.is_set:
            self.set()

    async def wait(self) -> None:
        """Until it is set. In a coroutine that ``stream_balancer.facade`` drives it blocks the thread, and raises
        TimeoutError."""
        if hasattr(blocking_deadline, "at"):
            self.wait_in_thread(blocking_deadline.at)
            return
        event = anyio.Event()
        if self.is_set:
            event.set()
        else:
            loop = in_loop()
            self.then(lambda: loop(event.set))
        await event.wait()

    async def wait_shielded(self, seconds: float) -> bool:
        """Wait, whatever is cancelled or interrupted, for so long at most; says whether it was set."""
        if hasattr(blocking_deadline, "at"):
            with suppress(TimeoutError):
                self.wait_in_thread(time.monotonic() + seconds)
            return self.is_set
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds) as scope:
            while not self.is_set and not scope.cancel_called:
                # asyncio's task.cancel() goes through shields
                with suppress(anyio.get_cancelled_exc_class()):
                    await self.wait()
        return self.is_set

    def wait_in_thread(self, deadline: float | None) -> None:
        """Raises TimeoutError. Each wait has a lock of its own, released in C: no interrupt can break it."""
        if self.is_set:
            return
        lock = threading.Lock()
        lock.acquire()
        self.then(lock.release)
        # a lock refuses longer waits than TIMEOUT_MAX
        left = -1.0 if deadline is None else min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not lock.acquire(timeout=left) and not self.is_set:
            raise TimeoutError


def in_loop() -> Callable[[Job], None]:
    """Runs functions in the current event loop, in order, from any thread; many that come together cost one wake-up."""
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        # here: trio is optional for who does not use it
        import trio

        loop = trio.lowlevel.current_trio_token()
    caller = _CALLERS.get(loop)
    if caller is None:
        caller = _CALLERS[loop] = _LoopCaller(loop)
    return caller


class _LoopCaller:
    def __init__(self, loop: Any) -> None:
        # weak: the callers are kept by loop, and would keep it
        self._loop = weakref.ref(loop)
        self._wake_name = "call_soon_threadsafe" if isinstance(loop, asyncio.AbstractEventLoop) else "run_sync_soon"
        self._jobs: deque[Job] = deque()
        self._woken = False

    def __call__(self, job: Job) -> None:
        self._jobs.append(job)
        wakes = getattr(_turn, "wakes", None)
        if wakes is not None:
            # When this turn of the I/O thread is over: sooner, the loop would only wait for the interpreter.
            wakes[self] = None
        elif not self._woken or not _uninterrupted():
            self._woken = True
            self._wake()

    def _wake(self) -> None:
        loop = self._loop()
        try:
            getattr(loop, self._wake_name)(self._run)
        except (RuntimeError, AttributeError):
            # it has ended
            self._jobs.clear()
            self._woken = False

    def _run(self) -> None:
        self._woken = False
        try:
            for _ in range(len(self._jobs)):
                self._jobs.popleft()()
        finally:
            if self._jobs:
                self._wake()


_CALLERS: weakref.WeakKeyDictionary[Any, _LoopCaller] = weakref.WeakKeyDictionary()


class Inbox:
    """Jobs that run in order where somebody works them off: in an event loop, or where they come from. Until somebody
    does they wait."""

    def __init__(self, io: Io) -> None:
        self._io = io
        self._wake: Job = lambda: None
        self.jobs: deque[Job] = deque()
        self.waits = self._woken = False
        """Set by a job that has begun a task."""

    def do(self, job: Job) -> None:
        """Run it there. From any thread."""
        # before the flag is looked at, as the loop clears it before it looks at the jobs
        self.jobs.append(job)
        if not self._woken:
            self._woken = True
            self._wake()

    async def work_off(self) -> None:
        """Run them in this event loop, until cancelled."""
        loop = in_loop()
        try:
            while True:
                event = anyio.Event()
                self._wake = partial(loop, event.set)
                # before the jobs are looked at: who adds one later wakes again
                self._woken = False
                while self.jobs:
                    self._io.hold(self._some)
                    # one call that waits ends the group: its task must begin before the next call is looked at
                    if self.waits:
                        self.waits = False
                        for _ in range(_TURNS if self.jobs else 0):
                            await anyio.lowlevel.checkpoint()
                await event.wait()
        finally:
            self._wake = lambda: None

    def work_off_here(self) -> None:
        """Run them in the I/O thread, for good: none may wait or take long."""
        # no loop to wake: jobs run where they come from, in the I/O thread
        self._wake = self._drain
        self._io.do(self._drain)

    def _drain(self) -> None:
        self._woken = False
        while self.jobs:
            self._some()

    def _some(self) -> None:
        for _ in range(min(len(self.jobs), _TOGETHER)):
            self.jobs.popleft()()
            if self.waits:
                break
