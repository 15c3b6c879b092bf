"""The waiting rollouts, in two orders: by arrival, and by (cost, arrival).

By arrival they are rows of numpy columns, which the planner reads as they are; by cost they are in the index of
:mod:`.cost_index`. Storage only: what may enter and what leaves is decided in :mod:`stream_balancer.core.machine`.
Pure: no clock, no torch, no waiting. :meth:`Buffer.check` verifies every invariant, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stream_balancer.core.columns import Columns
from stream_balancer.core.cost_index import CostIndex
from stream_balancer.core.executions import execution_of
from stream_balancer.core.groups import Groups, GroupSize
from stream_balancer.core.strata import Strata
from stream_balancer.planning import Waiting
from stream_balancer.types import Rollout

__all__ = ["NO_VERSION", "Buffer"]

NO_VERSION = 2**63 - 1  # a rollout of unknown version is never stale
_FIRST_SLOTS = 64
_SLOT, _LENGTH, _SKIPS, _ARRIVED_AT, _VERSION, _LABEL, _STRATUM = range(7)


class Buffer:
    """Waiting rollouts. ``len()`` of them; row 0 is the oldest."""

    def __init__(self, group_size: int | None, remember_groups: int = 100_000) -> None:
        self.groups = Groups(group_size, remember_groups)
        """Their groups."""
        self.strata = Strata()
        """Their strata."""
        self._rows = 0
        self.index = CostIndex()
        """Their rows by cost."""
        self._columns = Columns(0, 0, 0, 0.0, NO_VERSION, -1, -1)
        self._table: NDArray[np.object_] = np.empty(_FIRST_SLOTS, dtype=object)
        """Rollouts, each in a slot that it keeps: moving 100,000 references would touch as many objects."""
        self._bytes = np.empty(_FIRST_SLOTS, dtype=np.int64)  # of the rollout in each slot
        self._free_slots = list(range(_FIRST_SLOTS - 1, -1, -1))
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
        """Take a rollout in as the youngest. O(log n), amortised."""
        if not self._free_slots:
            self._add_slots()
        slot, num_tokens, num_bytes = self._free_slots.pop(), rollout.num_tokens, rollout.nbytes
        self._table[slot] = rollout
        self._bytes[slot] = num_bytes
        row = self._columns.new_row()
        slots, lengths, all_skips, arrived_at, versions, labels, strata = self._columns.arrays
        slots[row] = slot
        lengths[row] = num_tokens
        arrived_at[row] = now
        if skips:
            all_skips[row] = skips
        if rollout.version is not None:
            versions[row] = rollout.min_version
        if rollout.metadata and (stratum := rollout.stratum) is not None:
            strata[row] = self.strata.number_of(stratum)
        became_ready = 1
        if rollout.group_id is not None and self.groups.size is not None:
            labels[row], became_ready = self.groups.join(rollout.group_id, rollout.execution_id)
        # The index numbers its rows itself, by how many were added: it must get every row, in this order.
        self.index.add(cost)
        self._rows += 1
        self.num_ready += became_ready
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes

    def remove(self, rows: NDArray[np.int64], *, never_came: bool = False) -> list[Rollout]:
        """Take k rows out; the others keep their order. ``never_came``: their groups lack them again. O(k log n), and
        a few vector operations of O(n)."""
        if not rows.size:
            return []
        removed = self.rollouts(rows)
        slots = self._columns[_SLOT][rows]
        self._table[slots] = None  # do not keep payloads alive
        self._free_slots += slots.tolist()
        self.num_tokens -= int(self.lengths[rows].sum())
        self.num_bytes -= int(self._bytes[slots].sum())
        if self.groups.size is not None:
            # One by one: which group is complete again, or forgotten, depends on the siblings before.
            for rollout in removed:
                self.groups.leave(rollout.group_id, rollout.execution_id, never_came=never_came)
        keep = np.ones(len(self), dtype=bool)
        keep[rows] = False
        self.index.remove(keep)
        self._columns.remove(keep)
        self._rows -= rows.size
        self._count_ready()
        return removed

    def pass_over(self, could_go: NDArray[np.bool_]) -> None:
        """A dispatch leaves these ([n] bool) behind: count it, but not for incomplete groups, which could not go.
        O(n)."""
        # [n] a bool adds 0 or 1
        self.skips[:] += self.complete & could_go

    def reprice(self, costs: NDArray[np.float64]) -> None:
        """Replace the costs of all rows (a new cost model). O(n log n)."""
        self.index.reprice(costs)

    # -- looking -------------------------------------------------------------------------------------------------------

    def waiting(self, due: NDArray[np.bool_]) -> Waiting:
        """The planner's view: columns by arrival, valid until the next change. O(n)."""
        return Waiting(
            costs=self.costs,
            lengths=self.lengths,
            skips=self.skips,
            due=due,
            groups=self.labels,
            group_complete=self.complete,
            order=self.index,
            strata=self.stratum_numbers if len(self.strata) else None,
        )

    def rollouts(self, rows: NDArray[np.int64] | None = None) -> list[Rollout]:
        """The rollouts of some rows, or of all, oldest first."""
        found: list[Rollout] = self._table[
            self._columns[_SLOT] if rows is None else self._columns[_SLOT][rows]
        ].tolist()
        return found

    @property
    def costs(self) -> NDArray[np.float64]:
        """[n] work of each rollout (a view)."""
        return self.index.costs

    @property
    def skips(self) -> NDArray[np.int64]:
        """[n] dispatches that passed each rollout over (a view)."""
        column: NDArray[np.int64] = self._columns[_SKIPS]
        return column

    @property
    def complete(self) -> NDArray[np.bool_]:
        """[n] False for rollouts that wait for siblings. O(n)."""
        return self.groups.complete(self.labels)

    @property
    def arrived_at(self) -> NDArray[np.float64]:
        """[n] arrival times in seconds, oldest first (a view)."""
        column: NDArray[np.float64] = self._columns[_ARRIVED_AT]
        return column

    @property
    def versions(self) -> NDArray[np.int64]:
        """[n] oldest policy version of each rollout; ``NO_VERSION`` where unknown (a view)."""
        column: NDArray[np.int64] = self._columns[_VERSION]
        return column

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of each rollout (a view)."""
        column: NDArray[np.int64] = self._columns[_LENGTH]
        return column

    @property
    def labels(self) -> NDArray[np.int64]:
        """[n] group label of each rollout, -1 = none (a view)."""
        column: NDArray[np.int64] = self._columns[_LABEL]
        return column

    @property
    def stratum_numbers(self) -> NDArray[np.int64]:
        """[n] number of each rollout's stratum, -1 = none (a view)."""
        column: NDArray[np.int64] = self._columns[_STRATUM]
        return column

    def youngest(self, count: int) -> NDArray[np.int64]:
        """[count] lengths of the rollouts that came last (a view)."""
        return self.lengths[len(self) - count :]

    def restore_groups(self, arrived: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        """After adding a snapshot's rollouts: see :meth:`Groups.restore`. O(n)."""
        self.groups.restore(arrived, sizes)
        self._count_ready()

    def set_group_size(self, wanted: GroupSize) -> None:
        """See :meth:`Groups.set_size`. O(n)."""
        self.groups.set_size(wanted)
        self._count_ready()

    def count_as_come(self, group_id: str, execution_id: str | None) -> None:
        """A sibling came and was given up at once: its group does not wait for it. O(n)."""
        self.groups.join(group_id, execution_id)
        self.groups.leave(group_id, execution_id)
        self._count_ready()

    def expect_again(self, rollouts: Sequence[Rollout]) -> None:
        """Siblings that have left their groups may come again. O(n)."""
        for one in {execution_of(rollout): rollout for rollout in rollouts}.values():
            self.groups.expect_again(one.group_id, one.execution_id)
        self._count_ready()

    def change_group_size(self, size: int | None) -> None:
        """Count groups anew, but for what was declared; only while nothing waits."""
        assert not len(self)
        before, self.groups = self.groups, Groups(size, self.groups.remember)
        self.groups.restore_closed(before.closed())
        self.groups.restore({}, before.open_sizes())

    @property
    def oldest_arrival(self) -> float:
        """Arrival time of the oldest waiting rollout, in seconds; inf if none waits. O(1)."""
        return float(self.arrived_at[0]) if len(self) else float("inf")

    @property
    def num_ready_tokens(self) -> int:
        """Tokens of the rollouts that are not held back by an incomplete group. O(1), and O(n) while one is."""
        return self.num_tokens if self.num_ready == len(self) else int(self.lengths[self.complete].sum())

    def length_quantiles(self, fractions: Sequence[float]) -> tuple[int, ...]:
        """Lengths at the given fractions of their order, in tokens; empty if none waits. O(n log n)."""
        in_order, last = np.sort(self.lengths), len(self) - 1
        return tuple(int(in_order[round(f * last)]) for f in fractions) if len(self) else ()

    def siblings(self, group_id: str) -> NDArray[np.int64]:
        """Rows of the rollouts of a group that wait here. O(n)."""
        label = self.groups.label_of(group_id)
        return np.empty(0, dtype=np.int64) if label is None else np.flatnonzero(self.labels == label)

    # -- storage -------------------------------------------------------------------------------------------------------

    def _count_ready(self) -> None:
        self.num_ready = int(np.count_nonzero(self.complete))

    def _add_slots(self) -> None:
        """Double them: amortised O(1) a rollout."""
        before = len(self._table)
        self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._bytes = np.concatenate([self._bytes, np.empty_like(self._bytes)])
        self._free_slots += range(2 * before - 1, before - 1, -1)

    def check(self) -> None:
        """Verify every invariant; for tests. O(n log n)."""
        n = len(self)
        rollouts = self.rollouts()
        assert all(isinstance(r, Rollout) for r in rollouts)
        assert self.lengths.tolist() == [r.num_tokens for r in rollouts]
        assert self.num_tokens == sum(r.num_tokens for r in rollouts)
        assert self.num_bytes == sum(r.nbytes for r in rollouts)
        assert len(self._columns) == self.index.costs.size == n
        self.index.check()
        numbers = [-1 if r.stratum is None else self.strata.number_of(r.stratum) for r in rollouts]
        assert self.stratum_numbers.tolist() == numbers
        assert np.all(np.diff(self.arrived_at) >= 0)
        assert sorted(self._columns[_SLOT].tolist() + self._free_slots) == list(range(len(self._table)))
        assert all(r is None for r in self._table[self._free_slots])
        assert self.num_ready == int(np.count_nonzero(self.complete))
        self.groups.check(self.labels, [r.group_id for r in rollouts])
