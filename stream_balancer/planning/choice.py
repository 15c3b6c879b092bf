"""Which rollouts go: forced rollouts, and others that make a step without waste.

Every rollout leaves in the end, so the total work is fixed, and the trainer's time is the sum of the step lengths. The
mean load or the heaviest rollout sets the length of a step. Time is wasted only where a rollout, an *outlier*, stands
out above the mean load. The choice is therefore about one number, the *level*: the heaviest rollout that goes.

    no outlier must go   The oldest rollouts go if they balance, otherwise the oldest light ones. Outliers wait, because
                         one step serves all outliers below its level, and more outliers may come.
    no light step does   Outliers fill the window. The step of the level below goes if it balances.
    an outlier must go   The level with the least waste, now and later, wins. The oldest rollouts below the level go.
                         While the step has room, heavier rollouts replace the lightest ones.

Example: two ranks, four rollouts go. Six 3s, six 2s, a 9, a 10 and a 40 wait. The 9 must go; the 40 may wait 8 more
steps, or 1. The most work below a level goes with that level::

    40 |                             #    level   goes         loads    waste now   waste later: the 40 may wait 8 / 1
       |                             #       9    9 3 3 3       9  9        0          3.1     /  25
    10 |                         , # #      10    10 9 3 3     13 12        0          3.1 <-- /  25
     9 |                         # # #      40    40 10 9 3    40 22        9          0       /   0 <--
     3 | # . # . # . # . # . # . # # #
         3 2 3 2 3 2 3 2 3 2 3 2 9 10 40    of equal levels the highest wins: it leaves the most freedom

- Waste now = level - (the most work below the level) / ranks. At 40: 40 - 62 / 2 = 9 on every rank.
- Waste later: an outlier left behind needs a step of its length. One step serves all outliers below its level, so
  an outlier adds only its height above the next lower outlier, or above a mean step (here 11.9) if it is the lowest.
  The height counts times the urgency = 1 - skips left / (most skips left + 1): 28.1 x 1/9 = 3.1, and 28.1 x 8/9 = 25.

**The skip bound** (`forced`). A step takes at least s rollouts: s = batch_size, or batch_size - g + 1 with whole groups
of at most g rollouts. D = max_skips. N_j = waiting rollouts with at most j skips left. Claim: N_j <= (j + 1) s holds
before every step and for every j, if never more than (D + 1) s rollouts wait.

1. `forced` takes rollouts until at most j s of the N_j stay, for every j. At most s rollouts suffice, because
   N_j - j s <= s. The last group may add g - 1, which makes batch_size together: the rollouts fit into the step.
2. A rollout that stays loses one skip. Before the next step, N_(j-1) <= j s holds: the claim for every j - 1 < D.
3. New rollouts have D skips left and count in N_D only, and N_D is at most (D + 1) s by assumption.
4. j = 0: no rollout without skips left stays behind. (Earliest deadline first: Liu and Layland 1973.)

If more rollouts wait, `forced` still takes s: nothing is refused, and a rollout may leave late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Bools, Floats, Ints, order_of, sorted_by
from .plan import PlanKnobs, Waiting

BALANCED = 1.02
"""A step balances if its heaviest rollout is within 2 % of the mean load. A finer rule adds delay and saves no time."""

# While outliers wait, the lightest 25 % of the remaining rollouts stay eligible, so that old ones still leave.
_MAY_GO = 0.25
# Part of a token cap that a micro-batch usually fills.
_ROOM = 0.95
# Numbers of light rollouts that are compared for an outlier's step with equal rollout counts.
_CHOICES = 32
# Skips left without ``max_skips``: more than any run has steps.
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Units:
    """Rollouts, or whole groups in the order of their oldest members."""

    unit_of: Ints  # [W] unit of each rollout
    sizes: Ints  # [U] rollouts of each unit
    costs: Floats  # [U] work of each unit
    peaks: Floats  # [U] costliest rollout of each unit
    remaining: Ints  # [U] steps that may still leave the unit behind
    due: Bools  # [U] a member is due, or has no skips left
    ready: Bools  # [U] the unit is complete or due

    @staticmethod
    def of(waiting: Waiting, knobs: PlanKnobs) -> Units:
        """Units of the waiting rollouts. Raises ValueError if a group is larger than a step. O(W log W)."""
        limit = _NO_LIMIT if knobs.max_skips is None else min(knobs.max_skips, _NO_LIMIT)
        remaining = np.maximum(limit - waiting.skips, 0)
        due, n = waiting.due | (remaining == 0), waiting.costs.size
        if not knobs.whole_groups or not (waiting.groups >= 0).any():
            ready = waiting.group_complete | due if knobs.whole_groups else np.ones(n, bool)
            return Units(np.arange(n), np.ones(n, np.int64), waiting.costs, waiting.costs, remaining, due, ready)
        # A rollout without a group gets a new label, above all labels in use.
        labels = np.where(waiting.groups >= 0, waiting.groups, waiting.groups.max() + 1 + np.arange(n))
        _, first, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
        if sizes.max() > knobs.batch_size:
            raise ValueError(
                f"group {labels[first[sizes.argmax()]]} has {sizes.max()} rollouts, more than a step "
                f"({knobs.batch_size}): no step can take it whole. Raise batch_size, or do not keep groups whole."
            )
        unit_of = order_of(order_of(first))[inverse]
        rows = order_of(unit_of)
        starts = np.flatnonzero(np.diff(unit_of[rows], prepend=-1))

        def of_units(how: np.ufunc, column: Any) -> Any:
            return how.reduceat(column[rows], starts)

        due, soonest = of_units(np.logical_or, due), of_units(np.minimum, remaining)
        costs, peaks = of_units(np.add, waiting.costs), of_units(np.maximum, waiting.costs)
        ready = of_units(np.logical_and, waiting.group_complete) | due
        return Units(unit_of, np.diff(starts, append=n), costs, peaks, soonest, due, ready)

    def rows(self, some: Bools | Ints) -> Ints:
        """Positions of the rollouts of some units (a mask, or numbers), oldest first."""
        go = np.zeros(self.sizes.size, bool)
        go[some] = True
        return np.flatnonzero(go[self.unit_of])

    def take(self, go: Bools, order: Ints, room: int) -> None:
        """Mark units of ``order`` in ``go`` while they fit into ``room`` rollouts; a later, smaller unit may fit."""
        enough = np.searchsorted(np.cumsum(self.sizes[order]), room, side="right")
        go[order[:enough]] = True
        room -= self.sizes[order[:enough]].sum()
        for one in order[enough:].tolist():
            if room <= 0:
                return
            if self.sizes[one] <= room:
                go[one] = True
                room -= self.sizes[one]


def must_go(units: Units, knobs: PlanKnobs, num_rollouts: int) -> Bools:
    """[U] units that the skip bound forces, then due units; earliest deadline first, as far as they fit."""
    must = np.zeros(units.sizes.size, bool)
    needed = forced(units, knobs)
    for wanted in (needed, units.due & ~needed):
        order = sorted_by(np.flatnonzero(wanted), units.remaining)
        units.take(must, order, num_rollouts - units.sizes[must].sum())
    return must


def forced(units: Units, knobs: PlanKnobs) -> Bools:
    """[U] units that must go so that no rollout is left behind by more than ``max_skips`` steps. O(W).

    Example: s = 2. Rollouts with 0, 1, 1 and 1 skips left give N_1 = 4. At most 2 may stay: the first and one more go.
    """
    largest = max(units.sizes.max(initial=1), knobs.group_size or 1 if knobs.whole_groups else 1)
    sent = _sure(knobs.batch_size, largest)
    go = np.zeros(units.sizes.size, bool)
    soon = np.flatnonzero(units.ready & (units.remaining <= units.sizes.sum() // sent))
    by_deadline = np.cumsum(np.bincount(units.remaining[soon], weights=units.sizes[soon]))
    taken = 0
    for j, waiting in enumerate(by_deadline.tolist()):
        need = min(waiting - j * sent, sent) - taken
        if need > 0:
            may = np.flatnonzero(units.ready & (units.remaining <= j) & ~go)
            may = sorted_by(may, ~units.due)  # due units first
            may = may[: np.searchsorted(np.cumsum(units.sizes[may]), need) + 1]
            go[may] = True
            taken += units.sizes[may].sum()
    return go


def smallest_max_skips(window: int, batch_size: int, capacity: int, group_size: int = 1) -> int:
    """Smallest ``max_skips`` for which the skip bound is proved and the window is useful.

    The proof needs capacity <= (max_skips + 1) * (batch_size - group_size + 1). Below 3 * (window / batch_size - 1)
    skips some rollout is forced in nearly every step, and the window chooses nothing.

    Examples:
        >>> [smallest_max_skips(window=64, batch_size=32, capacity=128, group_size=size) for size in (1, 8)]
        [3, 5]
    """
    return max(-(-capacity // _sure(batch_size, group_size)) - 1, -(-3 * (window - batch_size) // batch_size), 0)


def most_for_max_skips(max_skips: int, batch_size: int, group_size: int = 1) -> int:
    """Most waiting rollouts under the proof of the skip bound: 17 x 32 with 16 skips and 32 rollouts per step."""
    return (max_skips + 1) * _sure(batch_size, group_size)


def _sure(batch_size: int, group_size: int) -> int:
    """Rollouts that every full step takes: whole groups may leave group_size - 1 places empty."""
    return max(batch_size - group_size + 1, 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Units of one size to choose from, oldest first."""

    costs: Floats  # [U] work of each unit
    peaks: Floats  # [U] costliest rollout of each unit
    must: Bools  # [U] the unit goes in any case
    remaining: Ints  # [U] steps that may still leave the unit behind
    number: int  # units that go, ``must`` included
    ranks: int
    beside: float = 0.0  # fewest other units on the rank of a rollout (equal rollout counts)
    tokens: Ints | None = None  # [U] at most max_tokens, where ranks meet at every micro-batch
    max_tokens: int = 0  # token cap of a micro-batch
    by_peak: Ints | None = None  # [U] units by ascending peak, where the order is known

    def filler(self, go: Bools) -> float:
        """Least work on the rank of the heaviest rollout, apart from that rollout."""
        number = math.ceil(self.beside)
        return self.beside * float(np.sort(self.costs[go])[:number].mean()) if number else 0.0

    def balances(self, go: Bools) -> bool:
        """No rollout stands out above the mean load, and one micro-batch per rank holds the step."""
        fits = self.tokens is None or self.tokens[go].sum() <= _ROOM * self.ranks * self.max_tokens
        return bool(fits and self.peaks[go].max() + self.filler(go) <= BALANCED * self.costs[go].sum() / self.ranks)

    def outlier_must_go(self, lightest: Bools, heaviest: int) -> bool:
        """A unit of ``must`` stands out even in the lightest step, whose heaviest other unit is ``heaviest``."""
        peak = self.peaks[self.must].max(initial=0.0)
        mean = self.costs[lightest].sum() / self.ranks
        return bool(peak > self.peaks[heaviest] and peak + self.filler(lightest) > BALANCED * mean)


def in_pieces(step: Candidates, pieces: int, choose: Callable[[Candidates], Bools]) -> Bools:
    """[U] the units that go, chosen piece by piece: ranks meet at the end of every mini-batch."""
    if pieces == 1 or (step.peaks[step.must] > step.costs.mean() * step.number / step.ranks).any():
        return choose(step)
    go, must = np.zeros_like(step.must), step.must
    for left in range(pieces, 0, -1):
        number = round((step.number - np.count_nonzero(go)) / left)
        rest = np.flatnonzero(~go)
        first = np.zeros_like(go)
        wanted = sorted_by(np.flatnonzero(must & ~go), -step.peaks)
        high = min(np.count_nonzero(step.peaks[wanted] > step.costs.mean() * number / step.ranks), number)
        first[wanted[: max(high, wanted.size + number + np.count_nonzero(go) - step.number)]] = True
        tokens = None if step.tokens is None else step.tokens[rest]
        columns = step.costs[rest], step.peaks[rest], first[rest], step.remaining[rest]
        go[rest] = choose(Candidates(*columns, number, step.ranks, step.beside, tokens, step.max_tokens))
    return go


def choose_units(units: Candidates) -> Bools:
    """-> [U] the units that go, as in the example of the module. O(U log U)."""
    more = int(units.number - np.count_nonzero(units.must))
    others = np.flatnonzero(~units.must)
    if more >= others.size:
        return np.ones_like(units.must)

    def with_must(some: Ints) -> Bools:
        go = units.must.copy()
        go[some] = True
        return go

    oldest = with_must(others[: max(more, 0)])
    if more <= 0 or units.balances(oldest):
        return oldest
    # Ascending by costliest rollout: the first `more` make the lightest step.
    by_peak = order_of(units.peaks) if units.by_peak is None else units.by_peak
    others = by_peak[~units.must[by_peak]]
    lightest = with_must(others[:more])
    is_forced = units.outlier_must_go(lightest, others[more - 1])
    if not is_forced:
        spare = int(_MAY_GO * (others.size - more))
        for go in (with_must(np.sort(others[: more + spare])[:more]), lightest):
            if units.balances(go):
                return go
    filler = units.filler(lightest)
    go = _filled(units, _best_level(units, others, more, filler), filler)
    return go if is_forced or units.balances(go) else lightest


def _best_level(units: Candidates, others: Ints, more: int, filler: float) -> float:
    """The level with the least waste. ``others`` ascend by peak, and ``more`` units go. O(U)."""
    costs, must = units.costs, units.must
    heights = units.peaks[others] + filler
    floor = float((units.peaks[must] + filler).max(initial=0.0))
    # [levels] each level lets in one outlier more than the level before.
    first = max(more, int(np.searchsorted(heights, floor, side="right")))
    below = np.arange(first, others.size + 1)
    levels = np.maximum(heights[below - 1], floor)
    light = min(math.ceil(units.beside), more)

    # [levels] most work that goes: ``must``, the heaviest below the level, and the ``light`` lightest.
    sums = np.concatenate(([0.0], np.cumsum(costs[others])))
    most = costs[must].sum() + sums[light] + sums[below] - sums[below - more + light]
    now = np.maximum(levels - most / units.ranks, 0.0)
    fair = costs.mean() * units.number / units.ranks
    left = np.maximum(heights[first:], fair)
    urgency = 1.0 - units.remaining[others[first:]] / (units.remaining.max() + 1.0)
    # The step of an outlier serves the lower ones: each is as urgent as the most urgent outlier above.
    urgency = np.maximum.accumulate(urgency[::-1])[::-1]
    later = np.zeros(below.size)
    later[:-1] = np.cumsum((np.diff(left, prepend=fair) * urgency)[::-1])[::-1]
    # The step of the lowest outlier left behind rises from the mean step.
    later[1:-1] += (left[:-1] - fair) * urgency[1:]
    score = now + later
    return float(levels[np.flatnonzero(score <= score.min() + 1e-9 * levels[-1])[-1]])


def _filled(units: Candidates, level: float, filler: float) -> Bools:
    """[U] the oldest units below the level; heavier units replace light ones until the step is full."""
    costs, go = units.costs, units.must.copy()
    open_to = ~go & (units.peaks + filler <= level)
    if units.beside:
        go[_lightest(units, np.flatnonzero(open_to | units.must), level)] = True
        open_to &= ~go
    taken = np.flatnonzero(open_to)[: units.number - np.count_nonzero(go)]
    go[taken] = True
    open_to[taken] = False
    missing = units.ranks * level - costs[go].sum()
    left = np.flatnonzero(open_to)
    if missing > 0.0 and left.size and taken.size:
        out = sorted_by(taken, costs)[: left.size]
        come = sorted_by(left, -costs)[: out.size]
        gain = np.maximum(costs[come] - costs[out], 0.0)
        swaps = min(int(np.searchsorted(np.cumsum(gain), missing)) + 1, int((gain > 0.0).sum()))
        go[out[:swaps]], go[come[:swaps]] = False, True
    return go


def _lightest(units: Candidates, among: Ints, level: float) -> Ints:
    """Light units of a step with equal rollout counts, where a heavy rollout shares its rank with ``beside`` others.

    More light units shorten the step and hold less work; the number with the least waste wins.
    """
    more = int(units.number - np.count_nonzero(units.must))
    ascending = sorted_by(among, units.peaks)
    work = np.concatenate(([0.0], np.cumsum(units.costs[ascending])))
    peaks = np.concatenate(([0.0], np.cumsum(units.peaks[ascending])))
    # [choices, 1] numbers of light units; the heavy units begin at `heavy`.
    light = np.linspace(0, more - 1, min(more, _CHOICES)).astype(np.int64)[:, None]
    heavy = ascending.size - units.number + light
    # [ranks] the least work of that many ranks together, if the heaviest rollouts are on them.
    ranks = np.arange(1, max(min(units.ranks, units.number), 2))
    beside = np.minimum(np.ceil(ranks * units.beside).astype(np.int64), units.number)
    few = np.minimum(beside, light)
    finish = work[few] + work[heavy + beside - few] - work[heavy] + peaks[-1] - peaks[-1 - ranks]
    step = np.maximum((finish / ranks).max(axis=1), level)
    full = (work[light] + work[-1] - work[heavy])[:, 0] / units.ranks
    return ascending[: light[np.argmin(step - np.minimum(full, level)), 0]]
