"""The GRPO example: sampler and trainer mean the same log-probabilities; balanced, packed, unevenly split shares give
the gradient of one padded batch."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import anyio
import pytest
import torch

import stream_balancer as sb

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))
import task
from model import Decoder
from rollout import Engine, Sample, generate_groups
from train import CLIP_HIGH, CLIP_LOW, backward

TEMPERATURE = 0.7


def new_engine(slots: int, seed: int = 0) -> tuple[Engine, Decoder]:
    torch.manual_seed(seed)
    model = Decoder(vocab_size=task.VOCAB_SIZE, hidden_size=32)
    return Engine(model, slots=slots, temperature=TEMPERATURE, seed=seed), model


async def sample_all(engine: Engine, samples: list[Sample]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        async with anyio.create_task_group() as siblings:
            for sample in samples:
                siblings.start_soon(engine.generate, sample)
        tasks.cancel_scope.cancel()


async def test_sampled_logprobs_are_those_the_trainer_computes():
    """Slots are reused, users interrupt, lengths differ: cached decoding must still be the packed forward pass."""
    engine, model = new_engine(slots=3)
    rng = random.Random(3)
    samples = [Sample(task.new_user(5, rng)) for _ in range(20)]
    await sample_all(engine, samples)
    assert len({len(s.ids) for s in samples}) > 3
    lengths = torch.tensor([len(s.ids) for s in samples])
    ids = torch.tensor([token for s in samples for token in s.ids])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    with torch.no_grad():
        logits = model(ids, positions, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    expected = (logits[:-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    mask = torch.tensor([m for s in samples for m in s.loss_mask])[1:]
    sampled = torch.tensor([p for s in samples for p in s.logprobs])[1:]
    torch.testing.assert_close(sampled[mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert (sampled[~mask] == 0).all()


async def test_workers_put_whole_groups_with_what_training_needs():
    engine, _ = new_engine(slots=16)
    config = sb.BalancerConfig(dp_size=2, batch_size=8, groups=sb.Groups(size=4), capacity=16)

    async def work():
        await generate_groups(engine, balancer, num_groups=6, group_size=4, num_workers=3, seed=0)
        balancer.end()

    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        rollouts = [r async for batch in balancer.batches() for r in batch.rollouts if not r.is_padding]
    assert sorted(int(r.rollout_id) for r in rollouts) == list(range(24))
    for group in {r.group_id for r in rollouts}:
        siblings = [r for r in rollouts if r.group_id == group]
        assert len(siblings) == 4
        assert len({int(r.tokens["input_ids"][0]) for r in siblings}) == 1
        assert sum(r.scalars["advantage"] for r in siblings) == pytest.approx(0, abs=1e-6)
    for rollout in rollouts:
        assert not rollout.tokens["loss_mask"][:2].any()  # the prompt, and the user's first word
        assert rollout.tokens["loss_mask"][2]
        assert rollout.version == (0, 0)


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


def gradient_of_shares(batch: sb.Batch) -> torch.Tensor:
    """Each rank's by itself, then summed, as a sum over ranks does."""
    model = new_model()
    for share in batch.ranks:
        backward(model, share, TEMPERATURE)
    return flat_gradient(model)


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


@pytest.mark.parametrize(
    ("count", "knobs"),
    [
        (32, {"dp_size": 3}),
        *(pytest.param(32, {"dp_size": 2, "policy": one}, marks=pytest.mark.slow) for one in ("fifo", "round_robin")),
        (12, {"dp_size": 4}),
        (12, {"dp_size": 4, "micro_batches": {"counts": "free"}}),
    ],
    ids=["32", "fifo", "round robin", "an outlier", "an outlier, free counts"],
)
async def test_gradient_equals_that_of_one_padded_batch(count, knobs):
    """A QuadraticCost: ranks of equal work hold different numbers of tokens."""
    rollouts = make_rollouts(2 * count)
    if count == 12:  # one long, and many micro-batches elsewhere
        rollouts = sorted(make_rollouts(48), key=lambda r: r.num_tokens)[-count:]
    cap = max(125, rollouts[-1].num_tokens)
    cost = sb.cost.QuadraticCost(linear=1.0, quadratic=1.0)
    counts = knobs.pop("micro_batches", {}).get("counts", "equal")
    knobs |= {"batch_size": count, "cost": cost, "micro_batches": {"max_tokens": cap, "counts": counts}}
    async with sb.StreamBalancer(sb.BalancerConfig(**knobs)) as balancer:
        for rollout in rollouts:
            await balancer.put(rollout)
        balancer.end()
        batches = [batch async for batch in balancer.batches()]
    assert len(batches) == len(rollouts) // count
    for batch in batches:
        numbers = {len(share.micro_batches) for share in batch.ranks}
        assert len({share.num_tokens for share in batch.ranks}) > 1
        assert (len(numbers) == 1) == (counts == "equal")
        whole = gradient_of_padded_batch([r for r in batch.rollouts if not r.is_padding])
        assert (gradient_of_shares(batch) - whole).abs().max() <= 1e-10 * whole.abs().max()
