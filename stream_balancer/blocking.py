"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop.

An event loop runs in a thread of its own (anyio's blocking portal); every method here hands its call over and waits.
Nothing is decided in this room. A call costs a thread switch, tens of microseconds: fine for rollouts that took
seconds to generate.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import anyio.from_thread

from stream_balancer._accept import Accept
from stream_balancer.balancer import Batches, StreamBalancer
from stream_balancer.config import BalancerConfig
from stream_balancer.dispatch import serve
from stream_balancer.journal import Journal, Recovered
from stream_balancer.record import Recorder
from stream_balancer.snapshot import state_dict
from stream_balancer.transport.torch_dist import TorchTransport
from stream_balancer.types import Batch, EvictReason, Rollout, Statistics

__all__ = ["BlockingBalancer", "blocking"]

T = TypeVar("T")


def blocking(
    config: BalancerConfig,
    *,
    on_evict: Callable[[Rollout, EvictReason], object] | None = None,
    accept: Accept | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
    journal: str | os.PathLike[str] | Journal | None = None,
) -> BlockingBalancer:
    """A balancer for threads and plain loops: ``with sb.blocking(config) as balancer``. Leaving the block closes it.

    ``on_evict`` and ``accept`` run in the event loop's thread; keep them short.
    """
    return BlockingBalancer(config, on_evict=on_evict, accept=accept, backend=backend, journal=journal)


class BlockingBalancer:
    """:class:`StreamBalancer` with blocking methods, callable from any thread. Use it as a context manager."""

    def __init__(
        self,
        config: BalancerConfig,
        *,
        on_evict: Callable[[Rollout, EvictReason], object] | None = None,
        accept: Accept | None = None,
        backend: Literal["asyncio", "trio"] = "asyncio",
        journal: str | os.PathLike[str] | Journal | None = None,
    ) -> None:
        self._balancer = StreamBalancer(config, on_evict=on_evict, accept=accept, journal=journal)
        self._backend: Literal["asyncio", "trio"] = backend
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._stack = ExitStack()
        self._background: list[Future[Any]] = []

    def __enter__(self) -> Self:
        self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal(self._backend))
        try:
            self._portal.call(self._balancer.__aenter__)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.close()
            for future in self._background:
                future.cancel()
        finally:
            self._stack.close()
        if exc_type is None:
            self._raise_background()

    @property
    def balancer(self) -> StreamBalancer:
        """The asynchronous balancer inside; touch it only from the event loop's thread, through :meth:`run`."""
        return self._balancer

    @property
    def config(self) -> BalancerConfig:
        """The knobs in force."""
        return self._balancer.config

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call an async function in the event loop's thread and wait for its result. Cancelled if the wait is
        interrupted."""
        future = self._loop().start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, function: Callable[..., Awaitable[Any]], *args: object) -> Future[Any]:
        """Run an async function beside, until it ends or this balancer is closed: ``start(sb.serve,
        balancer.balancer, transport)``.

        What it raises comes out of the ``with`` block's end, unless the returned future's result was asked for.
        """
        future: Future[Any] = self._loop().start_task_soon(function, *args)
        self._background.append(future)
        return future

    def serve(self, transport: TorchTransport) -> Future[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop.

        Wait for the returned future after :meth:`end` to know that the ranks have everything.
        """
        return self.start(_serve, self._balancer, transport)

    def put(self, rollout: Rollout) -> None:
        """Hand over a finished rollout; waits while the buffer is full. Raises like :meth:`StreamBalancer.put`.

        If it is interrupted (KeyboardInterrupt) the rollout may have been accepted all the same: putting it again
        raises :class:`DuplicateRolloutError` then.
        """
        self.run(self._balancer.put, rollout)

    def put_group(self, rollouts: Sequence[Rollout]) -> None:
        """Hand over all siblings of a group at once: all are accepted, or none."""
        self.run(self._balancer.put_group, rollouts)

    def put_nowait(self, rollout: Rollout) -> None:
        """:meth:`put`, or WouldBlock if the buffer is full."""
        self._loop().call(self._balancer.put_nowait, rollout)

    def batches(self, *, auto_ack: bool = True) -> Iterator[Batch]:
        """Iterate over batches in a plain ``for``. See :meth:`StreamBalancer.batches`."""
        return _BlockingBatches(self, self._loop().call(lambda: self._balancer.batches(auto_ack=auto_ack)))

    def acknowledge(self, step: int) -> None:
        """A batch has been trained on; needed only without ``auto_ack``."""
        self._loop().call(self._balancer.acknowledge, step)

    def acknowledge_through(self, step: int) -> None:
        """Your checkpoint contains all steps up to this one. See :meth:`StreamBalancer.acknowledge_through`."""
        self._loop().call(self._balancer.acknowledge_through, step)

    def nack(self, step: int) -> None:
        """A batch was not trained on after all. See :meth:`StreamBalancer.nack`."""
        self._loop().call(self._balancer.nack, step)

    @property
    def recovered(self) -> Recovered | None:
        """What the journal held; None without one."""
        return self._balancer.recovered

    def set_version(self, version: int) -> None:
        """The policy moved on. See :meth:`StreamBalancer.set_version`."""
        self._loop().call(self._balancer.set_version, version)

    def abandon_group(self, group_id: str) -> int:
        """A sibling will never come: give the group up. See :meth:`StreamBalancer.abandon_group`."""
        return self._loop().call(self._balancer.abandon_group, group_id)

    def reconfigure(self, **changes: Any) -> None:
        """Change knobs live. See :meth:`StreamBalancer.reconfigure`."""
        self._loop().call(lambda: self._balancer.reconfigure(**changes))

    def end(self) -> None:
        """No more rollouts will come: drain what waits, then ``batches()`` ends."""
        self._loop().call(self._balancer.end)

    def close(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice."""
        if self._portal is not None:
            self._portal.call(self._balancer.aclose)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`StreamBalancer.state_dict`. Flattened in the calling thread: the event loop goes on."""
        return state_dict(self._loop().call(self._balancer.snapshot))

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Continue from a :meth:`state_dict`; load before the first put. See :meth:`StreamBalancer.load_state_dict`."""
        return self._loop().call(self._balancer.load_state_dict, state)

    def record(self, path: str | os.PathLike[str]) -> Recorder:
        """Write arrivals to a trace file from now on. See :meth:`StreamBalancer.record`."""
        return self._loop().call(self._balancer.record, path)

    def statistics(self) -> Statistics:
        """A snapshot. See :meth:`StreamBalancer.statistics`."""
        return self._loop().call(self._balancer.statistics)

    def _loop(self) -> anyio.from_thread.BlockingPortal:
        if self._portal is None:
            raise RuntimeError("this balancer is not running: use it as `with sb.blocking(config) as balancer`")
        return self._portal

    def _raise_background(self) -> None:
        for future in self._background:
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error


class _BlockingBatches:
    """A plain iterator over an asynchronous one."""

    def __init__(self, owner: BlockingBalancer, batches: Batches) -> None:
        self._owner = owner
        self._batches = batches
        self._pending: Future[Batch | None] | None = None

    def __iter__(self) -> _BlockingBatches:
        return self

    def __next__(self) -> Batch:
        # An interrupted wait leaves the request pending, and the next call takes it up again: a batch it got is not
        # lost.
        if self._pending is None:
            self._pending = self._owner._loop().start_task_soon(_next_or_none, self._batches)
        try:
            batch = self._pending.result()
        finally:
            if self._pending.done():
                self._pending = None
        if batch is None:
            raise StopIteration
        return batch


async def _serve(balancer: StreamBalancer, transport: TorchTransport) -> None:
    async with transport:
        await serve(balancer, transport)


async def _next_or_none(batches: Batches) -> Batch | None:
    return await anext(batches, None)
