"""Tuning of knobs to given lengths: a sweep over window, ``max_skips`` and ``deadline_s``, where the trainer takes time
over ``capacity`` too, and what it recommends.

Every setting is a run of ``simulate``, hence of the very core a balancer runs. This module decides which settings are
tried, which of them are on the front of idle time against queueing delay, and which one to take. The rule is in
docs/tuning.md. Nothing is drawn or printed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from stream_balancer.config import BalancerConfig, least_max_skips
from stream_balancer.errors import ConfigError
from stream_balancer.tools.generation import seconds_per_rollout
from stream_balancer.tools.processes import Progress, run_all
from stream_balancer.tools.simulate import WINDOW_UNGIVEN, TrainerSpeed, as_policy, simulate
from stream_balancer.tools.trace import Trace
from stream_balancer.tools.tune_report import Outcome, TuneReport, outcome_of, pareto_front

WIDTHS = (1.25, 1.5, 2.0, 3.0)
"""Windows that are tried, in batches, besides one batch: no window at all."""
WIDTHS_IN_TIME = (1.5, 2.0)
"""Windows with a trainer that takes time: there more than a window waits whenever that trains, up to ``capacity``."""
ROOMS = (2, 3, 4, 6)
"""Capacities that are tried then, in batches. An instant trainer finds exactly the window, whatever the capacity."""
PATIENCE = (8, 16, 32)
"""``max_skips`` that are tried, or the least that works with the window and the capacity where that is more."""
DEADLINES = (2.0, 4.0)
"""``deadline_s`` that are tried besides none where arrivals were recorded, in times the window takes to fill."""
AT_BOUND = 0.002
"""Unavoidable idle fraction of arrival order up to which a window has nothing to win."""
LEAST_BATCHES = 400
"""A shorter trace is repeated until it is so many batches long: a run of 100 is 0.5 to 4 points off on heavy tails."""
PARTITION_TOLERANCE = 3e-3
"""Tolerance of every run: three fifths of the time for 0.1 points of idle time, of every setting alike."""
AGE_SLACK = 0.05
"""Steps by which a measured mean delay may exceed a bound: a window of 2 batches measures 0.98 to 1.03, not 1."""
FEW_SHORT = 0.01
"""Fraction of batches that a deadline may cut short in a setting worth recommending: batch_size is not ours to
change."""

MOST_REASONS = 3
"""Reasons that are given where no setting works."""


def tune(
    trace: Trace,
    config: BalancerConfig,
    *,
    max_added_age: float = 2.0,
    tolerance: float = 0.0025,
    windows: Sequence[int] | None = None,
    capacities: Sequence[int] | None = None,
    max_skips: Sequence[int | None] | None = None,
    deadlines_s: Sequence[float | None] | None = None,
    slots: int = 128,
    tokens_per_second: float = 30.0,
    trainer: TrainerSpeed = "instant",
    seed: int = 0,
    processes: int = 1,
    progress: Progress | None = None,
) -> TuneReport:
    """Sweep window, ``max_skips`` and ``deadline_s`` over a trace, with a trainer that takes time ``capacity`` too, and
    recommend. Deterministic, whatever the number of processes.

    :param trace: best one of your own: ``balancer.record("lengths.csv")``, then ``load_trace``. One of less than 400
        batches is repeated until it is as long.
    :param config: the knobs that are not swept; what is derived from the window follows it.
    :param max_added_age: the most mean steps of waiting to recommend, above those without a window.
    :param tolerance: idle fraction that is not worth a larger window, a looser ``max_skips`` or a longer deadline.
    :param windows: rollouts; None = 1 to 3 batches. Then, for each,
        ``capacities``, ``max_skips`` (None in it: no bound) and ``deadlines_s`` (None in it: no deadline) in every
        combination that the config allows.
    :param capacities: rollouts; None = 2 to 6 batches where the trainer takes time, else two
        windows.
    :param slots: and ``tokens_per_second``, ``trainer``, ``seed``: as in :func:`~stream_balancer.tools.simulate`. With
        a trainer that takes time, settings are compared by ``whole_idle_fraction``.
    :param processes: simulate in so many processes, each importing ``__main__`` anew (guard it with
        ``if __name__ == "__main__"``); it pays from some seconds of work on.
    :param progress: called with the settings done and their number.

    Raises ConfigError for bounds or settings that make no sense, and what ``simulate`` raises.
    """
    in_time, given = trainer != "instant", (windows, capacities, max_skips, deadlines_s)
    _check(max_added_age, tolerance, processes)
    if capacities and not in_time:
        raise ConfigError(
            "capacities need a trainer that takes time: an instant one finds exactly the window, whatever the "
            "capacity. Set trainer to 'matched' or to work units per second, or leave capacities out"
        )
    # what follows from the window must follow from each that is tried
    base = config.replace(policy="window", deadline_s=None, **WINDOW_UNGIVEN)
    times = math.ceil(LEAST_BATCHES * config.batch_size / len(trace))
    trace = trace.repeated(times)
    batch_s = seconds_per_rollout(trace, slots, tokens_per_second) * config.batch_size
    # seconds that were made up are nobody's deadline
    settings = _settings(base, *given, in_time=in_time, batch_s=0.0 if trace.arrival_s is None else batch_s)
    run = partial(
        simulate,
        trace,
        slots=slots,
        tokens_per_second=tokens_per_second,
        trainer=trainer,
        seed=seed,
        tolerance=PARTITION_TOLERANCE,
    )
    reports = run_all(run, [as_policy(base, "round_robin"), as_policy(base, "fifo"), *settings], processes, progress)
    # delays are compared with what no window would add
    round_robin, fifo, *swept = [outcome_of(report, reports[1]) for report in reports]
    choice = _recommend(swept, fifo, max_added_age, tolerance)
    pays = choice.window > base.batch_size or fifo.compared_idle - choice.compared_idle > tolerance
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
        reason=_why(choice, fifo) if pays else _why_not(swept, fifo, max_added_age),
    )


# --- which settings ---------------------------------------------------------------------------------------------------


def _check(max_added_age: float, tolerance: float, processes: int) -> None:
    for name, value, least, below, words in (
        ("max_added_age", max_added_age, 0, math.inf, "a finite number of steps >= 0"),
        ("tolerance", tolerance, 0, 1.0, "an idle fraction in 0..1"),
        ("processes", processes, 1, math.inf, "an int >= 1"),
    ):
        if not least <= value < below:
            raise ConfigError(f"{name} must be {words}, not {value!r}")


def _settings(
    base: BalancerConfig,
    windows: Sequence[int] | None,
    capacities: Sequence[int] | None,
    max_skips: Sequence[int | None] | None,
    deadlines_s: Sequence[float | None] | None,
    *,
    in_time: bool,
    batch_s: float,
) -> list[BalancerConfig]:
    """Settings to try, each once, smallest window first, without those that the config refuses: all combinations of
    what was asked for, the usual ones for None, deadlines around the middle. ``batch_s``: seconds in which the rollouts
    of a batch come; 0: no deadlines but those that were asked for. Raises ConfigError, with the reasons, if all are
    refused."""
    found: list[BalancerConfig] = []
    reasons: dict[str, None] = {}

    def allowed(config: BalancerConfig, **knobs: Any) -> BalancerConfig | None:
        try:
            return config.replace(**knobs)
        except ConfigError as error:
            reasons[str(error)] = None
            return None

    for window in sorted(set(windows or _windows(base, in_time=in_time))):
        usual = [room * base.batch_size for room in ROOMS] if in_time else [2 * window]
        for capacity in sorted(set(capacities or usual)):
            at = allowed(base, window=window, capacity=capacity)
            if at is None:  # then there is no max_skips to try, either
                continue
            if max_skips:
                skips: Sequence[Any] = max_skips
            elif in_time or window > base.batch_size:
                skips = sorted({max(most, least_max_skips(at)) for most in PATIENCE})
            else:
                skips = ["auto"]  # nothing is ever passed over
            bounds = list(product(skips, deadlines_s or [None]))
            if deadlines_s is None and batch_s > 0 and window > base.batch_size:
                fill_s = window / base.batch_size * batch_s
                bounds += [(skips[len(skips) // 2], float(f"{times * fill_s:.2g}")) for times in DEADLINES]
            for most, deadline_s in bounds:
                setting = allowed(at, max_skips=most, deadline_s=deadline_s)
                # max_skips that "auto" and a number make the same are one setting
                if setting is not None and setting not in found:
                    found.append(setting)
    if not found:
        # a large sweep has hundreds, which say the same of other numbers
        raise ConfigError(
            "no combination of these windows, capacities, max_skips and deadlines_s works with the other knobs: "
            f"{'; '.join([*reasons][:MOST_REASONS])}"
        )
    return found


def _windows(base: BalancerConfig, *, in_time: bool) -> list[int]:
    size = base.groups.size or 1
    widths = WIDTHS_IN_TIME if in_time else WIDTHS
    return [base.batch_size, *(math.ceil(width * base.batch_size / size) * size for width in widths)]


# --- which one to take ------------------------------------------------------------------------------------------------


def _eligible(outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float) -> list[Outcome]:
    """Outcomes within the bound on delay, with full batches, and throwing nothing more away than no window would; the
    smallest window if there is none."""
    # short batches idle less and are another training; evicted rollouts were generated for nothing
    found = [
        o
        for o in outcomes
        if o.added_age <= max_added_age + AGE_SLACK
        and o.short_batches <= FEW_SHORT
        and o.report.evicted <= fifo.report.evicted
    ]
    return found or [outcomes[0]]


def _recommend(outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float, tolerance: float) -> Outcome:
    """Recommended setting, of those that idle hardly more than the best one: the smallest capacity, then the smallest
    window, then the smallest ``max_skips``, then the shortest deadline."""
    eligible = _eligible(outcomes, fifo, max_added_age)
    enough = min(o.compared_idle for o in eligible) + tolerance

    def size(o: Outcome) -> tuple[float, ...]:
        loosest = (math.inf if bound is None else bound for bound in (o.knobs["max_skips"], o.knobs["deadline_s"]))
        return (o.capacity, o.window, *loosest)

    return min((o for o in eligible if o.compared_idle <= enough), key=size)


def _why(choice: Outcome, fifo: Outcome) -> str:
    return (
        f"{choice.knobs_of_size} idles {choice.compared_idle:.1%} of rank time"
        f"{', the wait for rollouts included,' if choice.in_time else ''} where arrival order with "
        f"the best partition idles {fifo.compared_idle:.1%}, for {choice.added_age:.2f} steps of mean queueing "
        "delay."
    )


def _why_not(outcomes: Sequence[Outcome], fifo: Outcome, max_added_age: float) -> str:
    best = min(_eligible(outcomes, fifo, max_added_age), key=lambda o: o.compared_idle)
    saved = max(fifo.compared_idle - best.compared_idle, 0.0)
    said = (
        f"A window does not pay: arrival order with the best partition idles {fifo.compared_idle:.1%}, and the best "
        f"window within the bounds saves {saved:.1%} of rank time"
    )
    if fifo.report.figures.unavoidable_idle <= AT_BOUND:
        said += "; first in, first out is already at its bound: a window earns nothing here"
    return f"{said}; use window=batch_size."
