"""Where a partition of the oldest rollouts suffices, and where a window earns its delay: idle time by size of step.

python bench/sizes.py [--json] [--steps 100] [--seeds 3] [--only TEXT]

The built-in length models through the simulator, quadratic cost, as many generation slots as four steps have rollouts.
The knobs are the defaults; the window adds one step of mean delay.
"""

from __future__ import annotations

from statistics import fmean

from _common import Rows, arguments

import stream_balancer as sb
from stream_balancer.config import Policy

SIZES = [(32, 8), (64, 8), (128, 8), (512, 8), (128, 32), (256, 32), (512, 32), (256, 64), (512, 64), (1024, 64)]
LENGTHS = ["rg", "misguided", "lrm", "lognormal", "tau"]
POLICIES: dict[Policy, str] = {
    "round_robin": "round-robin",
    "fifo": "arrival order, best partition",
    "window": "window",
}


def idle(lengths: str, batch_size: int, ranks: int, policy: Policy, steps: int, seed: int) -> float:
    """Percent of rank time spent waiting for the slowest rank."""
    config = sb.BalancerConfig(dp_size=ranks, batch_size=batch_size, cost=sb.QuadraticCost(), policy=policy)
    trace = sb.generate_trace(batch_size * steps, lengths, seed=seed)
    report = sb.simulate(trace, config, slots=4 * batch_size, seed=seed, tolerance=0.001)
    return 100.0 * report.idle_fraction


def main() -> None:
    options = arguments(__doc__, steps=100, seeds=3, only="")
    rows = Rows(options.json)
    for lengths in LENGTHS:
        for batch_size, ranks in SIZES:
            cell = f"{lengths} {batch_size}/{ranks}"
            if options.only not in cell:
                continue
            seeds = range(options.seeds if batch_size <= 256 else 1)
            for policy, name in POLICIES.items():
                found = [idle(lengths, batch_size, ranks, policy, options.steps, seed) for seed in seeds]
                rows.add(f"{cell}: {name}: idle", fmean(found), "%", least=min(found), most=max(found))


if __name__ == "__main__":
    main()
