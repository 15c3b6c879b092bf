"""What a journal's rows add up to: a balancer's snapshot. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np

from stream_balancer.core.executions import execution_of
from stream_balancer.core.groups import Declared
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.journal.rows import (
    Acked,
    Came,
    Done,
    Fact,
    Group,
    Plan,
    State,
    batch_of,
    group_of,
    plan_of,
)
from stream_balancer.types import EvictReason, Rollout

__all__ = ["Contents", "Held", "contents_of"]


class Held(NamedTuple):
    """A rollout, and when it came."""

    rollout: Rollout
    arrived_at: float
    step: int


@dataclass
class Contents:
    """All that a journal holds."""

    held: dict[str, Held] = field(default_factory=dict)
    """By id, oldest first."""
    plans: list[Plan] = field(default_factory=list)
    past_ids: dict[str, None] = field(default_factory=dict)
    done: list[tuple[int, int]] = field(default_factory=list)
    """Key of each row of ids that are done, and how many it has; oldest first."""
    groups: dict[str, tuple[int, Group]] = field(default_factory=dict)
    """Key of the row of each group of which something was declared, and the row; oldest first."""
    acked: dict[int, Acked] = field(default_factory=dict)
    """By step."""
    came: dict[int, Came] = field(default_factory=dict)
    """By key."""
    state: State = field(default_factory=State)
    next_number: int = 0

    def add(self, key: int, fact: Fact) -> None:
        """Take in a row. Most know a least number of the next step, so that a damaged one does not turn it back."""
        state = self.state
        match fact:
            case Plan():
                self.plans.append(fact)
                state.next_step = max(state.next_step, fact.step + 1)
            case Done():
                self.past_ids |= dict.fromkeys(fact.ids)
                self.done.append((key, len(fact.ids)))
                state.next_step = max(state.next_step, fact.next_step)
            case Group():
                self.groups[fact.group_id] = key, fact
            case Acked():
                self.acked[fact.step] = fact
            case Came():
                self.came[key] = fact
            case State():
                fact.next_step = max(state.next_step, fact.next_step)
                self.state = fact

    def hold(self, number: int, held: Held) -> None:
        """Take in a rollout's row. A second one of an id was about to be refused."""
        self.held.setdefault(held.rollout.rollout_id, held)
        self.next_number = max(self.next_number, number + 1)
        self.state.next_step = max(self.state.next_step, held.step)

    def snapshot(self, now: float, remember_ids: int) -> tuple[Snapshot, list[Plan]]:
        """What the balancer held, and plans that cannot be kept, for want of a rollout most likely. ``now``: seconds
        since the epoch. O(rollouts)."""
        rollouts = {name: held.rollout for name, held in self.held.items()}
        flying, broken = [], []
        for plan in sorted(self.plans, key=lambda plan: plan.step):
            try:
                flying.append(batch_of(plan, rollouts))
            except Exception:  # noqa: BLE001 - a rollout is missing, or the plan makes no sense
                broken.append(plan)
        planned = {r.rollout_id for batch in flying for r in batch.rollouts if not r.is_padding}
        waiting = [held for name, held in self.held.items() if name not in planned]
        state = self.state
        arrived = np.maximum.accumulate(np.array([held.arrived_at for held in waiting], dtype=np.float64))
        counts = dict(state.counts)
        counts["acknowledged"] = state.acknowledged
        counts["evicted"] = dict.fromkeys(get_args(EvictReason), 0) | state.evicted
        counts["accepted"] = len(waiting) + len(planned) + state.acknowledged + sum(state.evicted.values())
        groups = Counter(state.departed)
        groups.update(_groups_of(held.rollout for held in waiting))
        came = groups.copy()  # of those that are done, too
        came.update(name for name in _groups_of(rollouts[name] for name in planned) if name not in groups)
        return Snapshot(
            waiting=tuple(held.rollout for held in waiting),
            waited_s=np.maximum(now - arrived, 0.0),
            skips=np.array([max(state.next_step - held.step, 0) for held in waiting], dtype=np.int64),
            in_flight=tuple(flying),
            group_arrivals=groups,
            group_sizes=self._open_groups(),
            closed_groups=self._closed_groups(came),
            past_ids=tuple(self.past_ids)[-remember_ids:] if remember_ids else (),
            version=state.version,
            next_step=state.next_step,
            counts=counts,
        ), broken

    def _open_groups(self) -> dict[str, int]:
        return {name: group.size for name, (_, group) in self.groups.items() if group.state == "open" and group.size}

    def _closed_groups(self, came: Mapping[str, int]) -> dict[str, int | None]:
        closed = {name: group for name, (_, group) in self.groups.items() if group.state != "open"}
        return {
            name: None if group.state == "abandoned" else came[name] if group.size is None else group.size
            for name, group in closed.items()
        }


def contents_of(snapshot: Snapshot, now: float) -> Contents:
    """The way back, of a checkpoint for example."""
    departed = Counter(snapshot.group_arrivals)
    departed.subtract(_groups_of(snapshot.waiting))
    return Contents(
        held={held.rollout.rollout_id: held for held in _held(snapshot, now)},
        plans=[plan_of(batch) for batch in snapshot.in_flight],
        past_ids=dict.fromkeys(snapshot.past_ids),
        groups={name: (key, group) for key, (name, group) in enumerate(_groups(snapshot).items())},
        state=State(
            next_step=snapshot.next_step,
            version=snapshot.version,
            counts=dict(snapshot.counts),
            departed={name: n for name, n in departed.items() if n > 0},
            acknowledged=snapshot.counts["acknowledged"],
            evicted=dict(snapshot.counts["evicted"]),
        ),
    )


def _groups_of(rollouts: Iterable[Rollout]) -> list[str]:
    """The group of each execution."""
    executions = {execution_of(rollout): rollout.group_id for rollout in rollouts}
    return [group_id for group_id in executions.values() if group_id is not None]


def _groups(snapshot: Snapshot) -> dict[str, Group]:
    closed = {name: group_of(name, Declared(size, closed=True)) for name, size in snapshot.closed_groups.items()}
    return closed | {name: group_of(name, Declared(size, closed=False)) for name, size in snapshot.group_sizes.items()}


def _held(snapshot: Snapshot, now: float) -> Iterator[Held]:
    for batch in snapshot.in_flight:
        yield from (Held(r, now, snapshot.next_step) for r in batch.rollouts if not r.is_padding)
    for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
        yield Held(rollout, now - float(waited_s), snapshot.next_step - int(skips))
