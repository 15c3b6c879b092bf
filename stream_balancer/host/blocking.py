"""The same balancer for code without an event loop: rollout workers in threads, a trainer in a plain loop."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, Self, TypeVar

from stream_balancer.config import BalancerConfig
from stream_balancer.core.accept import Accept
from stream_balancer.core.observer import Observer
from stream_balancer.facade import Facade, refuse_in_event_loop
from stream_balancer.host.balancer import StreamBalancer
from stream_balancer.host.journal import Journal
from stream_balancer.loop_thread import Background, LoopThread
from stream_balancer.types import EvictReason, Rollout

__all__ = ["OwnLoop"]

T = TypeVar("T")


class OwnLoop(Facade):
    """:class:`StreamBalancer` for threads and plain loops: ``with sb.blocking(config) as balancer``. An event loop runs
    in a thread of its own; every method has its call made there, and waits. Leaving the block closes it.

    ``on_evict`` and ``accept`` run in the event loop's thread; keep them short. Entering raises RuntimeError where an
    event loop runs already: there it is ``async with sb.StreamBalancer(config)``.

    Methods may be called from any thread. They do what those of the same name do there, raise the same, and may be
    interrupted (KeyboardInterrupt) at any moment, any number of times: a batch that was on its way comes from the next
    iteration, with the same step and plan. A ``put`` that was interrupted may have been accepted all the same: putting
    it again raises :class:`DuplicateRolloutError` then. After the block they raise ClosedResourceError.
    """

    _runner: LoopThread

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
        super().__init__(balancer, LoopThread(balancer, backend))
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
        balancer: StreamBalancer = self._target
        return balancer

    @property
    def observers(self) -> list[Observer]:
        """Observers of what happens, notified in the event loop's thread. Append yours."""
        return self.balancer.observers

    def run(self, function: Callable[..., Awaitable[T]], *args: object, timeout_s: float | None = None) -> T:
        """Call an async function in the event loop's thread and wait for its result. Cancelled if the wait is
        interrupted."""
        return self._runner.do(partial(function, *args), timeout_s).take()

    def start(self, function: Callable[..., Awaitable[T]], *args: object) -> Background[T]:
        """Run an async function beside, until it ends or this balancer is closed: ``start(sb.serve,
        balancer.balancer, transport)``.

        What it raises comes out of the ``with`` block's end, unless the returned object's result was asked for.
        """
        background = Background(self._runner, partial(function, *args))
        self._background.append(background)
        return background

    def serve(self, transport: Any) -> Background[None]:
        """Feed every rank's :class:`RankFeed` beside, until all is drained and acknowledged: :func:`serve` in the
        event loop.

        Wait for the returned object's ``result()`` after :meth:`end` to know that the ranks have everything.
        """
        return self.start(_serve, self.balancer, transport)

    def state_dict(self) -> dict[str, Any]:
        """:meth:`StreamBalancer.state_dict`, flattened in the calling thread: the event loop goes on."""
        from stream_balancer.host.checkpoint import state_dict

        return state_dict(self._runner.call(self.balancer.snapshot))

    def close(self) -> None:
        """Stop at once: whoever waits in ``put`` or ``batches()`` gets ClosedResourceError. May be called twice, and
        after the block: if that was interrupted while it was left, this finishes it."""
        if self._runner.is_stopping:
            self._runner.stop()
        elif self._runner.is_started:
            self._runner.do(self.balancer.aclose)


async def _serve(balancer: StreamBalancer, transport: Any) -> None:
    from stream_balancer.host.serve import serve

    async with transport:
        await serve(balancer, transport)
