"""In which micro-batch: rollouts into bins under a hard token cap, the same number of bins on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from .partition import partition

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .partition import Counts, Floats, Ints

Order = Literal["heaviest_first", "pipeline"]


class OversizeError(ValueError):
    """A rollout is longer than the token cap and the policy is to refuse it."""


def form_micro_batches(
    lengths: ArrayLike,
    costs: ArrayLike,
    num_ranks: int,
    *,
    max_tokens: int | None = None,
    sync: Literal["step", "micro_batch"] = "step",
    counts: Counts = "free",
    padded: bool = False,
    multiple_of: int = 1,
    order: Order = "heaviest_first",
    speeds: ArrayLike | None = None,
    keep_together: ArrayLike | None = None,
    oversize: Literal["refuse", "alone"] = "refuse",
    rotation: int = 0,
) -> list[list[Ints]]:
    """Lay rollouts out as [rank][micro_batch] -> positions.

    Args:
        lengths: [n] tokens, >= 1.
        costs: [n] work, >= 0.
        num_ranks: number of ranks.
        max_tokens: no micro-batch holds more tokens than this (rows x longest if `padded`); None = no cap.
        sync: "step": ranks meet once per step, so rank totals are balanced; "micro_batch": they meet at every micro-batch,
            so micro-batches of the same index are made alike.
        counts: "equal": rollouts per rank differ by at most one (kept where the cap allows it).
        padded: a micro-batch costs rows x longest, and the cap counts padding.
        multiple_of: the number of micro-batches is a multiple of this (virtual pipelines).
        order: "heaviest_first", or "pipeline": smaller ones at both ends.
        speeds: [num_ranks] relative speeds.
        keep_together: [n] labels; rollouts of one label go to one rank.
        oversize: a rollout longer than max_tokens is refused, or is placed alone in its micro-batch.
        rotation: rotates rank labels (pass the step).

    Returns:
        Every list has the same length, and no micro-batch is empty, as long as there are enough rollouts for it (at least
        ranks x micro-batches). With fewer, the lists of the last ranks are shorter: the caller fills them with padding copies.

    Raises:
        OversizeError: a rollout is longer than max_tokens and oversize="refuse".
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(costs, dtype=np.float64)
    if tokens.size == 0:
        return [[] for _ in range(num_ranks)]
    if max_tokens is not None and oversize == "refuse" and int(tokens.max()) > max_tokens:
        raise OversizeError(
            f"a rollout of {int(tokens.max())} tokens is longer than max_tokens ({max_tokens}): no micro-batch can hold it. "
            "Raise max_tokens, truncate the rollout, or choose oversize='alone'."
        )
    shares = partition(work, num_ranks, counts, speeds, rotation=rotation)
    number = max(_fewest(tokens[share], max_tokens, padded) for share in shares)
    number = -(-number // multiple_of) * multiple_of
    while True:
        packed = [_pack(share, tokens, work, number, max_tokens, padded) for share in shares]
        if all(one is not None for one in packed):
            return [[np.sort(b) for b in one if b.size] for one in packed if one is not None]
        number += multiple_of


def _fewest(tokens: Ints, max_tokens: int | None, padded: bool) -> int:
    if max_tokens is None or tokens.size == 0:
        return 1
    return max(1, -(-int(np.minimum(tokens, max_tokens).sum()) // max_tokens))


def _pack(share: Ints, tokens: Ints, work: Floats, number: int, cap: int | None, padded: bool) -> list[Ints] | None:
    """Heaviest first into the least loaded bin that has room; None if one fits nowhere."""
    limit = np.inf if cap is None else float(cap)
    load = np.zeros(number)
    rows = np.zeros(number, dtype=np.int64)
    used = np.zeros(number)
    longest = np.zeros(number)
    bins: list[list[int]] = [[] for _ in range(number)]
    for position in share[np.lexsort((-work[share], -tokens[share]))].tolist():
        size = float(tokens[position])
        after = np.maximum(longest, size) * (rows + 1) if padded else used + size
        fits = (after <= limit) | (rows == 0)
        if not fits.any():
            return None
        where = int(np.where(fits, load, np.inf).argmin())
        bins[where].append(position)
        load[where] += work[position] + 1e-9
        rows[where] += 1
        used[where] += size
        longest[where] = max(longest[where], size)
    return [np.array(one, dtype=np.int64) for one in bins]
