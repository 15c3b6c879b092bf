"""Idle time of the ranks: seconds in which they did not compute, by cause; and which rank is slow, since when.

Pure: seconds and steps come in as arguments; nothing here decides what leaves. For each step a rank's idle time has two
parts. While it computes nothing because others still do, it is *imbalance*: the slowest rank's seconds less its own,
split into what the lower bound says nobody could have avoided, and the rest. While it waits for its next rank batch,
the balancer was waiting itself for rollouts (*no_data*), or held them for a better batch (*window*, *deadline*); what
is left after that, and after waiting for other ranks to be ready (which the imbalance has counted), is *transport*.

Only durations are used, no two clocks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Learner
from stream_balancer.learn.costs import CostLearner
from stream_balancer.planning.arrays import Floats
from stream_balancer.rollouts import Batch
from stream_balancer.statistics import IdleCause, Straggler

_CAUSES: tuple[IdleCause, ...] = get_args(IdleCause)

# Page's CUSUM (1954) on log(slowdown): evidence adds up above the allowance, and since it last was zero is since when
_ALLOWANCE = 0.05  # a rank 5 % slower than the median is nothing to report
_ALARM = 0.5  # 11 steps of 10 %, or _LEAST_STEPS of more
_LEAST_STEPS = 5  # slow ones: three in a row are a compilation, a checkpoint, another job on the host
_LEAST_LOSS_S = 0.02  # of a step, over the median rank: a time slice of the scheduler, a garbage collection
_MOST_EVIDENCE = 1.0  # so that a rank that has recovered is cleared after 10 good steps
_MOST_A_STEP = 0.25  # one checkpoint in the middle of a step is no straggler


@dataclass(slots=True)
class _Suspicion:
    """Evidence that a rank is slow."""

    evidence: float = 0.0
    slowness: float = 0.0
    """log(slowdown), summed since the evidence was zero."""
    num_steps: int = 0
    since_step: int = 0
    since: float = 0.0

    def note(self, slowness: float, step: int, now: float) -> None:
        """log(slowdown) of a step."""
        more = min(slowness, _MOST_A_STEP) - _ALLOWANCE
        evidence = min(max(self.evidence + more, 0.0), _MOST_EVIDENCE)
        # the change point of CUSUM: the last time that the evidence was zero
        if self.evidence == 0.0:
            self.slowness, self.num_steps, self.since_step, self.since = 0.0, 0, step, now
        self.evidence = evidence
        self.slowness += slowness
        self.num_steps += 1


class IdleTimes(Learner):
    """The idle seconds of all ranks since the balancer was made (they are in no checkpoint)."""

    def __init__(self, core: BalancerCore, costs: CostLearner) -> None:
        """``costs``: to be told of each step before this one."""
        self._core = core
        self._costs = costs
        self._idle: list[dict[IdleCause, float]] = []  # [ranks] seconds
        self._busy: list[float] = []
        self._waits: dict[int, dict[IdleCause, float]] = {}
        self._suspect_nobody()

    def reconfigured(self, before: BalancerConfig) -> None:
        """Totals are kept, also of ranks that are no more; who is slow among other ranks is found anew."""
        if self._core.config.dp_size != before.dp_size:
            self._suspect_nobody()

    def _suspect_nobody(self) -> None:
        dp_size = self._core.config.dp_size
        self._count_up_to(dp_size)
        self._suspicions = [_Suspicion() for _ in range(dp_size)]

    def _count_up_to(self, dp_size: int) -> None:
        while len(self._busy) < dp_size:
            self._busy.append(0.0)
            self._idle.append(dict.fromkeys(_CAUSES, 0.0))

    # -- in ------------------------------------------------------------------------------------------------------------

    def left(self, batch: Batch, asked_at: float, enough_at: float, now: float) -> None:
        """A new batch leaves, and its ranks have waited."""
        waited_s = max(now - asked_at, 0.0)
        # Until enough had come nobody could have dispatched; what was waited after that was the choice of the window.
        no_data_s = min(max(enough_at - asked_at, 0.0), waited_s)
        held: IdleCause = "deadline" if batch.reason == "deadline" else "window"
        self._waits[batch.step] = {"no_data": no_data_s, held: waited_s - no_data_s}

    def timed(self, batch: Batch, timings: Sequence[StepTiming], now: float) -> None:
        """All ranks are done with a step. O(ranks)."""
        self._count_up_to(len(timings))  # a step that a former controller had planned may be for more ranks
        waits = self._waits.pop(batch.step, {})
        seconds = [timing.seconds for timing in timings]
        slowest, mean = max(seconds), sum(seconds) / len(seconds)
        # seconds and loads differ by a factor that only calibration knows: shares are compared. As far above the mean
        # load as the lower bound is, it is above the mean seconds
        unavoidable = min(mean * batch.unavoidable_imbalance / (slowest - mean), 1.0) if slowest > mean else 0.0
        for rank, timing in enumerate(timings):
            self._busy[rank] += timing.seconds
            imbalance_s, idle = slowest - timing.seconds, self._idle[rank]
            idle["imbalance_unavoidable"] += unavoidable * imbalance_s
            idle["imbalance_avoidable"] += (1.0 - unavoidable) * imbalance_s
            for cause, cause_s in _waits_of(timing, waits).items():
                idle[cause] += cause_s
        self._suspect(batch, np.array(seconds), now)

    def _suspect(self, batch: Batch, busy: Floats, now: float) -> None:
        slowness = self._costs.slowness  # by what was learned, which is better than by the planned loads
        loads = np.array(batch.loads)
        if slowness is None and (loads > 0).all() and (busy > 0).all():
            # [ranks] log of the seconds that each took for a unit of load
            slowness = np.log(busy) - np.log(loads)
        if slowness is None or not len(slowness) == len(busy) == len(self._suspicions):
            return
        # relative to the median rank: a step in which all are slow accuses nobody
        slowness = slowness - np.median(slowness)
        worth_it = busy * -np.expm1(-np.maximum(slowness, 0.0)) >= _LEAST_LOSS_S
        slowness = np.where(worth_it, slowness, np.minimum(slowness, 0.0))
        for suspicion, one in zip(self._suspicions, slowness.tolist(), strict=True):
            suspicion.note(one, batch.step, now)

    def acknowledged(self, batch: Batch) -> None:
        """A rank that is lost never reports: its step is forgotten."""
        self._waits.pop(batch.step, None)

    # -- record --------------------------------------------------------------------------------------------------------

    def figures(self, now: float) -> dict[str, Any]:
        return {
            "idle_seconds": {cause: sum(idle[cause] for idle in self._idle) for cause in _CAUSES},
            "rank_idle_seconds": tuple(idle.copy() for idle in self._idle),
            "rank_busy_seconds": tuple(self._busy),
            "straggler": self.straggler(now),
        }

    def straggler(self, now: float) -> Straggler | None:
        """The rank with the most evidence of being slow, if that is enough."""
        rank = max(range(len(self._suspicions)), key=lambda one: self._suspicions[one].evidence)
        suspicion = self._suspicions[rank]
        if suspicion.evidence < _ALARM or suspicion.num_steps < _LEAST_STEPS:
            return None
        return Straggler(
            rank=rank,
            slowdown=math.exp(suspicion.slowness / suspicion.num_steps),
            since_step=suspicion.since_step,
            since_s=max(now - suspicion.since, 0.0),
        )


def _waits_of(timing: StepTiming, waits: dict[IdleCause, float]) -> dict[IdleCause, float]:
    """Seconds that a rank waited for its rank batch, by cause; ``waits``: those of the balancer."""
    of_balancer = sum(waits.values())
    # a rank that does not measure its waits is taken to have waited as long as the balancer did
    waited = of_balancer if timing.waited_s is None else timing.waited_s
    # A rank cannot have waited longer for rollouts than the balancer did; the rest was the way.
    for_rollouts = min(waited, of_balancer)
    part = for_rollouts / of_balancer if of_balancer > 0 else 0.0
    return {
        **{cause: cause_s * part for cause, cause_s in waits.items()},
        "transport": max(waited - for_rollouts - timing.ready_s, 0.0),
    }
