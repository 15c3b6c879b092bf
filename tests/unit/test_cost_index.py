"""The index by cost: the same order as a list that is sorted anew, whatever comes, leaves or is priced anew; and the
planner's choice from it is what its rules say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from planning_spec import best_swap, chosen

from stream_balancer.core.columns import Columns
from stream_balancer.core.cost_index import CostIndex
from stream_balancer.planning.cost_order import CostOrder
from stream_balancer.planning.outliers import Candidates, choose
from stream_balancer.planning.swaps import swap_with_waiting

# few, so that many are equal; and the ends of what a cost may be
COSTS = st.sampled_from([0.0, -0.0, 5e-324, 1.0, 1.0, 2.0, 3.0, 3.0, 7.5, 1e100]) | st.floats(0.0, 1e6)


class IndexAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = CostIndex()
        self.costs: list[float] = []
        self.num_added = 0

    @rule(costs=st.lists(COSTS, min_size=1, max_size=12))
    def come(self, costs: list[float]) -> None:
        for cost in costs:
            self.index.add(cost)
        self.costs += costs
        self.num_added += len(costs)

    @rule(costs=st.integers(60, 140))
    def many_come(self, costs: int) -> None:
        self.come([float(number % 17) for number in range(costs)])

    @rule(places=st.lists(st.floats(0.0, 1.0, exclude_max=True), max_size=6))
    def leave(self, places: list[float]) -> None:
        keep = np.ones(len(self.costs), dtype=bool)
        keep[[int(place * len(self.costs)) for place in places if self.costs]] = False
        self.index.remove(keep)
        self.costs = [cost for cost, stays in zip(self.costs, keep, strict=True) if stays]

    @rule(oldest=st.integers(0, 150))
    def the_oldest_leave(self, oldest: int) -> None:
        self.index.remove(np.arange(len(self.costs)) >= oldest)
        self.costs = self.costs[oldest:]

    @rule(cost=COSTS, power=st.sampled_from([0.0, 0.5, 2.0]))
    def cost_otherwise(self, cost: float, power: float) -> None:
        self.costs = [min(one, 1e40) ** power * min(cost, 1e6) for one in self.costs]
        self.index.reprice(np.array(self.costs))

    @rule()
    def look(self) -> None:
        order = sorted(range(len(self.costs)), key=lambda row: (self.costs[row], row))
        assert self.index.ascending().tolist() == order

    @rule(data=st.data())
    def look_at_some(self, data: st.DataObject) -> None:
        keep = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(self.costs), max_size=len(self.costs))), dtype=bool
        )
        some = self.index.among(keep)
        costs = [cost for cost, one in zip(self.costs, keep, strict=True) if one]
        assert some.costs.tolist() == costs
        assert some.ascending().tolist() == sorted(range(len(costs)), key=lambda row: (costs[row], row))

    @invariant()
    def holds(self) -> None:
        assert self.index.costs.tolist() == self.costs
        assert self.index.heaviest == max(self.costs, default=0.0)
        assert self.index.num_added == self.num_added
        self.index.check()


TestIndexAgainstList = IndexAgainstList.TestCase
TestIndexAgainstList.settings = settings(max_examples=40, stateful_step_count=25)


@given(st.lists(st.tuples(st.integers(0, 90), st.lists(st.integers(0, 200), max_size=8)), max_size=12))
def test_columns_hold_what_a_list_of_rows_would(moves: list[tuple[int, list[int]]]) -> None:
    columns, model = Columns(7, -1.0), list[tuple[int, float]]()
    for come, leave in moves:
        for number in range(come):
            row = columns.new_row()
            if number % 3:  # the others hold the columns' own values, whatever was there before
                columns.arrays[0][row], columns.arrays[1][row] = number, number / 2
            model.append((number, number / 2) if number % 3 else (7, -1.0))
        keep = np.ones(len(model), dtype=bool)
        keep[[row for row in leave if row < len(model)]] = False
        columns.remove(keep)
        model = [one for one, stays in zip(model, keep, strict=True) if stays]
        assert len(columns) == len(model)
        assert list(zip(columns[0].tolist(), columns[1].tolist(), strict=True)) == model


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
        order=None if grouped else data.draw(st.sampled_from([None, _index_of(costs)])),
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
        units = Candidates(costs, costs, must, remaining, min(more, int((~must).sum())), ranks, order=_index_of(costs))
        assert set(np.flatnonzero(choose(units)).tolist()) == chosen(units), seed


def test_the_forecast_reads_down_to_the_arrivals() -> None:
    """The heaviest eight are hardly counted, for they may be gone by then; what is to arrive is lighter, and enough."""
    costs = np.array([5.0, 5.0, 5.0, 9.0, 5.0, *[8.0] * 12, 12.5, 7.0])
    remaining = np.array([30] * 18 + [31])
    units = Candidates(costs, costs, costs < 0.0, remaining, num_more=4, ranks=2.0, order=_index_of(costs))
    assert np.flatnonzero(choose(units)).tolist() == [0, 1, 2, 3]
    assert chosen(units) == {0, 1, 2, 3}


def _index_of(costs: np.ndarray) -> CostIndex:
    index = CostIndex()
    for cost in costs.tolist():
        index.add(cost)
    return index


@given(st.data())
def test_a_swap_takes_the_nearest_to_the_gap(data: st.DataObject) -> None:
    size, num_ranks = data.draw(st.integers(9, 40)), data.draw(st.integers(2, 4))
    some = st.sampled_from([0.05, 0.5, 1.0, 1.0, 2.0, 4.0]) | st.floats(0.01, 3.0)
    costs = np.array(data.draw(st.lists(some, min_size=size, max_size=size)))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(size)
    shares = [np.sort(order[: 2 * num_ranks][rank::num_ranks]) for rank in range(num_ranks)]
    fixed = np.zeros(size, dtype=bool)
    fixed[order[0]] = True
    after = swap_with_waiting(costs, [[one] for one in shares], fixed, CostOrder(costs))
    if [one[0].tolist() for one in after] == [one.tolist() for one in shares]:
        return  # even already, or no better
    ranks, loads = [one.tolist() for one in shares], [float(costs[one].sum()) for one in shares]
    level = max(sum(loads) / num_ranks, float(costs[order[: 2 * num_ranks]].max()))
    candidates = sorted((float(costs[i]), int(i)) for i in order[2 * num_ranks :] if costs[i] <= level)
    by_load = sorted(range(num_ranks), key=loads.__getitem__)
    for rank in reversed(by_load):
        if loads[rank] > level:
            loads[rank] = best_swap(costs, ranks[rank], fixed, candidates, loads[rank], level)
    highest = max(loads)
    for rank in sorted(by_load, key=loads.__getitem__):  # of equal ones the one that was earlier before
        if loads[rank] * 1.003 < highest:
            loads[rank] = best_swap(costs, ranks[rank], fixed, candidates, loads[rank], highest)
    assert [one[0].tolist() for one in after] == [sorted(one) for one in ranks]
