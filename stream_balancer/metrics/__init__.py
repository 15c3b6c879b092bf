"""Metrics of a balancer: one table of names, from which every exporter is made.

::

    wandb.log(figures(balancer.statistics()), step=step)                 # W&B; trackio and MLflow take the same dict
    for name, value in figures(balancer.statistics()).items():           # TensorBoard
        writer.add_scalar(name, value, step)

What Prometheus needs is beside this file, imported only by those who use it. A name is a promise to dashboards: add,
don't rename. Pure; nothing is read but a ``Statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stream_balancer.core.diagnosis import RankState
from stream_balancer.statistics import Statistics

__all__ = ["METRICS", "RANK_METRICS", "Metric", "figures", "values"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, and the source of its value."""

    name: str
    """Without a prefix; ends in its unit."""
    help: str
    """Meaning, for people."""
    path: str
    """The attribute of a ``Statistics`` that has the number; or, with a ``label``, a number or an object for each of
    its values, of which what follows ``.*`` is asked."""
    kind: Literal["gauge", "counter"] = "gauge"
    """A counter only grows: over restarts from a checkpoint too, but for seconds, which begin anew."""
    label: str | None = None
    """Labels: they distinguish the numbers of one name."""


METRICS: tuple[Metric, ...] = (
    Metric("waiting_rollouts", "Rollouts in the window.", "waiting"),
    Metric("waiting_tokens", "Their tokens.", "waiting_tokens"),
    Metric("waiting_bytes", "Bytes of their tensors.", "waiting_bytes"),
    Metric("waiting_length_tokens", "Lengths of the waiting rollouts.", "waiting_lengths", label="quantile"),
    Metric("oldest_wait_seconds", "How long the oldest rollout has waited.", "oldest_wait_s"),
    Metric("peak_waiting_rollouts", "Most rollouts that ever waited at once.", "peak_waiting"),
    Metric("in_flight_rollouts", "Rollouts dispatched and not yet acknowledged.", "in_flight"),
    Metric("redelivering_rollouts", "Rollouts in flight that will be given again.", "redelivering"),
    Metric("open_groups", "Groups that wait for siblings.", "open_groups"),
    Metric("oldest_open_group_seconds", "How long the oldest of them has waited.", "oldest_open_group_s"),
    Metric("short_groups", "Groups trained on without all their siblings.", "short_groups", "counter"),
    Metric("cut_siblings", "Siblings that groups left without: stragglers.", "cut_siblings", "counter"),
    Metric("blocked_puts", "Puts that wait for room.", "blocked_puts"),
    Metric("reserved_rollouts", "Rollouts being generated under reserve().", "reserved"),
    Metric("blocked_reserves", "Calls of reserve() that wait for a slot.", "blocked_reserves"),
    Metric("accepted_rollouts", "Rollouts whose put returned.", "accepted", "counter"),
    Metric("acknowledged_rollouts", "Rollouts trained on.", "acknowledged", "counter"),
    Metric("nacked_rollouts", "Rollouts of batches given back.", "nacked", "counter"),
    Metric("evicted_rollouts", "Rollouts given up, by reason.", "evicted", "counter", "reason"),
    Metric("batches", "Batches, by the reason they left.", "batches", "counter", "reason"),
    Metric("dispatched_tokens", "Tokens dispatched, padding not counted.", "dispatched_tokens", "counter"),
    Metric(
        "token_variation",
        "Coefficient of variation (standard deviation / mean) of the tokens of a step.",
        "token_variation",
    ),
    Metric("padding_copies", "Zero-weight copies made.", "padding_copies", "counter"),
    Metric("idle_fraction", "Predicted part of rank time spent waiting for the slowest.", "idle_fraction"),
    Metric(
        "unavoidable_idle_fraction",
        "The part of it that no assignment of the same rollouts avoids.",
        "unavoidable_idle_fraction",
    ),
    Metric("measured_idle_fraction", "The same, from the ranks' seconds.", "measured_idle_fraction"),
    Metric("idle_seconds", "Rank seconds without work, by cause.", "idle_seconds", "counter", "cause"),
    Metric(
        "rank_idle_seconds",
        "Seconds each rank had no work, for any cause.",
        "rank_idle_seconds",
        "counter",
        "rank",
    ),
    Metric("rank_busy_seconds", "Seconds each rank computed.", "rank_busy_seconds", "counter", "rank"),
    Metric(
        "producer_idle_seconds",
        "Rollout seconds without generation: waiting for room, or for a slot.",
        "producer_idle_seconds",
        "counter",
        "cause",
    ),
    Metric("straggler_rank", "A rank that is slow step after step; absent while there is none.", "straggler.rank"),
    Metric("straggler_slowdown", "Its seconds over the median rank's for the same work.", "straggler.slowdown"),
    Metric("straggler_since_seconds", "Since when.", "straggler.since_s"),
    Metric(
        "cost_prediction_error",
        "Mean relative error of a calibrated cost, each step predicted before it ran.",
        "cost_fit.prediction_error",
    ),
    Metric("rank_speed", "Measured speed of each rank; the median rank's is 1.", "cost_fit.speeds", label="rank"),
    Metric("mean_delay_steps", "Steps that passed a rollout over.", "length_bias.mean_delay"),
    Metric(
        "delay_of_length_decile_steps",
        "The same for the shortest tenth of the rollouts (0) to the longest (9).",
        "length_bias.delay_per_decile",
        label="decile",
    ),
    Metric(
        "length_delay_correlation",
        "Pearson's r of length and delay: 0 is blind to length.",
        "length_bias.length_delay_correlation",
    ),
    Metric(
        "length_shift",
        "Mean length of what left, over that of all with those evicted as late or stale: 1 is no bias.",
        "length_bias.length_shift",
    ),
    Metric("training_age_versions", "How old rollouts were when trained on.", "training_age", label="statistic"),
    Metric(
        "unchecked_rollouts",
        "Rollouts dispatched without a version to check staleness.max_versions by.",
        "unchecked_rollouts",
        "counter",
    ),
    Metric("policy_version", "Policy version last set.", "version"),
    Metric("window_rollouts", "Rollouts that a step waits for.", "window"),
)

RANK_METRICS: tuple[Metric, ...] = (
    Metric("rank_connected", "1 for a rank that is connected, 0 for one that is not.", "*.connected", label="rank"),
    Metric("rank_queue_steps", "Steps a rank was sent and has not acknowledged.", "*.queue", label="rank"),
)
"""Metrics of ``balancer.rank_states()``: there while ``serve()`` runs."""

_PARTS = {"quantile": ("min", "p50", "p90", "max"), "statistic": ("mean", "p99", "max")}
"""Labels whose values are the parts of one record."""


def values(metric: Metric, source: Statistics | Sequence[RankState]) -> Iterator[tuple[str | None, float]]:
    """(label's value or None, number) for each number that is known."""
    path, _, of_each = metric.path.partition("*")
    found: Any = source
    for name in filter(None, path.split(".")):
        found = None if found is None else getattr(found, name)
    for label, value in _parts(metric.label, found):
        number = getattr(value, of_each[1:]) if of_each else value
        # causes of one rank: their sum is what the label "rank" stands for
        number = sum(number.values()) if isinstance(number, Mapping) else number
        # absent, not 0: a dashboard would average it
        if number is not None and not math.isnan(number):
            yield label, float(number)


def _parts(label: str | None, found: Any) -> Iterable[tuple[str | None, Any]]:
    if found is None or label is None:
        return [] if found is None else [(None, found)]
    if names := _PARTS.get(label):
        return zip(names, found if isinstance(found, tuple) else [getattr(found, name) for name in names], strict=False)
    if isinstance(found, Mapping):
        return ((str(name), part) for name, part in found.items())
    return ((str(getattr(part, "rank", place)), part) for place, part in enumerate(found))


def figures(statistics: Statistics, prefix: str = "stream_balancer/") -> dict[str, float]:
    """All that is known, flat: ``{"stream_balancer/waiting_rollouts": 37.0, "stream_balancer/batches/window": 12.0,
    ...}``, for loggers that take a dict of numbers. What is not known yet (NaN) is left out. O(metrics)."""
    return {
        prefix + metric.name + (f"/{label}" if label is not None else ""): value
        for metric in METRICS
        for label, value in values(metric, statistics)
    }
