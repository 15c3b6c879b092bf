"""Micro-batches under a token cap: idle time if ranks meet at every one, or once per step, beside verl's procedure.

python bench/micro_batches.py [--json] [--seeds 20]

The second part has the cap at the longest rollout and few rollouts a rank, the case in which the least number of
micro-batches and balance are at odds. Idle time counts the overhead of a micro-batch as idle, and padding copies too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from _common import Rows, arguments
from peers import Floats, Ints, Partitioner, flops, lognormal, peers, trace_folder, traces

from stream_balancer.planning import form_micro_batches, lower_bound

Layout = list[list[list[int]]]
"""[rank][micro_batch] -> positions."""

CostsOf = Callable[[Ints], Floats]

CELLS = [(1024, 32, 49152, 7.7), (256, 8, 65536, 3.5)]
"""(rollouts, ranks, token cap, most idle % allowed)"""


def verl_layout(kk: Partitioner, lengths: Ints, costs: Floats, dp_size: int, cap: int) -> tuple[Layout, int]:
    """What verl's trainer and rearrange_micro_batches do together, the all_reduce replaced by knowing all ranks.

    Equal counts per rank by workload; then as many micro-batches as the neediest rank asks for, and one more
    for everybody as long as some micro-batch of some rank is over the cap. -> (layout, retries).
    """
    shares = [np.asarray(share) for share in kk(costs, dp_size, True)]
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


def our_layout(lengths: Ints, costs: Floats, dp_size: int, cap: int, sync: str) -> Layout:
    ranks = form_micro_batches(
        lengths, costs, dp_size, max_tokens=cap, sync="micro_batch" if sync == "micro_batch" else "step"
    )
    return [[one.tolist() for one in share] for share in ranks]


class Tally:
    """Sums over seeds."""

    def __init__(self) -> None:
        self.mean = self.highest = self.step_highest = self.ms = 0.0
        self.least = self.over_cap = self.count = 0

    def add(self, layout: Layout, lengths: Ints, costs: Floats, dp_size: int, cap: int, ms: float) -> None:
        loads = np.zeros((dp_size, max(map(len, layout))))  # where counts are free, a rank may have fewer
        for rank, share in enumerate(layout):
            loads[rank, : len(share)] = [costs[one].sum() for one in share]
        self.mean += float(loads.sum()) / dp_size
        self.highest += float(loads.max(axis=0).sum())
        self.step_highest += float(loads.sum(axis=1).max())
        self.least += int(loads.shape[1] == -(-int(lengths.sum()) // (dp_size * cap)))
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
    rows.add(f"{label}: least possible count", share, "%")  # one more is taken where it saves more than it costs
    rows.add(f"{label}: micro-batches over the cap", float(tally.over_cap), "n", 0.0 if guaranteed else None)
    rows.add(f"{label}: time", tally.ms / tally.count, "ms")


def compare(
    rows: Rows, label: str, kk: Partitioner | None, inputs: list[Floats], dp_size: int, cap: int, bar: float | None
) -> None:
    rows.text(label)
    verl = None
    if kk is not None:
        verl, retries = Tally(), 0
        for drawn in inputs:
            lengths, costs = drawn.astype(np.int64), flops(drawn)
            start = time.process_time()
            layout, tried = verl_layout(kk, lengths, costs, dp_size, cap)
            verl.add(layout, lengths, costs, dp_size, cap, 1e3 * (time.process_time() - start))
            retries += tried
        report(rows, f"{label}: verl", verl, None, guaranteed=False)
        rows.add(f"{label}: verl: all_reduce retries per step", retries / len(inputs), "n")
    for sync in ("micro_batch", "step"):
        tally = Tally()
        for drawn in inputs:
            lengths, costs = drawn.astype(np.int64), flops(drawn)
            start = time.process_time()
            layout = our_layout(lengths, costs, dp_size, cap, sync)
            tally.add(layout, lengths, costs, dp_size, cap, 1e3 * (time.process_time() - start))
        own = sync == "micro_batch"
        report(rows, f"{label}: stream_balancer sync={sync}", tally, bar if own else None, guaranteed=True)
        if own and verl is not None:
            rows.add(f"{label}: idle over verl's", tally.idle / verl.idle, "x", 0.65 if bar is not None else None)


# --- ranks meet once per step, cap = longest --------------------------------------------------------------------------

LIKE = {"like LongAlign": (14_000, 0.55, 65_536), "like SWE-smith": (30_000, 0.7, 131_072)}
"""Lognormal lengths: median, sigma, longest; 8,192 at least."""

SIZES = [(16, 8), (32, 8), (64, 8), (128, 32), (256, 32)]
PERCENT = (0, 1, 2, 5)
"""What a micro-batch costs whatever is in it, in percent of a rank's mean work."""

FIRST_SEED = 9_000
"""Of draws that nothing was tuned on."""


def odc_seconds(lengths: Ints) -> Floats:
    """The fit of On-Demand Communication's authors for a 7B model, seconds of forward and backward."""
    x = lengths / 32_000.0
    seconds: Floats = 4.348 * x * x + 8.768 * x
    return seconds


def trace_flops(lengths: Ints) -> Floats:
    return flops(lengths.astype(np.float64))


def like(name: str, size: int, seed: int) -> Ints:
    median, sigma, longest = LIKE[name]
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, size)
    return np.clip(drawn, 8_192, longest).astype(np.int64)


def finish_of(layout: Layout, costs: Floats, overhead: float, equal_number: bool) -> float:
    """When the last rank is done. A padding copy is a micro-batch without work."""
    most = max(map(len, layout))
    return max(
        sum(float(costs[one].sum()) for one in share) + overhead * (most if equal_number else max(len(share), 1))
        for share in layout
    )


class Finish:
    """Sums over draws of when the last rank is done, and of what could be."""

    def __init__(self, kk: Partitioner | None, dp_size: int, percent: int, equal_number: bool) -> None:
        self._kk, self._dp_size, self._percent, self._equal_number = kk, dp_size, percent, equal_number
        self.mean = self.ours = self.verl = self.bound = self.ms = 0.0
        self.count = 0

    def add(self, lengths: Ints, costs: Floats) -> None:
        equal_number, dp_size, cap = self._equal_number, self._dp_size, int(lengths.max())
        overhead = self._percent / 100.0 * float(costs.sum()) / dp_size
        start = time.process_time()
        ranks = form_micro_batches(
            lengths, costs, dp_size, max_tokens=cap, equal_number=equal_number, overhead_cost=overhead
        )
        self.ms += 1e3 * (time.process_time() - start)
        ours = finish_of([[one.tolist() for one in share] for share in ranks], costs, overhead, equal_number)
        self.mean += float(costs.sum()) / dp_size
        self.ours += ours
        self.count += 1
        self.bound += lower_bound(costs, dp_size) + overhead
        if self._kk is not None:
            self.verl += finish_of(
                verl_layout(self._kk, lengths, costs, dp_size, cap)[0], costs, overhead, equal_number
            )

    def idle(self, finish: float) -> float:
        """Percent, the overhead counted."""
        return 100.0 * (1.0 - self.mean / finish)


def cap_at_longest(
    rows: Rows, label: str, kk: Partitioner | None, drawn: list[Ints], costs_of: CostsOf, dp_size: int
) -> None:
    for percent in PERCENT:
        for equal_number in (True, False):
            tally = Finish(kk, dp_size, percent, equal_number)
            for lengths in drawn:
                tally.add(lengths, costs_of(lengths))
            name = f"{label} cap = longest, overhead {percent} %, {'equal' if equal_number else 'free'} numbers"
            bound = tally.idle(tally.bound)
            bar = bound + (1.0 if equal_number or not percent else 2.5)
            rows.add(
                f"{name}: idle",
                tally.idle(tally.ours),
                "%",
                bar if dp_size == 8 else None,
                ms=round(tally.ms / tally.count, 2),
                bound=round(bound, 2),
                verl=None if kk is None else round(tally.idle(tally.verl), 2),
            )


def main() -> None:
    options = arguments(__doc__, seeds=20, traces=None)
    rows = Rows(options.json, options.results)
    kk = peers().get("verl (list)")
    for size, dp_size, cap, bar in CELLS:
        inputs = [lognormal(size, seed) for seed in range(options.seeds)]
        compare(rows, f"ln {size}/{dp_size} cap {cap}", kk, inputs, dp_size, cap, bar)
    for trace in traces(trace_folder(options.traces)):
        whole = trace.lengths.astype(np.float64)
        cap = int(2 * whole.max())
        inputs = [np.random.default_rng(seed).choice(whole, 256) for seed in range(options.seeds)]
        if whole.mean() * 256 > 8 * cap:  # else one micro-batch holds everything
            compare(rows, f"{trace.name} 256/8 cap {cap}", kk, inputs, 8, cap, None)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    for name in LIKE:
        for size, dp_size in SIZES:
            few = [like(name, size, seed) for seed in (seeds if dp_size == 8 else seeds[:6])]
            cap_at_longest(rows, f"{name} {size}/{dp_size}", kk, few, odc_seconds, dp_size)
    for trace in traces(trace_folder(options.traces)):
        few = [np.random.default_rng(seed).choice(trace.lengths, 32) for seed in seeds[:6]]
        cap_at_longest(rows, f"{trace.name} 32/8", kk, few, trace_flops, 8)


if __name__ == "__main__":
    main()
