"""What happens to a balancer, as changes of the journal's rows. Pure.

Statements are executed in the order of the events, so an id that was evicted as lost and put again is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from stream_balancer.core.groups import Declared
from stream_balancer.host.journal.contents import Contents
from stream_balancer.host.journal.rows import Done, Fact, Group, State, fact_row, group_of, plan_of
from stream_balancer.types import Batch, EvictReason

__all__ = ["Changes", "Statement"]

Statement: TypeAlias = tuple[str, Sequence[Sequence[Any]]]
"""SQL in which ``?`` stands for ``(?, ...), (?, ...), ...``, and these rows. It may be executed in parts."""
_IDS_A_ROW = 1000


class Changes:
    """Statements for each event, and what they need to know of those before."""

    def __init__(self) -> None:
        self.next_number = 0
        """Of the next rollout's row."""
        self._state = State()
        self._remember_ids = 0
        self._done: deque[tuple[int, int]] = deque()  # key of each row of ids that are done, and how many it has
        self._groups: dict[str, int] = {}  # key of each group's row
        self._next_group = 0

    def follow(self, contents: Contents, remember_ids: int) -> None:
        """What comes now follows these rows."""
        self.next_number, self._state, self._remember_ids = contents.next_number, contents.state, remember_ids
        self._done = deque(contents.done)
        self._groups = {name: key for name, (key, _) in contents.groups.items()}
        self._next_group = max(self._groups.values(), default=-1) + 1

    @staticmethod
    def added(rows: Sequence[Sequence[Any]]) -> list[Statement]:
        """Rows of rollouts."""
        return [("insert into rollouts values ?", rows)]

    def retracted(self, numbers: Sequence[int]) -> list[Statement]:
        """Rows that were added and not accepted after all."""
        return [("delete from rollouts where number in (values ?)", [(number,) for number in numbers])]

    def dispatched(self, batch: Batch, counts: dict[str, Any], departed: dict[str, int]) -> list[Statement]:
        """A batch is about to be handed out: its plan, to be delivered again as it is."""
        state = self._state
        state.next_step = max(state.next_step, batch.step + 1)
        state.counts, state.departed = counts, departed
        return [_put(plan_of(batch), batch.step), self._put_state()]

    def acknowledged(self, batch: Batch, done: Sequence[str], count: int) -> list[Statement]:
        """A batch need not be kept; ``done`` of its ids are refused from now on. ``count``: acknowledged so far."""
        self._state.acknowledged = count
        ids = [r.rollout_id for r in batch.rollouts if not r.is_padding]
        return [_remove(ids), *self.returned(batch.step), *self._file(done), self._put_state()]

    def evicted(self, rollout_id: str, reason: EvictReason, departed: dict[str, int]) -> list[Statement]:
        """A rollout was given up; one that is lost may be put again."""
        state = self._state
        state.evicted[reason] = state.evicted.get(reason, 0) + 1
        state.departed = departed
        filed = self._file([rollout_id] if reason != "lost" else [])
        return [_remove([rollout_id]), *filed, self._put_state()]

    def declared(self, group_id: str, declared: Declared | None) -> list[Statement]:
        """Of a group this is declared now; None: nothing any more."""
        if declared is not None:
            return self.group(group_of(group_id, declared))
        key = self._groups.pop(group_id, None)
        return [] if key is None else [_delete("group", key)]

    def group(self, group: Group) -> list[Statement]:
        """A group's row."""
        key = self._groups.get(group.group_id)
        if key is None:
            key = self._groups[group.group_id] = self._next_group
            self._next_group += 1
        return [_put(group, key)]

    def returned(self, step: int) -> list[Statement]:
        """A batch's plan is void."""
        return [_delete("plan", step), _delete("acked", step)]

    @staticmethod
    def said(fact: Fact, key: int) -> list[Statement]:
        """What ranks have said of steps in flight."""
        return [_put(fact, key)]

    def versioned(self, version: int) -> list[Statement]:
        """The policy moved on."""
        self._state.version = version
        return [self._put_state()]

    def adopted(self, contents: Contents) -> Iterator[Statement]:
        """All but the rollouts of a checkpoint, into a journal without rows."""
        self._state = contents.state
        for plan in contents.plans:
            yield _put(plan, plan.step)
        past = list(contents.past_ids)
        for first in range(0, len(past), _IDS_A_ROW):
            yield from self._file(past[first : first + _IDS_A_ROW])
        for _, group in contents.groups.values():
            yield from self.group(group)
        yield self._put_state()

    def _file(self, ids: Sequence[str]) -> Iterator[Statement]:
        """These are done. Rows go whose ids are more than ``remember_ids`` back."""
        if not ids or not self._remember_ids:
            return
        key = self._done[-1][0] + 1 if self._done else 0
        self._done.append((key, len(ids)))
        yield _put(Done(list(ids), self._state.next_step), key)
        total = sum(count for _, count in self._done)
        while total - self._done[0][1] >= self._remember_ids:
            key, count = self._done.popleft()
            total -= count
            yield _delete("done", key)

    def _put_state(self) -> Statement:
        return _put(self._state, 0)


def _put(fact: Fact, key: int) -> Statement:
    return "replace into facts values ?", [fact_row(fact, key)]


def _delete(kind: str, key: int) -> Statement:
    return "delete from facts where (kind, key) in (values ?)", [(kind, key)]


def _remove(ids: Sequence[str]) -> Statement:
    return "delete from rollouts where id in (values ?)", [(name,) for name in ids]
