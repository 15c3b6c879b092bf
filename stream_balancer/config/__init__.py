"""Knobs: ``knobs`` and ``groups`` (which exist), ``values`` (how they are checked one by one), ``checks`` (which do not
go together), ``figures`` (what follows from them), ``config`` (all together, for users)."""

from stream_balancer.config.config import BalancerConfig, step_wide
from stream_balancer.config.groups import ContextParallel, Groups, MicroBatches, Staleness
from stream_balancer.config.knobs import Policy

__all__ = [
    "BalancerConfig",
    "ContextParallel",
    "Groups",
    "MicroBatches",
    "Policy",
    "Staleness",
    "step_wide",
]
