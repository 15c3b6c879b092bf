"""Partition: how far above the lower bound, and how long it takes, side by side with other projects in one run.

python bench/partition.py [--json] [--seeds 20] [--quick]      table, or one JSON object per row
"""

from __future__ import annotations

import importlib
import time

import numpy as np
from _common import Rows, arguments
from peers import COSTS, SUPPORT_EQUAL, Floats, Partitioner, flops, lognormal, peers, trace_folder, traces

from stream_balancer.planning import lower_bound, split

SIZES = [(32, 8), (64, 8), (256, 8), (512, 32), (1024, 64), (4096, 128), (16384, 512)]
EQUAL_BARS = {(32, 8): 0.5, (64, 8): 0.1}
FASTER_THAN_VERL = {(512, 32): 20.0, (1024, 64): 50.0, (4096, 128): 150.0}
PEER_LIMIT_MS = 4000.0  # a peer that takes longer is tried once, and not at larger sizes


def excess(costs: Floats, shares: list[list[int]], dp_size: int, equal: bool) -> float:
    """Percent above the lower bound."""
    finish = max(float(costs[np.asarray(share, dtype=np.int64)].sum()) for share in shares)
    return 100.0 * (finish / lower_bound(costs, dp_size, equal_rollouts=equal) - 1.0)


def ours(tolerance: float) -> Partitioner:
    def run(costs: Floats, dp_size: int, equal: bool) -> list[list[int]]:
        return [share.tolist() for share in split(costs, dp_size, equal_rollouts=equal, tolerance=tolerance)]

    return run


def measure(method: Partitioner, inputs: list[Floats], dp_size: int, equal: bool) -> tuple[float, float]:
    """-> (mean excess in percent, mean milliseconds)."""
    excesses, times = [], []
    for costs in inputs:
        start = time.process_time()
        shares = method(costs, dp_size, equal)
        ms = 1e3 * (time.process_time() - start)
        excesses.append(excess(costs, shares, dp_size, equal))
        times.append(ms)
        if ms > PEER_LIMIT_MS:
            break
    return float(np.mean(excesses)), float(np.mean(times))


def side_by_side(rows: Rows, others: dict[str, Partitioner], seeds: int, sizes: list[tuple[int, int]]) -> None:
    too_slow: set[tuple[str, bool]] = set()
    for size, dp_size in sizes:
        for equal in (False, True):
            for kind, cost in COSTS.items():
                label = f"{size}/{dp_size} {'equal' if equal else 'free'} {kind}"
                rows.text(label)
                inputs = [cost(lognormal(size, seed)) for seed in range(seeds)]
                mean, own_ms = measure(ours(1e-4), inputs, dp_size, equal)
                bar = EQUAL_BARS.get((size, dp_size), 0.01) if equal else (0.01 if size >= 256 else None)
                rows.add(f"{label}: stream_balancer excess", mean, "%", bar)
                rows.add(f"{label}: stream_balancer time", own_ms, "ms")
                mean, ms = measure(ours(2e-6), inputs, dp_size, equal)
                rows.add(f"{label}: stream_balancer tight excess", mean, "%")
                rows.add(f"{label}: stream_balancer tight time", ms, "ms")
                for name, method in others.items():
                    if (equal and name not in SUPPORT_EQUAL) or (name, equal) in too_slow:
                        continue
                    if kind == "flops" and not name.startswith("verl (list)"):
                        continue
                    count = seeds if size <= 512 else min(seeds, 3)
                    mean, ms = measure(method, inputs[:count], dp_size, equal)
                    if ms > PEER_LIMIT_MS / 4:
                        too_slow.add((name, equal))
                    rows.add(f"{label}: {name} excess", mean, "%")
                    rows.add(f"{label}: {name} time", ms, "ms")
                    if name == "verl (list)":
                        if not equal and (size, dp_size) in FASTER_THAN_VERL:
                            least = FASTER_THAN_VERL[size, dp_size]
                            rows.add(f"{label}: times faster than verl", ms / own_ms, "x", least, at_least=True)
                        if equal:
                            rows.add(f"{label}: time over verl's", own_ms / ms, "x", 2.0 if size > 64 else None)
                            if size <= 64:
                                rows.add(f"{label}: time, small", own_ms, "ms", max(1.5, 2 * ms))


def against_exact(rows: Rows, seeds: int) -> None:
    """32 rollouts on 8 ranks: an exact solver's optimum (proven or the best found in 20 s)."""
    try:
        cp_model = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        return
    rows.text("32/8 against the exact optimum")
    for equal in (False, True):
        gaps, proven = [], 0
        for seed in range(seeds):
            costs = lognormal(32, seed)
            optimum, is_proven = _exact(cp_model, costs, 8, equal)
            proven += is_proven
            shares = ours(1e-6)(costs, 8, equal)
            gaps.append(100.0 * (max(float(costs[share].sum()) for share in shares) / optimum - 1.0))
        label = f"32/8 {'equal' if equal else 'free'} tok"
        rows.add(f"{label}: over the exact optimum, mean", float(np.mean(gaps)), "%", 0.1)
        rows.add(f"{label}: over the exact optimum, worst", float(np.max(gaps)), "%")
        rows.add(f"{label}: optimum proven", 100.0 * proven / seeds, "%")


def _exact(cp_model, costs: Floats, dp_size: int, equal: bool) -> tuple[float, bool]:  # type: ignore[no-untyped-def]
    model = cp_model.CpModel()
    n = costs.size
    on = [[model.new_bool_var("") for _ in range(dp_size)] for _ in range(n)]
    latest = model.new_int_var(int(lower_bound(costs, dp_size)), int(costs.sum()), "")
    for i in range(n):
        model.add_exactly_one(on[i])
    for rank in range(dp_size):
        model.add(sum(int(costs[i]) * on[i][rank] for i in range(n)) <= latest)
        if equal:
            model.add(sum(on[i][rank] for i in range(n)) == n // dp_size)
    by_cost = np.argsort(-costs)
    for place in range(dp_size - 1):  # ranks are alike: the heaviest rollouts pick them in order
        for rank in range(place + 1, dp_size):
            model.add(on[int(by_cost[place])][rank] == 0)
    for i, share_of in enumerate(_rank_of(split(costs, dp_size, equal_rollouts=equal), n)):
        model.add_hint(on[i][share_of], 1)
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 20.0
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return float(solver.objective_value), bool(status == cp_model.OPTIMAL)


def _rank_of(shares: list[np.ndarray[tuple[int], np.dtype[np.int64]]], n: int) -> list[int]:
    rank_of = np.zeros(n, dtype=np.int64)
    for rank, share in enumerate(shares):
        rank_of[share] = rank
    ranks: list[int] = rank_of.tolist()
    return ranks


def on_traces(rows: Rows, folder: str | None, seeds: int) -> None:
    for trace in traces(trace_folder(folder)):
        rows.text(f"trace {trace.name}")
        for size, dp_size in ((32, 8), (256, 8), (1024, 64)):
            for equal in (False, True):
                lengths = trace.lengths.astype(np.float64)
                drawn = [np.random.default_rng(seed).choice(lengths, size) for seed in range(seeds)]
                mean, ms = measure(ours(1e-4), [flops(one) for one in drawn], dp_size, equal)
                label = f"{trace.name} {size}/{dp_size} {'equal' if equal else 'free'} flops"
                rows.add(f"{label}: excess", mean, "%")
                rows.add(f"{label}: time", ms, "ms")


def odd_costs(rows: Rows, seeds: int) -> None:
    """A part of the rollouts that costs nothing; two kinds, where light ones must lie beside heavy ones."""
    rows.text("rollouts of zero cost; a few heavy ones under equal counts")
    for zero in (0.25, 0.5, 0.75):
        inputs = [lognormal(4096, seed) * (np.random.default_rng(seed).random(4096) >= zero) for seed in range(seeds)]
        mean, ms = measure(ours(1e-4), inputs, 128, equal=False)
        rows.add(f"4096/128 free tok, {zero:.0%} zero: excess", mean, "%", 0.05)
        rows.add(f"4096/128 free tok, {zero:.0%} zero: time", ms, "ms")
    for heavy in (9, 12, 17, 20):
        drawn = [np.random.default_rng(seed).normal(1.0, 0.01, 64) for seed in range(seeds)]
        inputs = [(one * np.repeat([30_000.0, 500.0], [heavy, 64 - heavy])).round() for one in drawn]
        mean, _ = measure(ours(1e-4), inputs, 8, equal=True)
        rows.add(f"64/8 equal, {heavy} of 30,000 and the rest of 500: excess", mean, "%", 0.5)


def main() -> None:
    options = arguments(__doc__, seeds=20, quick=False, traces=None)
    rows = Rows(options.json, options.results)
    split(lognormal(64, 0), 8)  # warm up
    side_by_side(rows, peers(), options.seeds, SIZES[:3] if options.quick else SIZES)
    odd_costs(rows, options.seeds)
    on_traces(rows, options.traces, options.seeds)
    if not options.quick:
        against_exact(rows, min(options.seeds, 8))


if __name__ == "__main__":
    main()
