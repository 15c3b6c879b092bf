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


SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def shapes() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: the type, and the fields of a configuration; of ``layer_types``, what is repeated. What is not given is
    the type's own. Llama 4's code computes every expert, so every one is used."""
    found = {}
    for name, (model_type, sizes, fields) in json.loads(
        Path(__file__).with_name("model_shapes.json").read_text()
    ).items():
        if "layer_types" in fields:
            fields["layer_types"] = (fields["layer_types"] * LAYERS)[:LAYERS]
        found[name] = (model_type, dict(zip(SIZES, sizes, strict=False)) | fields)
    return found


SHAPES = shapes()


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
