"""Knobs: ``groups`` and ``config`` (the knobs, derived values and refusals), ``values`` (checks of single values)."""

from stream_balancer.config.config import BalancerConfig, Policy, least_max_skips, most_waiting
from stream_balancer.config.groups import Groups, MicroBatches, Staleness

__all__ = ["BalancerConfig", "Groups", "MicroBatches", "Policy", "Staleness", "least_max_skips", "most_waiting"]
