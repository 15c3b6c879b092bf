"""Public test tools: virtual-time event loops, a network within one loop, rollouts, length traces."""

from __future__ import annotations

from stream_balancer.tools.length_models import PRESETS, generate_trace
from stream_balancer.tools.trace import Trace
from stream_balancer.transport.memory import MemoryTransport as MemoryNetwork

from .channels import check_channel
from .clocks import BACKENDS, AutojumpEventLoop, Wakeups, count_wakeups, virtual_time_backend
from .rollouts import make_rollout, make_rollouts, token_checksum
from .transports import check_transport

__all__ = [
    "BACKENDS",
    "PRESETS",
    "AutojumpEventLoop",
    "MemoryNetwork",
    "Trace",
    "Wakeups",
    "check_channel",
    "check_transport",
    "count_wakeups",
    "generate_trace",
    "make_rollout",
    "make_rollouts",
    "token_checksum",
    "virtual_time_backend",
]
