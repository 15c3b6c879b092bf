"""Figures of a simulated run: every step, totals over steps, quantiles. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.planning import LengthBiasSummary
from stream_balancer.planning.arrays import Ints

Steps: TypeAlias = Any
"""A numpy record array, a row per step in order. Columns: ``at_s``, the seconds of virtual time at which it was
dispatched, and ``reason``, why it left; its ``rollouts``, padding copies not counted, and their ``tokens``. In the cost
model's unit: ``mean_load`` over ranks; ``lower_bound``, below which no
assignment has a step (where ranks meet at every micro-batch under a cap, no micro-batches have); ``step_work`` of the
slowest rank, and ``rank_work`` ``[dp_size]`` of each by itself."""


def steps_of(records: Sequence[tuple[Any, ...]], dp_size: int) -> Steps:
    """Rows of these values, in the order of the columns."""
    works = [(name, np.float64) for name in ("mean_load", "lower_bound", "step_work")]
    kinds = [("at_s", np.float64), ("reason", "U8"), ("rollouts", np.int64), ("tokens", np.int64), *works]
    return np.array(records, dtype=[*kinds, ("rank_work", np.float64, (dp_size,))]).view(np.recarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Totals over some consecutive steps."""

    batches: int
    """Steps."""
    rollouts: int
    """Rollouts, padding copies not counted."""
    tokens: int
    """Tokens of the rollouts."""
    token_variation: float
    """Coefficient of variation of the tokens of a step: their standard deviation over their mean; 0.0 without
    tokens."""
    idle_fraction: float
    """1 - sum(mean load) / sum(step time): the part of rank time spent waiting for the slowest rank, predicted."""
    avoidable_idle: float
    """Part of ``idle_fraction`` that a better assignment of the same rollouts might remove: above the lower bound."""
    unavoidable_idle: float
    """Part that no assignment of the same rollouts can remove. Only a window that chooses others can."""
    work_s: float
    """Trainer time: sum over steps of the slowest rank, in units of the cost model (seconds if that is in
    seconds)."""

    @staticmethod
    def of(steps: Steps) -> Segment:
        """Totals of these steps."""
        total = float(steps.step_work.sum())
        mean, bound = float(steps.mean_load.sum()), float(steps.lower_bound.sum())
        # sums over steps, not a mean of their fractions: a long step idles longer
        idle = max(1.0 - mean / total, 0.0) if total > 0 else 0.0
        avoidable = min(max(1.0 - bound / total, 0.0), idle) if total > 0 else 0.0
        tokens = steps.tokens
        return Segment(
            batches=tokens.size,
            rollouts=int(steps.rollouts.sum()),
            tokens=int(tokens.sum()),
            token_variation=float(tokens.std() / tokens.mean()) if tokens.any() else 0.0,
            idle_fraction=idle,
            avoidable_idle=avoidable,
            unavoidable_idle=idle - avoidable,
            work_s=total,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of a distribution; all 0.0 if it is empty."""

    mean: float
    p50: float
    p99: float
    max: float

    @staticmethod
    def of(values: NDArray[Any]) -> Quantiles:
        """The quantiles of ``[n]`` numbers."""
        if values.size == 0:
            return Quantiles(mean=0.0, p50=0.0, p99=0.0, max=0.0)
        p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
        return Quantiles(mean=float(values.mean()), p50=p50, p99=p99, max=float(values.max()))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SimulationReport:
    """Figures of a balancer's run over a trace.

    Figures at the top level are of the steady state: without the warm-up (a window that has just been filled holds no
    outliers yet that it put off) and without the tail (which holds what it has put off). ``overall`` is everything.
    """

    trace_name: str
    config: BalancerConfig
    """The knobs it ran with."""
    num_rollouts: int
    """Rollouts in the trace; each was dispatched or evicted."""
    num_tokens: int
    """Tokens of the rollouts."""
    evicted: int
    """Rollouts given up as stale."""
    padding_copies: int
    """Zero-weight copies made for ranks that would have had nothing to run."""
    reasons: Mapping[str, int]
    """Steps by reason, all of them."""
    is_steady: bool
    """False if the run was too short to have a steady state, and the figures are of the whole run."""
    shown_steps: slice
    """The steps that the figures are of: before them is the warm-up, and behind them the tail, from the moment
    generation had no prompt left for a free slot (where arrivals are recorded: from ``end()``)."""
    figures: Segment
    """Totals over these steps."""
    overall: Segment
    """Every dispatch."""
    delay_s: Quantiles
    """Seconds a rollout waited in the window, from its accepted put to its dispatch."""
    delay_steps: Quantiles
    """Steps between its accepted put and its own: 0 = the next one took it."""
    max_skips_seen: int
    """The most steps that ever left behind a rollout that could have gone (whose siblings were all there), in the
    whole run: at most ``max_skips``."""
    staleness: Quantiles
    """Trainer steps begun between a rollout's first token and its dispatch (from its arrival, where arrivals are
    recorded)."""
    length_bias: LengthBiasSummary
    """How far delay depends on length, and how far batches differ from what arrived; NaN where delay or length is
    constant. See docs/tuning.md."""
    arrived_lengths: Quantiles
    """Tokens of the rollouts that came while the steady steps were made."""
    dispatched_lengths: Quantiles
    """Tokens of the rollouts in those steps. Where it differs from ``arrived_lengths``, the window holds them
    back."""
    elapsed_s: float
    """Virtual seconds from second 0, which is in mid-run, to the end of the last step."""
    work_per_second: float
    """Work that a rank trains on in a second, in the cost model's unit; inf: an instant trainer."""
    blocked_s: float
    """Mean seconds a finished rollout waited for ``put`` to accept it."""
    generation_idle: float
    """Part of the slots' time in which they waited so; NaN where arrivals are recorded."""
    steps: Steps
    """Every dispatch."""
    step_of: Ints
    """[n] the step each rollout of the trace was dispatched in; -1 = evicted."""

    @property
    def idle_fraction(self) -> float:
        """Predicted part of rank time spent waiting for the slowest rank: 1 - sum(mean load) / sum(slowest)."""
        return self.figures.idle_fraction

    @property
    def whole_idle_fraction(self) -> float:
        """Part of rank time without work, the wait for rollouts included: 1 - work / (ranks x time). Without that wait
        it is :attr:`idle_fraction`; NaN with an instant trainer, which has nothing to do but wait."""
        shown, at_s = self.shown_steps, self.steps.at_s
        if at_s.size == 0 or math.isinf(self.work_per_second):
            return math.nan
        # up to the step after the last one shown, so that its wait is counted once
        end_s = float(at_s[shown.stop]) if shown.stop < at_s.size else self.elapsed_s
        time_s = end_s - float(at_s[shown.start])
        work_s = float(self.steps.mean_load[shown].sum()) / self.work_per_second
        return max(1.0 - work_s / time_s, 0.0) if time_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: every figure, without the columns (``steps``, ``step_of``) and without the config; None for what
        is no number in JSON."""
        names = [f.name for f in fields(self) if f.name not in ("config", "shown_steps", "steps", "step_of")]
        names += ["idle_fraction", "whole_idle_fraction"]
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({name: getattr(self, name) for name in names}))
        return plain
