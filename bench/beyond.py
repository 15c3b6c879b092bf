"""Beyond the window: what no choice of whole rollouts reaches, and what each further means gives, alone and with it.

python bench/beyond.py [--json] [--seeds 6] [--steps 200] [--traces DIR] [--only TEXT] [--only-mode TEXT]

Recorded lengths in mid-run, drawn with seeds that nothing was tuned on; quadratic cost. A row is of all seeds together:

    idle    percent of rank time that is not the plain work of the rollouts: waiting for the slowest rank, any overhead
    bound   the idle that no plan of the same batches gets below under the same rules
    time    of a step, for the same work, over that of the first row
    step    its time over that of ranks that are all alike, and share no prompt
    whole   percent of rank time without plain work by the clock, waiting for rollouts included, where such ranks would
            train just as fast as rollouts are generated

First in, first out, and the window (two batches, nobody left behind more than 8 times), each by itself and with another
means. "Any choice" is what no choice of whole rollouts from that window gets below in those steps (any_choice.py).
Rollouts one by one are 32 on 8 ranks; where siblings share their prompt they leave in whole groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from _common import Rows, arguments
from any_choice import least_waste
from peers import finish_times, trace_folder, traces
from window import Mode, drawn, of_usual_size

import stream_balancer as sb

COST = sb.cost.QuadraticCost()
FIRST_SEED = 17_000
"""Nothing was tuned on it."""

Bars = Mapping[str, float]
"""The most that is allowed, by how the name of a trace begins."""


@dataclass(frozen=True)
class Means:
    """What is done about idle ranks, and what was promised of it."""

    mode: Mode
    idle: Bars = field(default_factory=dict)
    step: Bars = field(default_factory=dict)
    whole: Bars = field(default_factory=dict)
    """As a multiple of what the row `against` idles by the clock."""
    clock: Literal["no", "too", "only"] = "no"
    """Whether it is run by the clock; "only" where its steps are those of a row above."""
    against: str = ""
    """A row above; one that shares prompts has a step at most 0.002 longer than that."""


# --- rollouts one by one ---------------------------------------------------------------------------------------------

FIRST, WINDOW, KEEPS_TWO = "first in, first out", "window", "window, keep up to 2 batches"
"""The window leaves at 2 batches, and keeps up to 4."""
BATCH_SIZE = 32


def fifo(name: str, **knobs: Any) -> Mode:
    return Mode(name, 1.0, knobs, policy="fifo")


def window(name: str, width: float = 2.0, **knobs: Any) -> Mode:
    return Mode(name, width, {"max_skips": 8} | knobs)


FIVE: dict[str, Any] = {"context_parallel": {"sizes": (1, 2, 4, 8), "overhead": 0.05}}
FIFTEEN: dict[str, Any] = {"context_parallel": {"sizes": (1, 2, 4, 8), "overhead": 0.15}}
ONE_BY_ONE = (
    Means(fifo(FIRST), clock="too"),
    Means(window(WINDOW), clock="too"),
    Means(fifo("shared at 5 %", **FIVE)),
    Means(fifo("shared at 15 %", **FIFTEEN), clock="too"),
    Means(
        fifo("shared at 15 %, parts of any length", context_parallel={**FIFTEEN["context_parallel"], "min_tokens": 1})
    ),
    Means(window("window, shared at 5 %", **FIVE), idle={"rg": 0.8, "mooncake": 1.1, "nemo": 3.0}),
    Means(
        window("window, shared at 15 %", **FIFTEEN),
        clock="too",
        idle={"rg": 1.5, "mooncake": 2.0, "nemo": 7.0, "misguided": 0.7, "lrm": 0.4},
    ),
    Means(
        window("window of 1.5 batches, max_skips=16, shared at 15 %", 1.5, **FIFTEEN | {"max_skips": 16}),
        idle={"rg": 1.0, "mooncake": 1.5},
    ),
    Means(window(KEEPS_TWO, capacity=2 * BATCH_SIZE), clock="only"),
    Means(
        window("leave at 1.5 batches, keep up to 3", 1.5, capacity=3 * BATCH_SIZE),
        clock="too",
        whole={"rg": 0.9, "mooncake": 0.9, "misguided": 0.9},
        against=KEEPS_TWO,
    ),
    Means(window("leave at 1.5 batches, keep up to 4", 1.5, capacity=4 * BATCH_SIZE), clock="only"),
)


# --- siblings that share their prompt --------------------------------------------------------------------------------

GROUPS = {"rg": ((48, 8), (192, 8)), "tau": ((32, 4),), "lrm": ((40, 8),), "misguided": ((48, 8),), "nemo": ((40, 4),)}
"""Rollouts of a step and ranks, of the traces that have siblings."""
FIRST_STEP = {"rg 48/8": 1.0, "rg 192/8": 0.74, "tau 32/4": 0.83}
WINDOW_STEP = {"rg 48/8": 0.76, "rg 192/8": 0.7, "tau 32/4": 0.83}


def of_groups(batch: int, ranks: int) -> Iterator[Means]:
    size: dict[str, Any] = {"batch": batch, "ranks": ranks, "slots": 4 * batch, "whole_groups": True}
    shared: dict[str, Any] = {"groups": {"share_prefixes": True}}
    yield Means(Mode(FIRST, 1.0, {}, policy="fifo", **size))
    yield Means(Mode(WINDOW, 2.0, {"max_skips": 16}, **size))
    yield Means(Mode("prompts once", 1.0, shared, policy="fifo", **size), step=FIRST_STEP, against=FIRST)
    once = Mode("window, prompts once", 2.0, shared | {"max_skips": 16}, **size)
    yield Means(once, step=WINDOW_STEP, against=WINDOW)


def prompts_alike(trace: sb.Trace) -> sb.Trace:
    """tau's counts are approximate, and differ by a few tokens between siblings: the least counts as their prompt."""
    least = np.full(trace.num_groups, np.iinfo(np.int64).max)
    np.minimum.at(least, trace.group_ids, trace.prompt_tokens)
    prompt = least[trace.group_ids]
    return replace(trace, prompt_tokens=prompt, output_tokens=trace.lengths - prompt)


# --- what a run comes to ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of runs, in the cost model's unit."""

    work: float
    """Plain work of a rank, were all alike."""
    time: float
    """Of the steps."""
    bound: float
    """No plan of the same batches takes less."""

    @classmethod
    def of(cls, stream: sb.Trace, report: sb.SimulationReport) -> Outcome:
        shown = report.shown_steps
        return cls(
            plain_work(stream, report),
            float(report.steps.step_work[shown].sum()),
            float(report.steps.lower_bound[shown].sum()),
        )

    @property
    def idle(self) -> float:
        return 100.0 * (1.0 - self.work / self.time)


def plain_work(stream: sb.Trace, report: sb.SimulationReport) -> float:
    shown = report.shown_steps
    went = (report.step_of >= shown.start) & (report.step_of < shown.stop)
    return float(COST(stream.lengths[went]).sum()) / report.config.dp_size


def least_of_any_choice(stream: sb.Trace, report: sb.SimulationReport, slots: int, seed: int) -> float:
    """Time that a rank loses in the steps that are shown, whatever whole rollouts are taken from the window."""
    config, shown = report.config, report.shown_steps
    order = np.argsort(finish_times(stream, slots, seed=seed), kind="stable")
    assert config.max_skips is not None
    return least_waste(
        np.asarray(COST(stream.lengths[order]), dtype=np.float64),
        config.batch_size,
        config.window,
        config.max_skips,
        config.dp_size,
        range(shown.start, shown.stop),
    )


class Table:
    """The rows of a trace."""

    def __init__(self, rows: Rows, name: str, seeds: range) -> None:
        self._rows, self._name, self._seeds = rows, name, seeds
        self._steps: dict[str, float] = {}
        self._whole: dict[str, float] = {}

    def add(self, means: Means, streams: list[sb.Trace]) -> None:
        if means.clock != "only":
            self._steps_of(means, streams)
        if means.clock != "no":
            self._whole_of(means, streams)

    def _steps_of(self, means: Means, streams: list[sb.Trace]) -> None:
        mode = means.mode
        reports = [
            sb.simulate(stream, mode.config(stream, COST), slots=mode.slots, seed=seed)
            for seed, stream in zip(self._seeds, streams, strict=True)
        ]
        runs = [Outcome.of(stream, report) for stream, report in zip(streams, reports, strict=True)]
        each = [run.idle for run in runs]
        whole = Outcome(*(sum(getattr(run, name) for run in runs) for name in ("work", "time", "bound")))
        step = self._steps[mode.name] = whole.time / whole.work
        self._rows.add(
            f"{self._name}: {mode.name}: idle",
            whole.idle,
            "%",
            self._bar(means.idle),
            sd=round(float(np.std(each, ddof=min(1, len(each) - 1))), 2),
            bound=round(100.0 * (1.0 - whole.work / whole.bound), 2),
            delay=round(float(np.mean([report.delay_steps.mean for report in reports])), 2),
            time=round(step / next(iter(self._steps.values())), 4),
        )
        if mode.whole_groups:
            bar = self._bar(means.step)
            if bar is None and means.against:
                bar = self._steps[means.against] + 0.002
            self._rows.add(f"{self._name}: {mode.name}: step", step, "x", bar)
        elif mode.name == WINDOW:
            lost = sum(
                least_of_any_choice(stream, report, mode.slots, seed)
                for seed, stream, report in zip(self._seeds, streams, reports, strict=True)
            )
            self._rows.add(f"{self._name}: any choice: idle", 100.0 * lost / (lost + whole.work), "%")

    def _whole_of(self, means: Means, streams: list[sb.Trace]) -> None:
        mode, idle, delay = means.mode, [], []
        for seed, stream in zip(self._seeds, streams, strict=True):
            report = sb.simulate(stream, mode.config(stream, COST), slots=mode.slots, seed=seed, trainer="matched")
            idle.append(100.0 * report.whole_idle_fraction)
            delay.append(report.delay_steps.mean)
        self._whole[mode.name] = float(np.mean(idle))
        most = self._bar(means.whole)
        bar = None if most is None else most * self._whole[means.against]
        sd = round(float(np.std(idle, ddof=min(1, len(idle) - 1))), 2)
        waited = round(float(np.mean(delay)), 2)
        self._rows.add(f"{self._name}: {mode.name}: whole", self._whole[mode.name], "%", bar, sd=sd, delay=waited)

    def _bar(self, bars: Bars) -> float | None:
        return next((most for name, most in bars.items() if self._name.startswith(name)), None)


def main() -> None:
    options = arguments(__doc__, seeds=6, steps=200, traces=None, only="", only_mode="")
    rows = Rows(options.json, options.results)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)

    def show(trace: sb.Trace, name: str, all_means: list[Means]) -> None:
        table = Table(rows, name, seeds)
        rows.text(name)
        for means in all_means:
            if options.only_mode in means.mode.name or means.mode.name in (FIRST, WINDOW, KEEPS_TWO):
                make = drawn(trace, means.mode, options.steps)
                table.add(means, [make(seed) for seed in seeds])

    for trace in traces(trace_folder(options.traces)):
        short = trace.name.split("_")[0]
        if options.only in (name := f"{short} one by one"):
            show(trace, name, list(ONE_BY_ONE))
        for batch, ranks in GROUPS.get(short, ()):
            grouped = of_usual_size(prompts_alike(trace) if short == "tau" else trace)
            if options.only in (name := f"{short} {batch}/{ranks}") and grouped is not None:
                show(grouped, name, list(of_groups(batch, ranks)))


if __name__ == "__main__":
    main()
