"""Cores with learners, what they evict, and what a checkpoint makes of them."""

from __future__ import annotations

import io

import torch

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.host.checkpoint import read_state_dict, state_dict
from stream_balancer.learn import attach
from stream_balancer.rollouts import EvictReason


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


def saved(core: BalancerCore, now: float = 0.0) -> Snapshot:
    """What a checkpoint has of it, through ``torch.save``."""
    file = io.BytesIO()
    torch.save(state_dict(core.snapshot(now)), file)
    file.seek(0)
    return read_state_dict(torch.load(file, weights_only=True))[0]
