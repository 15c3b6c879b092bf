"""Tuning of knobs to given lengths: a sweep over window, ``max_skips`` and ``deadline_s``, and what it recommends.

Every setting is a run of ``simulate``, hence of the very core a balancer runs. This module decides which settings are
tried, which of them are on the front of idle time against queueing delay, and which one to take. The rule is in
docs/tuning.md. Nothing is drawn or printed here, and how the runs are spread over processes is left to ``sweep``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.errors import ConfigError
from stream_balancer.tools.generation import seconds_per_rollout
from stream_balancer.tools.simulate import WINDOW_UNGIVEN, TrainerSpeed, as_policy, rollouts_per_batch
from stream_balancer.tools.sweep import Progress, run_all
from stream_balancer.tools.trace import Trace
from stream_balancer.tools.tune_report import Outcome, TuneReport, outcome_of, pareto_front

__all__ = ["tune"]

WIDTHS = (1.25, 1.5, 2.0, 3.0)
"""Windows that are tried, in batches, besides one batch: no window at all."""
PATIENCE = (8, 16, 32)
"""``max_skips`` that are tried, or the least that works with the window and the capacity where that is more."""
DEADLINES = (2.0, 4.0)
"""``deadline_s`` that are tried besides none, in times the window takes to fill."""
AT_BOUND = 0.002
"""Unavoidable idle fraction of arrival order up to which a window has nothing to win."""
LEAST_BATCHES = 400
"""A shorter trace is repeated until it is so many batches long: a run of 100 is 0.5 to 4 points off on heavy tails."""
PARTITION_TOLERANCE = 3e-3
"""Of every run: three fifths of the time for 0.1 points of idle time, of every setting alike."""
AGE_SLACK = 0.05
"""Dispatches by which a measured mean delay may exceed a bound: a window of 2 batches measures 0.98 to 1.03, not 1."""
FEW_SHORT = 0.01
"""Fraction of batches that a deadline may cut short in a setting worth recommending: batch_size is not ours to
change."""


def tune(
    trace: Trace,
    config: BalancerConfig,
    *,
    max_added_age: float = 2.0,
    tolerance: float = 0.0025,
    windows: Sequence[int] | None = None,
    max_skips: Sequence[int | None] | None = None,
    deadlines_s: Sequence[float | None] | None = None,
    slots: int = 128,
    tokens_per_second: float = 30.0,
    trainer: TrainerSpeed = "instant",
    seed: int = 0,
    processes: int = 1,
    progress: Progress | None = None,
) -> TuneReport:
    """Sweep window, ``max_skips`` and ``deadline_s`` over a trace, and recommend. Deterministic, whatever the number of
    processes.

    :param trace: best one of your own: ``balancer.record("lengths.csv")``, then ``load_trace``. One of less than 400
        batches is repeated until it is as long.
    :param config: the knobs that are not swept; ``capacity`` and what else is derived from the window follows it.
    :param max_added_age: the most mean dispatches of waiting to recommend, above those without a window.
    :param tolerance: idle fraction that is not worth a larger window, a looser ``max_skips`` or a longer deadline.
    :param windows: rollouts, or tokens under ``batch_tokens``; None = 1 to 3 batches. Then, for each, ``max_skips``
        (None in it: no bound) and ``deadlines_s`` (None in it: no deadline) in every combination that the config
        allows.
    :param slots: and ``tokens_per_second``, ``trainer``, ``seed``: as in :func:`~stream_balancer.tools.simulate`.
    :param processes: simulate in so many processes, each importing ``__main__`` anew (guard it with
        ``if __name__ == "__main__"``); it pays from some seconds of work on.
    :param progress: called with the settings done and their number.

    Raises ConfigError for bounds or settings that make no sense, and what ``simulate`` raises.
    """
    _check(max_added_age, tolerance)
    base = config.replace(policy="window", deadline_s=None, **WINDOW_UNGIVEN)
    times = math.ceil(LEAST_BATCHES * rollouts_per_batch(trace, config) / len(trace))
    trace = trace.repeated(times)
    batch_s = seconds_per_rollout(trace, slots, tokens_per_second) * rollouts_per_batch(trace, config)
    settings = list(_settings(base, batch_s, windows, max_skips, deadlines_s))
    if not settings:
        raise ConfigError("no combination of these windows, max_skips and deadlines_s works with the other knobs")
    runs = [as_policy(base, "round_robin"), as_policy(base, "fifo"), *settings]
    how = {
        "slots": slots,
        "tokens_per_second": tokens_per_second,
        "trainer": trainer,
        "seed": seed,
        "tolerance": PARTITION_TOLERANCE,
    }
    found = run_all(outcome_of, trace, runs, how, processes, progress)
    fifo = found[1]
    outcomes = [replace(outcome, added_age=outcome.age - fifo.age) for outcome in found]
    round_robin, fifo, swept = outcomes[0], outcomes[1], outcomes[2:]
    choice = _recommend(swept, fifo, max_added_age, tolerance, prefer_deadline=trace.arrival_s is not None)
    pays = choice.window > _one_batch(base)
    return TuneReport(
        trace_name=trace.name,
        num_rollouts=len(trace),
        times=times,
        config=base,
        max_added_age=max_added_age,
        tolerance=tolerance,
        round_robin=round_robin,
        fifo=fifo,
        outcomes=tuple(swept),
        front=pareto_front(swept),
        recommended=choice,
        pays=pays,
        reason=_why(choice, swept, fifo, max_added_age) if pays else _why_not(trace, base, swept, fifo, max_added_age),
    )


def _check(max_added_age: float, tolerance: float) -> None:
    if not (math.isfinite(max_added_age) and max_added_age >= 0):
        raise ConfigError(f"max_added_age must be a finite number of dispatches >= 0, not {max_added_age!r}")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance must be an idle fraction in 0..1, not {tolerance!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Which settings
# ---------------------------------------------------------------------------------------------------------------------


def _settings(
    base: BalancerConfig,
    batch_s: float,
    windows: Sequence[int] | None,
    max_skips: Sequence[int | None] | None,
    deadlines_s: Sequence[float | None] | None,
) -> Iterator[BalancerConfig]:
    """Each once, smallest window first, without what the config refuses."""
    seen = set()
    for window in sorted(set(windows or _windows(base))):
        for skips, deadline_s in _for_window(base, window, batch_s, max_skips, deadlines_s):
            setting = _or_refused(base, window, skips, deadline_s)
            if setting is None:
                continue
            key = (window, setting.max_skips, setting.deadline_s)
            if key not in seen:
                seen.add(key)
                yield setting


def _window_knob(base: BalancerConfig) -> str:
    """The knob that is swept."""
    return "window" if base.batch_tokens is None else "window_tokens"


def _one_batch(base: BalancerConfig) -> int:
    """No window at all, in the unit of that knob."""
    return base.batch_size if base.batch_tokens is None else base.batch_tokens


def _windows(base: BalancerConfig) -> list[int]:
    if base.batch_tokens is not None:
        return [base.batch_tokens, *(math.ceil(width * base.batch_tokens) for width in WIDTHS)]
    size = base.group_size if base.group_size is not None and base.groups != "free" else 1
    wide = [math.ceil(width * base.batch_size / size) * size for width in WIDTHS]
    return [base.batch_size, *wide]


def _for_window(
    base: BalancerConfig,
    window: int,
    batch_s: float,
    max_skips: Sequence[int | None] | None,
    deadlines_s: Sequence[float | None] | None,
) -> Iterator[tuple[int | Literal["auto"] | None, float | None]]:
    """``max_skips`` and ``deadline_s`` to try: all combinations of what was asked for, else each around the middle."""
    least = base.replace(**{_window_knob(base): window}).least_max_skips
    skips: Sequence[int | None] = max_skips or sorted({max(skips, least) for skips in PATIENCE})
    if deadlines_s:
        yield from ((most, deadline_s) for most in skips for deadline_s in deadlines_s)
        return
    if window == _one_batch(base) and not max_skips:
        yield "auto", None  # nothing is ever passed over
        return
    yield from ((most, None) for most in skips)
    fills_s = batch_s * window / _one_batch(base)
    if fills_s > 0:
        yield from ((skips[len(skips) // 2], float(f"{times * fills_s:.2g}")) for times in DEADLINES)


def _or_refused(
    base: BalancerConfig, window: int, max_skips: int | Literal["auto"] | None, deadline_s: float | None
) -> BalancerConfig | None:
    try:
        return base.replace(**{_window_knob(base): window}, max_skips=max_skips, deadline_s=deadline_s)
    except ConfigError:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Which one to take
# ---------------------------------------------------------------------------------------------------------------------


def _eligible(outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float) -> list[Outcome]:
    """Outcomes within the bound on delay, with full batches, and throwing nothing more away than no window would; the
    smallest window if there is none."""
    found = [
        o
        for o in outcomes
        if o.added_age <= max_added_age + AGE_SLACK and o.short_batches <= FEW_SHORT and o.evicted <= fifo.evicted
    ]
    return found or [outcomes[0]]


def _recommend(
    outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float, tolerance: float, *, prefer_deadline: bool
) -> Outcome:
    """Of those that idle hardly more than the best one: the smallest window, then the smallest ``max_skips``, then the
    shortest deadline, or none where arrivals were not recorded: seconds that were made up are nobody's deadline."""
    eligible = _eligible(outcomes, fifo, max_added_age)
    enough = min(o.idle_fraction for o in eligible) + tolerance
    close = [o for o in eligible if o.idle_fraction <= enough]
    none = math.inf if prefer_deadline else 0.0
    return min(
        close, key=lambda o: (o.window, _least_first(o.max_skips), none if o.deadline_s is None else o.deadline_s)
    )


def _least_first(max_skips: int | None) -> float:
    """For sorting: no bound is the loosest."""
    return math.inf if max_skips is None else max_skips


def _why(choice: Outcome, outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float) -> str:
    said = (
        f"{choice.window_knob}={choice.window} idles {choice.idle_fraction:.1%} of rank time where arrival order with "
        f"the best partition idles {fifo.idle_fraction:.1%}, for {choice.added_age:.2f} dispatches of mean queueing "
        "delay"
    )
    smaller = [o for o in outcomes if o.window < choice.window and o.short_batches <= FEW_SHORT]
    if smaller:
        best = min(smaller, key=lambda o: o.idle_fraction)
        said += f"; a smaller one idles {best.idle_fraction:.1%} at best"
    longer = min((o for o in outcomes if o.short_batches <= FEW_SHORT), key=lambda o: o.idle_fraction, default=choice)
    if longer.added_age > max_added_age + AGE_SLACK and longer.idle_fraction < choice.idle_fraction:
        window = f"{longer.window_knob}={longer.window}"
        said += f"; {longer.idle_fraction:.1%} would take {window} and {longer.added_age:.2f} dispatches"
    return said + "."


def _why_not(
    trace: Trace, config: BalancerConfig, outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float
) -> str:
    best = min(_eligible(outcomes, fifo, max_added_age), key=lambda o: o.idle_fraction)
    saved = max(fifo.idle_fraction - best.idle_fraction, 0.0)
    noise = 2 * max(fifo.idle_error, best.idle_error)
    costs = np.asarray(config.cost(trace.lengths), dtype=np.float64)
    fair = float(costs.mean()) * rollouts_per_batch(trace, config) / config.dp_size
    said = (
        f"A window does not pay: arrival order with the best partition idles {fifo.idle_fraction:.1%}, and the best "
        f"window within the bounds saves {saved:.1%} of rank time (noise {noise:.1%})"
    )
    if fair >= float(costs.max()) and config.sync == "step":
        said += f", because a mean batch is {fair / float(costs.max()):.1f} x dp_size x the longest rollout"
    if fifo.unavoidable_idle <= AT_BOUND:
        said += "; first in, first out is already at its bound: a window earns nothing here"
    return said + f"; use {'window=batch_size' if config.batch_tokens is None else 'window_tokens=batch_tokens'}."
