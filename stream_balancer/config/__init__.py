"""Knobs: ``knobs`` (which exist), ``checks`` (which are refused), ``config`` (the two together, for users)."""

from stream_balancer.config.config import BalancerConfig
from stream_balancer.config.knobs import MicroBatchOrder, OnStale, Policy

__all__ = ["BalancerConfig", "MicroBatchOrder", "OnStale", "Policy"]
