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

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from _common import Rows, arguments
from micro_batches import trace_flops
from peers import Floats, Ints, trace_folder, traces
from scheduler_list import SCHEDULERS, Plan, Scheduler
from scheduler_runs import FIRST_SEED, SYNCS, Figures, Run, Stream, figures_of, measure, planned
from schedulers import available

BATCH_SIZE, RANKS = 32, 8
CAPS = (1, 2, 4, 8)
"""Parts of the longest rollout."""
OVERHEADS = (0.0, 0.05, 0.15)
WITHOUT = ("stream_balancer, window 1", "stream_balancer, window 2")
"""Shown beside them where the longest rollout fits on a rank."""
SECONDS = 60.0
"""Of planning, for a scheduler in a run."""


def compared(parts: int) -> list[Scheduler]:
    """Those that split; and where everything fits on one rank, also ours that do not."""
    return [one for one in SCHEDULERS if one.splits or (parts == 1 and one.name in WITHOUT)]


def figures(run: Run, scheduler: Scheduler, plan: Plan) -> Iterator[tuple[float, Figures, Figures]]:
    """(overhead, ranks meet once a step, at every micro-batch)."""
    if scheduler.by_overhead:
        for overhead in OVERHEADS:
            once, often = measure(replace(run, overhead=overhead), scheduler, plan, SECONDS)
            yield overhead, once, often
        return
    records = {sync: planned(run, scheduler, plan, sync, SECONDS) for sync in SYNCS[: 1 + scheduler.by_sync]}
    for overhead in OVERHEADS if scheduler.splits else OVERHEADS[:1]:
        dearer = replace(run, overhead=overhead)
        once, often = (figures_of(dearer, scheduler, records.get(sync, records["step"]), sync) for sync in SYNCS)
        yield overhead, once, often


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
    rows = Rows(options.json, options.results)
    costs_of = squares if options.quadratic else trace_flops
    plans, missing = available(options.only_scheduler)
    for trace in traces(trace_folder(options.traces)):
        if options.only not in trace.name:
            continue
        run = Run.of(Stream(trace.name, trace, costs_of), BATCH_SIZE, RANKS, options.steps, options.seed)
        for parts in CAPS:
            cap = 2 * -(-run.max_tokens // (2 * parts))  # a part is of two chunks of equal size
            rows.text(f"{trace.name}, cap longest / {parts}: {cap:,} tokens a rank")
            for scheduler in compared(parts):
                if scheduler in plans:
                    for overhead, once, often in figures(replace(run, max_tokens=cap), scheduler, plans[scheduler]):
                        label = f"{trace.name}, cap longest / {parts}, overhead {100 * overhead:g} %"
                        show(rows, f"{label}: {scheduler.name}", once, often)
    for scheduler, why in missing.items():
        if scheduler.splits:
            rows.text(f"not available: {scheduler.name}: {why}")


if __name__ == "__main__":
    main()
