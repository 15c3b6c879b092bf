"""Certificates: never above the optimum by enumeration, whatever the prices; refusals; the line of ``replay``."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import trace_of
from typer.testing import CliRunner

from stream_balancer.cli import app
from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ConfigError
from stream_balancer.planning.arrays import Ints
from stream_balancer.tools.certify import certify
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.simulate import simulate


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


def test_more_freedom_never_proves_more() -> None:
    costs = np.ceil(np.random.default_rng(3).pareto(1.1, 480) * 5 + 1)
    how: dict[str, Any] = {"batch_size": 8, "ranks": 4, "rounds": 100, "arrived": windowed(480, 8, 16)}
    figures = [certify(costs, **how, max_skips=skips).total_time for skips in (2, 4, 8, None)]
    # searches end a little below what could be proven
    assert all(tight >= loose * 0.995 for tight, loose in itertools.pairwise(figures))
    assert figures[0] > figures[-1]


@pytest.mark.parametrize(
    ("costs", "how", "said"),
    [
        ([], {}, "costs must be finite"),
        ([1.0, math.nan], {}, "costs must be finite"),
        ([0.0, 0.0], {}, "one of them above 0"),
        ([-1.0, 2.0], {}, "costs must be finite"),
        *(([1.0] * 9, {name: 0}, "must be >= 1") for name in ("ranks", "batch_size")),
        ([1.0] * 9, {"arrived": windowed(9, 2, 8), "max_skips": 1}, "no schedule exists"),
        ([1.0] * 9, {"arrived": np.zeros(4, dtype=np.int64)}, "arrived must be"),
        ([1.0] * 9, {"arrived": np.arange(9)[::-1]}, "arrived must be"),
        ([1.0] * 9, {"tokens": np.ones(4, dtype=np.int64)}, "tokens must be"),
        ([1.0] * 9, {"tokens": np.ones(9, dtype=np.int64), "max_tokens": 0}, r"max_tokens \(0\)"),
        ([1.0] * 9, {"prices": np.full(9, 1e9)}, "too large to be checked"),
    ],
)
def test_a_stream_without_schedule_is_refused(costs: list[float], how: dict[str, Any], said: str) -> None:
    given = {"arrived": windowed(len(costs), 2, 4), "batch_size": 2, "ranks": 2, "max_skips": 4, "rounds": 0}
    with pytest.raises(ValueError, match=said):
        certify(np.array(costs), **given | how)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"deadline_s": 5.0}, "deadline_s=None"),
        ({"groups": {"size": 2}}, "groups.size=None"),
        ({"groups": {"share_prefixes": True}}, "groups.share_prefixes=False"),
        ({"context_parallel": {"sizes": (1, 2), "overhead": 0.1}}, "context_parallel.sizes"),
        ({"staleness": {"max_versions": 3}}, "staleness.max_versions=None"),
    ],
)
def test_a_config_of_which_nothing_is_proven_is_refused(knobs: dict[str, Any], said: str) -> None:
    given = {"dp_size": 2, "batch_size": 4, "cost": "quadratic"} | knobs
    config = BalancerConfig(**{name: value for name, value in given.items() if value is not None})
    with pytest.raises(ConfigError, match=said):
        simulate(generate_trace(40, "rg"), config, certify=True)


@pytest.mark.parametrize(
    ("knobs", "trainer"),
    [
        ({}, "instant"),
        ({}, "matched"),
        ({"counts": "equal"}, "instant"),
        ({"sync": "micro_batch", "micro_batches": {"max_tokens": 40_000}}, "instant"),
    ],
)
def test_our_run_takes_at_least_what_is_proven_of_it(knobs: dict[str, Any], trainer: Any) -> None:
    config = BalancerConfig(**{"dp_size": 4, "batch_size": 8, "cost": "quadratic"} | knobs)
    said: list[int] = []
    report = simulate(generate_trace(160, "lrm"), config, slots=16, trainer=trainer, certify=True, progress=said.append)
    found = report.certificate
    assert found is not None
    assert found.work / 4 * (1 - 1e-9) <= found.total_time <= report.overall.work_s
    assert found.num_steps == report.overall.batches
    assert said[-1] == 160
    assert report.to_dict()["certificate"]["idle"] == found.idle


def test_replay_prints_the_bound_beside_ours() -> None:
    command = ["replay", "generate:lognormal:160", "--dp-size", "4", "--batch-size", "8", "--cost", "quadratic"]
    told = CliRunner().invoke(app, [*command, "--certify"])
    assert told.exit_code == 0, told.output
    assert "Whole run, drain included: idle" in told.stdout
    assert "proven" in told.stdout
    figures = json.loads(CliRunner().invoke(app, [*command, "--certify", "--json"]).stdout)["policies"]
    assert 0 <= figures["window"]["certificate"]["idle"] <= figures["window"]["overall"]["idle_fraction"] + 1e-9
    assert figures["fifo"]["certificate"] is None
    refused = CliRunner().invoke(app, [*command, "--certify", "--deadline-s", "5"])
    assert (refused.exit_code, "certify needs deadline_s=None" in refused.stderr) == (2, True)
    assert "with this window" in told.stdout
    slow = CliRunner().invoke(app, [*command, "--certify", "--trainer", "matched"])
    assert "to which rollouts come as they did here" in " ".join(slow.stdout.split())
    even = CliRunner().invoke(app, ["replay", "generate:tau:64", "--dp-size", "2", "--batch-size", "16", "--certify"])
    assert "is not proven" in even.stdout


def test_steps_that_limits_cut_short_are_refused() -> None:
    config = BalancerConfig(dp_size=2, batch_size=4, window=4, max_bytes=1000)
    with pytest.raises(ConfigError, match="one smaller"):
        simulate(trace_of([30, 30, 60, 10] * 8), config, certify=True)


def test_costs_may_be_as_small_as_numbers_are() -> None:
    found = certify(np.full(8, 1e-300), windowed(8, 4, 4), batch_size=4, ranks=2, max_skips=2)
    assert found.work == pytest.approx(8e-300)
