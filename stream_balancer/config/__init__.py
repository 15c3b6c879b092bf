"""Knobs: ``config`` (those of a balancer), ``groups`` (those of them that belong together), ``values`` (how they are
checked one by one), ``checks`` (which do not go together), ``figures`` (what follows from them)."""

from stream_balancer.config.config import BalancerConfig, Policy, at_window
from stream_balancer.config.groups import ContextParallel, Groups, Limits, MicroBatches, Staleness, StepSize

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
