"""The GRPO example's gradient: balanced, packed, unevenly split shares give that of one padded batch."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

import stream_balancer as sb

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))
from model import Decoder
from train import CLIP_HIGH, CLIP_LOW, backward

TEMPERATURE = 0.8
VOCAB_SIZE = 12


def new_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab_size=VOCAB_SIZE, hidden_size=32).double()


def make_rollouts(count: int) -> list[sb.Rollout]:
    """Heavy-tailed lengths, policy and user in turn, behaviour off-policy enough that some ratios are clipped."""
    rng, torch_rng = random.Random(1), torch.Generator().manual_seed(1)
    lengths = [min(int(rng.lognormvariate(2.5, 1.0)) + 2, 120) for _ in range(count)]
    return [
        sb.Rollout(
            tokens={
                "input_ids": torch.randint(0, VOCAB_SIZE, (length,), generator=torch_rng),
                "logprobs": torch.randn(length, generator=torch_rng) * 0.5 - 2.5,
                "loss_mask": torch.arange(length) % 2 == 1,
            },
            scalars={"advantage": rng.gauss(0, 1), "reward": 0.0},
        )
        for length in lengths
    ]


async def plan(rollouts: list[sb.Rollout], **knobs) -> list[sb.Batch]:
    """What the real balancer makes of them."""
    async with sb.StreamBalancer(sb.BalancerConfig(**knobs)) as balancer:
        for rollout in rollouts:
            await balancer.put(rollout)
        balancer.end()
        return [batch async for batch in balancer.batches()]


def gradient_of_shares(batch: sb.Batch) -> torch.Tensor:
    """Each rank's by itself, then summed, as a sum over ranks does."""
    total = torch.zeros(1)
    for share in batch.ranks:
        model = new_model()
        backward(model, share, TEMPERATURE)
        total = total + flat_gradient(model)
    return total


def gradient_of_padded_batch(rollouts: list[sb.Rollout]) -> torch.Tensor:
    """The textbook: rows padded to the longest, GRPO's loss under a mask, one mean over all trained tokens."""
    model = new_model()
    rows = sb.types.MicroBatch.of(rollouts).padded()
    ids = rows["input_ids"]
    count, longest = ids.shape
    positions = torch.arange(longest).repeat(count)
    logits = model(ids.flatten(), positions, torch.arange(count + 1) * longest).view(count, longest, -1)
    logprobs = torch.distributions.Categorical(logits=logits[:, :-1] / TEMPERATURE).log_prob(ids[:, 1:])
    ratio = torch.exp(logprobs - rows["logprobs"][:, 1:])
    advantage = rows["advantage"][:, None]
    objective = torch.minimum(ratio * advantage, ratio.clip(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    mask = rows["loss_mask"][:, 1:] & rows.attention_mask[:, 1:]
    (-objective[mask].mean()).backward()
    clipped = (ratio[mask] < 1 - CLIP_LOW) | (ratio[mask] > 1 + CLIP_HIGH)
    assert 0.1 < clipped.double().mean() < 0.95  # both branches of the objective count
    return flat_gradient(model)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("dp_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "policy",
    ["window", pytest.param("fifo", marks=pytest.mark.slow), pytest.param("round_robin", marks=pytest.mark.slow)],
)
async def test_gradient_equals_that_of_one_padded_batch(policy, dp_size):
    uneven = sb.cost.QuadraticCost(linear=1.0, quadratic=1.0)  # ranks of equal work hold different numbers of tokens
    knobs = {"batch_size": 32, "micro_batches": {"max_tokens": 125}, "policy": policy, "cost": uneven}
    batches = await plan(make_rollouts(64), dp_size=dp_size, **knobs)
    assert len(batches) == 2
    for batch in batches:
        assert len(batch.ranks[0].micro_batches) >= 2
        assert len({share.num_tokens for share in batch.ranks}) > 1
        whole = gradient_of_padded_batch(list(batch.rollouts))
        assert relative_difference(gradient_of_shares(batch), whole) <= 1e-10


@pytest.mark.parametrize("micro_batch_counts", ["equal", "free"])
async def test_ranks_with_one_outlier_and_many_micro_batches_elsewhere(micro_batch_counts):
    rollouts = sorted(make_rollouts(48), key=lambda r: r.num_tokens)[-12:]
    longest = rollouts[-1].num_tokens
    cost = sb.cost.QuadraticCost(linear=1.0, quadratic=1.0)
    knobs = {"batch_size": 12, "micro_batches": {"max_tokens": longest, "counts": micro_batch_counts}}
    (batch,) = await plan(rollouts, dp_size=4, cost=cost, **knobs)
    numbers = [len(share.micro_batches) for share in batch.ranks]
    assert (batch.num_padding > 0) == (micro_batch_counts == "equal") == (len(set(numbers)) == 1)
    whole = gradient_of_padded_batch([r for r in batch.rollouts if not r.is_padding])
    assert relative_difference(gradient_of_shares(batch), whole) <= 1e-10
