"""The demo's small decoder, with attention around a ring where ranks share a rollout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ring import Ring, ring_attention
from stream_balancer_demo import model
from torch import Tensor
from torch.nn import functional

import stream_balancer as sb

__all__ = ["Decoder", "aligned_groups", "loss_sum", "ring_of"]

Groups = dict[tuple[int, ...], dist.ProcessGroup]
"""A process group for each set of ranks that may share a rollout."""


class Decoder(model.Decoder):
    """Everything but attention works on tokens one by one; rotary positions are those in the whole rollout."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, ring: Ring | None = None) -> Tensor:
        """As the demo's. With a ring: of each rollout, the part that this member has."""
        if ring is None:
            return super().forward(input_ids, position_ids, cu_seqlens)
        x = self.embedding(input_ids)
        rotation, lengths = self.rotation(position_ids, x), cu_seqlens.diff().tolist()
        for block in self.layers():
            split = [
                torch.split(one.transpose(0, 1).unsqueeze(0), lengths, dim=2) for one in block.project(x, rotation)
            ]
            attended = [ring_attention(q, k, v, ring) for q, k, v in zip(*split, strict=True)]
            x = block.finish(x, torch.cat(attended, dim=2).squeeze(0).transpose(0, 1))
        logits: Tensor = self.head(self.norm(x))
        return logits


def aligned_groups(sizes: tuple[int, ...]) -> Groups:
    """Of every aligned block of so many ranks. All ranks make all of them, in one order."""
    world = dist.get_world_size()
    blocks = [tuple(range(first, first + size)) for size in sizes if size > 1 for first in range(0, world, size)]
    return {block: dist.new_group(list(block)) for block in blocks if block[-1] < world}


def ring_of(micro_batch: sb.rollouts.MicroBatch, groups: Groups) -> Ring | None:
    """None where this rank has its rollouts to itself."""
    if not micro_batch.cp_group:
        return None
    return Ring(micro_batch.cp_group, micro_batch.cp_rank, groups[micro_batch.cp_group])


def loss_sum(model: Decoder, micro_batch: sb.rollouts.MicroBatch, ring: Ring | None = None) -> Tensor:
    """Sum of the negative log-likelihood of the next tokens that are trained on, here: to be divided by the step's
    ``global_num_loss_tokens``, and summed over ranks."""
    packed = micro_batch.packed(shift=True)  # its targets know the token after a chunk's last one, on another rank
    logits = model(packed["input_ids"], packed.position_ids, packed.cu_seqlens, ring)
    targets = torch.where(packed["loss_mask"] != 0, packed["targets"], -100)
    return functional.cross_entropy(logits, targets.long(), reduction="sum", ignore_index=-100)
