"""Random inputs of the planner, and the promises that every plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stream_balancer.planning import Plan, PlanKnobs, Waiting, lower_bound, plan_batch, split
from stream_balancer.planning.arrays import Ints, positions_in
from stream_balancer.planning.bounds import times
from stream_balancer.planning.choice import Units, must_go

Rng = np.random.Generator

COSTS: Sequence[Callable[[Rng, int], Any]] = (
    lambda rng, n: rng.lognormal(0, 1.5, n),
    lambda rng, n: np.zeros(n),
    lambda rng, n: np.full(n, 3.0),
    lambda rng, n: rng.integers(0, 4, n) * 1.0,
    lambda rng, n: rng.pareto(1.0, n) * 1e12,
    lambda rng, n: rng.uniform(0, 1, n) * 1e-12,
)
TAILS: Sequence[Callable[[Rng, int], Any]] = (
    lambda rng, n: rng.lognormal(0, 1.5, n),
    lambda rng, n: rng.pareto(1.2, n) + 0.1,
    lambda rng, n: rng.uniform(1, 2, n),
    lambda rng, n: np.where(rng.random(n) < 0.05, 20.0, 1.0) * rng.uniform(0.8, 1.2, n),
)


@dataclass(frozen=True)
class Case:
    """Arguments of `plan_batch`."""

    waiting: Waiting
    knobs: PlanKnobs
    number: int

    def plan(self, step: int, planner: Callable[..., Plan] = plan_batch) -> Plan:
        return planner(self.waiting, self.knobs, num_rollouts=self.number, step=step)


def any_case(rng: Rng) -> Case:
    """1 to 13 ranks; equal, zero, huge and tiny costs; whole, mixed or incomplete groups; caps, multiples, padding."""
    ranks = int(rng.choice([1, 2, 3, 4, 5, 8, 13]))
    batch = int(rng.integers(ranks, 6 * ranks + 2))
    size = int(rng.integers(1, 3 * batch + 2))
    costs = COSTS[rng.integers(len(COSTS))](rng, size)
    lengths = np.sqrt(costs) * 50 + 1 if rng.random() < 0.5 else rng.lognormal(4, 1, size)
    lengths = np.clip(lengths, 1, 1e6).astype(np.int64)
    max_skips = None if rng.random() < 0.2 else int(rng.integers(0, 9))
    whole = bool(rng.random() < 0.35)
    groups, complete = _groups(rng, size, batch) if whole else (np.full(size, -1), np.ones(size, dtype=bool))
    sync = "micro_batch" if rng.random() < 0.4 else "step"
    knobs = PlanKnobs(
        ranks,
        batch,
        max_skips,
        sync=sync,
        equal_rollouts=bool(rng.random() < 0.5),
        max_tokens=None if rng.random() < 0.35 else max(int(lengths.mean() * rng.choice([0.5, 1, 2, 4, 10])), 1),
        equal_number=sync == "micro_batch" or bool(rng.random() < 0.7),
        multiple_of=int(rng.choice([1, 1, 1, 2, 4])),
        overhead_cost=float(rng.choice([0, 0, costs.mean() * 0.3])),
        padded=bool(rng.random() < 0.15),
        whole_groups=whole,
        mini_batches=int(rng.choice([1, 1, 1, 2, 4])),
    )
    skips = rng.integers(0, (5 if max_skips is None else max_skips) + 1, size)
    due = rng.random(size) < rng.choice([0, 0, 0.05, 0.3])
    number = min(size, batch) if rng.random() < 0.8 else int(rng.integers(1, min(size, batch) + 1))
    return Case(Waiting(costs, lengths, skips, due, groups, complete), knobs, number)


def _groups(rng: Rng, size: int, batch: int) -> tuple[Ints, Any]:
    labels = np.arange(size) // int(rng.integers(1, min(batch, 9) + 1))
    if rng.random() < 0.5:
        labels = rng.permutation(labels)
    if rng.random() < 0.4:  # groups of unlike sizes
        labels = np.sort(rng.integers(0, max(size // 3, 1), size))
        while np.bincount(labels).max() > batch:
            labels = np.sort(rng.integers(0, size, size))
    groups = np.where(rng.random(size) < 0.1, -1, labels)
    whole = np.flatnonzero(rng.random(labels.max() + 1) < 0.9)
    return groups, np.isin(groups, whole) | (groups < 0)


def layout_of(plan: Plan) -> list[list[list[int]]]:
    return [[one.tolist() for one in share] for share in plan.ranks]


def check_plan(case: Case, plan: Plan) -> None:
    """Exactly once, everything that must go, whole groups, and `check_piece`."""
    waiting, knobs = case.waiting, case.knobs
    rows = positions_in(plan.ranks)
    assert np.unique(rows).size == rows.size
    assert rows.size <= case.number if knobs.whole_groups else rows.size == case.number
    units = Units.of(waiting, knobs)
    assert {*units.rows(must_go(units, knobs, case.number)).tolist()} <= {*rows.tolist()}
    torn = waiting.groups[rows][~waiting.group_complete[rows]]
    assert {*torn[torn >= 0].tolist()} == {*plan.incomplete_groups}
    if knobs.whole_groups:
        stays = np.delete(waiting.groups, rows)
        assert not np.intersect1d(waiting.groups[rows], stays[stays >= 0]).size
    sizes = [positions_in(piece.ranks).size for piece in plan.pieces]
    assert sum(sizes) == rows.size
    assert max(sizes) - min(sizes) <= 1
    for piece in plan.pieces:
        check_piece(waiting, knobs, piece)


def check_piece(waiting: Waiting, knobs: PlanKnobs, piece: Plan) -> None:
    """No empty micro-batch or rank, counts, numbers of micro-batches, the token cap, and figures."""
    assert len(piece.ranks) == knobs.dp_size
    assert all(one.size and (np.diff(one) > 0).all() for share in piece.ranks for one in share)
    counts = [sum(one.size for one in share) for share in piece.ranks]
    numbers = [len(share) for share in piece.ranks]
    if sum(counts) >= knobs.dp_size:
        assert min(counts) >= 1
    if knobs.equal_rollouts:
        assert max(counts) - min(counts) <= 1
    if not knobs.has_micro_batches:
        assert max(numbers) <= 1
    most = -(-max(numbers) // knobs.multiple_of) * knobs.multiple_of
    for count, number in zip(counts, numbers, strict=True):
        # A rank with fewer rollouts than micro-batches runs each rollout alone.
        wanted = most if knobs.equal_number else -(-number // knobs.multiple_of) * knobs.multiple_of
        assert not knobs.has_micro_batches or number in (wanted, count) or (knobs.padded and number <= count)
    for one in (one for share in piece.ranks for one in share if knobs.max_tokens is not None and one.size > 1):
        lengths = waiting.lengths[one]
        assert (lengths.size * lengths.max() if knobs.padded else lengths.sum()) <= knobs.max_tokens
    assert piece.finish >= piece.lower_bound * (1 - 1e-9)
    loads, finish = times(waiting, replace(knobs, mini_batches=1), piece.ranks)
    assert np.allclose(loads, piece.loads)
    assert np.isclose(finish, piece.finish)


def largest_first(costs: Any, ranks: int, equal: bool) -> float:
    """Finish of the plain rule: each cost to the least loaded rank with room."""
    load, held = np.zeros(ranks), np.zeros(ranks, dtype=int)
    most = -(-costs.size // ranks) if equal else costs.size
    for cost in -np.sort(-costs):
        one = int(np.where(held < most, load, np.inf).argmin())
        load[one] += cost
        held[one] += 1
    return float(load.max())


def check_split(rng: Rng) -> None:
    """Exactly once, no empty rank, equal counts, between the lower bound and largest first."""
    ranks, equal = int(rng.choice([1, 2, 3, 5, 8, 16])), bool(rng.random() < 0.5)
    n = int(rng.integers(0, 12 * ranks))
    costs = COSTS[rng.integers(len(COSTS))](rng, n) * rng.choice([1.0, 1e180])
    shares = split(costs, ranks, equal_rollouts=equal, rotation=int(rng.integers(0, 20)))
    sizes = [share.size for share in shares]
    assert sorted(np.concatenate(shares).tolist()) == list(range(n))
    assert sum(size > 0 for size in sizes) == min(n, ranks)
    assert not equal or max(sizes) - min(sizes) <= 1
    finish, bound = max(float(costs[share].sum()) for share in shares), lower_bound(costs, ranks, equal_rollouts=equal)
    assert finish >= bound * (1 - 1e-12)
    # With a remainder the plain rule may put the additional rollouts anywhere.
    assert finish <= largest_first(costs, ranks, equal) * (1 + 1e-9) or (equal and n % ranks)


def check_skips(rng: Rng) -> None:
    """A run at the capacity of the proof: no rollout is left behind by more than ``max_skips`` steps."""
    ranks, size, max_skips = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2, 3, 4])), int(rng.integers(1, 7))
    batch = max(ranks, int(rng.integers(1, 5)) * size * 2)
    sent = batch - size + 1
    knobs = PlanKnobs(
        ranks,
        batch,
        max_skips,
        sync="micro_batch" if rng.random() < 0.5 else "step",
        equal_rollouts=bool(rng.random() < 0.5),
        max_tokens=None if rng.random() < 0.6 else 60,
        whole_groups=size > 1,
        group_size=size if size > 1 else None,
    )
    costs, skips, groups, label = np.zeros(0), np.zeros(0, dtype=int), np.zeros(0, dtype=int), 0
    for step in range(40):
        while True:
            came = size if rng.random() < 0.7 else int(rng.integers(1, size + 1))
            if costs.size + came > (max_skips + 1) * sent or (costs.size >= batch and rng.random() < 0.1):
                break
            costs = np.append(costs, rng.pareto(1.0, came) * 10)
            skips = np.append(skips, np.zeros(came, dtype=int))
            groups = np.append(groups, np.full(came, label if size > 1 else -1))
            label += 1
        waiting = replace(Waiting.of(costs, np.clip(costs, 1, 60)), skips=skips, groups=groups)
        plan = plan_batch(waiting, knobs, num_rollouts=min(batch, costs.size), step=step)
        go = positions_in(plan.ranks)
        assert go.size >= min(sent, costs.size)
        costs, skips, groups = (np.delete(column, go) for column in (costs, skips, groups))
        skips = skips + 1
        assert skips.max(initial=0) <= max_skips


def idle_beside_first_come(rng: Rng, steps: int = 40) -> tuple[float, float]:
    """Idle part of a run of the planner, and of first come, first served with largest first."""
    ranks, equal = int(rng.choice([2, 4, 8])), bool(rng.random() < 0.5)
    batch = ranks * int(rng.choice([2, 4, 8]))
    costs = TAILS[rng.integers(len(TAILS))](rng, batch * (steps + 2))
    knobs = PlanKnobs(ranks, batch, 8, equal_rollouts=equal)
    held, skips, finish, work = np.arange(2 * batch), np.zeros(2 * batch, dtype=int), 0.0, 0.0
    for step in range(steps):
        waiting = replace(Waiting.of(costs[held]), skips=skips)
        plan = plan_batch(waiting, knobs, num_rollouts=batch, step=step)
        go = positions_in(plan.ranks)
        finish, work = finish + plan.finish, work + float(waiting.costs[go].sum()) / ranks
        came = np.arange(batch) + (step + 2) * batch
        held = np.append(np.delete(held, go), came)
        skips = np.append(np.delete(skips, go) + 1, np.zeros(batch, dtype=int))
    first = costs[: steps * batch].reshape(steps, batch)
    return 1 - work / finish, 1 - first.sum() / ranks / sum(largest_first(one, ranks, equal) for one in first)
