"""The waiting rollouts, in two orders: by arrival, and by (cost, arrival).

By arrival they are rows of numpy columns, which the planner reads as they are. By cost they are in a
``sortedcontainers.SortedList`` of one integer a rollout, ``bits of the cost << 40 | arrival number``. The bits of
floats >= 0 sort as the floats do, and an integer is three times cheaper to keep than a pair. The planner reads that
order as an array of rows, which is carried from batch to batch: to read 131,072 integers one by one takes a third of a
dispatch. Storage only: what may enter and what leaves is decided in :mod:`stream_balancer.core.machine`. Pure: no
clock, no torch, no waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from stream_balancer.core.groups import SiblingGroups
from stream_balancer.core.strata import Strata
from stream_balancer.planning import Waiting
from stream_balancer.planning.arrays import Bools, Floats, Ints
from stream_balancer.planning.cost_order import CostOrder, kept
from stream_balancer.types import Rollout

NO_VERSION = 2**63 - 1  # a rollout of unknown version is never stale
_COLUMNS = {
    "costs": 0.0, "lengths": 0, "skips": 0, "arrived_at": 0.0, "versions": NO_VERSION, "labels": -1,
    "stratum_numbers": -1, "taken": False, "_sizes": 0, "_numbers": 0,
}  # fmt: skip
"""By name what a row holds where nobody writes."""
_PLACES = {name: place for place, name in enumerate(_COLUMNS)}
_FIRST_ROWS = 64
_ARRIVAL_BITS = 40
_NO_LABEL = -2  # of no row
_REBUILD_SHARE = 16
"""From a sixteenth of all on, to take keys out of the sorted list one by one costs more than to build it anew."""

_to_bytes, _to_bits = struct.Struct("<d").pack, struct.Struct("<q").unpack


def _empty(rows: int) -> tuple[NDArray[Any], ...]:
    return tuple(np.full(rows, value) for value in _COLUMNS.values())


class _ByCost(CostOrder):
    """The order of what waits, for the planner, which most often asks for the heaviest only."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer.costs)
        self._buffer = buffer

    @property
    def heaviest(self) -> float:
        return self._buffer.heaviest

    def ascending(self) -> Ints:
        return self._buffer.by_cost()


class Buffer:
    """Waiting rollouts. ``len()`` of them; row 0 is the oldest. Columns are views, valid until the next change."""

    costs: Floats
    """[n] work of each rollout."""
    lengths: Ints
    """[n] tokens of each."""
    skips: Ints
    """[n] steps that passed each over."""
    arrived_at: Floats
    """[n] arrival times in seconds, oldest first."""
    versions: Ints
    """[n] oldest policy version of each; ``NO_VERSION`` where unknown."""
    labels: Ints
    """[n] group label of each, -1 = none."""
    stratum_numbers: Ints
    """[n] number of each one's stratum, -1 = none."""
    taken: Bools
    """[n] True for rollouts of rows of an open step: they are being trained on, and wait for its last row."""
    _sizes: Ints
    _numbers: Ints

    def __init__(self, group_size: int | None, remember_groups: int = 100_000) -> None:
        self.groups = SiblingGroups(group_size, remember_groups)
        """Groups of the rollouts."""
        self.strata = Strata()
        """Strata of the rollouts."""
        self.num_added = 0
        """Rollouts ever added."""
        self.num_tokens = 0
        """Tokens of the waiting rollouts."""
        self.num_bytes = 0
        """Bytes of their tensors."""
        self.num_waiting = 0
        """The number that ``len()`` gives, for puts."""
        # the columns, with free space around rows [_start, _end); replaced where they grow
        self._arrays = _empty(_FIRST_ROWS)
        self._start = self._end = 0
        # by arrival number, so in the order of rows
        self._rollouts: dict[int, Rollout] = {}
        self._keys: SortedList[int] = SortedList()
        # of the oldest rows, as many as it has; None: not known
        # Carried, since all else is slower. CPU at 131,072 waiting, 4,096 of which leave: this array 1.3 ms; the list
        # read as integers 14 ms, by its chunks 14 ms, one np.sort of packed costs and rows 7.6 ms, np.argsort 14 ms.
        self._ascending: Ints | None = None

    def __len__(self) -> int:
        return self.num_waiting

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in _PLACES:
            raise AttributeError(name)
        return self._arrays[_PLACES[name]][self._start : self._end]

    # -- in and out ----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout, cost: float, now: float, skips: int = 0) -> None:
        """Take a rollout in as the youngest. O(log n), amortised."""
        # -0.0 has the bits of a negative number
        cost += 0.0
        number, num_tokens, num_bytes, row = self.num_added, rollout.num_tokens, rollout.nbytes, self._end
        if row == len(self._arrays[0]):
            row = self._make_room()
        self._end = row + 1
        self._rollouts[number] = rollout
        self._keys.add(_to_bits(_to_bytes(cost))[0] << _ARRIVAL_BITS | number)
        costs, lengths, all_skips, arrived_at, versions, labels, strata, _, sizes, numbers = self._arrays
        numbers[row] = number
        costs[row] = cost
        lengths[row] = num_tokens
        sizes[row] = num_bytes
        arrived_at[row] = now
        if skips:
            all_skips[row] = skips
        if rollout.version is not None:
            versions[row] = rollout.min_version
        if rollout.metadata and (stratum := rollout.stratum) is not None:
            strata[row] = self.strata.number_of(stratum)
        if rollout.group_id is not None and self.groups.size is not None:
            labels[row] = self.groups.join(rollout.group_id, rollout.execution_id, now)
        self.num_added = number + 1
        self.num_waiting += 1
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes

    def remove(self, rows: Ints, *, never_came: bool = False) -> list[Rollout]:
        """Take k rows out; the others keep their order. ``never_came``: their groups lack them again. O(k log n), and
        a few vector operations of O(n)."""
        if not rows.size:
            return []
        removed = self.rollouts(rows)
        self.num_tokens -= int(self.lengths[rows].sum())
        self.num_bytes -= int(self._sizes[rows].sum())
        for number in self._numbers[rows].tolist():
            del self._rollouts[number]
        if self.groups.size is not None:
            # One by one: which group is complete again, or forgotten, depends on the siblings before.
            for rollout in removed:
                self.groups.leave(rollout.group_id, rollout.execution_id, never_came=never_came)
        keep = np.ones(self.num_waiting, dtype=bool)
        keep[rows] = False
        # The list and this array have one order, so what is true of a place in one holds for the same place in the
        # other.
        ascending = self.by_cost()
        stays = keep[ascending]
        if rows.size * _REBUILD_SHARE >= keep.size:
            self._keys = SortedList(compress(self._keys, stays.tolist()))
        else:
            # neighbours lie in the same part of the list
            # at 4,096 of 131,072 that takes 7 to 9 ms, a list built anew 18
            for key in self._keys_of(ascending[~stays]):
                self._keys.remove(key)
        self._ascending = kept(ascending, keep)
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
        self._start = first

    def _make_room(self) -> int:
        """Back to the front, in twice the space unless half of it is free there. -> the first row behind the last."""
        rows, space = self._end - self._start, len(self._arrays[0])
        # else removals have freed half of it in front, and moving back is room enough
        before, self._arrays = self._arrays, _empty(2 * space if 2 * rows > space else space)
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
        self.costs[:] = costs + 0.0
        self._keys = SortedList(self._keys_of(np.arange(self.num_waiting)))
        self._ascending = None

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
            order=_ByCost(self),
            strata=self.stratum_numbers if len(self.strata) else None,
        )

    @property
    def heaviest(self) -> float:
        """The greatest cost; 0.0 if nothing waits. O(1)."""
        if not self._keys:
            return 0.0
        cost: float = struct.unpack("<d", struct.pack("<q", self._keys[-1] >> _ARRIVAL_BITS))[0]
        return cost

    def by_cost(self) -> Ints:
        """[n] all rows, lightest first; of equal costs the older first. O(n): what came since the last call is merged
        in; O(n log n) at the first call, and at the first after new prices."""
        if self._ascending is None:
            self._ascending = np.argsort(self.costs, kind="stable")
        known = self._ascending.size
        if known < self.num_waiting:
            young = known + np.argsort(self.costs[known:], kind="stable")
            # [young] where each goes among the known; side="right": of equal costs the older comes first
            places = np.searchsorted(self.costs[self._ascending], self.costs[young], side="right")
            self._ascending = np.insert(self._ascending, places, young)
        return self._ascending

    def rollouts(self, rows: Ints | None = None) -> list[Rollout]:
        """The rollouts of some rows, or of all, oldest first."""
        if rows is None:
            return list(self._rollouts.values())
        return [self._rollouts[number] for number in self._numbers[rows].tolist()]

    @property
    def complete(self) -> Bools:
        """[n] False for rollouts that wait for siblings. O(n)."""
        return self.groups.complete(self.labels)

    @property
    def num_ready(self) -> int:
        """Waiting rollouts that are not held back by an incomplete group. O(1)."""
        return self.num_waiting - self.groups.num_incomplete

    @property
    def num_ready_tokens(self) -> int:
        """Tokens of these. O(1), and O(n) while a group is incomplete."""
        return int(self.lengths[self.complete].sum()) if self.groups.num_incomplete else self.num_tokens

    @property
    def oldest_arrival(self) -> float:
        """Arrival time of the oldest waiting rollout, in seconds; inf if none waits. O(1)."""
        return float(self.arrived_at[0]) if self.num_waiting else float("inf")

    def length_quantiles(self, fractions: Sequence[float]) -> tuple[int, ...]:
        """Lengths at the given fractions of their order, in tokens; empty if none waits. O(n log n)."""
        if not self.num_waiting:
            return ()
        return tuple(np.quantile(self.lengths, fractions, method="nearest").tolist())

    def siblings(self, group_id: str) -> Ints:
        """Rows of the rollouts of a group that wait here, and are not being trained on. O(n)."""
        group = self.groups.get(group_id)
        label = _NO_LABEL if group is None else group.label
        return np.flatnonzero((self.labels == label) & ~self.taken)

    def _keys_of(self, rows: Ints) -> list[int]:
        bits, numbers = self.costs[rows].view(np.int64).tolist(), self._numbers[rows].tolist()
        return [bit << _ARRIVAL_BITS | number for bit, number in zip(bits, numbers, strict=True)]
