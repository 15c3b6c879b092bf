"""Groups of siblings (GRPO): how many of each have come, how many wait, and which were abandoned. Pure counting.

A group may leave once ``size`` siblings have come. The rows of the siblings are the buffer's; here a group is a label,
a small number that rows carry, so that completeness is one vector operation over them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Groups"]

_FIRST_LABELS = 64


@dataclass(slots=True)
class _Group:
    """A group some of whose siblings have come."""

    label: int
    arrived: int = 0
    waiting: int = 0


class Groups:
    """The groups that are not done. ``size``: siblings that a group must have before it may leave; None where groups
    play no part, and then only abandoned ones are kept."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        """Siblings of a whole group; None where groups play no part."""
        self.num_awaited = 0
        """Siblings that waiting groups still lack."""
        self._groups: dict[str, _Group] = {}
        self._free_labels: list[int] = []  # used again: the array by label stays small
        self._arrived_by_label = np.zeros(_FIRST_LABELS, dtype=np.int64)
        self._abandoned: OrderedDict[str, None] = OrderedDict()

    # -- siblings come and leave ---------------------------------------------------------------------------------------

    def join(self, group_id: str) -> tuple[int, int]:
        """A sibling waits from now on. -> the group's label, and how many rollouts became ready by it. O(1)."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group(self._new_label())
        self.num_awaited -= self._lacks(group)  # and what it lacks then is added again: a sum kept in O(1)
        group.arrived += 1
        group.waiting += 1
        self.num_awaited += self._lacks(group)
        self._arrived_by_label[group.label] = group.arrived
        size = self.size or 0
        # the last one makes all of them ready; one that comes beyond the size, itself
        return group.label, group.waiting if group.arrived == size else int(group.arrived > size)

    def leave(self, group_id: str | None, *, never_came: bool = False) -> None:
        """A waiting sibling leaves; with ``never_came`` its group lacks it again. O(1)."""
        group = self._groups.get(group_id) if group_id is not None else None
        if group is None or group_id is None or self.size is None:
            return
        self.num_awaited -= self._lacks(group)
        group.waiting -= 1
        if never_came:
            group.arrived -= 1
            self._arrived_by_label[group.label] = group.arrived
        self.num_awaited += self._lacks(group)
        # done, or as if it had never begun; else the count must outlive the siblings that have left
        if group.waiting == 0 and (group.arrived >= self.size or group.arrived == 0):
            self.forget(group_id)

    def expect_again(self, group_id: str | None) -> None:
        """A sibling that has left its group may come again. O(1)."""
        if group_id is None or self.size is None:
            return
        group = self._groups.get(group_id)
        if group is None:  # the whole group has left, and was forgotten as done
            group = self._groups[group_id] = _Group(self._new_label(), arrived=self.size)
        self.num_awaited -= self._lacks(group)
        # Those that wait have come: the one that may come again may be of an earlier group of this name, done since.
        group.arrived = max(group.arrived - 1, group.waiting)
        self._arrived_by_label[group.label] = group.arrived
        self.num_awaited += self._lacks(group)
        if group.arrived == 0:
            self.forget(group_id)

    def forget(self, group_id: str) -> None:
        """None of it waits, and what came of it does not count any more. O(1)."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._free_labels.append(group.label)

    def abandon(self, group_id: str, remember: int) -> None:
        """What still comes of this group is not wanted; the last ``remember`` abandoned groups are known. O(1)."""
        self.forget(group_id)
        self._abandoned[group_id] = None
        while len(self._abandoned) > max(remember, 1):
            self._abandoned.popitem(last=False)

    def restore(self, arrived: Mapping[str, int]) -> None:
        """Take over :meth:`arrived` of a snapshot, after its waiting rollouts joined: siblings that had come before and
        are not here any more count, too. O(groups)."""
        if self.size is None:
            return
        for group_id, number in arrived.items():
            group = self._groups.get(group_id)
            if group is None:
                group = self._groups[group_id] = _Group(self._new_label())
            group.arrived = number
            self._arrived_by_label[group.label] = number
        self.num_awaited = sum(self._lacks(group) for group in self._groups.values())

    # -- questions -----------------------------------------------------------------------------------------------------

    def complete(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n] labels -> [n] False where siblings are still to come. O(n)."""
        if self.size is None:
            return np.ones(labels.size, dtype=bool)
        complete: NDArray[np.bool_] = (labels < 0) | (self._arrived_by_label[labels] >= self.size)
        return complete

    def has_waiting(self, group_id: str | None) -> bool:
        """Whether a sibling of this group waits. O(1)."""
        group = self._groups.get(group_id) if group_id is not None else None
        return group is not None and group.waiting > 0

    def is_abandoned(self, group_id: str | None) -> bool:
        """Whether what comes of this group is not wanted any more. O(1)."""
        return group_id in self._abandoned

    def label_of(self, group_id: str) -> int | None:
        """The label that rows of this group carry; None if none waits. O(1)."""
        group = self._groups.get(group_id)
        return None if group is None else group.label

    def num_arrived(self, group_id: str) -> int:
        """Siblings of a group that have come. O(1)."""
        group = self._groups.get(group_id)
        return group.arrived if group is not None else 0

    def arrived(self) -> dict[str, int]:
        """Siblings that have come, of groups that are incomplete or still wait. O(groups)."""
        return {group_id: group.arrived for group_id, group in self._groups.items()}

    def departed(self) -> dict[str, int]:
        """Siblings that came and do not wait any more, of groups that are not done. O(groups)."""
        gone = ((name, group.arrived - group.waiting) for name, group in self._groups.items())
        return {name: number for name, number in gone if number}

    def incomplete(self) -> dict[str, int]:
        """Siblings that have come, of each group that waits for others, the first begun first. O(groups)."""
        return {name: group.arrived for name, group in self._groups.items() if self._lacks(group)}

    def check(self, labels: NDArray[np.int64], group_ids: list[str | None]) -> None:
        """Verify every invariant against the waiting rows; for tests. O(n groups)."""
        assert self.num_awaited == sum(self._lacks(group) for group in self._groups.values())
        if self.size is None:
            return
        for group_id, group in self._groups.items():
            assert group.waiting == group_ids.count(group_id) == int(np.count_nonzero(labels == group.label))
        used = [group.label for group in self._groups.values()]
        assert len(set(used)) == len(used)
        assert not set(used) & set(self._free_labels)

    def _lacks(self, group: _Group) -> int:
        """Siblings a waiting group still lacks; 0 once none of it waits."""
        return max((self.size or 0) - group.arrived, 0) if group.waiting else 0

    def _new_label(self) -> int:
        label = self._free_labels.pop() if self._free_labels else len(self._groups)
        if label >= len(self._arrived_by_label):
            # what stands behind is old numbers: a label is written before it is read
            self._arrived_by_label = np.resize(self._arrived_by_label, 2 * label)
        return label
