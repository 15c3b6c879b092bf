"""Which rollouts go: levels, the skip bound, due rollouts, groups, locksteps, and `choose`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import check_skips, idle_beside_first_come

from stream_balancer.planning import Plan, PlanKnobs, Waiting, choose, plan_batch, smallest_max_skips
from stream_balancer.planning.arrays import positions_in
from stream_balancer.planning.choice import Candidates, Units, choose_units, forced, most_for_max_skips
from stream_balancer.planning.lockstep import choose_lockstep, ordinary_level
from stream_balancer.planning.padded import choose_neighbours
from stream_balancer.planning.swaps import swap_rollouts

POOL = np.array([3.0, 2.0] * 6 + [9.0, 10.0, 40.0])


def gone(plan: Plan) -> list[int]:
    return np.sort(positions_in(plan.ranks)).tolist()


def chosen(waiting: Waiting, knobs: PlanKnobs, number: int | None = None) -> list[int]:
    return gone(plan_batch(waiting, knobs, num_rollouts=knobs.batch_size if number is None else number))


# --- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("must", "skips_left", "goes"),
    [
        ([], 8, [3, 2, 3, 2]),
        ([9], 8, [3, 3, 9, 10]),  # waste now 0, waste later 3.1: the 40 waits for company
        ([9], 1, [3, 9, 10, 40]),  # waste now 9 beats waste later 25
        ([40], 8, [3, 9, 10, 40]),  # the lower outliers share the step of the 40
        ([9, 10], 8, [3, 2, 9, 10]),
    ],
)
def test_the_picture_of_the_module(must: list[float], skips_left: int, goes: list[float]) -> None:
    remaining = np.full(15, 8)
    remaining[14] = skips_left
    units = Candidates(POOL, POOL, np.isin(POOL, must), remaining, number=4, ranks=2)
    assert POOL[choose_units(units)].tolist() == goes


def test_an_outlier_waits_until_it_must_go_and_takes_the_others_along() -> None:
    waiting, knobs = Waiting.of(POOL), PlanKnobs(2, 4, max_skips=8)
    assert max(POOL[chosen(waiting, knobs)]) == 3.0
    waiting.skips[[12, 14]] = 8, 7
    assert sorted(POOL[chosen(waiting, knobs)])[1:] == [9.0, 10.0, 40.0]


def test_the_oldest_go_where_they_balance() -> None:
    waiting = Waiting.of(np.random.default_rng(0).uniform(9, 10, 64))
    assert np.mean(chosen(waiting, PlanKnobs(4, 32, 8))) < 20  # the oldest 32, but for swaps


@pytest.mark.parametrize("waits", [32, 40, 64])
def test_old_rollouts_leave_while_outliers_wait(waits: int) -> None:
    costs = np.ones(waits)
    costs[::4] = 30.0
    knobs = PlanKnobs(8, 16, 8)
    first = chosen(Waiting.of(costs), knobs)
    assert max(costs[first]) == 1.0
    assert first[:4] == [1, 2, 3, 5]


def test_equal_counts_send_the_lightest_beside_an_outlier() -> None:
    costs = np.array([20.0] + [5.0] * 8 + [1.0] * 8)
    waiting = Waiting.of(costs)
    waiting.skips[0] = 8
    free, equal = (chosen(waiting, PlanKnobs(2, 8, 8, equal_rollouts=equal)) for equal in (False, True))
    assert sum(costs[free] == 1.0) < 3 <= sum(costs[equal] == 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_idles_no_more_than_first_come(seed: int) -> None:
    mine, first_come = idle_beside_first_come(np.random.default_rng(seed))
    assert mine <= first_come + 1e-3


# --- what must go -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_no_rollout_is_left_behind_too_often(seed: int) -> None:
    check_skips(np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("skips_left", "batch", "goes"),
    [
        ([0, 1, 1, 1], 2, [0, 1]),  # the example of `forced`: N_1 = 4, at most 2 stay
        ([1, 1, 1, 0], 2, [0, 3]),
        ([0, 0, 0, 0], 2, [0, 1]),  # more than the proof allows: as many as a step takes
        ([3, 3, 3, 3], 2, []),
        ([0, 3, 3, 3], 2, [0]),
    ],
)
def test_forced(skips_left: list[int], batch: int, goes: list[int]) -> None:
    waiting = replace(Waiting.of(np.ones(4)), skips=3 - np.array(skips_left))
    knobs = PlanKnobs(1, batch, max_skips=3)
    assert np.flatnonzero(forced(Units.of(waiting, knobs), knobs)).tolist() == goes


def test_due_rollouts_go_as_far_as_there_is_room() -> None:
    waiting = Waiting.of(np.ones(8))
    waiting.due[[6, 7]] = True
    assert {6, 7} <= {*chosen(waiting, PlanKnobs(2, 4, 8))}
    waiting.due[:] = True
    waiting.skips[:] = range(8)  # the earliest deadline first
    assert chosen(waiting, PlanKnobs(2, 4, 8)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("window", "batch", "capacity", "group", "skips"),
    [(64, 32, 128, 1, 3), (128, 32, 256, 1, 9), (64, 32, 128, 8, 5), (32, 32, 32, 1, 0), (40, 32, 400, 40, 399)],
)
def test_smallest_max_skips(window: int, batch: int, capacity: int, group: int, skips: int) -> None:
    assert smallest_max_skips(window, batch, capacity, group) == skips
    assert most_for_max_skips(skips, batch, group) >= capacity


# --- groups -----------------------------------------------------------------------------------------------------------


def grouped(labels: list[int], **columns: Any) -> Waiting:
    return replace(Waiting.of(np.ones(len(labels))), groups=np.array(labels), **columns)


def test_units_are_in_the_order_of_their_oldest_members() -> None:
    units = Units.of(grouped([7, 7, -1, 4, 7]), PlanKnobs(1, 5, whole_groups=True))
    assert units.unit_of is not None
    assert units.unit_of.tolist() == [0, 0, 1, 2, 0]
    assert units.sizes.tolist() == [3, 1, 1]
    assert units.rows(np.array([0, 2])).tolist() == [0, 1, 3, 4]


def test_a_group_larger_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="group 0 has 5 rollouts, more than a step"):
        plan_batch(grouped([0] * 5), PlanKnobs(2, 4, whole_groups=True), num_rollouts=4)


def test_an_incomplete_group_waits_unless_it_is_due() -> None:
    waiting = grouped([0, 0, 1, 1], group_complete=np.array([False, False, True, True]))
    knobs = PlanKnobs(1, 2, 4, whole_groups=True)
    assert chosen(waiting, knobs) == [2, 3]
    waiting.due[1] = True
    plan = plan_batch(waiting, knobs, num_rollouts=2)
    assert (gone(plan), plan.incomplete_groups) == ([0, 1], (0,))


def test_groups_of_unlike_sizes_fill_the_step() -> None:
    labels = [0] * 3 + [1] * 3 + [2] + [3] * 3
    assert len(chosen(grouped(labels), PlanKnobs(2, 7, 8, whole_groups=True))) == 7


def test_whole_groups_are_swapped_so_that_ranks_finish_together() -> None:
    rng, idle = np.random.default_rng(2), []
    for whole in (False, True):
        finish = work = 0.0
        for step in range(12):
            labels = np.arange(64) // 8
            costs = rng.lognormal(0, 1, 8)[labels] * rng.uniform(0.5, 2, 64)
            waiting = replace(Waiting.of(costs), groups=labels)
            plan = plan_batch(waiting, PlanKnobs(8, 32, 8, whole_groups=whole), num_rollouts=32, step=step)
            finish, work = finish + plan.finish, work + costs[gone(plan)].sum() / 8
        idle.append(1 - work / finish)
    assert idle[1] < 0.1


# --- ranks that meet at every micro-batch, and padding ----------------------------------------------------------------


def capped(tokens: Any, **more: Any) -> Candidates:
    column = np.asarray(tokens)
    given = {"must": column < 0, "remaining": np.full(column.size, 8), "number": 11, "ranks": 2} | more
    return Candidates(column**2.0, column**2.0, tokens=column, max_tokens=100, **given)


def test_outliers_go_in_locksteps_of_their_own() -> None:
    tokens = np.array([100] + [20] * 13)
    assert not choose_lockstep(capped(tokens))[0]
    tokens[3] = 100
    assert choose_lockstep(capped(tokens))[[0, 3]].all()
    alone = choose_lockstep(capped(tokens, number=5))
    assert alone[[0, 3]].all() or not alone[[0, 3]].any()


def test_the_ordinary_level_is_a_full_micro_batch_of_ordinary_rollouts() -> None:
    tokens = np.array([100] + [20] * 13)
    assert ordinary_level(capped(tokens), tokens) == 2_000.0
    same = np.full(14, 25)
    assert not choose_lockstep(capped(same, number=8))[8:].any()  # the oldest, where no rollout is an outlier


def test_one_micro_batch_a_rank_is_kept_within_its_tokens() -> None:
    costs = np.array([1.0, 3.0] * 16)
    waiting = Waiting.of(costs, costs * 10)
    plan = plan_batch(waiting, PlanKnobs(2, 8, 8, sync="micro_batch", max_tokens=90), num_rollouts=8)
    assert all(waiting.lengths[one].sum() <= 90 for share in plan.ranks for one in share)


def test_padded_micro_batches_take_neighbours() -> None:
    costs = np.array([100.0, 900.0, 120.0, 880.0, 110.0, 300.0, 910.0, 90.0])
    step = Candidates(costs, costs, costs == 300, np.full(8, 8), number=4, ranks=2)
    go = choose_neighbours(step, rows=2)
    assert go[5]
    assert go.sum() == 4
    plan = plan_batch(Waiting.of(costs), PlanKnobs(2, 4, 8, padded=True, max_tokens=1000), num_rollouts=4)
    assert plan.finish <= 2 * 910


# --- swaps ------------------------------------------------------------------------------------------------------------

NONE = np.zeros(6, dtype=np.bool_)
COSTS = np.array([900.0, 700.0, 450.0, 300.0, 200.0, 400.0])
RANKS = [[np.array([0, 2])], [np.array([1, 3])]]
NO_CAP = NONE.astype(np.int64), 1


@pytest.mark.parametrize(
    ("costs", "fixed", "cap", "after"),
    [
        (COSTS, NONE, NO_CAP, [[0, 4], [1, 5]]),
        (COSTS, NONE, (COSTS.astype(np.int64), 1350), [[0, 4], [1, 5]]),
        (COSTS, ~NONE, NO_CAP, [[0, 2], [1, 3]]),  # all must go
        (COSTS, NONE, (np.array([9, 7, 4, 3, 99, 99]), 13), [[0, 2], [1, 3]]),  # no swap fits
        (np.array([900.0, 1.0, 2.0, 3.0, 4.0, 5.0]), NONE, NO_CAP, [[0, 2], [1, 3]]),  # one rollout sets the time
    ],
)
def test_swaps_with_the_window(costs: Any, fixed: Any, cap: Any, after: list[list[int]]) -> None:
    swapped = swap_rollouts(costs, RANKS, fixed, np.arange(6) > 3, cap)
    assert [one.tolist() for share in swapped for one in share] == after


def test_swaps_make_few_rollouts_a_rank_even() -> None:
    rng, idle = np.random.default_rng(4), np.zeros(2)
    for _ in range(10):
        costs = rng.lognormal(0, 0.5, 48)
        for place, held in enumerate((24, 48)):
            plan = plan_batch(Waiting.of(costs[:held]), PlanKnobs(8, 24, 16), num_rollouts=24)
            idle[place] += (1 - plan.loads.mean() / plan.finish) / 10
    assert idle[1] < 0.005 < idle[0]


# --- choose -----------------------------------------------------------------------------------------------------------


def test_choose_from_a_pool() -> None:
    pool = [900, 100, 120, 80, 4000, 110, 950, 90]
    assert [pool[one] for one in choose(pool, dp_size=2, batch_size=4)] == [120, 80, 110, 90]
    assert choose([5, 6], dp_size=1, batch_size=9).tolist() == [0, 1]
    assert choose([10] * 4, [1.0, 9.0, 1.0, 1.0], dp_size=2, batch_size=2).dtype == np.int64


@pytest.mark.parametrize("equal", [False, True])
def test_a_pool_that_counts_its_skips_leaves_no_rollout_behind(equal: bool) -> None:
    rng, skips = np.random.default_rng(7), np.zeros(32, dtype=int)
    lengths = rng.pareto(1.0, 32).astype(int) + 1
    for step in range(60):
        go = choose(lengths, dp_size=4, batch_size=16, max_skips=4, skips=skips, equal_rollouts=equal, step=step)
        lengths = np.append(np.delete(lengths, go), rng.pareto(1.0, go.size).astype(int) + 1)
        skips = np.append(np.delete(skips, go) + 1, np.zeros(go.size, dtype=int))
        assert skips.max() <= 4


def test_groups_of_a_pool_stay_whole() -> None:
    groups = [1, 1, 2, 2, 3, 3, -1]
    due = [False] * 4 + [True] * 2 + [False]
    go = choose([10] * 7, dp_size=2, batch_size=4, groups=groups, due=due)
    assert {4, 5} <= {*go.tolist()}
    assert go.size == 4
    assert choose([10] * 6, dp_size=2, batch_size=5, groups=[1, 1, 1, 2, 2, 2]).tolist() == [0, 1, 2]
    assert choose([10, 10], dp_size=1, batch_size=4, groups=[1, 2], group_size=2).size == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"costs": [1.0]}, "one entry for each"),
        ({"costs": [1.0, 1.0, -1.0]}, "finite numbers"),
        ({"skips": [0.5, 1, 1]}, "whole numbers"),
        ({"skips": [-1, 0, 0]}, "skips >= 0"),
        ({"due": [True]}, "one entry for each"),
        ({"due": [1, 0, 0]}, "booleans"),
        ({"groups": [[1], [1], [1]]}, "whole numbers"),
        ({"groups": [1, 1, 1]}, "group 1 has 3 rollouts"),
        ({"group_size": 2}, "needs groups="),
        ({"groups": [1, 1, 2], "group_size": 3}, "must be in 1..batch_size"),
        ({"lengths": [3, 0, 1]}, "lengths >= 1"),
        ({"lengths": []}, "needs a rollout"),
        ({"dp_size": 9}, "dp_size <= batch_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"max_skips": -1}, "max_skips >= 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(**{"lengths": [3, 2, 1], "dp_size": 1, "batch_size": 2, **bad})
