"""Display of the demo: a live progress display while it runs, two tables at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stream_balancer.demo.messages import Dispatched, Message, Put, StepDone
from stream_balancer.demo.report import RunReport

__all__ = ["NAMES", "RunProgress", "comparison"]

NAMES = {"round_robin": "round-robin", "window": "balanced"}
"""What the two policies are called on the screen."""


class RunProgress:
    """Two bars per run, on the given console: rollouts put, and rollouts trained on."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._put = self._trained = TaskID(-1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, policy: str, num_rollouts: int) -> None:
        """Show the bars of the next run."""
        name = f"{NAMES[policy]:>12}"
        self._put = self._progress.add_task(f"{name}  generated", total=num_rollouts, note="")
        self._trained = self._progress.add_task(f"{'':>12}  trained  ", total=num_rollouts, note="starting processes")

    def show(self, message: Message) -> None:
        """Move the bars."""
        match message:
            case Put():
                self._progress.advance(self._put)
            case Dispatched():
                self._progress.update(self._trained, note=f"step {message.step} ({message.reason})")
            case StepDone():
                self._progress.advance(self._trained, len(message.trained))
            case _:
                pass


def comparison(usual: RunReport, balanced: RunReport) -> RenderableType:
    """The side-by-side tables."""
    return Group(_figures(usual, balanced), _per_rank(usual, balanced), _exactly_once(usual, balanced))


_ROWS: tuple[tuple[str, Callable[[RunReport], Any], str, bool], ...] = (
    ("idle fraction, measured", lambda r: r.idle_fraction * 100, "{:.1f} %", True),
    ("idle fraction, predicted by the cost model", lambda r: r.predicted_idle_fraction * 100, "{:.1f} %", True),
    ("sum over steps of the slowest rank, CPU s", lambda r: r.slowest_s, "{:.2f}", True),
    ("tokens/s, each rank on a device of its own", lambda r: r.tokens_per_second, "{:,.0f}", True),
    ("variance of rank time within a step, s²", lambda r: r.step_variance_s2, "{:.2g}", True),
    ("delay from put to dispatch, p50, s", lambda r: r.delay_p50_s, "{:.2f}", True),
    ("delay from put to dispatch, p99, s", lambda r: r.delay_p99_s, "{:.2f}", True),
    ("optimizer steps", lambda r: r.num_steps, "{}", False),
    ("batches left because of", lambda r: ", ".join(f"{k} {n}" for k, n in r.reasons.items()), "{}", False),
    ("wall time, all ranks sharing these cores, s", lambda r: r.wall_s, "{:.1f}", True),
    ("loss per trained token, last step", lambda r: r.final_loss, "{:.2f}", False),
)


def _figures(usual: RunReport, balanced: RunReport) -> Table:
    table = Table(title="The same rollouts, twice", title_justify="left")
    table.add_column("")
    table.add_column(NAMES[usual.policy], justify="right")
    table.add_column(NAMES[balanced.policy], justify="right", style="bold")
    table.add_column("ratio", justify="right")
    for name, value, form, compare in _ROWS:
        a, b = value(usual), value(balanced)
        table.add_row(name, form.format(a), form.format(b), _ratio(a, b) if compare else "")
    return table


def _per_rank(usual: RunReport, balanced: RunReport) -> Table:
    table = Table(title="Compute per rank, CPU s, all steps", title_justify="left")
    table.add_column("")
    for rank in range(len(usual.compute_s)):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("all", justify="right")
    for run in (usual, balanced):
        table.add_row(NAMES[run.policy], *(f"{s:.2f}" for s in run.compute_s), f"{sum(run.compute_s):.2f}")
    return table


def _exactly_once(usual: RunReport, balanced: RunReport) -> Text:
    if usual.exactly_once and balanced.exactly_once:
        return Text(
            f"Exactly once: in both runs all {usual.num_rollouts} rollouts put were trained on, once each; ids and "
            "token checksums are equal on both sides, and the ranks ended with the same parameters.",
            style="green",
        )
    lines = [f"{NAMES[run.policy]}: {problem}" for run in (usual, balanced) for problem in run.problems]
    return Text("\n".join(["EXACTLY ONCE FAILED", *lines]), style="bold red")


def _ratio(a: float, b: float) -> str:
    return f"× {b / a:.2f}" if a and math.isfinite(a) and math.isfinite(b) else ""
