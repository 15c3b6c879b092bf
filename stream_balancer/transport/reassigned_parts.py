"""What a rank takes over of others, and what others take over of it: parts of steps that its trainer has.

::

    trainer: begin(step) is the next micro-batch of its own, until none is left: local, no message
                                       controller --Release--> release() --Released--> the last ones are not begun
    trainer: next(step) --PartsDone--> controller --ReassignedPart--> next(step) is that part
                                                  --StepComplete----> next(step) says that no rank has more

A controller that loses a rank after it has said "complete" sends a part all the same: what was said is then void. No
channel, no thread; the port's lock is held around every call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stream_balancer.types import RankBatch
from stream_balancer.wire.messages import PartsDone, Release, Released, StepComplete

__all__ = ["ReassignedParts"]


@dataclass
class _Parts:
    """Of one step."""

    arrived: deque[RankBatch] = field(default_factory=deque)
    taken: int = 0
    is_asking: bool = False
    complete: StepComplete | None = None
    begun: int = 0
    own: int | None = None
    """Of its rank batch, the micro-batches that stay with it. None: all, for its trainer does not begin them here."""
    idle: int = 0
    """Ranks that have nothing left to do, as far as the controller has said."""
    is_reassigned: bool = False
    """The controller was asked, has asked, or has sent a part."""


class ReassignedParts:
    """One rank's, of each step from the first micro-batch begun, or the first question, to its acknowledgement."""

    def __init__(self) -> None:
        self._by_step: dict[int, _Parts] = {}

    def __contains__(self, step: object) -> bool:
        return step in self._by_step

    @property
    def any_reassigned(self) -> bool:
        """Of some step it may have to do more, or less, than its rank batch."""
        return any(parts.is_reassigned for parts in self._by_step.values())

    def begin(self, step: int, number: int) -> tuple[int | None, Released | None]:
        """The trainer begins the next of the ``number`` micro-batches that it was given: the index; None: no more. With
        the first, what the controller has asked for before."""
        parts = self._by_step.setdefault(step, _Parts())
        is_first = parts.own is None
        if parts.own is None:
            parts.own = number
        if parts.begun == parts.own:
            return None, None
        parts.begun += 1
        return parts.begun - 1, _spared(step, parts) if is_first and parts.idle else None

    def release(self, message: Release) -> Released:
        """Which ones this rank can spare. None before it has begun any, for its trainer may want them all at once."""
        parts = self._by_step.setdefault(message.step, _Parts())
        parts.idle, parts.is_reassigned = message.idle, True
        return _spared(message.step, parts)

    def next(self, step: int) -> RankBatch | StepComplete | None:
        """The next part; or that there is no more, on any rank. Each is given once; None: neither has come."""
        parts = self._by_step.setdefault(step, _Parts())
        parts.is_reassigned = True
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
        parts.is_asking, parts.complete, parts.is_reassigned = False, None, True

    def complete(self, message: StepComplete) -> None:
        """There is no more. Without effect on a step that is acknowledged, or was not asked for."""
        parts = self._by_step.get(message.step)
        if parts is not None:
            parts.is_asking, parts.complete = False, message

    def done(self, step: int) -> None:
        """It is acknowledged."""
        self._by_step.pop(step, None)


def _spared(step: int, parts: _Parts) -> Released:
    """The last of those that are not begun; the rank keeps as many as each idle one gets, rounded down."""
    if parts.own is None:
        return Released(step, 0)
    left = parts.own - parts.begun
    moved = left - left // (parts.idle + 1)
    parts.own -= moved
    return Released(step, moved)
