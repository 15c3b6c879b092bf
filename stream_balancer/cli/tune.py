"""``stream-balancer tune``: which window, ``max_skips`` and deadline for these lengths."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from stream_balancer.cli._options import (
    Simulated,
    batch_text,
    deadline_text,
    fail,
    listed,
    or_none,
    progress,
    stdout,
)

if TYPE_CHECKING:
    from rich.table import Table

    from stream_balancer.config import BalancerConfig
    from stream_balancer.tools.trace import Trace
    from stream_balancer.tools.tune_report import Outcome, TuneReport

__all__ = ["Tune"]

T = TypeVar("T")

WORTH_PROCESSES = 2_000  # rollouts a run from which on a child's start-up is soon made up for


@dataclass(frozen=True, kw_only=True)
class Tune(Simulated):
    """Which knobs for your lengths: the front of idle time against queueing delay, and a recommendation.

    Sweeps window x max_skips x deadline, each a run of the balancer's own core under a simulated clock. Record a trace
    of your own with balancer.record("lengths.csv").
    """

    max_age: float = 2.0
    """Most added mean delay to recommend, in dispatches: an extra batch of window is one."""
    tolerance: float = 0.0025
    """Idle fraction that is not worth a larger window."""
    windows: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Windows to try; in tokens with --batch-tokens. (default: 1 to 3 batches)"
        ),
    ] = None
    capacities: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Capacities to try, with --trainer other than instant. (default: 2 to 6 batches)"
        ),
    ] = None
    skips: Annotated[
        str | None,
        typer.Option("--max-skips", metavar="N,N,...", help="max_skips to try; 'none' too. (default: 8, 16 and 32)"),
    ] = None
    deadlines: Annotated[
        str | None,
        typer.Option(metavar="S,S,...", help="deadline_s to try; 'none' too. (default: none, and two for each window)"),
    ] = None
    processes: int | None = None
    """Simulate in so many processes. (default: all cores, where it pays)"""
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with pictures.")] = None

    def run(self) -> None:
        from stream_balancer.tools.plot import check_plot

        if self.plot is not None:
            check_plot(self.plot)
        report = _tune(
            self.lengths(),
            self.config(),
            self.processes,
            max_added_age=self.max_age,
            tolerance=self.tolerance,
            windows=_tried("--windows", self.windows, int),
            capacities=_tried("--capacities", self.capacities, int),
            max_skips=_tried("--max-skips", self.skips, or_none(int)),
            deadlines_s=_tried("--deadlines", self.deadlines, or_none(float), "seconds", "none,30"),
            **self.simulation(),
        )
        if self.plot is not None:
            _write(report, self.plot)
        if self.json:
            typer.echo(json.dumps(report.to_dict()))
        else:
            _print(report, self.cost, self.plot)


def _tried(
    option: str, text: str | None, of: Callable[[str], T], what: str = "whole numbers", example: str = "32,64"
) -> tuple[T, ...] | None:
    if text is None:
        return None
    none = ", and none for no deadline" if what == "seconds" else ""
    return listed(option, text, of, f"{what} with commas between{none}, as in {option} {example}")


def _tune(lengths: Trace, config: BalancerConfig, processes: int | None, **how: Any) -> TuneReport:
    """With a progress bar on a terminal."""
    from stream_balancer.tools.tune import tune

    if processes is None:
        processes = (os.cpu_count() or 1) if len(lengths) >= WORTH_PROCESSES else 1
    with progress() as shown:
        bar = shown.add_task("settings", total=None)

        def show(done: int, total: int) -> None:
            shown.update(bar, completed=done, total=total)

        return tune(lengths, config, processes=processes, progress=show, **how)


def _write(report: TuneReport, path: Path) -> None:
    from stream_balancer.tools.plot import write_plot

    try:
        write_plot(report, path)
    except OSError as error:
        fail(f"the plot {path} cannot be written: {error.strerror or error}")


def _print(report: TuneReport, cost: str, plot: Path | None) -> None:
    console = stdout()
    config, chosen = report.config, report.recommended
    again = f", the trace {report.times} times over" if report.times > 1 else ""
    console.print(
        f"[bold]{report.trace_name}[/bold]: {report.num_rollouts:,} rollouts a run{again}; {config.dp_size} ranks, "
        f"{batch_text(config)} a dispatch, cost {cost}; {len(report.outcomes)} settings, those on the front:"
    )
    console.print(_table(report))
    console.print(f"[bold]{report.reason}[/bold]")
    deadline = deadline_text(chosen.deadline_s)
    console.print(f"Recommended: {chosen.knobs_of_size}, max_skips={chosen.max_skips}, deadline {deadline}")
    if plot is not None:
        console.print(f"Picture: {plot}")


def _table(report: TuneReport) -> Table:
    from rich.table import Table

    table, in_time = Table(), report.fifo.in_time
    table.add_column("")
    for name in (
        "window / capacity" if in_time else "window",
        "max_skips",
        "deadline",
        "whole idle" if in_time else "idle",
        "+-",
        "added age",
        "p99/max",
        "tokens +-",
        "wait p99, s",
        "short",
    ):
        table.add_column(name, justify="right")
    table.add_row("round-robin", "-", "-", "-", *_figures(report.round_robin))
    table.add_row("arrival order", "-", "-", "-", *_figures(report.fifo))
    rows = list(report.front)
    if report.recommended not in rows:
        rows.append(report.recommended)
        rows.sort(key=lambda o: o.age)
    for o in rows:
        chosen = o is report.recommended
        table.add_row(
            "recommended" if chosen else "",
            f"{o.window} / {o.capacity}" if in_time else str(o.window),
            *(str(o.max_skips), deadline_text(o.deadline_s), *_figures(o)),
            style="bold" if chosen else None,
        )
    return table


def _figures(o: Outcome) -> list[str]:
    return [
        f"{o.compared_idle:.2%}",
        f"{o.idle_error:.2%}",
        f"{o.added_age:.2f}",
        f"{o.age_p99:.0f}/{o.age_max:.0f}",
        f"{o.token_variation:.0%}",
        f"{o.wait_p99_s:,.0f}",
        f"{o.short_batches:.0%}" if o.short_batches else "",
    ]
