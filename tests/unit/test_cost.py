"""Cost models: figures that can be checked by hand, and refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stream_balancer as sb
from stream_balancer.cost import CostModel
from stream_balancer.cost.hf_config import FAMILIES

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
MODELS: list[CostModel] = [
    sb.cost.TokenCost(),
    sb.cost.QuadraticCost(),
    sb.cost.PaddedCost(),
    sb.cost.TransformerCost.from_hf_config(LLAMA_7B),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
def test_costs_are_finite_and_grow_with_length(model: CostModel) -> None:
    costs = model(np.array([1, 2, 1000, 10**6]))
    assert costs.dtype == np.float64
    assert np.all(np.isfinite(costs))
    assert np.all(np.diff(costs) > 0)
    assert isinstance(model, CostModel)


def test_token_and_quadratic() -> None:
    assert sb.cost.TokenCost()([3, 5]).tolist() == [3.0, 5.0]
    assert sb.cost.QuadraticCost(linear=2.0, quadratic=3.0)([1, 10]).tolist() == [5.0, 320.0]
    for free in (sb.cost.TokenCost(), sb.cost.QuadraticCost(quadratic=0.0)):
        assert free.pairs([3, 5]).tolist() == [9.0, 25.0], "what a calibrated cost may learn"


SIZES: dict[str, int] = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def test_transformer_flops_match_six_times_the_parameters() -> None:
    model = sb.cost.TransformerCost(**SIZES)
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000  # matrices a token goes through
    assert model.flops_per_token == pytest.approx(6 * parameters)
    assert model.flops_per_pair == pytest.approx(14 * 32 * 4096)  # QK and AV, forward, and backward 2.5 times
    assert model([2])[0] == pytest.approx(2 * model.flops_per_token + 3 * model.flops_per_pair)
    from_file = sb.cost.TransformerCost.from_hf_config(LLAMA_7B)
    assert (model.flops_per_token, model.attention) == (from_file.flops_per_token, from_file.attention)


def allowed(window: int | None, chunk: int | None, length: int) -> int:
    """By looking at every pair."""
    query, key = np.ogrid[:length, :length]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if chunk is not None:
        mask &= key // chunk == query // chunk
    return int(mask.sum())


@given(st.integers(1, 40), st.sampled_from(["whole", "window", "chunk"]), st.lists(st.integers(0, 90), max_size=4))
def test_the_pairs_are_those_that_the_mask_allows(size: int, reach: str, lengths: list[int]) -> None:
    limits = {} if reach == "whole" else {reach: size}
    part = sb.cost.AttentionPairs(2.0, **limits)
    assert part(lengths).tolist() == [2.0 * allowed(part.window, part.chunk, length) for length in lengths]
    full = sb.cost.AttentionPairs(2.0, **limits, causal=False)
    assert full(lengths).tolist() == [2.0 * length**2 for length in lengths]


# -- configurations ----------------------------------------------------------------------------------------------------

MEASURED = json.loads((Path(__file__).parent / "model_shapes.json").read_text())


@pytest.mark.parametrize("name", MEASURED)
def test_the_layer_sum_is_what_the_real_model_computes(name: str) -> None:
    """Counted by tests/integrations/test_model_shapes.py, which says how; here no transformers is needed."""
    shape = MEASURED[name]
    cost = sb.cost.TransformerCost.from_hf_config(shape["config"])
    is_recurrent = FAMILIES[shape["config"]["model_type"]].recurrent is not None
    assert cost.flops_per_token / 3 == pytest.approx(shape["per_token"], rel=0.005 if is_recurrent else 1e-3)
    for length, flops in shape["attention"].items():
        assert cost.attention_flops(int(length)) / 3.5 == pytest.approx(flops, rel=1e-3)


def test_the_page_names_what_is_known() -> None:
    page = (Path(__file__).parents[2] / "bench" / "results" / "model_shapes.md").read_text()
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][1:]
    assert {name for row in rows for name in re.findall("`(.*?)`", row)} == set(FAMILIES)


def test_kernels_that_skip_nothing_compute_every_pair_of_a_window_too() -> None:
    gemma = MEASURED["Gemma-3-12B"]["config"]
    (part,) = sb.cost.TransformerCost.from_hf_config(gemma, causal=False).attention
    assert part.flops == sb.cost.TransformerCost.from_hf_config(gemma).flops_per_pair
    assert part(1000) == part.flops * 1000**2


def refused(config: dict[str, Any], **changes: Any) -> Callable[[], object]:
    """Without what is changed to None."""
    changed = {name: value for name, value in {**config, **changes}.items() if value is not None}
    return lambda: sb.cost.TransformerCost.from_hf_config(changed)


def shape(name: str) -> dict[str, Any]:
    config: dict[str, Any] = MEASURED[name]["config"]
    return config


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sb.cost.QuadraticCost(linear=-1.0), "QuadraticCost.flops_per_token must be"),
        (lambda: sb.cost.QuadraticCost(quadratic=math.nan), r"AttentionPairs.flops must be .* not nan"),
        (lambda: sb.cost.QuadraticCost(linear=0, quadratic=0), "would cost nothing"),
        (lambda: sb.cost.AttentionPairs(-1.0), "AttentionPairs.flops must be"),
        (lambda: sb.cost.AttentionPairs(1.0, window=0), "AttentionPairs.window must be"),
        (lambda: sb.cost.AttentionPairs(1.0, chunk=True), "AttentionPairs.chunk must be"),
        (lambda: sb.cost.AttentionPairs(1.0, window=3, chunk=4), "exclude each other"),
        (lambda: sb.cost.LayerSumCost(flops_per_token=math.inf), "LayerSumCost.flops_per_token must be"),
        (lambda: sb.cost.LayerSumCost(flops_per_token=0.0), "would cost nothing"),
        (refused(LLAMA_7B, model_type=None), "has no 'model_type'; give the cost model by hand: sb.cost.LayerSumCost"),
        (refused(LLAMA_7B, model_type="rwkv"), "model_type 'rwkv' is not known"),
        (refused(LLAMA_7B, num_attention_heads=None), "has no 'num_attention_heads'"),
        (refused(LLAMA_7B, vocab_size="many"), "'vocab_size' must be an int >= 1, not 'many'"),
        (refused(LLAMA_7B, intermediate_size=[1, 2]), r"'intermediate_size' must be an int >= 1, not \[1, 2\]"),
        (refused(LLAMA_7B, num_attention_heads=48), "has no 'head_dim'"),
        (refused(LLAMA_7B, sliding_window=4096), "has no 'layer_types'.*transformers.AutoConfig"),
        (refused(LLAMA_7B, layer_types=["full_attention"]), "1 entries for num_hidden_layers=32"),
        (refused(LLAMA_7B, layer_types=["lightning"] * 32), "layer 0 is of kind 'lightning', which is not known"),
        (refused(LLAMA_7B, layer_types=["linear_attention"] * 32), "of kind 'linear_attention', which is not known"),
        (refused(LLAMA_7B, per_layer_config={"1": {"head_dim": 64}}), "per_layer_config"),
        (refused(LLAMA_7B, is_causal=False), "is_causal=False is not known"),
        (refused(shape("Gemma-3-12B"), sliding_window=None), "has no 'sliding_window'"),
        (refused(shape("Gemma-3-12B"), use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (refused(shape("DeepSeek-V3"), moe_layer_freq=2), "moe_layer_freq=2"),
        (refused(shape("DeepSeek-V3"), qk_rope_head_dim=None), "has no 'qk_rope_head_dim'"),
        (refused(shape("Qwen3-30B-A3B"), decoder_sparse_step=None), "no 'decoder_sparse_step', so which layers"),
        (refused(shape("Qwen3-30B-A3B"), num_experts=None), "has no 'num_experts'"),
        (refused(shape("Qwen3-30B-A3B"), num_experts_per_tok=None), "no 'num_experts_per_tok'"),
        (refused(shape("GLM-5"), mlp_layer_types=["dense", "new"] * 4), r"mlp_layer_types\[1\] is 'new'"),
        (refused(shape("Nemotron-3-Nano-30B-A3B"), moe_latent_size=1024), "moe_latent_size=1024"),
        (
            lambda: sb.cost.TransformerCost(
                hidden_size=8, num_layers=0, num_heads=1, intermediate_size=1, vocab_size=1
            ),
            "'num_hidden_layers' must be an int >= 1, not 0",
        ),
        (
            lambda: sb.cost.TransformerCost(
                hidden_size=8, num_layers=1, num_heads=3, intermediate_size=1, vocab_size=1
            ),
            "has no 'head_dim'",
        ),
    ],
)
def test_bad_costs(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
