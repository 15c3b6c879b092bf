"""How many rollouts a step takes, where that varies round a mean (`step_size.rollouts`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from cores import saved
from helpers import config, polled
from hypothesis import given
from hypothesis import strategies as st
from test_planning_selection import Stream, waiting

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning import PlanKnobs, choose_batch, plan_batch, smallest_max_skips
from stream_balancer.planning.step_size import surplus_after

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
        num_ranks=ranks,
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


KNOBS = PlanKnobs(num_ranks=4, batch_size=16, batch_size_range=(8, 32), max_skips=8)
OUTLIER = [1_000.0] + [100.0] * 40


def sizes(surplus: int, steps: int, costs: list[float], knobs: PlanKnobs = KNOBS) -> list[int]:
    """Rollouts of so many steps from the same window."""
    found = []
    for _ in range(steps):
        go = choose_batch(waiting(costs, due=np.array(costs) > 500), knobs, num_rollouts=len(costs), surplus=surplus)
        found.append(int(go.sum()))
        surplus = surplus_after(knobs, surplus, found[-1])
    return found


def test_an_outliers_step_takes_more_and_later_ones_give_it_back() -> None:
    assert sizes(0, 1, OUTLIER) == [32]  # 1,000 on one rank: the three others have work with ten each
    given_back = sizes(16, 12, np.linspace(50.0, 150.0, 40).tolist())
    assert given_back == [12, 13, 13, 14, 15, 15, 15, 15, 16, 16, 16, 16]
    assert sum(16 - size for size in given_back) == 16


# -- in a balancer -----------------------------------------------------------------------------------------------------


def filled(core: BalancerCore, lengths: list[int], now: float = 0.0) -> None:
    first = core.state.counts.accepted
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
