"""How many rollouts a step takes: the one place that decides it. Pure.

When a batch leaves is decided by its caller, who says how many could go; who goes, once their number is known, in
``selection``. What is sent may depend on who would go, so the choice is made here, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .selection import Units, forced_units, select

if TYPE_CHECKING:
    from .arrays import Bools
    from .plan import PlanKnobs, Waiting

__all__ = ["select_step", "usual_size"]

_GUESSES = 2
"""Choices that are guessed from the mean length of the one before; then the range is halved."""


def usual_size(waiting: Waiting, knobs: PlanKnobs, num_available: int) -> int:
    """Rollouts of a step, of ``num_available`` that could go; under ``batch_tokens`` if the oldest went. O(W)."""
    if knobs.batch_tokens is None:
        return min(num_available, knobs.batch_size)
    ready = waiting.group_complete | waiting.due
    tokens = np.cumsum(waiting.lengths[ready])
    nearest = int(np.abs(tokens - knobs.batch_tokens).argmin()) + 1 if tokens.size else 0
    return min(max(nearest, knobs.batch_size), num_available)


def select_step(waiting: Waiting, units: Units, knobs: PlanKnobs, num_available: int) -> tuple[Bools, Bools]:
    """-> ([U] goes in any case, [U] goes), of ``num_available`` rollouts that could go."""
    number = usual_size(waiting, knobs, num_available)
    if knobs.batch_tokens is None:
        return select(waiting, units, knobs, number)
    return _nearest(waiting, units, knobs, knobs.batch_tokens, number, num_available)


def _nearest(
    waiting: Waiting, units: Units, knobs: PlanKnobs, budget: int, number: int, most: int
) -> tuple[Bools, Bools]:
    """The choice whose tokens come nearest to the budget, by its number of rollouts: all that is forced, and at least
    ``batch_size`` while there are so many. ``number``: where to begin.

    More rollouts have more tokens, nearly always, so each choice bounds the number. O(log most) choices; two to four
    where lengths are alike, since the mean length of one says where the next should be.
    """
    forced = int(units.sizes[forced_units(units)].sum())
    most = max(most, forced)
    least = max(forced, min(knobs.batch_size, most))
    choices: list[tuple[float, tuple[Bools, Bools]]] = []  # by how many tokens each misses the budget
    while True:
        number = min(max(number, least), most)
        choice = select(waiting, units, knobs, number)
        tokens = int(units.amounts[choice[1]].sum())
        missed = abs(tokens - budget) if tokens else math.inf  # too few for any whole group
        choices.append((missed, choice))
        if tokens < budget:
            least = number + 1
        else:
            most = number - 1
        if least > most or 2 * missed * number <= tokens:  # half a rollout of mean length is as near as can be
            return min(choices, key=lambda one: one[0])[1]
        number = round(number * budget / max(tokens, 1))
        if len(choices) > _GUESSES or not least <= number <= most:
            number = (least + most) // 2
