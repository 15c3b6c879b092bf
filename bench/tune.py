"""Tuning: does a recommendation hold on lengths it has not seen, and what a sweep costs.

python bench/tune.py [--json] [--traces DIR] [--only sweep|halves|kept] [--processes 2] [--seeds 4]

halves: `sb.tune` on the first half of each recorded trace; what it recommends is run afresh on the second half, and the
same sweep is made there. "gap" is the idle share of the recommended knobs, less that of the best setting there within
the same bound on age (and batches not cut short). A half is repeated until it is 400 batches long.

kept: how many must wait (window) and how many may (capacity), both in batches, with a trainer that takes time:
generation 0.7, 1 and 1.4 times as fast as balanced ranks train. Whole idle time, the wait for rollouts included; beside
it the idle time of the steps, and the mean and 99th percentile of the delay in steps.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from _common import Rows, arguments
from peers import alone, part, trace_folder

import stream_balancer as sb
from stream_balancer.tools.generation import seconds_per_rollout
from stream_balancer.tools.tune import AGE_SLACK, FEW_SHORT, PARTITION_TOLERANCE
from stream_balancer.tools.tune_report import TuneReport

CONFIG = sb.BalancerConfig(dp_size=8, batch_size=32, cost=sb.cost.QuadraticCost())


def sweep(rows: Rows, processes: int) -> None:
    """How long 20,000 rollouts take."""
    rows.text("a sweep of 20,000 rollouts")
    for name, cost in (("quadratic", sb.cost.QuadraticCost()), ("tokens", sb.cost.TokenCost())):
        trace = sb.generate_trace(20_000, "lrm")
        start = time.perf_counter()
        report = sb.tune(trace, CONFIG.replace(cost=cost), processes=processes)
        rows.add(f"sweep, {name}: {len(report.outcomes)} settings", time.perf_counter() - start, "s", 60.0)


# --- a recommendation on lengths it has not seen ---------------------------------------------------------------------


def halves(rows: Rows, folder: Path, processes: int) -> None:
    rows.text("recommended from the first half, run on the second")
    for path in sorted(folder.glob("*.csv.gz")):
        trace = sb.load_trace(path)
        middle = len(trace) // 2
        first = sb.tune(part(trace, slice(0, middle)), CONFIG, processes=processes)
        unseen = part(trace, slice(middle, len(trace)))
        second = sb.tune(unseen, CONFIG, processes=processes)
        chosen = first.recommended
        afresh = sb.simulate(unseen.repeated(second.times), first.recommended_config, tolerance=PARTITION_TOLERANCE)
        got = afresh.idle_fraction
        best = _best_within(second, first.max_added_age)
        name = f"{trace.name}: {chosen.knobs}"
        rows.add(f"{name}: idle on the first half", 100 * chosen.report.idle_fraction, "%")
        rows.add(f"{name}: idle on the second half", 100 * got, "%")
        rows.add(f"{name}: best there", 100 * best, "%")
        rows.add(f"{name}: gap", 100 * (got - best), "points", 1.0)
        rows.add(f"{name}: arrival order there", 100 * second.fifo.report.idle_fraction, "%")


def _best_within(report: TuneReport, max_added_age: float) -> float:
    return min(
        o.compared_idle
        for o in report.outcomes
        if o.added_age <= max_added_age + AGE_SLACK and o.short_batches <= FEW_SHORT
    )


# --- how many must wait, and how many may ----------------------------------------------------------------------------


KEPT = ((2, 2), (2, 4), (2, 6), (1.5, 3), (1.5, 4), (1.25, 2.5), (1, 4))
SPEEDS = (0.7, 1.0, 1.4)
KEPT_BATCHES, KEPT_SLOTS, KEPT_TOLERANCE, FIRST_SEED = 300, 128, 0.02, 10


def kept(rows: Rows, folder: Path, seeds: int) -> None:
    rows.text("whole idle time by how many must wait / how many may, in batches")
    for path in sorted(folder.glob("*.csv.gz")):
        trace = sb.load_trace(path)
        for skips in (8, 16):
            for speed in SPEEDS:
                for window, capacity in KEPT:
                    runs = [_in_time(trace, window, capacity, skips, speed, FIRST_SEED + seed) for seed in range(seeds)]
                    whole = np.array([100 * run.whole_idle_fraction for run in runs])
                    rows.add(
                        f"{trace.name} D{skips}, speed {speed:g}: {window:g} / {capacity:g}",
                        float(whole.mean()),
                        "%",
                        deviation=round(float(whole.std(ddof=1)), 2) if seeds > 1 else None,
                        of_steps=round(100 * float(np.mean([run.idle_fraction for run in runs])), 2),
                        delay=round(float(np.mean([run.delay_steps.mean for run in runs])), 2),
                        delay_p99=round(float(np.mean([run.delay_steps.p99 for run in runs])), 1),
                    )


def _in_time(
    trace: sb.Trace, window: float, capacity: float, skips: int, speed: float, seed: int
) -> sb.SimulationReport:
    """One run over rollouts drawn one by one."""
    size = CONFIG.batch_size
    drawn = alone(trace).resampled(KEPT_BATCHES * size, seed)
    config = CONFIG.replace(window=round(window * size), capacity=round(capacity * size), max_skips=skips)
    seconds = seconds_per_rollout(drawn, KEPT_SLOTS, 30.0) * speed
    balanced = float(np.asarray(config.cost(drawn.lengths)).mean()) / config.dp_size
    return sb.simulate(drawn, config, slots=KEPT_SLOTS, trainer=balanced / seconds, seed=seed, tolerance=KEPT_TOLERANCE)


def main() -> None:
    options = arguments(__doc__, traces=None, only=None, processes=2, seeds=4)
    rows = Rows(options.json, options.results)
    wanted = options.only
    if wanted in (None, "sweep"):
        sweep(rows, options.processes)
    folder = trace_folder(options.traces)
    if wanted in (None, "kept") and folder is not None:
        kept(rows, folder, options.seeds)
    if wanted in (None, "halves") and folder is not None:
        halves(rows, folder, options.processes)


if __name__ == "__main__":
    main()
