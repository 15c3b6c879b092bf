"""Rollouts of the demo: lengths from a trace or the built-in generator, scaled to what a CPU can train, and tokens made
up from a rollout's name alone, so that both sides of the wire can check that they are the right ones."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

import stream_balancer as sb
from stream_balancer.tools.generation import issue_order
from stream_balancer_demo.options import DemoOptions

__all__ = ["Workload", "checksum", "load_workload", "make_rollout"]


class Workload(NamedTuple):
    """The rollouts of a demo, the same for both runs."""

    rollouts: list[sb.Rollout]
    """In the order in which workers pick them up: prompts shuffled, siblings together."""
    lengths: dict[str, Any]
    """Where the lengths came from, what they were multiplied by, how many there are."""


def load_workload(options: DemoOptions) -> Workload:
    """The rollouts to train on, prompts of a trace drawn with replacement. Raises TraceError for a trace that cannot be
    read or a generator that is not known."""
    if options.trace is None:
        trace = sb.generate_trace(options.rollouts, options.generator, seed=options.seed)
    else:
        trace = sb.load_trace(options.trace).resampled(options.rollouts, options.seed)
    scale = options.max_length / int(trace.lengths.max()) if options.scale is None else options.scale
    scaled = trace.scaled(scale)
    order = issue_order(scaled, options.seed)
    columns = (column[order].tolist() for column in (scaled.lengths, scaled.prompt_tokens, scaled.group_ids))
    rollouts = [
        make_rollout(f"rollout-{place:05d}", length, prompt, f"prompt-{group:05d}", options.vocab_size)
        for place, (length, prompt, group) in enumerate(zip(*columns, strict=True))
    ]
    tokens = [rollout.num_tokens for rollout in rollouts]
    counts = {"rollouts": len(tokens), "tokens": sum(tokens), "longest": max(tokens)}
    return Workload(rollouts, {"source": trace.name, "scale": scale, **counts})


def make_rollout(name: str, length: int, prompt: int, group: str, vocab_size: int) -> sb.Rollout:
    """``input_ids`` int64 [L] and ``loss_mask`` bool [L], False over the prompt. At least a token of prompt and one of
    output, so L >= 2. Deterministic.

    Each token follows the one before it by 1 to 4, so there is something to learn: the loss falls towards ln 4.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    steps = random.integers(1, 5, size=max(length, 2))
    steps[0] = random.integers(vocab_size)
    tokens = {
        "input_ids": torch.from_numpy(np.cumsum(steps) % vocab_size),
        "loss_mask": torch.arange(steps.size) >= max(min(prompt, length - 1), 1),
    }
    return sb.Rollout(tokens=tokens, rollout_id=name, group_id=group)


def checksum(rollout: sb.Rollout) -> int:
    """CRC-32 over every per-token column's name, dtype and bytes."""
    crc = 0
    for name, column in sorted(rollout.tokens.items()):
        crc = zlib.crc32(column.numpy().tobytes(), zlib.crc32(f"{name}:{column.dtype}".encode(), crc))
    return crc
