"""The FLOPs that ``TransformerCost.from_hf_config`` reads off a configuration, beside those of the real model.

Sizes are those of released models. Models are cut to eight layers, or as many as show every kind of layer: that hides
nothing, as the part per token and the part of attention are compared each by itself.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

from model_flops import forward_flops
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import stream_balancer as sb
from stream_balancer.cost.hf_config import FAMILIES

MEASURED = Path(__file__).parents[1] / "unit" / "model_shapes.json"
"""For the tests that run without transformers; ``python tests/integrations/test_model_shapes.py`` writes it anew."""
IN_UNIT_TESTS = (
    "Mistral-7B-v0.1",
    "Pythia-6.9B",
    "Gemma-3-12B",
    "gpt-oss-20b",
    "Llama-4-Maverick",
    "Qwen3-30B-A3B",
    "Qwen1.5-MoE-A2.7B",
    "Qwen2-MoE with dense layers",
    "ERNIE-4.5-21B-A3B",
    "DeepSeek-V3",
    "GLM-5",
    "Qwen3-Next-80B-A3B",
    "Granite-4.0-H-Small",
    "Nemotron-3-Nano-30B-A3B",
)

LENGTHS = (512, 4096, 16384, 65536)
LAYERS = 8
RATIO_ERROR = 0.015  # of the work of one length over that of another
RECURRENT_ERROR = 0.005  # linear attention and state spaces: kernels differ in what they compute once more
OTHER_ERROR = 1e-3
WITHOUT_DEFAULTS = {"gemma4_assistant"}
CAUSAL_MODELS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - WITHOUT_DEFAULTS)


def sizes(
    hidden_size: int, heads: int, kv_heads: int, intermediate_size: int, vocab_size: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        **others,
    }


def pattern(*kinds: str) -> dict[str, Any]:
    return {"layer_types": [kinds[n % len(kinds)] for n in range(LAYERS)]}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # attention of every layer over the whole rollout
    "Llama-3.1-8B": ("llama", sizes(4096, 32, 8, 14336, 128256)),
    "Qwen2.5-1.5B": ("qwen2", sizes(1536, 12, 2, 8960, 151936)),
    "Qwen3-8B": ("qwen3", sizes(4096, 32, 8, 12288, 151936, head_dim=128)),
    "Qwen3-VL-8B (text)": ("qwen3_vl_text", sizes(4096, 32, 8, 12288, 151936, head_dim=128)),
    "Mistral-7B-v0.3": ("mistral", sizes(4096, 32, 8, 14336, 32768, head_dim=128, sliding_window=None)),
    "Gemma-7B": ("gemma", sizes(3072, 16, 16, 24576, 256000, head_dim=256)),
    "GLM-4-9B": ("glm", sizes(4096, 32, 2, 13696, 151552, head_dim=128)),
    "GLM-4-32B-0414": ("glm4", sizes(6144, 48, 2, 23040, 151552, head_dim=128)),
    "Phi-4": ("phi3", sizes(5120, 40, 10, 17920, 100352, sliding_window=None)),
    "OLMo-7B": ("olmo", sizes(4096, 32, 32, 11008, 50304)),
    "OLMo-2-7B": ("olmo2", sizes(4096, 32, 32, 11008, 100352)),
    "Granite-3.3-8B": ("granite", sizes(4096, 32, 8, 12800, 49159)),
    "SmolLM3-3B": ("smollm3", sizes(2048, 16, 4, 11008, 128256)),
    "Seed-OSS-36B": ("seed_oss", sizes(5120, 80, 8, 27648, 155136, head_dim=128)),
    "ERNIE-4.5-0.3B": ("ernie4_5", sizes(1024, 16, 2, 3072, 103424, head_dim=128)),
    "Hunyuan-7B": ("hunyuan_v1_dense", sizes(4096, 32, 8, 14336, 128167, head_dim=128)),
    "Command-R": ("cohere", sizes(8192, 64, 64, 22528, 256000)),
    "Helium-1-2B": ("helium", sizes(2560, 20, 20, 7040, 48000, head_dim=128)),
    "StableLM-2-1.6B": ("stablelm", sizes(2048, 32, 32, 5632, 100352)),
    # an MLP of two matrices
    "Pythia-6.9B": ("gpt_neox", sizes(4096, 32, 32, 16384, 50432)),
    "Minitron-8B": ("nemotron", sizes(4096, 48, 8, 16384, 256000, head_dim=128)),
    "AFM-4.5B": ("arcee", sizes(2560, 20, 4, 18432, 128004)),
    "Apertus-8B": ("apertus", sizes(4096, 32, 8, 21504, 131072)),
    "Phi-2": ("phi", sizes(2560, 32, 32, 10240, 51200)),
    # windows and chunks
    "Mistral-7B-v0.1": ("mistral", sizes(4096, 32, 8, 14336, 32000, head_dim=128, sliding_window=4096)),
    "StarCoder2-7B": ("starcoder2", sizes(4608, 36, 4, 18432, 49152, sliding_window=4096)),
    "Ministral-8B": (
        "ministral",
        sizes(4096, 32, 8, 12288, 131072, head_dim=128, sliding_window=32768)
        | pattern("full_attention", "sliding_attention", "sliding_attention", "sliding_attention"),
    ),
    "Qwen2.5 with a window": (
        "qwen2",
        sizes(1536, 12, 2, 8960, 151936, use_sliding_window=True, sliding_window=4096, max_window_layers=5),
    ),
    "Gemma-2-9B": ("gemma2", sizes(3584, 16, 8, 14336, 256000, head_dim=256, sliding_window=4096)),
    "Gemma-3-12B": ("gemma3_text", sizes(3840, 16, 8, 15360, 262208, head_dim=256, sliding_window=1024)),
    "OLMo-3-7B": ("olmo3", sizes(4096, 32, 32, 11008, 100278, sliding_window=4096)),
    "Command-R7B": ("cohere2", sizes(4096, 32, 8, 14336, 256000, sliding_window=4096)),
    "EXAONE-4-32B": ("exaone4", sizes(5120, 40, 8, 27392, 102400, head_dim=128, sliding_window=4096)),
    "gpt-oss-20b": ("gpt_oss", sizes(2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32)),
    # its code computes every expert, so every one is used here
    "Llama-4-Maverick": (
        "llama4_text",
        {"num_local_experts": 2, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
    ),
    # experts
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        sizes(2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
    ),
    "Qwen3-VL-30B-A3B (text)": (
        "qwen3_vl_moe_text",
        sizes(2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768),
    ),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {}),
    "Qwen2-MoE with dense layers": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}),
    "Mixtral-8x7B": ("mixtral", sizes(4096, 32, 8, 14336, 32000, sliding_window=None)),
    "GLM-4.5-Air": ("glm4_moe", sizes(4096, 96, 8, 10944, 151552, head_dim=128)),
    "ERNIE-4.5-21B-A3B": ("ernie4_5_moe", {}),
    "MiniMax-M2": ("minimax_m2", {}),
    "dots.llm1": (
        "dots1",
        sizes(4096, 32, 32, 10944, 152064, head_dim=128, n_routed_experts=128, n_shared_experts=2)
        | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "sliding_window": None, "max_window_layers": LAYERS},
    ),
    "OLMoE-1B-7B": ("olmoe", sizes(2048, 16, 16, 1024, 50304)),
    "Phi-3.5-MoE": ("phimoe", sizes(4096, 32, 8, 6400, 32064)),
    "Granite-3.1-3B-A800M": ("granitemoe", sizes(1536, 24, 8, 512, 49155, num_local_experts=40, num_experts_per_tok=8)),
    "Granite MoE, shared expert": ("granitemoeshared", sizes(1536, 24, 8, 512, 49155, shared_intermediate_size=1024)),
    "K-EXAONE": ("exaone_moe", {}),
    # latent attention, and sparse attention
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        sizes(2048, 16, 16, 10944, 102400, q_lora_rank=None, n_routed_experts=64, n_shared_experts=2)
        | {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1},
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3.2": ("deepseek_v32", {}),
    "GLM-5": ("glm_moe_dsa", {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "MiniCPM3-4B": ("minicpm3", {}),
    # linear attention, state spaces
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
    "Qwen3.5-9B": ("qwen3_5_text", {}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {}),
    "OLMo-hybrid": ("olmo_hybrid", {}),
    "Bamba-9B": ("bamba", {"attn_layer_indices": [3]}),
    "Granite-4.0-H-Small": (
        "granitemoehybrid",
        sizes(4096, 32, 8, 768, 100352, num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536)
        | {"mamba_d_state": 128}
        | pattern("mamba", "mamba", "mamba", "attention"),
    ),
    "Granite-4.0-H-Micro (dense)": (
        "granitemoehybrid",
        sizes(2048, 32, 8, 8192, 100352, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=8192)
        | {"mamba_d_state": 128, "mamba_n_heads": 64}
        | pattern("mamba", "mamba", "mamba", "attention"),
    ),
    "Nemotron-H-8B": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp"]},
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        sizes(2688, 32, 2, 1856, 131072, head_dim=128, mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6)
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        | {"layers_block_type": ["mamba", "moe", "mamba", "moe", "attention", "moe", "mamba", "moe"]},
    ),
}


def configuration(model_type: str, fields: dict[str, Any]) -> Any:
    number = {} if "layers_block_type" in fields else {"num_hidden_layers": LAYERS}
    return AutoConfig.for_model(model_type, **number, **fields)


@pytest.mark.parametrize("name", SHAPES)
def test_the_layer_sum_is_what_the_model_computes(name: str) -> None:
    config = configuration(*SHAPES[name])
    cost, true = sb.cost.TransformerCost.from_hf_config(config), forward_flops(config)
    recurrent = FAMILIES[config.model_type].recurrent is not None
    assert cost.flops_per_token / 3 == pytest.approx(
        true.per_token, rel=RECURRENT_ERROR if recurrent else OTHER_ERROR
    ), "per token"
    for length in LENGTHS:
        assert cost.attention_flops(length) / 3.5 == pytest.approx(true.of_attention(length), rel=OTHER_ERROR), length
    trained = [3.0 * true.linear(length) + 3.5 * true.of_attention(length) for length in LENGTHS]
    for (work, expected), (other, of_other) in combinations(zip(cost(LENGTHS), trained, strict=True), 2):
        assert work / other == pytest.approx(expected / of_other, rel=RATIO_ERROR)


def test_every_model_type_that_is_accepted_is_measured() -> None:
    assert {model_type for model_type, _ in SHAPES.values()} == set(FAMILIES)


@pytest.mark.parametrize("model_type", [name for name in CAUSAL_MODELS if name not in FAMILIES])
def test_what_is_not_measured_is_refused_by_name(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    text = getattr(config, "text_config", None)
    if text is not None and text.model_type in FAMILIES:
        assert sb.cost.TransformerCost.from_hf_config(config) == sb.cost.TransformerCost.from_hf_config(text)
    else:
        with pytest.raises(ValueError, match="is not known"):
            sb.cost.TransformerCost.from_hf_config(config)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_configuration_saved_as_json_is_read_alike_or_refused(model_type: str) -> None:
    config = configuration(model_type, next(fields for name, fields in SHAPES.values() if name == model_type))
    try:
        saved = sb.cost.TransformerCost.from_hf_config(config.to_dict())
    except ValueError:
        return
    assert saved == sb.cost.TransformerCost.from_hf_config(config)


class Watched:
    """A configuration that notes which of its fields are read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.fields: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if value is not None and name != "is_heterogeneous":
            self.fields[name] = value
        return value


def measured(name: str) -> dict[str, Any]:
    """What the unit tests keep of a shape: the fields that are read, and forward FLOPs."""
    config = configuration(*SHAPES[name])
    watched, true = Watched(config), forward_flops(config)
    sb.cost.TransformerCost.from_hf_config(watched)
    attention = {str(length): true.of_attention(length) for length in LENGTHS}
    return {"config": watched.fields, "per_token": true.per_token, "attention": attention}


@pytest.mark.parametrize("name", IN_UNIT_TESTS)
def test_what_the_unit_tests_know_of_a_shape_is_true(name: str) -> None:
    assert json.loads(MEASURED.read_text())[name] == measured(name)


if __name__ == "__main__":
    MEASURED.write_text(json.dumps({name: measured(name) for name in IN_UNIT_TESTS}, indent=1) + "\n")
