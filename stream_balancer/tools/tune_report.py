"""Findings of a sweep: the figures of each setting, the front among them, the recommendation. Values only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.planning.arrays import Floats
from stream_balancer.tools.simulation_report import SimulationReport

BLOCKS = 20
"""Blocks of consecutive steps, for the standard error: outliers that wait for each other make neighbours alike."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outcome:
    """A setting of the knobs: its run, and the figures that settings are compared by."""

    report: SimulationReport
    """The run, with the knobs it was made with in ``config``."""
    compared_idle: float
    """Fraction of rank time without work: ``whole_idle_fraction``, or ``idle_fraction`` with an instant trainer."""
    idle_error: float
    """Standard error of ``compared_idle``, from blocks of consecutive steps."""
    added_age: float
    """Mean steps that a rollout waited through, above arrival order without a window (``policy="fifo"``)."""
    short_batches: float
    """Fraction of the steps that the deadline sent before they were full."""

    @property
    def in_time(self) -> bool:
        """The trainer took time."""
        return math.isfinite(self.report.work_per_second)

    @property
    def window(self) -> int:
        """Rollouts that a step waits for."""
        return self.report.config.window

    @property
    def capacity(self) -> int:
        """Rollouts from which on a put waits."""
        return self.report.config.capacity

    @property
    def knobs(self) -> dict[str, Any]:
        """For ``config.replace(**outcome.knobs)``."""
        config = self.report.config
        return {name: getattr(config, name) for name in ("window", "capacity", "max_skips", "deadline_s")}

    @property
    def knobs_of_size(self) -> str:
        """The window, with a trainer that takes time the capacity too: ``window=48, capacity=96``."""
        return f"window={self.window}" + (f", capacity={self.capacity}" if self.in_time else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: its knobs, the figures here, and those of the run."""
        names = "compared_idle", "idle_error", "added_age", "short_batches"
        return self.knobs | {name: getattr(self, name) for name in names} | self.report.to_dict()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TuneReport:
    """Findings of a sweep."""

    trace_name: str
    num_rollouts: int
    """Rollouts in each run."""
    times: int
    """How often the trace was repeated, to be long enough."""
    config: BalancerConfig
    """The knobs that were not swept."""
    max_added_age: float
    """The bound the recommendation keeps, steps."""
    tolerance: float
    """Idle fraction that is not worth a larger window."""
    round_robin: Outcome
    """Arrival order, to the ranks in turn."""
    fifo: Outcome
    """Arrival order, the best partition: no window."""
    outcomes: tuple[Outcome, ...]
    """Every setting swept, smallest window first."""
    front: tuple[Outcome, ...]
    """Outcomes that no other beats in both idle time and queueing delay, shortest delay first."""
    recommended: Outcome
    """Outcome of the recommended setting."""
    pays: bool
    """False: arrival order with a good partition is as good; ``recommended`` is then no window."""
    reason: str
    """Why, in a sentence."""

    @property
    def recommended_config(self) -> BalancerConfig:
        """The config with the recommended knobs."""
        return self.config.replace(**self.recommended.knobs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        names = "num_rollouts", "times", "max_added_age", "tolerance", "pays", "reason"
        return {
            "trace": self.trace_name,
            **{name: getattr(self, name) for name in names},
            **{name: getattr(self, name).to_dict() for name in ("recommended", "round_robin", "fifo")},
            "front": [outcome.knobs for outcome in self.front],
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }


def outcome_of(report: SimulationReport, fifo: SimulationReport) -> Outcome:
    """The figures of a run that a sweep compares. ``fifo``: what no window would have done."""
    steps, config = report.steps[report.shown_steps], report.config
    short = steps.rollouts < config.batch_size - (config.groups.size or 1) + 1
    in_time = math.isfinite(report.work_per_second)
    time = steps.step_work
    if in_time:  # from each step to the next, in units of work
        until = np.append(report.steps.at_s, report.elapsed_s)
        time = np.diff(until)[report.shown_steps] * report.work_per_second
    return Outcome(
        report=report,
        compared_idle=report.whole_idle_fraction if in_time else report.idle_fraction,
        idle_error=_error_of_idle(steps.mean_load, time),
        added_age=report.delay_steps.mean - fifo.delay_steps.mean,
        short_batches=float(np.mean(short)) if short.size else 0.0,
    )


def _error_of_idle(mean_load: Floats, time: Floats) -> float:
    """Standard error of 1 - sum(mean) / sum(time): jackknife over blocks of consecutive steps."""
    # steps side by side are alike, since outliers wait for each other: blocks are nearly independent
    blocks = min(BLOCKS, time.size)
    if blocks < 2:
        return 0.0
    mean, whole = (np.array([part.sum() for part in np.array_split(one, blocks)]) for one in (mean_load, time))
    # a ratio of sums has no variance of its own: leave each block out in turn
    without = 1.0 - (mean.sum() - mean) / np.maximum(whole.sum() - whole, np.finfo(np.float64).tiny)
    return float(np.sqrt((blocks - 1) / blocks * np.square(without - without.mean()).sum()))


def pareto_front(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes that no other beats in idle time without a longer delay, shortest delay first. O(n log n)."""
    front: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda o: (o.added_age, o.compared_idle)):
        if not front or outcome.compared_idle < front[-1].compared_idle:
            front.append(outcome)
    return tuple(front)
