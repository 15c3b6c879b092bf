"""How many rollouts a step takes: the one place that decides it. Pure.

When a batch leaves is decided by its caller, who says how many could go; who goes, once their number is known, in
``selection``. What is sent may depend on who would go, so the choice is made here, too.

With ``batch_size_range`` the number varies round ``batch_size``: a step that is long because of an outlier takes more,
so that its ranks have work, and later ones give back what it took beyond ``batch_size`` (the *surplus*).
"""

from __future__ import annotations

import math

import numpy as np

from .arrays import Bools, rounded_up
from .bounds import lower_bound
from .plan import PlanKnobs, Waiting
from .selection import Units, forced_units, select

_GIVES_BACK = 4
"""A usual step gives back a fourth of the surplus: a third or a sixth are as good (measured), all at once is not, since
a step of few rollouts has outliers of its own."""

_WASTEFUL = 0.02
"""A step that idles more than this is tried with more rollouts."""

_LARGER = (1.25, 1.5, 1.75, 2.0, 3.0)
"""... with so many times the usual number."""

_PRICE = 0.02
"""Idle share that a step must save for taking ``batch_size`` rollouts more. 0.01-0.04 are alike; without a price steps
vary half as much again, and save nothing by it."""

_GUESSES = 2
"""Choices that are guessed from the mean length of the one before; then the range is halved."""


def usual_size(waiting: Waiting, knobs: PlanKnobs, num_available: int, surplus: int = 0) -> int:
    """Rollouts of a step that nothing makes longer, of ``num_available`` that could go; under ``batch_tokens`` if the
    oldest went. O(1), and O(W) under ``batch_tokens``."""
    if knobs.batch_tokens is not None:
        # who may not go yet takes none of the budget
        ready = waiting.group_complete | waiting.due
        tokens = np.cumsum(waiting.lengths[ready])
        nearest = int(np.abs(tokens - knobs.batch_tokens).argmin()) + 1 if tokens.size else 0
        return min(max(nearest, knobs.batch_size), num_available)
    least, most = _bounds(knobs)
    # rounded up, so that a small surplus does not stay for ever
    gives_back = -(-min(surplus, most - knobs.batch_size) // _GIVES_BACK)
    multiple = knobs.step_multiple if gives_back else 1
    return min(max((knobs.batch_size - gives_back) // multiple * multiple, least), num_available)


def select_step(
    waiting: Waiting, units: Units, knobs: PlanKnobs, num_available: int, surplus: int = 0
) -> tuple[Bools, Bools]:
    """-> ([U] goes in any case, [U] goes), of ``num_available`` rollouts that could go. ``surplus``: rollouts that
    earlier steps took beyond ``batch_size``."""
    usual = usual_size(waiting, knobs, num_available, surplus)
    if knobs.batch_tokens is not None:
        return _nearest(waiting, units, knobs, knobs.batch_tokens, usual, num_available)
    # all together never take more beyond batch_size than one step may
    multiple = knobs.step_multiple
    most = min(_bounds(knobs)[1] - surplus, num_available) // multiple * multiple
    # nothing may be added: the surplus of earlier steps has taken it, or no more wait
    if most <= usual:
        return select(waiting, units, knobs, usual)
    return _least_idle(waiting, units, knobs, usual, most)


def _nearest(
    waiting: Waiting, units: Units, knobs: PlanKnobs, budget: int, number: int, most: int
) -> tuple[Bools, Bools]:
    """The choice whose tokens come nearest to the budget, by its number of rollouts: all that is forced, and at least
    ``batch_size`` while there are so many. ``number``: where to begin.

    More rollouts have more tokens, nearly always, so each choice bounds the number. O(log most) choices; two to four
    where lengths are alike, since the mean length of one says where the next should be.
    """
    # what the skip guarantee demands goes, though the budget be passed
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
        # tokens nearly always grow with the number, so half of the range is never looked at
        if tokens < budget:
            least = number + 1
        else:
            most = number - 1
        if least > most or 2 * missed * number <= tokens:  # half a rollout of mean length is as near as can be
            return min(choices, key=lambda one: one[0])[1]
        number = round(number * budget / max(tokens, 1))
        if len(choices) > _GUESSES or not least <= number <= most:
            number = (least + most) // 2


def _least_idle(waiting: Waiting, units: Units, knobs: PlanKnobs, usual: int, most: int) -> tuple[Bools, Bools]:
    """The choice of ``usual`` rollouts, or of up to ``most`` where that idles less by more than its price. Up to six
    choices."""
    multiple = knobs.step_multiple
    due = int(units.sizes[units.due & units.ready].sum())  # what must go is not left behind to give back
    usual = max(usual, min(rounded_up(due, multiple), most))
    # the usual size first: most steps idle so little that no other is tried
    best = select(waiting, units, knobs, usual)
    least_idle = _idle(waiting, units, knobs, best[1])
    if least_idle <= _WASTEFUL:
        return best
    for size in sorted({min(round(usual * times / multiple) * multiple, most) for times in _LARGER}):
        if size > usual:
            larger = select(waiting, units, knobs, size)
            idle = _idle(waiting, units, knobs, larger[1]) + _PRICE * (size - usual) / knobs.batch_size
            if idle < least_idle:
                best, least_idle = larger, idle
    return best


def surplus_after(knobs: PlanKnobs, surplus: int, num_rollouts: int) -> int:
    """The surplus after a step of so many rollouts. Never below 0: what a step lacks for want of rollouts is not made
    up for."""
    return min(max(surplus + num_rollouts - knobs.batch_size, 0), _bounds(knobs)[1] - knobs.batch_size)


def _bounds(knobs: PlanKnobs) -> tuple[int, int]:
    return knobs.batch_size_range or (knobs.batch_size, knobs.batch_size)


def least_times(waiting: Waiting, units: Units, knobs: PlanKnobs, go: Bools) -> tuple[float, float]:
    """(mean time of a rank, when the last is done at least) in a step of these units ([U])."""
    costs = units.costs[go] if knobs.groups == "same_rank" else waiting.costs[units.of_rollouts(go)]
    mean = float(costs.sum()) / float(knobs.rate.sum())
    return mean, max(lower_bound(costs, knobs.dp_size, knobs.counts, knobs.speeds), mean)


def _idle(waiting: Waiting, units: Units, knobs: PlanKnobs, go: Bools) -> float:
    """Share of rank time that such a step idles at least."""
    mean, bound = least_times(waiting, units, knobs, go)
    return 1.0 - mean / bound if mean else 0.0
