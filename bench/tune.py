"""Tuning: does a recommendation hold on lengths it has not seen, does window="auto" follow a drift, and what both cost.

python bench/tune.py [--json] [--traces DIR] [--only sweep|halves|auto|cost|kept] [--processes 2] [--seeds 4]

halves: `sb.tune` on the first half of each recorded trace; what it recommends is run afresh on the second half, and the
same sweep is made there. "gap" is the idle share of the recommended knobs, less that of the best setting there within
the same bound on age (and batches not cut short). A half is repeated until it is 400 batches long.

auto: streams whose medians fall by a third while their tails grow. window="auto" against every fixed window it could
have chosen; the best one is known only in hindsight.

kept: how many must wait (window) and how many may (capacity), both in batches, with a trainer that takes time:
generation 0.7, 1 and 1.4 times as fast as balanced ranks train. Whole idle time, the wait for rollouts included; beside
it the idle time of the steps, and the mean and 99th percentile of the delay in steps.

cost: seconds that `WindowLearner.planned` takes, over those of the plan it precedes, and the longest single call.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, alone, part, trace_folder

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.learn.auto_window import WindowLearner
from stream_balancer.planning import PlanKnobs, Waiting, plan_batch
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


# --- window="auto" on a drift ----------------------------------------------------------------------------------------


def drifting(count: int, seed: int) -> Ints:
    """Lengths whose median falls by a third while the spread of their logarithm grows from 0.6 to 1.3."""
    progress = np.arange(count) / count
    draw = np.random.default_rng(seed).normal(7.6 + math.log(2 / 3) * progress, 0.6 + 0.7 * progress)
    return np.clip(np.rint(np.exp(draw)), 32, 40_000).astype(np.int64)


def trace_of(lengths: Ints) -> sb.Trace:
    count = lengths.size
    return sb.Trace(
        prompt_tokens=np.zeros(count, dtype=np.int64),
        output_tokens=lengths,
        group_ids=np.arange(count),
        arrival_s=np.arange(count, dtype=np.float64),
    )


def auto(rows: Rows, seeds: int, steps: int) -> None:
    for batch, ranks, cost in (
        (32, 8, sb.cost.QuadraticCost()),
        (64, 8, sb.cost.QuadraticCost()),
        (64, 16, sb.cost.TokenCost()),
    ):
        name = f"{batch}/{ranks} {'tok' if isinstance(cost, sb.cost.TokenCost) else 'flops'}"
        rows.text(f"window='auto', {name}, {steps} steps of a drifting stream")
        gaps, ages, best_ages, idles, best_idles = [], [], [], [], []
        for seed in range(seeds):
            trace = trace_of(drifting(batch * steps, 100 + seed))
            config = sb.BalancerConfig(
                dp_size=ranks, batch_size=batch, cost=cost, window="auto", max_skips=12, capacity=6 * batch
            )
            fixed = [_figures(trace, config.replace(window=window)) for window in config.auto_windows]
            best_idle, best_age = min(fixed)
            idle, age = _figures(trace, config)
            gaps.append(idle - best_idle)
            idles.append(idle)
            best_idles.append(best_idle)
            ages.append(age)
            best_ages.append(best_age)
        rows.add(f"auto {name}: idle", float(np.mean(idles)), "%")
        rows.add(f"auto {name}: idle of the best fixed window", float(np.mean(best_idles)), "%")
        rows.add(f"auto {name}: gap", float(np.mean(gaps)), "points", 1.5)
        rows.add(f"auto {name}: worst gap of {seeds}", max(gaps), "points", 1.5)
        rows.add(f"auto {name}: mean age", float(np.mean(ages)), "disp.")
        rows.add(f"auto {name}: mean age of the best fixed window", float(np.mean(best_ages)), "disp.")
        rows.add(
            f"auto {name}: most age above it", max(a - b for a, b in zip(ages, best_ages, strict=True)), "disp.", 0.0
        )


def _figures(trace: sb.Trace, config: sb.BalancerConfig) -> tuple[float, float]:
    """Idle in percent and mean age, of the whole run."""
    report = sb.simulate(trace, config, tolerance=3e-3, warm_up=0)
    return 100 * report.idle_fraction, report.delay_steps.mean


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


# --- what it costs ---------------------------------------------------------------------------------------------------


SIZES = ((32, 8, True), (64, 8, True), (64, 32, False), (256, 32, True), (1024, 64, True), (4096, 128, True))


def cost(rows: Rows, steps: int) -> None:
    rows.text("window='auto': what it adds to a step (CPU time)")
    for batch, ranks, flops in SIZES:
        knobs = PlanKnobs(ranks, batch, 8)
        config = sb.BalancerConfig(dp_size=ranks, batch_size=batch, window="auto")
        chooser = WindowLearner(BalancerCore(config))
        lengths = drifting(batch * (steps + 4), 0).astype(np.float64)
        costs = lengths * (24576.0 + lengths) if flops else lengths
        planning, extra = _drive(costs, knobs, chooser, steps)
        name = f"{batch}/{ranks} {'flops' if flops else 'tok'}"
        rows.add(f"cost {name}: plan", 1e3 * float(np.mean(planning)), "ms")
        rows.add(f"cost {name}: added", 100 * float(extra.sum() / planning.sum()), "%", 10.0)
        rows.add(f"cost {name}: 99th percentile of what a step adds", 1e3 * float(np.quantile(extra, 0.99)), "ms", 3.0)


def _drive(costs: Floats, knobs: PlanKnobs, chooser: WindowLearner, steps: int) -> tuple[Floats, Floats]:
    """[steps] CPU seconds of plans, and of what comes before them; the window stays at two batches."""
    batch = knobs.batch_size
    held, skips, taken = np.empty(0), np.empty(0, dtype=np.int64), 0
    planning, extra = np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        more = 2 * batch - held.size
        held = np.concatenate((held, costs[taken : taken + more]))
        skips = np.concatenate((skips, np.zeros(more, dtype=np.int64)))
        taken += more
        waiting = replace(Waiting.of(held), skips=skips)
        start = time.process_time()
        plan = plan_batch(waiting, knobs, num_rollouts=batch, step=step)
        planned = time.process_time()
        chooser.planned(waiting, knobs, "window")
        planning[step], extra[step] = planned - start, time.process_time() - planned
        stays = np.ones(held.size, dtype=np.bool_)
        stays[np.concatenate([one for share in plan.ranks for one in share])] = False
        held, skips = held[stays], skips[stays] + 1
    return planning, extra


def main() -> None:
    options = arguments(__doc__, traces=None, only=None, processes=2, seeds=4, steps=400)
    rows = Rows(options.json, options.results)
    wanted = options.only
    if wanted in (None, "cost"):
        cost(rows, options.steps)
    if wanted in (None, "sweep"):
        sweep(rows, options.processes)
    if wanted in (None, "auto"):
        auto(rows, options.seeds, options.steps)
    folder = trace_folder(options.traces)
    if wanted in (None, "kept") and folder is not None:
        kept(rows, folder, options.seeds)
    if wanted in (None, "halves") and folder is not None:
        halves(rows, folder, options.processes)


if __name__ == "__main__":
    main()
