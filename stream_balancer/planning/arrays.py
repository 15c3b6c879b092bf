"""Types and checks of what planning takes and gives: costs in, positions and labels out. No decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = Literal["free", "equal"]
Sync: TypeAlias = Literal["step", "micro_batch"]
Order: TypeAlias = Literal["heaviest_first", "pipeline"]
Oversize: TypeAlias = Literal["refuse", "alone"]


def checked_costs(costs: ArrayLike) -> Floats:
    """[n] float64. Raises ValueError for a negative or infinite cost, or another shape."""
    work = np.asarray(costs, dtype=np.float64)
    if work.ndim != 1:
        raise ValueError(f"costs must be one-dimensional, not of shape {work.shape}: one number per rollout.")
    if not (np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError("costs must be finite and >= 0: a cost is an amount of work. Look at the cost model.")
    return work


def check_ranks(dp_size: int, counts: str) -> None:
    """Raises ValueError for no rank at all, or counts that are neither "free" nor "equal"."""
    if dp_size < 1:
        raise ValueError(f"dp_size ({dp_size}) must be >= 1: there is nowhere to put a rollout.")
    if counts not in ("free", "equal"):
        raise ValueError(f"counts must be 'free' or 'equal', not {counts!r}.")


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple that is no less than the number."""
    return -(-number // multiple) * multiple


def positions_in(ranks: Iterable[Sequence[Ints]]) -> Ints:
    """[n] all that lies in ``[rank][micro_batch]``, one after the other."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(one for share in ranks for one in share)])


def split_by_label(labels: Ints, dp_size: int) -> list[Ints]:
    """[n] labels -> one ascending index array per label. O(n log n).

    Examples:
        >>> split_by_label(np.array([0, 1, 1, 0, 2, 1]), dp_size=3)
        [array([0, 3]), array([1, 2, 5]), array([4])]
    """
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    # a stable sort keeps positions ascending within a label: no second sort for each
    ends = np.cumsum(np.bincount(labels, minlength=dp_size)).tolist()
    starts = [0, *ends[:-1]]
    return [order[start:end] for start, end in zip(starts, ends, strict=True)]
