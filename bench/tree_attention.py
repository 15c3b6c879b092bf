"""The demo's decoder on the unique tokens of a micro-batch: attention computes each pair of tokens once.

A node's queries attend to their own node causally and to all of every parent; parts are merged as ring attention merges
turns. So the work is what the planner counts, which no dense mask gives.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from stream_balancer_demo.model import Decoder
from torch import Tensor
from torch.nn import functional

import stream_balancer as sb
from stream_balancer.types.trees import Node

sys.path.append(str(Path(__file__).parents[1] / "examples" / "context_parallel"))
from ring import attend, attend_backward, merge

__all__ = ["tree_loss_sum"]

Nodes = tuple[Node, ...]


def tree_loss_sum(model: Decoder, micro_batch: sb.types.MicroBatch) -> Tensor:
    """As the demo's ``loss_sum``, on each shared prefix once."""
    packed, unique = micro_batch.packed(), micro_batch.tree()
    x = model.embedding(unique["input_ids"])
    rotation = model.rotation(unique.position_ids, x)
    for block in model.layers():
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in block.project(x, rotation))
        attended: Tensor = _TreeAttention.apply(q, k, v, unique.nodes)  # type: ignore[no-untyped-call]
        x = block.finish(x, attended.squeeze(0).transpose(0, 1))
    logits = model.head(model.norm(x))
    predicts = packed.next("loss_mask") != 0
    targets = packed.next("input_ids")[predicts]
    return functional.cross_entropy(logits[unique.index[predicts]], targets.long(), reduction="sum")


class _TreeAttention(torch.autograd.Function):
    """Of ``[1, heads, U, head_dim]`` each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, nodes: Nodes) -> Tensor:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for queries, keys, own in _pairs(nodes):
            part = attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal=own)
            merge((out[:, :, queries], lse[:, :, queries]), part)
        ctx.nodes = nodes
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(one) for one in (q, k, v)]
        for queries, keys, own in _pairs(ctx.nodes):
            parts = attend_backward(
                gradients[0][:, :, queries],
                q[:, :, queries],
                (k[:, :, keys], v[:, :, keys]),
                (out[:, :, queries], lse[:, :, queries]),
                causal=own,
            )
            for grad, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
                grad[:, :, rows] += part
        return grads[0], grads[1], grads[2], None


def _pairs(nodes: Nodes) -> list[tuple[slice, slice, bool]]:
    """Rows of queries, rows of keys, and whether they are the same node's."""
    pairs = []
    for node in nodes:
        queries = slice(node.start, node.stop)
        pairs.append((queries, queries, True))
        parent = node.parent
        while parent >= 0:
            pairs.append((queries, slice(nodes[parent].start, nodes[parent].stop), False))
            parent = nodes[parent].parent
    return pairs
