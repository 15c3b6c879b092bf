"""What is planned with shared prefixes is what a rank's trees hold: through transport, journal and lost payloads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from served import Served

import stream_balancer as sb
from stream_balancer.types import RankBatch, Rollout

pytestmark = pytest.mark.anyio
COST = sb.cost.QuadraticCost(linear=50.0, quadratic=1.0)
SIBLINGS = 3


def some_rollouts(seed: int) -> Iterator[Rollout]:
    """Eight groups in any order; every fourth has no common prompt."""
    dice, tokens, made = random.Random(seed), torch.Generator().manual_seed(seed), []
    for group in range(8):
        prompt = torch.randint(1000, (dice.randint(2, 60),), generator=tokens)
        for number in range(SIBLINGS):
            own = torch.randint(1000, (min(int(dice.lognormvariate(3, 1)) + 1, 100),), generator=tokens)
            ids = torch.cat([prompt, own])
            name, prefix = f"{group}.{number}", 0 if group % 4 == 3 else len(prompt)
            made.append(Rollout(tokens={"input_ids": ids}, rollout_id=name, group_id=f"g{group}", prefix=prefix))
    yield from dice.sample(made, len(made))


def work(rank_batch: RankBatch) -> float:
    """Of its trees: each token once, at the price that it has at its place in the rollout."""
    total = 0.0
    for micro_batch in rank_batch.micro_batches:
        if all(rollout.is_padding for rollout in micro_batch.rollouts):
            continue
        for node in micro_batch.tree().nodes:
            before, until = COST([node.position, node.position + node.stop - node.start])
            total += until - (before if node.position else 0.0)
    return total


@pytest.mark.parametrize("cap", [None, 170])
@pytest.mark.parametrize("groups", ["same_batch", "free"])
async def test_loads_are_the_work_of_the_trees_that_ranks_get(groups: str, cap: int | None) -> None:
    for seed in range(4):
        run = Served(
            dp_size=3, batch_size=12, groups=sb.Groups(size=SIBLINGS, keep=groups, share_prefixes=True), cost=COST,  # type: ignore[arg-type]
            micro_batches=sb.MicroBatches(max_tokens=cap), max_skips=4,
        )  # fmt: skip
        await run.run(some_rollouts(seed))
        assert sum(batch.num_rollouts for batch in run.seen) >= 24
        assert any(one.tree().num_tokens < one.num_tokens for batch in run.seen for one in batch.micro_batches)
        for batch in run.seen:
            assert batch.load == pytest.approx(work(batch))
            for one in batch.micro_batches:
                assert cap is None or one.tree().num_tokens <= cap
                names = [rollout.group_id for rollout in one.rollouts if rollout.prefix]
                runs = [name for place, name in enumerate(names) if not place or names[place - 1] != name]
                assert len(runs) == len(set(names)), "siblings are not neighbours"
