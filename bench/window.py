"""The window: idle time in the long run, its price in delay, and what a dispatch costs.

python bench/window.py [--json] [--seeds 20] [--steps 250] [--traces DIR] [--only TEXT]

`plan_batch` is driven directly: the window fills up, one batch leaves, and so on. Idle = 1 - sum of mean loads over sum
of highest loads. Streams begin in mid-run, see docs/simulation.md; the first 50 dispatches are left out: a window that
has just been filled has not put any outlier off yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, flops, lognormal, peers, trace_folder, traces

from stream_balancer.planning import LengthBias, PlanKnobs, Waiting, partition, plan_batch
from stream_balancer.tools.generation import finish_times
from stream_balancer.tools.trace import Trace

WARM_UP = 50


@dataclass
class Stream:
    """Rollouts in the order they finish."""

    lengths: Floats
    costs: Floats
    groups: Ints | None = None


@dataclass
class Outcome:
    idle: float
    unavoidable: float
    """Idle time if every batch had been partitioned at its lower bound."""
    delay_p99: float
    delay_max: float
    correlation: float
    least_decile: float
    most_decile: float
    batch_spread: float
    milliseconds: float
    broken: int
    """Rollouts passed over more than max_skips times: must be 0."""


def drive(stream: Stream, knobs: PlanKnobs, window: int, steps: int, lockstep: bool = False) -> Outcome:
    size = knobs.batch_size
    held = np.empty(0, dtype=np.int64)
    skips = np.empty(0, dtype=np.int64)
    taken = 0
    mean = highest = bounds = spent = 0.0
    delays: list[Ints] = []
    bias = LengthBias()
    broken = 0
    missing = _missing_siblings(stream.groups)
    for step in range(steps):
        start_of_new = taken
        while _num_ready(held, start_of_new, taken, missing) < window and taken < stream.costs.size:
            taken += 1
        new = np.arange(start_of_new, taken)
        held, skips = np.concatenate((held, new)), np.concatenate((skips, np.zeros(new.size, dtype=np.int64)))
        groups = np.full(held.size, -1) if stream.groups is None else stream.groups[held]
        complete = np.ones(held.size, dtype=np.bool_) if missing is None else missing[held] < taken
        columns = Waiting(
            costs=stream.costs[held],
            lengths=np.maximum(stream.lengths[held], 1).astype(np.int64),
            skips=skips,
            due=np.zeros(held.size, dtype=np.bool_),
            groups=groups,
            group_complete=complete,
        )
        number = min(size, int(complete.sum()))
        start = time.process_time()
        plan = plan_batch(columns, knobs, num_rollouts=number, step=step)
        elapsed = time.process_time() - start
        chosen = np.concatenate([one for share in plan.ranks for one in share])
        stays = np.ones(held.size, dtype=np.bool_)
        stays[chosen] = False
        broken += int((skips[stays & complete] >= (knobs.max_skips or np.inf)).sum())
        if step >= WARM_UP:
            spent += elapsed
            rate = np.ones(knobs.num_ranks) if knobs.speeds is None else knobs.speeds
            mean += float(plan.loads.sum() / rate.sum())
            bounds += plan.lower_bound
            if lockstep:
                table = [[columns.costs[one].sum() for one in share] for share in plan.ranks]
                highest += float(np.array(table).max(axis=0).sum())
            else:
                highest += float((plan.loads / rate).max())
            delays.append(skips[chosen])
            bias.record(columns.lengths[chosen], skips[chosen])
        held, skips = held[stays], skips[stays] + complete[stays]
    summary = bias.summary()
    delay = np.concatenate(delays)
    return Outcome(
        idle=100.0 * (1.0 - mean / highest),
        unavoidable=100.0 * (1.0 - mean / max(bounds, mean)),
        delay_p99=float(np.quantile(delay, 0.99)),
        delay_max=float(delay.max()),
        correlation=summary.length_delay_correlation,
        least_decile=min(summary.delay_per_decile),
        most_decile=max(summary.delay_per_decile),
        batch_spread=summary.batch_mean_spread,
        milliseconds=1e3 * spent / (steps - WARM_UP),
        broken=broken,
    )


def _num_ready(held: Ints, start: int, taken: int, missing: Ints | None) -> int:
    """Waiting rollouts whose group is complete: incomplete ones wait beside the window, or might fill it alone."""
    if missing is None:
        return held.size + taken - start
    return int((missing[held] < taken).sum() + (missing[start:taken] < taken).sum())


def _missing_siblings(groups: Ints | None) -> Ints | None:
    """[n] the place in the stream at which each rollout's group is complete."""
    if groups is None:
        return None
    last = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    last[groups] = np.arange(groups.size)  # later ones overwrite earlier ones
    return last[groups]


def average(rows: Rows, label: str, outcomes: list[Outcome], bar: float | None, *, prices: bool = True) -> None:
    def mean(of: Callable[[Outcome], float]) -> float:
        return float(np.mean([of(outcome) for outcome in outcomes]))

    rows.add(f"{label}: idle", mean(lambda o: o.idle), "%", bar)
    if prices:
        rows.add(f"{label}: idle at the bound of each batch", mean(lambda o: o.unavoidable), "%")
        rows.add(f"{label}: delay p99", mean(lambda o: o.delay_p99), "disp.")
        rows.add(f"{label}: delay max", max(o.delay_max for o in outcomes), "disp.")
        rows.add(f"{label}: length-delay correlation", mean(lambda o: o.correlation), "r")
        rows.add(f"{label}: mean delay, least decile", mean(lambda o: o.least_decile), "disp.")
        rows.add(f"{label}: mean delay, most decile", mean(lambda o: o.most_decile), "disp.")
        rows.add(f"{label}: spread of batch means", mean(lambda o: o.batch_spread), "x iid")
        rows.add(f"{label}: plan", mean(lambda o: o.milliseconds), "ms")
    rows.add(f"{label}: passed over too often", float(sum(o.broken for o in outcomes)), "n", 0.0)


# --- synthetic streams -----------------------------------------------------------------------------------------------

STREAMS: list[tuple[str, bool, int, int, list[tuple[float, int, float | None]]]] = [
    # name, quadratic cost, batch, ranks, (window in batches, max_skips, bar)
    ("ln tok 64/8", False, 64, 8, [(1.25, 4, None), (2, 4, None), (2, 8, None), (3, 16, None)]),
    ("ln flops 64/8", True, 64, 8, [(1.25, 4, None), (2, 4, None), (2, 8, 0.3), (3, 16, None)]),
    ("ln flops 256/32", True, 256, 32, [(1.25, 4, None), (2, 4, None), (2, 8, 0.3), (3, 16, None)]),
    ("ln tok 64/32", False, 64, 32, [(1.25, 4, None), (2, 4, None), (2, 8, 18.0), (3, 16, 4.5)]),
]


def baselines(
    rows: Rows, name: str, make: Callable[[int], Stream], batch: int, ranks: int, seeds: int, steps: int
) -> None:
    """The same stream, first in, first out, with other partitions."""
    verl = {label: method for label, method in peers().items() if label == "verl (list)"}
    sums = {"round-robin": 0.0, "fifo + this partition": 0.0, **{f"fifo + {label} equal": 0.0 for label in verl}}
    work = 0.0
    for seed in range(seeds):
        stream = make(seed)
        for step in range(WARM_UP, steps):
            costs = stream.costs[step * batch : (step + 1) * batch]
            work += float(costs.sum()) / ranks
            sums["round-robin"] += max(float(costs[rank::ranks].sum()) for rank in range(ranks))
            sums["fifo + this partition"] += max(float(costs[share].sum()) for share in partition(costs, ranks))
            for label, method in verl.items():
                shares = method(costs, ranks, True)
                sums[f"fifo + {label} equal"] += max(float(costs[np.asarray(share)].sum()) for share in shares)
    for label, total in sums.items():
        rows.add(f"{name}: {label}: idle", 100.0 * (1.0 - work / total), "%")


def synthetic(rows: Rows, seeds: int, steps: int, only: str) -> None:
    for name, quadratic, batch, ranks, cells in STREAMS:
        if only not in name:
            continue
        rows.text(name)

        def make(seed: int, batch: int = batch, quadratic: bool = quadratic) -> Stream:
            lengths = lognormal(batch * (steps + 5), seed)
            return Stream(lengths, flops(lengths) if quadratic else lengths)

        count = seeds if batch <= 64 else max(2, seeds // 4)
        baselines(rows, name, make, batch, ranks, min(count, 3), steps)
        for counts in ("free", "equal"):
            for width, max_skips, bar in cells:
                knobs = PlanKnobs(ranks, batch, max_skips, counts=counts)
                outcomes = [drive(make(seed), knobs, int(width * batch), steps) for seed in range(count)]
                label = f"{name} W{width:g} D{max_skips} {counts}"
                average(rows, label, outcomes, bar if counts == "free" else None, prices=counts == "free")


# --- real traces -----------------------------------------------------------------------------------------------------

TRACE_BARS = {  # W2 D8, W3 D16
    "rg_qwen3b_rl_g3": (18.2, 9.6),
    "lrm_token_economy_g5": (1.2, 0.5),
    "misguided_thinking_g3": (7.7, 2.8),
    "tau_airline_gpt4o_g4": (0.3, 0.3),
    "azure_2023_conv": (0.5, 0.4),
    "mooncake_conversation": (9.9, 4.1),
    "nemo_gym_mixed_envs": (32.3, 25.5),
}


def in_mid_run(trace: Trace, n: int, seed: int, *, by_group: bool) -> Stream:
    """Rollouts, or whole groups whose siblings are issued together, drawn with replacement; 128 generation slots."""
    drawn = trace.resampled(n, seed, by_group=by_group)
    order = np.argsort(finish_times(drawn, seed=seed, whole_groups=by_group), kind="stable")
    lengths = drawn.lengths[order].astype(np.float64)
    return Stream(lengths, flops(lengths), drawn.group_ids[order] if by_group else None)


def real(rows: Rows, folder: str | None, seeds: int, steps: int, only: str) -> None:
    for trace in traces(trace_folder(folder)):
        if only not in trace.name:
            continue
        rows.text(f"trace {trace.name}, 32/8, flops")

        def make(seed: int, trace: Trace = trace) -> Stream:
            return in_mid_run(trace, 32 * (steps + 10), seed, by_group=False)

        baselines(rows, trace.name, make, 32, 8, min(seeds, 5), steps)
        bars = TRACE_BARS.get(trace.name, (None, None))
        for (width, max_skips), bar in zip(((2, 8), (3, 16)), bars, strict=True):
            knobs = PlanKnobs(8, 32, max_skips)
            outcomes = [drive(make(seed), knobs, width * 32, steps) for seed in range(seeds)]
            average(rows, f"{trace.name} W{width} D{max_skips}", outcomes, None if bar is None else bar + 0.5)
        sizes = np.bincount(trace.group_ids)
        if sizes.max() > 1:
            group_size = int(np.bincount(sizes).argmax())
            batch = 32 - 32 % group_size
            for width, max_skips in ((2, 8), (3, 16)):
                knobs = PlanKnobs(8, batch, max_skips, groups="same_batch", group_size=int(sizes.max()))
                outcomes = [
                    drive(in_mid_run(trace, batch * (steps + 30), seed, by_group=True), knobs, width * batch, steps)
                    for seed in range(max(2, seeds // 2))
                ]
                label = f"{trace.name} W{width} D{max_skips} groups of {group_size} in one batch of {batch}"
                average(rows, label, outcomes, None)


# --- cost of a dispatch, and lockstep --------------------------------------------------------------------------------


def cost_of_a_dispatch(rows: Rows) -> None:
    """A steady stream at the sizes of the bars; the median of the later dispatches."""
    rows.text("cost of a dispatch, whole plan")
    for batch, ranks, window, bar in ((1024, 64, 4096, 2.0), (4096, 128, 16384, 6.0), (16384, 512, 131072, 60.0)):
        for kind in ("tok", "flops"):
            steps = 24
            lengths = lognormal(window + steps * batch, 0)
            costs = flops(lengths) if kind == "flops" else lengths
            held, skips, taken = np.arange(window), np.zeros(window, dtype=np.int64), window
            times = []
            for step in range(steps):
                columns = Waiting(
                    costs[held],
                    lengths[held].astype(np.int64),
                    skips,
                    np.zeros(window, dtype=np.bool_),
                    np.full(window, -1),
                    np.ones(window, dtype=np.bool_),
                )
                knobs = PlanKnobs(ranks, batch, 3 * (window // batch))
                start = time.process_time()
                plan = plan_batch(columns, knobs, num_rollouts=batch, step=step)
                times.append(1e3 * (time.process_time() - start))
                stays = np.ones(window, dtype=np.bool_)
                stays[np.concatenate([one for share in plan.ranks for one in share])] = False
                held = np.concatenate((held[stays], np.arange(taken, taken + batch)))
                skips = np.concatenate((skips[stays] + 1, np.zeros(batch, dtype=np.int64)))
                taken += batch
            rows.add(f"window {window}, {batch}/{ranks} {kind}: plan", float(np.median(times[4:])), "ms", bar)


def lockstep_from_the_window(rows: Rows, seeds: int, steps: int) -> None:
    """Ranks that meet at every micro-batch; ln tok 64/8, one rollout per micro-batch."""
    rows.text("sync='micro_batch': ln tok 64/8, 8 micro-batches of one rollout")
    for width, max_skips in ((1, 0), (2, 4), (2, 8), (4, 16)):
        knobs = PlanKnobs(8, 64, max_skips, sync="micro_batch", micro_batch_multiple=8)
        outcomes = []
        for seed in range(min(seeds, 5)):
            lengths = lognormal(64 * (steps + 5), seed)
            outcomes.append(drive(Stream(lengths, lengths), knobs, width * 64, steps, lockstep=True))
        average(rows, f"rows, ln tok 64/8 W{width} D{max_skips}", outcomes, None, prices=False)


def capped_and_slowed(rows: Rows, seeds: int, steps: int) -> None:
    """Cells with rank batches cut into micro-batches, or where one rank is slower; lengths stop at a maximum, as they
    do under max_new_tokens."""
    rows.text("token cap; a rank slowed 1.5 x")
    slowed = np.where(np.arange(32) == 1, 1 / 1.5, 1.0)
    for batch, ranks, longest, cap, speeds, quadratic in (
        (16, 4, 8000, 16000, None, True),
        (64, 32, 6000, 12000, None, False),
        (32, 8, 32768, 65536, None, True),
        (32, 8, 12000, None, slowed[:8], True),
        (64, 32, 32768, None, slowed, False),
    ):
        kind = ("flops" if quadratic else "tok") + (" slowed" if cap is None else f" cap {cap}")
        for width, max_skips in ((2, 8), (3, 16)):
            knobs = PlanKnobs(ranks, batch, max_skips, max_tokens_per_micro_batch=cap, speeds=speeds)
            outcomes = []
            for seed in range(min(seeds, 4)):
                lengths = np.minimum(lognormal(batch * (steps + 5), seed), longest)
                stream = Stream(lengths, flops(lengths) if quadratic else lengths)
                outcomes.append(drive(stream, knobs, width * batch, steps))
            average(rows, f"ln {kind} {batch}/{ranks} W{width} D{max_skips}", outcomes, None, prices=False)


def main() -> None:
    options = arguments(__doc__, seeds=20, steps=250, traces=None, only="")
    rows = Rows(options.json)
    if not options.only:
        cost_of_a_dispatch(rows)
        lockstep_from_the_window(rows, options.seeds, options.steps)
        capped_and_slowed(rows, options.seeds, options.steps)
    synthetic(rows, options.seeds, options.steps, options.only)
    real(rows, options.traces, options.seeds, options.steps, options.only)


if __name__ == "__main__":
    main()
