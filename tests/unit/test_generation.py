"""Simulated generation: begins in mid-run, every row once, slots never overbooked."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from traces import trace_of

from stream_balancer.tools.generation import issue_order, seconds_per_rollout

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from peers import finish_times


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 99))
def test_groups_are_issued_whole_in_some_order(groups: list[int], seed: int) -> None:
    trace = trace_of([1] * len(groups), groups=groups)
    order = issue_order(trace, seed)
    assert sorted(order.tolist()) == list(range(len(groups)))
    issued = [groups[row] for row in order.tolist()]
    assert sum(a != b for a, b in pairwise(issued)) == len(set(groups)) - 1
    rows = {g: [r for r in order.tolist() if groups[r] == g] for g in groups}
    assert all(found == sorted(found) for found in rows.values())


class TestByHand:
    def test_one_slot(self) -> None:
        """The last one of the round before has just begun; it is not generated again at the end of this one."""
        trace = trace_of([4, 1, 2, 5], groups=[0, 0, 0, 0])
        assert finish_times(trace, slots=1, tokens_per_second=2.0).tolist() == [4.5, 5.0, 6.0, 2.5]

    def test_recorded_arrivals_are_used_from_the_first(self) -> None:
        trace = trace_of([9, 1, 1], arrival=[100.0, 101.5, 103.0])
        assert finish_times(trace, slots=1).tolist() == [0.0, 1.5, 3.0]
        assert seconds_per_rollout(trace, 1, 1.0) == 1.0


class TestEveryStream:
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 9))
    def test_every_row_once_and_slots_never_overbooked(self, output: list[int], slots: int, seed: int) -> None:
        trace = trace_of(output, prompt=1)
        finish = finish_times(trace, slots, tokens_per_second=1.0, seed=seed)
        assert (finish >= 0).all()
        begin = finish - trace.output_tokens
        for moment in np.unique(begin):
            assert np.count_nonzero((begin <= moment) & (finish > moment + 1e-9)) <= slots
        assert finish.max() <= sum(output) / min(slots, len(output)) + 2 * max(output)
        assert finish.tolist() == finish_times(trace, slots, tokens_per_second=1.0, seed=seed).tolist()
