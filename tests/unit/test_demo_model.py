"""The demo's model: packed evaluation is one-by-one evaluation."""

import torch
from stream_balancer_demo.model import build_model, loss_sum, training_cost
from stream_balancer_demo.options import DemoOptions

from stream_balancer.types import MicroBatch, Rollout

OPTIONS = DemoOptions(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64)


def rollouts(*lengths: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    return [
        Rollout(
            tokens={
                "input_ids": torch.randint(0, 64, (n,), generator=generator),
                "loss_mask": torch.arange(n) >= max(n // 3, 1),
            }
        )
        for n in lengths
    ]


def test_packed_loss_and_gradients_are_sums_over_rollouts():
    batch = rollouts(7, 2, 20, 3)
    together, alone = build_model(OPTIONS, torch.float64), build_model(OPTIONS, torch.float64)
    loss = loss_sum(together, MicroBatch.of(batch))
    loss.backward()
    one_by_one = sum(loss_sum(alone, MicroBatch.of([r])) for r in batch)
    one_by_one.backward()
    torch.testing.assert_close(loss, one_by_one, rtol=1e-12, atol=0)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_the_cost_model_counts_every_weight_of_the_model():
    model = build_model(OPTIONS)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    assert training_cost(OPTIONS).flops_per_token == 6 * matrices
