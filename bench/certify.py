"""Certificates: what the window idles over a whole run, and what no schedule of the same arrivals gets below.

python bench/certify.py [--json] [--steps 200] [--sizes 32/8/8,32/8/16] [--traces DIR] [--only TEXT] [--counts equal]
[--sync micro_batch]

A size is batch / ranks / max_skips; window and capacity are two batches, the trainer is instant. Under ``--sync
micro_batch`` the token cap is the longest rollout. Statement and proof: results/certificates.md.
"""

from __future__ import annotations

import itertools
import time

from _common import Rows, arguments
from peers import trace_folder, traces

import stream_balancer as sb
from stream_balancer.tools.simulate import as_policy

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
            run, proof_s = proven(stream, config)
            ours, found = run.overall, run.certificate
            assert found is not None
            rows.add(
                f"{trace.name}, {size}, bound, counts={options.counts}, sync={options.sync}",
                100 * found.idle,
                "%",
                ours=round(100 * ours.idle_fraction, 2),
                fifo=round(100 * fifo.idle_fraction, 2),
                delay=round(run.delay_steps.mean, 2),
                cpu_s=round(proof_s, 1),
            )


def proven(stream: sb.Trace, config: sb.BalancerConfig) -> tuple[sb.SimulationReport, float]:
    """A certified run, and CPU seconds of its proof."""
    ticks: list[tuple[int, float]] = []
    run = sb.simulate(
        stream,
        config,
        seed=SEED,
        certify=True,
        progress=lambda done: ticks.append((done, time.process_time())),
    )
    # progress begins once more with the proof
    began_s = max(at_s for (done, at_s), (after, _) in itertools.pairwise(ticks) if after < done)
    return run, ticks[-1][1] - began_s


if __name__ == "__main__":
    main()
