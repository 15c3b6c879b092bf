"""A swap with the window only ever helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planning_selection import Stream

from stream_balancer.planning import Plan, PlanKnobs, Waiting, plan_batch

# -- groups -----------------------------------------------------------------------------------------------------------


def plan_groups(
    costs_of: list[list[float]], num_ranks: int, batch_size: int, *, max_skips: int = 8, **more: Any
) -> tuple[set[int], Plan]:
    """-> (the groups that go, the plan). ``more``: ``must``, ``incomplete``: groups; ``tokens``; and knobs."""
    costs = np.concatenate(costs_of)
    labels = np.repeat(np.arange(len(costs_of)), [len(group) for group in costs_of])
    of = {name: np.isin(labels, more.pop(name, [])) for name in ("must", "incomplete")}
    waiting = replace(
        Waiting.of(costs), groups=labels, skips=np.where(of["must"], max_skips, 0), group_complete=~of["incomplete"]
    )
    waiting = replace(waiting, lengths=np.array(more.pop("tokens", waiting.lengths)))
    more = {"groups": "same_batch", **more}
    knobs = PlanKnobs(num_ranks, batch_size, max_skips, group_size=max(map(len, costs_of)), **more)
    plan = plan_batch(waiting, knobs, num_rollouts=int((~of["incomplete"]).sum()), step=0)
    return set(labels[np.concatenate([one for share in plan.ranks for one in share])].tolist()), plan


UNEVEN = [[900.0, 100.0], [500.0, 100.0], [900.0, 110.0], [700.0, 100.0], [520.0, 90.0]]


def test_a_group_is_swapped_for_a_waiting_one_that_makes_the_step_even() -> None:
    went, plan = plan_groups(UNEVEN, 2, 4)
    assert went != {0, 1}
    assert plan.imbalance < 0.01


def test_an_incomplete_group_does_not_come_in() -> None:
    went, _ = plan_groups(UNEVEN, 2, 4, incomplete=[2, 3, 4])
    assert went == {0, 1}
    sums = [800.0, 650.0, 850.0, 650.0, 750.0, 600.0, 500.0, 700.0]  # of groups that stay on one rank each
    whole: dict[str, Any] = {"groups": "same_rank", "incomplete": [5]}
    assert 5 in plan_groups([[0.6 * one, 0.4 * one] for one in sums], 2, 8, groups="same_rank")[0]
    assert 5 not in plan_groups([[0.6 * one, 0.4 * one] for one in sums], 2, 8, **whole)[0]


ALMOST = [[400.0, 250.0], [400.0, 150.0], [400.0, 100.0], [600.0, 150.0]]
"""The third group instead of the first makes the step even."""


def test_no_group_comes_in_that_costs_ranks_in_step_a_micro_batch_more() -> None:
    in_step: dict[str, Any] = {"sync": "micro_batch", "max_tokens_per_micro_batch": 100}
    assert plan_groups(ALMOST, 2, 4, tokens=[50] * 8, **in_step)[0] == {1, 2}
    assert plan_groups(ALMOST, 2, 4, tokens=[50, 50, 50, 50, 100, 50, 50, 50], **in_step)[0] == {0, 1}


@pytest.mark.parametrize("how", ["same_batch", "same_rank"])
@settings(max_examples=40)
@given(st.data())
def test_swaps_keep_groups_whole_and_their_number(how: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=16), "sizes")
    costs = np.array(data.draw(st.lists(st.floats(0.01, 100.0), min_size=sum(sizes), max_size=sum(sizes)), "costs"))
    groups = [one.tolist() for one in np.split(costs, np.cumsum(sizes)[:-1])]
    must = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2), "must")
    num_ranks, counts = data.draw(st.integers(1, 3), "ranks"), data.draw(st.sampled_from(["free", "equal"]), "counts")
    cap = data.draw(st.sampled_from([None, 150]), "cap")
    more: dict[str, Any] = {"groups": how, "counts": counts, "max_tokens_per_micro_batch": cap, "must": list(must)}
    if data.draw(st.booleans(), "slow"):
        more["speeds"] = np.linspace(0.5, 1.0, num_ranks)
    went, plan = plan_groups(groups, num_ranks, 6, **more)
    picked = np.sort(np.concatenate([one for share in plan.ranks for one in share]))
    assert picked.size == sum(sizes[group] for group in went) <= 6  # every one of them once
    assert picked.size > min(6, sum(sizes)) - max(sizes)
    assert must <= went
    if counts == "equal" and how == "same_batch":
        held = [sum(map(len, share)) for share in plan.ranks]
        assert max(held) - min(held) <= 1
    if how == "same_rank":
        homes = [set(np.repeat(np.arange(len(sizes)), sizes)[np.concatenate(share)]) for share in plan.ranks if share]
        assert sum(map(len, homes)) == len(went)


def test_a_stream_of_groups_idles_little() -> None:
    """Groups of 8, 32 rollouts on 8 ranks, quadratic cost: without swaps 0.8 %."""
    rng, stream, mean, finish = np.random.default_rng(8), Stream(), 0.0, 0.0
    knobs = PlanKnobs(num_ranks=8, batch_size=32, max_skips=8, groups="same_batch", group_size=8)
    for step in range(20):
        while stream.costs.size < 64:
            lengths = rng.choice(np.exp(8.0 + 0.4 * rng.standard_normal() + 0.4 * rng.standard_normal(3)), 8)
            stream.come(lengths * lengths + 24_576.0 * lengths, grouped=True)
        plan = plan_batch(stream.columns, knobs, num_rollouts=64, step=step)
        mean, finish = mean + plan.loads.mean(), finish + plan.loads.max()
        stream.go(np.concatenate([one for share in plan.ranks for one in share]), 8)
    assert 1.0 - mean / finish < 0.005
