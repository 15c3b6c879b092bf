"""Shared prefixes in the core: what a batch's loads are, whoever shares, and however it was planned."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore


def rollout(prompt: int, answer: int, group: str | None = None, **more: Any) -> sb.Rollout:
    prefix = prompt if group is not None else 0
    return sb.Rollout(
        tokens={"input_ids": torch.zeros(prompt + answer, dtype=torch.int64)},
        **{"group_id": group, "prefix": prefix} | more,
    )


def core_of(groups: Mapping[str, Any] = MappingProxyType({}), **knobs: Any) -> BalancerCore:
    usual = {"dp_size": 2, "batch_size": 4, "window": 4, "cost": sb.cost.TokenCost()}
    return BalancerCore(sb.BalancerConfig(**usual | knobs, groups={"share_prefixes": True, **groups}))


def batch_of(core: BalancerCore, *rollouts: sb.Rollout) -> sb.Batch:
    for one in rollouts:
        core.add(one, 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    return batch


def groups_of(batch: sb.Batch) -> list[list[str | None]]:
    return sorted([one.group_id for one in rank.rollouts] for rank in batch.ranks)


TWO_GROUPS = [rollout(100, answer, group) for answer, group in ((10, "a"), (20, "b"), (30, "a"), (40, "b"))]
"""In arrival order; each group is 100 of prompt, and 40 or 60."""


@pytest.mark.parametrize("groups", [{}, {"size": 2}, {"size": 2, "keep": "same_rank"}, {"size": 2, "keep": "free"}])
def test_siblings_of_a_micro_batch_pay_their_prefix_once(groups: dict[str, Any]) -> None:
    batch = batch_of(core_of(groups), *TWO_GROUPS)
    assert groups_of(batch) == [["a", "a"], ["b", "b"]]
    assert sorted(batch.loads) == [140.0, 160.0]
    assert batch.finish == 160.0
    assert batch.lower_bound == (160.0 if groups.get("keep") == "same_rank" else 150.0)


def test_of_siblings_that_disagree_the_least_prefix_counts() -> None:
    a = [rollout(100, 10, "a"), rollout(100, 30, "a", prefix=60), rollout(100, 50, "a", prefix=0)]
    batch = batch_of(core_of(dp_size=1, batch_size=3, window=3), *a)
    assert batch.loads == (110.0 + 130.0 - 60.0 + 150.0,)


class Bent(sb.cost.CostModel):
    """Long rollouts cost less than their prompts, and prompts of 7 tokens have no price."""

    padded = False

    def __call__(self, lengths: Any) -> Any:
        lengths = np.asarray(lengths)
        return np.where(lengths == 7, np.nan, np.where(lengths < 50, 1000.0, 10.0))


@pytest.mark.parametrize(("prompt", "load"), [(40, 10.0), (7, 20.0)])
def test_a_prefix_costs_nothing_less_than_zero_and_no_more_than_the_whole(prompt: int, load: float) -> None:
    core = core_of(dp_size=1, batch_size=2, window=2, cost=Bent())
    assert batch_of(core, rollout(prompt, 100, "a"), rollout(prompt, 120, "a")).loads == (load,)


def test_loads_after_a_move_between_ranks_count_a_prefix_in_every_micro_batch() -> None:
    core = core_of()
    batch = batch_of(core, *TWO_GROUPS)
    first, second = batch.ranks
    moved = core.state.pricing.worked_on(batch, [(first, second), ()])
    assert moved.loads == pytest.approx((300.0, 0.0))
    as_planned = core.state.pricing.worked_on(batch, [(first,), (second,)])
    assert as_planned.loads == batch.loads


@pytest.mark.parametrize(("share", "goes"), [(True, {"b", "c"}), (False, {"a", "b"})])
def test_the_window_is_chosen_from_by_what_groups_cost_together(share: bool, goes: set[str]) -> None:
    """A long prompt on both ranks makes a step even; paid once, it is an outlier that waits for another."""
    core = core_of({"size": 2, "share_prefixes": share}, batch_size=4, window=8)
    groups = [("a", 1000, 10), ("b", 10, 200), ("c", 10, 200), ("d", 10, 200)]
    batch = batch_of(core, *(rollout(prompt, answer, name) for name, prompt, answer in groups for _ in range(2)))
    assert {one.group_id for one in batch.rollouts} == goes
