"""Padded micro-batches: neighbours in length share a micro-batch, which costs rollouts x costliest rollout.

    choose_neighbours   which rollouts go: runs of neighbours in the sorted window, one run per row of micro-batches
    runs_of             which rollouts share a micro-batch

Example: 900, 500, 400 and 100 tokens in two micro-batches. [900] and [500 400 100] cost 900 and 1,500. [900 500] and
[400 100] cost 1,800 and 800. Bisection finds the cut with the cheapest costliest micro-batch.
"""

from __future__ import annotations

import numpy as np

from .arrays import Bools, Floats, Ints, order_of
from .choice import Candidates

# Halvings of the cost level, down to 1e-7 of the first level.
_HALVINGS = 24
# Worth of a rollout without skips left, and of a forced one, in places of its micro-batch. The worth grows with the
# fourth power of the wait: an old rollout leaves a little early at some waste, before it is forced.
_AGE, _MUST = 1.0, 2.0


def choose_neighbours(step: Candidates, rows: int) -> Bools:
    """-> [W] the rollouts that go: all of ``must``, and as far as possible ``rows`` runs of neighbours.

    Dynamic programming over the sorted window minimises the waste minus the worth of the wait. O(W log W + W rows).
    """
    costs, must, ranks = step.costs, step.must, step.ranks
    length, size = step.number // rows, costs.size
    order = order_of(costs)
    wait = 1.0 - step.remaining[order] / max(1, step.remaining.max())
    ends = np.arange(length, size + 1)
    peak = costs[order][ends - 1]
    work = np.concatenate(([0.0], np.cumsum(costs[order])))
    worth = np.concatenate(([0.0], np.cumsum(_AGE * wait**4 + _MUST * must[order])))
    value = (worth[ends] - worth[ends - length]) * (ranks / length) * peak
    value -= np.maximum(ranks * peak - (work[ends] - work[ends - length]), 0.0)
    best, ends_here = np.zeros(size + 1), []
    for _ in range(rows):
        with_run = np.full(size + 1, -np.inf)
        with_run[length:] = best[: size + 1 - length] + value
        best = np.maximum.accumulate(with_run)
        ends_here.append(with_run == best)
    go, end = np.zeros(size, bool), size
    for here in reversed(ends_here):
        end = int(np.flatnonzero(here[: end + 1])[-1]) - length
        go[order[end : end + length]] = True
    go[np.flatnonzero(~go)[: step.number - go.sum()]] = True  # where ``rows`` does not divide the number
    for one in np.flatnonzero(must & ~go).tolist():
        free = np.flatnonzero(go & ~must)
        go[free[np.abs(costs[free] - costs[one]).argmin()]], go[one] = False, True
    return go


def runs_of(tokens: Ints, work: Floats, number: int, cap: int) -> list[Ints]:
    """``number`` runs of neighbours in length, none empty, whose costliest is as cheap as possible.

    Fewer runs where rollouts are fewer, and more where the cap needs more. O(n log n + 24 n).
    """
    order = np.lexsort((-work, -tokens)).tolist()
    if len(order) <= number:
        return [np.array([i]) for i in order]
    size, cost = tokens.tolist(), work.tolist()
    low, high = 0.0, len(order) * max(cost)
    best = _cut(order, size, cost, high, cap)
    if number > 1 and len(best) <= number:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            cut = _cut(order, size, cost, middle, cap, number)
            if len(cut) > number:
                low = middle
            else:
                best, high = cut, middle
    while len(best) < number:  # halving a run makes two cheaper runs
        heaviest = max((one for one in best if len(one) > 1), key=lambda one: len(one) * max(cost[i] for i in one))
        half = len(heaviest) // 2
        best.append(heaviest[half:])
        del heaviest[half:]
    return [np.array(one) for one in best]


def _cut(
    order: list[int], size: list[int], cost: list[float], level: float, cap: int, most: int | None = None
) -> list[list[int]]:
    """Runs of at most this cost, each as long as possible; it stops after one run more than ``most``."""
    found: list[list[int]] = []
    longest, costliest = 0, 0.0
    for i in order:
        grown = len(found[-1]) + 1 if found else 0
        costliest = max(costliest, cost[i])
        if found and grown * longest <= cap and grown * costliest <= level:
            found[-1].append(i)
        else:
            found.append([i])
            if len(found) - 1 == most:
                break
            longest, costliest = size[i], cost[i]
    return found
