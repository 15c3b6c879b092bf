"""The pictures in docs/pictures/: ``make pictures`` draws them anew from the library and from bench/results/.

``ranks.svg``: what every rank does during the same rollouts, under three policies. ``headline.svg``: step time and idle
share of real training steps, as bench/training.py measured them. ``sizes.svg``: idle time by the size of a step.
``delay.svg``: idle time against delay for recorded lengths. ``timeline.svg`` and ``processes.svg`` are diagrams
(``diagrams.py``).
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import matplotlib as mpl
import numpy as np
import torch

import stream_balancer as sb

mpl.use("svg")
mpl.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "stream_balancer",
    "font.family": "sans-serif",
    "font.size": 10,
}
import matplotlib.pyplot as plt  # noqa: E402 - after use()
from diagrams import processes, timeline  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from bars import bars  # noqa: E402
from peers import finish_times  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "bench" / "results"
"""Pages and pictures that lie beside the figures."""
BUSY, WAITING, STRONG = "#4c72b0", "#e6e6e6", "#c44e52"
RANKS, BATCH, STEPS = 8, 32, 6


async def loads(policy: str, rollouts: Sequence[sb.Rollout]) -> list[list[float]]:
    """[step][rank] work of the first steps after a warm-up."""
    window = 2 * BATCH if policy == "window" else BATCH
    knobs: dict[str, Any] = {"dp_size": RANKS, "batch_size": BATCH, "window": window, "policy": policy}
    config = sb.BalancerConfig(cost=sb.cost.QuadraticCost(), **knobs)
    found: list[list[float]] = []
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:

        async def generate() -> None:
            for rollout in rollouts:
                await balancer.put(rollout)

        tasks.start_soon(generate)
        async for batch in balancer.batches():
            if batch.step >= 40:
                found.append(list(batch.loads))
            if len(found) == STEPS:
                break
        tasks.cancel_scope.cancel()
    return found


def in_finish_order() -> list[sb.Rollout]:
    """Rollouts of reasoning models' lengths, as 256 generation slots finish them."""
    trace = sb.generate_trace(3000, "lrm", seed=0)
    done = finish_times(trace, slots=256)
    order = np.argsort(done, kind="stable")
    return [sb.Rollout(tokens={"input_ids": torch.zeros(int(trace.lengths[row]), dtype=torch.int32)}) for row in order]


def draw_ranks() -> None:
    """Bars of work, gaps of waiting."""
    policies = {
        "round_robin": "round-robin",
        "fifo": "arrival order, best partition",
        "window": "window of two batches",
    }
    rollouts = in_finish_order()
    found = {policy: anyio.run(loads, policy, rollouts) for policy in policies}
    unit = max(sum(max(step) for step in steps) for steps in found.values())
    figure, axes = plt.subplots(len(policies), 1, figsize=(8.6, 5.2), sharex=True, layout="constrained")
    for axis, (policy, name) in zip(axes, policies.items(), strict=True):
        start = 0.0
        for step in found[policy]:
            longest = max(step) / unit
            for rank, load in enumerate(step):
                axis.barh(rank, load / unit, left=start, height=0.8, color=BUSY)
                axis.barh(rank, longest - load / unit, left=start + load / unit, height=0.8, color=WAITING)
            start += longest
            axis.axvline(start, color="black", linewidth=0.6)
        busy = sum(sum(step) / RANKS for step in found[policy]) / sum(max(step) for step in found[policy])
        axis.set_title(f"{name}: ranks wait {100 * (1 - busy):.1f} % of the time", loc="left", fontsize=10)
        axis.set_yticks([0, RANKS - 1], ["rank 0", f"rank {RANKS - 1}"])
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xticks([])
    axes[-1].set_xlabel(
        f"time: {STEPS} consecutive steps of {BATCH} rollouts, which ones is up to the policy; "
        "grey: waiting for the slowest rank"
    )
    save(figure, "ranks.svg")


def draw_headline() -> None:
    """Step time, waiting part marked."""
    rows = [json.loads(line) for line in (ROOT / "bench" / "results" / "training.jsonl").read_text().splitlines()]
    value = {row["name"]: row["value"] for row in rows if "name" in row}
    names = ["round-robin", "verl KK", "arrival order, best partition", "window 2x", "window 4x"]
    step_ms = np.array([value[f"{name}: step"] for name in names])
    idle = np.array([value[f"{name}: idle, meeting once per step"] for name in names]) / 100
    figure, axis = plt.subplots(figsize=(8.6, 2.6), layout="constrained")
    places = np.arange(len(names))
    axis.barh(places, step_ms * (1 - idle), color=BUSY, label="training")
    axis.barh(places, step_ms * idle, left=step_ms * (1 - idle), color=STRONG, label="waiting for the slowest rank")
    for place, ms, share in zip(places, step_ms, idle, strict=True):
        axis.text(ms + 3, place, f"{ms:.0f} ms, {100 * share:.1f} % idle", va="center")
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlim(0, float(step_ms.max()) * 1.25)
    axis.set_xlabel("measured time of a step, ms (bench/training.py: 8 ranks, the same rollouts for all)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    save(figure, "headline.svg")


def draw_sizes() -> None:
    """Idle time over rollouts per rank: where arrival order suffices, and where the window earns its delay."""
    lines = (ROOT / "bench" / "results" / "sizes.jsonl").read_text().splitlines()
    idle: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)  # trace, policy, ranks
    for row in (row for row in map(json.loads, lines) if "name" in row):
        cell, policy, _ = row["name"].split(": ")
        lengths, size = cell.split()
        rollouts, ranks = map(int, size.split("/"))
        idle[lengths, policy, ranks].append((rollouts / ranks, row["value"]))
    lengths = list(dict.fromkeys(lengths for lengths, _, _ in idle))
    figure, axes = plt.subplots(1, len(lengths), figsize=(8.6, 2.8), sharey=True, layout="constrained")
    for axis, name in zip(axes, lengths, strict=True):
        for policy, color in (("arrival order, best partition", STRONG), ("window", BUSY)):
            for ranks, style in ((8, "-"), (32, "--"), (64, ":")):
                per_rank, shares = zip(*sorted(idle[name, policy, ranks]), strict=True)
                axis.plot(per_rank, shares, style, color=color, marker=".", label=f"{policy}, {ranks} ranks")
        axis.set_title(name.split("_")[0], fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 16, 64], ["4", "16", "64"])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ranks wait, % of the time")
    figure.supxlabel("rollouts per rank in a step; recorded lengths (bench/sizes.py)", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    save(figure, "sizes.svg")


def draw_delay() -> None:
    """Idle time over mean delay, a line for each bound on skips; with a window of one batch nobody is passed over."""
    lines = (ROOT / "bench" / "results" / "planning-window.jsonl").read_text().splitlines()
    idle: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)  # trace, max_skips -> by window
    first_out: dict[str, float] = {}
    found = re.compile(r"(\w+?)_\S+ W(1\.25|1\.5|2|3) (D\d+): idle")
    for row in (row for row in map(json.loads, lines) if "name" in row):
        if row["name"].endswith(": fifo + this partition: idle") and "_" in row["name"]:
            first_out[row["name"].split("_")[0]] = row["value"]
        elif match := found.fullmatch(row["name"]):
            idle[match[1], match[3]][match[2]] = row["delay"], row["value"]
    lengths = list(dict.fromkeys(name for name, _ in idle))
    figure, axes = plt.subplots(1, len(lengths), figsize=(8.6, 2.8), layout="constrained")
    for axis, name in zip(axes, lengths, strict=True):
        for bound, style in (("D8", ":"), ("D16", "-"), ("D32", "--")):
            delays, shares = zip(*sorted({(0.0, first_out[name]), *idle[name, bound].values()}), strict=True)
            axis.plot(delays, shares, style, color=BUSY, marker=".", label=f"max_skips={bound[1:]}")
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, max(5.0, 1.05 * first_out[name]))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ranks wait, % of the time")
    windows = "mean delay, steps: windows of 1, 1.25, 1.5, 2 and 3 batches"
    figure.supxlabel(f"{windows}; 32 rollouts on 8 ranks (bench/window.py)", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    save(figure, "delay.svg")


def draw_schedulers() -> None:
    """Idle time under every scheduler of bench/schedulers.py: one stream, one size, both ways in which ranks meet."""
    lines = (ROOT / "bench" / "results" / "schedulers.jsonl").read_text().splitlines()
    idle: dict[str, dict[str, float]] = defaultdict(dict)
    for row in map(json.loads, lines):
        if (row.get("stream"), row.get("batch_size")) == ("lrm_token_economy_g5", 256) and "idle" in row:
            idle[row["scheduler"]][row["sync"]] = row["idle"] / 100
    rows = {name: (found["step"], found["micro_batch"]) for name, found in idle.items()}
    best_first = dict(sorted(rows.items(), key=lambda row: row[1]))
    (RESULTS / "schedulers.svg").write_text(bars(best_first, ["ranks meet once a step", "at every micro-batch"]))


def save(figure: plt.Figure, name: str) -> None:
    """Without a date, so that the same figures make the same file."""
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw_ranks()
    draw_headline()
    draw_sizes()
    draw_schedulers()
    draw_delay()
    save(timeline(), "timeline.svg")
    save(processes(), "processes.svg")
