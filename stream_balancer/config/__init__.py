"""Knobs: ``knobs`` and ``groups`` (which exist), ``values`` (how they are checked one by one), ``checks`` (which do not
go together), ``figures`` (what follows from them), ``config`` (all together, for users)."""

from stream_balancer.config.config import BalancerConfig, at_window
from stream_balancer.config.groups import ContextParallel, Groups, Limits, MicroBatches, Staleness, StepSize
from stream_balancer.config.knobs import Policy

__all__ = [
    "BalancerConfig",
    "ContextParallel",
    "Groups",
    "Limits",
    "MicroBatches",
    "Policy",
    "Staleness",
    "StepSize",
    "at_window",
]
