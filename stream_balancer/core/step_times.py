"""The seconds that a rank reports for a step. Pure."""

from __future__ import annotations

from typing import NamedTuple

from stream_balancer.types import RankBatch


class StepTiming(NamedTuple):
    """Report of one rank on one step."""

    step: int
    rank: int
    seconds: float
    """Seconds of compute."""
    own: bool = True
    """The rank did not wait for others in them; only such seconds teach a ``CalibratedCost``."""
    waited_s: float | None = None
    """From asking for its rank batch to taking it; None = as long as the balancer waited for rollouts."""
    ready_s: float = 0.0
    """How long it had been ready for more when the last rank was."""
    roles_s: float = 0.0
    """How long its step was with other roles, which compute columns, before the rank was given it."""
    worked_on: tuple[RankBatch, ...] | None = None
    """Rank batches that it trained on, where that is another part of the step than was planned for it."""
