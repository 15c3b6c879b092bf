"""``stream-balancer tune``: which window, ``max_skips`` and deadline for these lengths."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stream_balancer.cli._options import Simulated, deadline_text, fail, put_waited, value_of

if TYPE_CHECKING:
    from rich.table import Table

    from stream_balancer.tools.tune_report import Outcome, TuneReport

WORTH_PROCESSES = 2_000  # rollouts a run from which on a child's start-up is soon made up for


@dataclass(frozen=True, kw_only=True)
class Tune(Simulated):
    """Which knobs for your lengths: the front of idle time against queueing delay, and a recommendation.

    Sweeps window x max_skips x deadline, each a run of the balancer's own core under a simulated clock. Record a trace
    of your own with balancer.record("lengths.csv").
    """

    max_age: float = 2.0
    """Most added mean delay to recommend, in steps: an extra batch of window is one."""
    tolerance: float = 0.0025
    """Idle fraction that is not worth a larger window."""
    windows: str | None = None
    """Windows to try, N,N,... (default: 1 to 3 batches)"""
    capacities: str | None = None
    """Capacities to try, N,N,..., with --trainer other than instant. (default: 2 to 6 batches)"""
    skips: Annotated[
        str | None, typer.Option("--max-skips", help="max_skips to try, N,N,...; 'none' too. (default: 8, 16 and 32)")
    ] = None
    deadlines: str | None = None
    """deadline_s to try, S,S,...; 'none' too. (default: none, and two for each window)"""
    processes: int | None = None
    """Simulate in so many processes. (default: all cores, where it pays)"""
    plot: Path | None = None
    """Write a page with pictures, called something.html."""

    def run(self) -> None:
        from stream_balancer.tools.plot import check_plot, write_plot
        from stream_balancer.tools.shown import Bars
        from stream_balancer.tools.tune import tune

        # before the sweep: a minute later would be too late to hear of it
        if self.plot is not None:
            check_plot(self.plot)
        lengths, config = self.lengths(), self.balancer()
        with Bars() as bars:
            report = tune(
                lengths,
                config,
                max_added_age=self.max_age,
                tolerance=self.tolerance,
                windows=_tried("--windows", self.windows, int),
                capacities=_tried("--capacities", self.capacities, int),
                max_skips=_tried("--max-skips", self.skips, int | None),
                deadlines_s=_tried("--deadlines", self.deadlines, float | None),
                processes=self.processes or (os.cpu_count() or 1 if len(lengths) >= WORTH_PROCESSES else 1),
                progress=partial(bars.show, bars.add_task("settings", total=None)),
                **self.simulation(),
            )
        if self.plot is not None:
            try:
                write_plot(report, self.plot)
            except OSError as error:
                fail(f"the plot {self.plot} cannot be written: {error.strerror or error}")
        if self.json:
            typer.echo(json.dumps(report.to_dict()))
        else:
            _print(report, self.cost, self.plot)


def _tried(option: str, text: str | None, kind: Any) -> tuple[Any, ...] | None:
    words = "numbers with commas between" + (", or none among them" if kind is not int else "") + ", as in 32,64"
    return None if text is None else value_of(option, text, tuple[kind, ...], words)


def _print(report: TuneReport, cost: str, plot: Path | None) -> None:
    from stream_balancer.tools.shown import stdout

    config, chosen = report.config, report.recommended
    again = f", the trace {report.times} times over" if report.times > 1 else ""
    stdout().print(
        f"[bold]{report.trace_name}[/bold]: {report.num_rollouts:,} rollouts a run{again}; {config.dp_size} ranks, "
        f"{config.batch_size} rollouts a step, cost {cost}; {len(report.outcomes)} settings, those on the front:",
        _table(report),
        f"[bold]{report.reason}[/bold]",
        f"Recommended: {chosen.knobs_of_size}, max_skips={chosen.report.config.max_skips}, deadline "
        f"{deadline_text(chosen.report.config.deadline_s)}",
        *([] if plot is None else [f"Picture: {plot}"]),
        sep="\n",
    )


def _table(report: TuneReport) -> Table:
    from stream_balancer.tools.shown import table

    in_time = report.fifo.in_time
    window, idle = ("window / capacity", "whole idle") if in_time else ("window", "idle")
    # beside the ranks' idle time that of generation: both say on which side machines are missing
    beside = "put waited" if in_time else "tokens +-"
    headings = ["", window, "max_skips", "deadline", idle, "+-", "added age", "p99/max", beside, "wait p99, s"]
    usual = {"round-robin": report.round_robin, "arrival order": report.fifo}
    rows = [[name, "-", "-", "-", *_figures(o)] for name, o in usual.items()]
    # the recommended one may lie behind the front: it is smaller, and idles hardly more
    for o in sorted({*report.front, report.recommended}, key=lambda o: o.added_age):
        config = o.report.config
        name = "recommended" if o is report.recommended else ""
        sizes = f"{o.window} / {o.capacity}" if in_time else str(o.window)
        rows.append([name, sizes, str(config.max_skips), deadline_text(config.deadline_s), *_figures(o)])
    return table([*headings, "short"], rows, bold=["recommended"])


def _figures(o: Outcome) -> list[str]:
    run = o.report
    return [
        f"{o.compared_idle:.2%}",
        f"{o.idle_error:.2%}",
        f"{o.added_age:.2f}",
        f"{run.delay_steps.p99:.0f}/{run.delay_steps.max:.0f}",
        put_waited(run) if o.in_time else f"{run.figures.token_variation:.0%}",
        f"{run.delay_s.p99:,.0f}",
        f"{o.short_batches:.0%}" if o.short_batches else "",
    ]
