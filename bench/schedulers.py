"""Schedulers of trainers side by side: the same rollouts, in the order in which they finish, under the same token cap.

python bench/schedulers.py [--all] [--json] [--results FILE] [--page FILE.html] [--traces DIR] [--schedulers FILE.py]
                           [--only NAME] [--stream TEXT,TEXT] [--steps 48] [--seconds 15] [--seed 7000]

A row is a scheduler (bench/scheduler_list.py) on a stream and a size of step. Idle is the share of rank time that is
not work, where ranks meet once a step and where they meet at every micro-batch. Time is a step's over the least that
any layout of the oldest rollouts can take: only a choice among more of them gets below 1. Delay is in steps that
a rollout waits. Tokens: by how much those of a step vary (standard deviation / mean). Plan: milliseconds of one core
for all ranks together. Streams begin in mid-run, and nothing was tuned on their seeds.

A file of schedulers is Python that registers them as scheduler_list does: ``@scheduler("mine", "where it is from")`` on
a function that returns the planner. A page is one table of all figures, which a click on a heading sorts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _common import arguments
from micro_batches import LIKE, odc_seconds, trace_flops
from peers import Floats, Ints, trace_folder, traces
from scheduler_list import SCHEDULERS, Plan, Scheduler
from scheduler_runs import FIRST_SEED, Figures, Run, Stream, measure
from scoreboard import page

import stream_balancer as sb
from stream_balancer.tools.length_models import LengthModel

SIZES = [(32, 8), (128, 8), (256, 32), (512, 32), (1024, 64), (2048, 128)]
"""Rollouts of a step, ranks."""
QUICK_SIZES = [(32, 8), (256, 32)]
QUICK_TRACES = ("rg_qwen3b_rl_g3", "lrm_token_economy_g5")
TRL_RECIPE = LengthModel(mu=math.log(700), sigma_between=0.0, sigma_within=0.9, cap=4096, cap_share=0.1, siblings=8)
"""The lengths that TRL publishes for its recipe: lognormal, a tenth cut at the end, groups of eight."""

MOST_ROLLOUTS, LEAST_STEPS = 8_192, 12
"""Rollouts that are enough for the figures of a run, but so many steps at least."""
SLOW_MS = 1_000.0
"""A scheduler whose plan takes longer is not run at larger sizes; the table says so."""


def micro_seconds(lengths: Ints) -> Floats:
    return (1e6 * odc_seconds(lengths)).round()


def streams(folder: str | None, every: bool) -> Iterator[Stream]:
    for trace in traces(trace_folder(folder)):
        if every or trace.name in QUICK_TRACES:
            yield Stream(trace.name, trace, trace_flops)
    yield Stream("TRL's recipe", sb.generate_trace(8_000, TRL_RECIPE, seed=FIRST_SEED), trace_flops, whole_groups=True)
    for name, (median, sigma, longest) in LIKE.items():
        model = LengthModel(mu=math.log(median), sigma_between=0.0, sigma_within=sigma, cap=longest, floor=8_192)
        yield Stream(name, sb.generate_trace(8_000, model, seed=FIRST_SEED), micro_seconds)


def available(only: str) -> tuple[dict[Scheduler, Plan], dict[Scheduler, str]]:
    """Those whose code can be had here, and why the others' cannot."""
    found: dict[Scheduler, Plan] = {}
    missing: dict[Scheduler, str] = {}
    for one in SCHEDULERS:
        if only not in one.name:
            continue
        try:
            found[one] = one.load()
        except Exception as reason:  # noqa: BLE001 - another project's code may fail to import in any way
            missing[one] = f"{type(reason).__name__}: {str(reason)[:200]}"
    return found, missing


def ranked(rows: Sequence[Figures]) -> list[tuple[Figures, Figures]]:
    """A scheduler's figures where ranks meet once a step, and at every micro-batch; the least idle first."""
    return sorted(zip(rows[::2], rows[1::2], strict=True), key=lambda pair: pair[0].idle)


def table(rows: Sequence[Figures], left_out: Mapping[str, str]) -> str:
    """The figures of one run: a line a scheduler, those of the step first, the fastest on top; then why others have
    none."""
    lines = [f"{'':<40} {'meet once a step':>24} {'at micro-batches':>17} {'delay':>11} {'tokens':>7} {'plan':>9}"]
    names = f"{'idle':>8} {'proven':>7} {'time':>7} {'idle':>9} {'time':>7} {'mean  most':>11} {'vary':>7} {'ms':>9}"
    lines += [f"{'':<40} {names}"]
    steps = max((row.steps for row in rows), default=0)
    for once, often in ranked(rows):
        ms = "-" if once.plan_ms is None else f"{once.plan_ms:.1f}"
        proven = "-" if once.proven is None else f"{once.proven:.1f}"
        marks = f"  {once.over_cap} micro-batches over the cap" if once.over_cap else ""
        marks += f"  of {once.steps} steps" if once.steps < steps else ""
        lines.append(
            f"{once.scheduler:<40} {once.idle:>6.1f} % {proven:>7} {once.time:>7.3f} {often.idle:>7.1f} % "
            f"{often.time:>7.3f} {once.delay:>5.2f} {once.longest_delay:>5} {once.token_variation:>7.2f} {ms:>9}{marks}"
        )
    lines += [f"{name:<40} {why}" for name, why in left_out.items()]
    return "\n".join(lines)


def compare(
    run: Run, plans: dict[Scheduler, Plan], seconds: float, too_slow: dict[Scheduler, str]
) -> tuple[list[Figures], dict[str, str]]:
    """Every scheduler in one run; and why one has no figures: too slow in a smaller run, or it failed."""
    rows: list[Figures] = []
    left_out: dict[str, str] = {}
    for scheduler, plan in plans.items():
        if scheduler.groups and run.groups[0] < 0:
            continue
        if scheduler in too_slow:
            left_out[scheduler.name] = too_slow[scheduler]
            continue
        size = f"for {run.batch_size} rollouts on {run.ranks} ranks"
        try:
            found = list(measure(run, scheduler, plan, seconds))
        except TimeoutError as reason:
            left_out[scheduler.name] = too_slow[scheduler] = f"not run: {reason} {size}"
            continue
        except Exception as reason:  # noqa: BLE001 - another project's code may fail in any way, and the others go on
            left_out[scheduler.name] = f"failed: {type(reason).__name__}: {str(reason)[:200]}"
            continue
        rows += found
        if (ms := max(row.plan_ms or 0.0 for row in found)) > SLOW_MS:
            too_slow[scheduler] = f"not run: a plan took {ms / 1e3:.1f} s {size}"
    return rows, left_out


def origin(about: str) -> dict[str, Any]:
    """Where and when these figures were taken."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "about": f"bench/schedulers.py {about}",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, CPython {platform.python_version()}",
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    options = arguments(
        __doc__,
        all=False,
        traces=None,
        results=None,
        page=None,
        schedulers=None,
        only="",
        stream="",
        steps=48,
        seconds=15.0,
        seed=FIRST_SEED,
    )
    torch.set_num_threads(1)  # plans are timed on one core: waiting threads would count as work, or not at all
    if options.traces is not None and not Path(options.traces).is_dir():
        sys.exit(f"--traces {options.traces} is no folder")
    if options.schedulers is not None:
        runpy.run_path(options.schedulers)
    plans, missing = available(options.only)
    for one, why in missing.items():
        print(f"not available: {one.name}: {why}", file=sys.stderr)
    lines: list[str] = []
    with Path(options.results or os.devnull).open("w", encoding="utf-8") as results:

        def write(row: dict[str, Any]) -> None:
            line = json.dumps(row)
            lines.append(line)
            print(line, file=results, flush=True)
            if options.json:
                print(line, flush=True)

        write(origin(f"--steps {options.steps} --seconds {options.seconds:g} --seed {options.seed}"))
        for one in SCHEDULERS:
            write({"scheduler": one.name, "where": one.where, "missing": missing.get(one)})
        for stream in streams(options.traces, every=options.all or options.traces is not None):
            too_slow: dict[Scheduler, str] = {}
            for batch_size, ranks in SIZES if options.all else QUICK_SIZES:
                if not any(one in f"{stream.name} {batch_size}/{ranks}" for one in options.stream.split(",")):
                    continue
                steps = min(options.steps, max(LEAST_STEPS, MOST_ROLLOUTS // batch_size))
                run = Run.of(stream, batch_size, ranks, steps, options.seed)
                found, left_out = compare(run, plans, options.seconds, too_slow)
                for figures in found:
                    write(asdict(figures))
                for name, why in left_out.items():
                    size = {"stream": stream.name, "batch_size": batch_size, "ranks": ranks}
                    write({"scheduler": name, **size, "left_out": why})
                if not options.json:
                    print(f"\n{stream.name}, {batch_size} rollouts on {ranks} ranks, cap {run.max_tokens:,} tokens")
                    print(table(found, left_out), flush=True)
    if options.page is not None:
        Path(options.page).write_text(page(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
