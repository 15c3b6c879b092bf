"""Units of the choice: single rollouts, or whole groups in the order of their oldest members.

Example: groups 7, 7, -1, 4, 7 give the units {0, 1, 4}, {2} and {3}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Bools, Floats, Ints
from .plan import PlanKnobs, Waiting

_NO_LIMIT = 2**62
"""Skips left without ``max_skips``: more than any run has steps."""


@dataclass(frozen=True, slots=True)
class Units:
    """Rollouts, or whole groups in the order of their oldest members."""

    unit_of: Ints | None
    """[W] unit of each rollout. None: each rollout is a unit."""
    sizes: Ints
    """[U] rollouts of each unit."""
    costs: Floats
    """[U] work of each unit."""
    peaks: Floats
    """[U] costliest rollout of each unit."""
    remaining: Ints
    """[U] steps that may still leave the unit behind."""
    due: Bools
    """[U] a member is due, or has no skips left."""
    ready: Bools
    """[U] the unit is complete or due."""

    @staticmethod
    def of(waiting: Waiting, knobs: PlanKnobs) -> Units:
        """Units of the waiting rollouts. O(W), and O(W log W) with groups.

        Raises:
            ValueError: a group is larger than a step.
        """
        limit = _NO_LIMIT if knobs.max_skips is None else knobs.max_skips
        remaining = np.maximum(limit - waiting.skips, 0)
        due, n = waiting.due | (remaining == 0), waiting.costs.size
        if not knobs.whole_groups or not bool((waiting.groups >= 0).any()):
            ready = waiting.group_complete | due if knobs.whole_groups else np.ones(n, dtype=np.bool_)
            return Units(None, np.ones(n, dtype=np.int64), waiting.costs, waiting.costs, remaining, due, ready)
        # A rollout without a group gets a label of its own, above all labels in use.
        labels = np.where(waiting.groups >= 0, waiting.groups, int(waiting.groups.max()) + 1 + np.arange(n))
        _, first, inverse, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
        if int(sizes.max()) > knobs.batch_size:
            raise ValueError(
                f"group {labels[first[sizes.argmax()]]} has {sizes.max()} rollouts, more than a step "
                f"({knobs.batch_size}): no step can take it whole. Raise batch_size, or do not keep groups whole."
            )
        unit_of = np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse]
        rows = np.argsort(unit_of, kind="stable")
        starts = np.flatnonzero(np.diff(unit_of[rows], prepend=-1))

        def of_units(how: np.ufunc, column: Any) -> Any:
            return how.reduceat(column[rows], starts)

        due = of_units(np.logical_or, due)
        return Units(
            unit_of,
            np.diff(starts, append=n),
            of_units(np.add, waiting.costs),
            of_units(np.maximum, waiting.costs),
            of_units(np.minimum, remaining),
            due,
            of_units(np.logical_and, waiting.group_complete) | due,
        )

    def rows(self, some: Bools | Ints) -> Ints:
        """Positions of the rollouts of some units (a mask, or numbers), oldest first."""
        go = np.zeros(self.sizes.size, dtype=np.bool_)
        go[some] = True
        return np.flatnonzero(go if self.unit_of is None else go[self.unit_of])

    def take(self, go: Bools, order: Ints, room: int) -> None:
        """Mark units of ``order`` in ``go`` while they fit into ``room`` rollouts; a later, smaller unit may fit."""
        enough = int(np.searchsorted(np.cumsum(self.sizes[order]), room, side="right"))
        go[order[:enough]] = True
        room -= int(self.sizes[order[:enough]].sum())
        for one in order[enough:].tolist():
            if room <= 0:
                return
            if self.sizes[one] <= room:
                go[one] = True
                room -= int(self.sizes[one])
