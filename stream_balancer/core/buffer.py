"""The waiting rollouts, in two orders: by arrival, and by (length, arrival).

By arrival they are rows of numpy columns, which the planner reads as they are; by length they are a sorted column,
which answers "the longest", "the median" without a scan. Storage only: what may enter and what leaves is decided in
:mod:`stream_balancer.core.machine`. Pure: no clock, no torch, no waiting. :meth:`Buffer.check` verifies every
invariant, for tests.

The sorted column holds one int64 per rollout, ``length << 40 | seq``. Arrivals are merged in when somebody looks, all
at once: a put pays nothing for the order, and a removal is one binary search and one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_balancer.core.groups import Groups
from stream_balancer.planning import Waiting
from stream_balancer.types import Rollout

__all__ = ["Buffer"]

NO_VERSION = np.iinfo(np.int64).max  # a rollout of unknown version is never stale
_SEQ_BITS = 40
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_FIRST_ROWS = 64


class Buffer:
    """Waiting rollouts. ``len()`` of them; row 0 is the oldest."""

    def __init__(self, group_size: int | None) -> None:
        self.groups = Groups(group_size)
        """Their groups."""
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
        self.num_tokens = 0
        """Tokens of the waiting rollouts."""
        self.num_bytes = 0
        """Bytes of their tensors."""
        self.num_ready = 0
        """Waiting rollouts that are not held back by an incomplete group."""

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
        self._lengths[row] = num_tokens = rollout.num_tokens
        self._skips[row] = skips
        self._arrived_at[row] = now
        version = rollout.min_version
        self._versions[row] = NO_VERSION if version is None else version
        label, became_ready = -1, 1
        if rollout.group_id is not None and self.groups.size is not None:
            label, became_ready = self.groups.join(rollout.group_id)
        self._labels[row] = label
        self.num_ready += became_ready
        self._seqs[row] = self._next_seq
        self._bytes[row] = num_bytes = rollout.nbytes
        self._loss_tokens[row] = rollout.num_loss_tokens
        self._next_seq += 1
        self._rows += 1
        self._num_unsorted += 1
        self.num_tokens += num_tokens
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
        if self.groups.size is not None:
            for rollout in removed:
                self.groups.leave(rollout.group_id, never_came=never_came)
        keep = np.ones(self._rows, dtype=bool)
        keep[rows] = False
        first, left = int(rows.min()), self._rows - len(removed)
        stay = np.flatnonzero(keep[first:]) + first
        for column in self._columns():
            column[first:left] = column[stay]
        self._rows = left
        self._count_ready()
        return removed

    def pass_over(self, could_go: NDArray[np.bool_]) -> None:
        """A dispatch leaves these ([n] bool) behind: count it, but not for incomplete groups, which could not go.
        O(n)."""
        self._skips[: self._rows] += self.complete & could_go

    def reprice(self, costs: NDArray[np.float64]) -> None:
        """Replace the costs of all rows (a new cost model). O(n)."""
        self._costs[: self._rows] = costs

    # -- looking -------------------------------------------------------------------------------------------------------

    def waiting(self, due: NDArray[np.bool_]) -> Waiting:
        """The planner's view: columns by arrival, valid until the next change. O(n)."""
        n = self._rows
        return Waiting(
            costs=self._costs[:n],
            lengths=self._lengths[:n],
            skips=self._skips[:n],
            due=due,
            groups=self._labels[:n],
            group_complete=self.complete,
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
        return self.groups.complete(self._labels[: self._rows])

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

    def restore_groups(self, arrived: Mapping[str, int]) -> None:
        """After adding a snapshot's rollouts: see :meth:`Groups.restore`. O(n)."""
        self.groups.restore(arrived)
        self._count_ready()

    def expect_again(self, group_id: str | None) -> None:
        """A sibling that has left its group may come again. O(n)."""
        self.groups.expect_again(group_id)
        self._count_ready()

    def change_group_size(self, size: int | None) -> None:
        """Count groups anew; only while nothing waits."""
        assert not self._rows
        self.groups = Groups(size)

    @property
    def oldest_arrival(self) -> float:
        """Arrival time of the oldest waiting rollout, in seconds; inf if none waits. O(1)."""
        return float(self._arrived_at[0]) if self._rows else float("inf")

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
        label = self.groups.label_of(group_id)
        return np.empty(0, dtype=np.int64) if label is None else np.flatnonzero(self.labels == label)

    # -- storage -------------------------------------------------------------------------------------------------------

    def _count_ready(self) -> None:
        self.num_ready = int(np.count_nonzero(self.complete))

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
        """[n] what the sorted column holds: length first, then arrival."""
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
        assert self.num_ready == int(np.count_nonzero(self.complete))
        self.groups.check(self.labels, [r.group_id for r in rollouts])
