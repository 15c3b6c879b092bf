"""What the demo generates: lengths from a trace or the built-in generator, scaled to what a CPU can train, and tokens
made up from a rollout's name alone, so that both sides of the wire can check that they are the right ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from stream_balancer.demo.options import DemoOptions
from stream_balancer.tools.generation import issue_order
from stream_balancer.tools.length_models import generate_trace
from stream_balancer.tools.trace import Trace, load_trace
from stream_balancer.types import Rollout

__all__ = ["Workload", "checksum", "load_workload", "make_rollout"]


@dataclass(frozen=True)
class Workload:
    """The rollouts of a demo, the same for both runs."""

    rollouts: tuple[Rollout, ...]
    """In the order in which workers pick them up: prompts shuffled, siblings together."""
    source: str
    """Where the lengths came from."""
    scale: float
    """What they were multiplied by."""

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout."""
        return max(rollout.num_tokens for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rollouts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


def load_workload(options: DemoOptions) -> Workload:
    """The rollouts to train on. Raises TraceError for a trace that cannot be read or a generator that is not known."""
    trace = _draw(options)
    scale = options.max_length / int(trace.lengths.max()) if options.scale is None else options.scale
    scaled = trace.scaled(scale)
    columns = (scaled.lengths.tolist(), scaled.prompt_tokens.tolist(), scaled.group_ids.tolist())
    rows = [[column[row] for column in columns] for row in issue_order(scaled, options.seed).tolist()]
    rollouts = [
        make_rollout(f"rollout-{place:05d}", length, prompt, f"prompt-{group:05d}", options.vocab_size)
        for place, (length, prompt, group) in enumerate(rows)
    ]
    return Workload(tuple(rollouts), trace.name, scale)


def _draw(options: DemoOptions) -> Trace:
    """As many rollouts as asked for: whole prompts in shuffled order, drawn again where the file has too few."""
    if options.trace is None:
        return generate_trace(options.rollouts, options.generator, seed=options.seed)
    trace = load_trace(options.trace)
    if options.rollouts > len(trace):
        return trace.resampled(options.rollouts, options.seed)
    rows = issue_order(trace, options.seed)[: options.rollouts]
    prompt, output, groups = (column[rows] for column in (trace.prompt_tokens, trace.output_tokens, trace.group_ids))
    return Trace(prompt_tokens=prompt, output_tokens=output, group_ids=groups, name=trace.name)


def make_rollout(name: str, length: int, prompt: int, group: str, vocab_size: int) -> Rollout:
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
    return Rollout(tokens=tokens, rollout_id=name, group_id=group)


def checksum(rollout: Rollout) -> int:
    """CRC-32 over the name, then every per-token column's name, dtype and bytes."""
    crc = zlib.crc32(rollout.rollout_id.encode())
    for name, column in sorted(rollout.tokens.items()):
        crc = zlib.crc32(f"{name}:{column.dtype}".encode(), crc)
        crc = zlib.crc32(column.contiguous().numpy().tobytes(), crc)
    return crc
