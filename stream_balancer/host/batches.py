"""Batches out: the one consumer, its wait, and the return of batches that it did not take.

A batch is made on request, not before: until then rollouts stay in the window and widen the choice. A cancelled request
takes no batch: with a journal, a batch waits for the disk before it is handed out, and a cancel in that wait gives the
batch again. The core decides when a batch can leave.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TypeAlias

import anyio
import anyio.lowlevel

from stream_balancer.core.diagnosis import RankState, Taker
from stream_balancer.errors import AlreadyInUseError
from stream_balancer.host.producer_registry import ProducerRegistry
from stream_balancer.host.puts import Puts
from stream_balancer.rollouts import Batch

_log = logging.getLogger("stream_balancer.balancer")

RankStates: TypeAlias = Callable[[], list[RankState]]


class Shell(Puts):
    """Shell around a core: takes rollouts in, gives batches to one iterator at a time (the trainer's or ``serve()``'s).
    Parts of a balancer, for ``serve()``, producers and integrations; no promise for users."""

    producers: ProducerRegistry
    rank_states: RankStates | None = None
    """State of each rank. ``serve()`` sets this while it runs."""
    _iterator: Batches | None = None

    def iterate(self, *, auto_ack: bool) -> Batches:
        """A new iterator, which takes over; see :meth:`StreamBalancer.batches`."""
        self.check_thread("batches")
        self._check_alone()
        if self.rank_states is None:
            _warn_where_every_rank_balances(self.core.config.dp_size)
        self._iterator = Batches(self, auto_ack=auto_ack)
        return self._iterator

    async def next_batch(self, iterator: Batches) -> Batch | None:
        """The next batch, or None at the end. A cancelled call takes no batch."""
        self.enter("batches")
        asked_at = anyio.current_time()
        # before the poll: a cancel after the poll must give the batch back
        await anyio.lowlevel.checkpoint()
        while True:
            self._check(iterator)
            # before the checks below: cut groups are complete now
            if self.core.cut_stragglers(anyio.current_time()):
                self.changed()
            # blocked reserve() calls may be the only source of rollouts: then flush the buffer
            self.flush_if_stuck()
            batch = self.core.poll(anyio.current_time(), asked_at)
            if batch is not None:
                # before the wait for the disk: the buffer has room now, whatever becomes of the batch
                self.reporter.moved()
                self.changed()
                if self.rank_states is not None:
                    # serve() waits for the disk itself, with the ranks of the plan
                    return batch
                # the plan must be on the disk before training, so that it is the same after a crash
                try:
                    await self.handed.flush()
                except BaseException:
                    self.give_again(batch)
                    raise
                # reconfigure(dp_size=...) may have run during the flush
                is_held = self.core.in_flight.get(batch.step) is not None
                if not is_held or len(batch.ranks) == self.core.config.dp_size:
                    return batch
                self.core.nack(batch.step, was_given=False)
            elif self.core.finished:
                return None
            else:
                # no await since the poll above: its result still holds when the wait begins
                await self.wait_for_batch()

    def acknowledge(self, step: int) -> None:
        """See :meth:`StreamBalancer.acknowledge`."""
        self.check_thread("acknowledge")
        self.core.acknowledge(step)
        self.changed()

    def worked_through(self, step: int) -> None:
        """The trainer has finished this step, and may acknowledge it later."""
        self.core.finish_training(step)
        self.changed()

    def nack(self, step: int) -> None:
        """See :meth:`StreamBalancer.nack`."""
        self.check_thread("nack")
        if self.rank_states is not None:
            raise ValueError(
                f"nack({step}) while serve() delivers to ranks, which have the step. A rank gets its rank batch again "
                "by connecting under its next incarnation; nack() is for loops over batches()"
            )
        self.core.nack(step)
        if self._iterator is not None:
            self._iterator._forget(step)
        self.wake_consumer()

    def give_again(self, batch: Batch) -> None:
        """Return a batch that was not taken: the next iteration gives it, unless it was acknowledged first."""
        # an acknowledged step, or a new plan of it, leaves nothing to return
        if self.core.in_flight.get(batch.step) is batch:
            self.core.nack(batch.step, was_given=False)
        self.wake_consumer()

    @property
    def taker(self) -> Taker:
        """Current taker of batches."""
        if self.rank_states is not None:
            return "serve"
        if self.consumer_waits:
            return "asking"
        return "nobody" if self._iterator is None else "busy"

    def _check(self, iterator: Batches) -> None:
        self.check_open("batches")
        if iterator is not self._iterator:
            raise AlreadyInUseError(
                "another iterator over this balancer was made after this one and took over. " + _ONE_TRAINER
            )
        self._check_alone()

    def _check_alone(self) -> None:
        if self.consumer_waits:
            raise AlreadyInUseError("another task is already waiting for this balancer's next batch. " + _ONE_TRAINER)


def _warn_where_every_rank_balances(dp_size: int) -> None:
    """Warn if each rank seems to run a balancer: a rank then trains on only a part of its rollouts."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    # rank 0 may be the controller of all ranks; a dp_size above the world size counts processes outside this world
    if dist.get_rank() > 0 and 1 < dp_size <= dist.get_world_size():
        _log.warning(
            "rank %d iterates batches() of a balancer of its own, which plans for %d ranks. If every rank does, each "
            "trains on a part of its own rollouts, and nobody on the others. One balancer serves all ranks: "
            "sb.serve(balancer, sb.TorchTransport.in_world()) on one, `for batch in sb.RankFeed()` on each, and "
            "sb.connect() to put from each",
            dist.get_rank(),
            dp_size,
        )


_ONE_TRAINER = "One trainer iterates a balancer; to feed several ranks use serve() and RankFeed, or take batch.ranks[k]"


class Batches:
    """The iterator of :meth:`StreamBalancer.batches`. A class, since a cancelled call of a generator would end it."""

    def __init__(self, consumer: Shell, *, auto_ack: bool) -> None:
        self._consumer, self._auto_ack = consumer, auto_ack
        self._last_step: int | None = None

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. A cancelled call takes no batch."""
        # first: after a cancel, the next call must not acknowledge the step again
        step, self._last_step = self._last_step, None
        if step is not None:
            (self._consumer.acknowledge if self._auto_ack else self._consumer.worked_through)(step)
        batch = await self._consumer.next_batch(self)
        if batch is None:
            raise StopAsyncIteration
        # under serve(), acknowledgements come from ranks
        if self._consumer.rank_states is None:
            self._last_step = batch.step
        return batch

    def give_back(self, batch: Batch) -> None:
        """Return a batch that did not reach its consumer: the next iteration gives it. The blocking facade calls
        this after an interrupt."""
        self._forget(batch.step)
        self._consumer.give_again(batch)

    def _forget(self, step: int) -> None:
        """Do not acknowledge this step with the next request."""
        if self._last_step == step:
            self._last_step = None
