"""verl's own trainer procedure, with verl's two functions and with ours in their place, side by side.

PYTHONPATH=. .venv-peers/bin/python bench/verl_drop_in.py [--json] [--seeds 20]

A batch is split over the ranks with ``get_seqlen_balanced_partitions(equal_size=True)`` on ``calculate_workload``, as
``_balance_batch`` does, and each rank's rows go through ``rearrange_micro_batches``, as jagged TensorDicts. The
all_reduce is replaced by calling again with the neediest rank's count; only that last call is timed.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import torch
from _common import Rows, arguments
from micro_batches import CELLS, Layout, Tally, report
from peers import Ints, lognormal, trace_folder, traces

from stream_balancer.integrations import verl as ours


def rows_of(lengths: Ints) -> Any:
    """What verl hands to its micro-batch former: jagged input_ids."""
    tensordict = importlib.import_module("tensordict")
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets)
    return tensordict.TensorDict({"input_ids": ids}, batch_size=[len(lengths)])


class Trainer:
    """The procedure, with one of the two implementations."""

    def __init__(self, functions: Any, workload: Any) -> None:
        self.functions = functions
        self.workload = workload
        self.deal_ms = self.rank_ms = 0.0
        self.tally = Tally()

    def step(self, lengths: Ints, dp_size: int, cap: int) -> None:
        costs = self.workload(torch.from_numpy(lengths))
        start = time.process_time()
        shares = self.functions.get_seqlen_balanced_partitions(costs, dp_size, equal_size=True)
        self.deal_ms += 1e3 * (time.process_time() - start)
        batches = [rows_of(lengths[share]) for share in shares]
        number, again = 0, True
        while again:  # a rank may need more than it was asked for
            start = time.process_time()
            found = [
                self.functions.rearrange_micro_batches(batch, cap, min_num_micro_batch=number or None)[1]
                for batch in batches
            ]
            ms = 1e3 * (time.process_time() - start) / dp_size
            most = max(len(one) for one in found)
            number, again = most, any(len(one) != most for one in found)
        self.rank_ms += ms
        layout: Layout = [
            [np.asarray(share)[one].tolist() for one in own] for share, own in zip(shares, found, strict=True)
        ]
        self.tally.add(layout, lengths, costs.numpy().astype(np.float64), dp_size, cap, 0.0)


def compare(rows: Rows, label: str, inputs: list[Ints], dp_size: int, cap: int) -> None:
    rows.text(label)
    verl = importlib.import_module("verl.utils.seqlen_balancing")
    trainers = {"verl": Trainer(verl, verl.calculate_workload), "drop-in": Trainer(ours, verl.calculate_workload)}
    for lengths in inputs:
        for trainer in trainers.values():
            trainer.step(lengths, dp_size, cap)
    for name, trainer in trainers.items():
        tally = trainer.tally
        tally.ms = trainer.rank_ms
        report(rows, f"{label}: {name}", tally, None, guaranteed=False)
        rows.add(f"{label}: {name}: time to deal", trainer.deal_ms / tally.count, "ms")
    own, other = (trainers[name].tally for name in ("drop-in", "verl"))
    rows.add(f"{label}: idle over verl's, meeting at every micro-batch", own.idle / other.idle, "x", 1.0)


def main() -> None:
    options = arguments(__doc__, seeds=20, traces=None)
    rows = Rows(options.json, options.results)
    for size, dp_size, cap, _ in CELLS:
        inputs = [lognormal(size, seed).astype(np.int64) for seed in range(options.seeds)]
        compare(rows, f"ln {size}/{dp_size} cap {cap}", inputs, dp_size, cap)
    for trace in traces(trace_folder(options.traces)):
        whole = trace.lengths
        cap = int(2 * whole.max())
        if whole.mean() * 256 > 8 * cap:  # else one micro-batch holds everything
            inputs = [np.random.default_rng(seed).choice(whole, 256) for seed in range(options.seeds)]
            compare(rows, f"{trace.name} 256/8 cap {cap}", inputs, 8, cap)


if __name__ == "__main__":
    main()
