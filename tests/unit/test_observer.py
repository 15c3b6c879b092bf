"""Observers: each event once, in order, after the change; one that raises loses nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import EVENTS, Observer

TOKENS = torch.zeros(64, dtype=torch.int64)


def event(name: str, length: int = 3, *, group: str | None = None, version: int | None = None) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": TOKENS[:length]}, rollout_id=name, group_id=group, version=version)


_SHOWN: dict[str, Callable[..., tuple[Any, ...]]] = {
    "accepted": lambda rollouts, now: ([r.rollout_id for r in rollouts], now),
    "planned": lambda waiting, knobs, reason: (waiting.costs.tolist(), reason),
    "dispatched": lambda batch: (batch.step,),
    "acknowledged": lambda batch: (batch.step,),
    "evicted": lambda rollout, reason: (rollout.rollout_id, reason),
    "version_set": lambda version: (version,),
}


class Recording(Observer):
    """Events with what identifies their subject."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        for name in _SHOWN:
            setattr(self, name, partial(self._note, name))

    def _note(self, name: str, *values: Any) -> None:
        self.events.append((name, *_SHOWN[name](*values)))

    def taken(self) -> list[tuple[Any, ...]]:
        events, self.events = self.events, []
        return events


def observed(**knobs: Any) -> tuple[BalancerCore, Recording]:
    core = BalancerCore(sb.BalancerConfig(**{"dp_size": 1, "batch_size": 2, "window": 2, "capacity": 4, **knobs}))
    core.observers.append(recording := Recording())
    return core, recording


def test_an_observer_has_a_method_for_every_event_and_no_other() -> None:
    names = {name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if not name.startswith("_")}
    assert names == set(EVENTS)


def test_the_life_of_a_batch() -> None:
    core, recording = observed()
    core.add(event("a", 3), 1.0)
    core.add_all([event("b", 5)], 2.0)
    assert core.poll(2.0) is not None
    core.nack(0)
    assert core.poll(3.0) is not None
    core.acknowledge(0)
    assert recording.taken() == [
        ("accepted", ["a"], 1.0),
        ("accepted", ["b"], 2.0),
        ("planned", [3.0, 5.0], "window"),
        ("dispatched", 0),
        ("dispatched", 0),
        ("acknowledged", 0),
    ]


def test_what_is_evicted_follows_its_cause() -> None:
    core, recording = observed(staleness=sb.Staleness(max_versions=0), batch_size=4, window=4, capacity=8)
    core.set_version(1)
    core.add(event("old", version=0), 0.0)
    core.add(event("a", version=1), 0.0)
    core.set_version(2)
    core.filter_out([event("bad", version=2)], 0.0)
    core.add(event("gone", version=2), 0.0)
    core.evict_lost(lambda one: one.rollout_id == "gone")
    assert recording.taken() == [
        ("version_set", 1),
        ("accepted", ["old"], 0.0),
        ("evicted", "old", "stale"),
        ("accepted", ["a"], 0.0),
        ("version_set", 2),
        ("evicted", "a", "stale"),
        ("evicted", "bad", "filtered"),
        ("accepted", ["gone"], 0.0),
        ("evicted", "gone", "lost"),
    ]


def test_an_observer_that_raises_is_logged_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def _fail(self, *values: object) -> None:
            raise RuntimeError("no")

        accepted = planned = dispatched = acknowledged = evicted = version_set = _fail

    core, recording = observed(staleness=sb.Staleness(max_versions=0))
    core.observers.insert(0, Broken())
    with caplog.at_level(logging.ERROR, logger="stream_balancer.balancer"):
        core.set_version(0)
        core.add_all([event("a", version=0), event("b", version=0)], 0.0)
        assert core.poll(0.0) is not None
        core.acknowledge(0)
        core.add(event("c", version=0), 0.0)
        core.set_version(1)
    verify(core)
    kinds = ["version_set", "accepted", "planned", "dispatched", "acknowledged", "accepted", "version_set", "evicted"]
    assert [event[0] for event in recording.taken()] == kinds
    assert [r.getMessage().rsplit(" ", 1)[1].strip("'") for r in caplog.records] == kinds
