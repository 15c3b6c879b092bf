"""The planner's choice from the order by cost is what its rules say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_spec import chosen

from stream_balancer.planning.cost_order import CostOrder
from stream_balancer.planning.outliers import Candidates, choose


@given(st.data())
def test_the_choice_is_what_the_rules_say(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    tails = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 5.0, 8.0, 13.0, 40.0, 90.0, 200.0, 1000.0])
    costs = np.array(data.draw(st.lists(tails, min_size=size, max_size=size)))
    grouped = data.draw(st.booleans())  # then the heaviest part is less than the whole
    must = np.array(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))) == 0
    units = Candidates(
        costs=costs,
        parts=np.ceil(costs * 0.6) if grouped else costs,
        must=must,
        remaining=np.array(data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)), dtype=np.int64),
        num_more=data.draw(st.integers(0, int((~must).sum()))),
        ranks=data.draw(st.sampled_from([1.0, 2.0, 3.0, 4.5, 8.0])),
        filler=data.draw(st.sampled_from([0.0, 0.0, 4.0])),
        order=None if grouped else data.draw(st.sampled_from([None, CostOrder(costs)])),
    )
    assert set(np.flatnonzero(choose(units)).tolist()) == chosen(units)


@pytest.mark.parametrize("kinds", [3, 6, 40])
def test_outliers_and_their_fillers_are_chosen_by_the_rules(kinds: int) -> None:
    """Windows of every width with a few outliers in them, and few different costs: reserves, levels and ties."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        more, ranks = int(rng.integers(2, 14)), float(rng.choice([2.0, 3.0, 4.0]))
        lengths = np.ceil(rng.lognormal(3.0, 1.0, kinds))
        costs = rng.choice(lengths, int(rng.integers(more + 2, 6 * more + 4)))
        outliers = rng.choice(costs.size, int(rng.integers(1, 4)), replace=False)
        costs[outliers] = np.ceil(costs.mean() * more / ranks * rng.uniform(1.0, 2.0))
        remaining = np.sort(rng.integers(0, rng.choice([6, 60]), costs.size))
        must = np.zeros(costs.size, dtype=np.bool_)
        must[rng.choice(costs.size, int(rng.integers(0, 3)))] = True
        must[outliers[:1]] |= rng.random() < 0.3  # then their batch goes
        units = Candidates(costs, costs, must, remaining, min(more, int((~must).sum())), ranks, order=CostOrder(costs))
        assert set(np.flatnonzero(choose(units)).tolist()) == chosen(units), seed


def test_the_forecast_reads_down_to_the_arrivals() -> None:
    """The heaviest eight are hardly counted, for they may be gone by then; what is to arrive is lighter, and enough."""
    costs = np.array([5.0, 5.0, 5.0, 9.0, 5.0, *[8.0] * 12, 12.5, 7.0])
    remaining = np.array([30] * 18 + [31])
    units = Candidates(costs, costs, costs < 0.0, remaining, num_more=4, ranks=2.0, order=CostOrder(costs))
    assert np.flatnonzero(choose(units)).tolist() == [0, 1, 2, 3]
    assert chosen(units) == {0, 1, 2, 3}
