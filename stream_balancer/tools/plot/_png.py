"""The PNG, by matplotlib (the extra ``plot``). Draws without a display and leaves matplotlib's global state alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stream_balancer.planning.arrays import Floats
from stream_balancer.tools.tune_report import TuneReport

__all__ = ["draw"]

MOST_TICKS = 16
GREY, BLUE, RED = "#9aa5b1", "#2563eb", "#dc2626"


def draw(report: TuneReport, path: str) -> None:
    """The same charts as the HTML page, in one picture of 1400 x 1000."""
    figure = Figure(figsize=(14, 10), dpi=100, layout="constrained")
    figure.suptitle(f"{report.trace_name}\n{report.reason}", fontsize=10, wrap=True)
    (front, deciles), (before, after) = figure.subplots(2, 2)
    _front(front, report)
    _deciles(deciles, report)
    _heat(before, "round-robin", report.round_robin.rank_work, report.round_robin.idle_fraction)
    _heat(after, "recommended", report.recommended.rank_work, report.recommended.idle_fraction)
    figure.savefig(path, format="png")


def _front(axes: Any, report: TuneReport) -> None:
    chosen = report.recommended
    for outcome, name in ((report.round_robin, "round-robin"), (report.fifo, "arrival order, best partition")):
        axes.axhline(100 * outcome.idle_fraction, color=GREY, linestyle="--")
        axes.text(1.0, 100 * outcome.idle_fraction, name, ha="right", va="bottom", transform=axes.get_yaxis_transform())
    axes.plot([o.added_age for o in report.outcomes], [100 * o.idle_fraction for o in report.outcomes], "o", color=GREY)
    axes.plot([o.added_age for o in report.front], [100 * o.idle_fraction for o in report.front], "o-", color=BLUE)
    axes.plot([chosen.added_age], [100 * chosen.idle_fraction], "o", color=RED, markersize=10)
    axes.set_xlabel("added mean queueing delay, dispatches")
    axes.set_ylabel("idle fraction of rank time, %")
    axes.set_ylim(bottom=0)


def _deciles(axes: Any, report: TuneReport) -> None:
    delays = np.nan_to_num(np.array(report.recommended.delay_per_decile))
    axes.bar(np.arange(1, delays.size + 1), delays, color=BLUE)
    axes.set_xticks(range(1, delays.size + 1))
    axes.set_xlabel("length decile, shortest to longest")
    axes.set_ylabel("mean dispatches waited")


def _heat(axes: Any, name: str, work: Floats, idle: float) -> None:
    busy = work / work.max(axis=1, keepdims=True).clip(min=1e-300)
    axes.imshow(busy.T, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set_title(f"{name}: {idle:.1%} idle in the long run", fontsize=10)
    axes.set_xlabel("step")
    axes.set_yticks(range(work.shape[1]) if work.shape[1] <= MOST_TICKS else [0, work.shape[1] - 1])
    axes.set_ylabel("rank")
