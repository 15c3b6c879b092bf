"""What a core evicts, for tests."""

from __future__ import annotations

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn import attach
from stream_balancer.types import EvictReason


class Evictions(sb.Observer):
    """Evicted rollouts with the reason, in order, from now on."""

    def __init__(self, core: BalancerCore) -> None:
        self.all: list[tuple[sb.Rollout, EvictReason]] = []
        core.observers.append(self)

    def evicted(self, rollout: sb.Rollout, reason: EvictReason) -> None:
        self.all.append((rollout, reason))

    def take(self) -> list[tuple[sb.Rollout, EvictReason]]:
        """Those since the last call."""
        taken, self.all = self.all, []
        return taken


def learning_core(config: sb.BalancerConfig) -> BalancerCore:
    """A core with all learners, as a balancer has it."""
    core = BalancerCore(config)
    attach(core)
    return core
