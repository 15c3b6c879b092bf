"""A small decoder transformer that trains on packed rollouts and samples with a key-value cache.

The two ways through it, ``forward`` (the demo's) and :meth:`Decoder.decode`, must give the same logits: the trainer's
log-probabilities are compared with the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from stream_balancer_demo import model
from torch import Tensor
from torch.nn import functional

__all__ = ["Cache", "Decoder"]


@dataclass(eq=False)
class Cache:
    """Keys and values of ``slots`` sequences of up to ``max_tokens`` tokens, per layer."""

    keys: Tensor
    """[layers, slots, heads, max_tokens, head_dim]"""
    values: Tensor
    """[layers, slots, heads, max_tokens, head_dim]"""


class Decoder(model.Decoder):
    """``forward`` attends within each rollout by ``cu_seqlens``: on a GPU one call of a variable-length kernel."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes, activation=functional.gelu)

    @torch.no_grad()
    def decode(self, input_ids: Tensor, position_ids: Tensor, slots: Tensor, cache: Cache) -> Tensor:
        """One token of each of ``n`` sequences, by id, position and slot [n] -> logits of the next [n, vocabulary].

        Keys and values join the cache.
        """
        x = self.embedding(input_ids)
        rotation = self.rotation(position_ids, x)
        longest = int(position_ids.max()) + 1
        seen = (torch.arange(longest) <= position_ids[:, None])[:, None, None]
        for layer, block in enumerate(self.layers()):
            q, k, v = block.project(x, rotation)
            cache.keys[layer, slots, :, position_ids] = k
            cache.values[layer, slots, :, position_ids] = v
            keys, values = cache.keys[layer, slots, :, :longest], cache.values[layer, slots, :, :longest]
            attended = functional.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen)
            x = block.finish(x, attended[:, :, 0])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def new_cache(self, slots: int, max_tokens: int) -> Cache:
        """An empty one."""
        shape = (len(self.blocks), slots, self.num_heads, max_tokens, self.head_dim)
        return Cache(torch.zeros(shape), torch.zeros(shape))
