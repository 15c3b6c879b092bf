"""The example of shared prefixes: its loss and gradients are those of dense training, whatever computes attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stream_balancer_demo.model import Decoder
from torch import Tensor

import stream_balancer as sb
from stream_balancer.rollouts.trees import Tree

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from shared_prefixes import Attend, by_flex_attention, by_node, loss_sum

VOCABULARY = 32


def dense_loss_sum(model: Decoder, micro_batch: sb.rollouts.MicroBatch) -> Tensor:
    """What a trainer computes that knows of no prefix, rollout by rollout."""
    total = torch.zeros(())
    for rollout in micro_batch.rollouts:
        ids = rollout.tokens["input_ids"]
        logits = model(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
        of_tokens = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        weight = 0.0 if rollout.is_padding else rollout.scalars["advantage"]
        total = total - (of_tokens * weight)[rollout.tokens["loss_mask"][1:]].sum()
    return total


def micro_batch(trained: str) -> sb.rollouts.MicroBatch:
    """Two groups of three, one of them with a sibling that shares less and one that shares nothing, and one alone."""
    rollouts, dice = [], torch.Generator().manual_seed(0)
    for number, (group, prompt, declared) in enumerate(
        [("a", 200, 200), ("b", 7, 7), (None, 5, 0), ("a", 200, 200), ("b", 7, 3), ("a", 200, 199), ("b", 7, 0)]
    ):
        start = torch.randint(VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(prompt))
        ids = torch.cat([start, torch.randint(VOCABULARY, (3 + 40 * (number % 3),), generator=dice)])
        mask = torch.arange(len(ids)) >= prompt if trained == "answers" else torch.rand(len(ids), generator=dice) < 0.7
        rollouts.append(
            sb.Rollout(
                tokens={"input_ids": ids, "loss_mask": mask},
                scalars={"advantage": 1.0 - 0.4 * number},
                group_id=group,
                prefix=declared,
            )
        )
    return sb.rollouts.MicroBatch.of([*rollouts, rollouts[0].padding_copy("padding-0")])


def gradients(model: Decoder, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.fixture(autouse=True)
def _flex_attention_learns_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses its backward pass there, for the compiled kernel has none; the eager form has."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("trained", ["answers", "tokens of prompts, too"])
@pytest.mark.parametrize("attention", [by_node, by_flex_attention])
def test_loss_and_gradients_are_those_of_dense_training(attention: Callable[[Tree], Attend], trained: str) -> None:
    torch.manual_seed(0)
    model = Decoder(vocab_size=VOCABULARY, hidden_size=64)
    one = micro_batch(trained)
    dense = dense_loss_sum(model, one)
    expected = gradients(model, dense)
    shared = loss_sum(model, one, attention)
    found = gradients(model, shared)
    assert one.tree().num_tokens < 0.6 * one.num_tokens
    assert abs(shared.item() - dense.item()) < 1e-5 * abs(dense.item())
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
