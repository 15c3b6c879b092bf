"""What the planner's rules say, in the plainest words: everything is sorted whenever it is asked for.

bench/results/planning_proofs.md has the rules; `outliers.choose` reads an order instead, and only as much of it as it
needs. The tests compare the two.
"""

from __future__ import annotations

from stream_balancer.planning.outliers import Candidates


def chosen(units: Candidates) -> set[int]:
    """`outliers.choose`."""
    everybody = list(range(units.costs.size))
    must = [i for i in everybody if units.must[i]]
    others = [i for i in everybody if not units.must[i]]
    peak = [float(part) + units.filler for part in units.parts]
    if units.num_more >= len(others):
        return {*everybody}
    if units.num_more == 0:
        return {*must}
    oldest = {*must, *others[: units.num_more]}
    fair = _fair(units, oldest)
    if max(peak) <= fair:
        return oldest
    others.sort(key=lambda i: (peak[i], i))
    lightest = {*must, *others[: units.num_more]}
    must_peak = max((peak[i] for i in must), default=0.0)
    if must_peak > max(_fair(units, lightest), peak[others[units.num_more - 1]]):
        return _outlier_batch(units, must, others, must_peak)
    outliers = [i for i in everybody if peak[i] > fair]
    patience = max(1, min((int(units.remaining[i]) for i in outliers), default=1))
    best, spare = lightest, len(others) - units.num_more
    for attempt in range(7):
        reserve = {*others[len(others) - spare * attempt // 6 :]}
        go = _oldest_balanced(units, must, [i for i in sorted(others) if i not in reserve], must_peak)
        if go is not None:
            best = go
            if _forecast(units, go, reserve, patience) >= units.ranks * max(peak):
                break
    return best


def _fair(units: Candidates, go: set[int]) -> float:
    return 1.02 * float(units.costs[sorted(go)].sum()) / units.ranks


def _oldest_balanced(units: Candidates, must: list[int], pool: list[int], must_peak: float) -> set[int] | None:
    for _ in range(24):
        if len(pool) < units.num_more:
            return None
        taken = pool[: units.num_more]
        level = 1.02 * (float(units.costs[must].sum()) + float(units.costs[taken].sum())) / units.ranks
        if must_peak > level:
            return None
        if max(units.parts[taken]) + units.filler <= level:
            return {*must, *taken}
        pool = [j for j in pool if units.parts[j] + units.filler <= level]
    return None


def _forecast(units: Candidates, go: set[int], reserve: set[int], patience: int) -> float:
    """Work of the heaviest of a later step: of what stays, and of what is still to arrive and is like the newest."""
    new = [i for i in range(units.costs.size) if units.remaining[i] == units.remaining.max()]
    stays = [(float(units.costs[i]), 1.0) for i in reserve if i not in go]
    arrives = [(float(units.costs[i]), 0.7 * patience * units.num_more / len(new)) for i in new]
    room, work = float(units.num_more + int(units.must.sum())), 0.0
    for cost, number in sorted(stays + arrives, reverse=True):
        work += min(number, room) * cost
        room -= min(number, room)
    return work


def _outlier_batch(units: Candidates, must: list[int], others: list[int], must_peak: float) -> set[int]:
    costs, more = units.costs, units.num_more
    scores = []
    for end in range(more, len(others) + 1):  # the `more` heaviest of the `end` lightest
        level = max(must_peak, float(units.parts[others[end - 1]]) + units.filler)
        work = float(costs[must].sum()) + float(costs[others[end - more : end]].sum())
        left = [i for i in others if float(units.parts[i]) + units.filler > level]
        scores.append((max(level - work / units.ranks, 0.0) + _wasted_later(units, left, len(must)), level))
    rounding = 1e-9 * max(level for _, level in scores)
    level = max(level for score, level in scores if score <= min(scores)[0] + rounding)
    pool = [i for i in sorted(others) if units.parts[i] + units.filler <= level]
    taken, left = pool[:more], pool[more:]
    go = {*must, *taken}
    missing = units.ranks * level - float(costs[sorted(go)].sum())
    shortest = sorted(taken, key=lambda i: (costs[i], i))
    for give, take in zip(shortest, sorted(left, key=lambda i: (-costs[i], i)), strict=False):
        if missing <= 0.0 or costs[take] <= costs[give]:
            break
        go = go - {give} | {take}
        missing -= float(costs[take] - costs[give])
    return go


def _wasted_later(units: Candidates, left: list[int], num_must: int) -> float:
    """Of outliers that stay, lightest first: how far each rises above the next lower one, the more the sooner it, or
    one above it, must go."""
    wasted, urgency = 0.0, 0.0
    fair = float(units.costs.mean()) * (units.num_more + num_must) / units.ranks
    heights = [fair, *(max(float(units.parts[i]) + units.filler, fair) for i in left)]
    for number in reversed(range(len(left))):
        urgency = max(urgency, 1.0 - units.remaining[left[number]] / (units.remaining.max() + 1.0))
        wasted += (heights[number + 1] - heights[number]) * urgency
    return wasted
