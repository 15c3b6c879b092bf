"""Figures of a run, whether every rollout was trained on exactly once, and both runs in a table.

A run in figures is a dict, which ``--json`` prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, pvariance
from typing import Any, TypeAlias

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

import stream_balancer as sb
from stream_balancer.tools.shown import table
from stream_balancer_demo.rank import RankRun
from stream_balancer_demo.rollouts import checksum

__all__ = ["NAMES", "Figures", "comparison", "summarize"]

NAMES = {"round_robin": "round-robin", "window": "balanced"}
"""Names of the two policies on the screen, in the order of their runs."""
Figures: TypeAlias = dict[str, Any]
"""JSON-like; None where there is nothing to measure."""


def summarize(
    policy: str,
    said: sb.Statistics,
    delays_s: Sequence[float],
    wall_s: float,
    ranks: Sequence[RankRun],
    rollouts: Sequence[sb.Rollout],
) -> Figures:
    """The figures of a run that was to train on ``rollouts``; ``said``: the balancer's own of it. ``problems``: what
    speaks against "every rollout exactly once, with the tokens that were put". Compute is CPU seconds."""
    p50, p99 = np.quantile(delays_s, (0.5, 0.99)).tolist() if delays_s else (None, None)
    by_step: dict[int, list[float]] = {}  # seconds of every rank
    for done in (done for rank in ranks for done in rank.steps):
        by_step.setdefault(done.step, []).append(done.compute_s)
    slowest_s = sum(map(max, by_step.values()))
    problems = _problems(ranks, rollouts)
    return {
        "policy": policy,
        "num_steps": len(by_step),
        "num_rollouts": said.accepted,
        "num_tokens": said.dispatched_tokens,
        "wall_s": wall_s,
        "compute_s": [sum(done.compute_s for done in rank.steps) for rank in ranks],
        "slowest_s": slowest_s,
        "idle_fraction": 1.0 - sum(map(fmean, by_step.values())) / slowest_s if slowest_s else None,
        "predicted_idle_fraction": said.idle_fraction,
        "tokens_per_second": said.dispatched_tokens / slowest_s if slowest_s else None,
        "step_variance_s2": fmean(map(pvariance, by_step.values())) if by_step else None,
        "delay_p50_s": p50,
        "delay_p99_s": p99,
        "reasons": {reason: count for reason, count in said.batches.items() if count},
        "final_loss": sum(rank.steps[-1].loss for rank in ranks) if by_step else None,
        "problems": problems,
        "exactly_once": not problems,
    }


def _problems(ranks: Sequence[RankRun], rollouts: Sequence[sb.Rollout]) -> list[str]:
    """Everything that is not "exactly once, unchanged, on ranks that agree", in words."""
    put = Counter((rollout.rollout_id, checksum(rollout)) for rollout in rollouts)
    trained = Counter(pair for rank in ranks for done in rank.steps for pair in done.trained)
    differ = {
        "not trained on, or with other tokens": put - trained,
        "trained on more than once, or never put": trained - put,
    }
    names = {what: [name for name, _ in pairs] for what, pairs in differ.items() if pairs}
    problems = [f"{len(n)} rollouts {what}: {', '.join(n[:5])}{', ...' * (len(n) > 5)}" for what, n in names.items()]
    if len({tuple((done.step, done.micro_batches) for done in rank.steps) for rank in ranks}) > 1:
        problems.append("the ranks ran different steps, or different numbers of micro-batches in one")
    if len({rank.parameters_checksum for rank in ranks}) > 1:
        problems.append("the ranks ended with different parameters")
    return problems


# --- on a terminal ----------------------------------------------------------------------------------------------------

_ROWS = {  # what it is called, by its name in the figures: text, and how its numbers are written
    "idle_fraction": ("idle fraction, measured", "{:.1%}"),
    "predicted_idle_fraction": ("idle fraction, predicted by the cost model", "{:.1%}"),
    "slowest_s": ("sum over steps of the slowest rank, CPU s", "{:.2f}"),
    "tokens_per_second": ("tokens/s, each rank on a device of its own", "{:,.0f}"),
    "step_variance_s2": ("variance of rank time within a step, s²", "{:.2g}"),
    "delay_p50_s": ("delay from put to dispatch, p50, s", "{:.2f}"),
    "delay_p99_s": ("delay from put to dispatch, p99, s", "{:.2f}"),
    "wall_s": ("wall time, all ranks sharing these cores, s", "{:.1f}"),
    "num_steps": ("optimizer steps", "{}"),
    "reasons": ("batches left because of", "{}"),
    "compute_s": ("compute of each rank, CPU s", "{:.2f}"),
    "final_loss": ("loss per trained token, last step", "{:.2f}"),
}
_COMPARED = list(_ROWS)[:8]


def comparison(usual: Figures, balanced: Figures) -> RenderableType:
    """Both runs side by side, and whether every rollout was trained on once."""
    names = [NAMES[run["policy"]] for run in (usual, balanced)]
    shown = table(["", *names, "ratio"], _rows(usual, balanced), title="The same rollouts, twice", title_justify="left")
    problems = [
        f"{name}: {said}" for name, run in zip(names, (usual, balanced), strict=True) for said in run["problems"]
    ]
    if problems:
        return Group(shown, Text("\n".join(["EXACTLY ONCE FAILED", *problems]), style="bold red"))
    once = (
        f"Exactly once: in both runs all {usual['num_rollouts']} rollouts put were trained on, once each; ids and "
        "token checksums are equal on both sides, and the ranks ended with the same parameters."
    )
    return Group(shown, Text(once, style="green"))


def _rows(usual: Figures, balanced: Figures) -> Iterator[list[str]]:
    for name, (what, form) in _ROWS.items():
        a, b = usual[name], balanced[name]
        ratio = f"× {b / a:.2f}" if name in _COMPARED and a and b is not None else ""
        yield [what, _shown(a, form), _shown(b, form), ratio]


def _shown(value: Any, form: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if isinstance(value, list):
        return ", ".join(form.format(one) for one in value)
    return "?" if value is None else form.format(value)
