"""Options of the demo. Nothing here imports torch: the command line is built from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stream_balancer.errors import ConfigError

__all__ = ["Backend", "DemoOptions"]


class Backend(StrEnum):
    """An event loop."""

    asyncio = "asyncio"
    trio = "trio"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of ``run_demo``; ``stream-balancer demo --help`` says what the first ones do.

    Raises ConfigError where nothing would ever run. What the balancer is given, ``BalancerConfig`` checks.
    """

    ranks: int = 4
    workers: int = 64
    rollouts: int = 960
    batch_size: int = 20
    window: int | None = None
    deadline_s: float = 60.0
    trace: Path | None = None
    scale: float | None = None
    generator: str = "lrm"  # fitted to reasoning models' answers
    backend: Backend = Backend.asyncio
    seed: int = 0
    json: bool = False
    max_length: int = 1536
    """Tokens of the longest rollout when ``scale`` is None: what a CPU can train on."""
    tokens_per_second: float = 400.0
    """Speed at which one worker pretends to generate, in (scaled) output tokens per second."""
    hidden_size: int = 128
    """Width of the demo model; a multiple of ``2 * num_heads``."""
    num_layers: int = 5
    num_heads: int = 4
    vocab_size: int = 512

    def __post_init__(self) -> None:
        for name in ("ranks", "workers", "rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, not {getattr(self, name)}")
