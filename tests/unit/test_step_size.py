"""How many rollouts a step takes: ``step_size.rollouts`` round a mean, ``step_size.tokens``. Time is an argument."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cores import saved
from helpers import config, polled
from hypothesis import given
from hypothesis import strategies as st
from test_planning_selection import Stream, waiting

import stream_balancer as sb
from stream_balancer.config.figures import most_waiting_tokens
from stream_balancer.core.diagnosis import why_no_batch
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning import PlanKnobs, plan_batch, smallest_max_skips
from stream_balancer.planning.step_size import surplus_after
from stream_balancer.testing import make_rollout, make_rollouts

tails = st.sampled_from([0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 40.0, 200.0])


@given(st.data())
def test_the_mean_is_held_the_range_is_kept_and_nobody_waits_too_long(data: st.DataObject) -> None:
    """Full steps, arrivals in bursts up to the capacity that the theorem allows."""
    ranks = data.draw(st.integers(1, 3), "ranks")
    group_size = data.draw(st.sampled_from([1, 2, 3]), "group_size")
    counts = data.draw(st.sampled_from(["free", "equal"]), "counts")
    groups = data.draw(st.sampled_from(["same_batch", "same_rank"]), "groups") if group_size > 1 else "free"
    unit = group_size * ranks  # a multiple of what every combination of these asks for
    least, mean, most = (unit * n for n in sorted(data.draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))))
    if least == most:
        most += unit
    capacity = most + data.draw(st.integers(0, 8), "capacity") * group_size
    max_skips = smallest_max_skips(mean, mean, capacity, group_size, least)
    knobs = PlanKnobs(
        dp_size=ranks,
        batch_size=mean,
        batch_size_range=(least, most),
        max_skips=max_skips,
        counts=counts,
        groups=groups,
        group_size=group_size,
    )
    stream, sent, surplus, steps = Stream(), 0, 0, 0
    for step in range(data.draw(st.integers(1, 12), "steps")):
        room = (capacity - stream.costs.size) // group_size
        arrivals = data.draw(st.lists(st.lists(tails, min_size=group_size, max_size=group_size), max_size=room))
        for siblings in arrivals:
            stream.come(siblings, grouped=True)
        if stream.costs.size < mean:
            continue
        plan = plan_batch(stream.columns, knobs, num_rollouts=stream.costs.size, step=step, surplus=surplus)
        chosen = np.concatenate([one for share in plan.ranks for one in share])
        assert least <= chosen.size <= most
        assert chosen.size % knobs.step_multiple == 0
        if counts == "equal":
            assert len({sum(one.size for one in share) for share in plan.ranks}) == 1
        surplus = surplus_after(knobs, surplus, chosen.size)
        sent, steps = sent + chosen.size, steps + 1
        assert 0 <= sent - steps * mean == surplus <= most - mean
        stream.go(chosen, max_skips)


KNOBS = PlanKnobs(dp_size=4, batch_size=16, batch_size_range=(8, 32), max_skips=8)
OUTLIER = [1_000.0] + [100.0] * 40


def sizes(surplus: int, steps: int, costs: list[float], knobs: PlanKnobs = KNOBS) -> list[int]:
    """Rollouts of so many steps from the same window."""
    found = []
    for _ in range(steps):
        columns = waiting(costs, due=np.array(costs) > 500)
        plan = plan_batch(columns, knobs, num_rollouts=len(costs), step=0, surplus=surplus)
        found.append(sum(one.size for share in plan.ranks for one in share))
        surplus = surplus_after(knobs, surplus, found[-1])
    return found


def test_an_outliers_step_takes_more_and_later_ones_give_it_back() -> None:
    assert sizes(0, 1, OUTLIER) == [32]  # 1,000 on one rank: the three others have work with ten each
    given_back = sizes(16, 12, np.linspace(50.0, 150.0, 40).tolist())
    assert given_back == [12, 13, 13, 14, 15, 15, 15, 15, 16, 16, 16, 16]
    assert sum(16 - size for size in given_back) == 16


# -- in a balancer -----------------------------------------------------------------------------------------------------


def filled(core: BalancerCore, lengths: list[int], now: float = 0.0) -> None:
    first = core.counts.accepted
    for number, length in enumerate(lengths):
        ids = {"input_ids": np.zeros(length, dtype=np.int64)}
        core.add(sb.Rollout(tokens=ids, rollout_id=f"{first + number}"), now)


def varied(**knobs: Any) -> BalancerCore:
    return BalancerCore(config(**{"batch_size": 8, "step_size": {"rollouts": (4, 16)}, "window": 16, **knobs}))


def size_of(core: BalancerCore, now: float = 0.0) -> int:
    batch = polled(core, now)
    assert batch.ranks[0].global_num_rollouts == batch.num_rollouts  # what a loss divides by
    return batch.num_rollouts


def surplus_of(core: BalancerCore) -> int:
    return core.statistics(0.0).surplus_rollouts


def after_an_outlier(**knobs: Any) -> BalancerCore:
    """A balancer whose last step took eight more than it should on average."""
    core = varied(deadline_s=10.0, **knobs)
    filled(core, [150] + [10] * 15)
    assert size_of(core, now=10.0) == 16  # all are past the deadline
    assert surplus_of(core) == 8
    return core


def test_a_checkpoint_holds_what_is_to_be_given_back() -> None:
    core = after_an_outlier()
    fresh = varied(deadline_s=10.0)
    fresh.restore(saved(core, 0.0), 0.0)
    polled(fresh)
    assert surplus_of(fresh) == 8  # what is delivered again was counted before
    for one in (core, fresh):
        filled(one, [10] * 16)
        assert size_of(one) == 6


def test_a_short_step_gives_back_too_and_is_not_made_up_for() -> None:
    core = after_an_outlier(min_batch_size=2)
    filled(core, [10] * 3, now=10.0)
    assert size_of(core, now=20.0) == 3
    assert surplus_of(core) == 3
    for _ in range(2):
        filled(core, [10] * 2, now=20.0)
        assert size_of(core, now=30.0) == 2
    assert surplus_of(core) == 0
    filled(core, [10] * 16)
    assert size_of(core) == 8


def budgeted(lengths: list[int] | None = None, *, siblings: int | None = None, **knobs: Any) -> BalancerCore:
    core = BalancerCore(sb.BalancerConfig(**{"dp_size": 2, "step_size": {"tokens": 100}, **knobs}))
    for rollout in make_rollouts(lengths or [], siblings=siblings):
        core.add(rollout, 0.0)
    return core


def test_a_step_leaves_once_the_window_holds_its_tokens() -> None:
    core = budgeted([40] * 4)
    assert core.next_wakeup() == math.inf
    assert core.poll(0.0) is None
    assert "160 tokens wait (window 200)" in why_no_batch(core, core.statistics(0.0))
    core.add(make_rollout(40), 0.0)
    assert core.next_wakeup() == -math.inf
    batch = polled(core)
    assert (batch.reason, batch.num_rollouts, batch.num_tokens) == ("window", 2, 80)
    assert (batch.ranks[0].global_num_tokens, batch.ranks[0].global_num_rollouts) == (80, 2)
    assert core.poll(0.0) is None
    core.add(make_rollout(90), 0.0)  # 210 tokens; 40, 40 and 40 are nearer to 100 than 40 and 90
    assert polled(core).num_tokens in (80, 120)


def test_a_window_in_rollouts_takes_as_many_as_the_budget_wants() -> None:
    core = budgeted([10] * 31, window=32)
    assert core.poll(0.0) is None
    core.add(make_rollout(10), 0.0)
    assert polled(core).num_rollouts == 10
    core = budgeted([1] * 32, window=32)
    assert polled(core).num_rollouts == 32, "the whole window has fewer tokens than the budget"


def test_whole_groups_go_and_incomplete_ones_do_not_count() -> None:
    core = budgeted(
        [25] * 8, siblings=4, groups=sb.Groups(size=4), step_size=sb.StepSize(tokens=100, window_tokens=150)
    )
    batch = polled(core)
    assert (batch.num_rollouts, batch.num_tokens, batch.incomplete_groups) == (4, 100, ())
    core.add_all(list(make_rollouts([40, 40], prefix="a", siblings=4)), 1.0)  # half a group: g0 is done, these are new
    assert core.buffer.num_tokens == 180
    assert core.poll(1.0) is None, "100 of these tokens are ready"
    core.add_all(list(make_rollouts([10, 10], prefix="b", siblings=4)), 1.0)
    assert polled(core, 1.0).num_rollouts == 4


def test_a_deadline_sends_less_and_the_drain_the_rest() -> None:
    core = budgeted([10] * 5, deadline_s=5.0)
    assert core.next_wakeup() == 5.0
    batch = polled(core, 5.0)
    assert (batch.reason, batch.num_tokens) == ("deadline", 50)
    core = budgeted([10] * 25 + [10] * 8, step_size=sb.StepSize(tokens=100, window_tokens=400))
    core.end()
    assert [polled(core).num_tokens for _ in range(4)] == [100, 100, 100, 30]
    assert core.finished


def test_puts_wait_once_the_tokens_are_there_and_the_window_is_full_then() -> None:
    core = budgeted([40] * 5, limits=sb.Limits(tokens=200))
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1), 0.0)
    assert polled(core).reason == "window"
    core.add(make_rollout(1), 0.0)
    core = budgeted([10] * 9, window=20, limits=sb.Limits(tokens=100))
    core.add(make_rollout(300), 0.0)  # 90 wait: the last put may pass the limit
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1), 0.0)
    assert polled(core).num_rollouts >= 2, "20 rollouts will never wait"


def test_too_old_rollouts_are_not_counted_before_they_may_leave() -> None:
    core = budgeted(staleness=sb.Staleness(max_versions=0), step_size=sb.StepSize(tokens=100, window_tokens=100))
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
    core = budgeted(groups=sb.Groups(size=2), step_size=sb.StepSize(tokens=100, window_tokens=100), max_skips=8)
    assert (core.config.limits.tokens, most_waiting_tokens(core.config)) == (200, 800)
    core.add_all([make_rollout(50, f"a{n}", group_id="a") for n in (0, 1)], 0.0)
    for number in range(10):
        core.add(make_rollout(70, f"open{number}", group_id=f"open{number}"), 0.0)
    with pytest.raises(sb.errors.WouldBlock):
        core.add(make_rollout(1, "one more", group_id="more"), 0.0)
    core.add(make_rollout(70, "sibling", group_id="open0"), 0.0)  # its place was kept


def test_knobs_may_change_from_rollouts_to_tokens_and_back() -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=1, batch_size=2, window=4))
    for rollout in make_rollouts([60, 60, 60]):
        core.add(rollout, 0.0)
    assert core.poll(0.0) is None
    core.reconfigure(core.config.replace(batch_size=None, window=None, step_size={"tokens": 60, "window_tokens": 120}))
    assert polled(core).num_rollouts == 1
    core.reconfigure(sb.BalancerConfig(dp_size=1, batch_size=2, window=2))
    assert polled(core).num_rollouts == 2
