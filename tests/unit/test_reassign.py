"""What a lost rank owed, on the ranks that are left: all of the step is still trained on once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from cores import learning_core
from helpers import polled
from invariants import verify

import stream_balancer as sb
from stream_balancer.core.batching import lay_out
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.step_times import StepTiming
from stream_balancer.testing import make_rollout
from stream_balancer.types import ExecutionSize


def reassign(
    core: BalancerCore, batch: sb.Batch, rollouts: list[sb.Rollout], ranks: list[int]
) -> dict[int, sb.types.RankBatch]:
    """By rank what it takes over of these rollouts, with the denominators of the step."""
    speeds = core.config.speeds and [core.config.speeds[rank] for rank in ranks]
    parts = lay_out(core.state, rollouts, batch.rollouts, step=batch.step, num_ranks=len(ranks), speeds=speeds)
    return {
        rank: replace(batch.ranks[rank], micro_batches=tuple(its))
        for rank, its in zip(ranks, parts, strict=True)
        if its
    }


def rollout(number: int, chance: random.Random) -> sb.Rollout:
    length = min(int(chance.lognormvariate(3.0, 1.0)) + 1, 150)
    mask = [1] + [chance.randint(0, 1) for _ in range(length - 1)]
    return sb.Rollout(
        tokens={"input_ids": [chance.randrange(50) for _ in range(length)], "loss_mask": mask},
        scalars={"advantage": chance.uniform(-1, 1)},
        rollout_id=f"r{number}",
        group_id=f"g{number // 4}",
        execution_id=f"e{number // 2}",
    )


NOTHING = ExecutionSize(0, 0)


def counted(shares: Iterable[sb.types.RankBatch]) -> list[tuple[str, ExecutionSize]]:
    """Each rollout with what its execution has in the step: what a gradient is made of."""
    return sorted(
        (one.rollout_id, size)
        for share in shares
        for micro_batch in share.micro_batches
        for one, size in zip(micro_batch.rollouts, micro_batch.execution_sizes or repeat(NOTHING), strict=False)
        if not one.is_padding
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"micro_batches": {"max_tokens": 160}},
        {"micro_batches": {"max_tokens": 160, "multiple_of": 2}},
        {"groups": {"size": 2, "keep": "same_rank"}},
        {"speeds": (1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)},
        {"policy": "round_robin"},
    ],
    ids=str,
)
def test_every_rollout_is_there_once_without_the_ranks_that_are_lost(more: dict[str, Any]) -> None:
    chance = random.Random(7)
    core = BalancerCore(sb.BalancerConfig(dp_size=8, batch_size=64, window=64, loss_mask_column="loss_mask", **more))
    for number in range(0, 64, 4):
        core.add_all([rollout(number + k, chance) for k in range(4)], 0.0)
    batch = polled(core)
    whole = counted(batch.ranks)
    assert len(whole) == 64
    left, shares = list(range(8)), {rank: [share] for rank, share in enumerate(batch.ranks)}
    for lost in (3, 0, 6):  # the third takes with it what it had taken over
        left.remove(lost)
        owed = [r for share in shares.pop(lost) for r in share.rollouts if not r.is_padding]
        for rank, part in reassign(core, batch, owed, left).items():
            shares[rank].append(part)
            cap = core.config.micro_batches.max_tokens or 10**9
            assert all(one.num_tokens <= cap for one in part.micro_batches)
            assert not len(part.micro_batches) % core.config.micro_batches.multiple_of
        assert counted(share for of_rank in shares.values() for share in of_rank) == whole
    loads = [sum(r.num_tokens for share in of_rank for r in share.rollouts) for of_rank in shares.values()]
    assert max(loads) < 2.0 * sum(loads) / len(loads)
    verify(core)
    assert core.in_flight() == (batch,)


def test_seconds_that_ranks_of_the_former_plan_reported_do_not_count() -> None:
    config = sb.BalancerConfig(dp_size=3, batch_size=6, window=6)
    core = learning_core(config)
    core.add_all([make_rollout(90, f"r{n}") for n in range(6)], 0.0)
    batch = polled(core)
    core.record_step(StepTiming(batch.step, 0, 100.0), 0.0)
    core.nack(batch.step)
    core.reconfigure(replace(config, dp_size=2))
    assert core.poll(0.0) is not None
    core.record_step(StepTiming(batch.step, 1, 1.0), 0.0)
    assert not any(core.statistics(0.0).rank_busy_seconds)
    core.record_step(StepTiming(batch.step, 0, 3.0), 0.0)
    assert core.statistics(0.0).rank_busy_seconds[:2] == (3.0, 1.0)
