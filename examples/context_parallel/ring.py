"""Ring attention: causal attention over a rollout whose tokens lie on several ranks, two chunks on each.

A rollout that ``g`` ranks share is cut into ``2 g`` chunks of ``c`` tokens, and member ``j`` holds chunks ``j`` and
``2 g - 1 - j``: one early and one late, so that all members have as many pairs of tokens to attend to. Keys and values
go around the ring, one member further at each of ``g`` turns; partial results are merged by their log-sum-exp. In
backward they go around once more, and their gradients with them, home again after ``g`` turns.

Of what member ``i`` sends, member ``j`` needs

* all of its own, causally: its late chunk comes after its early one;
* the early chunk only, if ``i < j``: the late one comes after all that ``j`` has;
* both chunks, for its late queries only, if ``i > j``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ring", "attend", "attend_backward", "merge", "ring_attention"]


@dataclass(frozen=True)
class Ring:
    """The ranks that share a rollout, as one of them sees them."""

    ranks: Sequence[int]
    """Global ranks in ring order: member ``j`` has chunks ``j`` and ``2 g - 1 - j``."""
    place: int
    """This rank is ``ranks[place]``."""
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    def source(self, turn: int) -> int:
        """Whose keys and values are here at this turn."""
        return (self.place - turn) % self.size

    def pass_on(self, block: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send to the next member; what will have come from the one before when all the works are done."""
        block, coming = block.contiguous(), torch.empty_like(block, memory_format=torch.contiguous_format)
        following, before = self.ranks[(self.place + 1) % self.size], self.ranks[self.place - 1]
        sent = dist.isend(block, following, self.group)
        received = dist.irecv(coming, before, self.group)
        assert sent is not None
        assert received is not None
        return coming, [sent, received]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Causal attention of this member's queries, ``[1, heads, 2 c, head_dim]`` each -> the same shape.

    All members call it in the same order. What lies beyond the rollout's end comes last, where no token sees it.
    """
    out: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        block = torch.stack((k, v))  # one message
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for turn in range(ring.size):
            coming = ring.pass_on(block) if turn + 1 < ring.size else None  # while this turn computes
            queries, keys = _needed(ring, turn, q.shape[2])
            part = attend(q[:, :, queries], block[0][:, :, keys], block[1][:, :, keys], causal=turn == 0)
            merge((out[:, :, queries], lse[:, :, queries]), part)
            if coming is not None:
                block = _arrived(*coming)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        block = torch.stack((k, v))
        grad_q, grad_block = torch.zeros_like(q), torch.zeros_like(block)
        for turn in range(ring.size):
            coming = ring.pass_on(block) if turn + 1 < ring.size else None
            queries, keys = _needed(ring, turn, q.shape[2])
            part_q, *part_kv = attend_backward(
                gradients[0][:, :, queries],
                q[:, :, queries],
                (block[0][:, :, keys], block[1][:, :, keys]),
                (out[:, :, queries], lse[:, :, queries]),
                causal=turn == 0,
            )
            grad_q[:, :, queries] += part_q
            grad_block[:, :, :, keys] += torch.stack(part_kv)
            grad_block = _arrived(*ring.pass_on(grad_block))  # follows its block; the last turn brings it home
            if coming is not None:
                block = _arrived(*coming)
        return grad_q, grad_block[0], grad_block[1], None


def _needed(ring: Ring, turn: int, tokens: int) -> tuple[slice, slice]:
    """Which queries of this member attend to which keys of the member whose block is here; see the top."""
    everything = slice(None)
    if turn == 0:
        return everything, everything
    if ring.source(turn) < ring.place:
        return everything, slice(0, tokens // 2)
    return slice(tokens // 2, None), everything


def _arrived(block: Tensor, works: list[dist.Work]) -> Tensor:
    for work in works:
        work.wait()
    return block


def merge(total: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]) -> None:
    """Outputs and log-sum-exps of the same queries on further keys, into the first in place."""
    (out, lse), (part_out, part_lse) = total, part
    together = torch.logaddexp(lse, part_lse)
    out.mul_((lse - together).exp()[..., None]).add_(part_out * (part_lse - together).exp()[..., None])
    lse.copy_(together)


# The CPU's own kernels, by the names under which torch has them: a GPU's are called the same without `_for_cpu`.


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """``[1, heads, queries, head_dim]`` and the log-sum-exp of its scores ``[1, heads, queries]``."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, kv: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of q, k and v, given the output and log-sum-exp over *all* keys."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, *kv, *whole, 0.0, causal
    )
    return gradients
