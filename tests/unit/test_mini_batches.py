"""A step in mini-batches: each is balanced over the ranks by itself, and divides by what is in it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import polled
from hypothesis import given
from hypothesis import strategies as st
from invariants import verify
from test_executions import (
    from_the_journal,
)

import stream_balancer as sb
from stream_balancer.core.executions import denominators_of, execution_of
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning import PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.arrays import positions_in
from stream_balancer.planning.mini_batches import in_mini_batches
from stream_balancer.rollouts import RankBatch, Rollout
from stream_balancer.testing import make_rollout


def of_ranks(batch: sb.Batch) -> list[tuple[RankBatch, ...]]:
    """[mini_batch][rank]"""
    return list(zip(*(one.mini_batches for one in batch.ranks), strict=True))


def real(parts: tuple[RankBatch, ...]) -> list[Rollout]:
    return [r for part in parts for r in part.rollouts if not r.is_padding]


# -- what holds for every cut ------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[sb.BalancerConfig, list[Rollout]]:
    dp_size, mini_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    group_size = draw(st.sampled_from([None, None, 2, 3]))
    knobs: dict[str, Any] = {
        "dp_size": dp_size,
        "mini_batches": mini_batches,
        "batch_size": dp_size * mini_batches * (group_size or 1) * draw(st.integers(1, 3)),
        "groups": {"size": group_size},
        "policy": draw(st.sampled_from(["window", "window", "fifo", "round_robin"])),
        "equal_rollouts": draw(st.sampled_from([False, False, True])),
    }
    if draw(st.booleans()):
        knobs["sync"] = draw(st.sampled_from(["step", "micro_batch"]))
        equal_number = knobs["sync"] == "micro_batch" or draw(st.booleans())
        knobs["micro_batches"] = {"max_tokens": 100, "equal_number": equal_number}
        knobs["cost"] = draw(st.sampled_from([sb.cost.TokenCost(), sb.cost.PaddedCost()]))
    config = sb.BalancerConfig(**knobs)
    rng = random.Random(draw(st.integers(0, 2**32)))
    rollouts = []
    for number in range(draw(st.integers(1, config.batch_size))):
        group = None if group_size is None else f"g{number // group_size}"
        execution = f"e{rng.randrange(6)}" if group is None and draw(st.integers(0, 3)) == 0 else None
        length = min(int(rng.lognormvariate(2.5, 1.2)) + 1, 100)
        tokens = {"input_ids": torch.arange(length), "loss_mask": torch.arange(length) % 3 > 0}
        rollouts.append(Rollout(tokens=tokens, rollout_id=f"r{number}", group_id=group, execution_id=execution))
    return config, rollouts


@given(steps())
def test_what_holds_for_every_step(given: tuple[sb.BalancerConfig, list[Rollout]]) -> None:
    config, rollouts = given
    core = BalancerCore(config)
    for rollout in rollouts:
        core.add(rollout, 0.0)
    core.end()
    batch = polled(core)
    verify(core)
    pieces = of_ranks(batch)  # as many on every rank
    assert 1 <= len(pieces) <= config.mini_batches
    if config.groups.size is None:
        indivisible = len({execution_of(r) for r in real(batch.ranks)})
        assert len(pieces) == max(min(config.mini_batches, batch.num_rollouts // config.dp_size, indivisible), 1)
        if indivisible == batch.num_rollouts:
            assert max(len(real(parts)) for parts in pieces) - min(len(real(parts)) for parts in pieces) <= 1
    assert [mb for one in batch.ranks for part in one.mini_batches for mb in part.micro_batches] == [
        mb for one in batch.ranks for mb in one.micro_batches
    ]
    assert Counter(r.rollout_id for parts in pieces for r in real(parts)) == Counter(
        r.rollout_id for r in real(batch.ranks)
    )
    assert max(Counter(r.rollout_id for parts in pieces for r in real(parts)).values()) == 1
    copies = [r.rollout_id for r in batch.rollouts if r.is_padding]
    assert len({*copies}) == len(copies), "padding copies have names of their own"
    for parts in pieces:
        assert real(parts)
        _check_piece(config, parts)
    for name in ("rollouts", "tokens", "loss_tokens", "executions"):
        total = sum(getattr(parts[0], f"global_num_{name}") for parts in pieces)
        assert total == getattr(batch.ranks[0], f"global_num_{name}")
    assert [sum(part.load for part in one.mini_batches) for one in batch.ranks] == pytest.approx(batch.loads)
    by_pieces = sum(max(part.load for part in parts) for parts in pieces)
    if config.sync == "step" and not config.cost.padded:
        assert batch.finish == pytest.approx(by_pieces)
    else:  # ranks wait for each other more often, or pad
        assert batch.finish >= by_pieces * (1 - 1e-9)
    where: dict[Any, set[tuple[int, int]]] = {}
    for place, parts in enumerate(pieces):
        for part in parts:
            for r in part.rollouts:
                if not r.is_padding:
                    where.setdefault(("execution", execution_of(r)), set()).add((place, 0))
                    where.setdefault(("group", r.group_id or r.rollout_id), set()).add((place, part.rank))
    for (kind, _), places in where.items():
        if kind == "execution":
            assert len(places) == 1
    sizes = [one.mini_batch_sizes for one in batch.ranks]
    assert [one.mini_batch_sizes for one in from_the_journal(batch).ranks] == sizes


def _check_piece(config: sb.BalancerConfig, parts: tuple[RankBatch, ...]) -> None:
    numbers = {len(part.micro_batches) for part in parts}
    assert min(numbers) >= 1
    assert len(numbers) == 1 or not config.micro_batches.equal_number
    for part in parts:
        assert (part.step, part.dp_size, part.mini_batch_sizes) == (0, config.dp_size, ())
        found = part.global_num_rollouts, part.global_num_tokens, part.global_num_loss_tokens
        assert (*found, part.global_num_executions) == denominators_of(real(parts))
        for micro_batch in part.micro_batches:
            rows = len(micro_batch.lengths) * max(micro_batch.lengths)
            tokens = rows if config.cost.padded else micro_batch.num_tokens
            assert tokens <= (config.micro_batches.max_tokens or tokens)
    if config.equal_rollouts:
        counts = [sum(not r.is_padding for r in part.rollouts) for part in parts]
        assert max(counts) - min(counts) <= 1


# -- balance -----------------------------------------------------------------------------------------------------------


def chosen(rng: np.random.Generator, knobs: PlanKnobs) -> tuple[Waiting, Any]:
    """A step that the window chose, and its plan in one piece."""
    waiting = Waiting.of(np.minimum(rng.lognormal(6, 1, 2 * knobs.batch_size), 16384).round() + 1)
    whole = replace(knobs, mini_batches=1)
    rows = positions_in(plan_batch(waiting, whole, num_rollouts=knobs.batch_size).ranks)
    step_of = waiting.among(np.sort(rows))
    return step_of, plan_batch(step_of, whole, num_rollouts=knobs.batch_size)


@pytest.mark.parametrize("mini_batches", [2, 4])
def test_outliers_are_gathered_so_that_the_other_mini_batches_need_not_wait(mini_batches: int) -> None:
    knobs = PlanKnobs(dp_size=8, batch_size=128, max_skips=16, mini_batches=mini_batches)
    rng = np.random.default_rng(11)
    idle = {True: 0.0, False: 0.0}
    for _ in range(5):
        step_of, plan = chosen(rng, knobs)
        for in_order in idle:
            cut = in_mini_batches(step_of, knobs, plan, 0, in_order=in_order)
            finish = sum(float(one.loads.max()) for one in cut.mini_batches)
            assert cut.finish == pytest.approx(finish)
            idle[in_order] += (1 - step_of.costs.sum() / (knobs.dp_size * finish)) / 5
    assert idle[False] < idle[True] / 4, idle


# -- what a rank does with them ----------------------------------------------------------------------------------------


def a_batch(lengths: list[int], **knobs: Any) -> sb.Batch:
    core = BalancerCore(sb.BalancerConfig(**{"dp_size": 2, "batch_size": len(lengths), **knobs}))
    for number, length in enumerate(lengths):
        core.add(make_rollout(length, f"r{number}"), 0.0)
    core.end()
    batch = polled(core)
    return batch


def test_every_epoch_has_every_mini_batch_and_begins_with_another() -> None:
    batch = a_batch([9, 8, 7, 6, 5, 4, 3, 2], mini_batches=4)
    orders = []
    for rank_batch in batch.ranks:
        names = [part.micro_batches[0].rollouts[0].rollout_id for part in rank_batch.mini_batches]
        order = [names.index(part.micro_batches[0].rollouts[0].rollout_id) for part in rank_batch.epochs(5)]
        orders.append([order[start : start + 4] for start in range(0, 20, 4)])
    assert orders[0] == orders[1]
    assert [sorted(epoch) for epoch in orders[0]] == [[0, 1, 2, 3]] * 5
    assert [epoch[0] for epoch in orders[0]] == [0, 1, 2, 3, 0]
    with pytest.raises(ValueError, match=r"epochs\(\) takes a number of epochs >= 1, not 0"):
        batch.ranks[0].epochs(0)


@pytest.mark.parametrize("dp_size", [1, 3])
def test_planned_again_for_other_ranks_each_keeps_its_rollouts_and_denominators(dp_size: int) -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=12, mini_batches=4, capacity=48))
    for number in range(24):
        core.add(make_rollout(1 + number * number % 50), 0.0)
    before = polled(core)
    core.nack(before.step)
    core.reconfigure(core.config.replace(dp_size=dp_size))
    after = polled(core)
    assert len(after.ranks) == dp_size
    for old, new in zip(of_ranks(before), of_ranks(after), strict=True):
        assert {r.rollout_id for r in real(old)} == {r.rollout_id for r in real(new)}
        _check_piece(core.config, new)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_planned_again_without_some_each_divides_by_what_is_left_and_an_empty_one_goes(dp_size: int) -> None:
    core = BalancerCore(sb.BalancerConfig(dp_size=2, batch_size=12, window=12, mini_batches=3))
    for number in range(12):
        core.add(make_rollout(2 + number, f"r{number}"), 0.0)
    before = polled(core)
    first, second, third = ([r.rollout_id for r in real(parts)] for parts in of_ranks(before))
    core.mark_missing(before.step, [first[0], *second])
    after = core.replan(before.step, dp_size)
    assert [sorted(r.rollout_id for r in real(parts)) for parts in of_ranks(after)] == [
        sorted(first[1:]), sorted(third)
    ]  # fmt: skip
    for parts in of_ranks(after):
        _check_piece(core.config.replace(dp_size=dp_size), parts)
    assert {one.denominators for one in after.ranks} == {denominators_of(real(after.ranks))}
    assert [one.mini_batch_sizes for one in from_the_journal(after).ranks] == [
        one.mini_batch_sizes for one in after.ranks
    ]
    core.mark_missing(before.step, third)
    last = core.replan(before.step, dp_size)
    assert {r.rollout_id for r in real(last.ranks)} == {*first[1:]}
    assert [one.mini_batch_sizes for one in last.ranks] == [()] * dp_size, "one is the whole step"
    core.acknowledge(before.step)
    assert (core.counts.acknowledged, core.counts.evicted["lost"]) == (3, 9)
    verify(core)
