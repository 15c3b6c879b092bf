"""Staleness in the core: what is held back, what is due, and what counts as a step ahead."""

from __future__ import annotations

from typing import Any

from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.testing import make_rollout


def core_of(**knobs: Any) -> BalancerCore:
    core = BalancerCore(
        sb.BalancerConfig(
            **{"dp_size": 1, "batch_size": 2, "window": 2, "capacity": 8, "staleness": {"max_versions": 1}, **knobs}
        )
    )
    core.set_version(1)
    return core


def dispatch(core: BalancerCore) -> sb.Batch:
    batch = polled(core)
    verify(core)
    return batch


def put(core: BalancerCore, *versions: int, group_id: str | None = None) -> list[str]:
    rollouts = [make_rollout(3, version=version, group_id=group_id) for version in versions]
    core.add_all(rollouts, 0.0)
    verify(core)
    return [rollout.rollout_id for rollout in rollouts]


def test_only_those_too_old_for_the_step_ahead_are_held_back() -> None:
    core = core_of()
    put(core, 1, 1)
    first = dispatch(core)
    (old,) = put(core, 0)
    young = put(core, 1, 1)
    assert core.state.staleness.num_held_back == 1
    assert {r.rollout_id for r in dispatch(core).rollouts} == set(young), "with one step more they are too old: due"
    put(core, 2)
    assert core.poll(0.0) is None
    core.acknowledge(first.step)
    core.acknowledge(first.step + 1)
    assert old in {r.rollout_id for r in dispatch(core).rollouts}, "nothing is ahead of it any more"


def test_siblings_of_one_that_is_held_back_are_held_back() -> None:
    core = core_of(groups=sb.Groups(size=2))
    put(core, 1, 1, group_id="a")
    dispatch(core)
    put(core, 0, 2, group_id="b")
    assert core.state.triggers.sendable()[:2] == (0, 0)
    assert core.poll(0.0) is None
    young = put(core, 2, 2, group_id="c")
    assert {r.rollout_id for r in dispatch(core).rollouts} == set(young)


def test_a_step_given_back_is_ahead_again() -> None:
    core = core_of()
    put(core, 1, 1)
    batch = dispatch(core)
    core.finish_training(batch.step)
    assert core.state.in_flight.steps_ahead == 0
    core.nack(batch.step)
    verify(core)
    assert core.state.in_flight.steps_ahead == 1, "it will be trained on, and may make a version"


def test_a_group_that_is_turned_down_is_not_due_any_more() -> None:
    core = core_of(groups=sb.Groups(size=2), staleness=sb.Staleness(max_versions=0))
    put(core, 1, group_id="a")
    assert core.state.staleness.num_due == 1
    core.filter_out([make_rollout(3, version=1, group_id="a")], 0.0)
    verify(core)
    assert core.state.staleness.num_due == 0


def test_a_rollout_ages_until_its_training_begins() -> None:
    core = core_of(staleness=sb.Staleness(max_versions=3, on_stale="send"))
    put(core, 1, 1, 1, 0)
    dispatch(core)
    second = dispatch(core)
    age = core.statistics(0.0).training_age
    assert age is not None
    assert (age.rollouts, age.max) == (2, 0), "the second waits for the first"
    core.set_version(3)
    core.finish_training(0)
    age = core.statistics(0.0).training_age
    assert age is not None
    assert (age.rollouts, age.max) == (4, 3 - min(r.version for r in second.rollouts))  # type: ignore[type-var,operator]
    core.acknowledge(0)
    core.acknowledge(second.step)
    assert core.statistics(0.0).training_age == age
