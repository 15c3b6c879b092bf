"""What a rank takes over of lost ranks: parts of steps that its trainer has, one after the other, until all are done.

::

    trainer: next(step) --PartsDone--> controller --ReassignedPart--> next(step) is that part
                                                  --StepComplete----> next(step) says that no rank has more

A controller that loses a rank after it has said "complete" sends a part all the same: what was said is then void. No
channel, no thread; the port's lock is held around every call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import PartsDone, StepComplete

__all__ = ["ReassignedParts"]


@dataclass
class _Parts:
    """Of one step."""

    arrived: deque[RankBatch] = field(default_factory=deque)
    taken: int = 0
    is_asking: bool = False
    complete: StepComplete | None = None


class ReassignedParts:
    """One rank's, of each step from its first question to its acknowledgement."""

    def __init__(self) -> None:
        self._by_step: dict[int, _Parts] = {}

    def __contains__(self, step: object) -> bool:
        return step in self._by_step

    def __len__(self) -> int:
        return len(self._by_step)

    def next(self, step: int) -> RankBatch | StepComplete | None:
        """The next part; or that there is no more, on any rank. Each is given once; None: neither has come."""
        parts = self._by_step.setdefault(step, _Parts())
        if parts.arrived:
            parts.taken += 1
            return parts.arrived.popleft()
        complete, parts.complete = parts.complete, None
        return complete

    def ask(self, step: int) -> PartsDone | None:
        """What to ask the controller, after :meth:`next` had nothing; None if it was asked and has not replied."""
        parts = self._by_step[step]
        if parts.is_asking:
            return None
        parts.is_asking = True
        return PartsDone(step, parts.taken)

    def add(self, part: RankBatch) -> None:
        """One has come, of a step that the rank has."""
        parts = self._by_step.setdefault(part.step, _Parts())
        parts.arrived.append(part)
        parts.is_asking, parts.complete = False, None

    def complete(self, message: StepComplete) -> None:
        """There is no more. Without effect on a step that is acknowledged, or was not asked for."""
        parts = self._by_step.get(message.step)
        if parts is not None:
            parts.is_asking, parts.complete = False, message

    def done(self, step: int) -> None:
        """It is acknowledged."""
        self._by_step.pop(step, None)
