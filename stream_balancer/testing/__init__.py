"""Public test tools: virtual-time event loops, a network within one loop, rollouts, length traces."""

from __future__ import annotations

from stream_balancer.testing.network import MemoryNetwork
from stream_balancer.tools.length_models import PRESETS, generate_trace
from stream_balancer.tools.trace import Trace

from .clocks import BACKENDS, AutojumpEventLoop, WakeupCount, count_wakeups, virtual_time_backend
from .rollouts import make_rollout, make_rollouts, token_checksum

__all__ = [
    "BACKENDS",
    "PRESETS",
    "AutojumpEventLoop",
    "MemoryNetwork",
    "Trace",
    "WakeupCount",
    "count_wakeups",
    "generate_trace",
    "make_rollout",
    "make_rollouts",
    "token_checksum",
    "virtual_time_backend",
]
