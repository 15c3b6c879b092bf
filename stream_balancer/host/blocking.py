"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop.

An event loop runs in a thread of its own; every method has its call made there, and waits.

Ctrl-C only ever comes to the main thread, and at any line of it. So while that thread waits for a call, the handler
that was set before ``with`` runs, and what it raises is held back: the call is cancelled in the loop and waited for,
what it had got is given back, and then it is raised. So a batch that was on its way comes from the next iteration. A
second Ctrl-C is raised at once, and the next call waits for the one that was left.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

import anyio
import anyio.abc

from stream_balancer.config import BalancerConfig
from stream_balancer.core.observer import Observer
from stream_balancer.errors import ClosedResourceError
from stream_balancer.facade import Facade, Here, facade, refuse_in_event_loop
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.batches import Batches
from stream_balancer.host.checkpoint import state_dict
from stream_balancer.host.serve import serve
from stream_balancer.net.loops import Signal, in_loop

T = TypeVar("T")


class _PendingCall(Generic[T]):
    """A function on its way through the loop. Its state is changed in the loop alone."""

    def __init__(
        self, function: Callable[[], Awaitable[T]], timeout_s: float | None = None,
        undo: Callable[[T], object] | None = None,
    ) -> None:  # fmt: skip
        self.ended = Signal()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.interrupt: BaseException | None = None
        """Exception for which the waiting thread takes the call back, and raises once it has ended."""
        self._function, self._timeout_s, self._undo = function, timeout_s, undo
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> None:
        try:
            with anyio.move_on_after(self._timeout_s) as self._scope:
                if self.interrupt is None:
                    self.result = await self._function()
            if self._scope.cancelled_caught:
                self.error = TimeoutError(f"it was not done within {self._timeout_s} s, and was taken back")
        except anyio.get_cancelled_exc_class():
            self.close()
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self.error = error
        finally:
            self._end()

    def withdraw(self) -> None:
        """Take the call back: once it has ended, it is as if it had not been made."""
        # without a scope it has not begun, and will not; or it has ended, and the interrupt came before its thread knew
        if self._scope is None or self.ended.is_set:
            self._end()
        else:
            self._scope.cancel()

    def close(self) -> None:
        """Fail a call that the loop, which is over, will not finish."""
        if not self.ended.is_set:
            self.error = ClosedResourceError("this balancer is closed: its `with` block was left")
            self._end()

    def _end(self) -> None:
        # what it had got goes back once, whether the interrupt or the end came first
        if self.interrupt is not None:
            got, self.result = self.result, None
            if got is not None and self._undo is not None:
                self._undo(got)
        self.ended.set()


class _LoopThread(Here):
    """An event loop in a thread, with ``resource`` entered in it."""

    _tasks: anyio.abc.TaskGroup

    def __init__(self, resource: AbstractAsyncContextManager[Any], backend: Literal["asyncio", "trio"]) -> None:
        self._resource, self._backend = resource, backend
        self._pid: int | None = None
        self._open: set[_PendingCall[Any]] = set()
        self._waits = threading.local()  # .call: what this thread waits for
        self._opened, self._leaving, self._ended = Signal(), Signal(), Signal()
        self._in_loop: Callable[[Callable[[], object]], object] = lambda _: None
        self._handler: Any = None  # of Ctrl-C, before ours
        self._error: BaseException | None = None

    def start(self) -> None:
        """Return once the resource is entered; raise what that raised."""
        if self._pid is not None:
            raise RuntimeError("a blocking balancer is entered once: make another with sb.blocking(config)")
        self._pid = os.getpid()
        self._handler = signal.getsignal(signal.SIGINT)
        # Python allows signal.signal() in the main thread only; elsewhere no interrupt arrives, either
        if callable(self._handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._run, name="stream_balancer blocking", daemon=True).start()
        try:
            self._opened.wait_in_thread(None)
        except BaseException:
            self.stop()
            raise
        # it could not be entered
        if self._error is not None:
            self.stop()

    def stop(self) -> None:
        """Cancel the calls that have not ended, leave the resource, end the thread. Idempotent; raises what leaving the
        resource raised."""
        # no deadline: whoever leaves must know that the journal and all sockets are closed
        self._leaving.set()
        # Each call wakes the loop by itself: an interrupt may have cut off an earlier call before the wake.
        self._in_loop(lambda: self._tasks.cancel_scope.cancel())
        self._ended.wait_in_thread(None)
        is_main = threading.current_thread() is threading.main_thread()
        # who has set another one since then keeps it
        if is_main and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._handler)
        if self._error is not None:
            raise self._error

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
        call, outer = _PendingCall(function, timeout_s, undo), getattr(self._waits, "call", None)
        # its end was not waited for; without an interrupt, a handler of signals calls us in the midst of another call
        if outer is not None and outer.interrupt is not None:
            outer.ended.wait_in_thread(None)
            outer = None
        # from here on, until it is set back, an interrupt takes the call back
        self._waits.call = call
        try:
            self._begin(call)
            call.ended.wait_in_thread(None)
        except BaseException as again:
            call.interrupt = call.interrupt or again
            self._in_loop(call.withdraw)
            raise
        # Nothing is called from here to the loop of the user, not even cast(), so no interrupt comes in between, and no
        # batch is lost.
        self._waits.call = outer
        if call.interrupt is not None:
            raise call.interrupt
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def _on_interrupt(self, number: int, frame: Any) -> None:
        call = getattr(self._waits, "call", None)
        if call is None or call.interrupt is not None:
            self._handler(number, frame)
            return
        try:
            self._handler(number, frame)
        except BaseException as error:  # noqa: BLE001 - raised by do()
            call.interrupt = error
            self._in_loop(call.withdraw)

    def call(self, function: Callable[[], T]) -> T:
        """Result of a plain function, called in the loop."""

        async def run() -> T:
            return function()

        return self.do(run)

    def _begin(self, call: _PendingCall[Any]) -> None:
        if self._pid is None:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")
        if self._pid != os.getpid():
            raise RuntimeError(
                "this balancer lives in the process that made it, not in one forked from that. Serve it there, and put "
                "with sb.connect(address) here"
            )
        self._open.add(call)  # first: who ends the loop in this moment closes what it finds there
        call.ended.then(lambda: self._open.discard(call))
        self._in_loop(lambda: call.close() if self._leaving.is_set else self._tasks.start_soon(call.run))
        # the loop may have ended between the check and the hand-over: nobody else would end this call
        if self._ended.is_set:
            call.close()

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
            await self._leaving.wait()
            self._tasks.cancel_scope.cancel()


class OwnLoop(Facade):
    """:class:`StreamBalancer` for threads and plain loops: ``with sb.blocking(config) as balancer``. Leaving the block
    closes it.

    The ``options`` are those of :class:`StreamBalancer`; ``on_evict`` and ``accept`` run in the thread of its event
    loop, which is ``backend``'s; keep them short. Entering raises RuntimeError where an
    event loop runs already: there it is ``async with sb.StreamBalancer(config)``.

    Methods may be called from any thread. They do what those of the same name do there, raise the same, and may be
    interrupted (KeyboardInterrupt, or what your own handler of SIGINT raises): a batch that was on its way comes from
    the next iteration, with the same step and plan. A ``put`` that was interrupted may have been accepted all the same:
    putting it again raises :class:`DuplicateRolloutError` then. After the block they raise ClosedResourceError.
    """

    _runner: _LoopThread

    def __init__(
        self, config: BalancerConfig, *, backend: Literal["asyncio", "trio"] = "asyncio", **options: Any
    ) -> None:
        balancer = StreamBalancer(config, **options)
        super().__init__(balancer, _LoopThread(balancer, backend))
        self._threads = ThreadPoolExecutor(thread_name_prefix="stream_balancer serve")
        self._background: list[Future[None]] = []

    def __enter__(self) -> Self:
        refuse_in_event_loop("sb.blocking()", "Use `async with sb.StreamBalancer(config) as balancer`")
        self._runner.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._runner.stop()
        if exc_type is None:
            for future in self._background:
                with suppress(ClosedResourceError):
                    future.result()

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

    def serve(self, transport: Any) -> Future[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop. Wait for the future's ``result()`` after :meth:`end` to know that the ranks have all. What it raises
        also comes out of the ``with`` block's end."""
        # a thread that waits for a call to the loop: an interrupt of the main thread does not reach it
        future = self._threads.submit(self._runner.do, partial(_serve, self.balancer, transport))
        self._background.append(future)
        return future

    def state_dict(self) -> dict[str, Any]:
        """:meth:`StreamBalancer.state_dict`, flattened in the calling thread: the event loop goes on."""
        handed = self.balancer.parts.handed
        return state_dict(*self._runner.call(lambda: (self.balancer.snapshot(), handed.steps_and_ranks)))

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
