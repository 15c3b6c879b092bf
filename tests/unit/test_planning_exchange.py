"""The exchange with the window only ever helps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning.exchange import exchange_with_waiting

costs_lists = st.lists(
    st.sampled_from([0.04, 0.05, 0.06, 0.5, 1.0, 2.0]) | st.floats(0.01, 3.0), min_size=9, max_size=40
)


def idle(costs: np.ndarray, shares: list[np.ndarray]) -> float:
    loads = [float(costs[share].sum()) for share in shares]
    return 1.0 - sum(loads) / len(loads) / max(loads)


def test_several_equal_outliers_do_not_make_it_worse() -> None:
    """Seven outliers on four ranks, so three ranks take two: bringing those down starves the rest."""
    costs = np.array([1.0] * 7 + [0.045] * 53)
    shares = [np.array(s) for s in ([0, 1], [2, 3], [4, 5], [6, *range(7, 20)])]
    fixed = np.zeros(60, dtype=bool)
    after = exchange_with_waiting(costs, shares, fixed, np.arange(20, 60))
    assert idle(costs, after) <= idle(costs, shares)


@given(costs_lists, st.integers(2, 4), st.integers(0, 2**16))
def test_idle_never_grows_and_nothing_is_lost(values: list[float], num_ranks: int, seed: int) -> None:
    costs = np.array(values)
    order = np.random.default_rng(seed).permutation(len(costs))
    chosen, pool = order[: 2 * num_ranks], np.sort(order[2 * num_ranks :])
    shares = [np.sort(chosen[rank::num_ranks]) for rank in range(num_ranks)]
    fixed = np.zeros(len(costs), dtype=bool)
    fixed[chosen[0]] = True
    after = exchange_with_waiting(costs, shares, fixed, pool)
    assert idle(costs, after) <= idle(costs, shares) + 1e-9
    assert [len(share) for share in after] == [len(share) for share in shares]
    taken = np.concatenate(after).tolist()
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(order.tolist())
    assert int(chosen[0]) in taken
