"""The index of the buffer: what waits, by cost and then by arrival. Storage only, and pure.

The record is a ``sortedcontainers.SortedList`` of one integer a rollout, ``bits of the cost << 40 | arrival number``.
The bits of floats >= 0 sort as the floats do, so this is the order by (cost, arrival), and an integer is three times
cheaper to keep than a pair.

Vector work reads the same order as an array of rows. It is carried forward: what came since is merged in when somebody
asks for it, what leaves is taken out, and nothing is sorted again.
"""

from __future__ import annotations

import struct
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from sortedcontainers import SortedList

from stream_balancer.core.columns import Columns
from stream_balancer.planning.cost_order import CostOrder, kept

if TYPE_CHECKING:
    from stream_balancer.planning.arrays import Bools, Floats, Ints

__all__ = ["CostIndex"]

_ARRIVAL_BITS = 40
_COST, _NUMBER = range(2)
_REBUILD_SHARE = 16
"""From a sixteenth of all on, to take keys out of the list one by one costs more than to build it anew without them."""

_to_bytes, _to_bits = struct.Struct("<d").pack, struct.Struct("<q").unpack


class CostIndex(CostOrder):
    """Rows by cost; of equal ones the older first. Row 0 is the oldest.

    With n waiting: ``add`` is O(log n), ``heaviest`` O(1); ``ascending``, and what reads it, merges what came since the
    last call, O(n) in vector operations; ``remove`` of k rows is O(k log n), and such an O(n).

    Examples:
        >>> index = CostIndex()
        >>> for cost in (500.0, 400.0, 2400.0, 400.0):
        ...     index.add(cost)
        >>> index.heaviest, index.ascending()
        (2400.0, array([1, 3, 0, 2]))
        >>> index.remove(keep=np.array([True, True, False, True]))  # the rows after it move up
        >>> index.heaviest, index.ascending()
        (500.0, array([1, 2, 0]))
    """

    def __init__(self) -> None:
        super().__init__(np.empty(0))
        self._columns = Columns(0.0, 0)  # cost, arrival number
        self._keys: SortedList[int] = SortedList()
        self.num_added = 0
        """Rollouts ever added; the arrival number of the next one."""

    # -- in and out ----------------------------------------------------------------------------------------------------

    def add(self, cost: float) -> None:
        """The youngest row. O(log n), amortised."""
        number = self.num_added
        cost += 0.0  # -0.0 has the bits of a negative number
        row = self._columns.new_row()
        costs, numbers = self._columns.arrays
        costs[row], numbers[row] = cost, number
        self._keys.add(_to_bits(_to_bytes(cost))[0] << _ARRIVAL_BITS | number)
        self.num_added = number + 1

    def remove(self, keep: Bools) -> None:
        """All rows leave but those to keep ([n]); these keep their order, and count from 0 again."""
        ascending = self.ascending()
        # The list and this array have one order, so what is true of a place in one holds for the same place in the
        # other.
        stays = keep[ascending]  # [n] in the order of the list
        gone = ascending[~stays]
        if gone.size * _REBUILD_SHARE >= keep.size:
            self._keys = SortedList(compress(self._keys, stays.tolist()))
        else:
            for key in self._keys_of(gone):  # in their order, since neighbours lie in the same part of the list
                self._keys.remove(key)
        self._ascending = kept(ascending, keep)
        self._columns.remove(keep)

    def reprice(self, costs: Floats) -> None:
        """Other costs ([n]) for all rows: the index is built anew. O(n log n)."""
        self.costs[:] = costs + 0.0
        self._keys = SortedList(self._keys_of(np.arange(costs.size)))
        self._ascending = None

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> Floats:
        """[n] by row, oldest first (a view, valid until the next change)."""
        costs: Floats = self._columns[_COST]
        return costs

    @property
    def heaviest(self) -> float:
        """The greatest cost; 0.0 if nothing waits. O(1)."""
        if not self._keys:
            return 0.0
        cost: float = struct.unpack("<d", struct.pack("<q", self._keys[-1] >> _ARRIVAL_BITS))[0]
        return cost

    def ascending(self) -> Ints:
        """[n] all rows, lightest first. O(n); O(n log n) at the first call, and at the first after new prices."""
        if self._ascending is None:
            self._ascending = np.argsort(self.costs, kind="stable")
        known = self._ascending.size
        if known < len(self._columns):  # those that came since: of equal costs they are the youngest
            young = known + np.argsort(self.costs[known:], kind="stable")
            # [young] where each goes among the known; side="right": of equal costs the older comes first
            places = np.searchsorted(self.costs[self._ascending], self.costs[young], side="right")
            self._ascending = np.insert(self._ascending, places, young)
        return self._ascending

    def _keys_of(self, rows: Ints) -> list[int]:
        """What the list holds of them."""
        bits, numbers = self.costs[rows].view(np.int64).tolist(), self._columns[_NUMBER][rows].tolist()
        return [bit << _ARRIVAL_BITS | number for bit, number in zip(bits, numbers, strict=True)]

    def check(self) -> None:
        """Verify every invariant; for tests. O(n log n)."""
        assert list(self._keys) == sorted(self._keys_of(np.arange(len(self._columns))))
        assert np.all(np.diff(self._columns[_NUMBER]) > 0)
        if self._ascending is not None:  # of the oldest rows, as many as it has
            known = self._ascending.size
            assert self._ascending.tolist() == np.argsort(self.costs[:known], kind="stable").tolist()
