"""A plan in which ranks share rollouts, made into a batch: every rollout once in all that counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers import polled
from hypothesis import given
from invariants import verify
from scripted import same_rollout

import stream_balancer as sb
from stream_balancer.core import batching
from stream_balancer.core.machine import BalancerCore
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.testing import make_rollout
from stream_balancer.types import Batch, Rollout, SharedRollout
from stream_balancer.types.shared import join_column


def core_of(lengths: list[int], *, dp_size: int = 4, **knobs: Any) -> BalancerCore:
    """Rollouts r0, r1, ... of these lengths; every second one has no loss on its first half."""
    knobs = {"context_parallel": {"sizes": (1, 2, 4), "min_tokens": 1}, "sync": "step"} | knobs
    config = sb.BalancerConfig(dp_size=dp_size, batch_size=len(lengths), window=len(lengths), **knobs)
    core = BalancerCore(config)
    for number, length in enumerate(lengths):
        prompt = length // 2 if number % 2 else 0
        core.add(make_rollout(length, f"r{number}", prompt_tokens=prompt, seed=number), now=0.0)
    return core


LENGTHS = [401, 7, 130, 9, 31, 33, 40]
"""The first is longer than a rank's fair share: the planner has ranks share it."""


def names(batch: Batch) -> list[list[list[str]]]:
    return [
        [[r.rollout_id for r in mb.rollouts if not r.is_padding] for mb in one.micro_batches] for one in batch.ranks
    ]


def check_whole(batch: Batch, rollouts: dict[str, Rollout]) -> None:
    """Each rollout is somewhere once, or in parts that join to it, at the ranks that they name."""
    parts: dict[str, dict[int, SharedRollout]] = {}
    alone: Counter[str] = Counter()
    for one in batch.ranks:
        assert one.global_num_rollouts == len(rollouts)
        assert one.global_num_tokens == sum(r.num_tokens for r in rollouts.values())
        assert one.global_num_loss_tokens == sum(r.num_loss_tokens for r in rollouts.values())
        assert one.global_num_executions == len(rollouts)
        for mb in one.micro_batches:
            assert not mb.cp_group or mb.cp_group[mb.cp_rank] == one.rank
            for rollout in mb.rollouts:
                if isinstance(rollout, SharedRollout):
                    assert len(mb.cp_group) == rollout.cp_degree
                    parts.setdefault(rollout.rollout_id, {})[one.rank] = rollout
                elif not rollout.is_padding:
                    assert not mb.cp_group
                    alone[rollout.rollout_id] += 1
    assert alone.keys().isdisjoint(parts)
    assert alone.keys() | parts.keys() == rollouts.keys()
    assert set(alone.values()) <= {1}
    for name, its in parts.items():
        members = sorted(its)
        assert members == list(range(members[0], members[0] + len(members)))
        assert members[0] % len(members) == 0, "not an aligned block"
        for column, values in rollouts[name].tokens.items():
            assert torch.equal(join_column([its[rank].tokens[column] for rank in members], len(values)), values)
        assert sum(one.num_loss_tokens for one in its.values()) == rollouts[name].num_loss_tokens
    assert sorted(r.rollout_id for r in batch.rollouts if not r.is_padding) == sorted(rollouts)
    assert all(same_rollout(r, rollouts[r.rollout_id]) for r in batch.rollouts if not r.is_padding), "not whole"
    assert batch.num_rollouts == len(rollouts)


def test_a_batch_of_parts_is_acknowledged_as_wholes() -> None:
    core = core_of(LENGTHS)
    batch = polled(core, 1.0)
    assert batch.has_shared
    assert batch.loads == tuple(core.in_flight()[0].ranks[rank].load for rank in range(4))
    assert batch.finish == max(batch.loads)
    copies = [mb for one in batch.ranks for mb in one.micro_batches if mb.rollouts[0].is_padding]
    assert len(copies) == batch.num_padding
    assert not any(mb.cp_group for mb in copies)
    assert core.statistics(2.0).in_flight == len(LENGTHS)
    core.acknowledge(0)
    verify(core)
    statistics = core.statistics(2.0)
    assert (statistics.acknowledged, statistics.waiting, statistics.in_flight) == (len(LENGTHS), 0, 0)
    with pytest.raises(sb.errors.DuplicateRolloutError):
        core.add(make_rollout(3, "r0"), now=3.0)


def same_batch(one: Batch, other: Batch) -> None:
    assert names(one) == names(other)
    assert one.loads == other.loads
    assert one.num_padding == other.num_padding
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        assert [(mb.cp_group, mb.cp_rank, mb.lengths) for mb in mine.micro_batches] == [
            (mb.cp_group, mb.cp_rank, mb.lengths) for mb in theirs.micro_batches
        ]
        assert all(same_rollout(a, b) for a, b in zip(mine.rollouts, theirs.rollouts, strict=True))


def test_a_checkpoint_has_a_step_in_flight_as_it_was() -> None:
    core = core_of(LENGTHS)
    rollouts = {r.rollout_id: r for r in core.state.buffer.rollouts()}
    batch = polled(core, 1.0)
    assert batch.has_shared
    written = state_dict(core.snapshot(2.0))
    size = sum(row.nbytes for row in written["rollouts"])
    whole = sum(r.nbytes for r in rollouts.values())
    assert size < 1.2 * whole + 4096 * len(batch.ranks), "a shared rollout is written once"
    other = BalancerCore(core.config)
    other.restore(read_state_dict(written), now=3.0)
    verify(other)
    again = polled(other)
    same_batch(batch, again)
    check_whole(again, rollouts)
    assert other.acknowledge(0).num_rollouts == len(LENGTHS)
    verify(other)


@pytest.mark.parametrize("dp_size", [2, 1, 6, 3])
def test_other_ranks_get_another_plan_of_the_same_rollouts(dp_size: int) -> None:
    core = core_of(LENGTHS)
    rollouts = {r.rollout_id: r for r in core.state.buffer.rollouts()}
    assert polled(core, 1.0).has_shared
    core.nack(0)
    core.reconfigure(replace(core.config, dp_size=dp_size, min_batch_size=dp_size))
    again = polled(core, 1.0)
    assert len(again.ranks) == dp_size
    check_whole(again, rollouts)
    verify(core)
    core.acknowledge(0)
    verify(core)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=8, max_size=14),
    long=st.lists(st.integers(400, 4000), min_size=0, max_size=2),
    sync=st.sampled_from(["step", "micro_batch"]),
    dp_size=st.sampled_from([2, 4, 8]),
)
def test_whatever_the_planner_shares(lengths: list[int], long: list[int], sync: Any, dp_size: int) -> None:
    core = core_of(
        long + lengths,
        dp_size=dp_size,
        sync=sync,
        context_parallel=sb.ContextParallel(sizes=(1, 2, 4, 8), min_tokens=1),
        micro_batches=sb.MicroBatches(max_tokens=5000),
    )
    rollouts = {r.rollout_id: r for r in core.state.buffer.rollouts()}
    batch = polled(core, 1.0)
    check_whole(batch, rollouts)
    verify(core)
    if sync == "step":
        for one in batch.ranks:
            degrees = [max(len(mb.cp_group), 1) for mb in one.micro_batches]
            assert degrees == sorted(degrees, reverse=True)
    core.acknowledge(0)
    verify(core)


def test_what_others_take_over_is_not_shared_anew() -> None:
    """Of a step that is not shared, after ``context_parallel.sizes`` came: who is left is no aligned block."""
    core = core_of([4000, *[100] * 12], context_parallel=sb.ContextParallel(sizes=(1,), min_tokens=1))
    batch = polled(core, 1.0)
    core.reconfigure(core.config.replace(context_parallel={"sizes": (1, 2, 4)}))
    parts = batching.lay_out(core.state, list(batch.rollouts), batch.rollouts, step=batch.step, num_ranks=2)
    assert all(parts)
    assert not any(mb.cp_group for part in parts for mb in part)
