"""How many rollouts a step takes: the one place that decides it. Pure.

When a batch leaves is decided by its caller, who says how many could go; who goes, once their number is known, in
``selection``. What is sent may depend on who would go, so the choice is made here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .selection import Units, select

if TYPE_CHECKING:
    from .arrays import Bools
    from .plan import PlanKnobs, Waiting

__all__ = ["select_step", "usual_size"]


def usual_size(knobs: PlanKnobs, num_available: int) -> int:
    """Rollouts of a step, of ``num_available`` that could go."""
    return min(num_available, knobs.batch_size)


def select_step(waiting: Waiting, units: Units, knobs: PlanKnobs, num_available: int) -> tuple[Bools, Bools]:
    """-> ([U] goes in any case, [U] goes), of ``num_available`` rollouts that could go."""
    return select(waiting, units, knobs, usual_size(knobs, num_available))
