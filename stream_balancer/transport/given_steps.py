"""Steps that a rank was given, and what it reported of them: none is trained on twice under its next controller.

A controller that was started again from its journal gives again every step that it does not know to be done. A rank
that has such a step already only repeats its report. It knows the step by its number, and checks the rollouts: a
controller that has lost its journal counts from 0 again, and a rank that took its new batches for old ones would report
as done what nobody has trained on. Pure: no channel, no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stream_balancer.wire.messages import StepHeld, StepReport

__all__ = ["GivenSteps"]

_MAX_STEPS = 1000  # far above what is in flight, and only what is in flight is given again


@dataclass
class _Step:
    rollout_ids: tuple[str, ...] = ()
    report: StepReport | StepHeld | None = None


class GivenSteps:
    """By the present controller, and by those before it."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._by_present: set[int] = set()
        """And not reported as done since: what the present controller waits for."""

    def add(self, step: int) -> None:
        """The present controller gives it, as the first one to do so."""
        self._steps[step] = _Step()
        self._by_present.add(step)
        if len(self._steps) > _MAX_STEPS:
            self._steps.pop(next(iter(self._steps)))

    def complete(self, step: int, rollout_ids: Sequence[str]) -> None:
        """All of it is here."""
        self._steps[step].rollout_ids = tuple(rollout_ids)

    def is_known(self, step: int) -> bool:
        """Whether one before gave it, and the present one has not yet."""
        return step in self._steps and step not in self._by_present

    def add_again(self, step: int, rollout_ids: Sequence[str]) -> StepReport | StepHeld | None:
        """The present controller gives a known step; what was reported of it, to be repeated. Raises ValueError if it
        is not the same batch."""
        known = self._steps[step]
        if known.rollout_ids != tuple(rollout_ids):
            raise ValueError(f"step {step} has other rollouts than before")
        self._by_present.add(step)
        return known.report

    def report(self, done: StepReport | StepHeld) -> bool:
        """Keep it. True if the present controller may hear it now: it breaks off with a rank that reports what it has
        not given."""
        if (step := self._steps.get(done.step)) is not None:
            step.report = done
        may_hear = done.step in self._by_present
        if isinstance(done, StepReport):
            self._by_present.discard(done.step)
        return may_hear

    def controller_lost(self) -> None:
        """The next controller has given nothing yet."""
        self._by_present.clear()
