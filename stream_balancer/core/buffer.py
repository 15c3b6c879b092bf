"""The waiting rollouts, in two orders: by arrival, and by (cost, arrival).

By arrival they are rows of numpy columns, which the planner reads as they are. By cost they are an array of rows,
which is carried from batch to batch; those that came since it was read are in a ``sortedcontainers.SortedList`` beside
it, and are merged in when it is read next. So each rollout is in one of the two: nothing is sorted twice, and what
leaves is taken out by one gather. The list has an integer for each, ``bits of the cost << 40 | row``: the bits of
floats >= 0 sort as the floats do, and a pair weighs three times as much, and keeps the garbage collector busy. Storage
only: what may enter and what leaves is decided in :mod:`stream_balancer.core.machine`. Pure: no clock, no torch, no
waiting.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from stream_balancer.core.groups import SiblingGroups
from stream_balancer.planning import Waiting
from stream_balancer.planning.arrays import Bools, Floats, Ints, kept
from stream_balancer.rollouts import Rollout

NO_VERSION = 2**63 - 1  # a rollout of unknown version is never stale
NO_ROWS: Ints = np.empty(0, dtype=np.int64)
_UNWRITTEN: list[Any] = []
"""By column what a row holds where nobody writes."""
_FIRST_ROWS = 64
_MERGE_EVERY = 4096
_ROW_BITS = 40

_to_bytes, _to_bits = struct.Struct("<d").pack, struct.Struct("<q").unpack


def _empty(rows: int) -> tuple[NDArray[Any], ...]:
    return tuple(np.full(rows, value) for value in _UNWRITTEN)


def _column(unwritten: Any) -> Any:
    place = len(_UNWRITTEN)
    _UNWRITTEN.append(unwritten)
    # no __getattr__: with one, a put would read every other attribute three times as slowly
    return property(lambda self: self._arrays[place][self._start : self._end])


class Buffer:
    """Waiting rollouts; row 0 is the oldest. Columns are views, valid until the next change; :meth:`add` has their
    order."""

    costs: Floats = _column(0.0)
    """[n] work of each rollout."""
    lengths: Ints = _column(0)
    """[n] tokens of each."""
    skips: Ints = _column(0)
    """[n] steps that passed each over."""
    arrived_at: Floats = _column(0.0)
    """[n] arrival times in seconds, oldest first."""
    versions: Ints = _column(NO_VERSION)
    """[n] oldest policy version of each; ``NO_VERSION`` where unknown."""
    labels: Ints = _column(-1)
    """[n] group label of each, -1 = none."""
    _rollouts: NDArray[np.object_] = _column(None)

    def __init__(self, group_size: int | None) -> None:
        self.groups = SiblingGroups(group_size)
        """Groups of the rollouts."""
        self.num_tokens = 0
        """Tokens of the waiting rollouts."""
        self.num_waiting = 0
        """Waiting rollouts."""
        # the columns, with free space around rows [_start, _end); replaced where they grow
        self._arrays = _empty(_FIRST_ROWS)
        self._start = self._end = 0
        # of a token in all columns, which are alike in all rollouts; and of what else the waiting ones bring
        self._token_bytes = self._other_bytes = 0
        # those that came since the order was read
        self._young: SortedList[int] = SortedList()
        # the others' rows. Carried, since all else is slower. CPU at 131,072 waiting, 4,096 of which leave: this array
        # 1.3 ms, a sorted list of all read one by one 14 ms, and to take keys out of it 9 ms; np.argsort 14 ms.
        self._ascending = NO_ROWS

    # -- in and out ----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout, cost: float, now: float, skips: int = 0) -> None:
        """Take a rollout in as the youngest. O(log n), amortised; every 4,096th O(n)."""
        num_tokens, row = rollout.num_tokens, self._end
        if row == len(self._arrays[0]):
            row = self._make_room()
        self._end = row + 1
        # -0.0 has the bits of a negative number
        self._young.add(_to_bits(_to_bytes(cost + 0.0))[0] << _ROW_BITS | self.num_waiting)
        costs, lengths, all_skips, arrived_at, versions, labels, rollouts = self._arrays
        rollouts[row] = rollout
        costs[row] = cost
        lengths[row] = num_tokens
        arrived_at[row] = now
        if skips:
            all_skips[row] = skips
        if rollout.version is not None:
            versions[row] = rollout.min_version
        if rollout.group_id is not None and self.groups.size is not None:
            labels[row] = self.groups.join(rollout.group_id, rollout.execution_id, now)
        if rollout.tensors:
            self._other_bytes += _other_bytes(rollout)
        if not self._token_bytes:
            self._token_bytes = (rollout.nbytes - _other_bytes(rollout)) // num_tokens
        self.num_waiting += 1
        self.num_tokens += num_tokens
        # an entry of the list weighs five times as much as one of the array
        if not self.num_waiting % _MERGE_EVERY:
            self.by_cost()

    def remove(self, rows: Ints, *, never_came: bool = False) -> list[Rollout]:
        """Take k rows out; the others keep their order. ``never_came``: their groups lack them again. O(k), and a few
        vector operations of O(n)."""
        if not rows.size:
            return []
        removed = self.rollouts(rows)
        self.num_tokens -= int(self.lengths[rows].sum())
        if self._other_bytes:
            self._other_bytes -= sum(map(_other_bytes, removed))
        if self.groups.size is not None:
            # One by one: which group is complete again, or forgotten, depends on the siblings before.
            for rollout in removed:
                self.groups.leave(rollout.group_id, rollout.execution_id, never_came=never_came)
        keep = np.ones(self.num_waiting, dtype=bool)
        keep[rows] = False
        self._ascending = kept(self.by_cost(), keep)
        self._remove_rows(keep)
        self.num_waiting -= rows.size
        return removed

    def _remove_rows(self, keep: Bools) -> None:
        """Rows leave but those to keep ([n]); these keep their order. O(rows up to the last one that leaves)."""
        behind = int(np.flatnonzero(~keep)[-1]) + 1
        stay = np.flatnonzero(keep[:behind]) + self._start
        first, stop = self._start + behind - stay.size, self._start + behind
        # the few older rows move up, since most that leave are near the front
        for array in self._arrays:
            array[first:stop] = array[stay]
        # else they would be kept alive until the columns grow
        self._rollouts[: first - self._start] = None
        self._start = first

    def _make_room(self) -> int:
        """Back to the front, in half as much space again unless half of it is free there. -> the first row behind the
        last."""
        rows, space = self._end - self._start, len(self._arrays[0])
        # else removals have freed half of it in front, and moving back is room enough
        before, self._arrays = self._arrays, _empty(space + space // 2 if 2 * rows > space else space)
        for old, new in zip(before, self._arrays, strict=True):
            new[:rows] = old[self._start : self._end]
        self._start, self._end = 0, rows
        return rows

    def pass_over(self, could_go: Bools) -> None:
        """A step leaves these ([n] bool) behind: count it, but not for incomplete groups, which could not go.
        O(n)."""
        # [n] a bool adds 0 or 1
        self.skips[:] += self.complete & could_go

    def reprice(self, costs: Floats) -> None:
        """Replace the costs of all rows (a new cost model). O(n log n)."""
        self.costs[:] = costs
        self._young.clear()
        self._ascending = np.argsort(costs, kind="stable")

    # -- looking -------------------------------------------------------------------------------------------------------

    def waiting(self, due: Bools) -> Waiting:
        """The planner's view: columns by arrival, valid until the next change. O(n)."""
        return Waiting(
            costs=self.costs,
            lengths=self.lengths,
            skips=self.skips,
            due=due,
            groups=self.labels,
            group_complete=self.complete,
            by_cost=self.by_cost(),
        )

    def by_cost(self) -> Ints:
        """[n] all rows, lightest first; of equal costs the older first. O(n): what came since the last call is merged
        in."""
        if self._young:
            young = np.array([key & ((1 << _ROW_BITS) - 1) for key in self._young], dtype=np.int64)
            # [young] where each goes among the others; side="right": of equal costs the older comes first
            places = np.searchsorted(self.costs[self._ascending], self.costs[young], side="right")
            self._ascending = np.insert(self._ascending, places, young)
            self._young.clear()
        return self._ascending

    def rollouts(self, rows: Ints | None = None) -> list[Rollout]:
        """The rollouts of some rows, or of all, oldest first."""
        found: list[Rollout] = self._rollouts[slice(None) if rows is None else rows].tolist()
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting rollouts' tensors. O(1)."""
        return self.num_tokens * self._token_bytes + self._other_bytes

    @property
    def complete(self) -> Bools:
        """[n] False for rollouts that wait for siblings. O(n)."""
        return self.groups.complete(self.labels)

    @property
    def num_ready(self) -> int:
        """Waiting rollouts that are not held back by an incomplete group. O(1)."""
        return self.num_waiting - self.groups.num_incomplete

    def siblings(self, group_id: str) -> Ints:
        """Rows of the rollouts of a group that wait here. O(n)."""
        group = self.groups.get(group_id)
        if group is None:
            return NO_ROWS
        return np.flatnonzero(self.labels == group.label)


def _other_bytes(rollout: Rollout) -> int:
    return sum(tensor.nbytes for tensor in rollout.tensors.values())
