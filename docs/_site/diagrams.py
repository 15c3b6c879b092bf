"""Two diagrams for the pages, a timeline and the messages between processes; ``pictures.py`` saves both."""

from __future__ import annotations

import matplotlib.pyplot as plt

BUSY, SENT, WAITING, STRONG = "#4c72b0", "#8fa9d4", "#e6e6e6", "#c44e52"
DARK = "#333333"


def timeline() -> plt.Figure:
    """Puts, batches, steps, acknowledgements and policy versions of two ranks, with one batch prefetched."""
    figure, axis = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    rows = {"rollouts finish (put)": 4.0, "the window": 3.0, "rank 0": 2.0, "rank 1": 1.0, "policy version": 0.0}
    for at in (
        0.2,
        0.5,
        0.7,
        1.1,
        1.3,
        1.6,
        1.9,
        2.3,
        2.6,
        2.8,
        3.3,
        3.9,
        4.2,
        4.4,
        5.0,
        5.5,
        5.7,
        6.3,
        6.9,
        7.2,
        7.6,
        8.3,
    ):
        axis.plot([at, at], [3.8, 4.2], color=DARK, linewidth=1.2)
    leaves = [1.1, 2.0, 4.9, 7.9]  # the first fills a queue, the second is prefetched, then one for each step done
    steps = [(1.3, 4.8), (4.9, 7.8), (7.9, 10.0)]
    for number, at in enumerate(leaves):
        axis.annotate(
            f"batch {number}", (at, 2.42), (at, 3.2), ha="center", fontsize=8, arrowprops={"arrowstyle": "->"}
        )
    for number, (begins, ends) in enumerate(steps):
        for row, late in ((2.0, 0.0), (1.0, 0.12)):
            axis.barh(row, ends - begins - 0.12 + (late if number < 2 else 0), left=begins, height=0.34, color=BUSY)
            axis.text(begins + 0.1, row, f"step {number}", color="white", va="center", fontsize=8)
    for number, at in enumerate(leaves[1:], start=1):
        width = (steps[number][0] if number < 3 else 10.0) - at
        axis.barh(2.31, width, left=at, height=0.16, color=SENT)
        axis.barh(1.31, width, left=at, height=0.16, color=SENT)
    axis.text(2.1, 1.62, "light: the next batch, already at the rank (prefetch)", fontsize=8, color=DARK)
    for number, (_, ends) in enumerate(steps[:2]):
        axis.annotate(
            "", (ends + 0.05, 2.82), (ends, 2.25), arrowprops={"arrowstyle": "->", "color": STRONG, "linewidth": 1.5}
        )
        axis.text(ends - 0.08, 2.62, f"acknowledge {number}", ha="right", color=STRONG, fontsize=8)
        axis.plot([ends, ends], [-0.2, 0.9], color=STRONG, linewidth=1, linestyle=":")
        axis.text(ends + 0.06, 0, f"set_version({number + 1})", va="center", color=STRONG, fontsize=8)
    axis.text(0.2, 0, "version 0", va="center", fontsize=8, color=DARK)
    axis.set_yticks(list(rows.values()), list(rows))
    axis.set_xlim(0, 10)
    axis.set_ylim(-0.4, 4.5)
    axis.set_xticks([])
    axis.set_xlabel("time")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


PLACES = {"rollout worker": 0.0, "controller": 5.0, "rank": 10.0}
"""Process -> where its line stands."""
MESSAGES = [  # sender, receiver, message, reason
    ("rollout worker", "controller", "put(rollout)", "waits here while the buffer is full"),
    ("controller", "rollout worker", "accepted", "from now on the balancer keeps it"),
    ("controller", "rank", "batch n: this rank's micro-batches", "best-balanced of the window"),
    ("rank", "controller", "taken", "room in the rank's queue: batch n+1 may be planned"),
    ("rank", "controller", "step n is done, it took s seconds", "its rollouts are forgotten; the cost model learns"),
    ("controller", "rollout worker", "policy version", "after set_version(v)"),
    ("rollout worker", "controller", "end()", "no more puts"),
    ("controller", "rank", "end, once nothing waits", "the loop over the feed ends"),
]


def processes() -> plt.Figure:
    """The messages between a producer, the controller and a rank, from above to below."""
    figure, axis = plt.subplots(figsize=(8.6, 4.2), layout="constrained")
    bottom = -len(MESSAGES) - 0.4
    for name, place in PLACES.items():
        axis.plot([place, place], [-0.4, bottom], color=DARK, linewidth=1)
        axis.text(
            place, 0, name, ha="center", va="center", fontsize=10, bbox={"facecolor": WAITING, "edgecolor": "none"}
        )
    for number, (sender, receiver, what, why) in enumerate(MESSAGES, start=1):
        here, there = PLACES[sender], PLACES[receiver]
        axis.annotate(
            "", (there, -number), (here, -number), arrowprops={"arrowstyle": "->", "color": BUSY, "linewidth": 1.5}
        )
        axis.text((here + there) / 2, -number + 0.1, what, ha="center", va="bottom", fontsize=8.5)
        axis.text((here + there) / 2, -number - 0.08, why, ha="center", va="top", fontsize=7.5, color="#777777")
    axis.set_xlim(-1.2, 11.2)
    axis.set_ylim(bottom, 0.5)
    axis.set_axis_off()
    return figure
