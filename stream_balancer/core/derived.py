"""What follows from the knobs: what the planner is told, and what else they call for. Pure; no state lives here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.calibration import Calibration
from stream_balancer.cost import CalibratedCost
from stream_balancer.planning import PlanKnobs

__all__ = ["calibration_of", "describe_knobs", "plan_knobs", "tracked_group_size"]


def plan_knobs(config: BalancerConfig, tolerance: float) -> PlanKnobs:
    """What the planner needs to know of them; ``tolerance``: how near to the lower bound it seeks."""
    return PlanKnobs(
        num_ranks=config.dp_size,
        batch_size=config.batch_size,
        max_skips=config.max_skips,
        counts=config.counts,
        sync=config.sync,
        groups="free" if config.group_size is None else config.groups,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        padded=config.cost.padded,
        speeds=None if config.speeds is None else np.array(config.speeds, dtype=np.float64),
        micro_batch_multiple=config.micro_batch_multiple,
        pipeline_order=config.micro_batch_order == "pipeline",
        oversize=config.oversize,
        group_size=config.group_size,
        tolerance=tolerance,
    )


def tracked_group_size(config: BalancerConfig) -> int | None:
    """Siblings that a group must have before it may leave; None where groups play no part."""
    return None if config.groups == "free" else config.group_size


def calibration_of(config: BalancerConfig) -> Calibration | None:
    """A fresh one; None for a cost that does not learn."""
    if not isinstance(config.cost, CalibratedCost):
        return None
    return Calibration(config.cost, config.dp_size, config.speeds)


def describe_knobs(config: BalancerConfig) -> dict[str, Any]:
    """The knobs as numbers and strings, for the record."""
    plain = (int, float, str, type(None))
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
