"""The order of the waiting rollouts by cost, which the planner reads instead of sorting the window. Pure."""

from __future__ import annotations

import numpy as np

from .arrays import Bools, Floats, Ints


class CostOrder:
    """Positions by cost; of equal ones the older first.

    This one sorts when it is first asked for more than the heaviest. ``core.buffer`` has one that is kept up to
    date over puts and batches.

    Examples:
        >>> order = CostOrder(np.array([500.0, 400.0, 2400.0, 400.0]))  # oldest first
        >>> order.heaviest, order.ascending()
        (2400.0, array([1, 3, 0, 2]))
    """

    def __init__(self, costs: Floats, ascending: Ints | None = None) -> None:
        """``costs`` [n], oldest first; ``ascending`` [n] where the order is known already."""
        self._costs = costs
        self._ascending = ascending

    @property
    def costs(self) -> Floats:
        """[n] by position, oldest first."""
        return self._costs

    @property
    def heaviest(self) -> float:
        """The greatest cost; 0.0 if there is none. O(n)."""
        return float(self.costs.max(initial=0.0))

    def ascending(self) -> Ints:
        """[n] all positions, lightest first. O(n log n) at the first call."""
        # most steps ask for the heaviest only, and never sort
        if self._ascending is None:
            self._ascending = np.argsort(self.costs, kind="stable")
        return self._ascending

    def among(self, keep: Bools) -> CostOrder:
        """The order of those to keep ([n]), in positions among them. O(n)."""
        return CostOrder(self.costs[keep], kept(self.ascending(), keep))


def kept(ascending: Ints, keep: Bools) -> Ints:
    """An order after all but those to keep have left: positions count what is left. O(n): gathers, and no sort.

    Examples:
        >>> kept(np.array([1, 3, 0, 2]), keep=np.array([True, False, True, True]))
        array([2, 0, 1])
    """
    # the order is sorted already: renumbering it is a gather, where sorting what is left would be O(n log n)
    stay = np.flatnonzero(keep)
    position = np.empty(keep.size, dtype=np.int64)  # [n] among those kept; of those that leave, undefined
    position[stay] = np.arange(stay.size)
    left: Ints = position[ascending[keep[ascending]]]
    return left
