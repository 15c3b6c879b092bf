"""Metrics of a balancer: one table of names, from which every exporter is made.

::

    wandb.log(figures(balancer.statistics()), step=step)                 # W&B; trackio and MLflow take the same dict
    for name, value in figures(balancer.statistics()).items():           # TensorBoard
        writer.add_scalar(name, value, step)

One file per system beside this one (``prometheus``, ``otel``), each imported only by those who use it. A name is a
promise to dashboards: add, don't rename. Pure; nothing is read but a ``Statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from stream_balancer.core.diagnosis import RankState
from stream_balancer.statistics import Statistics

__all__ = ["METRICS", "RANK_METRICS", "Metric", "figures"]

T = TypeVar("T")

QUANTILE_NAMES = ("min", "p50", "p90", "max")  # of Statistics.waiting_lengths


@dataclass(frozen=True, slots=True)
class Metric(Generic[T]):
    """One name, and where its value comes from."""

    name: str
    """Without a prefix; ends in its unit."""
    help: str
    """What it says, for people."""
    read: Callable[[T], float | Mapping[str, float]]
    """A number, or one for each value of ``label``. NaN where nothing is known yet."""
    kind: Literal["gauge", "counter"] = "gauge"
    """A counter only grows: over restarts from a checkpoint too, but for seconds, which begin anew."""
    label: str | None = None
    """Labels: they distinguish the numbers of one name."""


def _one(attribute: str) -> Callable[[Statistics], float]:
    def read(statistics: Statistics) -> float:
        value = getattr(statistics, attribute)
        return math.nan if value is None else float(value)

    return read


def _dict(attribute: str) -> Callable[[Statistics], Mapping[str, float]]:
    def read(statistics: Statistics) -> Mapping[str, float]:
        return {name: float(value) for name, value in getattr(statistics, attribute).items()}

    return read


def _waiting_lengths(statistics: Statistics) -> Mapping[str, float]:
    return dict(zip(QUANTILE_NAMES, map(float, statistics.waiting_lengths), strict=False))


def _delay_of_decile(statistics: Statistics) -> Mapping[str, float]:
    return {str(decile): delay for decile, delay in enumerate(statistics.length_bias.delay_per_decile)}


def _by_rank(read: Callable[[Statistics], Iterable[float]]) -> Callable[[Statistics], Mapping[str, float]]:
    return lambda statistics: {str(rank): value for rank, value in enumerate(read(statistics))}


def _straggler(attribute: str) -> Callable[[Statistics], float]:
    return lambda statistics: math.nan if statistics.straggler is None else getattr(statistics.straggler, attribute)


def _rank_speeds(statistics: Statistics) -> Mapping[str, float]:
    fit = statistics.cost_fit
    return {} if fit is None else {str(rank): speed for rank, speed in enumerate(fit.speeds)}


def _training_age(statistics: Statistics) -> Mapping[str, float]:
    age = statistics.training_age
    return {} if age is None else {"mean": age.mean, "p99": float(age.p99), "max": float(age.max)}


def _idle_by_window(statistics: Statistics) -> Mapping[str, float]:
    return {str(window): idle for window, idle in statistics.idle_by_window.items()}


def _stratum(attribute: str) -> Callable[[Statistics], Mapping[str, float]]:
    def read(statistics: Statistics) -> Mapping[str, float]:
        found = {name: getattr(stratum, attribute) for name, stratum in statistics.strata.items()}
        return {name: math.nan if value is None else float(value) for name, value in found.items()}

    return read


METRICS: tuple[Metric[Statistics], ...] = (
    Metric("waiting_rollouts", "Rollouts in the window.", _one("waiting")),
    Metric("waiting_tokens", "Their tokens.", _one("waiting_tokens")),
    Metric("waiting_bytes", "Bytes of their tensors.", _one("waiting_bytes")),
    Metric("waiting_length_tokens", "Lengths of the waiting rollouts.", _waiting_lengths, label="quantile"),
    Metric("oldest_wait_seconds", "How long the oldest rollout has waited.", _one("oldest_wait_s")),
    Metric("peak_waiting_rollouts", "Most rollouts that ever waited at once.", _one("peak_waiting")),
    Metric("in_flight_rollouts", "Rollouts dispatched and not yet acknowledged.", _one("in_flight")),
    Metric("redelivering_rollouts", "Rollouts in flight that will be given again.", _one("redelivering")),
    Metric("open_groups", "Groups that wait for siblings.", _one("open_groups")),
    Metric("oldest_open_group_seconds", "How long the oldest of them has waited.", _one("oldest_open_group_s")),
    Metric("short_groups", "Groups trained on without all their siblings.", _one("short_groups"), "counter"),
    Metric("blocked_puts", "Puts that wait for room.", _one("blocked_puts")),
    Metric("reserved_rollouts", "Rollouts being generated under reserve().", _one("reserved")),
    Metric("blocked_reserves", "Calls of reserve() that wait for a slot.", _one("blocked_reserves")),
    Metric("accepted_rollouts", "Rollouts whose put returned.", _one("accepted"), "counter"),
    Metric("acknowledged_rollouts", "Rollouts trained on.", _one("acknowledged"), "counter"),
    Metric("nacked_rollouts", "Rollouts of batches given back.", _one("nacked"), "counter"),
    Metric("evicted_rollouts", "Rollouts given up, by reason.", _dict("evicted"), "counter", "reason"),
    Metric("dispatches", "Batches, by the reason they left.", _dict("batches"), "counter", "reason"),
    Metric("dispatched_tokens", "Tokens dispatched, padding not counted.", _one("dispatched_tokens"), "counter"),
    Metric(
        "token_variation",
        "Coefficient of variation (standard deviation / mean) of the tokens of a step.",
        _one("token_variation"),
    ),
    Metric("surplus_rollouts", "Rollouts that later steps give back.", _one("surplus_rollouts")),
    Metric("padding_copies", "Zero-weight copies made.", _one("padding_copies"), "counter"),
    Metric("idle_fraction", "Predicted part of rank time spent waiting for the slowest.", _one("idle_fraction")),
    Metric(
        "unavoidable_idle_fraction",
        "The part of it that no assignment of the same rollouts avoids.",
        _one("unavoidable_idle_fraction"),
    ),
    Metric("measured_idle_fraction", "The same, from the ranks' seconds.", _one("measured_idle_fraction")),
    Metric("idle_seconds", "Rank seconds without work, by cause.", _dict("idle_seconds"), "counter", "cause"),
    Metric(
        "rank_idle_seconds",
        "Seconds each rank had no work, for any cause.",
        _by_rank(lambda s: [sum(of_rank.values()) for of_rank in s.rank_idle_seconds]),
        "counter",
        "rank",
    ),
    Metric(
        "rank_busy_seconds", "Seconds each rank computed.", _by_rank(lambda s: s.rank_busy_seconds), "counter", "rank"
    ),
    Metric("straggler_rank", "A rank that is slow step after step; absent while there is none.", _straggler("rank")),
    Metric("straggler_slowdown", "Its seconds over the median rank's for the same work.", _straggler("slowdown")),
    Metric("straggler_since_seconds", "Since when.", _straggler("since_s")),
    Metric(
        "cost_prediction_error",
        "Mean relative error of a calibrated cost, each step predicted before it ran.",
        lambda s: (
            math.nan if s.cost_fit is None or s.cost_fit.prediction_error is None else s.cost_fit.prediction_error
        ),
    ),
    Metric("rank_speed", "Measured speed of each rank; the median rank's is 1.", _rank_speeds, label="rank"),
    Metric("mean_delay_dispatches", "Dispatches that passed a rollout over.", lambda s: s.length_bias.mean_delay),
    Metric(
        "delay_of_length_decile_dispatches",
        "The same for the shortest tenth of the rollouts (0) to the longest (9).",
        _delay_of_decile,
        label="decile",
    ),
    Metric(
        "length_delay_correlation",
        "Pearson's r of length and delay: 0 is blind to length.",
        lambda s: s.length_bias.length_delay_correlation,
    ),
    Metric("stratum_waiting_rollouts", "Rollouts of a stratum in the window.", _stratum("waiting"), label="stratum"),
    Metric("stratum_mean_wait_seconds", "How long these have waited.", _stratum("mean_wait_s"), label="stratum"),
    Metric("stratum_share", "Its share of the last dispatches.", _stratum("share"), label="stratum"),
    Metric("training_age_versions", "How old rollouts were when trained on.", _training_age, label="statistic"),
    Metric("policy_version", "Policy version last set.", _one("version")),
    Metric("window_rollouts", "Rollouts that a dispatch waits for: the knob, or what auto chose.", _one("window")),
    Metric("window_tokens", "Tokens that a dispatch waits for, under batch_tokens.", _one("window_tokens")),
    Metric("window_idle_fraction", "What each window of window='auto' would idle.", _idle_by_window, label="window"),
)


def _of_ranks(attribute: str) -> Callable[[Sequence[RankState]], Mapping[str, float]]:
    """Of the trainer's ranks; another role's have the same numbers."""
    return lambda states: {str(one.rank): float(getattr(one, attribute)) for one in states if not one.role}


RANK_METRICS: tuple[Metric[Sequence[RankState]], ...] = (
    Metric(
        "rank_connected", "1 for a rank that is connected, 0 for one that is not.", _of_ranks("connected"), label="rank"
    ),
    Metric("rank_queue_steps", "Steps a rank was sent and has not acknowledged.", _of_ranks("queue"), label="rank"),
)
"""Metrics of ``balancer.rank_states()``: there while ``serve()`` runs."""


def values(metric: Metric[T], source: T) -> Iterator[tuple[str | None, float]]:
    """(label's value or None, number) for each number that is known."""
    read = metric.read(source)
    numbers = read.items() if isinstance(read, Mapping) else [(None, read)]
    return ((label, float(value)) for label, value in numbers if not math.isnan(value))


def figures(statistics: Statistics, prefix: str = "stream_balancer/") -> dict[str, float]:
    """All that is known, flat: ``{"stream_balancer/waiting_rollouts": 37.0, "stream_balancer/dispatches/window": 12.0,
    ...}``, for loggers that take a dict of numbers. What is not known yet (NaN) is left out. O(metrics)."""
    return {
        prefix + metric.name + (f"/{label}" if label is not None else ""): value
        for metric in METRICS
        for label, value in values(metric, statistics)
    }
