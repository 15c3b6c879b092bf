"""One trainer rank: forward and backward on its part of every batch, gradients all-reduced with the other ranks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from stream_balancer.demo.meeting import FEED_NAME, connect_store, join_trainers
from stream_balancer.demo.messages import Message, StepDone, Task, Trained
from stream_balancer.demo.model import Decoder, build_model, loss_sum
from stream_balancer.demo.rollouts import checksum
from stream_balancer.rank.feed import RankFeed
from stream_balancer.types import MicroBatch, RankBatch, Rollout

__all__ = ["run_rank", "train"]

_LEARNING_RATE = 1e-3


def run_rank(task: Task, say: Callable[[Message], None]) -> None:
    """Train on whatever the feed brings, until it ends."""
    assert task.rank is not None
    store = connect_store(task)
    join_trainers(task, store)
    model = build_model(task.options)
    _warm_up(model, task.longest)
    with RankFeed(store, rank=task.rank, dp_size=task.options.ranks, name=FEED_NAME, token=task.token) as feed:
        train(feed, model, dist.all_reduce, say)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    say(Trained(task.rank, zlib.crc32(flat.numpy().tobytes())))
    dist.destroy_process_group()


def train(
    batches: Iterable[RankBatch], model: Decoder, all_reduce: Callable[[Tensor], None], say: Callable[[Message], None]
) -> None:
    """The training loop. ``all_reduce`` sums a flat tensor over the ranks, in place."""
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    gradient = _flat_gradient(parameters)
    for batch in batches:
        gradient.zero_()
        start = time.thread_time()  # CPU time, not wall time: the ranks share cores
        loss = _forward_backward(model, batch)
        compute_s = time.thread_time() - start
        all_reduce(gradient)
        optimizer.step()
        say(_step_done(batch, compute_s, loss))


def _forward_backward(model: Decoder, batch: RankBatch) -> float:
    """Adds this rank's part of the step's gradient; returns its part of the step's loss.

    Everything is divided by the *step's* trained tokens, not this rank's: ranks hold different numbers of them, and
    only so is the sum over ranks the mean over the batch.
    """
    total = 0.0
    for micro_batch in batch.micro_batches:
        loss = loss_sum(model, micro_batch) / batch.global_num_loss_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _flat_gradient(parameters: list[torch.nn.Parameter]) -> Tensor:
    """One flat tensor that all gradients are views of, so that one all-reduce carries them."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return flat


def _step_done(batch: RankBatch, compute_s: float, loss: float) -> StepDone:
    return StepDone(
        rank=batch.rank,
        step=batch.step,
        compute_s=compute_s,
        num_tokens=batch.num_tokens,
        micro_batches=len(batch.micro_batches),
        loss=loss,
        trained=tuple((r.rollout_id, checksum(r)) for r in batch.rollouts if not r.is_padding),
    )


def _warm_up(model: Decoder, longest: int) -> None:
    """Two passes on made-up tokens, not measured: the first pays for allocations and kernel choices."""
    rollouts = [Rollout(tokens={"input_ids": torch.zeros(n, dtype=torch.int64)}) for n in (longest, longest)]
    for _ in range(2):
        loss_sum(model, MicroBatch.of(rollouts)).backward()  # type: ignore[no-untyped-call]
