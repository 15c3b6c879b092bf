"""Options of the demo. Nothing here imports torch, so a command line can be built from it quickly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Backend", "DemoOptions"]

Backend = Literal["asyncio", "trio"]

_MIN = {
    "ranks": 1,
    "workers": 1,
    "rollouts": 1,
    "batch_size": 1,
    "max_length": 2,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "vocab_size": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of ``run_demo``. Raises ValueError for a value that makes no sense."""

    ranks: int = 4
    """Trainer ranks, each a process of its own."""
    workers: int = 64
    """Concurrent rollout workers: at most so many rollouts are being generated at any moment."""
    rollouts: int = 960
    """Rollouts in each of the two runs (the same ones)."""
    batch_size: int = 20
    """Rollouts per optimizer step, over all ranks."""
    window: int | None = None
    """Rollouts to wait for in the balanced run; None = 2 * batch_size. The usual way always has window = batch_size."""
    deadline_s: float | None = 60.0
    """Longest wait of the oldest rollout before a batch leaves anyway, in seconds; None = wait for the window."""
    trace: Path | None = None
    """Length trace (csv or csv.gz); None = the built-in generator."""
    generator: str = "lrm"
    """Which built-in generator: a name of ``trace.PRESETS``. The default is fitted to reasoning models' answers."""
    scale: float | None = None
    """Multiply every length by this; None = chosen so that the longest rollout has ``max_length`` tokens."""
    max_length: int = 1536
    """Tokens of the longest rollout when ``scale`` is None."""
    seed: int = 0
    """Seed of the lengths, of the order in which prompts are issued, and of the model."""
    tokens_per_second: float = 400.0
    """Speed at which one worker pretends to generate, in (scaled) output tokens per second."""
    max_tokens_per_micro_batch: int | None = None
    """Token cap of a micro-batch; None = one micro-batch per rank and step."""
    json: bool = False
    """Print one JSON object to stdout instead of tables."""
    backend: Backend = "asyncio"
    """Event loop of the controller: both are equal citizens."""
    hidden_size: int = 128
    """Width of the demo model."""
    num_layers: int = 5
    """Decoder layers of the demo model."""
    num_heads: int = 4
    """Attention heads of the demo model."""
    vocab_size: int = 512
    """Token ids are below this."""

    def __post_init__(self) -> None:
        for name, least in _MIN.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"demo: {name} must be an int >= {least}, not {value!r}")
        for name in ("deadline_s", "scale", "tokens_per_second"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"demo: {name} must be a finite number > 0, not {value!r}")
        if self.batch_size < self.ranks:
            raise ValueError(
                f"demo: batch_size ({self.batch_size}) must be >= ranks ({self.ranks}): some would get nothing"
            )
        if self.window is not None and self.window < self.batch_size:
            raise ValueError(f"demo: window ({self.window}) must be >= batch_size ({self.batch_size})")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"demo: hidden_size ({self.hidden_size}) must be a multiple of 2 * num_heads ({self.num_heads})"
            )
        if self.backend not in ("asyncio", "trio"):
            raise ValueError(f"demo: backend must be 'asyncio' or 'trio', not {self.backend!r}")

    @property
    def balanced_window(self) -> int:
        """Rollouts the balanced run waits for."""
        return 2 * self.batch_size if self.window is None else self.window
