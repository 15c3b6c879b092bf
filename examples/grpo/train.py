"""The training side: GRPO's loss on packed micro-batches, and one optimizer step over a rank batch.

Ranks hold different numbers of rollouts and tokens. So every sum of losses is divided by the *step's* number of trained
tokens, and gradients are *summed* over ranks; the result is the gradient of one big padded batch, whoever held what.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from model import Decoder
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.lr_scheduler import LinearLR

import stream_balancer as sb

__all__ = ["StepFigures", "Trainer", "backward", "policy_loss_sum"]

CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # of the probability ratio; asymmetric, as in DAPO
MAX_GRADIENT_NORM = 1.0


def policy_loss_sum(model: nn.Module, micro_batch: sb.rollouts.MicroBatch, temperature: float) -> Tensor:
    """GRPO's clipped objective, negative, summed over the policy's tokens: to be divided by the step's
    ``global_num_loss_tokens``."""
    packed = micro_batch.packed(shift=True)  # each row has what belongs to the token that follows
    logits = model(packed["input_ids"], packed.position_ids, packed.cu_seqlens)
    logprobs = (logits / temperature).log_softmax(-1).gather(1, packed["targets"][:, None])[:, 0]
    ratio = (logprobs - packed["logprobs"]).exp()
    advantage = packed.per_token("advantage").to(ratio.dtype)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -(torch.minimum(ratio * advantage, clipped * advantage) * packed["loss_mask"]).sum()


def backward(model: nn.Module, rank_batch: sb.rollouts.RankBatch | sb.Step, temperature: float) -> float:
    """Add a rank batch's part of the step's gradient; returns its part of the step's loss."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    total = 0.0
    for micro_batch in rank_batch.micro_batches:
        last = micro_batch is rank_batch.micro_batches[-1]
        with ddp.no_sync() if ddp and not last else nullcontext():  # ranks meet once: at the last backward
            loss = policy_loss_sum(model, micro_batch, temperature) / rank_batch.global_num_loss_tokens
            whole = loss * rank_batch.dp_size if ddp else loss  # DDP takes the mean over ranks; we want the sum
            whole.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step, over all ranks."""

    compute_s: tuple[float, ...]
    """CPU seconds of forward and backward, per rank."""
    reward: float
    """Mean over the step's rollouts."""
    num_rollouts: int
    num_tokens: int
    staleness: float
    """Optimizer steps between sampling (its first token) and training, mean over the step's rollouts."""


class Trainer:
    """A policy and its optimizer: on one of several ranks, or alone with every rank's batch."""

    def __init__(self, model: Decoder, *, learning_rate: float, num_steps: int, temperature: float) -> None:
        self.version = 0
        """Optimizer steps taken; names the weights."""
        self.trained_ids: list[str] = []
        """Rollouts trained on here."""
        self._temperature = temperature
        self._distributed = dist.is_initialized()
        self._model = DistributedDataParallel(model) if self._distributed else model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._schedule = LinearLR(self._optimizer, 1.0, 0.05, total_iters=num_steps)

    def step(self, rank_batches: Sequence[sb.rollouts.RankBatch | sb.Step]) -> StepFigures:
        """One optimizer step on this rank's batch, or, alone, on all ranks' one after another."""
        compute_s = [0.0] * rank_batches[0].dp_size
        self._optimizer.zero_grad()
        for rank_batch in rank_batches:
            start = time.thread_time()  # CPU time, not wall time: ranks share cores
            backward(self._model, rank_batch, self._temperature)
            compute_s[rank_batch.rank] = time.thread_time() - start
        clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._schedule.step()
        trained = [r for rank_batch in rank_batches for r in rank_batch.rollouts if not r.is_padding]
        figures = self._figures(trained, compute_s)
        self.version += 1
        return figures

    def weights(self) -> Tensor:
        """All parameters, flat, a copy."""
        return parameters_to_vector(self._model.parameters()).detach()

    def _figures(self, rollouts: Sequence[sb.Rollout], compute_s: Sequence[float]) -> StepFigures:
        self.trained_ids += [r.rollout_id for r in rollouts]
        reward = sum(r.scalars["reward"] for r in rollouts)
        staleness = sum(self.version - (r.min_version or 0) for r in rollouts)
        tokens = sum(r.num_tokens for r in rollouts)
        sums = torch.tensor([reward, staleness, len(rollouts), tokens, *compute_s], dtype=torch.float64)
        if self._distributed:
            dist.all_reduce(sums)
        reward, staleness, num_rollouts, num_tokens, *compute = sums.tolist()
        return StepFigures(
            tuple(compute), reward / num_rollouts, int(num_rollouts), int(num_tokens), staleness / num_rollouts
        )
