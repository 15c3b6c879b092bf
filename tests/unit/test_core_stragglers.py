"""Groups that do not wait for their slowest siblings: when they are cut, and what becomes of what comes later."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import ConfigError
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.testing import make_rollout


def cutting(min_size: int = 2, patience: float = 2.0, **knobs: Any) -> BalancerCore:
    groups = sb.Groups(size=4, min_size=min_size, patience=patience)
    return BalancerCore(sb.BalancerConfig(**{"dp_size": 1, "batch_size": 4, "window": 4, "groups": groups} | knobs))


def sibling(name: str, tokens: int = 3, group_id: str = "g0") -> sb.Rollout:
    return make_rollout(tokens, name, group_id=group_id)


@pytest.mark.parametrize(
    ("arrivals", "patience", "cut_at"),
    [
        ([0.0, 5.0], 2.0, 10.0),
        ([0.0, 5.0, 5.0], 2.0, 10.0),
        ([0.0, 5.0, 9.0], 2.0, 14.0),  # not right after another one
        ([100.0, 105.0], 3.0, 115.0),
        ([0.0, 5.0], 0.0, 0.0),  # as soon as there are enough
        ([0.0], 2.0, math.inf),
        ([0.0, 1.0, 2.0, 3.0], 2.0, math.inf),
    ],
)
def test_the_others_may_take_so_many_times_as_long_as_half_of_the_group(
    arrivals: list[float], patience: float, cut_at: float
) -> None:
    core = cutting(patience=patience, window=8)
    for number, at in enumerate(arrivals):
        core.add(sibling(f"r{number}"), at)
    assert core.next_wakeup() == cut_at
    if cut_at < math.inf:
        before = max(cut_at - 0.5, 0.0)
        assert core.cut_stragglers(before) == (patience == 0.0)
        assert core.cut_stragglers(cut_at) == (patience != 0.0)
        assert core.next_wakeup() == math.inf
        stats = core.statistics(cut_at)
        assert (stats.short_groups, stats.cut_siblings) == (1, 4 - len(arrivals))
    verify(core)


def test_a_group_takes_as_long_as_since_it_was_expected() -> None:
    core = cutting(window=8)
    core.add_all([], 10.0, GroupSize("g0", 4))
    core.add_all([sibling("r0"), sibling("r1")], 40.0)
    assert core.next_wakeup() == 70.0


def test_a_group_of_another_size_is_cut_by_its_own_half() -> None:
    core = cutting(window=8, batch_size=8)
    core.add_all([], 0.0, GroupSize("few", 2))
    core.add(sibling("f0", group_id="few"), 1.0)
    core.add_all([], 0.0, GroupSize("three", 3))
    for number, at in enumerate([1.0, 2.0]):
        core.add(sibling(f"t{number}", group_id="three"), at)
    assert core.next_wakeup() == 4.0  # half of three are two
    assert core.cut_stragglers(4.0)
    core.add_all([], 0.0, GroupSize("many", 8))
    for number in range(4):
        core.add(sibling(f"m{number}", group_id="many"), 1.0 + number)
        assert core.next_wakeup() == (8.0 if number == 3 else math.inf)


@pytest.mark.parametrize("before", [{"min_size": None}, {"min_size": 3}, {"patience": 100.0}])
def test_other_knobs_hold_for_groups_that_have_begun(before: dict[str, Any]) -> None:
    core = cutting(window=8)
    wanted = core.config
    core.reconfigure(wanted.replace(groups=before))
    for at in (10.0, 15.0):
        core.add(sibling(f"r{at}"), at)
    core.reconfigure(wanted)
    assert core.next_wakeup() == 20.0


def test_a_size_that_is_declared_later_holds_for_the_time_too() -> None:
    core = cutting(min_size=4, window=8, groups={"size": 8, "min_size": 4}, batch_size=8)
    for at in (0.0, 10.0, 20.0):
        core.add(sibling(f"r{at}"), at)
    core.add_all([], 20.0, GroupSize("g0", 5))
    core.add(sibling("r3"), 30.0)
    assert core.next_wakeup() == 50.0
    core = cutting(window=8, batch_size=8)
    core.add_all([sibling("s0"), sibling("s1")], 5.0)
    core.add_all([], 6.0, GroupSize("g0", 8))
    assert core.next_wakeup() == math.inf
    assert not core.cut_stragglers(100.0)


def test_siblings_of_one_burst_are_not_cut() -> None:
    core = cutting(min_size=3, window=8)
    core.add_all([], 0.0, GroupSize("g0", 4))
    core.add_all([sibling("r0"), sibling("r1")], 10.0)
    core.add(sibling("r2"), 30.0)
    assert not core.cut_stragglers(30.0)
    core.add(sibling("r3"), 30.1)
    assert not sum(core.statistics(31.0).evicted.values())


def test_no_group_is_cut_while_a_batch_can_leave_without_it() -> None:
    core = cutting()
    core.add_all([sibling(f"h{number}", group_id="h") for number in range(4)], 0.0)
    core.add_all([sibling("r0"), sibling("r1")], 0.0)
    assert not core.cut_stragglers(9.0)
    assert polled(core, 9.0).num_rollouts == 4
    core.add(sibling("r2"), 9.5)
    assert core.cut_stragglers(9.5)


def test_time_begins_anew_in_a_balancer_that_was_started_again() -> None:
    core, other = cutting(window=8), cutting(window=8)
    core.add_all([], 0.0, GroupSize("g0", 4))
    core.add_all([], 0.0, GroupSize("g1", 4))
    for name, at in (("r0", 100.0), ("r1", 101.0)):
        core.add(sibling(name), at)
    other.restore(read_state_dict(state_dict(core.snapshot(103.0)))[0], 203.0)
    assert other.next_wakeup() == 203.0 + 2 * 3.0
    for name, at in (("s0", 210.0), ("s1", 211.0)):
        other.add(sibling(name, group_id="g1"), at)
    assert other.cut_stragglers(209.0)
    assert other.next_wakeup() == 212.0


def test_what_is_lost_of_a_group_that_was_cut_is_not_waited_for() -> None:
    core = cutting()
    core.add_all([sibling("r0"), sibling("r1")], 0.0)
    assert core.cut_stragglers(0.0)
    core.evict_lost(lambda one: one.rollout_id == "r0")
    core.triggers.force_flush()
    assert polled(core, 1.0).num_rollouts == 1
    verify(core)


def test_a_name_that_is_used_again_begins_anew() -> None:
    core = cutting()
    for name, group_id, at in (("h0", "h", 0.0), ("h1", "h", 99.0), ("a0", "g", 0.0), ("a1", "g", 100.0)):
        core.add(sibling(name, group_id=group_id), at)
    core.add_all([sibling("a2", group_id="g"), sibling("a3", group_id="g")], 110.0)
    core.acknowledge(polled(core, 110.0).step)
    core.add(sibling("b0", group_id="g"), 150.0)
    core.add(sibling("b1", group_id="g"), 190.0)
    assert core.cut_stragglers(199.0)
    assert core.next_wakeup() == 230.0


def test_what_comes_after_its_group_was_cut_is_evicted_and_its_length_is_counted() -> None:
    core = cutting()
    for at in (0.0, 1.0):
        core.add(sibling(f"r{at:.0f}", 100), at)
    assert core.cut_stragglers(2.0)
    core.add(sibling("in the window", 300), 2.5)
    core.triggers.force_flush()
    batch = polled(core, 3.0)
    assert {r.rollout_id for r in batch.rollouts} == {"r0", "r1"}
    assert (batch.ranks[0].global_num_rollouts, batch.incomplete_groups) == (2, ())
    core.acknowledge(batch.step)
    core.add_all([sibling("later", 400)], 9.0, GroupSize("g0", 4))
    stats = core.statistics(9.0)
    assert (stats.evicted["late"], stats.cut_siblings, stats.waiting, stats.acknowledged) == (2, 2, 0, 2)
    bias = stats.length_bias
    assert bias.num_cut == 2
    assert bias.cut_per_decile == (0.0,) * 9 + (2.0,)
    assert bias.length_shift == pytest.approx(100 / 225)
    verify(core)


@pytest.mark.parametrize("groups", [{"min_size": 1}, {"min_size": 4}, {"size": None}])
def test_a_least_size_that_says_nothing_is_refused(groups: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"groups\.min_size"):
        sb.BalancerConfig(dp_size=1, batch_size=4, groups={"size": 4, "min_size": 2} | groups)
