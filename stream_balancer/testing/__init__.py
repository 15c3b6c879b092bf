"""Public test tools: virtual-time event loops, a network within one loop, rollouts, length traces."""

from __future__ import annotations

from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.tools.length_models import PRESETS, generate_trace
from stream_balancer.tools.trace import Trace

from .clocks import BACKENDS, AutojumpEventLoop, virtual_time_backend
from .rollouts import make_rollout, make_rollouts

__all__ = [
    "BACKENDS",
    "PRESETS",
    "AutojumpEventLoop",
    "MemoryNetwork",
    "Trace",
    "generate_trace",
    "make_rollout",
    "make_rollouts",
    "virtual_time_backend",
]
