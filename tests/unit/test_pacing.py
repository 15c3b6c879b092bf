"""Slots keep the staleness bound: whatever lengths, order of finishing, and choice of the dispatcher.

The worlds here are hostile: generation lasts from nothing to for ever, workers give up, batches are acknowledged at
any time, and every acknowledgement makes a new version.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import Throttle, check_reserve

IDS = torch.zeros(64, dtype=torch.int64)


@st.composite
def configs(draw: st.DrawFn) -> sb.BalancerConfig:
    dp_size = draw(st.integers(1, 3))
    group = draw(st.sampled_from([None, None, 2, 3]))
    unit = (group or 1) * dp_size
    batch = unit * draw(st.integers(1, 3))
    staleness = draw(st.integers(0, 4))
    window = min(batch * draw(st.integers(1, 3)), batch * (staleness + 1))
    return sb.BalancerConfig(
        dp_size=dp_size,
        batch_size=batch,
        window=window,
        groups=sb.Groups(size=group),
        capacity=window + batch * draw(st.integers(0, 2)),
        staleness=sb.Staleness(max_versions=staleness),
        equal_rollouts=draw(st.booleans()),
        cost=sb.cost.QuadraticCost(),
    )


class World:
    """Drives the core as the balancer does."""

    def __init__(self, config: sb.BalancerConfig) -> None:
        self.config = config
        self.core = BalancerCore(config)
        self.core.set_version(0)
        self.throttle = Throttle()
        self.slots: list[tuple[int, int]] = []  # (number, version) of what is being generated, a group each
        self.parked: list[tuple[int, list[sb.Rollout]]] = []  # finished, and no room
        self.made = 0
        self.trained = 0
        self.unit = config.groups.size or 1

    @property
    def blocked(self) -> bool:
        return self.throttle.room(self.core) < self.unit

    def begin(self) -> bool:
        if self.blocked:
            return False
        version = self.core.staleness.version or 0
        self.slots.append((self.throttle.admit(version, self.unit), version))
        return True

    def finish(self, index: int, length: int) -> None:
        number, version = self.slots.pop(index)
        self.made += 1
        group = f"g{self.made}" if self.config.groups.size else None
        rollouts = [
            sb.Rollout(
                tokens={"input_ids": IDS[:length]}, rollout_id=f"{self.made}.{n}", group_id=group, version=version
            )
            for n in range(self.unit)
        ]
        self.parked.append((number, rollouts))
        self.let_in()

    def let_in(self) -> None:
        while self.parked:
            number, rollouts = self.parked[0]
            try:
                self.core.add_all(rollouts, 0.0)
            except sb.errors.WouldBlock:
                return
            self.throttle.settle(number, len(rollouts))
            del self.parked[0]

    def abandon(self, index: int) -> None:
        self.throttle.settle(self.slots.pop(index)[0], self.unit)

    def dispatch(self) -> bool:
        if self.blocked and self.throttle.is_stuck(self.core):
            self.core.triggers.force_flush()
        batch = self.core.poll(0.0)
        if batch is not None:
            oldest = min(r.min_version or 0 for r in batch.rollouts if not r.is_padding)
            trained_at = (self.core.staleness.version or 0) + len(self.core.in_flight.delivered()) - 1  # at the latest
            assert trained_at - oldest <= (self.config.staleness.max_versions or 0)
            self.let_in()
        return batch is not None

    def acknowledge(self) -> None:
        flying = self.core.in_flight.delivered()
        if flying:
            self.trained += 1
            self.core.set_version(self.trained)  # first the version, then the acknowledgement
            self.core.acknowledge(flying[0].step)
            self.check()

    def check(self) -> None:
        verify(self.core)
        stats = self.core.statistics(0.0)
        assert stats.evicted["stale"] == 0
        assert stats.training_age is None or stats.training_age.max <= (self.config.staleness.max_versions or 0)
        assert self.throttle.running >= 0


@settings(suppress_health_check=list(HealthCheck))
@given(config=configs(), data=st.data())
def test_nothing_is_ever_too_old_and_it_never_gets_stuck(config: sb.BalancerConfig, data: st.DataObject) -> None:
    """Workers that always want to begin, finish in any order, sometimes give up: batches keep coming."""
    world = World(config)
    check_reserve(config, world.unit)
    for _ in range(15):
        before = world.trained
        while world.begin():
            pass
        while world.slots and data.draw(st.integers(0, 9)):
            index = data.draw(st.integers(0, len(world.slots) - 1))
            if data.draw(st.integers(0, 7)) == 0:
                world.abandon(index)
            else:
                world.finish(index, data.draw(st.integers(1, 64)))
            world.dispatch()
            # also while the trainer is not through with what has left
            world.begin()
            if data.draw(st.integers(0, 7)) == 0:
                world.acknowledge()
        while world.dispatch():
            pass
        while world.core.in_flight.delivered():
            world.acknowledge()
        if not world.slots:
            assert world.trained > before or not world.blocked
    assert world.core.statistics(0.0).evicted["stale"] == 0


@pytest.mark.parametrize(
    ("knobs", "count", "says"),
    [
        ({"deadline_s": 5.0}, 1, "with deadline_s.*Leave deadline_s out"),
        ({"max_bytes": 10**9}, 1, "with max_bytes"),
        ({"window": 16}, 1, "a window of 16 would never fill. Lower window to 12"),
        *(({}, count, "between 1 and 12 rollouts") for count in (0, -1, 13, 1.5, True, math.inf)),
    ],
)
def test_what_could_not_keep_the_bound_is_refused(knobs: dict[str, object], count: Any, says: str) -> None:
    config = sb.BalancerConfig(
        **{"dp_size": 2, "batch_size": 4, "window": 8, "staleness": {"max_versions": 2}, **knobs}
    )
    with pytest.raises(ValueError, match=says):
        check_reserve(config, count)
