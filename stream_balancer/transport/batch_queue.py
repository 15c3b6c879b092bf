"""A rank's queue of batches, and which of its steps the rank was given, by which controller.

::

    check -> expect -> enter     --> queue --take--> trainer --report--> controller
    check -> give_again (known)  --'  a controller that was started again gives what it does not know to be done

A batch has its place in the queue before it is complete, so batches leave in the order in which they came. No channel,
no thread; the port's lock is held around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from stream_balancer.errors import RankLostError, WireError
from stream_balancer.transport.channel import unexpected
from stream_balancer.transport.given_steps import GivenSteps
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import Batch, JoinRank, PartialBatch, ReassignedPart, StepHeld, StepReport

__all__ = ["Arriving", "BatchQueue"]


@dataclass(eq=False)
class Arriving:
    """A batch in the queue; or the place of one that is not complete."""

    step: int
    batch: RankBatch | None = None
    by_present: bool = True
    """The present controller has given it, and gets the credit back when it is taken."""


class BatchQueue:
    """Of one rank: what has come and was not taken, and what it was given by controllers before the present one."""

    def __init__(self, request: JoinRank, *, rejoins: bool) -> None:
        """``request``: how many batches the controller may send before the trainer takes one, and how large they may
        be. ``rejoins``: a controller that is lost is started again, and gives again what it does not know to be
        done."""
        self.taken = 0
        """Batches of the present controller that were taken: its credits."""
        self.working_on: int | None = None
        """The step that was taken last, until it is reported."""
        self._rank, self._depth, self._max_bytes = request.rank, request.depth, request.max_batch_bytes
        self._queue: deque[Arriving] = deque()
        self._arrived = 0  # from the present controller
        self._newest_step = -1
        self._row_ids: tuple[str, ...] = ()  # of the newest step, while more rows of it come
        self._given = GivenSteps() if rejoins else None

    @property
    def is_complete(self) -> bool:
        """Whether no batch waits for its payloads or denominators."""
        return all(arriving.batch is not None for arriving in self._queue)

    @property
    def is_open(self) -> bool:
        """Whether rows of a step have come, and not its last one."""
        return bool(self._row_ids)

    @property
    def is_empty(self) -> bool:
        """Whether every batch was taken."""
        return not self._queue

    def has(self, step: int) -> bool:
        """Whether it waits here, or the trainer works on it."""
        return step == self.working_on or any(arriving.step == step for arriving in self._queue)

    def is_known(self, step: int) -> bool:
        """Whether a controller before the present one gave it, and this one has not yet."""
        return self._given is not None and self._given.is_known(step)

    def check(self, message: Batch | PartialBatch, total_bytes: int, sizes: Sequence[int]) -> None:
        """Before any allocation: raise WireError unless it is this rank's, against a credit, not larger than was
        allowed, and of a later step (one may have been given up). A part: of a step that the rank was given. Raises
        RankLostError if a controller that was started again does not know what it had given."""
        me, step = f"rank {self._rank}", message.step
        is_part = isinstance(message, ReassignedPart)
        if is_part and step > self._newest_step:
            raise unexpected(message, f"before step {step} itself")
        if not message.rank < message.dp_size:  # both are of the step: ranks may come and go while others stay
            raise WireError(f"{me}: got a batch for rank {message.rank} of {message.dp_size}")
        if total_bytes > self._max_bytes:
            raise WireError(
                f"{me}: step {step} announces {total_bytes} bytes, more than max_batch_bytes ({self._max_bytes}). "
                "Raise max_batch_bytes of RankFeed, or lower batch_size"
            )
        if tuple(sizes) != (message.wire_bytes,) or not 0 < message.meta_bytes <= message.wire_bytes <= total_bytes:
            raise WireError(f"{me}: step {step} announces impossible sizes: {message}, {sizes}")
        if not is_part:
            self._check_turn(message)

    def _check_turn(self, message: Batch | PartialBatch) -> None:
        step = message.step
        next_row = self.is_open and step == self._newest_step
        if self.is_open and not next_row:
            raise WireError(f"rank {self._rank}: got step {step} before the last row of step {self._newest_step}")
        if step <= self._newest_step and not next_row and not (isinstance(message, Batch) and self.is_known(step)):
            if self._given is not None:
                raise self._other_controller(f"step {step} comes after step {self._newest_step}")
            raise WireError(f"rank {self._rank}: got step {step} after step {self._newest_step}")
        if self._arrived - self.taken >= self._depth:
            raise WireError(f"rank {self._rank}: the controller sent step {step} without a credit")

    def expect(self, step: int) -> Arriving:
        """The place of a batch that has come, or whose payloads are still to come."""
        arriving = Arriving(step)
        self._arrived += 1
        self._newest_step = step
        self._queue.append(arriving)
        if self._given is not None and not self.is_open:
            self._given.add(step)
        return arriving

    def enter(self, arriving: Arriving, batch: RankBatch) -> None:
        """It is complete."""
        arriving.batch = batch
        rollout_ids = self._row_ids + _ids(batch)
        if self._given is not None:
            self._given.complete(arriving.step, rollout_ids)
        self._row_ids = () if batch.is_last else rollout_ids

    def take(self) -> RankBatch | None:
        """The next one; None if it is not complete, or there is none."""
        first = self._queue[0] if self._queue else None
        if first is None or first.batch is None:
            return None
        self._queue.popleft()
        self.taken += first.by_present
        self.working_on = first.step
        return first.batch

    def report(self, done: StepReport | StepHeld) -> bool:
        """The trainer has. True if the present controller may hear it now, else when it has given the step."""
        if isinstance(done, StepReport):
            self.working_on = None
        return self._given is None or self._given.report(done)

    def give_again(self, batch: RankBatch) -> tuple[bool, StepReport | StepHeld | None]:
        """The present controller gives a known step. Whether it was taken before, so that its credit goes back now;
        and what was reported of it, to be repeated. Raises RankLostError if it is another batch."""
        assert self._given is not None
        try:
            report = self._given.add_again(batch.step, _ids(batch))
        except ValueError as error:
            raise self._other_controller(str(error)) from None
        self._arrived += 1
        waiting = [arriving for arriving in self._queue if arriving.step == batch.step]
        for arriving in waiting[-1:]:  # of several rows the last: the step has come in one message this time
            arriving.by_present = True
        self.taken += not waiting
        return not waiting, report

    def controller_lost(self) -> None:
        """The next one has given nothing yet. What is here stays, but its credits died with who gave them."""
        if self._given is not None:
            self._given.controller_lost()
        for arriving in self._queue:
            arriving.by_present = False
        self._arrived = self.taken = 0

    def drop_incomplete(self) -> None:
        """What is not complete will not be, nor can what is behind it be trained on."""
        self._queue = deque(takewhile(lambda arriving: arriving.batch is not None, self._queue))

    def clear(self) -> None:
        """Nothing of it is wanted any more."""
        self._queue.clear()

    def _other_controller(self, why: str) -> RankLostError:
        return RankLostError(
            f"rank {self._rank}: its controller was started again without its journal: {why}. What it had accepted is "
            "lost. Start the controller with its journal, or the ranks again too",
            rank=self._rank,
            step=self.working_on,
            cause=why,
        )


def _ids(batch: RankBatch) -> tuple[str, ...]:
    return tuple(rollout.rollout_id for rollout in batch.rollouts)
