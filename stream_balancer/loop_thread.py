"""Calls into an event loop that runs in a thread of its own, made by threads that may be interrupted at any bytecode.

The main thread runs signal handlers between any two bytecodes, and they may raise: Ctrl-C (KeyboardInterrupt), a
scheduler's SIGTERM. Why nothing is lost, and nothing left behind, wherever that happens:

1. State changes in the loop's thread only, where no handler runs. A calling thread appends to a queue (one step in C:
   the call is in it or is not), waits (which changes nothing), and takes the result.
2. A result lies in its call until it is taken: by assignments directly before a ``return``. CPython runs handlers when
   a function is entered, after a call and on a jump backwards; there is none of these from the taking to the caller.
3. A thread makes one call at a time. If the call before it was not taken, that one was interrupted: the loop withdraws
   it first (cancels it, waits for its end, and undoes what it had got), then begins the new one. So a clean-up in the
   calling thread, which a second interrupt could skip, is never needed. It is tried all the same, to be quick.
4. A wait is for a :class:`Signal`, which an interrupt cannot break.

An interrupt in the calling program's own code, after ``return``, is the program's: it has the result. (``for`` stores
an item without a step at which a handler could run; ``next()`` does not.)
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import anyio
import anyio.abc

from stream_balancer.errors import ClosedResourceError
from stream_balancer.facade import Done, refuse_in_event_loop
from stream_balancer.net.loops import Signal, in_loop

__all__ = ["Background", "LoopEndedError", "LoopThread"]

T = TypeVar("T")


class LoopEndedError(ClosedResourceError):
    """The loop ended before the call did."""

    def __init__(self) -> None:
        super().__init__("this balancer is closed: its `with` block was left")


class Call(Done[T]):
    """A function on its way through the loop's thread, and its result until that is taken."""

    def __init__(
        self, function: Callable[[], Awaitable[T]], undo: Callable[[T], object] | None = None,
        *, thread: int | None = None,
    ) -> None:  # fmt: skip
        self.thread = thread
        """Makes one call at a time; None if no thread waits for this one."""
        self.error: BaseException | None = None
        self.ended = Signal()
        self._function: Callable[[], Awaitable[T]] | None = function
        self._undo = undo

    def begin(self, tasks: anyio.abc.TaskGroup, before: Call[Any] | None) -> None:
        """In the loop: run, once ``before`` is out of the way."""
        self._scope, self._gone = anyio.CancelScope(), anyio.Event()
        tasks.start_soon(self._run, before)

    async def _run(self, before: Call[Any] | None) -> None:
        try:
            with self._scope:
                if before is not None:
                    # Even if this call is withdrawn in its turn: two calls of one thread must not run side by side.
                    with anyio.CancelScope(shield=True):
                        await before._withdraw()
                function, self._function = self._function, None  # it holds its arguments
                if function is not None and not self._scope.cancel_called:
                    self.result = await function()
            if self._scope.cancelled_caught:
                self.error = CancelledError()
        except anyio.get_cancelled_exc_class():
            self.error = LoopEndedError()
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self.error = error
        finally:
            self._gone.set()
            self.ended.set()

    async def _withdraw(self) -> None:
        """Wait for its end. If its thread was interrupted before it took the result, as if it had not been called."""
        if not self.taken:
            self._scope.cancel()
        if not self._gone.is_set():
            await self._gone.wait()
        result, self.result = self.result, None
        if not self.taken and result is not None and self._undo is not None:
            self._undo(result)

    def cancel(self) -> None:
        """In the loop."""
        self._scope.cancel()

    def fail(self) -> None:
        """The loop has ended without it."""
        self.error = LoopEndedError()
        self.ended.set()


class LoopThread:
    """An event loop in a thread, with ``resource`` entered in it. It ends once :meth:`stop` was called."""

    def __init__(self, resource: AbstractAsyncContextManager[Any], backend: Literal["asyncio", "trio"]) -> None:
        self._resource, self._backend = resource, backend
        self._pid: int | None = None
        self._inbox: deque[Call[Any]] = deque()
        self._wake: Callable[[], object] = lambda: None
        self._over = False
        self.is_stopping = False
        """:meth:`stop` was called."""
        self._error: BaseException | None = None
        self._opened, self._ended = Signal(), Signal()

    @property
    def is_started(self) -> bool:
        """:meth:`start` was called."""
        return self._pid is not None

    def start(self) -> None:
        """Return once the resource is entered; raise what that raised."""
        if self.is_started:
            raise RuntimeError("a blocking balancer is entered once: make another with sb.blocking(config)")
        self._pid = os.getpid()
        try:
            threading.Thread(target=self._run, name="stream_balancer blocking", daemon=True).start()
            self._opened.wait_in_thread(None)
            self._raise_error()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel the calls that have not ended, leave the resource, end the thread. Idempotent; raises what leaving the
        resource raised."""
        # Set before the wake-up, which would otherwise find nothing new.
        self.is_stopping = True
        _in_spite_of_an_interrupt(lambda: self._wake())
        self._ended.wait_in_thread(None)
        self._raise_error()

    def do(
        self, function: Callable[[], Awaitable[T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> Done[T]:  # fmt: skip
        """Run ``function`` in the loop and wait for its end. If an interrupt comes before the result is taken, the call
        is withdrawn and ``undo(result)`` called in the loop.

        Raises RuntimeError in a thread that runs an event loop, and in a forked process; ClosedResourceError once the
        loop has ended; TimeoutError.
        """
        self._check_caller()
        call = Call(function, undo, thread=threading.get_ident())
        try:
            self.post(call)
            try:
                call.ended.wait_in_thread(None if timeout_s is None else time.monotonic() + timeout_s)
            except TimeoutError:
                self.post(Call(partial(_async, call.cancel)))
                call.ended.wait_in_thread(None)
                if isinstance(call.error, CancelledError):
                    call.error = TimeoutError(f"it was not done within {timeout_s} s, and was taken back")
        except BaseException:
            _in_spite_of_an_interrupt(self._withdraw_call)
            raise
        error, call.error = call.error, None
        if error is not None:
            call.taken = True
            try:
                raise error
            finally:
                del error  # it refers to this frame
        return call

    def call(self, function: Callable[[], T]) -> T:
        """A plain function, in the loop."""
        return self.do(partial(_async, function)).take()

    def post(self, call: Call[Any]) -> None:
        """Have it run, without waiting for it. Raises RuntimeError before :meth:`start`."""
        if not self.is_started:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")
        # first: who ends the loop in this moment fails what it finds there
        self._inbox.append(call)
        if self._over:
            call.fail()
        else:
            self._wake()

    def _withdraw_call(self) -> None:
        nothing: Call[None] = Call(partial(_async, lambda: None), thread=threading.get_ident())
        nothing.taken = True
        self.post(nothing)

    def _check_caller(self) -> None:
        refuse_in_event_loop(
            "this method of a blocking balancer",
            "There, use `async with sb.StreamBalancer(config)` and await; or call it in a thread (asyncio.to_thread)",
        )
        if self._pid not in (None, os.getpid()):
            raise RuntimeError(
                "this balancer lives in the process that made it, not in one forked from that. Serve it there, and put "
                "with sb.connect(address) here"
            )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend=self._backend)
        except BaseException as error:  # noqa: BLE001 - raised by start() or stop()
            self._error = error
        # Before the inbox is emptied: post() appends first and looks second, so a call is failed by one of the two.
        self._over = True
        while self._inbox:
            self._inbox.popleft().fail()
        self._opened.set()
        self._ended.set()

    async def _main(self) -> None:
        loop, latest = in_loop(), dict[int | None, Call[Any]]()
        woken = anyio.Event()
        self._wake = lambda: loop(lambda: woken.set())
        async with self._resource, anyio.create_task_group() as tasks:
            self._opened.set()
            while not self.is_stopping:
                # before looking: what is posted from here on sets this one
                woken = anyio.Event()
                while self._inbox:
                    call = self._inbox.popleft()
                    call.begin(tasks, latest.get(call.thread))
                    if call.thread is not None:
                        latest[call.thread] = call
                await woken.wait()
            tasks.cancel_scope.cancel()


class Background(Generic[T]):
    """A function that runs beside. The methods are those of ``concurrent.futures.Future``, whose lock an interrupt
    could leave taken."""

    def __init__(self, loop: LoopThread, function: Callable[[], Awaitable[T]]) -> None:
        self._loop = loop
        self._call: Call[T] = Call(function)
        self._seen = False
        loop.post(self._call)

    def done(self) -> bool:
        """It has returned, raised, or been cancelled."""
        return self._call.ended.is_set()

    def cancel(self) -> None:
        """Have it cancelled; :meth:`done` says when it is."""
        if not self.done():
            self._loop.post(Call(partial(_async, self._call.cancel)))

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for its end; what it returned. Raises what it raised, TimeoutError, CancelledError after
        :meth:`cancel`, ClosedResourceError if the balancer's block was left before it ended."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return cast("T", self._call.result)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """As :meth:`result`: what it raised, or None."""
        try:
            self._call.ended.wait_in_thread(None if timeout_s is None else time.monotonic() + timeout_s)
        except TimeoutError:
            raise TimeoutError(f"it has not ended within {timeout_s} s") from None
        self._seen = True
        return self._call.error

    def raise_unseen(self) -> None:
        """What it raised, if nobody has asked for that."""
        if not self._seen and not isinstance(self._call.error, LoopEndedError | CancelledError | None):
            raise self._call.error


async def _async(function: Callable[[], T]) -> T:
    return function()


def _in_spite_of_an_interrupt(function: Callable[[], object]) -> None:
    """Again, if it is interrupted: once is enough for a person at a keyboard."""
    try:
        function()
    except BaseException:
        function()
        raise
