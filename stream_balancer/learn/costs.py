"""A ``CalibratedCost`` at work: what steps hold and how long they take goes into the calibration, and what that learns
is planned with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Learner
from stream_balancer.core.pricing import Learned
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.core.step_times import StepTiming
from stream_balancer.cost import CalibratedCost
from stream_balancer.learn.calibration import Calibration
from stream_balancer.planning.arrays import Floats
from stream_balancer.types import Batch, RankBatch


class CostLearner(Learner):
    """Learns what rollouts cost where the config says ``cost=CalibratedCost(...)``; idle where it does not."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core
        self._calibration = _calibration_of(core.config)
        self.slowness: Floats | None = None
        """[ranks] log of each rank's slowdown in the step timed last; None where nothing was learned from it."""

    def dispatched(self, batch: Batch) -> None:
        """The seconds of this batch will say what its lengths cost. O(rollouts)."""
        # costs that are not the model's would teach it something else, and a rank with nothing but padding copies is
        # done before any work could be measured
        if self._calibration is None or self._core.state.pricing.has_own_costs:
            return
        if len(batch.ranks) != self._core.config.dp_size:  # in a former controller's plan: speeds are of today's ranks
            return
        if all(any(not r.is_padding for r in one.rollouts) for one in batch.ranks):
            _expect(self._calibration, batch.step, [(one,) for one in batch.ranks])

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        """Learn from a step, unless a rank may have waited for others in its seconds. O(ranks)."""
        self.slowness, calibration = None, self._calibration
        if calibration is None or not all(one.own for one in timings):
            return
        if calibration.expects(batch.step) and any(one.worked_on for one in timings):
            _expect(calibration, batch.step, [one.worked_on or (batch.ranks[one.rank],) for one in timings])
        if calibration.observe(batch.step, [one.seconds for one in timings]):
            self._apply(calibration)
        self.slowness = calibration.slowness

    def reconfigured(self, before: BalancerConfig) -> None:
        """Learned costs are kept while cost and speeds are the same, and with another number of ranks all but their
        speeds."""
        config, learned = self._core.config, self._calibration
        # the law belongs to the model and the hardware, speeds to single ranks
        resized = config.dp_size != before.dp_size
        if not resized and (config.cost, config.speeds) == (before.cost, before.speeds):
            return
        self._calibration = _calibration_of(config)
        if resized and config.cost == before.cost and learned is not None and self._calibration is not None:
            self._calibration.take_over(learned.state())
            self._apply(self._calibration)

    def restored(self, snapshot: Snapshot) -> None:
        """Continue with what the other balancer had learned."""
        if self._calibration is not None and snapshot.calibration is not None:
            self._calibration.take_over(snapshot.calibration)
            self._apply(self._calibration)

    def figures(self, now: float) -> dict[str, Any]:
        return {} if self._calibration is None else {"cost_fit": self._calibration.fit()}

    def learned(self) -> dict[str, Any]:
        return {} if self._calibration is None else {"calibration": self._calibration.state()}

    def _apply(self, found: Calibration) -> None:
        self._core.learn(Learned(found.cost, found.speeds, found.fixed_costs))


def _calibration_of(config: BalancerConfig) -> Calibration | None:
    if not isinstance(config.cost, CalibratedCost):
        return None
    return Calibration(config.cost, config.dp_size, config.speeds, cp_overhead=config.context_parallel.overhead)


def _expect(calibration: Calibration, step: int, work: Sequence[tuple[RankBatch, ...]]) -> None:
    """``work[rank]``: what each is to train on. Of what ranks share the lengths of whole rollouts count."""
    micro_batches = [[mb for one in its for mb in one.micro_batches] for its in work]
    lengths = [
        [np.array([getattr(r, "whole_tokens", r.num_tokens) for r in mb.rollouts], dtype=np.int64) for mb in of_rank]
        for of_rank in micro_batches
    ]
    calibration.expect(step, lengths, [[max(len(mb.cp_group), 1) for mb in of_rank] for of_rank in micro_batches])
