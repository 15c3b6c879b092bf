"""The layer sum of a Hugging Face configuration. Nothing is guessed: a model type, a kind of layer or a size that is
not known here is refused by name. No transformers in here: fields are read off an object or a dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from stream_balancer.cost.flops import ATTENTION_PASSES, MATMUL_PASSES, AttentionPairs, LayerSumCost

INSTEAD = "give the cost model by hand: sb.cost.LayerSumCost, or sb.cost.TransformerCost for a plain decoder"


class _Reach(NamedTuple):
    """How far attention reaches back, in tokens: a window, its chunk, or, with neither, the whole rollout."""

    window: int | None = None
    chunk: int | None = None


_Work: TypeAlias = Mapping[_Reach | None, float]
"""Multiply-adds of a forward pass: per attended pair, by reach, and, under None, per token: the weights that it passes
through, and what else is linear in the length."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Facts that the fields of a configuration do not say."""

    mlp_matrices: int = 3
    """Three in a gated MLP (SwiGLU), two in one that is not."""
    layers: Literal["alike", "window", "listed"] = "alike"
    """Without ``layer_types`` layers are ``"alike"``, or all with ``sliding_window`` if that is set (``"window"``); or
    they differ, so the list is needed (``"listed"``)."""
    query_gate: bool = False
    """The query projection is twice as wide: half of it gates the output."""
    recurrent: Callable[[_Fields], float] | None = None
    """Weights of a layer of linear attention, or of a state-space layer."""
    one_block: bool = False
    """A layer is a mixer or an MLP, not both."""
    experts: tuple[str, ...] | None = None
    """None: an MLP in every layer. Else a mixture of experts, in every layer if empty, or in those that the first of
    these fields that is there says."""
    shared_experts: int = 0
    """Experts that every token passes through, where no field has their number."""
    dense_width: str = "intermediate_size"
    """Field with the width of an MLP that is no mixture of experts."""


class _Fields:
    """Fields of a configuration, an object or a dict."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, *names: str) -> Any:
        """The first of these that is there and is not None."""
        for name in names:
            value = self._config.get(name) if isinstance(self._config, Mapping) else getattr(self._config, name, None)
            if value is not None:
                return value
        return None

    def size(self, *names: str) -> int:
        """A size that is needed."""
        value = self.get(*names)
        if value is None:
            raise ValueError(f"the configuration has no {names[0]!r}; {INSTEAD}")
        return _size(names[0], value)

    def sizes(self, *names: str) -> list[int]:
        """Sizes that are needed, one of each name; "a|b": the first of these that is there."""
        return [self.size(*name.split("|")) for name in names]

    def optional(self, *names: str) -> int:
        """A size, or 0."""
        value = self.get(*names)
        return 0 if value is None or value == 0 else _size(names[0], value)


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"the configuration's {name!r} must be an int >= 1, not {value!r}; {INSTEAD}")
    return value


def layer_sum_of(config: Any, *, causal: bool = True) -> LayerSumCost:
    """Raises ValueError naming what is not known."""
    fields = _text(config)
    family = _family_of(fields)
    # the embedding is a lookup: only the projection to the vocabulary is work
    total: Counter[Any] = Counter({None: fields.size("hidden_size") * fields.size("vocab_size")})
    for part in _parts(fields, family):
        for reach, multiply_adds in part.items():
            total[reach if causal or reach is None else _Reach()] += multiply_adds  # type: ignore[assignment]
    return LayerSumCost(
        flops_per_token=MATMUL_PASSES * 2.0 * total.pop(None),
        attention=tuple(
            AttentionPairs(ATTENTION_PASSES * 2.0 * multiply_adds, reach.window, reach.chunk, causal)
            for reach, multiply_adds in total.items()
        ),
    )


def _text(config: Any) -> _Fields:
    fields = _Fields(config)
    # multimodal models nest their decoder, some of them twice
    text = fields.get("text_config")
    return fields if text is None else _text(text)


_MUST_BE = {"is_causal": True, "moe_latent_size": None, "moe_layer_freq": 1, "use_bidirectional_attention": False}
"""Fields whose other values are not known here."""


def _family_of(fields: _Fields) -> _Family:
    name = fields.get("model_type")
    if name not in FAMILIES:
        what = "the configuration has no 'model_type'" if name is None else f"model_type {name!r} is not known"
        raise ValueError(f"{what}; {INSTEAD}")
    # a sum that takes one size for all layers would be wrong without saying so
    if fields.get("is_heterogeneous", "per_layer_config"):
        raise ValueError(f"per_layer_config gives sizes of single layers, which are not known here; {INSTEAD}")
    for field, known in _MUST_BE.items():
        if fields.get(field) not in (None, known):
            raise ValueError(f"{field}={fields.get(field)!r} is not known here; {INSTEAD}")
    return FAMILIES[name]


# -- layers ------------------------------------------------------------------------------------------------------------


def _parts(fields: _Fields, family: _Family) -> Iterator[_Work]:
    for index, kind in enumerate(_kinds(fields, family)):
        if kind in _REACHES:
            yield _attention(fields, family, kind, index)
        elif kind in ("linear_attention", "mamba") and family.recurrent:
            yield {None: family.recurrent(fields)}
        elif not family.one_block or kind not in ("mlp", "moe"):
            raise ValueError(f"layer {index} is of kind {kind!r}, which is not known here; {INSTEAD}")
        if kind == "moe" or (not family.one_block and _has_experts(fields, family, index)):
            yield {None: _experts(fields, family)}
        elif kind == "mlp" or not family.one_block:
            yield {None: family.mlp_matrices * fields.size("hidden_size") * fields.size(family.dense_width)}


_REACHES: dict[str, Callable[[_Fields], _Reach]] = {
    "full_attention": lambda _: _Reach(),
    "attention": lambda _: _Reach(),
    "sliding_attention": lambda fields: _Reach(window=fields.size("sliding_window")),
    "chunked_attention": lambda fields: _Reach(chunk=fields.size("attention_chunk_size")),
    "indexed_attention": lambda fields: _Reach(window=fields.size("index_topk")),  # it chooses so many
}


def _kinds(fields: _Fields, family: _Family) -> list[str]:
    listed = fields.get("layer_types", "layers_block_type")
    if listed is not None:
        kinds = list(listed)
        number = fields.get("num_hidden_layers")
        if number is not None and number != len(kinds):
            raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers={number}; {INSTEAD}")
        return kinds
    # a window in the file is unused where use_sliding_window is False (Qwen2)
    window = fields.get("sliding_window") if fields.get("use_sliding_window") in (None, True) else None
    if family.layers == "listed" or (window and family.layers != "window"):
        raise ValueError(
            "the configuration has no 'layer_types', and this model's layers differ: read it with "
            f"transformers.AutoConfig, which fills them in, or {INSTEAD}"
        )
    return ["sliding_attention" if window else "full_attention"] * fields.size("num_hidden_layers")


def _attention(fields: _Fields, family: _Family, kind: str, index: int) -> _Work:
    hidden, heads = fields.sizes("hidden_size", "num_attention_heads")
    reach = _REACHES[kind](fields)
    if fields.get("kv_lora_rank") is not None:
        return _latent_attention(fields, reach, kind, index)
    # absent or 0 in older files: every head has its own keys
    kv_heads = fields.optional("num_key_value_heads") or heads
    key = fields.optional("head_dim") or _quotient(hidden, heads)
    value = fields.optional("v_head_dim") or key
    queries = (2 if family.query_gate else 1) * heads * key
    weights = hidden * (queries + kv_heads * (key + value) + heads * value)
    return {None: weights, reach: heads * (key + value)}


def _quotient(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"the configuration has no 'head_dim', and hidden_size / heads = {hidden / heads}; {INSTEAD}")
    return hidden // heads


def _latent_attention(fields: _Fields, reach: _Reach, kind: str, index: int) -> _Work:
    """Multi-head latent attention: keys and values are computed from a small vector per token."""
    hidden, heads = fields.sizes("hidden_size", "num_attention_heads")
    latent, rope, nope, value = fields.sizes("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    key = nope + rope
    query_latent = fields.optional("q_lora_rank")
    # small models project queries directly, without a latent
    weights = query_latent * (hidden + heads * key) if query_latent else hidden * heads * key
    weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    work: dict[_Reach | None, float] = {None: weights, reach: heads * (key + value)}
    # the indexer of sparse attention looks at every pair, however few of them attention then uses
    kinds = fields.get("indexer_types")
    if kind == "indexed_attention" and (kinds is None or kinds[index] == "full"):
        indexer_heads, size, rank = fields.sizes("index_n_heads", "index_head_dim", "q_lora_rank")
        work[None] += rank * indexer_heads * size + hidden * (size + indexer_heads)
        work[_Reach()] = indexer_heads * (size + 1)
    return work


# -- linear attention and state spaces ---------------------------------------------------------------------------------

_DELTA_CHUNK = 64  # tokens, in every kernel of the delta rule


def _gated_delta(fields: _Fields) -> float:
    hidden, heads, key_heads = fields.sizes("hidden_size", "linear_num_value_heads", "linear_num_key_heads")
    key, value = fields.sizes("linear_key_head_dim", "linear_value_head_dim")
    keys, values = key_heads * key, heads * value
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    return projections + heads * (3 * key * value + _DELTA_CHUNK * (3 * key + 2 * value))


def _mamba2(fields: _Fields) -> float:
    hidden, heads, size = fields.sizes("hidden_size", "mamba_n_heads|mamba_num_heads", "mamba_d_head|mamba_head_dim")
    state, groups = fields.sizes("mamba_d_state|ssm_state_size", "mamba_n_groups|n_groups")
    chunk, inner = fields.size("mamba_chunk_size", "chunk_size"), heads * size
    projections = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    return projections + chunk * (heads * state + inner) + 2 * state * inner


# -- MLPs and experts --------------------------------------------------------------------------------------------------

_TOP_K = ("num_experts_per_tok", "moe_k")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def _has_experts(fields: _Fields, family: _Family, index: int) -> bool:
    """True if the MLP of this layer is a mixture of experts."""
    if family.experts is None or fields.get(*_NUM_EXPERTS) == 0:
        return False
    if family.experts and fields.get(*family.experts) is None:
        raise ValueError(f"the configuration has no {family.experts[0]!r}, so which layers have experts? {INSTEAD}")
    listed = fields.get("mlp_layer_types")
    if listed is not None:
        if listed[index] not in ("dense", "sparse"):
            raise ValueError(f"mlp_layer_types[{index}] is {listed[index]!r}, which is not known here; {INSTEAD}")
        return bool(listed[index] == "sparse")
    chosen = fields.get("moe_layers")
    if chosen is not None:
        return index in chosen
    # DeepSeek, ERNIE: the first layers are dense
    first = fields.optional("first_k_dense_replace", "moe_layer_start_index")
    last = fields.get("moe_layer_end_index")
    if index < first or (last is not None and 0 <= last < index) or index in (fields.get("mlp_only_layers") or ()):
        return False
    # Qwen counts from 1: every step-th layer has experts
    step = fields.optional("decoder_sparse_step", "moe_layer_interval") or 1
    return (index + 1) % step == 0


def _experts(fields: _Fields, family: _Family) -> float:
    """The experts of a token, those that every token passes through, and the choice."""
    hidden = fields.size("hidden_size")
    width = fields.optional("moe_intermediate_size") or fields.size("intermediate_size")
    # given as one width of all shared experts, or as their number
    shared = fields.optional(*_SHARED_WIDTH)
    if not shared:
        number = fields.get(*_NUM_SHARED)
        shared = (family.shared_experts if number is None else number) * width
    chosen = fields.size(*_TOP_K)
    return hidden * (family.mlp_matrices * (chosen * width + shared) + fields.size(*_NUM_EXPERTS))


# -- what is known -----------------------------------------------------------------------------------------------------

_AFTER_DENSE_ONES = ("mlp_layer_types", "first_k_dense_replace")

_TABLE: tuple[tuple[str, _Family], ...] = (
    # layers alike, or, where layer_types is there, as it says
    (
        "cohere ernie4_5 gemma glm glm4 granite helium hunyuan_v1_dense llama minicpm3 olmo olmo2 qwen2 qwen3 "
        "qwen3_vl_text seed_oss smollm3 stablelm",
        _Family(),
    ),
    ("apertus arcee gpt_neox nemotron phi", _Family(mlp_matrices=2)),
    ("mistral phi3", _Family(layers="window")),
    ("starcoder2", _Family(layers="window", mlp_matrices=2)),
    ("granitemoe granitemoeshared minimax_m2 olmoe", _Family(experts=())),
    ("mixtral phimoe", _Family(layers="window", experts=())),
    ("qwen2_moe qwen3_moe qwen3_vl_moe_text", _Family(experts=("decoder_sparse_step",))),
    ("ernie4_5_moe", _Family(experts=("moe_layer_start_index",))),
    ("deepseek_v2 deepseek_v3 dots1 glm4_moe glm4_moe_lite", _Family(experts=_AFTER_DENSE_ONES)),
    # layers of several kinds: windows, chunks, sparse attention
    ("cohere2 exaone4 gemma2 gemma3_text ministral olmo3", _Family(layers="listed")),
    ("gpt_oss", _Family(layers="listed", experts=())),
    ("deepseek_v32 exaone_moe glm_moe_dsa", _Family(layers="listed", experts=_AFTER_DENSE_ONES)),
    (
        "llama4_text",
        _Family(layers="listed", experts=("moe_layers",), shared_experts=1, dense_width="intermediate_size_mlp"),
    ),
    # linear attention and state spaces beside attention
    ("qwen3_5_text", _Family(layers="listed", recurrent=_gated_delta, query_gate=True)),
    ("qwen3_5_moe_text", _Family(layers="listed", recurrent=_gated_delta, query_gate=True, experts=())),
    (
        "qwen3_next",
        _Family(layers="listed", recurrent=_gated_delta, query_gate=True, experts=("decoder_sparse_step",)),
    ),
    ("olmo_hybrid", _Family(layers="listed", recurrent=_gated_delta)),
    ("bamba", _Family(layers="listed", recurrent=_mamba2)),
    (
        "granitemoehybrid",
        _Family(layers="listed", recurrent=_mamba2, experts=(), dense_width="shared_intermediate_size"),
    ),
    ("nemotron_h", _Family(layers="listed", recurrent=_mamba2, one_block=True, mlp_matrices=2)),
)

FAMILIES = {name: family for names, family in _TABLE for name in names.split()}
"""By ``model_type``. Each is measured beside the real model by the integration tests."""
