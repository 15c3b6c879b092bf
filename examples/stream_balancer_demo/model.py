"""A small decoder transformer that trains on packed rollouts.

Rollouts lie end to end in one ``[T]`` row; everything but attention works on tokens, and attention runs on one rollout
at a time, so no token ever sees another rollout. That is what variable-length kernels do on a GPU; on a CPU a loop over
slices is the fastest form, because nothing is computed for pairs of tokens of different rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import stream_balancer as sb
from stream_balancer_demo.options import DemoOptions

__all__ = ["Block", "Decoder", "build_model", "loss_sum", "training_cost"]

_MLP_FACTOR = 4  # width of the MLP, in hidden sizes


class Block(nn.Module):
    """Causal self-attention with rotary positions, and an MLP; each behind a layer norm and a residual."""

    def __init__(self, hidden_size: int, num_heads: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.activation = num_heads, activation
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, _MLP_FACTOR * hidden_size)
        self.down = nn.Linear(_MLP_FACTOR * hidden_size, hidden_size)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] and cos and sin [T, 1, head_dim / 2] -> queries, keys, values, each [T, heads, head_dim]."""
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """``x`` [T, hidden] and what its tokens attended to [T, heads, head_dim] -> [T, hidden]."""
        x = x + self.out(attended.reshape(x.shape))
        out: Tensor = x + self.down(self.activation(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, and a projection back to the vocabulary. ReLU is what a CPU does fastest."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        activation: Callable[[Tensor], Tensor] = functional.relu,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, activation) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Packed ``input_ids`` and ``position_ids`` [T], rollout ``i`` at ``cu_seqlens[i]:cu_seqlens[i + 1]`` -> logits
        [T, vocabulary]."""
        x = self.embedding(input_ids)
        rotation, lengths = self.rotation(position_ids, x), cu_seqlens.diff().tolist()
        for block in self.layers():
            x = block.finish(x, _attend_packed(*block.project(x, rotation), lengths))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def layers(self) -> Iterator[Block]:
        """The blocks in their order."""
        return cast("Iterator[Block]", iter(self.blocks))

    def rotation(self, position_ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, head_dim / 2] of the rotary angles, for ``x``."""
        half = self.head_dim // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = (position_ids.to(torch.float64)[:, None] * frequency)[:, None, :]
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def build_model(options: DemoOptions, dtype: torch.dtype = torch.float32) -> Decoder:
    """The demo's model, with the same weights in every process that asks with the same options."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads")
        model = Decoder(**{name: getattr(options, name) for name in sizes})
    return model.to(dtype)


def loss_sum(model: Decoder, micro_batch: sb.rollouts.MicroBatch) -> Tensor:
    """Sum over trained tokens of their negative log-likelihood: to be divided by the *step's*
    ``global_num_loss_tokens``.
    """
    packed = micro_batch.packed(shift=True)
    logits = model(packed["input_ids"], packed.position_ids, packed.cu_seqlens)
    targets = torch.where(packed["loss_mask"] != 0, packed["targets"], -100)
    return functional.cross_entropy(logits, targets.long(), reduction="sum", ignore_index=-100)


def training_cost(options: DemoOptions) -> sb.cost.TransformerCost:
    """Work of a rollout for this model, in FLOPs.

    It predicts a CPU's seconds as well as a curve fitted to measured ones: over packs of 1 to 11 rollouts both were off
    by 3 % (mean, weighted by seconds), ``TokenCost`` by 14 %.
    """
    return sb.cost.TransformerCost(
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        intermediate_size=_MLP_FACTOR * options.hidden_size,
        vocab_size=options.vocab_size,
        gated_mlp=False,
    )


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention within each rollout: [T, heads, head_dim] each -> [T, heads, head_dim]."""
    # the kernel wants a batch, then heads
    split = [torch.split(x.transpose(0, 1).unsqueeze(0), lengths, dim=2) for x in (q, k, v)]
    attended = [
        functional.scaled_dot_product_attention(q_, k_, v_, is_causal=True) for q_, k_, v_ in zip(*split, strict=True)
    ]
    return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[T, heads, head_dim], each pair of halves turned by the token's angle."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
