"""Display of the demo: a live progress display while it runs, two tables at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stream_balancer.config import Policy
from stream_balancer.core.observer import Observer
from stream_balancer.demo.report import Figures
from stream_balancer.types import Batch, Rollout

__all__ = ["NAMES", "RunProgress", "comparison"]

NAMES: dict[Policy, str] = {"round_robin": "round-robin", "window": "balanced"}
"""What the two policies are called on the screen, in the order of their runs."""


class RunProgress(Observer):
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

    def begin(self, policy: Policy, num_rollouts: int) -> None:
        """Show the bars of the next run."""
        name = f"{NAMES[policy]:>12}"
        self._put = self._progress.add_task(f"{name}  generated", total=num_rollouts, note="")
        self._trained = self._progress.add_task(f"{'':>12}  trained  ", total=num_rollouts, note="starting processes")

    def accepted(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Move the first bar."""
        self._progress.advance(self._put, len(rollouts))

    def dispatched(self, batch: Batch) -> None:
        """Say what left, and why."""
        self._progress.update(self._trained, note=f"step {batch.step} ({batch.reason})")

    def acknowledged(self, batch: Batch) -> None:
        """Move the second bar."""
        self._progress.advance(self._trained, sum(not r.is_padding for r in batch.rollouts))


def comparison(usual: Figures, balanced: Figures) -> RenderableType:
    """The side-by-side tables."""
    return Group(_figures(usual, balanced), _per_rank(usual, balanced), _exactly_once(usual, balanced))


_ROWS = (  # what, its name in the figures, its format, whether a ratio says something
    ("idle fraction, measured", "idle_fraction", "{:.1%}", True),
    ("idle fraction, predicted by the cost model", "predicted_idle_fraction", "{:.1%}", True),
    ("sum over steps of the slowest rank, CPU s", "slowest_s", "{:.2f}", True),
    ("tokens/s, each rank on a device of its own", "tokens_per_second", "{:,.0f}", True),
    ("variance of rank time within a step, s²", "step_variance_s2", "{:.2g}", True),
    ("delay from put to dispatch, p50, s", "delay_p50_s", "{:.2f}", True),
    ("delay from put to dispatch, p99, s", "delay_p99_s", "{:.2f}", True),
    ("optimizer steps", "num_steps", "{}", False),
    ("batches left because of", "reasons", "{}", False),
    ("wall time, all ranks sharing these cores, s", "wall_s", "{:.1f}", True),
    ("loss per trained token, last step", "final_loss", "{:.2f}", False),
)


def _figures(usual: Figures, balanced: Figures) -> Table:
    table = Table("", title="The same rollouts, twice", title_justify="left")
    for name in (NAMES[usual["policy"]], NAMES[balanced["policy"]], "ratio"):
        table.add_column(name, justify="right", style="bold" if name == "balanced" else None)
    for what, name, form, compare in _ROWS:
        a, b = usual[name], balanced[name]
        ratio = f"× {b / a:.2f}" if compare and a and b is not None else ""
        table.add_row(what, _shown(a, form), _shown(b, form), ratio)
    return table


def _shown(value: object, form: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    return "?" if value is None else form.format(value)


def _per_rank(usual: Figures, balanced: Figures) -> Table:
    table = Table("", title="Compute per rank, CPU s, all steps", title_justify="left")
    for name in (*(f"rank {rank}" for rank in range(len(usual["compute_s"]))), "all"):
        table.add_column(name, justify="right")
    for run in (usual, balanced):
        seconds = run["compute_s"]
        table.add_row(NAMES[run["policy"]], *(f"{s:.2f}" for s in (*seconds, sum(seconds))))
    return table


def _exactly_once(usual: Figures, balanced: Figures) -> Text:
    if lines := [f"{NAMES[run['policy']]}: {problem}" for run in (usual, balanced) for problem in run["problems"]]:
        return Text("\n".join(["EXACTLY ONCE FAILED", *lines]), style="bold red")
    return Text(
        f"Exactly once: in both runs all {usual['num_rollouts']} rollouts put were trained on, once each; ids and "
        "token checksums are equal on both sides, and the ranks ended with the same parameters.",
        style="green",
    )
