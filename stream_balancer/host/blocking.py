"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop.

An event loop runs in a thread of its own; every method has its call made there, and waits. A result lies in its call
until it is taken. A thread makes one call at a time, so whoever is interrupted (Ctrl-C) and calls again has the call
before withdrawn first: it is cancelled, waited for, and what it had got is undone. So a batch that was on its way comes
from the next iteration. Threads wait for a :class:`Signal`, which an interrupt cannot break; locks of
``concurrent.futures`` would be left taken.
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
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

import anyio
import anyio.abc
import anyio.lowlevel

from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.core.observer import Observer
from stream_balancer.errors import ClosedResourceError
from stream_balancer.facade import Done, Facade, Here, facade, refuse_in_event_loop
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.checkpoint import state_dict
from stream_balancer.host.journal import Journal
from stream_balancer.host.serve import serve
from stream_balancer.net.loops import Signal, in_loop
from stream_balancer.types import EvictReason, Rollout

__all__ = ["Background", "BlockingBalancer", "OwnLoop", "blocking"]

T = TypeVar("T")


class _LoopEnded(ClosedResourceError):  # noqa: N818 - as ClosedResourceError to users
    def __init__(self) -> None:
        super().__init__("this balancer is closed: its `with` block was left")


class _Call(Done[T]):
    """A function on its way through the loop's thread."""

    def __init__(self, function: Callable[[], Awaitable[T]], undo: Callable[[T], object] | None = None) -> None:
        self.error: BaseException | None = None
        self.ended = Signal()
        self.before: _Call[Any] | None = None
        """The call of the same thread before it."""
        self._function, self._undo = function, undo
        self._gone: anyio.Event | None = None

    def begin(self, tasks: anyio.abc.TaskGroup) -> None:
        """In the loop."""
        self._scope, self._gone = anyio.CancelScope(), anyio.Event()
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        before, self.before = self.before, None
        try:
            with self._scope:
                if before is not None:
                    with anyio.CancelScope(shield=True):
                        await before.withdraw()
                await anyio.lowlevel.checkpoint_if_cancelled()
                self.result = await self._function()
            if self._scope.cancelled_caught:
                self.error = CancelledError()
        except anyio.get_cancelled_exc_class():
            self.error = _LoopEnded()
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self.error = error
        finally:
            if self._gone is not None:
                self._gone.set()
            self.ended.set()

    async def withdraw(self) -> None:
        """Wait for its end. If its thread was interrupted before it took the result, as if it had not been called."""
        # Calls begin in the order in which they were handed in: an interrupt came before this one was, so nobody has
        # withdrawn the one before it.
        if self._gone is None:
            if self.before is not None:
                await self.before.withdraw()
            return
        if not self.taken:
            self._scope.cancel()
        await self._gone.wait()
        result, self.result = self.result, None
        if not self.taken and result is not None and self._undo is not None:
            self._undo(result)

    def cancel(self) -> None:
        """In the loop. Without effect on one that has not begun."""
        if self._gone is not None:
            self._scope.cancel()


class _LoopThread(Here):
    """An event loop in a thread, with ``resource`` entered in it."""

    def __init__(self, resource: AbstractAsyncContextManager[Any], backend: Literal["asyncio", "trio"]) -> None:
        self._resource, self._backend = resource, backend
        self._pid: int | None = None
        self._last: dict[int, _Call[Any]] = {}
        self._open: dict[_Call[Any], None] = {}
        self._opened, self._ended = Signal(), Signal()
        self._jobs: deque[Callable[[], object]] = deque()
        self._wake: Callable[[], object] = lambda: None
        self._error: BaseException | None = None
        self.is_stopping = False

    def start(self) -> None:
        """Return once the resource is entered; raise what that raised."""
        if self._pid is not None:
            raise RuntimeError("a blocking balancer is entered once: make another with sb.blocking(config)")
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="stream_balancer blocking", daemon=True).start()
        try:
            self._opened.wait_in_thread(None)
            self._raise_error()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel the calls that have not ended, leave the resource, end the thread. Idempotent; raises what leaving the
        resource raised."""
        self.is_stopping = True
        if self._pid is not None:
            self._wake()
            self._ended.wait_in_thread(None)
        self._raise_error()

    def do(
        self, function: Callable[[], Awaitable[T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> Done[T]:  # fmt: skip
        """In the loop. Raises RuntimeError in a thread that runs an event loop, and in
        a forked process; ClosedResourceError once the loop has ended."""
        refuse_in_event_loop(
            "this method of a blocking balancer",
            "There, use `async with sb.StreamBalancer(config)` and await; or call it in a thread (asyncio.to_thread)",
        )
        self._check()
        call, thread = _Call(function, undo), threading.get_ident()
        call.before, self._last[thread] = self._last.get(thread), call
        self.post(call)
        try:
            call.ended.wait_in_thread(None if timeout_s is None else time.monotonic() + timeout_s)
        except TimeoutError:
            self.in_loop(call.cancel)
            call.ended.wait_in_thread(None)
            if isinstance(call.error, CancelledError):
                call.error = TimeoutError(f"it was not done within {timeout_s} s, and was taken back")
        except BaseException:
            self.in_loop(call.cancel)  # or the next call of this thread does
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

    def post(self, call: _Call[Any]) -> None:
        """Have it run, without waiting for it."""
        self._check()
        self._open[call] = None  # first: who ends the loop in this moment fails what it finds there
        call.ended.then(lambda: self._open.pop(call, None))
        if self._ended.is_set():
            self._fail_all()
        else:
            self.in_loop(lambda: call.begin(self._tasks))

    def _check(self) -> None:
        if self._pid is None:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")
        if self._pid != os.getpid():
            raise RuntimeError(
                "this balancer lives in the process that made it, not in one forked from that. Serve it there, and put "
                "with sb.connect(address) here"
            )

    def in_loop(self, job: Callable[[], object]) -> None:
        """A short job. Never blocks."""
        self._jobs.append(job)
        self._wake()

    def _fail_all(self) -> None:
        for call in list(self._open):
            call.error = _LoopEnded()
            call.ended.set()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend=self._backend)
        except BaseException as error:  # noqa: BLE001 - raised by start() or stop()
            self._error = error
        self._ended.set()
        self._fail_all()
        self._opened.set()

    async def _main(self) -> None:
        loop, woken = in_loop(), anyio.Event()
        self._wake = lambda: loop(lambda: woken.set())
        async with self._resource, anyio.create_task_group() as self._tasks:
            self._opened.set()
            while not self.is_stopping:
                woken = anyio.Event()  # before looking: what is handed in from here on sets this one
                while self._jobs:
                    self._jobs.popleft()()
                await woken.wait()
            self._tasks.cancel_scope.cancel()


class Background(Generic[T]):
    """A function that runs beside. The methods are those of ``concurrent.futures.Future``."""

    def __init__(self, thread: _LoopThread, function: Callable[[], Awaitable[T]]) -> None:
        self._thread, self._call, self._seen = thread, _Call(function), False
        thread.post(self._call)

    def done(self) -> bool:
        """The call has returned, raised, or been cancelled."""
        return self._call.ended.is_set()

    def cancel(self) -> None:
        """Have it cancelled; :meth:`done` says when it is."""
        self._thread.in_loop(self._call.cancel)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for its end; what it returned. Raises what it raised, TimeoutError, CancelledError after
        :meth:`cancel`, ClosedResourceError if the balancer's block was left before it ended."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return cast("T", self._call.result)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """As :meth:`result`: what it raised, or None."""
        self._call.ended.wait_in_thread(None if timeout_s is None else time.monotonic() + timeout_s)
        self._seen = True
        return self._call.error

    def raise_unseen(self) -> None:
        """The error that it raised, unless that was asked for."""
        if not self._seen and not isinstance(self._call.error, _LoopEnded | CancelledError | None):
            raise self._call.error


class OwnLoop(Facade):
    """:class:`StreamBalancer` for threads and plain loops: ``with sb.blocking(config) as balancer``. Leaving the block
    closes it.

    ``on_evict`` and ``accept`` run in the event loop's thread; keep them short. Entering raises RuntimeError where an
    event loop runs already: there it is ``async with sb.StreamBalancer(config)``.

    Methods may be called from any thread. They do what those of the same name do there, raise the same, and may be
    interrupted (KeyboardInterrupt): a batch that was on its way comes from the next iteration, with the same step and
    plan. A ``put`` that was interrupted may have been accepted all the same: putting it again raises
    :class:`DuplicateRolloutError` then. After the block they raise ClosedResourceError.
    """

    _runner: _LoopThread

    def __init__(
        self,
        config: BalancerConfig,
        *,
        on_evict: Callable[[Rollout, EvictReason], object] | None = None,
        accept: Accept | None = None,
        backend: Literal["asyncio", "trio"] = "asyncio",
        journal: str | os.PathLike[str] | Journal | None = None,
        report_after_s: float = 60.0,
        num_producers: int | None = None,
    ) -> None:
        balancer = StreamBalancer(
            config, on_evict=on_evict, accept=accept, journal=journal, report_after_s=report_after_s,
            num_producers=num_producers,
        )  # fmt: skip
        super().__init__(balancer, _LoopThread(balancer, backend))
        self._background: list[Background[Any]] = []

    def __enter__(self) -> Self:
        refuse_in_event_loop("sb.blocking()", "Use `async with sb.StreamBalancer(config) as balancer`")
        self._runner.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._runner.stop()
        if exc_type is None:
            for background in self._background:
                background.raise_unseen()

    @property
    def balancer(self) -> StreamBalancer:
        """The asynchronous balancer inside; touch it only from the event loop's thread, through :meth:`run`."""
        return cast("StreamBalancer", self._target)

    @property
    def observers(self) -> list[Observer]:
        """Observers of what happens, notified in the event loop's thread. Append yours."""
        return self.balancer.observers

    def run(self, function: Callable[..., Awaitable[T]], *args: object, timeout_s: float | None = None) -> T:
        """Call an async function in the event loop's thread and wait for its result. Cancelled if the wait is
        interrupted."""
        return self._runner.do(partial(function, *args), timeout_s).take()

    def start(self, function: Callable[..., Awaitable[T]], *args: object) -> Background[T]:
        """Run an async function beside, until it ends or this balancer is closed. What it raises comes out of the
        ``with`` block's end, unless the returned object's result was asked for."""
        background = Background(self._runner, partial(function, *args))
        self._background.append(background)
        return background

    def serve(self, transport: Any) -> Background[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop. Wait for the returned object's ``result()`` after :meth:`end` to know that the ranks have all."""
        return self.start(_serve, self.balancer, transport)

    def state_dict(self) -> dict[str, Any]:
        """:meth:`StreamBalancer.state_dict`, flattened in the calling thread: the event loop goes on."""
        return state_dict(self._runner.call(self.balancer.snapshot))

    def close(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice, and
        after the block: if that was interrupted while it was left, this finishes it."""
        if self._runner.is_stopping:
            self._runner.stop()
        else:
            self._runner.do(self.balancer.aclose)


async def _serve(balancer: StreamBalancer, transport: Any) -> None:
    async with transport:
        await serve(balancer, transport)


async def _async(function: Callable[[], T]) -> T:
    return function()


if TYPE_CHECKING:
    from stream_balancer.facades import BlockingBalancer as BlockingBalancer
else:
    BlockingBatches = facade("BlockingBatches", Batches, without=("give_back",), undo={"__anext__": Batches.give_back})
    BlockingBalancer = facade(
        "BlockingBalancer", StreamBalancer, base=OwnLoop, timed=("reserve",),
        without=("aclose", "async_state_dict", "parts", "record_step"),
    )  # fmt: skip
blocking = BlockingBalancer
"""Name for programs: ``with sb.blocking(config) as balancer``."""
