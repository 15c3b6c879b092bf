"""A step on a rank: its micro-batches, the numbers that all ranks divide by, and how the ranks meet.

::

    for step in feed:
        optimizer.zero_grad()
        for micro_batch in step:
            with feed.timed():
                loss_sum(micro_batch).backward()
        end = step.finish()                          # waits until every rank has come so far
        if end is None:
            continue                                 # planned again for other ranks: this gradient does not count
        try:
            all_reduce(gradients, among=end.ranks)
        except RuntimeError:                         # a rank died in the collective
            step.failed()
            continue                                 # the feed gives the step again
        scale(gradients, 1 / end.loss_tokens)
        optimizer.step()

A plain loop leaves out everything after the inner ``for`` but the last two lines, and divides by
``step.global_num_loss_tokens``.
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
    """Under the numbers that their feeds were opened with, ascending."""
    rollouts: int
    """Over all ranks, and so are the following. Padding copies are not counted."""
    tokens: int
    loss_tokens: int
    executions: int


class Step(OneRank):
    """One rank's part of an optimizer step. Iterate it for its micro-batches, then :meth:`finish` where ranks may be
    lost. It is a rank batch too: ``step.micro_batches``, ``step.global_num_tokens`` and the like."""

    def __init__(self, port: Port, held: HeldStep, acknowledge: Callable[[int], None], waited_s: float) -> None:
        self._port, self._held = port, held
        self._arrived: Arrived = held.part
        self._work: Work = held.part.work
        self._acknowledge = acknowledge
        self._micro_batches: tuple[MicroBatch, ...] | None = None
        # time that the trainer waited inside the step is taken off: it is not its own work
        self._taken_at, self._waited_s, self._waited_before = time.monotonic(), waited_s, port.waited_s
        self._computed: list[Callable[[], float]] = []
        self._compute_s: float | None = None
        self._is_discarded = False
        self.given = False
        """The feed has returned it."""

    # the loop

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def finish(self) -> End | None:
        """The ranks that meet, and the numbers that all divide by, once every rank has come so far: call it before the
        ranks meet. None if this gradient must not be used: zero it, and go on with the feed, which gives the step
        again, or a later one, or raises.

        A plain loop needs no ``finish()``; there it returns at once. Blocks. Raises what the feed raises.
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
        """A collective failed, and this gradient was discarded: go on with the feed, which gives the step again. From
        any thread, never blocks.

        Raises ConfigError in a plain loop: there the other ranks may have stepped.
        """
        with self._port.lock:
            if not self._port.held.barrier:
                raise ConfigError(
                    "step.failed() in a plain loop: other ranks may have stepped. Serve with on_rank_loss='replan' and "
                    "call step.finish() before the ranks meet, or restart all ranks from a checkpoint"
                )
            self._is_discarded = True
            # before finish() the controller need not know: no other rank may have met
            if self.is_mine and self._held.phase is Phase.COMMITTED:
                self._port.held.failed(self._held)
        self._port.flush()

    def ack(self) -> None:
        """Acknowledge this step and every earlier one of its feed: committed, and not to be delivered again.

        For ``RankFeed(auto_ack=False)``, at an optimizer step or a checkpoint; otherwise before leaving a loop early.
        From any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before.
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
        """Predicted work as planned; see :attr:`RankBatch.load`."""
        return self._work.load

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All of this rank, in the order they should run."""
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
        """Sizes of its mini-batches; empty where the step is in one piece."""
        return self._work.mini_batches

    def __repr__(self) -> str:
        return f"Step(step={self.step}, rank={self.rank}/{self.dp_size}, ranks={self.ranks})"

    # what is looked at, with the port's lock held

    @property
    def is_mine(self) -> bool:
        """The process still holds this attempt. The lock is held."""
        return self._port.held.steps.get(self.step) is self._held

    def _look_end(self) -> tuple[End, ...] | None:
        """None for "wait", an empty tuple for "never"."""
        if self._port.closed:
            raise ClosedResourceError(f"the feed was closed, and step {self.step} will be delivered again")
        if not self.is_mine or self._held.phase is Phase.FAILED:
            return ()
        if self._held.phase is Phase.COMMITTED:
            return (End(self._held.ranks, *self._work.sizes),)
        self._port.held.computed(self._held)
        return None

    # how it goes on

    @property
    def weights(self) -> Weights | None:
        """Content of the weights, if the trainer has used this step. The lock is held."""
        is_used = self.given and self._micro_batches is not None and self._held.phase is Phase.COMMITTED
        return Weights(self.step + 1, self._held.attempt) if is_used and self.is_mine else None

    def conclude(self) -> None:
        """The loop has gone on: the step is in the weights. The lock is held. Raises ConfigError if the ranks were to
        meet through ``finish()``, and the loop did not ask."""
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
        """The trainer timed a part of its work."""
        self._computed.append(read)

    def read_clocks(self) -> None:
        """Wait for what was timed on an accelerator: without the lock, or nothing would be received meanwhile."""
        while self._computed:
            self._compute_s = (self._compute_s or 0.0) + self._computed.pop(0)()
