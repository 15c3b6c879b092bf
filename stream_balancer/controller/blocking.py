"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop.

An event loop runs in a thread of its own; every method here has its call made there, and waits. No decision is made
here. A call costs a thread switch, tens of microseconds: fine for rollouts that took seconds to generate.

Any wait may be interrupted (Ctrl-C), and any number of times: a batch that was on its way comes from the next
iteration, with the same step and the same plan, and what an interrupted call had begun is withdrawn.
:mod:`stream_balancer.transport.calls` has the argument.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, cast

from stream_balancer.config import BalancerConfig
from stream_balancer.controller.balancer import StreamBalancer
from stream_balancer.controller.batches import Batches
from stream_balancer.controller.checkpoint import state_dict
from stream_balancer.controller.journal import Journal, Recovered
from stream_balancer.controller.serve import serve
from stream_balancer.core.accept import Accept
from stream_balancer.core.observer import Observer
from stream_balancer.slots import Reservation, Slot
from stream_balancer.transport.calls import Call, CallLoop, LoopEndedError, as_async
from stream_balancer.transport.gloo.torch_dist import TorchTransport
from stream_balancer.transport.threads import OfOneProcess, refuse_in_event_loop
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["Background", "BlockingBalancer", "BlockingReservation", "BlockingSlot", "blocking"]

T = TypeVar("T")
P = ParamSpec("P")


def _waiting(
    method: Callable[Concatenate[StreamBalancer, P], Awaitable[T]],
) -> Callable[Concatenate[BlockingBalancer, P], T]:
    """An async method of the balancer, run in its event loop while the calling thread waits."""

    def call(self: BlockingBalancer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(partial(method, self._balancer, *args, **kwargs)).take()

    return _in_its_name(call, method)


def _calling(method: Callable[Concatenate[StreamBalancer, P], T]) -> Callable[Concatenate[BlockingBalancer, P], T]:
    """A plain method of the balancer, called in its event loop."""

    def call(self: BlockingBalancer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(as_async(partial(method, self._balancer, *args, **kwargs))).take()

    return _in_its_name(call, method)


def _in_its_name(call: Callable[P, T], method: Callable[..., object]) -> Callable[P, T]:
    named = wraps(method)(call)
    named.__qualname__ = f"BlockingBalancer.{method.__name__}"
    named.__module__ = __name__
    return named


class BlockingBalancer(OfOneProcess):
    """:class:`StreamBalancer` for threads and plain loops: ``with sb.blocking(config) as balancer``. Leaving the block
    closes it.

    ``on_evict`` and ``accept`` run in the event loop's thread; keep them short. Entering raises RuntimeError where an
    event loop runs already: there it is ``async with sb.StreamBalancer(config)``.

    Methods may be called from any thread. They do what those of the same name do there, raise the same, and may be
    interrupted (KeyboardInterrupt) at any moment. A ``put`` that was interrupted may have been accepted all the same:
    putting it again raises :class:`DuplicateRolloutError` then. After the block they raise ClosedResourceError.
    """

    _in_another_process = StreamBalancer._in_another_process

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
        self._balancer = StreamBalancer(
            config,
            on_evict=on_evict,
            accept=accept,
            journal=journal,
            report_after_s=report_after_s,
            num_producers=num_producers,
        )
        self._calls = CallLoop(self._balancer, backend)
        self._entered = self._left = False
        self._background: list[Background[Any]] = []

    def __enter__(self) -> Self:
        refuse_in_event_loop("sb.blocking()", "Use `async with sb.StreamBalancer(config) as balancer`")
        if self._entered:
            raise RuntimeError("a blocking balancer is entered once: make another with sb.blocking(config)")
        self._entered = True
        try:
            self._calls.start()
        except BaseException:
            self._left = True
            self._calls.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._left = True
        self._calls.stop()
        if exc_type is None:
            for background in self._background:
                background._raise_unseen()

    @property
    def balancer(self) -> StreamBalancer:
        """The asynchronous balancer inside; touch it only from the event loop's thread, through :meth:`run`."""
        return self._balancer

    @property
    def config(self) -> BalancerConfig:
        """The knobs in force."""
        return self._balancer.config

    @property
    def ended(self) -> bool:
        """As :attr:`StreamBalancer.ended`."""
        return self._balancer.ended

    @property
    def version(self) -> int | None:
        """As :attr:`StreamBalancer.version`."""
        return self._balancer.version

    @property
    def recovered(self) -> Recovered | None:
        """What the journal held; None without one."""
        return self._balancer.recovered

    @property
    def observers(self) -> list[Observer]:
        """Observers of what happens, notified in the event loop's thread. Append yours."""
        return self._balancer.observers

    # -- anything in the event loop --------------------------------------------------------------------------------

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call an async function in the event loop's thread and wait for its result. Cancelled if the wait is
        interrupted."""
        return self._call(partial(function, *args)).take()

    def start(self, function: Callable[..., Awaitable[T]], *args: object) -> Background[T]:
        """Run an async function beside, until it ends or this balancer is closed: ``start(sb.serve,
        balancer.balancer, transport)``.

        What it raises comes out of the ``with`` block's end, unless the returned object's result was asked for.
        """
        self._check_running()
        background = Background(self._calls, partial(function, *args))
        self._background.append(background)
        return background

    def serve(self, transport: TorchTransport) -> Background[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop.

        Wait for the returned object's ``result()`` after :meth:`end` to know that the ranks have everything.
        """
        return self.start(_serve, self._balancer, transport)

    # -- what StreamBalancer does ----------------------------------------------------------------------------------

    put = _waiting(StreamBalancer.put)
    put_group = _waiting(StreamBalancer.put_group)
    expect_group = _waiting(StreamBalancer.expect_group)
    close_group = _waiting(StreamBalancer.close_group)
    version_after = _waiting(StreamBalancer.version_after)
    put_nowait = _calling(StreamBalancer.put_nowait)
    acknowledge = _calling(StreamBalancer.acknowledge)
    acknowledge_through = _calling(StreamBalancer.acknowledge_through)
    nack = _calling(StreamBalancer.nack)
    in_flight = _calling(StreamBalancer.in_flight)
    record_step_seconds = _calling(StreamBalancer.record_step_seconds)
    straggler = _calling(StreamBalancer.straggler)
    set_version = _calling(StreamBalancer.set_version)
    abandon_group = _calling(StreamBalancer.abandon_group)
    reconfigure = _calling(StreamBalancer.reconfigure)
    end = _calling(StreamBalancer.end)
    snapshot = _calling(StreamBalancer.snapshot)
    load_state_dict = _calling(StreamBalancer.load_state_dict)
    record = _calling(StreamBalancer.record)
    statistics = _calling(StreamBalancer.statistics)
    rank_states = _calling(StreamBalancer.rank_states)
    why_no_batch = _calling(StreamBalancer.why_no_batch)

    def batches(self, *, auto_ack: bool = True, open: bool = False) -> Iterator[Batch]:
        """Iterate over batches in a plain ``for``. See :meth:`StreamBalancer.batches`.

        One thread iterates at a time; another one's iterator raises :class:`AlreadyInUseError`. An interrupted ``for``
        may be begun again, with this iterator or a new one: the batch that was on its way comes first.
        """
        return _BlockingBatches(
            self, self._call(as_async(lambda: self._balancer.batches(auto_ack=auto_ack, open=open))).take()
        )

    def reserve(self, count: int = 1) -> BlockingReservation:
        """A slot for rollouts that are still to be generated: ``with balancer.reserve() as slot:
        slot.put(rollout)``. See :meth:`StreamBalancer.reserve`."""
        return BlockingReservation(self, self._balancer.reserve(count))

    def state_dict(self) -> dict[str, Any]:
        """:meth:`StreamBalancer.state_dict`, flattened in the calling thread: the event loop goes on."""
        return state_dict(self.snapshot())

    def close(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice, and
        after the block: if that was interrupted while it was left, this finishes it."""
        if self._left:
            self._calls.stop()
        elif self._entered:
            self._call(self._balancer.aclose)

    def _call(self, function: Callable[[], Awaitable[T]], undo: Callable[[T], object] | None = None) -> Call[T]:
        self._check_running()
        return self._calls.call(function, undo)

    def _check_running(self) -> None:
        if not self._entered:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")


blocking = BlockingBalancer
"""What a program says: ``with sb.blocking(config) as balancer``."""


class _BlockingBatches:
    """A plain iterator over an asynchronous one."""

    def __init__(self, owner: BlockingBalancer, batches: Batches) -> None:
        self._owner = owner
        self._batches = batches

    def __iter__(self) -> _BlockingBatches:
        return self

    def __next__(self) -> Batch:
        call = self._owner._call(self._next_or_none, self._batches.give_back)
        batch, call.result, call.taken = call.result, None, True  # the last that an interrupt can undo
        if batch is None:
            raise StopIteration
        return batch

    async def _next_or_none(self) -> Batch | None:
        return await anext(self._batches, None)


class BlockingReservation:
    """What :meth:`BlockingBalancer.reserve` returns; enter it to wait for the slot."""

    def __init__(self, owner: BlockingBalancer, reservation: Reservation) -> None:
        self._owner = owner
        self._reservation = reservation

    def __enter__(self) -> BlockingSlot:
        """Block until so many rollouts may begin. If interrupted, nothing was reserved."""
        slot = BlockingSlot(self._owner)
        call = self._owner._call(self._reservation.__aenter__, Slot.release)
        slot._slot, call.result, call.taken = cast("Slot", call.result), None, True
        return slot

    def __exit__(self, *_: object) -> None:
        self._owner._call(partial(self._reservation.__aexit__, None, None, None))


class BlockingSlot:
    """:class:`~stream_balancer.slots.Slot` with blocking methods."""

    _slot: Slot

    def __init__(self, owner: BlockingBalancer) -> None:
        self._owner = owner

    @property
    def version(self) -> int:
        """Policy version when the slot was admitted: what a rollout without a version of its own gets."""
        return self._slot.version

    @property
    def left(self) -> int:
        """Rollouts that may still be put."""
        return self._slot.left

    def put(self, rollout: Rollout) -> None:
        """As :meth:`Slot.put`."""
        self._owner._call(partial(self._slot.put, rollout)).take()

    def put_group(self, rollouts: Sequence[Rollout], *, complete: bool = False) -> None:
        """As :meth:`Slot.put_group`."""
        self._owner._call(partial(self._slot.put_group, rollouts, complete=complete)).take()


class Background(Generic[T]):
    """What :meth:`BlockingBalancer.start` runs. The methods are those of ``concurrent.futures.Future``, whose lock an
    interrupt could leave taken."""

    def __init__(self, calls: CallLoop, function: Callable[[], Awaitable[T]]) -> None:
        self._calls = calls
        self._call: Call[T] = Call(function)
        self._seen = False
        calls.post(self._call)

    def done(self) -> bool:
        """It has returned, raised, or been cancelled."""
        return self._call.ended.is_set()

    def cancel(self) -> None:
        """Have it cancelled; :meth:`done` says when it is."""
        if not self.done():
            self._calls.post(Call(as_async(self._call.cancel)))

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for its end; what it returned. Raises what it raised, TimeoutError, CancelledError after
        :meth:`cancel`, ClosedResourceError if the balancer's block was left before it ended."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return cast("T", self._call.result)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """As :meth:`result`: what it raised, or None."""
        if not self._call.ended.wait(timeout_s):
            raise TimeoutError(f"it has not ended within {timeout_s} s")
        self._seen = True
        return self._call.error

    def _raise_unseen(self) -> None:
        if not self._seen and not isinstance(self._call.error, LoopEndedError | CancelledError | None):
            raise self._call.error


async def _serve(balancer: StreamBalancer, transport: TorchTransport) -> None:
    async with transport:
        await serve(balancer, transport)
