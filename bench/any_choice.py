"""What no choice of whole rollouts from a window gets below: a proof for a stream of rollouts.

A rollout that is heavier than a rank's share makes some step at least as long as itself: one of those from when it is
in the window until it was passed over `max_skips` times. Such a step has at most the heaviest rollouts that can leave
in it. Where these are less than all ranks could do meanwhile, ranks wait, whatever is chosen: `waste[step, height]`.

A choice gives every step a height, so that each rollout finds a step of its own that is at least as high. The least sum
of waste over such heights is a covering problem, and any solution of its dual is a bound from below: prices of
rollouts, so that no step at any height wastes less than the prices of all rollouts that it would serve.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from peers import Floats, Ints


def least_waste(costs: Floats, batch_size: int, window: int, max_skips: int, ranks: int, steps: range) -> float:
    """Time that a rank loses in these steps at least, in the unit of `costs` [n], which are in order of arrival. A step
    has `batch_size` whole rollouts, and begins when `window` of them wait. O(steps x outliers x batch_size)."""
    first = np.maximum(-(-(np.arange(costs.size) + 1 - window) // batch_size), 0)  # [n] step that may have it
    share = float(costs.mean()) * batch_size / ranks
    outliers = np.flatnonzero((costs > share) & (first >= steps.start) & (first + max_skips < steps.stop))
    heights = np.unique(costs[outliers])
    waste = np.zeros((steps.stop, heights.size))
    for step in steps:
        there = costs[(first <= step) & (first >= step - max_skips)]
        work = np.sort(there)[::-1][:batch_size]
        waste[step] = np.maximum(heights - np.minimum(work[:, None], heights).sum(axis=0) / ranks, 0.0)
    places = np.searchsorted(heights, costs)
    return max(_sum_of_prices(waste, places[some], first[some], max_skips) for some in _orders(costs, outliers))


def _orders(costs: Floats, outliers: Ints) -> Iterator[Ints]:
    """All are right; which one has the best bound depends on the stream."""
    yield outliers[np.argsort(-costs[outliers], kind="stable")]
    yield outliers
    yield outliers[::-1]


def _sum_of_prices(waste: Floats, heights: Ints, first: Ints, max_skips: int) -> float:
    """Each rollout in turn as dear as those before it allow."""
    left, total = waste.copy(), 0.0
    for height, step in zip(heights.tolist(), first.tolist(), strict=True):
        would_serve = left[step : step + max_skips + 1, height:]
        price = float(would_serve.min())
        would_serve -= price
        total += price
    return total
