"""Micro-batches under a token cap: idle time if ranks meet at every one, side by side with verl's procedure.

python bench/micro_batches.py [--json] [--seeds 20]
"""

from __future__ import annotations

import time

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, Partitioner, flops, lognormal, peers, trace_folder, traces

from stream_balancer.planning import form_micro_batches

Layout = list[list[list[int]]]
"""[rank][micro_batch] -> positions."""

CELLS = [(1024, 32, 49152, 7.7), (256, 8, 65536, 3.5)]
"""(rollouts, ranks, token cap, most idle % allowed)"""


def verl_layout(kk: Partitioner, lengths: Ints, costs: Floats, num_ranks: int, cap: int) -> tuple[Layout, int]:
    """What verl's trainer and rearrange_micro_batches do together, the all_reduce replaced by knowing all ranks.

    Equal counts per rank by workload; then as many micro-batches as the neediest rank asks for, and one more
    for everybody as long as some micro-batch of some rank is over the cap. -> (layout, retries).
    """
    shares = [np.asarray(share) for share in kk(costs, num_ranks, True)]
    number = max(int(-(-lengths[share].sum() // cap)) for share in shares)
    retries = 0
    while True:
        layout = [
            [share[np.asarray(part, dtype=np.int64)].tolist() for part in kk(costs[share], number, False)]
            for share in shares
        ]
        if all(int(lengths[one].sum()) <= cap for share in layout for one in share):
            break
        number += 1
        retries += 1
    ordered = []
    for share in layout:
        share = sorted(share, key=lambda one: float(costs[one].sum()), reverse=True)
        ordered.append(share[::2][::-1] + share[1::2])
    return ordered, retries


def our_layout(lengths: Ints, costs: Floats, num_ranks: int, cap: int, sync: str) -> Layout:
    ranks = form_micro_batches(
        lengths, costs, num_ranks, max_tokens=cap, sync="micro_batch" if sync == "micro_batch" else "step"
    )
    return [[one.tolist() for one in share] for share in ranks]


class Tally:
    """Sums over seeds."""

    def __init__(self) -> None:
        self.mean = self.highest = self.step_highest = self.ms = 0.0
        self.least = self.over_cap = self.count = 0

    def add(self, layout: Layout, lengths: Ints, costs: Floats, num_ranks: int, cap: int, ms: float) -> None:
        loads = np.array([[costs[one].sum() for one in share] for share in layout])
        self.mean += float(loads.sum()) / num_ranks
        self.highest += float(loads.max(axis=0).sum())
        self.step_highest += float(loads.sum(axis=1).max())
        self.least += int(loads.shape[1] == -(-int(lengths.sum()) // (num_ranks * cap)))
        self.over_cap += sum(int(lengths[one].sum()) > cap for share in layout for one in share)
        self.ms += ms
        self.count += 1

    @property
    def idle(self) -> float:
        """Percent, ranks meeting at every micro-batch."""
        return 100.0 * (1.0 - self.mean / self.highest)

    @property
    def step_idle(self) -> float:
        """Percent, ranks meeting once per step."""
        return 100.0 * (1.0 - self.mean / self.step_highest)


def report(rows: Rows, label: str, tally: Tally, bar: float | None, *, guaranteed: bool) -> None:
    rows.add(f"{label}: idle, meeting at every micro-batch", tally.idle, "%", bar)
    rows.add(f"{label}: idle, meeting once per step", tally.step_idle, "%")
    share = 100.0 * tally.least / tally.count
    rows.add(f"{label}: least possible count", share, "%", 95.0 if guaranteed else None, at_least=True)
    rows.add(f"{label}: micro-batches over the cap", float(tally.over_cap), "n", 0.0 if guaranteed else None)
    rows.add(f"{label}: time", tally.ms / tally.count, "ms")


def compare(
    rows: Rows, label: str, kk: Partitioner | None, inputs: list[Floats], num_ranks: int, cap: int, bar: float | None
) -> None:
    rows.text(label)
    verl = None
    if kk is not None:
        verl, retries = Tally(), 0
        for drawn in inputs:
            lengths, costs = drawn.astype(np.int64), flops(drawn)
            start = time.process_time()
            layout, tried = verl_layout(kk, lengths, costs, num_ranks, cap)
            verl.add(layout, lengths, costs, num_ranks, cap, 1e3 * (time.process_time() - start))
            retries += tried
        report(rows, f"{label}: verl", verl, None, guaranteed=False)
        rows.add(f"{label}: verl: all_reduce retries per step", retries / len(inputs), "n")
    for sync in ("micro_batch", "step"):
        tally = Tally()
        for drawn in inputs:
            lengths, costs = drawn.astype(np.int64), flops(drawn)
            start = time.process_time()
            layout = our_layout(lengths, costs, num_ranks, cap, sync)
            tally.add(layout, lengths, costs, num_ranks, cap, 1e3 * (time.process_time() - start))
        own = sync == "micro_batch"
        report(rows, f"{label}: stream_balancer sync={sync}", tally, bar if own else None, guaranteed=True)
        if own and verl is not None:
            rows.add(f"{label}: idle over verl's", tally.idle / verl.idle, "x", 0.65 if bar is not None else None)


def main() -> None:
    options = arguments(__doc__, seeds=20, traces=None)
    rows = Rows(options.json)
    kk = peers().get("verl (list)")
    for size, num_ranks, cap, bar in CELLS:
        inputs = [lognormal(size, seed) for seed in range(options.seeds)]
        compare(rows, f"ln {size}/{num_ranks} cap {cap}", kk, inputs, num_ranks, cap, bar)
    for trace in traces(trace_folder(options.traces)):
        whole = trace.prompt + trace.output
        cap = int(2 * whole.max())
        inputs = [np.random.default_rng(seed).choice(whole, 256) for seed in range(options.seeds)]
        if whole.mean() * 256 > 8 * cap:  # else one micro-batch holds everything
            compare(rows, f"{trace.name} 256/8 cap {cap}", kk, inputs, 8, cap, None)


if __name__ == "__main__":
    main()
