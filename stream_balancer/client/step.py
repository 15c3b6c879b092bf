"""A step on a rank: its micro-batches, the numbers that all ranks divide by, and the meeting of the ranks.

::

    for step in feed:
        optimizer.zero_grad()
        for micro_batch in step:
            with feed.timed():
                loss_sum(micro_batch).backward()
        end = step.finish()                          # waits until every rank has finished its micro-batches
        if end is None:
            continue                                 # planned again: this gradient does not count
        try:
            all_reduce(gradients, among=end.ranks)
        except RuntimeError:                         # a rank died in the collective
            step.failed()
            continue                                 # the feed gives the step again
        scale(gradients, 1 / end.loss_tokens)
        optimizer.step()

A plain loop keeps only the last two lines after the inner ``for``, and divides by ``step.global_num_loss_tokens``.
Example: rank 0 has 900 loss tokens and rank 1 has 100; both divide by ``global_num_loss_tokens`` = 1,000.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio.lowlevel

from stream_balancer.errors import ClosedResourceError, ConfigError
from stream_balancer.facade import refuse_in_event_loop, run
from stream_balancer.rollouts import MicroBatch
from stream_balancer.rollouts.batch import Denominators, MiniBatchSize, OneRank
from stream_balancer.steps.state import Phase, Weights

if TYPE_CHECKING:
    from stream_balancer.client.port import Arrived, Port
    from stream_balancer.net.messages import Work
    from stream_balancer.steps.held import HeldStep


class End(NamedTuple):
    """Ranks that meet at the end of a step, and the numbers that all divide by."""

    ranks: tuple[int, ...]
    """Numbers that their feeds were opened with, ascending."""
    rollouts: int
    """Number over all ranks, like the next fields. Padding copies are not counted."""
    tokens: int
    loss_tokens: int
    executions: int


class Step(OneRank):
    """One rank's part of an optimizer step. Iterate it for its micro-batches, then call :meth:`finish` where ranks may
    be lost. A step is also a rank batch: ``step.micro_batches``, ``step.global_num_tokens`` and the like."""

    def __init__(self, port: Port, held: HeldStep, acknowledge: Callable[[int], None], waited_s: float) -> None:
        self._port, self._held = port, held
        self._arrived: Arrived = held.part
        self._work: Work = held.part.work
        self._acknowledge = acknowledge
        self._micro_batches: tuple[MicroBatch, ...] | None = None
        # the trainer's wait inside the step is subtracted: it is no work
        self._taken_at, self._waited_s, self._waited_before = time.monotonic(), waited_s, port.waited_s
        self._computed: list[Callable[[], float]] = []
        self._compute_s: float | None = None
        self._is_discarded = False
        self.given = False
        """The feed has returned this step."""

    # the loop

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def finish(self) -> End | None:
        """Wait until every rank has come so far. -> the ranks that meet, and the numbers that all divide by. Call it
        before the ranks meet. None: zero the gradient and go on with the feed, which gives the step again, gives a
        later step, or raises.

        In a plain loop it returns without a wait, so leave it out. Blocks. Raises like the feed.
        """
        with self._port.lock:
            found = self._look_end()
        self._port.flush()
        if found is None:
            refuse_in_event_loop("step.finish() waits for others, which", "There, `await step.async_finish()`")
            found = run(partial(self._port.wait_for, self._look_end))
        return found[0] if found else None

    async def async_finish(self) -> End | None:
        """:meth:`finish`, without blocking the event loop."""
        await anyio.lowlevel.checkpoint()
        found = await self._port.wait_for(self._look_end)
        return found[0] if found else None

    def failed(self) -> None:
        """Report a failed collective. Discard the gradient and go on with the feed, which gives the step again. From
        any thread, never blocks.

        Raises ConfigError in a plain loop: other ranks may have stepped.
        """
        with self._port.lock:
            if not self._port.held.barrier:
                raise ConfigError(
                    "step.failed() in a plain loop: other ranks may have stepped. Serve with on_rank_loss='replan' and "
                    "call step.finish() before the ranks meet, or restart all ranks from a checkpoint"
                )
            self._is_discarded = True
            # before finish() the controller need not hear: no other rank can have met
            if self.is_mine and self._held.phase is Phase.COMMITTED:
                self._port.held.failed(self._held)
        self._port.flush()

    def ack(self) -> None:
        """Acknowledge this step and every earlier step of its feed: committed, and not to be delivered again.

        With ``RankFeed(auto_ack=False)``, call it at an optimizer step or a checkpoint; otherwise before an early exit
        from the loop. From any thread, never blocks, idempotent. Raises ClosedResourceError on a closed feed.
        """
        self._acknowledge(self.step)

    # as a rank batch

    @property
    def step(self) -> int:
        """Step number, from 0, the same on every rank."""
        return self._held.number

    @property
    def rank(self) -> int:
        """Place of this rank among the ranks of the step."""
        return self._work.place

    @property
    def ranks(self) -> tuple[int, ...]:
        """DP ranks in the step, under the numbers that their feeds were opened with."""
        return self._held.ranks

    @property
    def dp_size(self) -> int:
        """Number of DP ranks in the step."""
        return len(self._held.ranks)

    @property
    def load(self) -> float:
        """Predicted work of the plan; see :attr:`RankBatch.load`."""
        return self._work.load

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All micro-batches of this rank, in the order to run."""
        if self._micro_batches is None:
            with self._port.lock:
                self._micro_batches = self._arrived.micro_batches(self._held.masked)
        return self._micro_batches

    @property
    def denominators(self) -> Denominators:
        """Denominators of the step over all ranks."""
        return self._work.sizes

    @property
    def mini_batch_sizes(self) -> tuple[MiniBatchSize, ...]:
        """Sizes of the mini-batches; empty for a step of one mini-batch."""
        return self._work.mini_batches

    def __repr__(self) -> str:
        return f"Step(step={self.step}, rank={self.rank}/{self.dp_size}, ranks={self.ranks})"

    # views under the port's lock

    @property
    def is_mine(self) -> bool:
        """The process still holds this attempt. The lock is held."""
        return self._port.held.steps.get(self.step) is self._held

    def _look_end(self) -> tuple[End, ...] | None:
        """The end, in a tuple. None: wait. Empty: this attempt has no end."""
        if self._port.closed:
            raise ClosedResourceError(f"the feed was closed, and step {self.step} will be delivered again")
        if not self.is_mine or self._held.phase is Phase.FAILED:
            return ()
        if self._held.phase is Phase.COMMITTED:
            return (End(self._held.ranks, *self._work.sizes),)
        self._port.held.computed(self._held)
        return None

    # after the loop

    @property
    def weights(self) -> Weights | None:
        """Content of the weights, if the trainer has used this step. The lock is held."""
        is_used = self.given and self._micro_batches is not None and self._held.phase is Phase.COMMITTED
        return Weights(self.step + 1, self._held.attempt) if is_used and self.is_mine else None

    def conclude(self) -> None:
        """Note that the step is in the weights, after the loop. The lock is held. Raises ConfigError if the ranks must
        meet through ``finish()`` and the loop did not call it."""
        if not self.is_mine or self._is_discarded:
            return
        if self._held.phase is not Phase.COMMITTED:
            raise ConfigError(
                f"step {self.step} may change until its ranks meet, as on_rank_loss='replan' wants it, and this "
                "loop did not ask. Before they meet, call `end = step.finish()`, after `for micro_batch in step`: "
                "docs/elastic.md has the loop"
            )
        waited_s = self._port.waited_s - self._waited_before
        seconds = max(time.monotonic() - self._taken_at - waited_s, 0.0)
        self._port.times[self.step] = (seconds, self._compute_s, self._waited_s + waited_s)
        self._port.held.met(self._held)

    def computed(self, read: Callable[[], float]) -> None:
        """Record one timed part of the trainer's work."""
        self._computed.append(read)

    def read_clocks(self) -> None:
        """Wait for accelerator clocks. Without the lock, which the I/O thread needs to receive."""
        while self._computed:
            self._compute_s = (self._compute_s or 0.0) + self._computed.pop(0)()
