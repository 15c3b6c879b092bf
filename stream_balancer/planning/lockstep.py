"""Ranks that meet at every micro-batch (FSDP, ZeRO-3) under a token cap: which rollouts go, and in which lockstep.

A *lockstep* is the micro-batches of one index, one per rank. Its costliest micro-batch sets its time. Cost grows
faster than tokens, so a cap full of long rollouts costs more than a cap full of ordinary ones. An *outlier* costs more
than a micro-batch full of ordinary rollouts: only other outliers can share its lockstep without waste. One outlier per
rank fills a lockstep; a single one wastes it.

    choose_lockstep   Candidates are the oldest rollouts, and the forced ones with outliers for 0 to 3 locksteps. The
                      candidate with the least waste now (`lockstep_bound`) and later (places that outliers left behind
                      do not fill) wins.
    in_locksteps      The level of a lockstep is its costliest rollout or its fair share; rollouts fill it up to that
                      level. Then exchanges between locksteps follow (exchange.py).

Example: cap 100, cost = tokens squared, two ranks. Five ordinary rollouts of 20 tokens fill a micro-batch and cost
2,000. One rollout of 100 tokens costs 10,000, and the other rank waits for 8,000. Two such rollouts waste nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator

import numpy as np

from .arrays import Bools, Floats, Ints, order_of, rounded_up, sorted_by, split_by_label
from .bounds import lockstep_bound
from .choice import Candidates
from .exchange import Cells
from .partition import assign, largest_first
from .plan import TOLERANCE

# Part of the future arrivals that is trusted to complete a lockstep of outliers; an arrival counts if it costs at least
# 0.8 of the outlier.
_SUPPLY, _AS_HEAVY = 0.7, 0.8
# A rollout above this part of the heaviest is always an outlier. Otherwise many rollouts that were cut at the longest
# length count as ordinary.
_SPIKE = 0.9
# Outliers that are tried as the costliest to go, and locksteps of outliers in one step.
_STARTS, _MOST_LOCKSTEPS = 13, 3
# Cost of one more lockstep as a part of the step, on top of the overhead: FSDP gathers parameters again.
_LOCKSTEP = 0.02


def choose_lockstep(step: Candidates) -> Bools:
    """-> [W] the ``number`` rollouts that go. O(W log W), and O(number log number) for each of some 40 candidates."""
    costs, tokens = step.costs, step.tokens
    assert tokens is not None
    level = min(ordinary_level(step, tokens), _SPIKE * costs.max())
    outlier = costs > level

    def waste(go: Bools) -> float:
        bound = lockstep_bound(costs[go], tokens[go], step.ranks, step.max_tokens)
        return bound - float(costs[go].sum()) / step.ranks + _waste_later(step, level, outlier & ~go)

    best, *others = _candidates(step, outlier)
    if outlier.any():
        least = waste(best)
        for go in others:
            if (other := waste(go)) < least * (1.0 - 1e-12):
                best, least = go, other
    return best


def ordinary_level(step: Candidates, tokens: Ints) -> float:
    """Cost of a full micro-batch of ordinary rollouts: the fixed point from above of "an ordinary rollout costs at most
    the level". O(W log W)."""
    order = order_of(step.costs)
    costs = step.costs[order]
    work = np.concatenate(([0.0], np.cumsum(costs)))
    tokens = np.concatenate(([0], np.cumsum(tokens[order])))
    share = step.number / costs.size
    held = step.ranks * step.max_tokens / share  # tokens of a lockstep in each step of the window
    level, end = np.inf, costs.size
    while end:
        start = min(int(np.searchsorted(tokens, tokens[end] - held)), end - 1)
        full = min(float(step.max_tokens), float(tokens[end]) * share / step.ranks)
        now = full * float(work[end] - work[start]) / float(tokens[end] - tokens[start])
        if now >= level * (1.0 - 1e-9):
            break
        level, end = now, int(np.searchsorted(costs, now, side="right"))
    return level


def _candidates(step: Candidates, outlier: Bools) -> Iterator[Bools]:
    """The oldest rollouts; then ``must`` with a run of outliers that makes whole locksteps.

    The costliest ordinary rollouts complete the locksteps, and the oldest ordinary rollouts fill the step.
    """
    oldest = step.must.copy()
    oldest[np.flatnonzero(~step.must)[: step.number - step.must.sum()]] = True
    yield oldest
    by_cost = order_of(-step.costs)
    by_cost = by_cost[~step.must[by_cost]]
    free, ordinary = by_cost[outlier[by_cost]], by_cost[~outlier[by_cost]]
    forced = int((step.must & outlier).sum())
    # Outliers fill up only where no ordinary rollout is left, the lightest first.
    fill = np.concatenate((np.sort(ordinary), free[::-1]))
    for start in np.unique(np.linspace(0, free.size, _STARTS).astype(np.int64)).tolist():
        for rows in range(_MOST_LOCKSTEPS + 1):
            wanted = rows * step.ranks - forced if rows else 0
            run = free[start : start + max(wanted, 0)]
            go = step.must.copy()
            go[run] = True
            if run.size:
                go[ordinary[: wanted - run.size]] = True
            missing = step.number - go.sum()
            if missing >= 0 and (wanted > 0 or not rows):
                go[fill[~go[fill]][:missing]] = True
                yield go
            if run.size < wanted:
                break


def _waste_later(step: Candidates, level: float, left: Bools) -> float:
    """Time that the outliers left behind will waste in locksteps of outliers, costliest first.

    A lockstep wastes its empty places, minus the arrivals that come in time. Urgent locksteps count more.
    """
    behind = np.flatnonzero(left)
    behind = sorted_by(behind, -step.costs)
    patience = step.remaining.max()
    new = step.remaining == patience
    arrivals = _SUPPLY * step.number / new.sum()  # per step, for each new rollout of the window
    fresh = np.sort(step.costs[new & (step.costs > level)])
    total = 0.0
    for first in range(0, behind.size, step.ranks):
        row = behind[first : first + step.ranks]
        peak, still = float(step.costs[row[0]]), step.remaining[row].min() - 1
        coming = arrivals * (fresh.size - int(np.searchsorted(fresh, _AS_HEAVY * peak))) * max(still, 0)
        total += max(step.ranks - row.size - coming, 0.0) * (peak - level) * (1.0 - still / (patience + 1.0))
    return total / step.ranks


def in_locksteps(
    costs: Floats, tokens: Ints, ranks: int, max_tokens: int, multiple_of: int, overhead: float
) -> list[Ints]:
    """Micro-batches, costliest first: each ``ranks`` of the list are a lockstep. No other order takes less time.

    Two numbers of locksteps are laid out: the least that holds the tokens, and the next, where micro-batches can be
    more alike.
    """
    n = costs.size
    number = rounded_up(max(-(-tokens.sum() // (ranks * max_tokens)), 1), multiple_of)
    each = overhead + _LOCKSTEP * costs.sum() / ranks / multiple_of
    bound = lockstep_bound(costs, tokens, ranks, max_tokens)
    best, least, found = [np.array([i]) for i in range(n)], np.inf, 0
    while n >= ranks * number and found < 2 and least > bound + each * number:
        labels = _alike(costs, ranks, number, (tokens, max_tokens))
        if labels is not None:
            found += 1
            time = _time(costs, labels, ranks, number) + each * number
            if time < least:
                best, least = split_by_label(labels, ranks * number), time
        number += multiple_of
    return sorted(best, key=lambda one: -float(costs[one].sum()))


def _alike(costs: Floats, ranks: int, number: int, cap: tuple[Ints, int]) -> Ints | None:
    """[n] micro-batch of each rollout, lockstep after lockstep; None if no start fits the cap."""
    if number == 1:
        return assign(costs, ranks, False, TOLERANCE, cap)
    # Fullest first may leave the second of two locksteps nearly empty; emptiest first may make the first unlike.
    ways = (True, False) if number == 2 else (True,)
    starts = [_level_by_level(costs, ranks, number, cap, fullest) for fullest in ways]
    starts.append(largest_first(costs, ranks * number, False, cap))
    found = [labels for labels in starts if labels is not None]
    if not found:
        return None
    start = min(found, key=lambda labels: _time(costs, labels, ranks, number))
    # Micro-batches are numbered by cost, so that those of a lockstep are alike.
    work = np.bincount(start, weights=costs, minlength=ranks * number)
    start = order_of(order_of(-work))[start]
    cells = Cells.of(costs, start, ranks * number, cap, least=1)
    cells.even_rows(number)
    return cells.labels()


def _time(costs: Floats, labels: Ints, ranks: int, number: int) -> float:
    """Time of the locksteps if the costliest micro-batches share one."""
    return float(np.sort(np.bincount(labels, weights=costs, minlength=ranks * number))[::-1][::ranks].sum())


def _level_by_level(costs: Floats, ranks: int, number: int, cap: tuple[Ints, int], fullest: bool) -> Ints | None:
    """[n] micro-batch of each rollout, lockstep after lockstep, costliest rollouts first; None without room.

    Rollouts fill a lockstep up to its costliest rollout, or to the fair share of the remaining work. A rollout goes
    into the fullest micro-batch with room; in the last lockstep, or without ``fullest``, into the emptiest.
    O(n x ranks).
    """
    labels = np.full(costs.size, -1)
    left = order_of(-costs).tolist()
    work, size = costs.tolist(), cap[0].tolist()
    for index in range(number):
        after = number - index - 1
        level = np.inf
        if after:
            level = max(work[left[0]], sum(work[i] for i in left) / (ranks * (after + 1))) * (1.0 + 1e-9)
        ascending = [(0.0, one) for one in range(ranks)]  # (load, rank)
        room = [cap[1]] * ranks
        spare = len(left) - ranks * after  # every later micro-batch needs a rollout
        rest = []
        for i in left:
            below = bisect_right(ascending, (level - work[i], ranks)) if spare > 0 else 0
            places = range(below - 1, -1, -1) if after and fullest else range(below)
            place = next((at for at in places if room[ascending[at][1]] >= size[i]), None)
            if place is None:
                rest.append(i)
                continue
            load, one = ascending.pop(place)
            labels[i] = index * ranks + one
            insort(ascending, (load + work[i], one))
            room[one] -= size[i]
            spare -= 1
        if max(room) == cap[1] or bool(rest) == (after == 0):
            return None
        left = rest
    return labels
