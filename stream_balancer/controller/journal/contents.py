"""What a journal holds: a fold over its records. Pure, and the same for writing and for recovering.

While writing it shows which segments still matter; after a crash the fold over all records that are left is what the
balancer held. A removal lies in a later segment than what it removes, and segments go oldest first, so nothing that was
removed comes back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from stream_balancer.controller.journal.records import (
    Dispatched,
    Done,
    Evicted,
    Head,
    Plan,
    Put,
    Retracted,
    Returned,
    State,
    Versioned,
    batch_of,
)
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.types import EvictReason, Rollout

__all__ = ["Contents", "Held", "Place"]


class Place(NamedTuple):
    """Where a record lies."""

    segment: int
    at: int
    size: int


@dataclass(slots=True)
class Held:
    """A put some of whose rollouts are still needed."""

    put: Put
    place: Place
    alive: set[str]


@dataclass
class Contents:
    """The state that records add up to."""

    remember_ids: int
    puts: dict[int, Held] = field(default_factory=dict)
    """By number of the put."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """By step, in flight."""
    past_ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    next_put: int = 0
    next_step: int = 0
    version: int | None = None
    acknowledged: int = 0
    evicted: Counter[EvictReason] = field(default_factory=Counter)
    counts: dict[str, Any] = field(default_factory=dict)
    departed: dict[str, int] = field(default_factory=dict)
    live_bytes: int = 0
    """Of records of puts some of whose rollouts are needed."""
    _holders: dict[str, list[int]] = field(default_factory=dict)  # two while a second put of one id is not yet refused
    _live_in: Counter[int] = field(default_factory=Counter)  # segment -> puts

    def apply(self, head: Head, place: Place) -> None:
        """Take in the next record. O(rollouts it names)."""
        match head:
            case Put():
                self._put(head, place)
            case Retracted(number):
                if number in self.puts:
                    self._drop(number, tuple(self.puts[number].alive))
            case Dispatched(plan, counts, departed):
                self.plans[plan.step] = plan
                self.next_step = max(self.next_step, plan.step + 1)
                self.counts, self.departed = counts, departed
            case Done(step, ids):
                self._forget(ids)
                self.plans.pop(step, None)
                self.next_step = max(self.next_step, step + 1)
                self.acknowledged += len(ids)
            case Evicted(reason, ids, departed):
                self._forget(ids)
                self.evicted[reason] += len(ids)
                self.departed = departed
            case Returned(step):
                self.plans.pop(step, None)
            case Versioned(version):
                self.version = version
            case State():
                self._state(head)

    def _put(self, put: Put, place: Place) -> None:
        if (before := self.puts.get(put.number)) is not None:  # this is a copy, made so that an old segment could go
            self._drop(put.number, tuple(before.alive))
        self.puts[put.number] = Held(put, place, set(put.ids))
        self._count(place, +1)
        for name in put.ids:
            self._holders.setdefault(name, []).append(put.number)
        self.next_put = max(self.next_put, put.number + 1)
        self.next_step = max(self.next_step, put.step)

    def _count(self, place: Place, by: int) -> None:
        self.live_bytes += by * place.size
        self._live_in[place.segment] += by

    def _drop(self, number: int, names: Iterable[str]) -> None:
        held = self.puts[number]
        for name in names:
            held.alive.discard(name)
            holders = self._holders[name]
            holders.remove(number)
            if not holders:
                del self._holders[name]
        if not held.alive:
            del self.puts[number]
            self._count(held.place, -1)

    def lose(self, number: int, names: Iterable[str]) -> None:
        """These rollouts of a put cannot be read: they are needed no more."""
        self._drop(number, tuple(names))

    def _forget(self, ids: Iterable[str]) -> None:
        for name in ids:
            for number in tuple(self._holders.get(name, ())):
                self._drop(number, (name,))
            self.past_ids[name] = None
        while len(self.past_ids) > self.remember_ids:
            self.past_ids.popitem(last=False)

    def _state(self, state: State) -> None:
        self.plans = {plan.step: plan for plan in state.plans}
        self.past_ids = OrderedDict.fromkeys(state.past_ids)
        self.next_put = max(self.next_put, state.next_put)
        self.next_step = max(self.next_step, state.next_step)
        self.version, self.counts, self.departed = state.version, state.counts, state.departed
        self.acknowledged, self.evicted = state.acknowledged, Counter(state.evicted)

    def state(self) -> State:
        """All but the puts, for the start of a segment. O(ids remembered)."""
        return State(
            next_put=self.next_put,
            next_step=self.next_step,
            version=self.version,
            plans=list(self.plans.values()),
            past_ids=list(self.past_ids),
            counts=self.counts,
            departed=self.departed,
            acknowledged=self.acknowledged,
            evicted=dict(self.evicted),
        )

    def needs(self, segment: int) -> bool:
        """Whether a put that is needed lies in this segment. O(1)."""
        return self._live_in[segment] > 0

    def held_in(self, segment: int) -> list[Held]:
        """Puts that are needed and lie in this segment. O(puts)."""
        return [held for held in self.puts.values() if held.place.segment == segment]

    # -- recovering ----------------------------------------------------------------------------------------------------

    def snapshot(self, rollouts: Mapping[str, Rollout], now: float) -> tuple[Snapshot, list[Plan]]:
        """What the balancer held, and plans that cannot be kept, for want of a rollout most likely. ``now``: seconds
        since the epoch. O(rollouts)."""
        flying, broken = [], []
        for plan in sorted(self.plans.values(), key=lambda plan: plan.step):
            try:
                flying.append(batch_of(plan, rollouts))
            except Exception:  # noqa: BLE001 - a rollout is missing, or the plan makes no sense
                broken.append(plan)
        planned = {r.rollout_id for batch in flying for r in batch.rollouts if not r.is_padding}
        waiting: dict[str, Put] = {}
        for number in sorted(self.puts):
            held = self.puts[number]
            for name in held.put.ids:
                if name in held.alive and name in rollouts and name not in planned:
                    waiting.setdefault(name, held.put)
        arrived = np.maximum.accumulate(np.array([put.arrived_at for put in waiting.values()], dtype=np.float64))
        skips = np.array([max(self.next_step - put.step, 0) for put in waiting.values()], dtype=np.int64)
        counts = dict(self.counts)
        counts["acknowledged"] = self.acknowledged
        counts["evicted"] = dict.fromkeys(get_args(EvictReason), 0) | self.evicted
        counts["accepted"] = len(waiting) + len(planned) + self.acknowledged + self.evicted.total()
        groups = Counter(self.departed)
        groups.update(name for name in (rollouts[key].group_id for key in waiting) if name is not None)
        return Snapshot(
            waiting=tuple(rollouts[name] for name in waiting),
            waited_s=np.maximum(now - arrived, 0.0),
            skips=skips,
            in_flight=tuple(flying),
            group_arrivals=groups,
            past_ids=tuple(self.past_ids),
            version=self.version,
            next_step=self.next_step,
            counts=counts,
            knobs={},
        ), broken
