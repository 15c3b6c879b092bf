"""A small decoder transformer that trains on packed rollouts and samples with a key-value cache.

The two ways through it, :meth:`Decoder.forward` and :meth:`Decoder.decode`, must give the same logits: the trainer's
log-probabilities are compared with the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cache", "Decoder"]

_MLP_FACTOR = 4  # width of the MLP, in hidden sizes


@dataclass(eq=False)
class Cache:
    """Keys and values of ``slots`` sequences of up to ``max_tokens`` tokens, per layer."""

    keys: Tensor
    """[layers, slots, heads, max_tokens, head_dim]"""
    values: Tensor
    """[layers, slots, heads, max_tokens, head_dim]"""


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and a residual."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, _MLP_FACTOR * hidden_size)
        self.down = nn.Linear(_MLP_FACTOR * hidden_size, hidden_size)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] -> queries, keys, values, each [n, heads, head_dim]."""
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """``x`` [n, hidden] and what its tokens attended to [n, heads, head_dim] -> [n, hidden]."""
        x = x + self.out(attended.reshape(x.shape))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, and a projection back to the vocabulary."""

    def __init__(self, *, vocab_size: int, hidden_size: int = 128, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Packed ``input_ids`` and ``position_ids`` [T], rollout ``i`` at ``cu_seqlens[i]:cu_seqlens[i + 1]`` -> logits
        [T, vocabulary]."""
        x = self.embedding(input_ids)
        rotation = _rotation(position_ids, self.head_dim, x.dtype)
        for block in self._layers():
            x = block.finish(x, _attend_packed(*block.project(x, rotation), cu_seqlens))
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def decode(self, input_ids: Tensor, position_ids: Tensor, slots: Tensor, cache: Cache) -> Tensor:
        """One token of each of ``n`` sequences, by id, position and slot [n] -> logits of the next [n, vocabulary].

        Keys and values join the cache.
        """
        x = self.embedding(input_ids)
        rotation = _rotation(position_ids, self.head_dim, x.dtype)
        longest = int(position_ids.max()) + 1
        seen = (torch.arange(longest) <= position_ids[:, None])[:, None, None]
        for layer, block in enumerate(self._layers()):
            q, k, v = block.project(x, rotation)
            cache.keys[layer, slots, :, position_ids] = k
            cache.values[layer, slots, :, position_ids] = v
            keys, values = cache.keys[layer, slots, :, :longest], cache.values[layer, slots, :, :longest]
            attended = functional.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen)
            x = block.finish(x, attended[:, :, 0])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _layers(self) -> Iterator[Block]:
        return cast("Iterator[Block]", iter(self.blocks))

    def new_cache(self, slots: int, max_tokens: int) -> Cache:
        """An empty one."""
        shape = (len(self.blocks), slots, self.num_heads, max_tokens, self.head_dim)
        return Cache(torch.zeros(shape), torch.zeros(shape))


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention within each rollout, [T, heads, head_dim] each -> [T, heads, head_dim].

    On a GPU this is one call of a variable-length kernel; on a CPU a loop over the rollouts is the fastest form.
    """
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # the kernel wants a batch, then heads
    rollouts = [slice(start, end) for start, end in pairwise(cu_seqlens.tolist())]
    attended = [
        functional.scaled_dot_product_attention(q[:, :, one], k[:, :, one], v[:, :, one], is_causal=True)
        for one in rollouts
    ]
    return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1)


def _rotation(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [n, 1, head_dim / 2] of the rotary angles."""
    half = head_dim // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (position_ids[:, None] * frequency)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[n, heads, head_dim], each pair of halves turned by the token's angle."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
