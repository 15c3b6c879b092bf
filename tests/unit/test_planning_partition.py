"""split and lower_bound: bounds, ties, extremes, and the optimum by enumeration."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import check_split, largest_first

from stream_balancer.planning import lower_bound, split
from stream_balancer.planning.bounds import lockstep_bound
from stream_balancer.planning.exchange import Cells

many_costs = st.lists(st.one_of(st.integers(0, 60).map(float), st.floats(1e-3, 1e6)), max_size=60)


def finish(costs: Any, shares: list[Any]) -> float:
    return max(float(np.asarray(costs, dtype=float)[share].sum()) for share in shares)


@given(st.integers(0, 10_000))
def test_random_splits(seed: int) -> None:
    check_split(np.random.default_rng(seed))


@given(many_costs, st.integers(1, 9), st.booleans(), st.integers(0, 20))
def test_every_rollout_is_on_one_rank(costs: list[float], dp_size: int, equal: bool, rotation: int) -> None:
    column = np.array(costs)
    shares = split(column, dp_size, equal_rollouts=equal, rotation=rotation)
    assert column.tolist() == costs
    assert all(share.dtype == np.int64 and (np.diff(share) > 0).all() for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    again = split(costs, dp_size, equal_rollouts=equal, rotation=rotation)
    assert all((one == other).all() for one, other in zip(shares, again, strict=True))


def test_no_rank_has_the_heaviest_in_every_step() -> None:
    plans = [split([9.0, 2.0, 2.0], 3, rotation=step) for step in range(4)]
    assert [next(rank for rank, share in enumerate(plan) if 0 in share) for plan in plans] == [0, 1, 2, 0]


EXTREMES = {
    "all equal": np.full(500, 7.0),
    "all zero": np.zeros(500),
    "one giant": np.array([1e9] + [1.0] * 499),
    "fibonacci": np.array([1.618**i for i in range(60)]),
    "cut at the longest": np.array([32768.0] * 125 + [100.0 + i for i in range(375)]),
    "ratio of a million": np.array([1e6 if i % 7 == 0 else 1.0 for i in range(500)]),
    "half zero": np.array([0.0] * 250 + [3.0 + i for i in range(250)]),
    "fewer than ranks": np.array([5.0, 1.0]),
    "wide ranks": np.random.default_rng(0).lognormal(0, 1, 900),
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("costs", EXTREMES.values(), ids=EXTREMES)
def test_extremes_are_near_the_bound(costs: np.ndarray, equal: bool) -> None:
    shares = split(costs, 8, equal_rollouts=equal)
    bound = lower_bound(costs, 8, equal_rollouts=equal)
    assert bound * (1 - 1e-12) <= finish(costs, shares) <= bound * 1.03


@pytest.mark.parametrize(("equal", "above"), [(False, 0.001), (True, 0.004)])
def test_beside_the_optimum_by_enumeration(equal: bool, above: float) -> None:
    rng, found = np.random.default_rng(1), []
    for _ in range(60):
        n, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        costs = rng.integers(1, 60, n).astype(float)
        best = np.inf
        for labels in product(range(ranks), repeat=n):
            counts = np.bincount(labels, minlength=ranks)
            if not equal or counts.max() - counts.min() <= 1:
                best = min(best, np.bincount(labels, weights=costs, minlength=ranks).max())
        got = finish(costs, split(costs, ranks, equal_rollouts=equal))
        assert lower_bound(costs, ranks, equal_rollouts=equal) <= best <= got
        found.append(got / best - 1)
    assert np.mean(found) < above


@pytest.mark.parametrize("heavy", [9, 17])
def test_the_bound_of_equal_counts_sees_the_company_of_heavy_rollouts(heavy: int) -> None:
    """One rank holds two (three) heavy rollouts, and six (five) light ones."""
    costs = np.repeat([30_000.0, 500.0], [heavy, 64 - heavy])
    each = heavy // 8 + 1
    assert lower_bound(costs, 8, equal_rollouts=True) == each * 30_000 + (8 - each) * 500
    assert finish(costs, split(costs, 8, equal_rollouts=True)) == lower_bound(costs, 8, equal_rollouts=True)


@pytest.mark.parametrize(
    ("n", "dp_size", "equal", "above"),
    [
        (32, 8, False, 0.004),
        (32, 8, True, 0.03),
        (128, 8, False, 2e-4),
        (256, 32, True, 0.001),
        (4096, 512, False, 1e-3),
    ],
)
def test_lognormal_costs_are_near_the_bound(n: int, dp_size: int, equal: bool, above: float) -> None:
    found = []
    for seed in range(1 if n > 1000 else 12):
        costs = np.random.default_rng(seed).lognormal(0, 0.6, n)
        bound = lower_bound(costs, dp_size, equal_rollouts=equal)
        found.append(finish(costs, split(costs, dp_size, equal_rollouts=equal)) / bound - 1)
    assert np.mean(found) < above


def test_a_larger_tolerance_ends_the_search_early() -> None:
    costs = np.random.default_rng(3).lognormal(0, 0.3, 60)
    rough, fine = (finish(costs, split(costs, 8, tolerance=tolerance)) for tolerance in (0.5, 1e-4))
    assert rough == largest_first(costs, 8, equal=False) > fine


def test_costs_of_zero_even_out_the_counts() -> None:
    assert sorted(share.size for share in split([9.0, 1.0, 1.0] + [0.0] * 9, 3)) == [4, 4, 4]


def test_costs_may_be_huge() -> None:
    shares = split([1e300, 2e300, 3e300], 2)
    assert sorted(map(len, shares)) == [1, 2]
    assert [share.size for share in split([], 2)] == [0, 0]


@pytest.mark.parametrize(
    ("costs", "dp_size", "message"),
    [
        ([1.0, -1.0], 2, "finite numbers >= 0"),
        ([np.inf], 2, "finite numbers >= 0"),
        ([[1.0]], 2, "one per rollout"),
        ([1.0], 0, "dp_size"),
    ],
)
@pytest.mark.parametrize("function", [split, lower_bound])
def test_bad_values_are_refused(function: Any, costs: Any, dp_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(costs, dp_size)


@given(st.integers(0, 10_000))
def test_no_lockstep_layout_beats_the_bound(seed: int) -> None:
    """Every way to put up to six rollouts into locksteps of two ranks."""
    rng = np.random.default_rng(seed)
    n, cap = int(rng.integers(1, 6)), 100
    tokens, costs = rng.integers(1, cap + 1, n), rng.integers(1, 50, n).astype(float)
    best = np.inf
    for labels in product(range(2 * -(-n // 2)), repeat=n):
        held = np.bincount(labels, weights=tokens, minlength=2 * -(-n // 2))
        if held.max() <= cap:
            work = np.bincount(labels, weights=costs, minlength=held.size)
            best = min(best, float(work.reshape(-1, 2).max(axis=1).sum()))
    assert lockstep_bound(costs, tokens, 2, cap) <= best * (1 + 1e-12)
    assert lockstep_bound(costs[:0], tokens[:0], 2, cap) == 0.0


def test_exchanges_keep_counts_and_the_cap() -> None:
    rng = np.random.default_rng(5)
    work, tokens, labels = rng.lognormal(0, 1, 60), rng.integers(1, 50, 60), rng.permutation(np.arange(60) % 6)
    cap = int(np.bincount(labels, weights=tokens).max())
    cells = Cells.of(work, labels, 6, (tokens, cap), 10, 10)
    before = float(cells.load.max())
    cells.even_out(0.0)
    after = cells.labels()
    assert np.bincount(after).tolist() == [10] * 6
    assert np.bincount(after, weights=tokens).max() <= cap
    assert np.bincount(after, weights=work).max() < before
