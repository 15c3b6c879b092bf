"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop.

An event loop runs in a thread of its own; every method has its call made there, and waits. Whoever is interrupted
(Ctrl-C) withdraws the call: it is cancelled and waited for, and what it had got is given back. So a batch that was on
its way comes from the next iteration. Threads wait for a :class:`Signal`, which no interrupt can break. (Of 1,100
interrupts of anyio's blocking portal, which waits for futures, six broke a run; one in 50 that came while it was left.)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

import anyio
import anyio.abc

from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.core.observer import Observer
from stream_balancer.errors import ClosedResourceError
from stream_balancer.facade import Facade, Here, facade, refuse_in_event_loop
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.checkpoint import state_dict
from stream_balancer.host.journal import Journal
from stream_balancer.host.serve import serve
from stream_balancer.net.loops import Signal, in_loop
from stream_balancer.types import EvictReason, Rollout

__all__ = ["BlockingBalancer", "OwnLoop", "blocking"]

T = TypeVar("T")


class _Call(Generic[T]):
    """A function on its way through the loop. Everything but :attr:`ended` and :meth:`outcome` is the loop's."""

    def __init__(
        self, function: Callable[[], Awaitable[T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> None:  # fmt: skip
        self.ended = Signal()
        self._function, self._timeout_s, self._undo = function, timeout_s, undo
        self._scope: anyio.CancelScope | None = None
        self._is_withdrawn = False
        self._result: T | None = None
        self._error: BaseException | None = None

    async def run(self) -> None:
        try:
            with anyio.move_on_after(self._timeout_s) as self._scope:
                if not self._is_withdrawn:
                    self._result = await self._function()
            if self._scope.cancelled_caught:
                late = TimeoutError(f"it was not done within {self._timeout_s} s, and was taken back")
                self._error = CancelledError() if self._is_withdrawn else late
        except anyio.get_cancelled_exc_class():
            self._fail_closed()
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self._error = error
        finally:
            self._end()

    def withdraw(self) -> None:
        """As if it had not been called, once it has ended."""
        self._is_withdrawn = True
        # without a scope it has not begun, and will not; or it has ended, and the interrupt came before its thread knew
        if self._scope is None or self.ended.is_set():
            self._end()
        else:
            self._scope.cancel()

    def close(self) -> None:
        """The loop is over."""
        if not self.ended.is_set():
            self._fail_closed()
            self._end()

    def outcome(self) -> T:
        """Result of the function. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def _fail_closed(self) -> None:
        self._error = ClosedResourceError("this balancer is closed: its `with` block was left")

    def _end(self) -> None:
        if self._is_withdrawn and self._undo is not None and self._result is not None:
            self._undo(self._result)
        self.ended.set()


class _LoopThread(Here):
    """An event loop in a thread, with ``resource`` entered in it."""

    _tasks: anyio.abc.TaskGroup

    def __init__(self, resource: AbstractAsyncContextManager[Any], backend: Literal["asyncio", "trio"]) -> None:
        self._resource, self._backend = resource, backend
        self._pid: int | None = None
        self._open: dict[_Call[Any], None] = {}
        self._opened, self._leaving, self._ended = Signal(), Signal(), Signal()
        self._is_stopping = False
        self._in_loop: Callable[[Callable[[], object]], object] = lambda _: None
        self._error: BaseException | None = None

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
        self._is_stopping = True  # first: a loop that is being opened looks at it
        self._in_loop(self._leaving.set)
        self._ended.wait_in_thread(None)
        self._raise_error()

    def do(
        self, function: Callable[[], Awaitable[T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> T:  # fmt: skip
        """In the loop. Raises RuntimeError in a thread that runs an event loop, and in a forked process;
        ClosedResourceError once the loop has ended."""
        refuse_in_event_loop(
            "this method of a blocking balancer",
            "There, use `async with sb.StreamBalancer(config)` and await; or call it in a thread (asyncio.to_thread)",
        )
        self._check()
        call = _Call(function, timeout_s, undo)
        try:
            self._begin(call)
            call.ended.wait_in_thread(None)
        except BaseException:
            self._in_loop(call.withdraw)
            call.ended.wait_in_thread(None)
            raise
        return call.outcome()

    def call(self, function: Callable[[], T]) -> T:
        """A plain function, in the loop."""

        async def run() -> T:
            return function()

        return self.do(run)

    def beside(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """In the loop, without waiting for it. Cancelling the future cancels the call."""
        self._check()
        call, future = _Call(function), Future[T]()

        def resolve() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call.outcome())
                except BaseException as error:  # noqa: BLE001 - raised by the future
                    future.set_exception(error)

        call.ended.then(resolve)
        future.add_done_callback(lambda _: self._in_loop(call.withdraw))  # without effect on one that has ended
        self._begin(call)
        return future

    def _begin(self, call: _Call[Any]) -> None:
        self._open[call] = None  # first: who ends the loop in this moment closes what it finds there
        call.ended.then(lambda: self._open.pop(call, None))
        self._in_loop(lambda: call.close() if self._is_stopping else self._tasks.start_soon(call.run))
        if self._ended.is_set():
            call.close()

    def _check(self) -> None:
        if self._pid is None:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")
        if self._pid != os.getpid():
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
        self._ended.set()
        for call in list(self._open):
            call.close()
        self._opened.set()

    async def _main(self) -> None:
        async with self._resource, anyio.create_task_group() as self._tasks:
            # a plain callback of the loop does not know which library runs it: this task's context does
            loop, context = in_loop(), copy_context()
            self._in_loop = lambda job: loop(partial(context.run, job))
            self._opened.set()
            if not self._is_stopping:
                await self._leaving.wait()
            self._tasks.cancel_scope.cancel()


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
        self._background: list[Future[Any]] = []

    def __enter__(self) -> Self:
        refuse_in_event_loop("sb.blocking()", "Use `async with sb.StreamBalancer(config) as balancer`")
        self._runner.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._runner.stop()
        if exc_type is None:
            for future in self._background:
                if not future.cancelled() and not isinstance(error := future.exception(), ClosedResourceError | None):
                    raise error

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
        return self._runner.do(partial(function, *args), timeout_s)

    def start(self, function: Callable[..., Awaitable[T]], *args: object) -> Future[T]:
        """Run an async function beside, until it ends, the future is cancelled, or this balancer is closed, which
        cancels it, too. What it raises also comes out of the ``with`` block's end."""
        future = self._runner.beside(partial(function, *args))
        self._background.append(future)
        return future

    def serve(self, transport: Any) -> Future[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop. Wait for the future's ``result()`` after :meth:`end` to know that the ranks have all."""
        return self.start(_serve, self.balancer, transport)

    def state_dict(self) -> dict[str, Any]:
        """:meth:`StreamBalancer.state_dict`, flattened in the calling thread: the event loop goes on."""
        return state_dict(self._runner.call(self.balancer.snapshot))

    def close(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice, and
        after the block."""
        with suppress(ClosedResourceError):
            self._runner.do(self.balancer.aclose)


async def _serve(balancer: StreamBalancer, transport: Any) -> None:
    async with transport:
        await serve(balancer, transport)


if TYPE_CHECKING:
    from stream_balancer.facades import BlockingBalancer as BlockingBalancer
else:
    BlockingBatches = facade("BlockingBatches", Batches, without=("give_back",))
    BlockingBalancer = facade(
        "BlockingBalancer", StreamBalancer, base=OwnLoop, timed=("reserve",),
        without=("aclose", "async_state_dict", "parts"),
    )  # fmt: skip
blocking = BlockingBalancer
"""Name for programs: ``with sb.blocking(config) as balancer``."""
