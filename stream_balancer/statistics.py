"""Report of a balancer on itself: ``balancer.statistics()`` and its parts.

Frozen records of numbers, taken at one instant; nothing that counts, waits or decides may enter (``core`` counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stream_balancer.field_docs import documented
from stream_balancer.planning.length_bias import LengthBiasSummary
from stream_balancer.rollouts import EvictReason, Reason

IdleCause: TypeAlias = Literal[
    "no_data", "window", "deadline", "imbalance_avoidable", "imbalance_unavoidable", "transport"
]
"""Why a rank computed nothing: too few rollouts were there for any batch; there were enough, but the window was not
full, or the deadline not reached; other ranks had more to do, which a better assignment might have avoided, or none
could; or its batch was on the way."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """Fit of a ``CalibratedCost`` to the seconds that ranks computed."""

    steps: int
    """Steps it has learned from; the first measured one, which pays for compilation and caches, is left out."""
    prediction_error: float | None
    """Mean over ranks and about the last ten steps of |predicted - measured| / measured, each predicted before it
    ran; None before the second step."""
    seconds_per_token: float
    """Seconds of compute, on a rank of speed 1."""
    seconds_per_token_pair: float
    """Seconds of compute per token pair, as the prior counts pairs: those that its layers attend to
    (``TransformerCost``, ``LayerSumCost``), else a rollout's tokens squared."""
    seconds_per_micro_batch: float
    """Seconds of a micro-batch whatever is in it."""
    seconds_per_step: float
    """Seconds of a step whatever is in it."""
    speeds: tuple[float, ...]
    """Measured speed of each rank, the median rank's being 1.0."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than the others, step after step."""

    rank: int
    """DP rank."""
    slowdown: float
    """Seconds of the rank over those of the median rank for the same work, since then; 1.3 = it takes 30 % longer."""
    since_step: int
    """The first step in which it was slow."""
    since_s: float
    """Seconds since that step was done."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.slowdown:.2f} times as long as the median rank for the same work, since "
            f"step {self.since_step} ({self.since_s:.0f} s ago)"
        )


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAge:
    """Age of rollouts in policy versions when their training began: the version last set by then, less the oldest
    that any of their tokens was sampled with."""

    rollouts: int
    """Rollouts whose training has begun, and whose version is known."""
    mean: float
    """Versions."""
    p99: int
    """99 % of them were at most this old."""
    max: int
    """The oldest; at most ``staleness.max_versions`` where that is kept, see docs/staleness.md."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Figures of a balancer at one instant. At all times ``accepted == waiting + in_flight + acknowledged +
    sum(evicted.values())``."""

    waiting: int
    """Rollouts in the window now."""
    waiting_tokens: int
    """Tokens of the waiting rollouts."""
    waiting_bytes: int
    """Bytes of their tensors."""
    waiting_lengths: tuple[int, ...]
    """Shortest, median, 90th percentile and longest waiting rollout, in tokens; empty if none waits."""
    in_flight: int
    """Rollouts dispatched and not yet acknowledged."""
    accepted: int
    """Rollouts whose put returned, ever."""
    acknowledged: int
    """Rollouts whose batch was acknowledged, ever."""
    evicted: Mapping[EvictReason, int]
    """Rollouts given up, by reason, ever."""
    batches: Mapping[Reason, int]
    """Steps by reason, ever."""
    dispatched_tokens: int
    """Tokens dispatched, ever, padding copies not counted."""
    token_variation: float | None
    """Coefficient of variation of the tokens of a step: their standard deviation over their mean, over all steps ever.
    0.0 = every step trains on as many tokens; what varies is noise in the gradient. None before the first step."""
    padding_copies: int
    """Zero-weight copies made, ever."""
    nacked: int
    """Rollouts of batches that :meth:`StreamBalancer.nack` gave back, or that a later ``serve()`` delivered again,
    ever."""
    open_groups: int
    """Groups of which some rollouts wait for siblings to come."""
    oldest_open_group_s: float
    """Seconds the oldest of these rollouts has waited; 0.0 if there is none."""
    short_groups: int
    """Groups that were closed with fewer than ``groups.size``, or sent before all their siblings had come, ever."""
    cut_siblings: int
    """Siblings that groups left without (``groups.min_size``), ever. Those that came late are ``evicted["late"]``."""
    blocked_puts: int = 0
    """Puts that are waiting for room now."""
    reserved: int = 0
    """Rollouts that are being generated under a slot of ``reserve()``."""
    blocked_reserves: int = 0
    """Calls of ``reserve()`` that wait for a slot now."""
    peak_waiting: int
    """Most rollouts that ever waited at once."""
    oldest_wait_s: float
    """Seconds the oldest waiting rollout has waited; 0.0 if none waits."""
    redelivering: int
    """Rollouts in flight that ``batches()`` will give again: their batches were restored from a checkpoint."""
    unavoidable_idle_fraction: float | None
    """The part of ``idle_fraction`` that no assignment of the same rollouts could have avoided: outliers. None before
    the first step."""
    length_bias: LengthBiasSummary
    """Delay of long rollouts beside short ones; see :class:`LengthBiasSummary`."""
    idle_fraction: float | None
    """Predicted part of rank time spent waiting for the slowest rank, over all steps: 1 - sum(mean load) / sum(max
    load). None before the first dispatch."""
    measured_idle_fraction: float | None
    """The same, from the seconds that ranks reported for their steps; None before any did. Only as good as they are:
    time that ranks spend waiting for each other makes them look alike, see :meth:`RankFeed.timed`."""
    idle_seconds: Mapping[IdleCause, float] = field(default_factory=dict)
    """Rank seconds in which nothing was computed, by cause, summed over the ranks, since this balancer was made. From
    the seconds that ranks reported for their steps, like ``measured_idle_fraction``, and as good as they are."""
    rank_idle_seconds: tuple[Mapping[IdleCause, float], ...] = ()
    """The same for each rank."""
    rank_busy_seconds: tuple[float, ...] = ()
    """Seconds each rank computed in those steps."""
    producer_idle_seconds: Mapping[Literal["put", "reserve"], float] = field(default_factory=dict)
    """Seconds that rollouts waited for room in ``put``, or to begin in ``reserve()``, summed over them, since this
    balancer was made: generation that idles, beside the ranks that do. See docs/tuning.md."""
    straggler: Straggler | None = None
    """The slowest of the ranks that are slow step after step; None while there is none."""
    cost_fit: CostFit | None = None
    """Figures learned under ``cost=CalibratedCost(...)``; None with another cost model."""
    version: int | None
    """Policy version last set, or None."""
    training_age: TrainingAge | None
    """How old rollouts were when they were trained on, since this balancer was made; None before any was."""
    unchecked_rollouts: int = 0
    """Rollouts dispatched since this balancer was made for which ``max_versions`` was not checked: they had no
    version, or the balancer had none yet."""
    window: int
    """Rollouts that a step waits for."""

    def __str__(self) -> str:
        """A line each for rollouts, batches, idle time, and what is known besides; for people, and it may change."""
        age, unchecked = self.training_age, self.unchecked_rollouts
        versions = [
            "" if self.version is None else f"policy version {self.version}",
            "" if age is None else f"trained on at age {age.mean:.2f}, at most {age.max}",
            f"staleness: not checked for {unchecked:,} rollouts" if unchecked else "",
        ]
        # what there is nothing to say of has no line
        lines = {
            "rollouts": f"{self.waiting:,} wait ({self.waiting_tokens:,} tokens, "
            f"the oldest {self.oldest_wait_s:.1f} s; window {self.window:,}), {self.in_flight:,} in flight, "
            f"{self.acknowledged:,} acknowledged",
            "evicted": _counts(self.evicted),
            "held back": _counts(
                {"puts wait for room": self.blocked_puts, "calls of reserve()": self.blocked_reserves}
            ),
            "batches": _counts(self.batches) or "none yet",
            "idle": f"{_percent(self.idle_fraction)} predicted ({_percent(self.unavoidable_idle_fraction)} "
            f"unavoidable), {_percent(self.measured_idle_fraction)} measured",
            "idle seconds": ", ".join(f"{s:,.1f} {cause}" for cause, s in self.idle_seconds.items() if s >= 0.05),
            "producers": ", ".join(
                f"{s:,.1f} s idle in {call}()" for call, s in self.producer_idle_seconds.items() if s >= 0.05
            ),
            "versions": "; ".join(filter(None, versions)),
            "slow": "" if self.straggler is None else str(self.straggler),
        }
        return "\n".join(f"{name:<13}{said}" for name, said in lines.items() if said)


def _counts(by_name: Mapping[str, int] | Mapping[EvictReason, int] | Mapping[Reason, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in by_name.items() if count)


def _percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{fraction:.1%}"
