"""The core, call by call: groups, knobs that change, staleness, its weight, and what observers are told."""

from __future__ import annotations

import gc
import inspect
import logging
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cores import saved
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import EVENTS, Observer
from stream_balancer.testing import make_rollout, make_rollouts


def grouped() -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, window=4, groups=sb.Groups(size=4)))


# -- groups of another size --------------------------------------------------------------------------------------------

CLOSE = GroupSize("g0", None)


def siblings(count: int, prefix: str = "r") -> list[sb.Rollout]:
    return [make_rollout(3 + n, f"{prefix}{n}", group_id="g0") for n in range(count)]


def test_sizes_that_cannot_be_are_refused_and_change_nothing() -> None:
    core = grouped()
    core.add_all(siblings(3), 0.0)
    for size, text in (
        (2, "3 of it have come already"),
        (0, "from 1 to batch_size"),
        (5, "from 1 to batch_size"),
        (True, "from 1 to batch_size"),
    ):
        with pytest.raises(ValueError, match=text):
            core.add_all([], 0.0, GroupSize("g0", size))
    core.add_all([], 0.0, GroupSize("g0", 4))
    with pytest.raises(ValueError, match="declared to have 4 before"):
        core.add_all([], 0.0, GroupSize("g0", 3))
    with pytest.raises(sb.errors.RolloutError, match="takes 1 more executions, not 2: 3 have come"):
        core.add_all(siblings(2, "s"), 0.0)
    core.add_all([], 0.0, CLOSE)
    with pytest.raises(ValueError, match="declared to have 3 before"):
        core.add_all([], 0.0, GroupSize("g0", 4))
    with pytest.raises(ValueError, match="group_id"):
        core.add_all([], 0.0, GroupSize(7, 4))  # type: ignore[arg-type]
    free = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4))
    with pytest.raises(ValueError, match="keeps no groups"):
        free.add_all([], 0.0, CLOSE)
    free.add_all(siblings(2), 0.0, CLOSE)  # who puts need not know
    assert free.statistics(0.0).waiting == 2


def test_a_sibling_lost_in_flight_may_come_again_by_itself() -> None:
    core = grouped()
    core.add_all(siblings(4), 0.0)
    batch = polled(core)
    core.mark_missing(batch.step, ["r1"])
    core.acknowledge(batch.step)
    core.add(make_rollout(4, "r1", group_id="g0"), 0.0)  # its siblings have been trained on
    core.triggers.force_flush()
    again = polled(core)
    assert (again.num_rollouts, again.incomplete_groups) == (1, ())
    verify(core)


def test_the_loss_of_a_group_that_was_done_takes_nothing_from_the_next_of_its_name() -> None:
    core = grouped()
    core.add_all(siblings(4), 0.0)
    batch = polled(core)
    core.add(make_rollout(5, "next", group_id="g0"), 0.0)
    core.mark_missing(batch.step, {"r0", "r1"})
    core.acknowledge(batch.step)
    assert core.buffer.groups.incomplete() == {"g0": 1}
    verify(core)


# -- a step in flight, planned again -----------------------------------------------------------------------------------


def names_of(batch: sb.Batch) -> list[str]:
    return sorted(r.rollout_id for r in batch.rollouts if not r.is_padding)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5])
def test_a_step_planned_again_has_what_is_left_on_so_many_ranks(dp_size: int) -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=6, window=6))
    core.add_all(list(make_rollouts([3, 4, 5, 6, 7, 8])), 0.0)
    before = polled(core)
    core.mark_missing(before.step, ["r1", "r4", "never put"])
    after = core.replan(before.step, dp_size)
    assert (after.step, after.reason, len(after.ranks)) == (before.step, before.reason, dp_size)
    assert names_of(after) == ["r0", "r2", "r3", "r5"]
    assert {share.denominators for share in after.ranks} == {(4, 3 + 5 + 6 + 8, 2 + 4 + 5 + 7, 4)}
    assert [(share.rank, share.dp_size) for share in after.ranks] == [(rank, dp_size) for rank in range(dp_size)]
    assert all(share.micro_batches for share in after.ranks)
    assert core.in_flight.delivered() == (after,)
    assert core.config.dp_size == 2, "of the next plan"
    more = core.replan(before.step, 2)
    assert names_of(more) == names_of(after), "what is missing stays missing"
    assert core.statistics(0.0).accepted == 6


def test_what_a_step_was_planned_without_is_lost_at_its_acknowledgement_and_may_come_again() -> None:
    core, recording = observed(batch_size=4, window=4)
    core.add_all([event(name) for name in "abcd"], 0.0)
    batch = polled(core)
    core.mark_missing(batch.step, ["b"])
    core.replan(batch.step, 3)
    core.mark_missing(batch.step, ["d"])
    again = core.replan(batch.step, 1)
    with pytest.raises(sb.errors.DuplicateRolloutError, match="already held"):
        core.add(event("b"), 0.0)
    assert core.statistics(0.0).evicted["lost"] == 0
    recording.taken()
    assert core.acknowledge(batch.step) is again
    assert recording.taken() == [("acknowledged", 0), ("evicted", "b", "lost"), ("evicted", "d", "lost")]
    counts = core.statistics(0.0)
    assert (counts.acknowledged, counts.evicted["lost"], counts.in_flight) == (2, 2, 0)
    core.add_all([event("b"), event("d")], 0.0)
    with pytest.raises(sb.errors.DuplicateRolloutError, match="is done"):
        core.add(event("a"), 0.0)
    core.end()
    assert names_of(polled(core)) == ["b", "d"]
    verify(core)


def test_a_step_planned_again_is_given_again_as_it_was_planned_last() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=4, window=4))
    core.add_all(list(make_rollouts([3, 4, 5, 6])), 0.0)
    step = polled(core).step
    core.mark_missing(step, ["r0"])
    last = core.replan(step, 2)
    core.nack(step)
    assert polled(core) is last
    core.nack(step)
    core.reconfigure(core.config.replace(dp_size=1))
    other = polled(core)
    assert (len(other.ranks), names_of(other)) == (1, ["r1", "r2", "r3"])
    verify(core)


def test_what_a_step_was_planned_without_is_in_flight_also_after_a_restart() -> None:
    core = grouped()
    core.add_all(siblings(4), 0.0)
    step = polled(core).step
    core.mark_missing(step, ["r1"])
    core.replan(step, 1)
    restored = grouped()
    restored.restore(saved(core), 0.0)
    verify(restored)
    before, after = core.statistics(0.0), restored.statistics(0.0)
    assert (after.accepted, after.waiting, after.in_flight) == (before.accepted, before.waiting, 4)
    assert names_of(polled(restored)) == ["r0", "r2", "r3"]
    restored.acknowledge(step)
    assert restored.statistics(0.0).evicted["lost"] == 1
    restored.add(make_rollout(4, "r1", group_id="g0"), 0.0)
    assert not restored.buffer.groups.incomplete(), "its siblings have been trained on"
    verify(restored)


def test_times_of_the_plan_before_are_not_those_of_the_new_one() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=4, window=4))
    timed: list[list[int]] = []

    class Timed(Observer):
        def timed(self, batch: sb.Batch, timings: Any, now: float) -> None:
            timed.append([one.rank for one in timings])

    core.observers.append(Timed())
    core.add_all(list(make_rollouts([3, 4, 5, 6])), 0.0)
    step = polled(core).step
    core.record_step(StepTiming(step, 1, 1.0), 0.0)
    core.replan(step, 2)
    core.record_step(StepTiming(step, 0, 1.0), 0.0)
    assert timed == []
    core.record_step(StepTiming(step, 1, 1.0), 0.0)
    assert timed == [[0, 1]]


def test_only_a_step_in_flight_is_planned_again() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2, window=2))
    with pytest.raises(ValueError, match="step 0 is not in flight"):
        core.replan(0, 1)
    core.add_all(list(make_rollouts([3, 4])), 0.0)
    core.acknowledge(polled(core).step)
    with pytest.raises(ValueError, match="step 0 is not in flight"):
        core.replan(0, 1)
    verify(core)


def reconfigurable(**knobs: Any) -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(**{"dp_size": 1, "batch_size": 2, "window": 4, **knobs}))


def test_a_rollout_above_the_cap_is_refused_and_a_cap_below_a_waiting_one_too() -> None:
    config = sb.BalancerConfig(dp_size=4, batch_size=4, micro_batches=sb.MicroBatches(max_tokens=51), sync="step")
    core = BalancerCore(config)
    core.add(make_rollout(51), 0.0)
    with pytest.raises(sb.errors.RolloutError, match=r"52 tokens, above .*tokens \(51\)\. Raise"):
        core.add(make_rollout(52), 0.0)
    with pytest.raises(sb.errors.ConfigError, match=r"\(50\) with micro_batches.oversize='refuse' is below rollout"):
        core.reconfigure(config.replace(micro_batches={"max_tokens": 50}))


def test_a_full_buffer_has_no_room_once_a_batch_could_leave() -> None:
    knobs = {"dp_size": 2, "batch_size": 4, "window": 4, "capacity": 4, "min_batch_size": 4}
    core = BalancerCore(sb.BalancerConfig(**knobs, cost=sb.cost.QuadraticCost()))
    core.add_all(list(make_rollouts([3, 4, 5, 6])), 0.0)
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(7), 0.0)


@pytest.mark.parametrize(
    "before", [{"micro_batches": {"max_tokens": 100}, "sync": "step"}, {}, {"micro_batches": {"oversize": "alone"}}]
)
def test_a_token_cap_below_a_waiting_rollout_is_refused(before: dict[str, Any]) -> None:
    core = reconfigurable(**before)
    core.add_all(list(make_rollouts([3, 70, 5, 6])), 0.0)
    config = core.config.replace(sync="step")
    core.reconfigure(config)
    with pytest.raises(
        sb.errors.ConfigError,
        match=r"\(50\).*has 70 tokens.*cap >= 70 until it has left, or set micro_batches.oversize=",
    ):
        core.reconfigure(config.replace(micro_batches={"max_tokens": 50, "oversize": "refuse"}))
    assert core.config is config
    core.reconfigure(config.replace(micro_batches={"max_tokens": 70, "oversize": "refuse"}))
    core.reconfigure(config.replace(micro_batches={"max_tokens": 50, "oversize": "alone"}))
    with pytest.raises(sb.errors.ConfigError, match="has 70 tokens"):  # what waits is oversize already
        core.reconfigure(core.config.replace(micro_batches={"oversize": "refuse"}))
    while (batch := core.poll(0.0)) is not None:
        core.acknowledge(batch.step)
    core.end()
    assert core.poll(0.0) is not None


def test_a_knob_changed_between_the_halves_of_a_group_does_not_forget_the_first() -> None:
    """Half of a group left at its deadline; the buffer is empty when a knob changes."""
    core = reconfigurable(groups=sb.Groups(size=2), deadline_s=1.0)
    core.add(make_rollout(5, group_id="g"), 0.0)
    assert core.poll(1.0) is not None
    core.reconfigure(core.config.replace(deadline_s=50.0))
    core.add(make_rollout(6, group_id="g"), 1.0)
    core.triggers.force_flush()
    batch = polled(core, 1.0)
    assert batch.num_rollouts == 1


def test_a_grouped_balancer_refuses_a_rollout_without_a_group() -> None:
    core = reconfigurable(batch_size=8, window=8, groups=sb.Groups(size=8))
    with pytest.raises(
        sb.errors.RolloutError, match=r"groups.size=8, but rollout 'r' has no group_id.*the same group_id, or"
    ):
        core.add(make_rollout(5, "r"), 0.0)
    assert core.statistics(0.0).accepted == 0


def test_a_rank_without_a_rollout_runs_as_many_micro_batches_as_a_multiple_asks_for() -> None:
    core = reconfigurable(dp_size=2, batch_size=4, micro_batches={"multiple_of": 2, "equal_number": False})
    core.add(make_rollout(3), 0.0)
    core.end()
    assert [len(one.micro_batches) for one in polled(core).ranks] == [2, 2]


@pytest.mark.parametrize("max_skips", [None, 10**8, 10**30])
def test_no_bound_costs_nothing_and_plans_alike(max_skips: int | None) -> None:
    """Work and memory follow what waits: 10^8 allocated 750 MB at every step."""
    first, core = (reconfigurable(dp_size=2, batch_size=4, window=12, max_skips=max_skips) for _ in range(2))
    assert core.config.max_skips == max_skips
    for one in (first, core):
        one.add_all(list(make_rollouts([3, 4, 500, 4, 3, 4, 5, 3, 4, 3, 3, 4], minimal=True)), 0.0)
    polled(first)  # what it imports does not count
    tracemalloc.start()
    batch = core.poll(0.0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch is not None
    assert peak_bytes < 10**6
    assert 500 not in [r.num_tokens for r in batch.rollouts]  # an outlier may wait
    core.end()
    while core.poll(0.0) is not None:
        pass
    verify(core)


def versioned(**knobs: Any) -> BalancerCore:
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


def put_versions(core: BalancerCore, *versions: int, group_id: str | None = None) -> list[str]:
    rollouts = [make_rollout(3, version=version, group_id=group_id) for version in versions]
    core.add_all(rollouts, 0.0)
    verify(core)
    return [rollout.rollout_id for rollout in rollouts]


def test_a_rollout_ages_until_its_training_begins() -> None:
    core = versioned(staleness=sb.Staleness(max_versions=3, on_stale="send"))
    put_versions(core, 1, 1, 1, 0)
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


def test_a_step_given_back_is_ahead_again() -> None:
    """It will be trained on, and may make a version."""
    core = versioned()
    put_versions(core, 1, 1)
    batch = dispatch(core)
    core.finish_training(batch.step)
    put_versions(core, 0, 0)
    core.nack(batch.step)
    assert dispatch(core).step == batch.step
    assert core.poll(0.0) is None


def test_what_is_to_come_again_is_not_trained_on_before_it_does() -> None:
    core = versioned(staleness=sb.Staleness(max_versions=5, on_stale="send"))
    put_versions(core, 1, 1, 1, 1)
    first, second = dispatch(core), dispatch(core)
    core.nack(first.step)
    core.acknowledge(second.step)
    core.set_version(4)
    assert dispatch(core).step == first.step
    age = core.statistics(0.0).training_age
    assert age is not None
    assert age.max == 3


def test_a_sibling_that_is_too_old_when_it_comes_has_come() -> None:
    core = versioned(groups=sb.Groups(size=2))
    core.set_version(3)
    put_versions(core, 0, group_id="g")
    young = put_versions(core, 3, group_id="g")
    core.triggers.force_flush()
    assert [r.rollout_id for r in dispatch(core).rollouts] == young


MANY = torch.zeros(64, dtype=torch.int64)


def named(length: int, name: str) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": MANY[:length]}, rollout_id=name)


def dispatch_all(num_rollouts: int) -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=4, batch_size=16, cost=sb.cost.QuadraticCost()))
    for number in range(num_rollouts):
        core.add(named(1 + number % 60, str(number)), float(number))
        batch = core.poll(float(number))
        if batch is not None:
            core.acknowledge(batch.step)


def num_alive() -> int:
    return sum(
        type(one) in (sb.Rollout, sb.Batch, sb.rollouts.RankBatch, sb.rollouts.MicroBatch) for one in gc.get_objects()
    )


def test_nothing_waits_for_pythons_cycle_collector() -> None:
    dispatch_all(64)  # first-time costs
    gc.collect()
    gc.disable()
    try:
        before = num_alive()
        dispatch_all(400)
        assert num_alive() == before
    finally:
        gc.enable()


def test_book_keeping_is_small_and_linear() -> None:
    rollouts = [named(1 + number % 60, str(number)) for number in range(8192)]
    core = BalancerCore(sb.BalancerConfig(dp_size=4, batch_size=16, window=16384))
    tracemalloc.start()
    sizes = []
    for number, one in enumerate(rollouts):
        core.add(one, float(number))
        if number + 1 in (1024, 8192):
            sizes.append(tracemalloc.get_traced_memory()[0] / (number + 1))
    tracemalloc.stop()
    assert max(sizes) < 256  # bytes for each waiting rollout; its columns alone are 72


TOKENS = torch.zeros(64, dtype=torch.int64)


def event(name: str, length: int = 3, *, group: str | None = None, version: int | None = None) -> sb.Rollout:
    return sb.Rollout(tokens={"input_ids": TOKENS[:length]}, rollout_id=name, group_id=group, version=version)


_SHOWN: dict[str, Callable[..., tuple[Any, ...]]] = {
    "accepted": lambda rollouts, now: ([r.rollout_id for r in rollouts], now),
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

        accepted = dispatched = acknowledged = evicted = version_set = _fail

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
    kinds = ["version_set", "accepted", "dispatched", "acknowledged", "accepted", "version_set", "evicted"]
    assert [event[0] for event in recording.taken()] == kinds
    assert [r.getMessage().rsplit(" ", 1)[1].strip("'") for r in caplog.records] == kinds


# -- groups that no step can take --------------------------------------------------------------------------------------


def of_executions(number: int, group: str = "g", each: int = 3) -> list[sb.Rollout]:
    """``number`` rollouts of a group, ``each`` in one execution."""
    return [
        sb.Rollout(
            tokens={"input_ids": torch.arange(4)},
            rollout_id=f"{group}{n}",
            group_id=group,
            execution_id=f"{group}/{n // each}",
        )
        for n in range(number)
    ]


def test_a_group_larger_than_a_step_is_refused_and_nothing_is_lost() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, policy="fifo", groups=sb.Groups(size=2)))
    first, second = of_executions(6)[:3], of_executions(6)[3:]
    core.add_all(first, 0.0)
    with pytest.raises(sb.errors.RolloutError, match=r"group 'g' would have 6 waiting rollouts, more than batch_size"):
        core.add_all(second, 0.0)
    core.reconfigure(core.config.replace(batch_size=6))
    core.add_all(second, 0.0)
    with pytest.raises(sb.errors.ConfigError, match=r"batch_size \(4\) is below group 'g', which waits and has 6"):
        core.reconfigure(core.config.replace(batch_size=4))
    small = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=4, policy="fifo", groups=sb.Groups(size=2)))
    with pytest.raises(sb.errors.RolloutError, match=r"group 'g' waits and has 6 .* Load with batch_size >= 6"):
        small.restore(core.snapshot(0.0), 0.0)
    assert small.statistics(0.0).accepted == 0
    batch = core.poll(0.0)
    assert batch is not None
    assert batch.num_rollouts == 6
