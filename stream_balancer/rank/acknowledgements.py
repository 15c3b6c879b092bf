"""The rank batches that are with a trainer: what it did with them, and what it has acknowledged.

The feed puts them in, and notes when the trainer moves on; ``batch.ack()`` ends here too. What is acknowledged goes to
the port as one report a step. Not here: waiting for rank batches (``feed``), sending reports (``transport``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from stream_balancer.errors import ClosedResourceError
from stream_balancer.transport import Port
from stream_balancer.transport.late_columns import flat_columns
from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import StepHeld, StepReport

__all__ = ["Taken"]


@dataclass
class _Step:
    """A rank batch that the trainer has and did not acknowledge."""

    number: int
    taken_at: float
    waited_s: float
    """From asking for it to taking it."""
    seconds: float | None = None
    """From taking it to asking for the next."""
    rows_s: float = 0.0
    """The same of its rows before the one in hand."""
    is_last: bool = True
    """No more rows of it come."""
    num_tokens: tuple[int, ...] = ()
    """Of each micro-batch."""
    computed: list[Callable[[], float]] = field(default_factory=list)
    """Seconds the trainer timed, to be read when it is acknowledged."""

    def report(self) -> StepReport:
        """What there is to say of it now."""
        seconds = time.monotonic() - self.taken_at + self.rows_s if self.seconds is None else self.seconds
        compute_s = sum(read() for read in self.computed) if self.computed else None
        return StepReport(self.number, seconds, compute_s, self.waited_s)


class Taken:
    """The rank batches that the trainer has, oldest first. From any thread: a checkpoint may be committed in one of
    its own."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._steps: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._ended = self._closed = False

    def add(self, batch: RankBatch, now: float, waited_s: float) -> RankBatch:
        """``batch``, with its ``ack()`` wired to here."""
        with self._lock:
            # Under the lock, since a thread that commits checkpoints may acknowledge while the trainer takes the next.
            num_tokens = tuple(micro_batch.num_tokens for micro_batch in batch.micro_batches)
            if self._steps and not self._steps[-1].is_last:
                step = self._steps[-1]
                step.taken_at, step.seconds, step.is_last = now, None, batch.is_last
                step.waited_s += waited_s
            else:
                self._steps.append(_Step(batch.step, now, waited_s, is_last=batch.is_last, num_tokens=num_tokens))
        return replace(batch, on_ack=partial(self.acknowledge, batch.step) if batch.is_last else _refuse_row)

    @property
    def step_in_hand(self) -> int:
        """The last one taken. Raises ValueError if it was acknowledged, or there is none."""
        with self._lock:
            if not self._steps or self._steps[-1].seconds is not None:
                raise ValueError(
                    "reassigned() and micro_batches() are for the batch in hand, and there is none: call them in the "
                    "loop over the feed, before batch.ack()"
                )
            if not self._steps[-1].is_last:
                raise ValueError(
                    f"reassigned() and micro_batches() are for whole steps, and more rows of step "
                    f"{self._steps[-1].number} come. Iterate batch.micro_batches"
                )
            return self._steps[-1].number

    def computed(self, read: Callable[[], float]) -> None:
        """The trainer timed a part of what it did with the last one taken."""
        with self._lock:
            if self._steps:  # else it was acknowledged before
                self._steps[-1].computed.append(read)

    def done(self, now: float, *, acknowledge: bool) -> None:
        """The last one taken is worked through."""
        with self._lock:
            last = self._steps[-1] if self._steps else None
            first_time = last is not None and last.seconds is None
            if last is not None and first_time:
                last.seconds = last.rows_s = last.rows_s + now - last.taken_at
                if last.is_last and not acknowledge and not self._closed:
                    self._port.report(StepHeld(last.number, last.seconds))
        if last is not None and acknowledge:
            self.acknowledge(last.number)

    def acknowledge(self, step: int, columns: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        """Report ``step`` and all before it, in order; with its ``columns``, where the rank has a role."""
        with self._lock:
            if not self._steps or self._steps[0].number > step:
                return  # it was acknowledged before
            if self._closed:
                raise ClosedResourceError(
                    f"batch.ack(): the feed is closed, so step {step} will be delivered again. Call ack() first"
                )
            flat = self._late_columns(step, columns)
            while self._steps and self._steps[0].number <= step and self._steps[0].is_last:
                # Oldest first, one report a step: the controller counts a step as done when each of its ranks has
                # reported that step.
                self._port.report(self._steps.popleft().report(), flat)
            # With auto_ack=False the iteration may be over long before the last acknowledgement, which nobody would
            # send later.
            if self._ended and not self._steps:
                self._port.leave()

    def _late_columns(self, step: int, columns: Mapping[str, Sequence[Tensor]] | None) -> dict[str, Tensor] | None:
        role = self._port.role
        if not role:
            if columns is not None:
                raise ValueError("batch.ack(columns=): only a feed with a role gives columns: RankFeed(..., role=...)")
            return None
        oldest = self._steps[0]
        if columns is None or oldest.number != step:
            raise ValueError(
                f"role {role!r} owes the columns of step {oldest.number}: call batch.ack(columns={{...}}) for each "
                "batch, in order, before asking for the next"
            )
        return flat_columns(columns, oldest.num_tokens)

    def end(self) -> bool:
        """No more will come. True if nothing is left to acknowledge."""
        with self._lock:
            self._ended = True
            return not self._steps

    def close(self) -> None:
        """From now on nothing can be acknowledged."""
        with self._lock:
            self._closed = True


def _refuse_row(*_: object) -> None:
    raise ValueError(
        "batch.ack(): more rows of this step come, and what is acknowledged is the whole step. Call ack() of the row "
        "that is_last"
    )
