"""A trainer rank, a process of its own: forward and backward on its part of every batch, gradients all-reduced."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import stream_balancer as sb
from stream_balancer.tools.processes import exit_with_parent
from stream_balancer_demo.model import Decoder, build_model, loss_sum
from stream_balancer_demo.options import DemoOptions
from stream_balancer_demo.rollouts import checksum, make_rollout

__all__ = ["RankRun", "StepDone", "run_rank", "train"]

_LEARNING_RATE = 1e-3


class StepDone(msgspec.Struct, frozen=True):
    """Work of a rank in one step."""

    step: int
    compute_s: float
    """CPU seconds of forward and backward on the training thread."""
    micro_batches: int
    loss: float
    """Part of the step's mean loss on this rank, per trained token: the sum over ranks is the step's loss."""
    trained: list[tuple[str, int]]
    """``(rollout_id, checksum)`` of every rollout trained on in this step, padding copies left out."""


class RankRun(msgspec.Struct, frozen=True):
    """Work of a rank in a run."""

    steps: list[StepDone]
    parameters_checksum: int
    """CRC-32 of the final parameters: the same on every rank, or the gradients were not shared."""


def run_rank(rank: int, options: DemoOptions, address: str, token: str, longest: int, folder: Path) -> None:
    """Train on whatever the feed brings, until it ends; then write a RankRun to ``folder``, where the ranks also meet.

    Never outlives the controller: until the feed is connected, nothing else would notice that it is gone.
    """
    exit_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=options.ranks)
    model = build_model(options)
    warm_up = sb.rollouts.MicroBatch.of([make_rollout(name, longest, 1, name, options.vocab_size) for name in "ab"])
    for _ in range(2):  # not measured: the first pass pays for allocations and kernel choices
        loss_sum(model, warm_up).backward()  # type: ignore[no-untyped-call]
    with sb.RankFeed(address, rank=rank, dp_size=options.ranks, token=token) as feed:
        steps = train(feed, model, dist.all_reduce)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(RankRun(steps, zlib.crc32(flat.numpy().tobytes()))))
    dist.destroy_process_group()


def train(batches: Iterable[Any], model: Decoder, all_reduce: Callable[[Tensor], None]) -> list[StepDone]:
    """The training loop. ``all_reduce`` sums a flat tensor over the ranks, in place."""
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    # all gradients are views of one tensor, so that one all-reduce carries them
    gradient = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for p, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    steps = []
    for batch in batches:
        gradient.zero_()
        loss_of_rank = 0.0
        began = time.thread_time()  # CPU time, not wall time: the ranks share cores
        for micro_batch in batch.micro_batches:
            # by the step's trained tokens, not the rank's: only so is the sum over ranks the mean over the batch
            loss = loss_sum(model, micro_batch) / batch.global_num_loss_tokens
            loss.backward()
            loss_of_rank += loss.item()
        compute_s = time.thread_time() - began
        all_reduce(gradient)
        optimizer.step()
        trained = [(r.rollout_id, checksum(r)) for r in batch.rollouts if not r.is_padding]
        steps.append(StepDone(batch.step, compute_s, len(batch.micro_batches), loss_of_rank, trained))
    return steps
