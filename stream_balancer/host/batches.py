"""Batches out: the one consumer, what it waits for, and what becomes of a batch that it was given.

A batch is made when it is asked for, not before: until then rollouts stay in the window, where there is most to choose
from. If asking is cancelled, no batch was taken: with a journal a batch waits for the disk between leaving and being
handed out, and one that is cancelled there is given again. When a batch can leave is decided in the core.
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
    """Shell around a core: rollouts come in, batches go out to one iterator at a time, the trainer's or
    ``serve()``'s. Parts of a balancer, for ``serve()``, producers and integrations; no promise for users."""

    producers: ProducerRegistry
    rank_states: RankStates | None = None
    """Knowledge of ``serve()`` about each rank; it sets this while it runs."""
    _iterator: Batches | None = None

    def iterate(self, *, auto_ack: bool) -> Batches:
        """The iterator that takes over; see :meth:`StreamBalancer.batches`."""
        self.check_thread("batches")
        self._check_alone()
        if self.rank_states is None:
            _warn_where_every_rank_balances(self.core.config.dp_size)
        self._iterator = Batches(self, auto_ack=auto_ack)
        return self._iterator

    async def next_batch(self, iterator: Batches) -> Batch | None:
        """The next batch, or None at the end. If cancelled, no batch was taken."""
        self.enter("batches")
        asked_at = anyio.current_time()
        # before the poll: what is awaited after it must give the batch back if it is cancelled
        await anyio.lowlevel.checkpoint()
        while True:
            self._check(iterator)
            # before anything is looked at: their groups are complete now
            if self.core.cut_stragglers(anyio.current_time()):
                self.changed()
            # reservers that wait may be all that could fill the window: then what there is must leave
            self.flush_if_stuck()
            batch = self.core.poll(anyio.current_time(), asked_at)
            if batch is not None:
                # At once, before the disk is waited for: there is room in the buffer from here on, whatever becomes of
                # the batch.
                self.reporter.moved()
                self.changed()
                if self.rank_states is not None:
                    # serve() waits for the disk itself, with the ranks of the plan
                    return batch
                # a plan is on the disk before anybody trains on it, so that it is the same after a crash
                try:
                    await self.handed.flush()
                except BaseException:
                    self.give_again(batch)
                    raise
                # The disk was awaited above, and reconfigure(dp_size=...) may have come meanwhile.
                is_held = self.core.in_flight.get(batch.step) is not None
                if not is_held or len(batch.ranks) == self.core.config.dp_size:
                    return batch
                self.core.nack(batch.step, was_given=False)
            elif self.core.finished:
                return None
            else:
                # Nothing was awaited since the poll above, so what it saw still holds when the wait begins.
                await self.wait_for_batch()

    def acknowledge(self, step: int) -> None:
        """See :meth:`StreamBalancer.acknowledge`."""
        self.check_thread("acknowledge")
        self.core.acknowledge(step)
        self.changed()

    def worked_through(self, step: int) -> None:
        """The trainer asks for more: it is through with this step, and may acknowledge it later."""
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
        """A batch that was not taken: the next iteration gives it, unless it was acknowledged meanwhile."""
        # acknowledged meanwhile, or planned again: then there is nothing to give
        if self.core.in_flight.get(batch.step) is batch:
            self.core.nack(batch.step, was_given=False)
        self.wake_consumer()

    @property
    def taker(self) -> Taker:
        """Taker of batches now."""
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
    """A balancer of its own on each rank balances that rank's rollouts alone, and nobody trains on the rest."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    # rank 0 is often the controller of all, and a dp_size above the world is that of other processes
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
    """The iterator :meth:`StreamBalancer.batches` returns. A class, not a generator: cancelling it loses nothing."""

    def __init__(self, consumer: Shell, *, auto_ack: bool) -> None:
        self._consumer, self._auto_ack = consumer, auto_ack
        self._last_step: int | None = None

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. If cancelled, none was taken."""
        # first of all: if this call is cancelled, the next one must not acknowledge the step again
        step, self._last_step = self._last_step, None
        if step is not None:
            (self._consumer.acknowledge if self._auto_ack else self._consumer.worked_through)(step)
        batch = await self._consumer.next_batch(self)
        if batch is None:
            raise StopAsyncIteration
        # serve() acknowledges by what its ranks say
        if self._consumer.rank_states is None:
            self._last_step = batch.step
        return batch

    def give_back(self, batch: Batch) -> None:
        """A batch that did not reach its consumer: the next iteration gives it. The blocking facade calls this after an
        interrupt."""
        self._forget(batch.step)
        self._consumer.give_again(batch)

    def _forget(self, step: int) -> None:
        """Asking for the next batch does not acknowledge this one."""
        if self._last_step == step:
            self._last_step = None
