"""What a plan costs: CPU time of one step over a steady stream, also under a token cap.

python bench/plan_time.py [--json] [--quick]
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, flops, lognormal

from stream_balancer.planning import PlanKnobs, Waiting, plan_batch

REPEATS = 3
"""Of every plan: CPU time grows, too, where other processes use the caches."""

CAPS: tuple[tuple[Literal["step", "micro_batch"], int], ...] = (
    ("step", 32768),
    ("step", 65536),
    ("micro_batch", 32768),
    ("micro_batch", 65536),
)
"""Token caps for the cost of a plan: the longest rollout, and twice that."""


def main() -> None:
    options = arguments(__doc__, quick=False)
    rows = Rows(options.json, options.results)
    for batch, ranks, window, bar in (
        (32, 8, 64, 1.5),
        (256, 32, 512, 3.0),
        (1024, 64, 4096, 2.0),
        (4096, 128, 16384, 6.0),
        (16384, 512, 131072, 60.0),
    ):
        if options.quick and batch > 256:
            continue
        for kind in ("tok", "flops"):
            steps = 24 if batch > 256 else 200
            lengths = lognormal(window + steps * batch, 0)
            costs = flops(lengths) if kind == "flops" else lengths
            name = f"window {window}, {batch}/{ranks} {kind}"
            rows.add(f"{name}: plan", plan_ms(lengths, costs, batch, ranks, window, steps), "ms", bar)
            for sync, cap in CAPS if batch <= 256 else ():
                ms = plan_ms(lengths, costs, batch, ranks, window, steps, sync=sync, max_tokens=cap)
                rows.add(f"{name}, cap {cap}, sync={sync}: plan", ms, "ms", bar)


def plan_ms(lengths: Floats, costs: Floats, batch: int, ranks: int, window: int, steps: int, **more: Any) -> float:
    """CPU milliseconds: the median of the later steps, each the least of some runs."""
    held, skips, taken = np.arange(window), np.zeros(window, dtype=np.int64), window
    knobs = PlanKnobs(ranks, batch, max(16, 3 * (window // batch)), **more)
    milliseconds = []
    for step in range(steps):
        columns = Waiting(
            costs[held],
            lengths[held].astype(np.int64),
            skips,
            np.zeros(window, dtype=np.bool_),
            np.full(window, -1),
            np.ones(window, dtype=np.bool_),
        )
        least = math.inf
        for _ in range(REPEATS):
            start = time.process_time()
            plan = plan_batch(columns, knobs, num_rollouts=batch, step=step)
            least = min(least, time.process_time() - start)
        milliseconds.append(1e3 * least)
        stays = np.ones(window, dtype=np.bool_)
        stays[np.concatenate([one for share in plan.ranks for one in share])] = False
        new: Ints = np.arange(taken, taken + batch)
        held = np.concatenate((held[stays], new))
        skips = np.concatenate((skips[stays] + 1, np.zeros(batch, dtype=np.int64)))
        taken += batch
    return float(np.median(milliseconds[steps // 6 :]))


if __name__ == "__main__":
    main()
