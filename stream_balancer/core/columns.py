"""Numbers of the waiting rollouts as numpy columns, one row each, oldest first. Storage only, and pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_balancer.planning.arrays import Bools

_FIRST_ROWS = 64


class RowTable:
    """Columns of one length. Rows come at the end, and leave from anywhere, mostly from near the front.

    So it is the few older rows that move when some leave, up to the rest, and not the many newer ones.

    Examples:
        >>> columns = RowTable(0, 0.0)
        >>> for number in (10, 20, 30, 40):
        ...     row = columns.new_row()
        ...     columns.arrays[0][row], columns.arrays[1][row] = number, number / 4
        >>> columns.remove(keep=np.array([True, False, True, True]))
        >>> len(columns), columns[0], columns[1]
        (3, array([10, 30, 40]), array([ 2.5,  7.5, 10. ]))
    """

    def __init__(self, *values: float) -> None:
        """``values``: what a new row holds where nobody writes; an int makes a column of int64, a float of float64,
        False one of bools."""
        self.arrays: tuple[NDArray[Any], ...] = tuple(np.full(_FIRST_ROWS, value) for value in values)
        """The columns with the free space around them; replaced where they grow."""
        self._values = values
        self._space = _FIRST_ROWS
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, column: int) -> NDArray[Any]:
        """[n] the column of this number (a view, valid until the next change)."""
        return self.arrays[column][self._start : self._end]

    def new_row(self) -> int:
        """A new last row, for the caller to write in ``arrays``: every put comes here. O(1), amortised."""
        row = self._end
        if row == self._space:
            row = self._make_room()
        self._end = row + 1
        return row

    def remove(self, keep: Bools) -> None:
        """All rows leave but those to keep ([n]); these keep their order. O(rows up to the last one that leaves)."""
        gone = np.flatnonzero(~keep)
        if not gone.size:
            return
        behind = int(gone[-1]) + 1
        stay = np.flatnonzero(keep[:behind]) + self._start
        # the few older rows move up, since most that leave are near the front
        for array in self.arrays:
            array[self._start + gone.size : self._start + behind] = array[stay]
        self._start += gone.size

    def _make_room(self) -> int:
        """Back to the front, in twice the space unless half of it is free there. -> the first row behind the last."""
        rows = len(self)
        # else removals have freed half of it in front, and moving back is room enough
        if 2 * rows > self._space:
            self._space *= 2
        before, self.arrays = self.arrays, tuple(np.full(self._space, value) for value in self._values)
        for old, new in zip(before, self.arrays, strict=True):
            new[:rows] = old[self._start : self._end]
        self._start, self._end = 0, rows
        return rows
