"""partition and lower_bound: every guarantee, on tiny inputs where rare paths are common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning import lower_bound, split
from stream_balancer.planning import split as split_function

integral = st.integers(0, 60).map(float)
spread = st.floats(0.0, 1e6, allow_nan=False).map(lambda x: 0.0 if x < 1e-3 else x)
many_costs = st.lists(st.one_of(integral, spread), max_size=60)
kinds = st.sampled_from(["free", "equal"])


def finish(costs, shares):
    return max(float(np.asarray(costs)[share].sum()) for share in shares)


def check(costs, shares, dp_size, counts):
    assert len(shares) == dp_size
    assert all(share.dtype == np.int64 for share in shares)
    assert all((np.diff(share) > 0).all() for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    sizes = [share.size for share in shares]
    assert sum(size > 0 for size in sizes) == min(len(costs), dp_size)
    if counts == "equal":
        assert max(sizes) - min(sizes) <= 1


@given(many_costs, st.integers(1, 9), kinds, st.integers(0, 20))
def test_every_rollout_is_on_one_rank_and_no_rank_is_idle(costs, dp_size, counts, rotation):
    given_costs = np.array(costs)
    shares = split(given_costs, dp_size, counts, rotation=rotation)
    again = split(costs, dp_size, counts, rotation=rotation)
    assert all((a == b).all() for a, b in zip(shares, again, strict=True))
    assert given_costs.tolist() == costs
    check(costs, shares, dp_size, counts)
    bound = lower_bound(costs, dp_size, counts)
    assert finish(costs, shares) >= bound * (1 - 1e-9)
    if counts == "free" and costs:  # what largest-first alone guarantees (Graham 1969), kept by every swap
        assert finish(costs, shares) <= (4 / 3) * max(bound, 1e-300) * 1.5
    check(costs, split(costs, dp_size, counts, tolerance=1e-7), dp_size, counts)


def test_no_rank_has_the_heaviest_in_every_step():
    plans = [split([9.0, 2.0, 2.0], 3, rotation=step) for step in range(4)]
    assert [next(rank for rank, share in enumerate(plan) if 0 in share) for plan in plans] == [0, 1, 2, 0]


@pytest.mark.parametrize("heavy", [9, 17])
def test_equal_counts_bound_sees_the_company_of_heavy_ones_that_share_a_rank(heavy):
    """One rank holds two (three) of them, and six (five) light ones."""
    costs = np.repeat([30_000.0, 500.0], [heavy, 64 - heavy])
    each = heavy // 8 + 1
    assert lower_bound(costs, 8, "equal") == each * 30_000 + (8 - each) * 500
    assert finish(costs, split(costs, 8, "equal")) == lower_bound(costs, 8, "equal")


ADVERSARIES = {
    "all equal": np.full(500, 7.0),
    "all zero": np.zeros(500),
    "one giant": np.array([1e9] + [1.0] * 499),
    "fibonacci": np.array([1.618**i for i in range(60)]),
    "quarter at the cap": np.array([32768.0] * 125 + [100.0 + i for i in range(375)]),
    "ratio of a million": np.array([1e6 if i % 7 == 0 else 1.0 for i in range(500)]),
    "half zero": np.array([0.0] * 250 + [3.0 + i for i in range(250)]),
    "fewer than ranks": np.array([5.0, 1.0]),
    "none": np.empty(0),
    "one": np.array([3.0]),
    "tiny": np.full(100, 1e-300),
    "huge": np.full(100, 1e300),
    "sums overflow": np.array([1.7e308] * 60 + [0.0] * 40),
}


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("counts", ["free", "equal"])
@pytest.mark.parametrize("dp_size", [1, 3, 8, 64])
def test_adversaries(name, counts, dp_size):
    costs = ADVERSARIES[name]
    check(costs, split(costs, dp_size, counts), dp_size, counts)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("n", "dp_size", "counts", "within"),
    [(256, 8, "free", 1e-4), (256, 8, "equal", 1e-4), (512, 32, "free", 1e-4), (64, 8, "free", 1e-3)],
)
def test_heavy_tails_reach_the_bound(seed, n, dp_size, counts, within):
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(4096) - 0.5, 1, n), 64, 32768).round()
    shares = split(lengths, dp_size, counts)
    assert finish(lengths, shares) <= lower_bound(lengths, dp_size, counts) * (1 + within)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, -1.0], "dp_size": 2}, "finite and >= 0"),
        ({"costs": [1.0, np.nan], "dp_size": 2}, "finite and >= 0"),
        ({"costs": [[1.0]], "dp_size": 2}, "one-dimensional"),
        ({"costs": [1.0], "dp_size": 0}, "dp_size"),
        ({"costs": [1.0], "dp_size": 2, "counts": "same"}, "counts"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_function(**arguments)
    with pytest.raises(ValueError, match=message):
        lower_bound(**arguments)
