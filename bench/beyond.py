"""Beyond the window: what no choice of whole rollouts reaches, and what each further means gives, alone and with it.

python bench/beyond.py [--json] [--seeds 6] [--steps 200] [--traces DIR] [--only TEXT] [--only-mode TEXT]

Recorded lengths in mid-run, drawn with seeds that nothing was tuned on; quadratic cost; 32 rollouts on 8 ranks unless
said. Idle is what is not the plain work of the rollouts: waiting for the slowest rank, and any overhead. The bound is
the idle below which no plan of the same batches gets under the same rules. Time is that of a step, for the same work,
over that of the first row. Whole is the ranks' idle by the clock, waiting for rollouts included, where balanced ranks
would train just as fast as rollouts are generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _common import Rows, arguments
from peers import trace_folder, traces
from window import Mode, drawn

import stream_balancer as sb

COST = sb.QuadraticCost()
FIRST_SEED = 17_000
"""Nothing was tuned on it."""


@dataclass(frozen=True)
class Means:
    """What is done about idle ranks."""

    mode: Mode
    bars: Mapping[str, float]
    """The most that it may idle, in percent, by how the name of a trace begins."""
    whole: Mapping[str, float]
    """The same by the clock, as a multiple of what the window idles."""


def means(name: str, width: float = 1.0, knobs: Mapping[str, Any] | None = None, **more: Any) -> Means:
    """First in, first out with a `width` of one batch; else the window, which leaves nobody behind more than 8
    times."""
    bars, whole = more.pop("bars", {}), more.pop("whole", {})
    if width == 1.0:
        return Means(Mode(name, 1.0, knobs or {}, policy="fifo", **more), bars, whole)
    return Means(Mode(name, width, {"max_skips": 8} | dict(knobs or {}), **more), bars, whole)


FIRST, WINDOW = "first in, first out", "the window"
MEANS = (
    means(FIRST),
    means(WINDOW, 2.0),
    means("a batch leaves at 1.5, up to 3 are kept", 1.5, {"capacity": 96}),
)


@dataclass(frozen=True)
class Outcome:
    """Of one run, in the cost model's unit."""

    work: float
    """Of a rank, were all alike."""
    time: float
    """Of the steps."""
    bound: float
    """No plan of the same batches takes less."""
    delay: float
    """Mean, dispatches."""

    @property
    def idle(self) -> float:
        return 100.0 * (1.0 - self.work / self.time)


def outcome(stream: sb.Trace, mode: Mode, seed: int) -> Outcome:
    report = sb.simulate(stream, mode.config(stream, COST), slots=mode.slots, seed=seed)
    shown = report.shown_steps
    return Outcome(
        work=plain_work(stream, report),
        time=float(report.steps.step_work[shown].sum()),
        bound=float(report.steps.lower_bound[shown].sum()),
        delay=report.delay_dispatches.mean,
    )


def plain_work(stream: sb.Trace, report: sb.SimulationReport) -> float:
    """Work of a rank in the steps that are shown, were all alike, without the overhead of sharing a rollout."""
    shown = report.shown_steps
    went = (report.step_of >= shown.start) & (report.step_of < shown.stop)
    return float(COST(stream.lengths[went]).sum()) / report.config.dp_size


def whole_idle(stream: sb.Trace, mode: Mode, seed: int) -> float:
    """Percent by the clock."""
    report = sb.simulate(stream, mode.config(stream, COST), slots=mode.slots, seed=seed, trainer="matched")
    worked = 1.0 - report.whole_idle_fraction  # any overhead counts as work there
    return 100.0 * (1.0 - worked * plain_work(stream, report) / float(report.steps.mean_load[report.shown_steps].sum()))


def measure(rows: Rows, trace: sb.Trace, chosen: Sequence[Means], seeds: range, steps: int, only_mode: str) -> None:
    """A row each; the first one's step is what the others' are compared with."""
    first_time = window_whole = 0.0
    for one in chosen:
        mode = one.mode
        if mode is not chosen[0].mode and only_mode not in mode.name and mode.name != WINDOW:
            continue
        make = drawn(trace, mode, steps)
        runs = [outcome(make(seed), mode, seed) for seed in seeds]
        work, time = sum(run.work for run in runs), sum(run.time for run in runs)
        first_time = first_time or time / work
        whole = float(np.mean([whole_idle(make(seed), mode, seed) for seed in seeds]))
        window_whole = whole if mode.name == WINDOW else window_whole
        rows.add(
            f"{trace.name} {mode.name}: idle",
            100.0 * (1.0 - work / time),
            "%",
            _of(one.bars, trace),
            sd=round(float(np.std([run.idle for run in runs], ddof=min(1, len(runs) - 1))), 2),
            bound=round(100.0 * (1.0 - work / sum(run.bound for run in runs)), 2),
            delay=round(float(np.mean([run.delay for run in runs])), 2),
            time=round(time / work / first_time, 4),
        )
        most = _of(one.whole, trace)
        rows.add(f"{trace.name} {mode.name}: whole", whole, "%", most and most * window_whole)


def _of(bars: Mapping[str, float], trace: sb.Trace) -> float | None:
    return next((most for name, most in bars.items() if trace.name.startswith(name)), None)


def main() -> None:
    options = arguments(__doc__, seeds=6, steps=200, traces=None, only="", only_mode="")
    rows = Rows(options.json)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    for trace in traces(trace_folder(options.traces)):
        if options.only in trace.name:
            rows.text(f"trace {trace.name}")
            measure(rows, trace, MEANS, seeds, options.steps, options.only_mode)


if __name__ == "__main__":
    main()
