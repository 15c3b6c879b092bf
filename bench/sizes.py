"""Where a partition of the oldest rollouts suffices, and where a window earns its delay: idle time by size of step.

python bench/sizes.py [--json] [--traces DIR] [--steps 120] [--seeds 2] [--only TEXT]

Recorded lengths, or the built-in models where there are none, drawn with replacement; quadratic cost, as many slots as
four steps have rollouts, in mid-run. The knobs are the defaults: the window adds one step of mean delay.
"""

from __future__ import annotations

from statistics import fmean

from _common import Rows, arguments
from peers import trace_folder, traces

import stream_balancer as sb
from stream_balancer.config import Policy

SIZES = [(32, 8), (64, 8), (128, 8), (512, 8), (128, 32), (256, 32), (512, 32), (256, 64), (512, 64), (1024, 64)]
"""Rollouts of a step, ranks."""
MODELS = ["rg", "misguided", "lrm", "lognormal", "tau"]
POLICIES: dict[Policy, str] = {
    "round_robin": "round-robin",
    "fifo": "arrival order, best partition",
    "window": "window",
}


def idle(trace: sb.Trace, batch_size: int, ranks: int, policy: Policy, seed: int) -> float:
    """Percent of rank time spent waiting for the slowest rank."""
    window = (2 if policy == "window" else 1) * batch_size
    config = sb.BalancerConfig(
        dp_size=ranks, batch_size=batch_size, window=window, cost=sb.cost.QuadraticCost(), policy=policy
    )
    return 100.0 * sb.simulate(trace, config, slots=4 * batch_size, seed=seed, tolerance=0.001).idle_fraction


def main() -> None:
    options = arguments(__doc__, traces=None, steps=120, seeds=2, only="")
    rows = Rows(options.json, options.results)
    recorded = list(traces(trace_folder(options.traces))) or [sb.generate_trace(20_000, name) for name in MODELS]
    for lengths in recorded:
        for batch_size, ranks in SIZES:
            cell = f"{lengths.name} {batch_size}/{ranks}"
            if options.only not in cell:
                continue
            streams = [lengths.resampled(batch_size * options.steps, seed) for seed in range(options.seeds)]
            for policy, name in POLICIES.items():
                found = [idle(stream, batch_size, ranks, policy, seed) for seed, stream in enumerate(streams)]
                least, most = round(min(found), 2), round(max(found), 2)
                rows.add(f"{cell}: {name}: idle", fmean(found), "%", least=least, most=most)


if __name__ == "__main__":
    main()
