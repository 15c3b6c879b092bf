"""Findings of a sweep: the figures of each setting, the front among them, the recommendation. Values only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.config.figures import least_batch_size
from stream_balancer.planning.arrays import Floats
from stream_balancer.tools.simulation_report import SimulationReport, to_plain

__all__ = ["Outcome", "TuneReport", "outcome_of", "pareto_front"]

BLOCKS = 20
"""Blocks of consecutive dispatches, for the standard error: outliers that wait for each other make neighbours alike."""
STEPS_KEPT = 48
"""Dispatches of which an outcome keeps every rank's work, to be looked at."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outcome:
    """Figures of one setting of the knobs, in its steady state."""

    policy: str
    """"window", or what is usual elsewhere: "round_robin", "fifo"."""
    window: int
    """Rollouts that a dispatch waits for, or tokens: in the unit of ``window_knob``."""
    window_knob: str
    """"window", or "step_size.window_tokens" under ``step_size.tokens``."""
    capacity: int
    """Rollouts, or tokens, from which on a put waits."""
    max_skips: int | None
    deadline_s: float | None
    idle_fraction: float
    """Fraction of rank time spent waiting for the slowest rank."""
    whole_idle_fraction: float
    """Fraction of rank time without work, the wait for rollouts included; NaN with an instant trainer."""
    idle_error: float
    """Standard error of ``compared_idle``, from blocks of consecutive dispatches."""
    unavoidable_idle: float
    """The part of ``idle_fraction`` that no assignment of the same batches could save: what is left for a window."""
    age: float
    """Mean dispatches that a rollout waited through."""
    added_age: float
    """... above arrival order without a window (``policy="fifo"``)."""
    age_p99: float
    """99th percentile of the dispatches that a rollout waited through."""
    age_max: float
    """The most dispatches that a rollout waited through."""
    token_variation: float
    """Coefficient of variation of the tokens of a dispatch: their standard deviation over their mean."""
    wait_p99_s: float
    """99th percentile of the seconds that a rollout waited."""
    wait_max_s: float
    short_batches: float
    """Fraction of the dispatches that the deadline sent before they were full."""
    evicted: int
    """Rollouts thrown away as stale."""
    length_delay_correlation: float
    """0 = the window is blind to length; NaN where nothing waited."""
    delay_per_decile: tuple[float, ...]
    """Mean dispatches waited, by length decile, shortest first."""
    rank_work: Floats
    """[<= 48, dp_size] every rank's work in some consecutive dispatches, in the cost model's unit."""

    @property
    def in_time(self) -> bool:
        """The trainer took time."""
        return not math.isnan(self.whole_idle_fraction)

    @property
    def compared_idle(self) -> float:
        """Figure that settings are compared by: ``whole_idle_fraction``, or ``idle_fraction`` with an instant
        trainer."""
        return self.whole_idle_fraction if self.in_time else self.idle_fraction

    @property
    def knobs_of_size(self) -> str:
        """The window, with a trainer that takes time the capacity too: ``window=48, capacity=96``."""
        return f"{self.window_knob}={self.window}" + (f", {self.capacity_knob}={self.capacity}" if self.in_time else "")

    @property
    def knobs(self) -> dict[str, Any]:
        """For ``config.replace(**outcome.knobs)``."""
        sizes = size_knobs(self.window, self.capacity, in_tokens=self.window_knob != "window")
        return {**sizes, "max_skips": self.max_skips, "deadline_s": self.deadline_s}

    @property
    def capacity_knob(self) -> str:
        """ "capacity", or "limits.tokens" under ``step_size.tokens``."""
        return "capacity" if self.window_knob == "window" else "limits.tokens"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without ``rank_work``."""
        return {f.name: to_plain(getattr(self, f.name)) for f in fields(self) if f.name != "rank_work"}


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
    """The bound the recommendation keeps, dispatches."""
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
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("trace_name", "config")}
        outcomes = {name: getattr(self, name).to_dict() for name in ("recommended", "round_robin", "fifo")}
        front = [outcome.knobs for outcome in self.front]
        swept = [outcome.to_dict() for outcome in self.outcomes]
        return {"trace": self.trace_name, **said, **outcomes, "front": front, "outcomes": swept}


def size_knobs(window: int, capacity: int, *, in_tokens: bool) -> dict[str, Any]:
    """Window and capacity for ``config.replace``, in rollouts or in tokens."""
    if in_tokens:
        return {"step_size": {"window_tokens": window}, "limits": {"tokens": capacity}}
    return {"window": window, "capacity": capacity}


def outcome_of(report: SimulationReport) -> Outcome:
    """The figures of a run that a sweep compares. ``added_age`` is not known here: it is the delay itself."""
    steps, shown = report.steps, report.shown_steps
    config = report.config
    if config.step_size.tokens is None:
        short = steps.rollouts[shown] < least_batch_size(config) - (config.groups.size or 1) + 1
    else:  # with one rollout more it would still have too few tokens
        late = np.array([reason == "deadline" for reason in steps.reason[shown]], dtype=np.bool_)
        short = late & (steps.tokens[shown] + report.dispatched_lengths.max < config.step_size.tokens)
    delay = report.delay_dispatches
    count = report.figures.batches
    # from the middle of the run, where the window is in its steady state
    middle = shown.start + max(count - STEPS_KEPT, 0) // 2
    return Outcome(
        policy=report.policy,
        window=config.window if config.step_size.window_tokens is None else config.step_size.window_tokens,
        window_knob="window" if config.step_size.window_tokens is None else "step_size.window_tokens",
        capacity=config.capacity if config.step_size.window_tokens is None else config.limits.tokens or config.capacity,
        max_skips=config.max_skips,
        deadline_s=config.deadline_s,
        idle_fraction=report.idle_fraction,
        unavoidable_idle=report.figures.unavoidable_idle,
        whole_idle_fraction=report.whole_idle_fraction,
        idle_error=_error_of_idle(steps.mean_load[shown], _time_of_steps(report)),
        age=delay.mean,
        added_age=delay.mean,
        age_p99=delay.p99,
        age_max=delay.max,
        token_variation=report.figures.token_variation,
        wait_p99_s=report.delay_s.p99,
        wait_max_s=report.delay_s.max,
        short_batches=float(np.mean(short)) if count else 0.0,
        evicted=report.evicted,
        length_delay_correlation=report.length_bias.length_delay_correlation,
        delay_per_decile=report.length_bias.delay_per_decile,
        rank_work=steps.rank_work[middle : middle + min(count, STEPS_KEPT)],
    )


def _time_of_steps(report: SimulationReport) -> Floats:
    """[n] from each dispatch to the next, in units of work; with an instant trainer the work of the slowest rank."""
    steps, shown = report.steps, report.shown_steps
    if math.isinf(report.work_per_second):
        return steps.step_work[shown]
    ends = np.append(steps.at_s, report.elapsed_s)
    return np.diff(ends)[shown] * report.work_per_second


def _error_of_idle(mean_load: Floats, step_work: Floats) -> float:
    """Standard error of 1 - sum(mean) / sum(slowest): jackknife over blocks of consecutive dispatches."""
    # steps side by side are alike, since outliers wait for each other: blocks are nearly independent
    blocks = min(BLOCKS, step_work.size)
    if blocks < 2:
        return 0.0
    mean = np.array([part.sum() for part in np.array_split(mean_load, blocks)])
    work = np.array([part.sum() for part in np.array_split(step_work, blocks)])
    without = 1.0 - (mean.sum() - mean) / np.maximum(work.sum() - work, np.finfo(np.float64).tiny)
    return float(np.sqrt((blocks - 1) / blocks * np.square(without - without.mean()).sum()))


def pareto_front(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes that no other beats in idle time without a longer delay, shortest delay first. O(n log n)."""
    front: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda o: (o.age, o.compared_idle)):
        if not front or outcome.compared_idle < front[-1].compared_idle:
            front.append(outcome)
    return tuple(front)
