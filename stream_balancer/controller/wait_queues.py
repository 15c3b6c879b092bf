"""Who waits in the balancer, first come first served: puts for room, reservers for leave to begin.

Only the queues, and whom to wake. A parked task is woken, never handed anything: it then tries again by itself, and
wakes the next once it is in or gone. So waking is O(1) however many wait. What it waits for is decided in ``_core``;
the waiting itself is in ``balancer``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import anyio

from stream_balancer.types import Rollout

__all__ = ["Parked", "ParkedPut", "ParkedPuts", "ParkedReserve", "Queue"]


class Parked:
    """A task that waits for :attr:`wake`."""

    def __init__(self) -> None:
        self.wake = anyio.Event()


class ParkedPut(Parked):
    """A put that waits for room."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        super().__init__()
        self.rollouts = rollouts
        self.group_id = rollouts[0].group_id


class ParkedReserve(Parked):
    """A reserver that waits until so many more may begin."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count


_P = TypeVar("_P", bound=Parked)


class Queue(Generic[_P]):
    """In the order of parking."""

    def __init__(self) -> None:
        self._parked: OrderedDict[int, _P] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, one: _P) -> _P:
        """It takes the last place."""
        self._parked[id(one)] = one
        return one

    def leave(self, one: _P) -> None:
        """It got what it wanted, or gave up."""
        del self._parked[id(one)]

    @property
    def first(self) -> _P | None:
        """The one that has waited longest."""
        return next(iter(self._parked.values()), None)

    def wake_first(self) -> None:
        """The one that has waited longest may try again. O(1)."""
        if self._parked:
            next(iter(self._parked.values())).wake.set()

    def wake_all(self) -> None:
        """There is something that all must be told. O(n)."""
        for one in self._parked.values():
            one.wake.set()


class ParkedPuts(Queue[ParkedPut]):
    """Siblings of a waiting group need no room, so they can be woken out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self._of_group: dict[str, list[ParkedPut]] = {}

    def park(self, one: ParkedPut) -> ParkedPut:
        """See :class:`Queue`."""
        if one.group_id is not None:
            self._of_group.setdefault(one.group_id, []).append(one)
        return super().park(one)

    def leave(self, one: ParkedPut) -> None:
        """See :class:`Queue`. O(siblings parked)."""
        super().leave(one)
        if one.group_id is not None:
            siblings = self._of_group[one.group_id]
            siblings.remove(one)
            if not siblings:
                del self._of_group[one.group_id]

    def wake_siblings(self, group_id: str | None) -> None:
        """A group's first member is in, so the others may follow. O(siblings parked)."""
        for one in self._of_group.get(group_id or "", ()):
            one.wake.set()
