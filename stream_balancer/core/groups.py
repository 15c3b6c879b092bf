"""Groups of siblings (GRPO): how many of each have come, how many wait, how many there will be. Pure counting.

A sibling is an execution: a rollout, or all rollouts with one ``execution_id``, which come in one put. So a group of
eight is eight executions, however many rollouts they became.

::

    (unknown) --sibling--> open --all have come--> complete --all have left--> (unknown)
              --expect---> open --all have come, or close--> closed: takes no more, and is remembered
                            |--abandon--> abandoned: what still comes is not wanted, and is remembered
                            `--cut------> closed, with those that have come; what still comes is too late

A group may leave once all its siblings have come: ``size`` of them, or as many as was declared for this group; or once
``min_size`` have, and the others take ``patience`` times as long as half of the group did. The rows
of the siblings are the buffer's; here a group is a label, a small number that rows carry, so that completeness is one
vector operation over them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from stream_balancer.errors import RolloutError
from stream_balancer.planning.arrays import Bools, Ints

_FIRST_LABELS = 64


class GroupSize(NamedTuple):
    """How many siblings a group has, where that is not ``groups.size``."""

    group_id: str
    size: int | None
    """None: as many as have come; the group takes no more."""


def closed(group_id: str | None) -> GroupSize | None:
    """As many as have come; None where there is no group."""
    return None if group_id is None else GroupSize(group_id, None)


class Declared(NamedTuple):
    """Declaration of a group, as it is remembered."""

    size: int | None
    """Siblings of the group; None: it was abandoned."""
    closed: bool
    """The group takes no more."""
    late: bool = False
    """Siblings that still come are evicted, and not refused: the group was cut."""


@dataclass(slots=True)
class SiblingGroup:
    """A group some of whose siblings have come, or whose size was declared."""

    group_id: str
    label: int
    size: int
    declared: bool = False
    """``size`` was declared for this group: it takes no more than that."""
    expected: bool = False
    """``size`` was declared before they had come; one that is only what had come is void if all of these are lost."""
    arrived: int = 0
    """Executions that have come."""
    waiting: int = 0
    """Rollouts that wait."""
    began: float = math.inf
    """When its size was declared, or the first of it came, in seconds."""
    half_s: float = 0.0
    """Seconds from then until half of it had come: the median of all, whenever the rest comes."""
    last: float = 0.0
    """When the last of it came."""
    executions: dict[str, int] = field(default_factory=dict)
    """Rollouts that wait, of each execution with an id that has come."""

    @property
    def lacks(self) -> int:
        """Siblings it still lacks while others wait; 0 once none of it waits."""
        return max(self.size - self.arrived, 0) if self.waiting else 0


def _num_waiting(group: SiblingGroup) -> int:
    """Executions of which rollouts wait. O(executions with an id)."""
    if not group.executions:
        return group.waiting
    return group.waiting - sum(count - 1 for count in group.executions.values() if count)


class SiblingGroups:
    """The groups that are not done, and the last ``remember`` that take no more. ``size``: siblings that a group must
    have before it may leave, unless another number is declared for it; None where groups play no part."""

    remember: int = 100_000
    """Closed groups that stay known."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        """Siblings of a whole group; None where groups play no part."""
        self.min_size: int | None = None
        """Siblings with which a group may leave without its stragglers; None: it waits for all."""
        self.patience = 0.0
        """Times as long as half of the group took, after which it leaves without the others."""
        self.num_awaited = 0
        """Siblings that waiting groups still lack."""
        self.num_incomplete = 0
        """Rollouts that wait for these."""
        self.changed: list[str] = []
        """Groups of which something else is :meth:`declared` now. Whoever notifies of it empties this list."""
        self._groups: dict[str, SiblingGroup] = {}
        # of each that takes no more
        self._closed: OrderedDict[str, Declared] = OrderedDict()
        # (when it is cut, if it lacks siblings by then; group), a heap
        self._cuts: list[tuple[float, str]] = []
        # used again: the array by label stays small
        self._free_labels: list[int] = []
        self._lacking_by_label = np.zeros(_FIRST_LABELS, dtype=np.int64)

    # -- siblings come and leave ---------------------------------------------------------------------------------------

    def join(self, group_id: str, execution_id: str | None = None, now: float = 0.0) -> int:
        """A rollout waits from now on. -> its group's label. O(1); O(log groups) with ``min_size``."""
        group = self._groups.get(group_id) or self._new(group_id)
        # a rollout of an execution that has come before is no new sibling
        self._update(group, arrived=int(execution_id not in group.executions), waiting=1)
        group.began, group.last = min(group.began, now), now
        # not only at half: another size may be declared afterwards
        if 2 * group.arrived <= group.size + 1:
            group.half_s = now - group.began
        if execution_id is not None:
            group.executions[execution_id] = group.executions.get(execution_id, 0) + 1
        self._schedule(group)
        self._close_if_whole(group)
        return group.label

    def leave(self, group_id: str | None, execution_id: str | None = None, *, never_came: bool = False) -> None:
        """A waiting rollout leaves; with ``never_came`` its group lacks the execution again, once none of it waits.
        O(1)."""
        group = self.get(group_id)
        if group is None:
            return
        # what would come again of a group that was cut would be too late
        never_came = never_came and not self.why_unwanted(group_id)
        if execution_id is not None and execution_id in group.executions:
            group.executions[execution_id] -= 1
            if never_came := never_came and not group.executions[execution_id]:
                del group.executions[execution_id]
        self._update(group, arrived=-1 if never_came else 0, waiting=-1)
        self._forget_if_done(group)

    def expect_again(self, group_id: str | None, execution_id: str | None = None) -> None:
        """An execution that has left its group may come again. O(1)."""
        if group_id is None or self.size is None or self.why_unwanted(group_id):
            return
        group = self._groups.get(group_id)
        # the whole group has left, and was forgotten as done
        if group is None:
            group = self._new(group_id)
            self._update(group, arrived=group.size)
        if execution_id is not None:
            group.executions.pop(execution_id, None)
        # Those that wait have come: the one that may come again may be of an earlier group of this name, done since.
        self._update(group, arrived=max(-1, _num_waiting(group) - group.arrived))
        self._forget_if_done(group)

    def largest(self) -> tuple[int, str]:
        """Waiting rollouts and name of the largest group. O(groups)."""
        return max(((one.waiting, name) for name, one in self._groups.items()), default=(0, ""))

    def forget(self, group_id: str) -> None:
        """None of it waits, and what came of it does not count any more. O(1)."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self._free_labels.append(group.label)
            if group.declared and group_id not in self._closed:
                self.changed.append(group_id)

    def abandon(self, group_id: str) -> None:
        """Siblings that still come are not wanted; those that wait are being trained on. O(1)."""
        self._close(group_id, Declared(None, closed=True))
        if (group := self._groups.get(group_id)) is not None:
            self._forget_if_done(group)

    def restore(self, declared: Mapping[str, Declared], departed: Mapping[str, int]) -> None:
        """Take over :meth:`declarations` and :meth:`departed` of a snapshot, before its rollouts join: what waits of a
        closed group is complete, what waits of an abandoned one is not wanted. Those that were cut are closed until
        :meth:`cut` is called again. O(groups)."""
        if self.size is None:
            return
        for group_id, (size, is_closed, _) in declared.items():
            if is_closed or size is None:
                self._close(group_id, Declared(size, closed=True))
                continue
            group = self._new(group_id)
            group.declared = group.expected = True
            self._update(group, size=size)
        for group_id, number in departed.items():
            group = self._groups.get(group_id) or self._new(group_id)
            self._update(group, arrived=number)
            self._close_if_whole(group)
            self._forget_if_done(group)

    # -- stragglers ----------------------------------------------------------------------------------------------------

    def next_cut(self) -> float:
        """When the next group will have waited long enough for its stragglers; inf if none waits. O(1) amortised, but
        for a logarithm."""
        while self._cuts:
            at, group_id = self._cuts[0]
            group = self._groups.get(group_id)
            if group is not None and self._cut_at(group) == at:
                return at
            # it has all of its siblings by now, or the next one makes it wait longer
            heappop(self._cuts)
        return math.inf

    def overdue(self, now: float) -> list[str]:
        """Groups that wait for nothing but stragglers, and have waited long enough. Each is said once, and to be
        :meth:`cut`."""
        found: dict[str, None] = {}
        while self.next_cut() <= now:
            found[heappop(self._cuts)[1]] = None
        return list(found)

    def cut(self, group_id: str) -> int:
        """The group is those that have come, and what still comes is too late. -> siblings that it lacked. O(1)."""
        group = self._groups.get(group_id)
        if group is None:
            before = self._closed.get(group_id)
            self._close(group_id, Declared(0 if before is None else before.size, closed=True, late=True))
            return 0
        lacked, group.declared = group.lacks, True
        self._update(group, size=group.arrived)
        self._close(group_id, Declared(group.arrived, closed=True, late=True))
        return lacked

    def reschedule(self) -> None:
        """Other knobs are in force. O(groups)."""
        self._cuts.clear()
        for group in self._groups.values():
            self._schedule(group)

    def restart(self, now: float) -> None:
        """Rollouts that wait were restored: when their groups began is unknown, so that time begins anew. O(groups)."""
        for group in self._groups.values():
            if group.began < math.inf:
                group.half_s, group.began, group.last = now - group.began, now, now
        self.reschedule()

    def _cut_at(self, group: SiblingGroup) -> float:
        """Time at which the group will have waited long enough for its stragglers; inf while too few have come, or
        none lacks."""
        # of fewer than half nobody knows how long the group takes
        if self.min_size is None or not group.lacks or group.arrived < max(self.min_size, group.size / 2):
            return math.inf
        # nor right after another one: siblings come in bursts
        late = max(group.began + self.patience * group.half_s, group.last + group.half_s)
        return late if self.patience else group.began

    def _schedule(self, group: SiblingGroup) -> None:
        """Siblings have come, or the size or the knobs are others."""
        if (at := self._cut_at(group)) < math.inf:
            heappush(self._cuts, (at, group.group_id))

    # -- how many there are --------------------------------------------------------------------------------------------

    def check_put(self, group_id: str, number: int, execution_ids: Iterable[str | None] = ()) -> None:
        """Raise RolloutError if a group does not take so many more executions, or has one of these. O(ids)."""
        group, declared = self._groups.get(group_id), self.declared(group_id)
        # what is not wanted is evicted, and no worker's fault
        if self.why_unwanted(group_id):
            return
        for execution_id in execution_ids if group is not None and group.executions else ():
            if group is not None and execution_id in group.executions:
                raise RolloutError(
                    f"execution {execution_id!r} of group {group_id!r} has come already, and may have left. Put all of "
                    "its rollouts in one put_group(), so that the group is not complete before"
                )
        size = None if declared is None else declared.size
        arrived = size if group is None else group.arrived
        if size is None or arrived is None or arrived + number <= size:
            return
        raise RolloutError(
            f"group {group_id!r} takes {max(size - arrived, 0)} more executions, not {number}: {arrived} have come, "
            f"and by expect_group(), close_group() or put_group(complete=True) it has {size} (a rollout is one, and so "
            "are all with one execution_id). Give the siblings of another prompt, or of the same one sampled again, "
            "another group_id"
        )

    def check_size(self, wanted: GroupSize) -> None:
        """Raise ValueError for a size that contradicts what came, or what was declared before. O(1)."""
        group_id, size = wanted
        if size is None or self.why_unwanted(group_id):
            return
        group, before = self._groups.get(group_id), self.declared(group_id)
        if before is not None and before.size != size:
            raise ValueError(
                f"expect_group({group_id!r}, {size}): it was declared to have {before.size} before. To let it go with "
                "those that have come, call close_group()"
            )
        if group is not None and group.arrived > size:
            raise ValueError(
                f"expect_group({group_id!r}, {size}): {group.arrived} of it have come already. Expect at least as many"
            )

    def set_size(self, wanted: GroupSize, now: float = 0.0) -> None:
        """Declare how many siblings a group has; :meth:`check_size` comes before. O(1)."""
        group_id, size = wanted
        group = self._groups.get(group_id)
        if self.size is None or self.why_unwanted(group_id) or (group is None and group_id in self._closed):
            return
        if group is None:
            group = self._new(group_id)
        group.began = min(group.began, now)
        group.declared, group.expected = True, size is not None
        self._update(group, size=group.arrived if size is None else size)
        self.changed.append(group_id)
        self._schedule(group)
        if self._close_if_whole(group) and not group.waiting:
            self.forget(group_id)

    # -- questions -----------------------------------------------------------------------------------------------------

    def complete(self, labels: Ints) -> Bools:
        """[n] labels -> [n] False where siblings are still to come. O(n)."""
        if not self.num_incomplete:
            return np.ones(labels.size, dtype=bool)
        complete: Bools = (labels < 0) | (self._lacking_by_label[labels] <= 0)
        return complete

    def get(self, group_id: str | None) -> SiblingGroup | None:
        """A group of which siblings have come that are not all done, or whose size is declared. O(1)."""
        return None if group_id is None else self._groups.get(group_id)

    def why_unwanted(self, group_id: str | None) -> Literal["abandoned", "late"] | None:
        """Reason for which siblings that come are evicted: it was abandoned, or cut; None where they are not. O(1)."""
        closed = None if group_id is None else self._closed.get(group_id)
        if closed is None or not (closed.late or closed.size is None):
            return None
        return "late" if closed.late else "abandoned"

    def _closed_size(self, group_id: str) -> int | None:
        closed = self._closed.get(group_id)
        return None if closed is None else closed.size

    def size_of(self, group_id: str) -> int:
        """Siblings that a group must have before it may leave; 1 where groups play no part. O(1)."""
        group = self._groups.get(group_id)
        return group.size if group is not None else self._closed_size(group_id) or self.size or 1

    def declared(self, group_id: str) -> Declared | None:
        """Declaration of a group; None: nothing that is still known. O(1)."""
        if group_id in self._closed:
            return self._closed[group_id]
        group = self._groups.get(group_id)
        return Declared(group.size, closed=False) if group is not None and group.declared else None

    def declarations(self) -> dict[str, Declared]:
        """All that is :meth:`declared`: groups that take no more, the oldest first, then the others. O(groups)."""
        names = (*self._closed, *(name for name in self._groups if name not in self._closed))
        return {name: one for name in names if (one := self.declared(name)) is not None}

    def departed(self) -> dict[str, int]:
        """Siblings that came and do not wait any more, of groups that are not done. O(groups)."""
        gone = ((name, group.arrived - _num_waiting(group)) for name, group in self._groups.items())
        return {name: number for name, number in gone if number}

    def incomplete(self) -> dict[str, int]:
        """Siblings that have come, of each group that waits for others, the first begun first. O(groups)."""
        return {name: group.arrived for name, group in self._groups.items() if group.lacks}

    # -- counting ------------------------------------------------------------------------------------------------------

    def _update(self, group: SiblingGroup, *, arrived: int = 0, waiting: int = 0, size: int | None = None) -> None:
        """So many more have come, and wait; what the groups lack follows, as sums kept in O(1)."""
        # taken off as it was, and added as it is: a sum over all groups would be O(groups) a put
        self.num_awaited -= group.lacks
        self.num_incomplete -= group.waiting if group.lacks else 0
        group.arrived += arrived
        group.waiting += waiting
        if size is not None:
            group.size = size
        self.num_awaited += group.lacks
        self.num_incomplete += group.waiting if group.lacks else 0
        self._lacking_by_label[group.label] = group.size - group.arrived

    def _forget_if_done(self, group: SiblingGroup) -> None:
        if group.waiting:
            return
        if group.arrived >= group.size > 0 or self.why_unwanted(group.group_id):
            self.forget(group.group_id)
        # all of it were lost: as if it had never begun; what was to be expected of it still is
        elif group.arrived == 0:
            if not group.expected:
                self.forget(group.group_id)
            if self._closed.pop(group.group_id, None) is not None:
                self.changed.append(group.group_id)
        # else the count must outlive the siblings that have left

    def _close_if_whole(self, group: SiblingGroup) -> bool:
        """A group of a declared size takes no more once all have come. -> whether that is so."""
        if is_whole := group.declared and group.arrived >= group.size:
            self._close(group.group_id, Declared(group.size, closed=True))
        return is_whole

    def _close(self, group_id: str, declared: Declared) -> None:
        """The group takes no more. So many such groups are known."""
        self._closed[group_id] = declared
        # said again, it is the youngest: the oldest are forgotten first
        self._closed.move_to_end(group_id)
        self.changed.append(group_id)
        while len(self._closed) > max(self.remember, 1):
            self.changed.append(self._closed.popitem(last=False)[0])

    def _new(self, group_id: str) -> SiblingGroup:
        label = self._free_labels.pop() if self._free_labels else len(self._groups)
        if label >= len(self._lacking_by_label):
            # what stands behind is old numbers: a label is written before it is read
            self._lacking_by_label = np.resize(self._lacking_by_label, 2 * label)
        # a sibling of it was lost, or is to be planned again
        closed = self._closed_size(group_id)
        size = (self.size or 0) if closed is None else closed
        group = self._groups[group_id] = SiblingGroup(group_id, label, size, declared=closed is not None)
        return group
