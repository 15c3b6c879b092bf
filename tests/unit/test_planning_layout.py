"""Micro-batches, locksteps, padding, mini-batches, baselines and the figures of a layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, any_case, check_piece, check_plan

from stream_balancer.planning import OversizeError, PlanKnobs, Waiting, form_micro_batches, plan_batch
from stream_balancer.planning.arrays import positions_in
from stream_balancer.planning.baselines import plan_fifo, plan_round_robin
from stream_balancer.planning.bounds import planned, times
from stream_balancer.planning.length_bias import LengthBias
from stream_balancer.planning.mini_batches import joined
from stream_balancer.planning.padded import runs_of

LENGTHS = np.random.default_rng(3).integers(10, 100, 64)


def lists(layout: Any) -> list[list[list[int]]]:
    return [[one.tolist() for one in share] for share in layout]


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "layout"),
    [
        ({"max_tokens": 1000}, [[[0], [2]], [[1], [3, 4]]]),
        ({}, [[[0, 2]], [[1, 3, 4]]]),
        ({"max_tokens": 1200, "sync": "micro_batch"}, [[[0, 2]], [[1, 3, 4]]]),
        ({"multiple_of": 2}, [[[0], [2]], [[1], [3, 4]]]),
    ],
)
def test_layouts(knobs: dict[str, Any], layout: list[list[list[int]]]) -> None:
    lengths = [600, 600, 600, 300, 300]
    assert lists(form_micro_batches(lengths, lengths, 2, **knobs)) == layout


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_numbers_are_alike_and_multiples(sync: Any, multiple: int, equal: bool) -> None:
    knobs: dict[str, Any] = {"max_tokens": 200, "sync": sync, "multiple_of": multiple, "equal_rollouts": equal}
    ranks = form_micro_batches(LENGTHS, LENGTHS, 4, **knobs)
    [number] = {len(share) for share in ranks}
    assert number % multiple == 0
    waiting, limits = Waiting.of(LENGTHS, LENGTHS), PlanKnobs(4, 64, **knobs)
    check_piece(waiting, limits, planned(waiting, limits, ranks))


def test_each_rank_its_own_number() -> None:
    lengths = [90] * 6 + [10] * 6
    work = np.array([1.0] * 6 + [50.0] * 6)
    free = form_micro_batches(lengths, work, 2, max_tokens=100, equal_number=False, overhead_cost=1.0)
    same = form_micro_batches(lengths, work, 2, max_tokens=100, overhead_cost=1.0)
    assert len({len(share) for share in same}) == 1
    assert sum(map(len, free)) <= sum(map(len, same))


@pytest.mark.parametrize(("overhead", "number"), [(0.0, 3), (100.0, 2)])
def test_an_overhead_saves_micro_batches_at_the_price_of_balance(overhead: float, number: int) -> None:
    lengths, work = [50, 50, 100, 60, 60, 60], [9.0, 9.0, 9.0, 1.0, 1.0, 1.0]
    ranks = form_micro_batches(lengths, work, 2, max_tokens=120, overhead_cost=overhead)
    assert [len(share) for share in ranks] == [number] * 2 or overhead == 0.0
    assert max(len(share) for share in ranks) <= number


@pytest.mark.parametrize("oversize", ["refuse", "alone"])
def test_a_rollout_above_the_cap_is_refused_or_alone(oversize: Any) -> None:
    if oversize == "refuse":
        with pytest.raises(OversizeError, match="longer than max_tokens"):
            form_micro_batches([20, 5, 5], [20, 5, 5], 1, max_tokens=10, oversize=oversize)
    else:
        [share] = form_micro_batches([20, 5, 5], [20, 5, 5], 1, max_tokens=10, oversize=oversize)
        assert lists([share]) == [[[0], [1, 2]]]


def test_the_heaviest_micro_batch_runs_first() -> None:
    [share] = form_micro_batches(LENGTHS, LENGTHS, 1, max_tokens=500)
    work = [int(LENGTHS[one].sum()) for one in share]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("knobs", [{"padded": True, "max_tokens": 300}, {"max_tokens": 100, "sync": "micro_batch"}])
def test_fewer_rollouts_than_ranks_and_nothing_at_all(knobs: dict[str, Any]) -> None:
    plan = plan_batch(Waiting.of([5.0, 1.0]), PlanKnobs(4, 8, **knobs), num_rollouts=2)
    assert sorted(len(share) for share in plan.ranks) == [0, 0, 1, 1]
    assert form_micro_batches([], [], 3, **knobs) == [[], [], []]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([1, 2], [1.0], 1), "one for each"), (([0], [1.0], 1), "tokens >= 1"), (([1], [1.0], 0), "dp_size")],
)
def test_bad_columns_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form_micro_batches(*arguments)
    with pytest.raises(ValueError, match="multiple_of"):
        form_micro_batches([1], [1.0], 1, multiple_of=0)


def best_locksteps(tokens: Any, costs: Any, ranks: int, cap: int) -> float:
    """Best time of any layout of a few rollouts in locksteps."""
    best, bins = np.inf, ranks * -(-tokens.size // ranks)
    for labels in product(range(bins), repeat=tokens.size):
        if np.bincount(labels, weights=tokens, minlength=bins).max() <= cap:
            work = np.sort(np.bincount(labels, weights=costs, minlength=bins))[::-1]
            best = min(best, float(work[::ranks].sum()))
    return best


def test_locksteps_beside_the_optimum_by_enumeration() -> None:
    rng, above = np.random.default_rng(11), []
    for _ in range(60):
        n = int(rng.integers(3, 6))
        tokens = rng.integers(1, 100, n)
        costs, cap = tokens * (tokens + 30.0), int(rng.integers(tokens.max(), 2 * tokens.max() + 1))
        ranks = form_micro_batches(tokens, costs, 2, max_tokens=cap, sync="micro_batch")
        waiting = Waiting.of(costs, tokens)
        finish = times(waiting, PlanKnobs(2, n, sync="micro_batch", max_tokens=cap), ranks)[1]
        best = best_locksteps(tokens, costs, 2, cap)
        assert finish >= best * (1 - 1e-12)
        above.append(finish / best - 1)
    assert np.mean(above) < 0.03


def test_the_figures_of_the_example() -> None:
    waiting, ranks = Waiting.of([9, 1, 3, 7]), [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
    assert times(waiting, PlanKnobs(2, 4), ranks)[1] == 10.0
    assert times(waiting, PlanKnobs(2, 4, sync="micro_batch"), ranks)[1] == 16.0
    costly = PlanKnobs(2, 4, multiple_of=4, overhead_cost=0.5)
    assert times(waiting, costly, ranks)[0].tolist() == [12.0, 12.0]
    padded = PlanKnobs(2, 4, padded=True)
    assert times(waiting, padded, [[np.array([0, 1])], [np.array([2, 3])]])[0].tolist() == [18.0, 14.0]


# --- padding ----------------------------------------------------------------------------------------------------------


def test_neighbours_in_length_share_a_micro_batch() -> None:
    tokens = np.array([100, 900, 400, 500])
    assert sorted(sorted(tokens[one].tolist()) for one in runs_of(tokens, tokens * 1.0, 2, 10_000)) == [
        [100, 400, 500],
        [900],
    ]
    assert len(runs_of(tokens, tokens * 1.0, 1, 900)) == 3  # the cap needs more
    assert len(runs_of(tokens, tokens * 1.0, 4, 900)) == 4
    assert len(form_micro_batches(tokens, tokens, 1, padded=True)[0]) == 1  # without a cap


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 6), st.integers(100, 400))
def test_runs_are_within_the_cap(tokens: list[int], number: int, cap: int) -> None:
    column = np.array(tokens)
    runs = runs_of(column, column * 1.0, number, cap)
    assert sorted(np.concatenate(runs).tolist()) == list(range(column.size))
    assert all(one.size * column[one].max() <= cap for one in runs)
    assert len(runs) >= min(number, column.size)


# --- mini-batches -----------------------------------------------------------------------------------------------------


def test_outliers_share_a_mini_batch() -> None:
    costs = np.array([9.0, 3, 3, 2, 9, 3, 3, 2])
    plan = plan_batch(Waiting.of(costs), PlanKnobs(2, 8, mini_batches=2), num_rollouts=8)
    assert plan.finish == 17.0
    assert [sorted(costs[positions_in(piece.ranks)].tolist()) for piece in plan.pieces] == [[3, 3, 9, 9], [2, 2, 3, 3]]
    other = plan_batch(Waiting.of(costs), PlanKnobs(2, 8, mini_batches=2), num_rollouts=8, step=1)
    assert other.pieces[1].finish == 12.0  # the outliers do not come first in every step


@given(st.integers(0, 10_000))
def test_executions_stay_in_one_mini_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    waiting, labels = Waiting.of(rng.lognormal(0, 1, 24)), rng.integers(-1, 6, 24)
    knobs = PlanKnobs(2, 24, mini_batches=3)
    for planner in (plan_batch, plan_fifo, plan_round_robin):
        plan = planner(waiting, knobs, num_rollouts=24, step=seed, together=lambda rows: labels[rows])
        rows = [positions_in(piece.ranks) for piece in plan.pieces]
        assert sorted(np.concatenate(rows).tolist()) == list(range(24))
        for label in range(6):
            assert sum(bool((labels[one] == label).any()) for one in rows) <= 1


def test_a_small_step_has_fewer_mini_batches() -> None:
    sizes = [
        len(plan_batch(Waiting.of(np.ones(held)), PlanKnobs(4, 16, mini_batches=4), num_rollouts=held).pieces)
        for held in (16, 11, 7, 2)
    ]
    assert sizes == [4, 2, 1, 1]


def test_pieces_are_joined_one_after_another() -> None:
    plan = plan_batch(Waiting.of(np.ones(8)), PlanKnobs(2, 8, mini_batches=2), num_rollouts=8)
    whole = joined(plan, plan.pieces)
    assert lists(whole.ranks) == lists(plan.ranks)
    assert whole.finish == plan.finish == 4.0
    assert whole.loads.tolist() == [4.0, 4.0]


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planner", "layout", "finish"),
    [(plan_fifo, [[[0, 1]], [[2, 3]]], 10.0), (plan_round_robin, [[[0, 2]], [[1, 3]]], 17.0)],
)
def test_baselines_take_the_oldest(planner: Any, layout: list[list[list[int]]], finish: float) -> None:
    waiting = Waiting.of([9.0, 1.0, 8.0, 2.0, 5.0])
    plan = planner(waiting, PlanKnobs(2, 4), num_rollouts=4)
    assert (lists(plan.ranks), plan.finish) == (layout, finish)


@pytest.mark.parametrize("planner", [plan_fifo, plan_round_robin])
def test_baselines_keep_the_promises(planner: Any) -> None:
    """But for what must go, counts, and pieces of exactly as many rollouts."""
    for seed in range(80):
        case = any_case(np.random.default_rng(seed))
        fair = planner is plan_fifo
        knobs = replace(case.knobs, max_skips=None, equal_rollouts=case.knobs.equal_rollouts and fair, mini_batches=1)
        waiting = replace(case.waiting, due=np.zeros(case.waiting.costs.size, dtype=bool))
        case = Case(waiting, knobs, case.number)
        plan = case.plan(seed, planner)
        if not knobs.whole_groups:
            assert sorted(positions_in(plan.ranks).tolist()) == list(range(case.number))
        check_plan(case, plan)


def test_round_robin_has_the_micro_batches_of_the_fullest_rank() -> None:
    waiting = Waiting.of(np.array([50.0, 10.0, 50.0, 10.0, 50.0, 10.0]))
    plan = plan_round_robin(waiting, PlanKnobs(2, 6, max_tokens=60), num_rollouts=6)
    assert [len(share) for share in plan.ranks] == [3, 3]


# --- length bias ------------------------------------------------------------------------------------------------------


def test_length_bias_sees_delayed_and_evicted_rollouts() -> None:
    bias = LengthBias()
    assert bias.summary().num_dispatched == 0
    assert np.isnan(bias.summary().length_shift)
    bias.record([100, 200, 400, 1600, 800, 3200], delays_steps=[0, 0, 0, 1, 0, 2])
    bias.cut([6400, 50])
    summary = bias.summary()
    assert (summary.num_dispatched, summary.mean_delay, summary.num_cut) == (6, 0.5, 2)
    assert summary.cut_per_decile[0] == summary.cut_per_decile[-1] == 1.0
    assert summary.length_shift == pytest.approx(6300 / 6 / (12_750 / 8))
    with pytest.raises(ValueError, match="must be alike"):
        bias.record([1, 2], [0])
