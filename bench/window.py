"""The window: idle time in the long run, with its price in delay in the same row, and what a plan costs.

python bench/window.py [--json] [--seeds 20] [--trace-seeds 6] [--steps 200] [--traces DIR] [--only TEXT]

A row is a setting of the knobs over a stream of lengths, run by `sb.simulate` in mid-run: mean over seeds, its standard
deviation, delays in dispatches (mean and p99 over seeds, the longest of all), the correlation of length and delay, and
by how much the tokens of a step vary. The warm-up and the tail are left out. A new setting is one more line of MODES.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, Partitioner, flops, lognormal, peers, trace_folder, traces

import stream_balancer as sb
from stream_balancer.config import Policy
from stream_balancer.planning import PlanKnobs, Waiting, plan_batch
from stream_balancer.tools.generation import finish_times
from stream_balancer.tools.simulate import as_policy

SLOTS = 128
"""Rollouts generated at a time."""

Make = Callable[[int], sb.Trace]
"""seed -> a stream of rollouts."""


@dataclass(frozen=True)
class Mode:
    """A setting of the knobs."""

    name: str
    width: float
    """The window, in batches."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Further knobs of a `BalancerConfig`."""
    batch: int = 32
    ranks: int = 8
    whole_groups: bool = False
    """Siblings leave in one batch, of as many whole groups as fit."""
    capped: bool = False
    """`max_tokens_per_micro_batch` is the longest rollout."""
    in_tokens: bool = False
    """Steps and window are as many tokens as so many rollouts have on average."""

    def config(self, trace: sb.Trace, cost: sb.CostModel) -> sb.BalancerConfig:
        size = int(np.bincount(trace.group_ids).max()) if self.whole_groups else 1
        batch = self.batch // size * size
        window = round(self.width * batch / size) * size
        knobs: dict[str, Any] = {"dp_size": self.ranks, "batch_size": batch, "window": window, "cost": cost}
        if self.whole_groups:
            knobs["group_size"] = size
        if self.capped:
            knobs["max_tokens_per_micro_batch"] = int(trace.lengths.max())
        if self.in_tokens:
            tokens = round(batch * float(trace.lengths.mean()))
            knobs |= {"batch_size": None, "window": None, "batch_tokens": tokens}
            knobs["window_tokens"] = round(self.width * tokens)
        return sb.BalancerConfig(**knobs | dict(self.knobs))


def lockstep(name: str, width: float, batch: int, ranks: int) -> Mode:
    return Mode(f"locksteps {batch}/{ranks} {name}", width, {"sync": "micro_batch"}, batch, ranks, capped=True)


MODES = (
    *(
        Mode(f"W{width:g} D{skips}", width, {"max_skips": skips})
        for width in (1.25, 1.5, 2.0, 3.0)
        for skips in (8, 16, 32)
    ),
    Mode("W2 D16 equal counts", 2, {"max_skips": 16, "counts": "equal"}),
    Mode("W2 D16 whole groups", 2, {"max_skips": 16}, whole_groups=True),
    Mode("W2 D16, 16 to 64", 2, {"max_skips": 16, "batch_size_range": (16, 64)}),
    Mode("W2 D16 in tokens", 2, {"max_skips": 16}, in_tokens=True),
    lockstep("W1", 1, 128, 8),
    lockstep("W2", 2, 128, 8),
    lockstep("W1", 1, 256, 32),
    lockstep("W2", 2, 256, 32),
)
"""Over the recorded traces."""


def measure(rows: Rows, label: str, runs: Sequence[sb.SimulationReport], bar: float | None = None) -> None:
    """One row of a setting: a run a seed."""

    def mean(of: Callable[[sb.SimulationReport], float]) -> float:
        return round(float(np.mean([of(run) for run in runs])), 2)

    idle = [100 * run.idle_fraction for run in runs]
    for run in runs:
        most = run.config.max_skips
        assert most is None or run.max_skips_seen <= most, f"{label}: passed over {run.max_skips_seen} times"
    rows.add(
        f"{label}: idle",
        float(np.mean(idle)),
        "%",
        bar,
        sd=round(float(np.std(idle, ddof=1)), 2) if len(idle) > 1 else 0.0,
        bound=mean(lambda run: 100 * run.unavoidable_idle),
        delay=mean(lambda run: run.delay_dispatches.mean),
        p99=mean(lambda run: run.delay_dispatches.p99),
        longest=int(max(run.delay_dispatches.max for run in runs)),
        correlation=mean(lambda run: run.length_bias.length_delay_correlation),
        token_variation=mean(lambda run: run.token_variation or 0.0),
    )


def run(make: Make, seeds: int, mode: Mode, cost: sb.CostModel, policy: Policy = "window") -> list[sb.SimulationReport]:
    def one(seed: int) -> sb.SimulationReport:
        stream = make(seed)
        return sb.simulate(stream, as_policy(mode.config(stream, cost), policy), slots=SLOTS, seed=seed)

    return [one(seed) for seed in range(seeds)]


def baselines(rows: Rows, name: str, make: Make, seeds: int, mode: Mode, cost: sb.CostModel) -> None:
    """The same stream without a window: first in, first out."""
    measure(rows, f"{name}: round-robin", run(make, seeds, mode, cost, "round_robin"))
    measure(rows, f"{name}: fifo + this partition", run(make, seeds, mode, cost, "fifo"))
    if (verl := VERL.get("verl (list)")) is not None:
        rows.add(f"{name}: fifo + verl equal: idle", _idle_of(verl, make, seeds, mode, cost), "%")


def _idle_of(partition: Partitioner, make: Make, seeds: int, mode: Mode, cost: sb.CostModel) -> float:
    mean = slowest = 0.0
    for seed in range(seeds):
        trace = make(seed)
        order = np.argsort(finish_times(trace, SLOTS, seed=seed), kind="stable")
        costs = np.asarray(cost(trace.lengths[order]), dtype=np.float64)
        for first in range(0, costs.size - mode.batch + 1, mode.batch):
            batch = costs[first : first + mode.batch]
            mean += float(batch.sum()) / mode.ranks
            slowest += max(float(batch[np.asarray(one)].sum()) for one in partition(batch, mode.ranks, True))
    return 100 * (1 - mean / slowest)


VERL = {name: method for name, method in peers().items() if name == "verl (list)"}


# --- synthetic streams -----------------------------------------------------------------------------------------------


def independent(lengths: Floats) -> sb.Trace:
    """Lengths that arrive in the order given."""
    whole = lengths.astype(np.int64)
    zero, number = np.zeros_like(whole), np.arange(whole.size)
    return sb.Trace(prompt_tokens=zero, output_tokens=whole, group_ids=number, arrival_s=number.astype(np.float64))


SIZES = (("tok", 64, 8, None), ("flops", 64, 8, 0.3), ("flops", 256, 32, 0.3), ("tok", 64, 32, 18.0))
"""Cost, rollouts, ranks, and the most that W2 D8 may idle."""


def synthetic(rows: Rows, seeds: int, steps: int, only: str) -> None:
    """Independent lognormal lengths: mean 4096, sigma 1, clipped to 64..32768."""
    for kind, batch, ranks, bar in SIZES:
        name = f"ln {kind} {batch}/{ranks}"
        if only not in name:
            continue
        rows.text(name)
        cost: sb.CostModel = sb.TokenCost() if kind == "tok" else sb.QuadraticCost()

        def make(seed: int, batch: int = batch) -> sb.Trace:
            return independent(lognormal(batch * (steps + 64), seed))

        count = seeds if batch <= 64 else max(2, seeds // 4)
        baselines(rows, name, make, min(seeds, 5), Mode("", 2, {}, batch, ranks), cost)
        for counts, width, skips in (
            ("free", 1.5, 16),
            ("free", 2, 8),
            ("free", 2, 16),
            ("free", 3, 16),
            ("equal", 2, 16),
        ):
            label = f"W{width:g} D{skips} {counts}"
            mode = Mode(label, width, {"max_skips": skips, "counts": counts}, batch, ranks)
            measure(rows, f"{name} {label}", run(make, count, mode, cost), bar if label == "W2 D8 free" else None)


# --- real traces -----------------------------------------------------------------------------------------------------


def real(rows: Rows, folder: str | None, seeds: int, steps: int, only: str) -> None:
    cost = sb.QuadraticCost()
    for trace in traces(trace_folder(folder)):
        if only not in trace.name:
            continue
        rows.text(f"trace {trace.name}, 32/8 unless said, flops")
        grouped = of_usual_size(trace)
        baselines(rows, trace.name, drawn(trace, MODES[0], steps), min(seeds, 5), MODES[0], cost)
        for mode in MODES:
            source = grouped if mode.whole_groups else trace
            if source is not None:
                measure(rows, f"{trace.name} {mode.name}", run(drawn(source, mode, steps), seeds, mode, cost))


def drawn(trace: sb.Trace, mode: Mode, steps: int) -> Make:
    """Rollouts, or whole groups, drawn with replacement: enough for so many steps beside warm-up and tail."""
    count = mode.batch * (steps + 3 * mode.knobs.get("max_skips", 16) + 10)
    if mode.whole_groups:
        size = int(np.bincount(trace.group_ids).max())
        count = count // size * size
    return lambda seed: trace.resampled(count, seed, by_group=mode.whole_groups)


def of_usual_size(trace: sb.Trace) -> sb.Trace | None:
    """The groups that have as many siblings as most have; None where rollouts have none."""
    sizes = np.bincount(trace.group_ids)
    usual = int(np.bincount(sizes).argmax())
    chosen = sizes[trace.group_ids] == usual
    if usual == 1:
        return None
    prompt, output, groups = (column[chosen] for column in (trace.prompt_tokens, trace.output_tokens, trace.group_ids))
    return sb.Trace(prompt_tokens=prompt, output_tokens=output, group_ids=groups, name=trace.name)


# --- cost of a plan, and lockstep ------------------------------------------------------------------------------------


def cost_of_a_plan(rows: Rows) -> None:
    """A steady stream; the median of the later dispatches."""
    rows.text("cost of a plan")
    for batch, ranks, window, bar in (
        (32, 8, 64, 6.0),
        (256, 32, 512, 8.0),
        (1024, 64, 4096, 2.0),
        (4096, 128, 16384, 6.0),
        (16384, 512, 131072, 60.0),
    ):
        for kind in ("tok", "flops"):
            steps = 24 if batch > 256 else 200
            lengths = lognormal(window + steps * batch, 0)
            costs = flops(lengths) if kind == "flops" else lengths
            name = f"window {window}, {batch}/{ranks} {kind}: plan"
            rows.add(name, plan_ms(lengths, costs, batch, ranks, window, steps), "ms", bar)


def plan_ms(lengths: Floats, costs: Floats, batch: int, ranks: int, window: int, steps: int) -> float:
    held, skips, taken = np.arange(window), np.zeros(window, dtype=np.int64), window
    knobs = PlanKnobs(ranks, batch, max(16, 3 * (window // batch)))
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
        start = time.process_time()
        plan = plan_batch(columns, knobs, num_rollouts=batch, step=step)
        milliseconds.append(1e3 * (time.process_time() - start))
        stays = np.ones(window, dtype=np.bool_)
        stays[np.concatenate([one for share in plan.ranks for one in share])] = False
        new: Ints = np.arange(taken, taken + batch)
        held = np.concatenate((held[stays], new))
        skips = np.concatenate((skips[stays] + 1, np.zeros(batch, dtype=np.int64)))
        taken += batch
    return float(np.median(milliseconds[steps // 6 :]))


def lockstep_from_the_window(rows: Rows, seeds: int, steps: int) -> None:
    """Ranks that meet at every micro-batch; ln tok 64/8, one rollout per micro-batch."""
    rows.text("sync='micro_batch': ln tok 64/8, 8 micro-batches of one rollout")
    for width, skips in ((1, 8), (2, 8), (2, 16), (4, 16)):
        knobs = {"max_skips": skips, "sync": "micro_batch", "micro_batch_multiple": 8}
        mode = Mode(f"W{width} D{skips}", width, knobs, 64, 8)
        found = run(lambda seed: independent(lognormal(64 * (steps + 64), seed)), min(seeds, 5), mode, sb.TokenCost())
        measure(rows, f"locksteps of one rollout, ln tok 64/8 {mode.name}", found)


def capped_and_slowed(rows: Rows, seeds: int, steps: int) -> None:
    """Rank batches cut into micro-batches, or one slower rank; lengths stop at a maximum, as they do under
    max_new_tokens."""
    rows.text("token cap; a rank slowed 1.5 x")
    slowed = tuple(1 / 1.5 if rank == 1 else 1.0 for rank in range(32))
    for batch, ranks, longest, cap, speeds, quadratic in (
        (16, 4, 8000, 16000, None, True),
        (64, 32, 6000, 12000, None, False),
        (32, 8, 32768, 65536, None, True),
        (32, 8, 12000, None, slowed[:8], True),
        (64, 32, 32768, None, slowed, False),
    ):
        kind = ("flops" if quadratic else "tok") + (" slowed" if cap is None else f" cap {cap}")
        cost: sb.CostModel = sb.QuadraticCost() if quadratic else sb.TokenCost()

        def make(seed: int, batch: int = batch, longest: int = longest) -> sb.Trace:
            return independent(np.minimum(lognormal(batch * (steps + 64), seed), longest))

        for width, skips in ((2, 8), (2, 16)):
            knobs = {"max_skips": skips, "max_tokens_per_micro_batch": cap, "speeds": speeds}
            mode = Mode(f"W{width} D{skips}", width, knobs, batch, ranks)
            measure(rows, f"ln {kind} {batch}/{ranks} {mode.name}", run(make, min(seeds, 4), mode, cost))


def main() -> None:
    options = arguments(__doc__, seeds=20, trace_seeds=6, steps=200, traces=None, only="")
    rows = Rows(options.json)
    if not options.only:
        cost_of_a_plan(rows)
        lockstep_from_the_window(rows, options.seeds, options.steps)
        capped_and_slowed(rows, options.seeds, options.steps)
    synthetic(rows, options.seeds, options.steps, options.only)
    real(rows, options.traces, options.trace_seeds, options.steps, options.only)


if __name__ == "__main__":
    main()
