"""In which micro-batch: the same number of micro-batches on every rank, under a hard token cap.

    free counts         the step is to be over as early as possible (bins_on_ranks.py)
    equal counts        which rank gets a rollout is settled first (partition.py), and each packs its own; in locksteps
                        ranks then exchange rollouts for as many
    padded              a bin costs rollouts x longest: neighbours in length share a bin, and the cuts are such that
                        the costliest bin is as cheap as can be

packing.py fills the micro-batches. Pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Counts, Ints, Order, Oversize, Sync, rounded_up
from .bins_on_ranks import bins_in_rows, bins_to_ranks, least_finish, rows_alike
from .packing import Bins, Packer
from .partition import split

_Bin = TypeVar("_Bin")


class OversizeError(ValueError):
    """A rollout is longer than the token cap and the policy is to refuse it."""


def form_micro_batches(
    lengths: ArrayLike,
    costs: ArrayLike,
    dp_size: int,
    *,
    max_tokens: int | None = None,
    sync: Sync = "step",
    counts: Counts = "free",
    padded: bool = False,
    micro_batch_counts: Counts = "equal",
    overhead_cost: float = 0.0,
    multiple_of: int = 1,
    order: Order = "heaviest_first",
    oversize: Oversize = "refuse",
    rotation: int = 0,
) -> list[list[Ints]]:
    """Lay rollouts out as ``[rank][micro_batch]`` -> ascending positions.

    Args:
        lengths: [n] tokens, >= 1.
        costs: [n] work, finite and >= 0.
        dp_size: number of ranks.
        max_tokens: no micro-batch holds more tokens than this (rollouts x longest if `padded`); None = no cap.
        sync: "step": ranks meet once per step, so rank totals are balanced; "micro_batch": they meet at every
            micro-batch, so micro-batches of the same index are made alike.
        counts: "equal": rollouts per rank differ by at most one.
        padded: a micro-batch costs rollouts x its costliest, and the cap counts the padding.
        micro_batch_counts: "equal": as many micro-batches on every rank; "free": each rank its own number, where ranks
            meet once per step.
        overhead_cost: work of a micro-batch beside its rollouts', in the unit of `costs`. With "step" the latest
            `work + overhead_cost * micro-batches` is made as early as it can be.
        multiple_of: the number of micro-batches is a multiple of this (virtual pipelines).
        order: "heaviest_first", or "pipeline": the smaller ones at both ends, where the pipeline is filling or
            draining.
        oversize: a rollout longer than max_tokens is refused, or sits alone in its micro-batch.
        rotation: rotates rank labels (pass the step).

    Returns:
        No micro-batch is empty. With "equal" every rank has the same number of them, but a rank with fewer rollouts
        than that: its list is shorter, and the caller completes it with padding copies, one token of weight zero each.

    Raises:
        OversizeError: a rollout is longer than max_tokens and oversize="refuse".
        ValueError: lengths and costs differ in shape, or multiple_of < 1; and as for `partition`.

    Complexity: O(n log n) per number of micro-batches tried; the search in lockstep has a fixed work budget.

    Examples:
        >>> lengths = [900, 700, 500, 400, 300, 200]
        >>> form_micro_batches(lengths, lengths, dp_size=2, max_tokens=1000)  # [900, 600] and [800, 700] tokens
        [[array([0]), array([3, 5])], [array([2, 4]), array([1])]]
        >>> form_micro_batches(lengths, lengths, dp_size=2, max_tokens=1800, padded=True)  # rollouts x longest
        [[array([2, 3]), array([4, 5])], [array([0]), array([1])]]
        >>> lengths = [900, 500, 500, 500]
        >>> form_micro_batches(lengths, lengths, dp_size=2, max_tokens=1000)  # as many on both
        [[array([0]), array([3])], [array([1]), array([2])]]
        >>> form_micro_batches(lengths, lengths, dp_size=2, max_tokens=1000, micro_batch_counts="free")
        [[array([0]), array([3])], [array([1, 2])]]
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(costs, dtype=np.float64)
    if tokens.shape != work.shape or tokens.ndim != 1:
        raise ValueError(f"lengths {tokens.shape} and costs {work.shape} must be one-dimensional and alike.")
    if multiple_of < 1:
        raise ValueError(f"multiple_of ({multiple_of}) must be >= 1.")
    if tokens.size == 0:
        return [[] for _ in range(dp_size)]
    if max_tokens is not None and oversize == "refuse" and int(tokens.max()) > max_tokens:
        raise OversizeError(
            f"a rollout of {int(tokens.max())} tokens is longer than max_tokens ({max_tokens}): no micro-batch can "
            "hold it. Raise max_tokens, truncate the rollout, or choose oversize='alone'."
        )
    packer = Packer(tokens, work, max_tokens, padded)
    if counts == "equal":
        each = [share.tolist() for share in split(work, dp_size, counts, rotation=rotation)]
        ranks = packer.evened(each, multiple_of, micro_batch_counts)
        if sync == "micro_batch" and not padded and max(map(len, ranks)) > 1:
            ranks = rows_alike(packer, ranks)
    elif padded:
        ranks = _padded(packer, dp_size, sync, multiple_of, rotation)
    else:
        ranks = least_finish(packer, dp_size, sync, micro_batch_counts, overhead_cost, multiple_of, rotation=rotation)
    return [[np.array(sorted(one), dtype=np.int64) for one in in_order(bins, packer.cost, order)] for bins in ranks]


def _padded(packer: Packer, dp_size: int, sync: Sync, multiple_of: int, rotation: int) -> list[Bins]:
    """In as few micro-batches as are found: every one pays its fixed cost, on all ranks."""
    everything = np.arange(packer.tokens.size)
    number = rounded_up(packer.least_bins(everything), dp_size * multiple_of) // dp_size
    # ends at one rollout per bin at the latest
    while (bins := packer.pack(everything, dp_size * number)) is None:
        number += multiple_of
    if sync == "step":
        return bins_to_ranks(packer, bins, dp_size, rotation)
    return bins_in_rows(packer, bins, dp_size, rotation)


def in_order(bins: list[_Bin], cost: Callable[[_Bin], float], order: Order) -> list[_Bin]:
    """A rank's micro-batches in the order they run in."""
    heaviest_first = sorted(bins, key=cost, reverse=True)
    if order == "pipeline":  # ..., 5th, 3rd, 1st, 2nd, 4th, ...: the heaviest in the middle
        heaviest_first = heaviest_first[::2][::-1] + heaviest_first[1::2]
    return heaviest_first
