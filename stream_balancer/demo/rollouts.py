"""Tokens made up from a rollout's name alone, so that both sides of the wire can check that they are the right
ones."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from stream_balancer.demo.messages import RolloutSpec
from stream_balancer.types import Rollout

__all__ = ["checksum", "make_rollout"]


def make_rollout(spec: RolloutSpec, vocab_size: int) -> Rollout:
    """The finished rollout: ``input_ids`` int64 [L] and ``loss_mask`` bool [L], False over the prompt. Deterministic.

    Each token follows the one before it by 1 to 4, so there is something to learn: the loss falls towards ln 4.
    """
    random = np.random.default_rng(zlib.crc32(spec.rollout_id.encode()))
    steps = random.integers(1, 5, size=spec.num_tokens)
    steps[0] = random.integers(vocab_size)
    loss_mask = torch.arange(spec.num_tokens) >= spec.prompt_tokens
    return Rollout(
        tokens={"input_ids": torch.from_numpy(np.cumsum(steps) % vocab_size), "loss_mask": loss_mask},
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
    )


def checksum(rollout: Rollout) -> int:
    """CRC-32 over the name, then every per-token column's name, dtype and bytes."""
    crc = zlib.crc32(rollout.rollout_id.encode())
    for name in sorted(rollout.tokens):
        column = rollout.tokens[name]
        crc = zlib.crc32(f"{name}:{column.dtype}".encode(), crc)
        crc = zlib.crc32(column.contiguous().numpy().tobytes(), crc)
    return crc
