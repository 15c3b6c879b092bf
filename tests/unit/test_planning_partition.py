"""partition and lower_bound: every guarantee, on tiny inputs where rare paths are common."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_balancer.planning import lower_bound, partition
from stream_balancer.planning import partition as partition_function
from stream_balancer.planning.partition import partition_together

integral = st.integers(0, 60).map(float)
spread = st.floats(0.0, 1e6, allow_nan=False).map(lambda x: 0.0 if x < 1e-3 else x)
few_costs = st.lists(st.one_of(integral, spread), max_size=7)
many_costs = st.lists(st.one_of(integral, spread), max_size=60)
kinds = st.sampled_from(["free", "equal"])


def finish(costs, shares, speeds=None):
    speeds = np.ones(len(shares)) if speeds is None else np.asarray(speeds)
    return max(float(np.asarray(costs)[share].sum()) / speed for share, speed in zip(shares, speeds, strict=True))


def check(costs, shares, num_ranks, counts):
    assert len(shares) == num_ranks
    assert all(share.dtype == np.int64 for share in shares)
    assert all((np.diff(share) > 0).all() for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(costs)))
    sizes = [share.size for share in shares]
    assert sum(size > 0 for size in sizes) == min(len(costs), num_ranks)
    if counts == "equal":
        assert max(sizes) - min(sizes) <= 1


def exact(costs, num_ranks, counts, speeds=None):
    """The least latest finish, by trying everything."""
    best = np.inf
    for labels in itertools.product(range(num_ranks), repeat=len(costs)):
        sizes = np.bincount(labels, minlength=num_ranks)
        if counts == "equal" and sizes.max() - sizes.min() > 1:
            continue
        loads = np.bincount(labels, weights=costs, minlength=num_ranks)
        best = min(best, float((loads / (1.0 if speeds is None else np.asarray(speeds))).max()))
    return best


@given(many_costs, st.integers(1, 9), kinds, st.integers(0, 20))
def test_every_rollout_is_on_one_rank_and_no_rank_is_idle(costs, num_ranks, counts, rotation):
    given_costs = np.array(costs)
    shares = partition(given_costs, num_ranks, counts, rotation=rotation)
    again = partition(costs, num_ranks, counts, rotation=rotation)
    assert all((a == b).all() for a, b in zip(shares, again, strict=True))
    assert given_costs.tolist() == costs
    check(costs, shares, num_ranks, counts)
    bound = lower_bound(costs, num_ranks, counts)
    assert finish(costs, shares) >= bound * (1 - 1e-9)
    if counts == "free" and costs:  # what largest-first alone guarantees (Graham 1969), kept by every swap
        assert finish(costs, shares) <= (4 / 3) * max(bound, 1e-300) * 1.5
    check(costs, partition(costs, num_ranks, counts, tolerance=1e-7), num_ranks, counts)


@given(many_costs, st.lists(st.floats(0.1, 10), min_size=1, max_size=6), kinds)
@example([1.0, 1.0, 3.0, 12.0, 13.0], [1.0, 3.0, 0.25, 1.0], "free")  # the slowest was best left without any
def test_with_speeds_too(costs, speeds, counts):
    shares = partition(costs, len(speeds), counts, speeds)
    check(costs, shares, len(speeds), counts)
    assert finish(costs, shares, speeds) >= lower_bound(costs, len(speeds), counts, speeds) * (1 - 1e-9)


@given(few_costs, st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=3), st.booleans(), kinds)
def test_the_bound_is_below_the_optimum(costs, speeds, alike, counts):
    num_ranks, speeds = len(speeds), None if alike else speeds
    assert lower_bound(costs, num_ranks, counts, speeds) <= exact(costs, num_ranks, counts, speeds) * (1 + 1e-12)


def test_equal_counts_bound_sees_what_the_slowest_rank_has_to_hold():
    assert lower_bound([5.0] * 8, 4, "equal", [1.0, 1.0, 1.0, 0.5]) == pytest.approx(20.0)
    assert lower_bound([90.0] + [5.0] * 7, 4, "equal", [1.0, 1.0, 1.0, 0.5]) == pytest.approx(95.0)


@given(st.lists(st.integers(1, 60).map(float), min_size=12, max_size=30), st.integers(2, 5))
def test_equal_counts_bound_sees_the_fillers_of_the_heaviest(costs, num_ranks):
    costs = [*costs, 1000.0]
    least = len(costs) // num_ranks
    fillers = sum(sorted(costs)[: least - 1])
    assert lower_bound(costs, num_ranks, "equal") >= 1000.0 + fillers - 1e-6


@pytest.mark.parametrize(("n", "num_ranks"), [(6, 2), (9, 2), (7, 3), (9, 3), (8, 4)])
@pytest.mark.parametrize("counts", ["free", "equal"])
def test_the_bound_is_below_the_optimum_of_every_layout(n, num_ranks, counts):
    """Few heavy ones, or two kinds: where some ranks hold one more than others. All layouts are tried."""
    labels = np.indices((num_ranks,) * (n - 1)).reshape(n - 1, -1).T  # the last rollout stays on rank 0
    on = np.append(labels, np.zeros((len(labels), 1), dtype=int), axis=1)[:, None] == np.arange(num_ranks)[:, None]
    held = on.sum(axis=2)
    if counts == "equal":
        on = on[held.max(axis=1) - held.min(axis=1) <= 1]
    rng = np.random.default_rng(n * num_ranks)
    gaps = []
    for draw in range(60):
        of_kind = (rng.integers(0, 60, n), rng.choice([1, 2, 30, 31], n), rng.choice([0, 3, 5, 100], n))
        costs = of_kind[draw % 3].astype(float)
        optimum = (on @ costs).max(axis=1).min()
        assert lower_bound(costs, num_ranks, counts) <= optimum * (1 + 1e-12)
        gaps.append(optimum / max(lower_bound(costs, num_ranks, counts), 1e-9) - 1)
    assert np.mean(gaps) < 0.015


@pytest.mark.parametrize("heavy", [9, 17])
def test_equal_counts_bound_sees_the_company_of_heavy_ones_that_share_a_rank(heavy):
    """One rank holds two (three) of them, and six (five) light ones."""
    costs = np.repeat([30_000.0, 500.0], [heavy, 64 - heavy])
    each = heavy // 8 + 1
    assert lower_bound(costs, 8, "equal") == each * 30_000 + (8 - each) * 500
    assert finish(costs, partition(costs, 8, "equal")) == lower_bound(costs, 8, "equal")


@pytest.mark.parametrize(("n", "num_ranks"), [(4096, 128), (256, 8)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("light", [0.0, 1e-6])
@pytest.mark.parametrize("counts", ["free", "equal"])
def test_rollouts_that_weigh_nothing_do_not_spoil_the_partition(n, num_ranks, share, light, counts):
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(4096) - 0.5, 1, n), 64, 32768).round()
    lengths[rng.random(n) < share] = light
    shares = partition(lengths, num_ranks, counts)
    check(lengths, shares, num_ranks, counts)
    few = int((lengths > light).sum()) < 6 * num_ranks  # so few do not reach the bound
    assert finish(lengths, shares) <= lower_bound(lengths, num_ranks, counts) * (1.01 if few else 1 + 1.1e-4)
    assert max(map(len, shares)) <= 2 * n / num_ranks


def test_rotation_moves_the_heaviest_from_rank_to_rank():
    costs = [100.0, 1, 1, 1, 1, 1]
    holders = [
        next(rank for rank, share in enumerate(partition(costs, 4, rotation=step)) if 0 in share) for step in range(4)
    ]
    assert sorted(holders) == [0, 1, 2, 3]


def test_a_slow_rank_gets_less():
    shares = partition(np.ones(70), 3, speeds=[4.0, 2.0, 1.0])
    assert [share.size for share in shares] == [40, 20, 10]


def test_labels_stay_together():
    labels = np.repeat(np.arange(8), 4)
    for share in partition_together(np.random.default_rng(0).lognormal(8, 1, 32), labels, 4, "equal"):
        assert share.size == 8
        assert np.unique(labels[share]).size == 2


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
@pytest.mark.parametrize("num_ranks", [1, 3, 8, 64])
def test_adversaries(name, counts, num_ranks):
    costs = ADVERSARIES[name]
    check(costs, partition(costs, num_ranks, counts), num_ranks, counts)
    speeds = np.linspace(1.0, 100.0, num_ranks)
    check(costs, partition(costs, num_ranks, counts, speeds), num_ranks, counts)


def test_all_zero_is_spread_by_count():
    assert [share.size for share in partition(np.zeros(64), 8)] == [8] * 8


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("n", "num_ranks", "counts", "within"),
    [(256, 8, "free", 1e-4), (256, 8, "equal", 1e-4), (512, 32, "free", 1e-4), (64, 8, "free", 1e-3)],
)
def test_heavy_tails_reach_the_bound(seed, n, num_ranks, counts, within):
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(4096) - 0.5, 1, n), 64, 32768).round()
    shares = partition(lengths, num_ranks, counts)
    assert finish(lengths, shares) <= lower_bound(lengths, num_ranks, counts) * (1 + within)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, -1.0], "num_ranks": 2}, "finite and >= 0"),
        ({"costs": [1.0, np.nan], "num_ranks": 2}, "finite and >= 0"),
        ({"costs": [[1.0]], "num_ranks": 2}, "one-dimensional"),
        ({"costs": [1.0], "num_ranks": 0}, "num_ranks"),
        ({"costs": [1.0], "num_ranks": 2, "counts": "same"}, "counts"),
        ({"costs": [1.0], "num_ranks": 2, "speeds": [1.0]}, "one number per rank"),
        ({"costs": [1.0], "num_ranks": 2, "speeds": [1.0, 0.0]}, "finite and > 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition_function(**arguments)
    with pytest.raises(ValueError, match=message):
        lower_bound(**arguments)


def test_equal_counts_survive_the_shuffles():
    work = np.array([100.0] * 10 + [1, 1, 1, 24, 30, 49, 50, 51, 52, 56, 57, 79])
    assert sorted(len(share) for share in partition(work, 3, "equal")) == [7, 7, 8]


@given(st.integers(2, 5), st.integers(0, 40), st.integers(0, 2**32))
def test_equal_counts_are_equal_where_the_search_is_long(num_ranks, extra, seed):
    rng = np.random.default_rng(seed)
    work = np.where(rng.random(num_ranks + extra) < 0.4, 100, rng.integers(0, 100, num_ranks + extra)).astype(float)
    held = [len(share) for share in partition(work, num_ranks, "equal")]
    assert max(held) - min(held) <= 1
    assert sum(held) == work.size
