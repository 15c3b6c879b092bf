"""``step_size.tokens``: when a step leaves, how much it takes, and when puts wait. Time is an argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import polled

import stream_balancer as sb
from stream_balancer.config.figures import most_waiting_tokens
from stream_balancer.core.diagnosis import why_no_batch
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.throttle import check_reserve
from stream_balancer.testing import make_rollout, make_rollouts


def core_of(lengths: list[int] | None = None, *, siblings: int | None = None, **knobs: Any) -> BalancerCore:
    core = BalancerCore(sb.BalancerConfig(**{"dp_size": 2, "step_size": {"tokens": 100}, **knobs}))
    for rollout in make_rollouts(lengths or [], siblings=siblings):
        core.add(rollout, 0.0)
    return core


def test_a_step_leaves_once_the_window_holds_its_tokens() -> None:
    core = core_of([40] * 4)
    assert core.next_wakeup() == math.inf
    assert core.poll(0.0) is None
    assert "160 tokens wait (window 200)" in why_no_batch(core.state, core.statistics(0.0))
    core.add(make_rollout(40), 0.0)
    assert core.next_wakeup() == -math.inf
    batch = polled(core)
    assert (batch.reason, batch.num_rollouts, batch.num_tokens) == ("window", 2, 80)
    assert (batch.ranks[0].global_num_tokens, batch.ranks[0].global_num_rollouts) == (80, 2)
    assert core.poll(0.0) is None
    core.add(make_rollout(90), 0.0)  # 210 tokens; 40, 40 and 40 are nearer to 100 than 40 and 90
    assert polled(core).num_tokens in (80, 120)


def test_a_window_in_rollouts_takes_as_many_as_the_budget_wants() -> None:
    core = core_of([10] * 31, window=32)
    assert core.poll(0.0) is None
    core.add(make_rollout(10), 0.0)
    assert polled(core).num_rollouts == 10
    core = core_of([1] * 32, window=32)
    assert polled(core).num_rollouts == 32, "the whole window has fewer tokens than the budget"


def test_whole_groups_go_and_incomplete_ones_do_not_count() -> None:
    core = core_of([25] * 8, siblings=4, groups=sb.Groups(size=4), step_size=sb.StepSize(tokens=100, window_tokens=150))
    batch = polled(core)
    assert (batch.num_rollouts, batch.num_tokens, batch.incomplete_groups) == (4, 100, ())
    core.add_all(list(make_rollouts([40, 40], prefix="a", siblings=4)), 1.0)  # half a group: g0 is done, these are new
    assert core.state.buffer.num_tokens == 180
    assert core.poll(1.0) is None, "100 of these tokens are ready"
    core.add_all(list(make_rollouts([10, 10], prefix="b", siblings=4)), 1.0)
    assert polled(core, 1.0).num_rollouts == 4


def test_a_deadline_sends_less_and_the_drain_the_rest() -> None:
    core = core_of([10] * 5, deadline_s=5.0)
    assert core.next_wakeup() == 5.0
    batch = polled(core, 5.0)
    assert (batch.reason, batch.num_tokens) == ("deadline", 50)
    core = core_of([10] * 25 + [10] * 8, step_size=sb.StepSize(tokens=100, window_tokens=400))
    core.end()
    assert [polled(core).num_tokens for _ in range(4)] == [100, 100, 100, 30]
    assert core.finished


def test_puts_wait_once_the_tokens_are_there_and_the_window_is_full_then() -> None:
    core = core_of([40] * 5, limits=sb.Limits(tokens=200))
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1), 0.0)
    assert polled(core).reason == "window"
    core.add(make_rollout(1), 0.0)
    core = core_of([10] * 9, window=20, limits=sb.Limits(tokens=100))
    core.add(make_rollout(300), 0.0)  # 90 wait: the last put may pass the limit
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1), 0.0)
    assert polled(core).num_rollouts >= 2, "20 rollouts will never wait"


def test_too_old_rollouts_are_not_counted_before_they_may_leave() -> None:
    core = core_of(staleness=sb.Staleness(max_versions=0), step_size=sb.StepSize(tokens=100, window_tokens=100))
    core.set_version(0)
    for number in range(4):
        core.add(make_rollout(50, f"{number}", version=0), 0.0)
    first = polled(core)
    assert first.num_tokens == 100
    assert core.poll(0.0) is None, "the rest may be too old once the first step has made a version"
    assert core.next_wakeup() == math.inf
    for _ in range(2):
        core.add(make_rollout(10, version=1), 0.0)
    assert core.poll(0.0) is None, "those that may leave have 20 tokens"
    core.acknowledge(first.step)
    assert polled(core).num_tokens == 100


def test_no_more_tokens_wait_than_max_skips_is_a_guarantee_for() -> None:
    """Though they wait for siblings: these may come all at once."""
    core = core_of(groups=sb.Groups(size=2), step_size=sb.StepSize(tokens=100, window_tokens=100), max_skips=8)
    assert (core.config.limits.tokens, most_waiting_tokens(core.config)) == (200, 800)
    core.add_all([make_rollout(50, f"a{n}", group_id="a") for n in (0, 1)], 0.0)
    for number in range(10):
        core.add(make_rollout(70, f"open{number}", group_id=f"open{number}"), 0.0)
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1, "one more", group_id="more"), 0.0)
    core.add(make_rollout(70, "sibling", group_id="open0"), 0.0)  # its place was kept


def test_knobs_may_change_from_rollouts_to_tokens_and_back() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2))
    for rollout in make_rollouts([60, 60, 60]):
        core.add(rollout, 0.0)
    assert core.poll(0.0) is None
    core.reconfigure(core.config.replace(batch_size=None, step_size={"tokens": 60, "window_tokens": 120}))
    assert polled(core).num_rollouts == 1
    core.reconfigure(sb.BalancerConfig(dp_size=1, batch_size=2, window=2))
    assert polled(core).num_rollouts == 2


def test_places_cannot_be_reserved() -> None:
    with pytest.raises(sb.errors.ConfigError, match=r"not known in rollouts under step_size\.tokens"):
        check_reserve(sb.BalancerConfig(dp_size=1, step_size=sb.StepSize(tokens=100)), 1)
