"""Array types, one check and helpers that all planning modules share.

Example: the layout ``[[[4], [0, 7]], [[2, 5], [1]]]`` has two ranks with two micro-batches each. `positions_in` reads
the positions 4, 0, 7, 2, 5, 1 from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Layout: TypeAlias = list[list[Ints]]
"""``[rank][micro_batch]`` -> ascending positions."""
Sync: TypeAlias = Literal["step", "micro_batch"]
Oversize: TypeAlias = Literal["refuse", "alone"]


def checked_costs(costs: ArrayLike, dp_size: int) -> Floats:
    """[n] float64. Raises ValueError for a negative or infinite cost, for another shape, and without a rank."""
    work = np.asarray(costs, np.float64)
    if work.ndim != 1 or not (np.isfinite(work).all() and (work >= 0.0).all()):
        raise ValueError(
            f"costs must be [n] finite numbers >= 0, one per rollout, not {costs!r}. Check the cost model."
        )
    if dp_size < 1:
        raise ValueError(f"dp_size ({dp_size}) must be >= 1: every rollout needs a rank.")
    return work


def rounded_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def positions_in(ranks: Iterable[Sequence[Ints]]) -> Ints:
    """[n] all positions of a layout, micro-batch after micro-batch."""
    return np.concatenate([np.empty(0, np.int64), *(one for share in ranks for one in share)])


def order_of(values: Ints | Floats | Bools) -> Ints:
    """[..., n] ascending order of the last axis; equal values keep their order."""
    return np.argsort(values, kind="stable").astype(np.int64, copy=False)


def sorted_by(rows: Ints, column: Ints | Floats | Bools) -> Ints:
    """``rows`` in ascending order of their values in ``column``."""
    return rows[order_of(column[rows])]


def kept(order: Ints, keep: Bools) -> Ints:
    """[n] an order of positions -> the order of the positions to keep, counted among these. O(n), without a sort.

    Example: `kept(np.array([1, 3, 0, 2]), np.array([True, False, True, True]))` is [2, 0, 1].
    """
    return (np.cumsum(keep) - 1)[order[keep[order]]]


def split_by_label(labels: Ints, number: int) -> list[Ints]:
    """[n] labels below ``number`` -> the ascending positions of each label. O(n log n)."""
    order = order_of(labels)
    return np.split(order, np.cumsum(np.bincount(labels, minlength=number))[:-1])
