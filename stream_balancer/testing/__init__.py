"""Public test tools: virtual-time event loops, the contracts of channels and transports, rollouts, length traces.

``check_channel`` and ``check_transport`` are loaded when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stream_balancer.tools.length_models import PRESETS, generate_trace
from stream_balancer.tools.trace import Trace

from .clocks import BACKENDS, AutojumpEventLoop, Wakeups, count_wakeups, virtual_time_backend
from .rollouts import make_rollout, make_rollouts, token_checksum

if TYPE_CHECKING:
    from .channels import check_channel
    from .transports import check_transport

__all__ = [
    "BACKENDS",
    "PRESETS",
    "AutojumpEventLoop",
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


def __getattr__(name: str) -> Any:
    if name == "check_channel":
        from .channels import check_channel

        return check_channel
    if name == "check_transport":
        from .transports import check_transport

        return check_transport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
