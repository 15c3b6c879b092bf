"""The seconds that ranks report for a step, collected until all of its ranks have. Pure."""

from __future__ import annotations

from typing import NamedTuple

from stream_balancer.types import RankBatch

__all__ = ["StepTimes", "StepTiming"]

_MOST_PENDING = 256
"""Steps of which only some ranks have reported."""


class StepTiming(NamedTuple):
    """What one rank reports of one step."""

    step: int
    rank: int
    seconds: float
    """It computed."""
    own: bool = True
    """It did not wait for other ranks in them; only such seconds teach a ``CalibratedCost``."""
    waited_s: float | None = None
    """From asking for its rank batch to taking it; None = as long as the balancer waited for rollouts."""
    ready_s: float = 0.0
    """How long it had been ready for more when the last rank was."""
    roles_s: float = 0.0
    """How long its step was with other roles, which compute columns, before the rank was given it."""
    worked_on: tuple[RankBatch, ...] | None = None
    """What it trained on, where that is another part of the step than was planned for it."""


class StepTimes:
    """The reports of steps that are not complete; of the newest ones, since some rank may never report."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, StepTiming]] = {}  # step, rank

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, timing: StepTiming, num_ranks: int) -> list[StepTiming] | None:
        """-> what all of its ``num_ranks`` ranks reported of this step, in rank order; None while one is missing.
        O(1)."""
        of_step = self._pending.setdefault(timing.step, {})
        of_step[timing.rank] = timing
        if len(self._pending) > _MOST_PENDING:
            del self._pending[min(self._pending)]
        if len(of_step) < num_ranks:
            return None
        del self._pending[timing.step]
        return [of_step[rank] for rank in range(num_ranks)]

    def acknowledged(self, step: int) -> None:
        """Rollouts of this step are needed no more. A rank that is lost never reports: what the others trained on would
        stay here, and with it payloads that producers keep for it."""
        if (of_step := self._pending.get(step)) is not None:
            self._pending[step] = {rank: timing._replace(worked_on=None) for rank, timing in of_step.items()}

    def forget(self, step: int) -> None:
        """It is planned for other ranks now: what the former ones reported does not count."""
        self._pending.pop(step, None)
