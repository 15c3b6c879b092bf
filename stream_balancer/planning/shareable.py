"""Rollouts that several ranks may share (context parallelism): what a part costs, which degrees a step needs, and how
early it could be done at best.

A rollout of *degree* g goes to an aligned block of g ranks, ``[b * g, (b + 1) * g)``, and costs each of them
``cost / g * (1 + overhead * log2(g))``: the attention over the ring is what it costs beside the work. Pure; proofs in
bench/results/planning_proofs.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Floats, Ints
from .micro_batches import OversizeError
from .plan import PlanKnobs, part_cost
from .siblings import Siblings

_ROUNDING = 1e-12
"""A bound is so much (relatively) below what was computed: sums of floats are not exact."""


def part_tokens(lengths: Ints, degrees: Ints) -> Ints:
    """[n] tokens of a part: two of ``2 * degree`` chunks of equal length; all of them where nobody shares.

    Examples:
        >>> part_tokens(np.array([1000, 1000, 1001]), np.array([1, 2, 4]))
        array([1000,  500,  252])
    """
    return np.where(degrees == 1, lengths, 2 * -(-lengths // (2 * degrees)))


@dataclass(frozen=True, slots=True)
class Shareable:
    """The rollouts of a step, and by how many ranks each may be shared."""

    lengths: Ints
    """[n] tokens."""
    sizes: Ints
    """[degrees] ascending; the first is 1."""
    parts: Floats
    """[degrees, n] what each costs every one of its ranks; inf where it may not have that degree."""
    dp_size: int

    @classmethod
    def of(cls, costs: Floats, lengths: Ints, knobs: PlanKnobs) -> Shareable:
        """Raises OversizeError for a rollout that is above the token cap at every degree, if the knobs refuse it."""
        sizes = np.array(knobs.degrees, dtype=np.int64)
        degrees = sizes[:, None]
        may = degrees * knobs.cp_min_tokens <= lengths
        # whole on one rank is always allowed, however short it is
        may[0] = True
        cap = knobs.max_tokens_per_micro_batch
        if cap is not None:
            fits = part_tokens(lengths, degrees) <= cap  # [degrees, n]
            held = fits.any(axis=0)
            if knobs.oversize == "refuse" and not held.all():
                longest = int(lengths[~held].max())
                raise OversizeError(
                    f"a rollout of {longest} tokens is above max_tokens ({cap}) even if {sizes[-1]} ranks share it. "
                    "Raise max_tokens, truncate the rollout, or choose oversize='alone'."
                )
            # shared by as many as it takes, however short the parts are; above the cap at every degree: as if without
            may = np.where(held, (may | (degrees == sizes[fits.argmax(axis=0)])) & fits, may)
        parts = part_cost(costs, degrees, knobs.cp_overhead)
        if knobs.sync == "step":  # a shared rollout is a micro-batch by itself on each of its ranks
            parts += np.where(degrees > 1, knobs.overhead_cost, 0.0)
        return cls(lengths, sizes, np.where(may, parts, np.inf), knobs.dp_size)

    @property
    def may_stay_whole(self) -> bool:
        """No rollout has to be shared."""
        return bool(np.isfinite(self.parts[0]).all())

    @property
    def heaviest_part(self) -> float:
        """Least work of some rank: the heaviest part, each at its best degree."""
        return float(self.parts.min(axis=0).max(initial=0.0)) * (1.0 - _ROUNDING)

    def apart(self, siblings: Siblings, knobs: PlanKnobs) -> Shareable:
        """Least work of every plan of these, in which siblings of a micro-batch pay their prefix once: the
        rollouts without their prefixes, and each prefix once, by as many ranks as some sibling is shared."""
        added = Shareable.of(siblings.added, self.lengths, knobs)
        # any degree is allowed, whatever its tokens: a bound may be too low, never too high
        prefixes = part_cost(siblings.prefixes, self.sizes[:, None], knobs.cp_overhead)
        lengths = np.concatenate((self.lengths, siblings.prefix_tokens))
        return Shareable(lengths, self.sizes, np.hstack((added.parts, prefixes)), self.dp_size)

    def fitting(self, level: float) -> Ints:
        """[n] the row of the least degree at which each part is no more than the level, or of its least part."""
        fits = self.parts <= level
        rows: Ints = np.where(fits.any(axis=0), fits.argmax(axis=0), self.parts.argmin(axis=0))
        return rows

    def bound(self, places: int | None = None) -> float:
        """No plan is done before this. ``places``: the ranks that are free, if not each of them once. O(n log n) for
        each degree.

        A finish T needs of every rollout a degree at which its part is at most T, and the least of them costs least in
        all: T is possible only if that work is at most ``dp_size * T``. The least such T, exactly.
        """
        if not self.lengths.size:
            return 0.0
        reached = np.minimum.accumulate(self.parts, axis=0)  # from this T on, a degree up to this row's is enough
        work = self.parts * self.sizes[:, None]
        for row in range(1, len(work)):  # a part that is no less than one of fewer ranks is never taken
            work[row] = np.where(self.parts[row] < reached[row - 1], work[row], work[row - 1])
        # no finish is below the heaviest part at its largest degree
        first = float(reached[-1].max())
        allowed = np.isfinite(reached[:-1])
        thresholds, saved = reached[:-1][allowed], work[1:][allowed] - work[:-1][allowed]
        order = np.argsort(thresholds, kind="stable")
        thresholds = np.concatenate(([first], np.maximum(thresholds[order], first)))
        left = float(work[-1].sum()) - np.concatenate(([0.0], np.cumsum(saved[order])))
        return float(np.maximum(thresholds, left / (places or self.dp_size)).min()) * (1.0 - _ROUNDING)
