"""Certificates: what the window idles over a whole run, and what no schedule of the same arrivals gets below.

python bench/certify.py [--json] [--steps 200] [--sizes 32/8/8,32/8/16] [--traces DIR] [--only TEXT] [--counts equal]
[--sync micro_batch]

A size is batch / ranks / max_skips; window and capacity are two batches, the trainer is instant. Under ``--sync
micro_batch`` the token cap is the longest rollout. Statement and proof: results/certificates.md.
"""

from __future__ import annotations

import math
import time

import numpy as np
from _common import Rows, arguments
from certificates import Certificate, certify
from peers import trace_folder, traces

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.tools.generation import Generation
from stream_balancer.tools.simulate import as_policy, report_of
from stream_balancer.tools.simulation_run import Run

SEED = 7


def main() -> None:
    options = arguments(__doc__, steps=200, sizes="32/8/8,32/8/16", traces=None, only="", counts="free", sync="step")
    rows = Rows(options.json, options.results)
    for size in options.sizes.split(","):
        batch, ranks, skips = map(int, size.split("/"))
        for trace in traces(trace_folder(options.traces)):
            if options.only not in trace.name:
                continue
            stream = trace.resampled(batch * options.steps, SEED)
            longest = int(stream.lengths.max())
            config = sb.BalancerConfig(
                dp_size=ranks,
                batch_size=batch,
                window=2 * batch,
                max_skips=skips,
                cost=sb.cost.QuadraticCost(),
                equal_rollouts=options.counts == "equal",
                sync=options.sync,
                micro_batches=sb.MicroBatches(max_tokens=longest if options.sync == "micro_batch" else None),
            )
            fifo = sb.simulate(stream, as_policy(config, "fifo"), seed=SEED).overall
            report, found, proof_s = proven(stream, config)
            rows.add(
                f"{trace.name}, {size}, bound, counts={options.counts}, sync={options.sync}",
                100 * found.idle,
                "%",
                ours=round(100 * report.overall.idle_fraction, 2),
                fifo=round(100 * fifo.idle_fraction, 2),
                delay=round(report.delay_steps.mean, 2),
                cpu_s=round(proof_s, 1),
            )


def proven(stream: sb.Trace, config: sb.BalancerConfig) -> tuple[sb.SimulationReport, Certificate, float]:
    """A run of 128 slots under an instant trainer, the bound of its arrivals, and CPU seconds of the proof."""
    generation = Generation(stream, 128, 30.0, SEED)
    run = Run(stream, BalancerCore(config), generation, math.inf)
    run.to_the_end(None)
    order = np.argsort(run.accepted_step, kind="stable")
    began_s = time.process_time()
    found = certify(
        np.array(run.cost_list)[order],
        run.accepted_step[order],
        batch_size=config.batch_size,
        ranks=config.dp_size,
        max_skips=config.max_skips,
        equal_counts=config.equal_rollouts,
        tokens=stream.lengths[order] if config.sync == "micro_batch" else None,
        max_tokens=config.micro_batches.max_tokens or 1,
    )
    return report_of(run, None), found, time.process_time() - began_s


if __name__ == "__main__":
    main()
