"""Schedulers that put a rollout on several ranks, side by side: the same rollouts, under the same cap of tokens a rank.

python bench/context_parallel_peers.py [--json] [--traces DIR] [--only TEXT] [--only-scheduler TEXT] [--steps 48]
                                       [--seed 7000] [--quadratic]

Their own code, at pinned versions (scheduler_list.py: those that split), in the environment of peers.txt; 32 rollouts
on 8 ranks in mid-run. The cap is the longest rollout of the trace, a half, a quarter and an eighth of it. Overhead is
what every doubling of the ranks that share a rollout adds, as a part of its work, and counts as idle. Two figures each:
ranks meet once a step and run their micro-batches in order, or they meet at every micro-batch. Work is L^2 + 24576 L;
with --quadratic it is L^2, as Megatron-core has it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from _common import Rows, arguments
from micro_batches import trace_flops
from peers import Floats, Ints, trace_folder, traces
from scheduler_list import SCHEDULERS, Scheduler
from scheduler_runs import FIRST_SEED, Figures, Run, Stream, measure
from schedulers import available

BATCH_SIZE, RANKS = 32, 8
CAPS = (1, 2, 4, 8)
"""Parts of the longest rollout."""
OVERHEADS = (0.0, 0.05, 0.15)
WITHOUT = ("stream_balancer, window 1", "stream_balancer, window 2")
"""Shown beside them where the longest rollout fits on a rank."""
SECONDS = 60.0
"""Of planning, for a scheduler in a run."""


def compared(overhead: float, parts: int) -> list[Scheduler]:
    """Those that split; without an overhead, and where everything fits, also ours that does not."""
    alone = WITHOUT if overhead == 0.0 and parts == 1 else ()
    return [one for one in SCHEDULERS if one.splits or one.name in alone]


def squares(lengths: Ints) -> Floats:
    return lengths.astype(np.float64) ** 2


def show(rows: Rows, label: str, once: Figures, often: Figures) -> None:
    rows.add(
        f"{label}: idle",
        once.idle,
        "%",
        lockstep=often.idle,
        delay=once.delay,
        over_cap=once.over_cap + often.over_cap,
        steps=once.steps,
    )


def main() -> None:
    options = arguments(__doc__, traces=None, only="", only_scheduler="", steps=48, seed=FIRST_SEED, quadratic=False)
    rows = Rows(options.json)
    costs_of = squares if options.quadratic else trace_flops
    plans, missing = available(options.only_scheduler)
    for trace in traces(trace_folder(options.traces)):
        if options.only not in trace.name:
            continue
        run = Run.of(Stream(trace.name, trace, costs_of), BATCH_SIZE, RANKS, options.steps, options.seed)
        for parts in CAPS:
            for overhead in OVERHEADS:
                label = f"{trace.name}, cap longest / {parts}, overhead {100 * overhead:g} %"
                rows.text(label)
                cap = 2 * -(-run.max_tokens // (2 * parts))  # a part is of two chunks of equal size
                capped = replace(run, max_tokens=cap, overhead=overhead)
                for scheduler in compared(overhead, parts):
                    if scheduler in plans:
                        show(rows, f"{label}: {scheduler.name}", *measure(capped, scheduler, plans[scheduler], SECONDS))
    for scheduler, why in missing.items():
        if scheduler.splits:
            rows.text(f"not available: {scheduler.name}: {why}")


if __name__ == "__main__":
    main()
