"""What :meth:`RankFeed.reassigned` gives, a name of before: the same loop as over a step, in rank batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from stream_balancer.client.step import Step
from stream_balancer.types import MicroBatch, RankBatch

__all__ = ["Reassigned"]


class Reassigned:
    """What a rank takes over in a step beyond ``micro_batches``: an iterator over rank batches. See
    :meth:`RankFeed.reassigned`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        _ = step.micro_batches  # all of them are this rank's
        iter(step)

    @property
    def ranks(self) -> tuple[int, ...]:
        """:attr:`End.ranks`, once it has ended."""
        return self._step.ranks

    def __iter__(self) -> Iterator[RankBatch]:
        return self

    def __next__(self) -> RankBatch:
        """The next part. Blocks until every rank is here."""
        try:
            return self._part(next(self._step))
        except StopIteration:
            self._check()
            raise

    def __aiter__(self) -> AsyncIterator[RankBatch]:
        return self

    async def __anext__(self) -> RankBatch:
        """As ``next()``, without blocking the event loop."""
        try:
            return self._part(await self._step.__anext__())
        except StopAsyncIteration:
            self._check()
            raise

    def _part(self, micro_batch: MicroBatch) -> RankBatch:
        step = self._step
        return RankBatch(
            step=step.step,
            rank=step.rank,
            dp_size=step.dp_size,
            micro_batches=(micro_batch,),
            load=0.0,
            denominators=step.denominators,
            on_ack=step.ack,
        )

    def _check(self) -> None:
        step = self._step
        if not step.ranks:
            why = step.dropped or "it begins again, since ranks that share rollouts were lost"
            text = f"step {step.step} is not this rank's any more: {why}. Loops that call step.finish() can go on"
            raise step._port.give_up(step.step, text)
