"""The waiting rollouts, in two orders: by age, and by (length, age).

By age they are rows of numpy columns, which the planner reads as they are; by length they are a sorted column, which
answers "the longest", "the median" without a scan. Storage only: what may enter and what leaves is ``_core``'s
question. Pure: no clock, no torch, no waiting. :meth:`Buffer.check` verifies every invariant, for tests.

The sorted column holds one int64 per rollout, ``length << 40 | seq``. Arrivals are merged in when somebody looks, all
at once: a put pays nothing for the order, and a removal is one binary search and one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream_balancer.planning import Waiting
from stream_balancer.types import Rollout

__all__ = ["Buffer"]

NO_VERSION = np.iinfo(np.int64).max  # a rollout of unknown version is never stale
_SEQ_BITS = 40
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_FIRST_ROWS = 64


@dataclass(slots=True)
class _Group:
    """A group some of whose siblings have come."""

    label: int
    arrived: int = 0
    waiting: int = 0


class Buffer:
    """Waiting rollouts. ``len()`` of them; row 0 is the oldest."""

    def __init__(self, group_size: int | None) -> None:
        self._group_size = group_size
        self._rows = 0
        self._next_seq = 0
        self._table: NDArray[np.object_] = np.empty(_FIRST_ROWS, dtype=object)
        """Rollouts, each in a slot that it keeps: moving 100,000 references would touch as many objects."""
        self._free_slots = list(range(_FIRST_ROWS - 1, -1, -1))
        self._slots = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._costs = np.empty(_FIRST_ROWS, dtype=np.float64)
        self._lengths = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._skips = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._arrived_at = np.empty(_FIRST_ROWS, dtype=np.float64)
        self._versions = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._labels = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._seqs = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._bytes = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._loss_tokens = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._sorted = np.empty(0, dtype=np.int64)
        self._num_unsorted = 0  # the youngest rows, which are not in _sorted yet
        self._groups: dict[str, _Group] = {}
        self._free_labels: list[int] = []
        self._arrived_by_label = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self.num_tokens = 0
        """Tokens of the waiting rollouts."""
        self.num_bytes = 0
        """Bytes of their tensors."""
        self.num_ready = 0
        """Waiting rollouts that are not held back by an incomplete group."""
        self.num_awaited = 0
        """Siblings that waiting groups still lack."""

    def __len__(self) -> int:
        return self._rows

    # -- in and out ----------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout, cost: float, now: float, skips: int = 0) -> None:
        """Take a rollout in as the youngest. O(1), amortised."""
        row = self._rows
        if row == len(self._costs):
            self._grow()
        self._slots[row] = slot = self._free_slots.pop()
        self._table[slot] = rollout
        self._costs[row] = cost
        self._lengths[row] = rollout.num_tokens
        self._skips[row] = skips
        self._arrived_at[row] = now
        version = rollout.min_version
        self._versions[row] = NO_VERSION if version is None else version
        self._labels[row] = self._join_group(rollout.group_id)
        self._seqs[row] = self._next_seq
        self._bytes[row] = num_bytes = rollout.nbytes
        self._loss_tokens[row] = rollout.num_loss_tokens
        self._next_seq += 1
        self._rows += 1
        self._num_unsorted += 1
        self.num_tokens += rollout.num_tokens
        self.num_bytes += num_bytes

    def remove(self, rows: NDArray[np.int64], *, never_came: bool = False) -> list[Rollout]:
        """Take rows out; the others keep their order. ``never_came``: their groups lack them again. O(n), a few vector
        operations."""
        if not rows.size:
            return []
        removed = self.rollouts(rows)
        slots = self._slots[rows]
        self._table[slots] = None  # do not keep payloads alive
        self._free_slots += slots.tolist()
        self._unsort(rows)
        self.num_tokens -= int(self._lengths[rows].sum())
        self.num_bytes -= int(self._bytes[rows].sum())
        if self._group_size is not None:
            for rollout in removed:
                self._leave_group(rollout.group_id, never_came=never_came)
        keep = np.ones(self._rows, dtype=bool)
        keep[rows] = False
        first, left = int(rows.min()), self._rows - len(removed)
        stay = np.flatnonzero(keep[first:]) + first
        for column in self._columns():
            column[first:left] = column[stay]
        self._rows = left
        self.num_ready = int(np.count_nonzero(self._complete()))
        return removed

    def pass_over(self, could_go: NDArray[np.bool_]) -> None:
        """A dispatch leaves these ([n] bool) behind: count it, but not for incomplete groups, which could not go.
        O(n)."""
        self._skips[: self._rows] += self._complete() & could_go

    def reprice(self, costs: NDArray[np.float64]) -> None:
        """Replace the costs of all rows (a new cost model). O(n)."""
        self._costs[: self._rows] = costs

    # -- looking -------------------------------------------------------------------------------------------------------

    def waiting(self, due: NDArray[np.bool_]) -> Waiting:
        """The planner's view: columns by age, valid until the next change. O(n)."""
        n = self._rows
        return Waiting(
            costs=self._costs[:n],
            lengths=self._lengths[:n],
            skips=self._skips[:n],
            due=due,
            groups=self._labels[:n],
            group_complete=self._complete(),
        )

    def rollouts(self, rows: NDArray[np.int64] | None = None) -> list[Rollout]:
        """The rollouts of some rows, or of all, oldest first."""
        found: list[Rollout] = self._table[self._slots[: self._rows] if rows is None else self._slots[rows]].tolist()
        return found

    @property
    def costs(self) -> NDArray[np.float64]:
        """[n] work of each rollout (a view)."""
        return self._costs[: self._rows]

    @property
    def skips(self) -> NDArray[np.int64]:
        """[n] dispatches that passed each rollout over (a view)."""
        return self._skips[: self._rows]

    @property
    def complete(self) -> NDArray[np.bool_]:
        """[n] False for rollouts that wait for siblings. O(n)."""
        return self._complete()

    @property
    def arrived_at(self) -> NDArray[np.float64]:
        """[n] arrival times in seconds, oldest first (a view)."""
        return self._arrived_at[: self._rows]

    @property
    def versions(self) -> NDArray[np.int64]:
        """[n] oldest policy version of each rollout; ``NO_VERSION`` where unknown (a view)."""
        return self._versions[: self._rows]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of each rollout (a view)."""
        return self._lengths[: self._rows]

    @property
    def loss_tokens(self) -> NDArray[np.int64]:
        """[n] tokens of each that are trained on (a view)."""
        return self._loss_tokens[: self._rows]

    @property
    def labels(self) -> NDArray[np.int64]:
        """[n] group label of each rollout, -1 = none (a view)."""
        return self._labels[: self._rows]

    @property
    def next_seq(self) -> int:
        """Number of rollouts ever added."""
        return self._next_seq

    def lengths_since(self, seq: int) -> NDArray[np.int64]:
        """Lengths of the waiting rollouts that were added from number ``seq`` on (a view). O(log n)."""
        return self.lengths[int(np.searchsorted(self._seqs[: self._rows], seq)) :]

    def group_arrivals(self) -> dict[str, int]:
        """Siblings that have come, by group, of groups that are incomplete or still wait. O(groups)."""
        return {group_id: group.arrived for group_id, group in self._groups.items()}

    def departed(self) -> dict[str, int]:
        """Siblings that came and do not wait any more, of groups that are not done. O(groups)."""
        gone = ((name, group.arrived - group.waiting) for name, group in self._groups.items())
        return {name: number for name, number in gone if number}

    def restore_groups(self, group_arrivals: Mapping[str, int]) -> None:
        """After adding a snapshot's rollouts: siblings that had come before, and are not here any more. O(n)."""
        if self._group_size is None:
            return
        for group_id, arrived in group_arrivals.items():
            group = self._groups.setdefault(group_id, _Group(self._new_label()))
            group.arrived = arrived
            self._arrived_by_label[group.label] = arrived
        self.num_awaited = sum(self._lacks(group) for group in self._groups.values())
        self.num_ready = int(np.count_nonzero(self._complete()))

    @property
    def oldest_arrival(self) -> float:
        """Arrival time of the oldest waiting rollout, in seconds; inf if none waits. O(1)."""
        return float(self._arrived_at[0]) if self._rows else float("inf")

    def has_group(self, group_id: str | None) -> bool:
        """Whether a sibling of this group waits here. O(1)."""
        group = self._groups.get(group_id) if group_id is not None else None
        return group is not None and group.waiting > 0

    def length_quantiles(self, fractions: Sequence[float]) -> tuple[int, ...]:
        """Lengths at the given fractions of the sorted order, in tokens; empty if none waits. O(1) each, and O(n) for
        all that came since the last look."""
        if not self._rows:
            return ()
        self._sort_in()
        last = self._rows - 1
        return tuple(int(self._sorted[round(f * last)]) >> _SEQ_BITS for f in fractions)

    def siblings(self, group_id: str) -> NDArray[np.int64]:
        """Rows of the rollouts of a group that wait here. O(n)."""
        group = self._groups.get(group_id)
        return np.flatnonzero(self.labels == group.label) if group is not None else np.empty(0, dtype=np.int64)

    def num_arrived(self, group_id: str) -> int:
        """Siblings of a group that have come. O(1)."""
        group = self._groups.get(group_id)
        return group.arrived if group is not None else 0

    def incomplete_groups(self) -> dict[str, int]:
        """Siblings that have come, of each group that waits for others, the first begun first. O(groups)."""
        return {name: group.arrived for name, group in self._groups.items() if self._lacks(group)}

    def expect_again(self, group_id: str | None) -> None:
        """A sibling that has left a group may come again. O(n)."""
        if group_id is None or self._group_size is None:
            return
        group = self._groups.get(group_id)
        if group is None:  # the whole group has left
            group = self._groups[group_id] = _Group(self._new_label(), arrived=self._group_size)
        self.num_awaited -= self._lacks(group)
        group.arrived -= 1
        self._arrived_by_label[group.label] = group.arrived
        self.num_awaited += self._lacks(group)
        self.num_ready = int(np.count_nonzero(self._complete()))
        if group.arrived == 0:
            self.forget_group(group_id)

    # -- groups --------------------------------------------------------------------------------------------------------

    def _join_group(self, group_id: str | None) -> int:
        if group_id is None or self._group_size is None:
            self.num_ready += 1
            return -1
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group(self._new_label())
        self.num_awaited -= self._lacks(group)
        group.arrived += 1
        group.waiting += 1
        self.num_awaited += self._lacks(group)
        self._arrived_by_label[group.label] = group.arrived
        if group.arrived == self._group_size:
            self.num_ready += group.waiting
        elif group.arrived > self._group_size:
            self.num_ready += 1
        return group.label

    def _new_label(self) -> int:
        label = self._free_labels.pop() if self._free_labels else len(self._groups)
        if label >= len(self._arrived_by_label):
            self._arrived_by_label = np.resize(self._arrived_by_label, 2 * label)
        return label

    def _leave_group(self, group_id: str | None, *, never_came: bool) -> None:
        group = self._groups.get(group_id) if group_id is not None else None
        if group is None or group_id is None or self._group_size is None:
            return
        self.num_awaited -= self._lacks(group)
        group.waiting -= 1
        if never_came:
            group.arrived -= 1
            self._arrived_by_label[group.label] = group.arrived
        self.num_awaited += self._lacks(group)
        if group.waiting == 0 and (group.arrived >= self._group_size or group.arrived == 0):
            self.forget_group(group_id)

    def forget_group(self, group_id: str) -> None:
        """None of it waits, and what came of it does not count any more. O(1)."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._free_labels.append(group.label)

    def _lacks(self, group: _Group) -> int:
        """Siblings a waiting group still lacks; 0 once none of it waits."""
        return max((self._group_size or 0) - group.arrived, 0) if group.waiting else 0

    def _complete(self) -> NDArray[np.bool_]:
        labels = self._labels[: self._rows]
        if self._group_size is None:
            return np.ones(self._rows, dtype=bool)
        complete: NDArray[np.bool_] = (labels < 0) | (self._arrived_by_label[labels] >= self._group_size)
        return complete

    # -- storage -------------------------------------------------------------------------------------------------------

    def _columns(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self._slots,
            self._costs,
            self._lengths,
            self._skips,
            self._arrived_at,
            self._versions,
            self._labels,
            self._seqs,
            self._bytes,
            self._loss_tokens,
        )

    def _grow(self) -> None:
        """Double every column: amortised O(1) per row."""
        (
            self._slots,
            self._costs,
            self._lengths,
            self._skips,
            self._arrived_at,
            self._versions,
            self._labels,
            self._seqs,
            self._bytes,
            self._loss_tokens,
        ) = (np.concatenate([column, np.empty_like(column)]) for column in self._columns())
        before = len(self._table)
        self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._free_slots += range(len(self._table) - 1, before - 1, -1)

    def _keys(self) -> NDArray[np.int64]:
        """[n] what the sorted index holds: length first, then age."""
        return self._lengths[: self._rows] << _SEQ_BITS | self._seqs[: self._rows]

    def _sort_in(self) -> None:
        """Give the youngest rows their places in the sorted column. O(n) if there are any."""
        if self._num_unsorted:
            young = np.sort(self._keys()[self._rows - self._num_unsorted :])
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, young), young)
            self._num_unsorted = 0

    def _unsort(self, rows: NDArray[np.int64]) -> None:
        """Rows are about to leave the sorted column. O(n)."""
        sorted_in = rows < self._rows - self._num_unsorted
        self._num_unsorted -= int(np.count_nonzero(~sorted_in))
        if sorted_in.any():
            places = np.searchsorted(self._sorted, self._keys()[rows[sorted_in]])
            self._sorted = np.delete(self._sorted, places)

    def check(self) -> None:
        """Verify every invariant; for tests. O(n log n)."""
        n = self._rows
        rollouts = self.rollouts()
        assert all(isinstance(r, Rollout) for r in rollouts)
        assert self._lengths[:n].tolist() == [r.num_tokens for r in rollouts]
        assert self.num_tokens == sum(r.num_tokens for r in rollouts)
        assert self.num_bytes == sum(r.nbytes for r in rollouts)
        assert self._sorted.tolist() == np.sort(self._keys()[: n - self._num_unsorted]).tolist()
        assert np.all(np.diff(self._seqs[:n]) > 0)
        assert np.all(np.diff(self._arrived_at[:n]) >= 0)
        assert sorted(self._slots[:n].tolist() + self._free_slots) == list(range(len(self._table)))
        assert all(r is None for r in self._table[self._free_slots])
        assert self._loss_tokens[:n].tolist() == [r.num_loss_tokens for r in rollouts]
        assert self.num_ready == int(np.count_nonzero(self._complete()))
        assert self.num_awaited == sum(self._lacks(g) for g in self._groups.values())
        if self._group_size is not None:
            for group_id, group in self._groups.items():
                assert group.waiting == sum(r.group_id == group_id for r in rollouts)
                assert int(np.count_nonzero(self._labels[:n] == group.label)) == group.waiting
            labels = [g.label for g in self._groups.values()]
            assert len(set(labels)) == len(labels)
            assert not set(labels) & set(self._free_labels)
