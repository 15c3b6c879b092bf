"""Certificates of bench/certificates.py: never above the optimum by enumeration, whatever the prices; refusals."""

from __future__ import annotations

import itertools
import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_balancer.config import BalancerConfig
from stream_balancer.planning.arrays import Ints
from stream_balancer.tools.length_models import generate_trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from certificates import certify
from certify import proven


@cache
def step_time(costs: tuple[int, ...], *, equal: bool) -> float:
    """Least time of a step on two ranks, over all layouts."""
    num = len(costs)
    least, total = math.inf, sum(costs)
    for ones in itertools.product((0, 1), repeat=num):
        if not equal or num // 2 <= sum(ones) <= -(-num // 2):
            one = sum(itertools.compress(costs, ones))
            least = min(least, max(one, total - one))
    return least


@cache
def locksteps_time(rollouts: tuple[tuple[int, int], ...], cap: int) -> float:
    """Least time of a step on two ranks that meet at every micro-batch, over all ways to cut it. (cost, tokens)."""
    if not rollouts:
        return 0.0
    least = math.inf
    # the first rollout's lockstep: on its rank, on the other, or in a later lockstep
    for places in itertools.product((0, 1, 2), repeat=len(rollouts) - 1):
        ranks = [[one for one, place in zip(rollouts, (0, *places), strict=True) if place == rank] for rank in (0, 1)]
        if all(len(rank) == 1 or sum(tokens for _, tokens in rank) <= cap for rank in ranks):
            left = tuple(one for one, place in zip(rollouts, (0, *places), strict=True) if place == 2)
            time = max(sum(cost for cost, _ in rank) for rank in ranks)
            least = min(least, time + locksteps_time(left, cap))
    return least


def optimum(
    costs: list[int],
    there: list[int],
    batch: int,
    skips: int,
    *,
    equal: bool = False,
    tokens: list[int] | None = None,
    cap: int = 1,
) -> float:
    """Least total time on two ranks: all choices, all layouts. ``there``: rollouts that have come, by step."""
    num = len(costs)

    @cache
    def go(step: int, waiting: tuple[tuple[int, int], ...]) -> float:
        if step == len(there):
            return 0.0
        best = math.inf
        here = waiting + tuple((one, 0) for one in range(there[step - 1] if step else 0, there[step]))
        for taken in itertools.combinations(here, min(batch, num - step * batch)):
            left = [one for one in here if one not in taken]
            if all(passed < skips for _, passed in left):
                if tokens is None:
                    time = step_time(tuple(sorted(costs[one] for one, _ in taken)), equal=equal)
                else:
                    time = locksteps_time(tuple(sorted((costs[one], tokens[one]) for one, _ in taken)), cap)
                best = min(best, time + go(step + 1, tuple((one, passed + 1) for one, passed in left)))
        return best

    return go(0, ())


def steps_of(there: list[int]) -> Ints:
    """[n] the step from which on each rollout waits."""
    return np.repeat(np.arange(len(there)), np.diff(there, prepend=0))


def windowed(num: int, batch: int, window: int) -> Ints:
    """The same where so many wait at every step."""
    return np.maximum(-(-(np.arange(num) + 1 - window) // batch), 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, Any]]:
    batch = draw(st.sampled_from([2, 4]))
    costs = draw(st.lists(st.integers(0, 9) | st.integers(20, 40), min_size=batch, max_size=9).filter(any))
    rooms = draw(st.lists(st.integers(batch, 2 * batch + 1), min_size=len(costs), max_size=len(costs)))
    steps = -(-len(costs) // batch)
    there = np.maximum.accumulate([min(step * batch + rooms[step], len(costs)) for step in range(steps)]).tolist()
    skips = draw(st.integers(-(-max(rooms) // batch) - 1, 3))
    return costs, there, {"batch_size": batch, "max_skips": skips, "equal_counts": draw(st.booleans())}


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0, 20, 60]), st.data())
def test_no_certificate_is_above_the_optimum_whatever_the_prices(
    case: tuple[list[int], list[int], dict[str, Any]], rounds: int, data: st.DataObject
) -> None:
    costs, there, how = case
    best = optimum(costs, there, how["batch_size"], how["max_skips"], equal=how["equal_counts"])
    drawn = data.draw(st.none() | st.lists(st.integers(-20, 60), min_size=len(costs), max_size=len(costs)))
    prices = None if drawn is None else np.array(drawn, dtype=np.float64)
    found = certify(np.array(costs, dtype=np.float64), steps_of(there), ranks=2, rounds=rounds, prices=prices, **how)
    assert sum(costs) / 2 * (1 - 1e-9) <= found.total_time <= best


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0, 40]), st.integers(2, 12), st.data())
def test_no_certificate_of_locksteps_is_above_their_optimum(
    case: tuple[list[int], list[int], dict[str, Any]], rounds: int, cap: int, data: st.DataObject
) -> None:
    costs, there, how = case
    size = {"min_size": len(costs), "max_size": len(costs)}
    tokens = data.draw(st.lists(st.integers(1, 14), **size))
    prices = data.draw(st.none() | st.lists(st.integers(-20, 60), **size))
    best = optimum(costs, there, how["batch_size"], how["max_skips"], tokens=tokens, cap=cap)
    given = None if prices is None else np.array(prices, dtype=np.float64)
    lengths = np.array(tokens, dtype=np.int64)
    how |= {"ranks": 2, "rounds": rounds, "prices": given, "tokens": lengths, "max_tokens": cap}
    found = certify(np.array(costs, dtype=np.float64), steps_of(there), **how)
    assert found.total_time <= best


def test_locksteps_are_proven_to_idle_where_nothing_as_dense_meets_an_outlier() -> None:
    # one of 16 fills a micro-batch with 100 tokens; as many tokens of the others are worth 2
    costs, tokens = np.array(([16.0] + [1.0] * 15) * 12), np.array(([100] + [50] * 15) * 12)
    how: dict[str, Any] = {"arrived": windowed(192, 16, 16), "batch_size": 16, "ranks": 2, "max_skips": 0}
    assert certify(costs, **how).idle < 0.05
    # 16 beside 2, and then 13 rollouts of 50 tokens, four to a lockstep of 2: in parts of one, 6.5
    assert 22.4 < certify(costs, **how, tokens=tokens, max_tokens=100).total_time / 12 <= 22.5


def test_outliers_that_never_meet_are_proven_to_idle() -> None:
    costs = np.array([9.0] + [1.0] * 13 + [8.0, 1.0])
    how: dict[str, Any] = {"arrived": windowed(16, 4, 8), "batch_size": 4, "ranks": 2, "max_skips": 1}
    prices = np.where(costs > 1, costs - 1.5, 0.5)
    by_hand = certify(costs, **how, prices=prices, rounds=0)
    assert by_hand.total_time == pytest.approx(21)
    assert by_hand.idle == pytest.approx(1 - 31 / 42)
    assert by_hand.num_steps == 4
    assert 20.5 < certify(costs, **how).total_time <= 21


def test_a_stream_without_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule exists"):
        certify(np.ones(9), windowed(9, 2, 8), batch_size=2, ranks=2, max_skips=1)


def test_prices_beyond_the_range_of_integers_are_refused() -> None:
    prices = np.full(9, 1e9)
    with pytest.raises(ValueError, match="too large to be checked"):
        certify(np.ones(9), windowed(9, 2, 4), batch_size=2, ranks=2, max_skips=4, rounds=0, prices=prices)


@pytest.mark.parametrize(
    "knobs", [{}, {"equal_rollouts": True}, {"sync": "micro_batch", "micro_batches": {"max_tokens": 40_000}}]
)
def test_our_run_takes_at_least_what_is_proven_of_it(knobs: dict[str, Any]) -> None:
    config = BalancerConfig(**{"dp_size": 4, "batch_size": 8, "cost": "quadratic"} | knobs)
    report, found, _ = proven(generate_trace(160, "lrm"), config)
    assert found.work / 4 * (1 - 1e-9) <= found.total_time <= report.overall.work_s
    assert found.num_steps == report.overall.batches
