"""The demo's model: packed evaluation is one-by-one evaluation."""

from dataclasses import replace

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


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_packed_logits_are_one_by_one_logits():
    model = build_model(OPTIONS, torch.float64)
    batch = rollouts(7, 1, 20, 3)
    packed = MicroBatch.of(batch).packed()
    together = model(packed["input_ids"], packed.position_ids, packed.cu_seqlens)
    alone = [model(r.tokens["input_ids"], torch.arange(r.num_tokens), bounds(r.num_tokens)) for r in batch]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


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


def test_no_token_sees_another_rollout_or_the_future():
    model = build_model(OPTIONS, torch.float64)
    ids = torch.arange(12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    before = model(ids, positions, bounds(5, 7))
    changed = ids.clone()
    changed[3] = 50  # in the first rollout, its second to last token
    after = model(changed, positions, bounds(5, 7))
    differs = (before != after).any(dim=1)
    assert differs.tolist() == [False] * 3 + [True] * 2 + [False] * 7


def test_loss_matches_a_plain_formula_and_counts_only_trained_tokens():
    model = build_model(OPTIONS, torch.float64)
    (rollout,) = rollouts(9)
    ids = rollout.tokens["input_ids"]
    log_p = model(ids, torch.arange(9), bounds(9)).log_softmax(-1)
    expected = -sum(log_p[t - 1, ids[t]] for t in range(3, 9))
    torch.testing.assert_close(loss_sum(model, MicroBatch.of([rollout])), expected)


def test_a_padding_copy_has_no_loss_and_no_gradient():
    model = build_model(OPTIONS, torch.float64)
    (rollout,) = rollouts(9)
    loss = loss_sum(model, MicroBatch.of([rollout.padding_copy("pad")]))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_every_process_builds_the_same_model_and_leaves_the_global_seed_alone():
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    a, b = build_model(OPTIONS), build_model(OPTIONS)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, build_model(replace(OPTIONS, seed=1)).head.weight)


def test_the_cost_model_counts_every_weight_of_the_model():
    model = build_model(OPTIONS)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    assert training_cost(OPTIONS).flops_per_token == 6 * matrices
