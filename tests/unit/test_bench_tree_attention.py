"""The model that bench/beyond_models.py times computes each shared prefix once, and the same gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from stream_balancer import MicroBatch, Rollout

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from tree_attention import tree_loss_sum

sys.path.append(str(Path(__file__).parents[2] / "examples" / "context_parallel"))
from ring_model import Decoder, loss_sum


def sibling(group: str | None, prompt: int, own: int, seed: int) -> Rollout:
    start = torch.arange(prompt) + (ord(group[0]) if group else 0)
    answer = torch.randint(0, 50, (own,), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat((start % 50, answer))
    mask = torch.arange(prompt + own) >= prompt
    return Rollout(tokens={"input_ids": ids, "loss_mask": mask}, group_id=group, prefix=prompt if group else 0)


def test_loss_and_gradients_are_those_of_the_dense_layout() -> None:
    rollouts = [
        sibling("a", 9, 4, 0),
        sibling("b", 5, 7, 1),
        sibling(None, 3, 6, 2),
        sibling("a", 9, 1, 3),
        sibling("b", 5, 12, 4),
        sibling("a", 9, 30, 5),
    ]
    micro_batch = MicroBatch.of(rollouts)
    assert micro_batch.tree().num_tokens == micro_batch.num_tokens - 2 * 9 - 5
    torch.manual_seed(0)
    model = Decoder(vocab_size=50, hidden_size=32, num_layers=2, num_heads=2).double()
    found = []
    for loss_of in (loss_sum, tree_loss_sum):
        model.zero_grad()
        loss = loss_of(model, micro_batch)
        loss.backward()
        found.append((loss.item(), [parameter.grad for parameter in model.parameters()]))
        model.zero_grad()
    (dense, dense_gradients), (tree, tree_gradients) = found
    assert tree == pytest.approx(dense, rel=1e-12)
    for ours, theirs in zip(tree_gradients, dense_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
