"""The window: idle time in the long run, with its price in delay in the same row.

python bench/window.py [--json] [--seeds 20] [--trace-seeds 6] [--steps 200] [--traces DIR] [--only TEXT]
                       [--only-mode TEXT]

A row is a setting of the knobs over a stream of lengths, run by `sb.simulate` in mid-run: mean over seeds, its standard
deviation, delays in steps (mean and p99 over seeds, the longest of all), the correlation of length and delay, and
by how much the tokens of a step vary. The warm-up and the tail are left out. A new setting is one more line of MODES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from _common import Rows, arguments
from peers import Floats, Partitioner, alone, finish_times, lognormal, peers, trace_folder, traces

import stream_balancer as sb
from stream_balancer.config import Policy
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.machine import BalancerCore
from stream_balancer.tools.generation import Generation
from stream_balancer.tools.simulate import as_policy, report_of
from stream_balancer.tools.simulation_run import Run

SLOTS = 128
"""Rollouts generated at a time, where a mode does not say otherwise."""

TOKENS_PER_SECOND = 30.0
"""Of a slot."""

Make = Callable[[int], sb.Trace]
"""seed -> a stream of rollouts."""


@dataclass(frozen=True)
class Mode:
    """A setting of the knobs, and what it is run over."""

    name: str
    width: float
    """The window, in batches."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Further knobs of a `BalancerConfig`."""
    batch: int = 32
    ranks: int = 8
    policy: Policy = "window"
    capped: bool = False
    """`micro_batches.max_tokens` is the longest rollout."""
    whole_groups: bool = False
    """Siblings leave in one batch, of as many whole groups as fit."""
    group_sizes: tuple[int, ...] = ()
    """... and these are the sizes, each as often; else those of the trace that most have."""
    by_prompt: bool = False
    """Rollouts that leave one by one are drawn by whole prompts, as they were generated."""
    slots: int = SLOTS
    bars: Mapping[str, float] = field(default_factory=dict)
    """The most that it may idle, by how the name of a trace begins."""

    def config(self, trace: sb.Trace, cost: sb.cost.CostModel) -> sb.BalancerConfig:
        size = int(np.bincount(trace.group_ids).max()) if self.whole_groups else 1
        batch = self.batch // size * size
        window = round(self.width * batch / size) * size
        knobs: dict[str, Any] = {"dp_size": self.ranks, "batch_size": batch, "window": window, "cost": cost}
        if self.whole_groups:
            knobs["groups"] = {"size": size}
        if self.capped:
            knobs |= {"micro_batches": {"max_tokens": int(trace.lengths.max())}, "sync": self.knobs["sync"]}
        # replace(): of a group only what these name changes
        return as_policy(sb.BalancerConfig(**knobs).replace(**self.knobs), self.policy)


def locksteps(batch: int, ranks: int, bars: Mapping[str, float]) -> tuple[Mode, ...]:
    """Ranks that meet at every micro-batch, as large as the longest rollout."""
    kind: dict[str, Any] = {"batch": batch, "ranks": ranks, "capped": True, "slots": 4 * batch}
    one = {"sync": "micro_batch"}
    return (
        Mode(f"locksteps {batch}/{ranks} W1", 1, one, policy="fifo", **kind),
        Mode(f"locksteps {batch}/{ranks} W2 D8", 2, one | {"max_skips": 8}, bars=bars, **kind),
        Mode(f"locksteps {batch}/{ranks} W2 D16", 2, one | {"max_skips": 16}, **kind),
    )


MODES = (
    *(
        Mode(f"W{width:g} D{skips}", width, {"max_skips": skips})
        for width in (1.25, 1.5, 2.0, 3.0)
        for skips in (8, 16, 32)
    ),
    Mode("W2 D16 equal counts", 2, {"max_skips": 16, "equal_rollouts": True}),
    Mode("W2 D16 whole groups", 2, {"max_skips": 16}, whole_groups=True),
    Mode(
        "W2 D8 groups of 8",
        2,
        {"max_skips": 8},
        whole_groups=True,
        group_sizes=(8,),
        bars={"rg": 0.7, "lrm": 0.7, "misguided": 0.6, "nemo": 3.0},
    ),
    Mode("W2 D8 groups of 16", 2, {"max_skips": 8}, whole_groups=True, group_sizes=(16,)),
    Mode("W2 D8 groups of 4 and 16", 2, {"max_skips": 8}, whole_groups=True, group_sizes=(4, 16)),
    Mode("W2 D16 groups of 4 and 16", 2, {"max_skips": 16}, whole_groups=True, group_sizes=(4, 16)),
    Mode("prompts fifo", 1, policy="fifo", by_prompt=True),
    Mode("prompts W2 D8", 2, {"max_skips": 8}, by_prompt=True),
    *locksteps(128, 8, {"lrm": 1.6, "misguided": 1.6, "tau": 1.0, "mooncake": 4.0}),
    *locksteps(256, 32, {"lrm": 3.5, "tau": 2.2, "mooncake": 8.0}),
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
        bound=mean(lambda run: 100 * run.figures.unavoidable_idle),
        delay=mean(lambda run: run.delay_steps.mean),
        p99=mean(lambda run: run.delay_steps.p99),
        longest=int(max(run.delay_steps.max for run in runs)),
        correlation=mean(lambda run: run.length_bias.length_delay_correlation),
        token_variation=mean(lambda run: run.figures.token_variation or 0.0),
    )


def run(make: Make, seeds: int, mode: Mode, cost: sb.cost.CostModel) -> list[sb.SimulationReport]:
    return [one(make(seed), mode, cost, seed) for seed in range(seeds)]


def one(stream: sb.Trace, mode: Mode, cost: sb.cost.CostModel, seed: int) -> sb.SimulationReport:
    config = mode.config(stream, cost)
    if len(mode.group_sizes) < 2:
        return sb.simulate(stream, config, slots=mode.slots, seed=seed)
    core = BalancerCore(config)
    for group, size in enumerate(np.bincount(stream.group_ids).tolist()):
        core.add_all([], 0.0, GroupSize(str(group), size))  # what expect_group() does
    generation = Generation(stream, mode.slots, TOKENS_PER_SECOND, seed, whole_groups=True)
    simulated = Run(stream, core, generation, math.inf)
    simulated.to_the_end(None)
    return report_of(simulated, None)


def baselines(rows: Rows, name: str, make: Make, seeds: int, mode: Mode, cost: sb.cost.CostModel) -> None:
    """The same stream without a window: first in, first out."""
    measure(rows, f"{name}: round-robin", run(make, seeds, replace(mode, policy="round_robin"), cost))
    measure(rows, f"{name}: fifo + this partition", run(make, seeds, replace(mode, policy="fifo"), cost))
    if (verl := _verl()) is not None:
        rows.add(f"{name}: fifo + verl equal: idle", _idle_of(verl, make, seeds, mode, cost), "%")


def _idle_of(partition: Partitioner, make: Make, seeds: int, mode: Mode, cost: sb.cost.CostModel) -> float:
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


@cache
def _verl() -> Partitioner | None:
    return peers().get("verl (list)")


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
        cost: sb.cost.CostModel = sb.cost.TokenCost() if kind == "tok" else sb.cost.QuadraticCost()

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
            mode = Mode(label, width, {"max_skips": skips, "equal_rollouts": counts == "equal"}, batch, ranks)
            measure(rows, f"{name} {label}", run(make, count, mode, cost), bar if label == "W2 D8 free" else None)


# --- real traces -----------------------------------------------------------------------------------------------------


def real(rows: Rows, folder: str | None, seeds: int, steps: int, only: str, only_mode: str) -> None:
    cost = sb.cost.QuadraticCost()
    recorded = [one for trace in traces(trace_folder(folder)) for one in (trace, *truncated(trace))]
    for trace in recorded:
        if only not in trace.name:
            continue
        rows.text(f"trace {trace.name}, 32/8 unless said, flops")
        grouped = of_usual_size(trace)
        if not only_mode:
            baselines(rows, trace.name, drawn(trace, MODES[0], steps), min(seeds, 5), MODES[0], cost)
        for mode in MODES:
            source = grouped if mode.whole_groups else trace
            if source is not None and only_mode in mode.name:
                bar = next((most for name, most in mode.bars.items() if trace.name.startswith(name)), None)
                measure(rows, f"{trace.name} {mode.name}", run(drawn(source, mode, steps), seeds, mode, cost), bar)


def truncated(trace: sb.Trace) -> list[sb.Trace]:
    """Of one trace: a fifth, and a twentieth, of its rollouts cut at the longest length, as most are in training."""
    if not trace.name.startswith("lrm"):
        return []
    cuts = {percent: int(np.percentile(trace.lengths, percent)) for percent in (80, 95)}
    return [
        replace(
            trace,
            name=f"{trace.name} cut at the {percent}th percentile",
            output_tokens=np.minimum(trace.output_tokens, np.maximum(cut - trace.prompt_tokens, 1)),
        )
        for percent, cut in cuts.items()
    ]


def drawn(trace: sb.Trace, mode: Mode, steps: int) -> Make:
    """Rollouts, or whole groups, drawn with replacement: enough for so many steps beside warm-up and tail."""
    count = mode.batch * (steps + 3 * mode.knobs.get("max_skips", 16) + 10)
    if mode.group_sizes:
        return lambda seed: of_sizes(trace, mode.group_sizes, count, seed)
    if mode.whole_groups:
        size = int(np.bincount(trace.group_ids).max())
        count = count // size * size

    source = trace if mode.whole_groups or mode.by_prompt else alone(trace)
    return lambda seed: source.resampled(count, seed)


def of_sizes(trace: sb.Trace, sizes: tuple[int, ...], count: int, seed: int) -> sb.Trace:
    """Groups of these sizes, each as often; a group's members are drawn from one recorded group."""
    rng = np.random.default_rng(seed)
    _, siblings = np.unique(trace.group_ids, return_counts=True)
    members = np.split(np.argsort(trace.group_ids, kind="stable"), np.cumsum(siblings)[:-1])
    drawn_sizes = rng.choice(sizes, round(count / float(np.mean(sizes))))
    rows = np.concatenate([rng.choice(members[rng.integers(len(members))], size) for size in drawn_sizes])
    groups = np.repeat(np.arange(drawn_sizes.size), drawn_sizes)
    return sb.Trace(
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        group_ids=groups,
        name=trace.name,
    )


def of_usual_size(trace: sb.Trace) -> sb.Trace | None:
    """The groups that have as many siblings as most have; None where rollouts have none."""
    sizes = np.bincount(trace.group_ids)
    usual = int(np.bincount(sizes).argmax())
    chosen = sizes[trace.group_ids] == usual
    if usual == 1:
        return None
    prompt, output, groups = (column[chosen] for column in (trace.prompt_tokens, trace.output_tokens, trace.group_ids))
    return sb.Trace(prompt_tokens=prompt, output_tokens=output, group_ids=groups, name=trace.name)


# --- locksteps of one rollout, caps ----------------------------------------------------------------------------------


def lockstep_from_the_window(rows: Rows, seeds: int, steps: int) -> None:
    """Ranks that meet at every micro-batch; ln tok 64/8, one rollout per micro-batch."""
    rows.text("sync='micro_batch': ln tok 64/8, 8 micro-batches of one rollout")
    for width, skips in ((1, 8), (2, 8), (2, 16), (4, 16)):
        knobs = {"max_skips": skips, "sync": "micro_batch", "micro_batches": {"multiple_of": 8}}
        mode = Mode(f"W{width} D{skips}", width, knobs, 64, 8)
        found = run(
            lambda seed: independent(lognormal(64 * (steps + 64), seed)), min(seeds, 5), mode, sb.cost.TokenCost()
        )
        measure(rows, f"locksteps of one rollout, ln tok 64/8 {mode.name}", found)


def capped(rows: Rows, seeds: int, steps: int) -> None:
    """Rank batches cut into micro-batches; lengths stop at a maximum, as they do under max_new_tokens."""
    rows.text("token cap")
    for batch, ranks, longest, cap, quadratic in (
        (16, 4, 8000, 16000, True),
        (64, 32, 6000, 12000, False),
        (32, 8, 32768, 65536, True),
    ):
        kind = ("flops" if quadratic else "tok") + f" cap {cap}"
        cost: sb.cost.CostModel = sb.cost.QuadraticCost() if quadratic else sb.cost.TokenCost()

        def make(seed: int, batch: int = batch, longest: int = longest) -> sb.Trace:
            return independent(np.minimum(lognormal(batch * (steps + 64), seed), longest))

        for width, skips in ((2, 8), (2, 16)):
            knobs = {"max_skips": skips, "micro_batches": {"max_tokens": cap}, "sync": "step"}
            mode = Mode(f"W{width} D{skips}", width, knobs, batch, ranks)
            measure(rows, f"ln {kind} {batch}/{ranks} {mode.name}", run(make, min(seeds, 4), mode, cost))


def main() -> None:
    options = arguments(__doc__, seeds=20, trace_seeds=6, steps=200, traces=None, only="", only_mode="")
    rows = Rows(options.json, options.results)
    if not options.only and not options.only_mode:
        lockstep_from_the_window(rows, options.seeds, options.steps)
        capped(rows, options.seeds, options.steps)
    if not options.only_mode:
        synthetic(rows, options.seeds, options.steps, options.only)
    real(rows, options.traces, options.trace_seeds, options.steps, options.only, options.only_mode)


if __name__ == "__main__":
    main()
