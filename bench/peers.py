"""Common to the planning benchmarks: length streams and other projects' partitioners.

Peers are optional: those that do not import are left out, and the benchmark says so. Environment: bench/peers.txt.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_balancer.tools.generation import Generation, check_generation
from stream_balancer.tools.trace import Trace, load_trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Partitioner = Callable[[Floats, int, bool], list[list[int]]]
"""(costs, ranks, equal counts) -> positions per rank."""

REPOSITORY = Path(__file__).resolve().parent.parent


# --- streams ---------------------------------------------------------------------------------------------------------


def lognormal(n: int, seed: int) -> Floats:
    """Lengths of mean 4096, sigma 1, clipped to 64 .. 32768."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(4096) - 0.5, 1.0, n), 64, 32768).round()


def finish_times(
    trace: Trace, slots: int = 128, tokens_per_second: float = 30.0, seed: int = 0, *, whole_groups: bool = False
) -> Floats:
    """[n] seconds at which each row's rollout is finished, from 0, where nothing ever waits for room; the recorded
    arrivals where there are any. Second 0 is in mid-run, see :class:`Generation`, also for ``whole_groups``."""
    check_generation(slots, tokens_per_second)
    generation = Generation(trace, slots, tokens_per_second, seed, whole_groups=whole_groups)
    finish = np.empty(len(trace))
    while (now := generation.next_finish) < math.inf:
        row = generation.pop(0)
        if row is not None:
            finish[row] = now
            generation.release(now, 0)
    return finish


def flops(lengths: Floats) -> Floats:
    """The cost of a 7B model's layer in token units: quadratic attention and the linear rest."""
    return lengths * lengths + 24576.0 * lengths


COSTS: dict[str, Callable[[Floats], Floats]] = {"tok": lambda lengths: lengths, "flops": flops}


def trace_folder(given: str | None) -> Path | None:
    """Where the traces are: --traces, STREAM_BALANCER_TRACES, or ../shared/traces if present."""
    for folder in (given, os.environ.get("STREAM_BALANCER_TRACES"), REPOSITORY.parent / "shared" / "traces"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    return None


def traces(folder: Path | None) -> Iterator[Trace]:
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]) if folder else []:
        yield load_trace(path)


# --- peers -----------------------------------------------------------------------------------------------------------


def part(trace: Trace, rows: slice) -> Trace:
    """The trace of some consecutive rollouts."""
    columns = ("prompt_tokens", "output_tokens", "group_ids", "arrival_s")
    kept = {name: column[rows] for name in columns if (column := getattr(trace, name)) is not None}
    return replace(trace, **kept)


def alone(trace: Trace) -> Trace:
    """The same rollouts, none of them another's sibling, without recorded arrivals: drawn one by one by resampled()."""
    return replace(trace, group_ids=np.arange(len(trace)), arrival_s=None)


def peers() -> dict[str, Partitioner]:
    """Every peer that imports here."""
    found: dict[str, Partitioner] = {}
    for name, load in _LOADERS.items():
        try:
            found[name] = load()
        except Exception as reason:  # noqa: BLE001 - a peer may fail to import in any way; it is only left out
            print(f"left out: {name}: {type(reason).__name__}: {str(reason)[:120]}", file=sys.stderr)
    return found


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _verl_list() -> Partitioner:
    kk = _module("verl.utils.seqlen_balancing").get_seqlen_balanced_partitions
    return lambda costs, ranks, equal: kk([int(c) for c in costs.tolist()], ranks, equal_size=equal)


def _verl_tensor() -> Partitioner:
    """As verl's trainer calls it: with the tensor that calculate_workload returns."""
    kk, torch = _module("verl.utils.seqlen_balancing").get_seqlen_balanced_partitions, _module("torch")
    return lambda costs, ranks, equal: kk(torch.tensor(costs.astype(np.int64)), ranks, equal_size=equal)


def _openrlhf() -> Partitioner:
    kk = _module("openrlhf.utils.seqlen_balancing").get_seqlen_balanced_partitions
    return lambda costs, ranks, equal: kk([int(c) for c in costs.tolist()], ranks, equal_size=equal)


def _transferqueue() -> Partitioner:
    kk = _module("transfer_queue.sampler.seqlen_balanced_sampler").get_seqlen_balanced_partitions
    return lambda costs, ranks, equal: kk([int(c) for c in costs.tolist()], ranks, equal_size=equal)


def _areal_greedy() -> Partitioner:
    greedy = _module("areal.utils.seqpack").balanced_greedy_partition
    return lambda costs, ranks, equal: greedy([int(c) for c in costs.tolist()], ranks)


def _areal_ffd() -> Partitioner:
    ffd = _module("areal.utils.seqpack").ffd_allocate

    def allocate(costs: Floats, ranks: int, equal: bool) -> list[list[int]]:
        """First-fit decreasing at the tightest capacity that still gives `ranks` groups, in steps of 2 %."""
        capacity = max(costs.sum() / ranks, costs.max())
        while True:
            groups: list[list[int]] = ffd([int(c) for c in costs.tolist()], int(capacity), ranks)
            if len(groups) <= ranks:
                return groups
            capacity *= 1.02

    return allocate


def _prtpy(algorithm: str) -> Callable[[], Partitioner]:
    def load() -> Partitioner:
        prtpy = _module("prtpy")
        method = getattr(_module(f"prtpy.partitioning.{algorithm}"), "optimal", None) or getattr(
            prtpy.partitioning, algorithm
        )

        def allocate(costs: Floats, ranks: int, equal: bool) -> list[list[int]]:
            items = {index: int(cost) for index, cost in enumerate(costs.tolist())}
            parts: list[list[int]] = prtpy.partition(algorithm=method, numbins=ranks, items=items)
            return parts

        allocate(np.array([3.0, 2.0, 2.0, 1.0]), 2, False)
        return allocate

    return load


def _numberpartitioning() -> Partitioner:
    kk = _module("numberpartitioning").karmarkar_karp

    def allocate(costs: Floats, ranks: int, equal: bool) -> list[list[int]]:
        parts: list[list[int]] = kk([int(c) for c in costs.tolist()], num_parts=ranks, return_indices=True).partition
        return parts

    allocate(np.array([3.0, 2.0, 2.0, 1.0]), 2, False)
    return allocate


_LOADERS: dict[str, Callable[[], Partitioner]] = {
    "verl (list)": _verl_list,
    "verl (as called)": _verl_tensor,
    "openrlhf": _openrlhf,
    "transferqueue": _transferqueue,
    "areal greedy": _areal_greedy,
    "areal ffd": _areal_ffd,
    "prtpy kk": _prtpy("karmarkar_karp"),
    "numberpartitioning kk": _numberpartitioning,
}
SUPPORT_EQUAL = {"verl (list)", "verl (as called)", "openrlhf", "transferqueue", "areal greedy"}
