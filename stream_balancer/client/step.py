"""A step on a rank: the micro-batches that are this rank's, as they can begin, and what all divide by.

::

    for step in feed:
        optimizer.zero_grad()
        for micro_batch in step:                     # own, taken over; ends when nothing is left
            with feed.timed():
                loss_sum(micro_batch).backward()
        end = step.finish()                          # waits for the seal
        if end is None:
            continue                                 # rewound: it comes again. Dropped: the next one comes
        all_reduce(gradients, among=end.ranks)       # it fails? iterate `step` and finish() again
        scale(gradients, 1 / end.tokens)
        optimizer.step()
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio.lowlevel

from stream_balancer.errors import ClosedResourceError, ConfigError
from stream_balancer.facade import refuse_in_event_loop, run
from stream_balancer.rollouts import MicroBatch
from stream_balancer.rollouts.batch import Denominators, MiniBatchSize, OneRank

if TYPE_CHECKING:
    from stream_balancer.client.held import HeldWork, Part
    from stream_balancer.client.port import Port

_T = TypeVar("_T")


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
    """Step: what one rank has of an optimizer step. Iterate it for its micro-batches, then :meth:`finish`.

    It is a rank batch too: ``step.micro_batches``, ``step.global_num_tokens`` and the like wait until the step is
    complete.
    """

    def __init__(self, port: Port, part: Part, acknowledge: Callable[[int], None], waited_s: float) -> None:
        self._port, self._held, self._part = port, port.held, part
        self._acknowledge = acknowledge
        self._whole: tuple[MicroBatch, ...] | None = None
        self._end: End | None = None
        # time that the trainer waited inside the step is taken off: it is not its own work
        self._taken_at, self._waited_s, self._waited_before = time.monotonic(), waited_s, port.waited_s
        self._computed: list[Callable[[], float]] = []
        self._compute_s: float | None = None
        self.given = False
        """The feed has returned it."""

    # the loop

    def __iter__(self) -> Iterator[MicroBatch]:
        self._begin_again()
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch that can begin. Blocks until there is one, or nothing is left on any rank."""
        instead = "`async for micro_batch in step`"
        found = self._at_once(self._look_next, "iterating a step", instead)
        if not found:
            raise StopIteration
        return found[0]

    def __aiter__(self) -> AsyncIterator[MicroBatch]:
        self._begin_again()
        return self

    async def __anext__(self) -> MicroBatch:
        """As ``next()``, without blocking the event loop. If cancelled, none was begun."""
        # each item is a place to be cancelled at, also where nothing is waited for
        await anyio.lowlevel.checkpoint()
        found = await self._port.wait_for(self._look_next)
        if not found:
            raise StopAsyncIteration
        return found[0]

    def finish(self) -> End | None:
        """The ranks that meet, and the numbers that all divide by, once every rank has come so far: call it before the
        ranks meet. None if this gradient must not be used: zero it, and go on with the feed. Either the step begins
        again, since a rank of a lockstep was lost, or it was taken away; then :attr:`dropped` says why.

        Blocks. Raises ValueError if the loop over the step was left before its end, and what the feed raises.
        """
        found = self._at_once(self._look_end, "step.finish()", "`await step.async_finish()`")
        return found[0] if found else None

    async def async_finish(self) -> End | None:
        """:meth:`finish`, without blocking the event loop."""
        await anyio.lowlevel.checkpoint()
        found = await self._port.wait_for(self._look_end)
        return found[0] if found else None

    @property
    def dropped(self) -> str | None:
        """Why the step was taken away from this rank; None while it was not."""
        return self._part.dropped

    def ack(self) -> None:
        """Acknowledge this step and every earlier one of its feed: committed, and not to be delivered again.

        For ``RankFeed(auto_ack=False)``, at an optimizer step or a checkpoint; otherwise before leaving a loop early.
        From any thread, never blocks, idempotent. Raises ClosedResourceError if the feed was closed before, ValueError
        for a step that is not complete.
        """
        self._acknowledge(self.step)

    # as a rank batch

    @property
    def step(self) -> int:
        """Step number, from 0, the same on every rank."""
        return self._part.number

    @property
    def rank(self) -> int:
        """DP rank that trains on it: its number in the step."""
        place = self._part.head.rank
        return self._port.who.rank if place is None else place

    @property
    def dp_size(self) -> int:
        """DP ranks in the step."""
        return self._part.head.dp_size

    @property
    def load(self) -> float:
        """Predicted work as planned; see :attr:`RankBatch.load`."""
        return self._part.head.load

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """All of this rank, in the order they should run, once the step is complete."""
        if self._whole is None:
            self._at_once(self._look_whole, "step.micro_batches", "`async for micro_batch in step`")
        assert self._whole is not None
        return self._whole

    @property
    def denominators(self) -> Denominators:
        """Denominators of the step over all ranks. Waits until the step is complete."""
        self._wait_for_sizes()
        sizes = self._part.sizes if self._part.seal is None else self._part.seal.sizes
        if sizes is None:
            raise ValueError(f"step {self.step} was taken away before its denominators were known. Go on with the feed")
        return sizes

    @property
    def mini_batch_sizes(self) -> tuple[MiniBatchSize, ...]:
        """Sizes of its mini-batches; empty where the step is in one piece."""
        planned = self._part.head.mini_batches
        if not planned:
            return ()
        self._wait_for_sizes()
        seal = self._part.seal
        if seal is None or not seal.mini_batches:
            return planned
        # some payloads are gone
        return tuple(MiniBatchSize(*one[:2], *left) for one, left in zip(planned, seal.mini_batches, strict=True))

    def __repr__(self) -> str:
        return f"Step(step={self.step}, rank={self.rank}/{self.dp_size}, micro_batches={len(self._part.work)})"

    # what is looked at, with the port's lock held: None for "wait", an empty tuple for "over"

    def _at_once(self, look: Callable[[], _T | None], what: str, instead: str) -> _T:
        with self._port.lock:
            found = look()
        self._port.flush()
        if found is not None:
            return found
        refuse_in_event_loop(f"{what} waits for others, which", f"There, {instead}")
        return run(partial(self._port.wait_for, look))

    @property
    def is_mine(self) -> bool:
        """The step was not taken away, rewound or finished. The lock is held."""
        return self._held.is_current(self._part)

    @property
    def _is_whole(self) -> bool:
        part = self._part
        if part.is_whole:
            return True
        if self._held.meets and part.is_remote and self.is_mine:
            raise ConfigError(
                f"step {self.step} may change, and some payloads are with their producers: what is left of it is known "
                "when its ranks meet. Iterate `for micro_batch in step`, and divide by `end = step.finish()`"
            )
        return False

    def _begin_again(self) -> None:
        """``for`` over a step that had ended: the ranks that it named could not meet."""
        with self._port.lock:
            if self._end is not None and self._held.meets and self.is_mine:
                self._held.meeting_failed(self._part)
                self._end = None
            elif self._part.dropped is not None:
                self._end = None
        self._port.flush()

    def _look_next(self) -> tuple[MicroBatch, ...] | None:
        self._check_open()
        if not self.is_mine:
            return ()
        self._put_down()
        work = self._held.next_work(self._part)
        if work is None:
            return () if self._has_ended() else None
        made = self._of(work)
        work.begun = True
        return (made,)

    def _look_end(self) -> tuple[End, ...] | None:
        # from now on the feed gives steps before they are complete: this loop ends them itself
        self._port.by_item = True
        # after an interrupt: the same end, not another wait
        if self._end is not None:
            return (self._end,)
        self._check_open()
        if not self.is_mine:
            return ()
        self._put_down()
        # a gradient without them would be divided by too much
        if left := sum(not work.begun for work in self._part.work.values()):
            raise ValueError(
                f"step.finish(): {left} micro-batches of step {self.step} are left for this rank; some may have been "
                "another's, which was lost. Iterate `for micro_batch in step` until it ends, then finish()"
            )
        return None if not self._has_ended() or self._end is None else (self._end,)

    def _look_whole(self) -> tuple[MicroBatch, ...] | None:
        if (self.is_mine and not self._is_whole) or not self._part.is_fetched:
            return None
        self._whole = tuple(map(self._of, self._part.work.values()))
        for one in self._part.work.values():
            # they stay with this rank: the loop has them all in hand
            one.begun = True
        return self._whole

    def _wait_for_sizes(self) -> None:
        self._at_once(
            lambda: self._is_whole or not self.is_mine or None,
            "reading what a step is divided by",
            "`end = await step.async_finish()`",
        )

    def look_complete(self) -> bool | None:
        """Nothing more of it comes: it can be finished. The lock is held."""
        return not self.is_mine or self._held.meets or self._part.is_whole or None

    def _has_ended(self) -> bool:
        """Nothing is left to do, on any rank that this one must meet."""
        if not self._part.is_done:
            return False
        seal = self._held.reach_end(self._part)
        if seal is not None:
            self._end = End(seal.ranks, *seal.sizes)
        return seal is not None

    def _check_open(self) -> None:
        if self._port.closed:
            raise ClosedResourceError(f"the feed was closed, and step {self.step} will be delivered again")

    def _put_down(self) -> None:
        """The loop is through with what it has."""
        for work in self._part.work.values():
            if work.begun and not work.done:
                self._held.has_done(self._part, work)

    def _of(self, work: HeldWork) -> MicroBatch:
        """The micro-batch of an item, the same each time."""
        if work.made is None:
            arrived, index = work.payload
            work.made = arrived.micro_batch(index, self._part.gone, self._part.seal)
        made: MicroBatch = work.made
        return made

    # how it goes on

    def conclude(self, *, ack: bool) -> None:
        """The loop has gone on: the step is in the weights. The lock is held. Raises ConfigError if others may have
        changed it meanwhile."""
        if not self.is_mine:
            return
        if self._held.meets and self._end is None:
            raise ConfigError(
                f"step {self.step} may change until its ranks meet, as on_rank_loss='replan' wants it, and this "
                "loop did not ask. Before they meet, call `end = step.finish()`, after `for micro_batch in step`: "
                "docs/elastic.md has the loop"
            )
        waited_s = self._port.waited_s - self._waited_before
        seconds = max(time.monotonic() - self._taken_at - waited_s, 0.0)
        times = (seconds, self._compute_s, self._waited_s + waited_s)
        self._held.has_finished(self._part, ack=ack, times=times)

    def computed(self, read: Callable[[], float]) -> None:
        """The trainer timed a part of its work."""
        self._computed.append(read)

    def read_clocks(self) -> None:
        """Wait for what was timed on an accelerator: without the lock, or nothing would be received meanwhile."""
        while self._computed:
            self._compute_s = (self._compute_s or 0.0) + self._computed.pop(0)()

    @property
    def is_given(self) -> bool:
        """All of it was given to the trainer. The lock is held."""
        return not self.is_mine or (self._is_whole and all(work.begun for work in self._part.work.values()))
