"""What a rank takes over in a step, of ranks that were lost or are slow: the iterators behind ``RankFeed.reassigned()``
and ``RankFeed.micro_batches()``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import anyio

from stream_balancer.rank.arrivals import Arrivals
from stream_balancer.rank.device import Pace
from stream_balancer.transport.threads import refuse_in_event_loop
from stream_balancer.types import MicroBatch, RankBatch
from stream_balancer.wire.messages import StepComplete

__all__ = ["MicroBatches", "Reassigned"]


class Reassigned:
    """What a rank takes over in one step: an iterator over rank batches. See :meth:`RankFeed.reassigned`."""

    def __init__(self, arrivals: Arrivals, take: Callable[[], RankBatch | StepComplete | None]) -> None:
        """``take()`` gives the next part, or that the step is complete; None if neither is here yet."""
        self._arrivals = arrivals
        self._take = take
        self.ranks: tuple[int, ...] = ()
        """Once it has ended: the ranks that are left in the step, under the numbers that their feeds were opened with,
        ascending."""

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        """The next part. Blocks until every rank is here."""
        refuse_in_event_loop("`for` over reassigned()", "There, use `async for`")
        with self._arrivals.one_user:
            part = cast("RankBatch | StepComplete", self._arrivals.wait_for(self._take))
        if isinstance(part, RankBatch):
            return part
        self.ranks = part.ranks
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[RankBatch]:
        return self

    async def __anext__(self) -> RankBatch:
        """As ``next()``, without blocking the event loop. If cancelled, no part was taken."""
        await anyio.lowlevel.checkpoint()
        with self._arrivals.one_user:
            part = cast("RankBatch | StepComplete", await self._arrivals.wait_in_loop_for(self._take))
        if isinstance(part, RankBatch):
            return part
        self.ranks = part.ranks
        raise StopAsyncIteration


class MicroBatches:
    """All that a rank works on in one step, micro-batch by micro-batch: see :meth:`RankFeed.micro_batches`."""

    def __init__(self, batch: RankBatch, begin: Callable[[], int | None], others: Reassigned, pace: Pace) -> None:
        """``begin()`` gives the index of the next one in ``batch`` that is this rank's; None when no more are."""
        self._batch = batch
        self._begin = begin
        self._others = others
        self._part: Iterator[MicroBatch] = iter(())  # what is left of the part that was taken over last
        self._pace = pace

    @property
    def ranks(self) -> tuple[int, ...]:
        """As :attr:`Reassigned.ranks`: once it has ended, who meets."""
        return self._others.ranks

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next one to work on. Blocks, once this rank has nothing left to do, until every rank has not."""
        refuse_in_event_loop("`for` over micro_batches()", "There, use `async for`")
        while (found := self._next_at_hand()) is None:
            self._part = iter(next(self._others).micro_batches)
        return found

    def __aiter__(self) -> AsyncIterator[MicroBatch]:
        return self

    async def __anext__(self) -> MicroBatch:
        """As ``next()``, without blocking the event loop. If cancelled, none was begun."""
        while (found := self._next_at_hand()) is None:
            self._part = iter((await anext(self._others)).micro_batches)
        return found

    def _next_at_hand(self) -> MicroBatch | None:
        self._pace.keep()
        index = self._begin()
        found = next(self._part, None) if index is None else self._batch.micro_batches[index]
        if found is None:
            self._pace.finish()  # idle is who has nothing left to compute, not who has nothing left to enqueue
        return found
