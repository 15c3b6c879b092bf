"""A small decoder transformer that trains on packed rollouts.

Rollouts lie end to end in one ``[T]`` row; everything but attention works on tokens, and attention runs on one rollout
at a time, so no token ever sees another rollout. That is what variable-length kernels do on a GPU; on a CPU a loop over
slices is the fastest form, because nothing is computed for pairs of tokens of different rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stream_balancer.cost import TransformerCost
from stream_balancer.demo.options import DemoOptions
from stream_balancer.types import MicroBatch

__all__ = ["Decoder", "build_model", "loss_sum", "training_cost"]

_MLP_FACTOR = 4  # width of the MLP, in hidden sizes


class Block(nn.Module):
    """Causal self-attention within each rollout, with rotary positions, and an MLP; each behind a layer norm and a
    residual."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, _MLP_FACTOR * hidden_size)
        self.down = nn.Linear(_MLP_FACTOR * hidden_size, hidden_size)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """``x`` [T, hidden], ``rotation`` cos and sin [T, 1, head_dim / 2], ``lengths`` per rollout -> [T, hidden]."""
        q, k, v = self.qkv(self.norm1(x)).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        of_each = zip(*(torch.split(of_all, list(lengths)) for of_all in (q, k, v)), strict=True)
        x = x + self.out(torch.cat([_attend(*qkv) for qkv in of_each]).reshape(x.shape))
        out: Tensor = x + self.down(functional.relu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, and a projection back to the vocabulary."""

    def __init__(self, options: DemoOptions) -> None:
        super().__init__()
        hidden_size = options.hidden_size
        self.head_dim = hidden_size // options.num_heads
        self.embedding = nn.Embedding(options.vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, options.num_heads) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, options.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Packed ``input_ids`` and ``position_ids`` [T] of rollouts of ``lengths`` tokens -> logits [T, vocabulary]."""
        x = self.embedding(input_ids)
        half = self.head_dim // 2
        frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = (position_ids.to(torch.float64)[:, None] * frequency)[:, None, :]
        rotation = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation, lengths)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(options: DemoOptions, dtype: torch.dtype = torch.float32) -> Decoder:
    """The demo's model, with the same weights in every process that asks with the same options."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return Decoder(options).to(dtype)


def loss_sum(model: Decoder, micro_batch: MicroBatch) -> Tensor:
    """Sum over trained tokens of their negative log-likelihood: to be divided by the *step's*
    ``global_num_loss_tokens``.

    Token ``t`` is predicted from the tokens before it in its own rollout, so a rollout's first token is never
    predicted; the demo's rollouts begin with a prompt, which is not trained on anyway.
    """
    packed = micro_batch.packed()
    ids = packed["input_ids"]
    logits = model(ids, packed.position_ids, micro_batch.lengths)
    trained = (packed["loss_mask"] != 0) & (packed.position_ids > 0)
    targets = torch.where(trained, ids, -100)[1:]
    return functional.cross_entropy(logits[:-1], targets.long(), reduction="sum", ignore_index=-100)


def training_cost(options: DemoOptions) -> TransformerCost:
    """Work of a rollout for this model, in FLOPs.

    It predicts a CPU's seconds as well as a curve fitted to measured ones: over packs of 1 to 11 rollouts both were off
    by 3 % (mean, weighted by seconds), ``TokenCost`` by 14 %.
    """
    return TransformerCost(
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        intermediate_size=_MLP_FACTOR * options.hidden_size,
        vocab_size=options.vocab_size,
        gated_mlp=False,
    )


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one rollout: [L, heads, head_dim] each -> [L, heads, head_dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # the kernel wants a batch, then heads
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[T, heads, head_dim], each pair of halves turned by the token's angle."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
