"""Learning from a balancer's own run: the cost of rollouts, the causes of idle time.

Observers of its core, which knows none of them: where nobody attaches them they cost nothing.
"""

from __future__ import annotations

from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn.costs import CostLearner
from stream_balancer.learn.idle_time import IdleTimes

__all__ = ["attach"]


def attach(core: BalancerCore) -> IdleTimes:
    """All learners, as observers of this core. -> the one that knows who is slow."""
    costs = CostLearner(core)
    idle = IdleTimes(core, costs)
    core.observers += [costs, idle]
    return idle
