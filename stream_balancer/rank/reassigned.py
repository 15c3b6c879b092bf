"""What a rank takes over in a step, of ranks that were lost: the iterator behind ``RankFeed.reassigned()``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import anyio

from stream_balancer.rank.arrivals import Arrivals
from stream_balancer.transport.threads import refuse_in_event_loop
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import StepComplete

__all__ = ["Reassigned"]


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
