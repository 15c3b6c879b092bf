"""A swap with the window only ever helps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning.cost_order import CostOrder
from stream_balancer.planning.swaps import swap_with_waiting

costs_lists = st.lists(
    st.sampled_from([0.04, 0.05, 0.06, 0.5, 1.0, 2.0]) | st.floats(0.01, 3.0), min_size=9, max_size=40
)


def idle(costs: np.ndarray, shares: list[list[np.ndarray]], speeds: np.ndarray | None = None) -> float:
    loads = np.array([sum(float(costs[one].sum()) for one in share) for share in shares])
    rate = np.ones(len(shares)) if speeds is None else speeds
    return 1.0 - float(loads.sum()) / float(rate.sum()) / float((loads / rate).max())


def test_several_equal_outliers_do_not_make_it_worse() -> None:
    """Seven outliers on four ranks, so three ranks take two: bringing those down starves the rest."""
    costs = np.array([1.0] * 7 + [0.045] * 53)
    shares = [[np.array(s)] for s in ([0, 1], [2, 3], [4, 5], [6, *range(7, 20)])]
    fixed = np.zeros(60, dtype=bool)
    after = swap_with_waiting(costs, shares, fixed, CostOrder(costs))
    assert idle(costs, after) <= idle(costs, shares)


def test_a_slow_rank_is_brought_to_its_speed() -> None:
    costs = np.array([3.0, 3.0, 1.5, 1.5, 1.0, 2.0])
    shares = [[np.array([0, 2])], [np.array([1, 3])]]
    after = swap_with_waiting(costs, shares, np.zeros(6, dtype=bool), CostOrder(costs), np.array([1.0, 0.5]))
    assert idle(costs, after, np.array([1.0, 0.5])) < idle(costs, shares, np.array([1.0, 0.5]))
    assert float(costs[after[1][0]].sum()) < 4.5


def test_what_comes_in_fits_its_micro_batch() -> None:
    """The best swap by work would break the cap; the next best does not."""
    costs = np.array([5.0, 5.0, 5.0, 1.0, 4.9, 4.0])
    lengths = np.array([5, 5, 5, 1, 9, 4])
    shares = [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])]]
    after = swap_with_waiting(costs, shares, np.zeros(6, dtype=bool), CostOrder(costs), None, lengths, max_tokens=5)
    assert [one.tolist() for one in after[1]] == [[2], [5]]


@given(costs_lists, st.integers(2, 4), st.integers(0, 2**16), st.booleans(), st.booleans())
def test_idle_never_grows_and_nothing_is_lost(
    values: list[float], num_ranks: int, seed: int, slow: bool, capped: bool
) -> None:
    costs = np.array(values)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(costs))
    lengths = rng.integers(1, 10, len(costs))
    chosen = order[: 2 * num_ranks]
    shares = [np.split(chosen[rank::num_ranks], 2 if rank % 2 else 1) for rank in range(num_ranks)]
    shares = [[np.sort(one) for one in share] for share in shares]
    cap = max(int(lengths[one].sum()) for share in shares for one in share) if capped else None
    speeds = np.linspace(0.5, 1.0, num_ranks) if slow else None
    fixed = np.zeros(len(costs), dtype=bool)
    fixed[chosen[0]] = True
    after = swap_with_waiting(costs, shares, fixed, CostOrder(costs), speeds, lengths, cap)
    assert idle(costs, after, speeds) <= idle(costs, shares, speeds) + 1e-9
    assert [[len(one) for one in share] for share in after] == [[len(one) for one in share] for share in shares]
    assert cap is None or max(int(lengths[one].sum()) for share in after for one in share) <= cap
    taken = np.concatenate([one for share in after for one in share]).tolist()
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(order.tolist())
    assert int(chosen[0]) in taken
