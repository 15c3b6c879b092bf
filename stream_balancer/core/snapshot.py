"""All that a balancer holds, at one instant: what checkpoints and the journal write down.

A value. ``machine`` takes and restores one, ``controller.checkpoint`` turns one into plain data and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_balancer.field_docs import documented
from stream_balancer.types import Batch, Rollout

__all__ = ["Snapshot"]


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Snapshot:
    """All that a balancer holds, at one instant: cheap to take, since rollouts are shared and not copied.

    ``controller.checkpoint`` turns it into plain tensors and numbers, in any thread.
    """

    waiting: tuple[Rollout, ...]
    """Oldest first."""
    waited_s: NDArray[np.float64]
    """[n] seconds each has waited."""
    skips: NDArray[np.int64]
    """[n] dispatches that passed each over."""
    in_flight: tuple[Batch, ...]
    """Dispatched and not acknowledged, oldest first."""
    group_arrivals: Mapping[str, int]
    """Siblings that have come, of groups that are not done."""
    past_ids: tuple[str, ...]
    """Ids of rollouts that are done, oldest first."""
    version: int | None
    """Policy version last set."""
    next_step: int
    """Step number of the next new batch."""
    counts: Mapping[str, Any]
    """Running totals behind ``Statistics``: numbers, and dicts of numbers."""
    knobs: Mapping[str, Any]
    """The knobs in force, for the record: numbers and strings."""
    calibration: Mapping[str, Any] | None = None
    """What a ``CalibratedCost`` has learned: numbers, and lists of numbers."""
    auto_window: Mapping[str, Any] | None = None
    """What ``window="auto"`` has learned: numbers, and flat arrays."""
    set_aside: tuple[str, ...] = ()
    """What could not be read, one sentence each; the rollouts it speaks of are not in here."""
