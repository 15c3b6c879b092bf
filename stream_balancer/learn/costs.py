"""A ``CalibratedCost`` at work: what steps hold and how long they take goes into the calibration, and what that learns
is planned with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Learner
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.cost import CalibratedCost
from stream_balancer.learn.calibration import Calibration
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.rollouts import Batch, RankBatch


class CostLearner(Learner):
    """Learns what rollouts cost where the config says ``cost=CalibratedCost(...)``; idle where it does not."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core
        self._calibration = _calibration_of(core.config)
        self.slowness: Floats | None = None
        """[ranks] log of each rank's slowdown in the step timed last; None where nothing was learned from it."""

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        self.slowness = self._learn(batch, timings)

    def _learn(self, batch: Batch, timings: Sequence[StepTiming]) -> Floats | None:
        """Learn from a step, unless a rank may have waited for others in its seconds. -> ``slowness``. O(rollouts)."""
        calibration = self._calibration
        if calibration is None or not all(one.own for one in timings):
            return None
        # costs that are not the model's would teach it something else
        if self._core.pricing.has_own_costs:
            return None
        # in a former controller's plan: speeds are of today's ranks
        if len(timings) != self._core.config.dp_size:
            return None
        # a rank with nothing but padding copies is done before any work could be measured
        if any(all(rollout.is_padding for rollout in one.rollouts) for one in batch.ranks):
            return None
        before = calibration.in_force
        slowness = calibration.observe([_lengths(one) for one in batch.ranks], [one.seconds for one in timings])
        if calibration.in_force is not before:
            self._core.learn(calibration.in_force)
        return slowness

    def reconfigured(self, before: BalancerConfig) -> None:
        """Learned costs are kept while the cost is the same, and with another number of ranks all but their speeds."""
        config, learned = self._core.config, self._calibration
        # the law belongs to the model and the hardware, speeds to single ranks
        resized = config.dp_size != before.dp_size
        if not resized and config.cost == before.cost:
            return
        self._calibration = _calibration_of(config)
        if resized and config.cost == before.cost and learned is not None and self._calibration is not None:
            self._calibration.take_over(learned.state())
            self._core.learn(self._calibration.in_force)

    def restored(self, snapshot: Snapshot) -> None:
        """Continue with what the other balancer had learned."""
        if self._calibration is not None and snapshot.calibration is not None:
            self._calibration.take_over(snapshot.calibration)
            self._core.learn(self._calibration.in_force)

    def figures(self, now: float) -> dict[str, Any]:
        return {} if self._calibration is None else {"cost_fit": self._calibration.fit()}

    def learned(self) -> dict[str, Any]:
        return {} if self._calibration is None else {"calibration": self._calibration.state()}


def _calibration_of(config: BalancerConfig) -> Calibration | None:
    if not isinstance(config.cost, CalibratedCost):
        return None
    return Calibration(config.cost, config.dp_size)


def _lengths(work: RankBatch) -> list[Ints]:
    """Lengths of the rollouts of each micro-batch."""
    return [np.array(mb.lengths, dtype=np.int64) for mb in work.micro_batches]
