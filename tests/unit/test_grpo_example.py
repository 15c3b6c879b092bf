"""The GRPO example: sampler and trainer mean the same log-probabilities, and workers put what training needs."""

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
