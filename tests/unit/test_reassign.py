"""What a lost rank owed, on the ranks that are left: the gradient of the step is the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from evictions import learning_core
from invariants import verify
from torch import Tensor, nn

import stream_balancer as sb
from stream_balancer.core.batching import lay_out
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.step_times import StepTiming
from stream_balancer.testing import make_rollout

VOCABULARY = 50


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
        tokens={"input_ids": [chance.randrange(VOCABULARY) for _ in range(length)], "loss_mask": mask},
        scalars={"advantage": chance.uniform(-1, 1)},
        rollout_id=f"r{number}",
        group_id=f"g{number // 4}",
        execution_id=f"e{number // 2}",
    )


class Model(nn.Module):
    """Each token sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        before = hidden.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        out: Tensor = self.head(torch.tanh(hidden + self.mix(before)))
        return out


def gradient_of(shares: list[sb.types.RankBatch]) -> Tensor:
    """[parameters] summed over the ranks, of a loss that divides by tokens, by executions and by rollouts."""
    torch.manual_seed(0)
    model = Model()
    for share in shares:
        for micro_batch in share.micro_batches:
            packed = micro_batch.packed()
            for k in range(len(packed.cu_seqlens) - 1):
                here = slice(int(packed.cu_seqlens[k]), int(packed.cu_seqlens[k + 1]))
                ids, mask = packed["input_ids"][here], packed["loss_mask"][here].float()
                loss = nn.functional.cross_entropy(model(ids), ids, reduction="none") * mask
                weight = packed["advantage"][k] / share.global_num_loss_tokens
                weight = weight + packed.execution_weights[k] / share.global_num_executions
                weight = weight + packed.rollout_weights[k] / share.global_num_rollouts
                (weight * loss.sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


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
def test_the_gradient_is_the_same_without_the_ranks_that_are_lost(more: dict[str, Any]) -> None:
    chance = random.Random(7)
    core = BalancerCore(sb.BalancerConfig(dp_size=8, batch_size=64, window=64, loss_mask_column="loss_mask", **more))
    for number in range(0, 64, 4):
        core.add_all([rollout(number + k, chance) for k in range(4)], 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    whole = gradient_of(list(batch.ranks))
    left, shares = list(range(8)), {rank: [share] for rank, share in enumerate(batch.ranks)}
    for lost in (3, 0, 6):  # the third takes with it what it had taken over
        left.remove(lost)
        owed = [r for share in shares.pop(lost) for r in share.rollouts if not r.is_padding]
        for rank, part in reassign(core, batch, owed, left).items():
            shares[rank].append(part)
            cap = core.config.micro_batches.max_tokens or 10**9
            assert all(one.num_tokens <= cap for one in part.micro_batches)
            assert not len(part.micro_batches) % core.config.micro_batches.multiple_of
        found = gradient_of([share for of_rank in shares.values() for share in of_rank])
        assert torch.allclose(found, whole, atol=1e-5, rtol=1e-5), float((found - whole).abs().max())
    loads = [sum(r.num_tokens for share in of_rank for r in share.rollouts) for of_rank in shares.values()]
    assert max(loads) < 2.0 * sum(loads) / len(loads)
    verify(core)
    assert core.in_flight() == (batch,)


def test_seconds_that_ranks_of_the_former_plan_reported_do_not_count() -> None:
    config = sb.BalancerConfig(dp_size=3, batch_size=6, window=6)
    core = learning_core(config)
    core.add_all([make_rollout(90, f"r{n}") for n in range(6)], 0.0)
    batch = core.poll(0.0)
    assert batch is not None
    core.record_step(StepTiming(batch.step, 0, 100.0), 0.0)
    core.nack(batch.step)
    core.reconfigure(replace(config, dp_size=2))
    assert core.poll(0.0) is not None
    core.record_step(StepTiming(batch.step, 1, 1.0), 0.0)
    assert not any(core.statistics(0.0).rank_busy_seconds)
    core.record_step(StepTiming(batch.step, 0, 3.0), 0.0)
    assert core.statistics(0.0).rank_busy_seconds[:2] == (3.0, 1.0)
