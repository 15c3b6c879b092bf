"""Options of the demo, which are those of its command line. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stream_balancer.errors import ConfigError

__all__ = ["DemoOptions"]


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of ``run_demo``.

    Raises ConfigError where nothing would ever run. What the balancer is given, ``BalancerConfig`` checks.
    """

    ranks: int = 4
    """Trainer ranks, each a process."""
    workers: int = 64
    """Concurrent rollout workers."""
    rollouts: int = 960
    """Rollouts in each of the two runs."""
    batch_size: int = 20
    """Rollouts of a step."""
    window: int | None = None
    """Rollouts that must wait before a step. (default: 1.5 x batch size)"""
    deadline_s: float = 60.0
    """Longest wait of a rollout for a full window."""
    trace: Path | None = None
    """Length trace, csv or csv.gz. (default: generated)"""
    generator: str = "lrm"  # fitted to reasoning models' answers
    """Length model, where there is no trace."""
    scale: float | None = None
    """Multiply lengths by this. (default: so that the longest rollout has max_length tokens)"""
    max_length: int = 1536
    """Tokens of the longest rollout, where there is no scale: what a CPU can train on."""
    tokens_per_second: float = 400.0
    """Speed at which a worker pretends to generate, in (scaled) output tokens."""
    hidden_size: int = 128
    """Width of the model; a multiple of 2 x num_heads."""
    num_layers: int = 5
    """Layers of the model."""
    num_heads: int = 4
    """Attention heads of a layer."""
    vocab_size: int = 512
    """Tokens that the model knows."""
    backend: Literal["asyncio", "trio"] = "asyncio"
    """Event loop of the controller."""
    seed: int = 0
    """Seed of lengths, order and model."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        sizes = ("max_length", "hidden_size", "num_layers", "num_heads", "vocab_size")
        least = dict.fromkeys(("ranks", "workers", "rollouts", *sizes), 1) | {"seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be >= {bound}, not {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_heads):  # rotary positions turn pairs of halves of a head
            raise ConfigError(
                f"hidden_size ({self.hidden_size}) must be a multiple of 2 x num_heads ({2 * self.num_heads})"
            )
        if not 0 < self.tokens_per_second < math.inf:
            raise ConfigError(
                f"tokens_per_second must be a finite number > 0, not {self.tokens_per_second}: no rollout would finish"
            )
