"""FLOPs of a forward pass of a real ``transformers`` model, counted on the meta device.

Matmuls are counted by ``FlopCounterMode``. Attention is replaced by a function that computes nothing and notes heads,
head sizes and the mask function that the model itself built; the pairs are those that this function allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NOTED = "noted"
BASES = (512, 1024)  # lengths of the passes
ROWS = 256  # of a mask, in pairs of neighbours: exact while a row's allowed keys grow linearly between them


@dataclass(frozen=True)
class Attention:
    """Layers alike, of one pass."""

    mask: MaskFunction
    multiply_adds: int
    """Per pair: heads x (size of a key + size of a value)."""


_calls: Counter[Attention] = Counter()


@dataclass(frozen=True)
class ForwardFlops:
    """Of one model, at any length."""

    per_token: float
    per_token_squared: float
    """Of what is neither linear nor softmax attention: the scores of a sparse attention's indexer."""
    attention: dict[Attention, int]

    def linear(self, length: int) -> float:
        return self.per_token * length

    def of_attention(self, length: int) -> float:
        indexer = self.per_token_squared * length * (length + 1) / 2  # computed of all pairs, needed of half of them
        return indexer + sum(
            2.0 * number * one.multiply_adds * _pairs(one.mask, length) for one, number in self.attention.items()
        )


def forward_flops(config: Any) -> ForwardFlops:
    """Two short passes of a model of this configuration."""
    (short, attention), (long, _) = (_counted(config, length) for length in BASES)
    slope = (long / BASES[1] - short / BASES[0]) / (BASES[1] - BASES[0])
    if getattr(config, "index_topk", None) is None:
        assert abs(slope) * BASES[1] < 1e-3 * long / BASES[1], "what is not attention is linear in the length"
        return ForwardFlops(long / BASES[1], 0.0, dict(attention))
    return ForwardFlops(short / BASES[0] - slope * BASES[0], slope, dict(attention))


def _counted(config: Any, length: int) -> tuple[int, Counter[Attention]]:
    _calls.clear()
    is_decoder_alone = config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # the text part of a vision model
    make = AutoModel if is_decoder_alone else AutoModelForCausalLM
    with (
        torch.device("meta"),
        torch.no_grad(),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),  # looks at values
        mock.patch.object(masking_utils, "chunked_causal_mask_function", _chunked),
        FlopCounterMode(display=False) as counter,
    ):
        model = make.from_config(config, attn_implementation=NOTED)
        model.set_experts_implementation("batched_mm")  # the top-k experts of every token, and no other
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    flops = counter.get_total_flops()
    if is_decoder_alone:
        flops += 2 * length * config.hidden_size * config.vocab_size
    return flops, Counter(_calls)


_chunked_of_transformers = masking_utils.chunked_causal_mask_function


def _chunked(chunk_size: int, left_padding: Tensor) -> MaskFunction:
    mask: MaskFunction = _chunked_of_transformers(chunk_size, torch.zeros(left_padding.shape, device="cpu"))
    return mask


def _note_mask(*_: Any, q_length: int, kv_length: int, mask_function: MaskFunction, **__: Any) -> Tensor:
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


def _note_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    is_sparse = arguments.get("indices") is not None  # which tokens it chooses is data; how many is not
    mask = _ChosenTokens(module.config.index_topk) if is_sparse else attention_mask.mask_function
    heads = query.shape[1]
    _calls[Attention(mask, heads * (key.shape[-1] + value.shape[-1]))] += 1
    return query.new_empty(query.shape[0], query.shape[2], heads, value.shape[-1]), None


@dataclass(frozen=True)
class _ChosenTokens:
    number: int

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - self.number)


def _pairs(mask: MaskFunction, length: int) -> float:
    step = 2 * length // ROWS
    middles = torch.arange(ROWS // 2) * step + step // 2
    rows = torch.cat([middles - 1, middles])[:, None]
    zero = torch.tensor(0)
    allowed = mask(zero, zero, rows, torch.arange(length)[None, :])
    return float(allowed.expand(ROWS, length).sum()) * length / ROWS


AttentionInterface.register(NOTED, _note_attention)
AttentionMaskInterface.register(NOTED, _note_mask)
