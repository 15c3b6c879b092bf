"""Cost models: figures that can be checked by hand, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import stream_balancer as sb
from stream_balancer.cost import CostModel

LLAMA_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
MODELS: list[CostModel] = [
    sb.TokenCost(),
    sb.QuadraticCost(),
    sb.PaddedCost(),
    sb.TransformerCost.from_hf_config(LLAMA_7B),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_costs_are_finite_and_grow_with_length(model: CostModel) -> None:
    costs = model(np.array([1, 2, 1000, 10**6]))
    assert costs.dtype == np.float64
    assert np.all(np.isfinite(costs))
    assert np.all(np.diff(costs) > 0)
    assert isinstance(model, CostModel)


def test_token_and_quadratic() -> None:
    assert sb.TokenCost()([3, 5]).tolist() == [3.0, 5.0]
    assert sb.QuadraticCost(linear=2.0, quadratic=3.0)([1, 10]).tolist() == [5.0, 320.0]


def test_transformer_flops_match_six_times_the_parameters() -> None:
    model = sb.TransformerCost.from_hf_config(LLAMA_7B)
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000  # matrices a token goes through
    assert model.flops_per_token == pytest.approx(6 * parameters)
    assert model.flops_per_token_pair == pytest.approx(12 * 32 * 4096)  # QK and AV, forward and backward
    assert model([2])[0] == pytest.approx(2 * model.flops_per_token + 3 * model.flops_per_token_pair)


def test_full_attention_counts_every_pair() -> None:
    sizes = {
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    causal, full = sb.TransformerCost(**sizes), sb.TransformerCost(**sizes, causal=False)
    assert full([4])[0] - causal([4])[0] == pytest.approx(6 * causal.flops_per_token_pair)


def test_hf_config_knows_grouped_queries_experts_and_multimodal() -> None:
    moe = {
        **LLAMA_7B,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
    }
    model = sb.TransformerCost.from_hf_config({"text_config": moe})
    assert (model.num_kv_heads, model.head_dim, model.active_experts, model.intermediate_size) == (8, 64, 9, 1536)

    class Config:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size = 64, 2, 4, 128, 100

    assert sb.TransformerCost.from_hf_config(Config()).num_layers == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sb.QuadraticCost(linear=-1.0), "QuadraticCost.linear must be"),
        (lambda: sb.QuadraticCost(quadratic=math.nan), "QuadraticCost.quadratic must be"),
        (lambda: sb.QuadraticCost(linear=0, quadratic=0), "would cost nothing"),
        (lambda: sb.TransformerCost.from_hf_config({"hidden_size": 8}), "has no 'num_attention_heads'"),
        (
            lambda: sb.TransformerCost(hidden_size=8, num_layers=0, num_heads=1, intermediate_size=1, vocab_size=1),
            "num_layers must be",
        ),
        (
            lambda: sb.TransformerCost(
                hidden_size=8, num_layers=1, num_heads=3, num_kv_heads=2, intermediate_size=1, vocab_size=1
            ),
            "multiple of num_kv_heads",
        ),
    ],
)
def test_bad_costs(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
