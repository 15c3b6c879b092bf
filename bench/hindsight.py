"""Idle time of the window beside hindsight: the best schedule of the same stream that a mixed-integer program finds.

python bench/hindsight.py [--json] [--steps 40] [--size 32/8/8] [--window 2] [--traces DIR] [--only rg,nemo] [--seeds 2]
[--first 31] [--counts equal] [--seconds 42]

A size is batch / ranks / max_skips. Rollouts are drawn one by one, the trainer is instant, the drain is included.
scipy is needed (its HiGHS): ``pip install scipy``. ``found`` is a real schedule, sought by the program for the whole
stream and then for one part after the other, its layouts made by the planner's partition; ``bound`` is what no schedule
gets below, the better one of the program and the certificate. Hindsight lies between the two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from _common import Rows, arguments
from certificates import certify
from peers import Floats, Ints, alone, trace_folder, traces
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import bmat, csr_matrix, identity, vstack

import stream_balancer as sb
from stream_balancer.planning import PlanKnobs, Waiting, plan_batch, split
from stream_balancer.planning.arrays import positions_in

LEAST_LEVEL = 0.5
"""Rollouts below this part of a mean step do not make a step longer than its work: the program leaves that out."""
PART, EVERY = 10, 5
"""Steps that are sought anew at a time, and between the beginnings of two such parts."""
PASSES = 2
NEAR = 1e-6


@dataclass(frozen=True)
class Stream:
    """Rollouts in order of arrival; a step leaves as soon as the window is full."""

    lengths: Ints
    costs: Floats
    batch: int
    ranks: int
    skips: int
    window: int
    equal_rollouts: bool

    @property
    def steps(self) -> int:
        return -(-self.costs.size // self.batch)

    @property
    def arrived(self) -> Ints:
        """[n] the step from which on each one waits."""
        return np.clip(-(-(np.arange(self.costs.size) + 1 - self.window) // self.batch), 0, self.steps - 1)

    def planned(self) -> Ints:
        """[n] step of each, as the planner chooses."""
        knobs = PlanKnobs(self.ranks, self.batch, self.skips, equal_rollouts=self.equal_rollouts)
        arrived, step_of = self.arrived, np.full(self.costs.size, -1)
        for step in range(self.steps):
            here = np.flatnonzero((step_of < 0) & (arrived <= step))
            none = np.zeros(here.size, dtype=np.bool_)
            columns = (self.costs[here], self.lengths[here], step - arrived[here], none, np.full(here.size, -1), ~none)
            plan = plan_batch(Waiting(*columns), knobs, num_rollouts=min(self.batch, here.size), step=step)
            step_of[here[positions_in(plan.ranks)]] = step
        assert (step_of - arrived <= self.skips).all()
        return step_of

    def idle(self, step_of: Ints) -> float:
        """% of the ranks' time, with the planner's partition of each step."""
        total = 0.0
        for step in range(self.steps):
            costs = self.costs[step_of == step]
            total += max(
                float(costs[part].sum()) for part in split(costs, self.ranks, equal_rollouts=self.equal_rollouts)
            )
        return 100 * (1 - float(self.costs.sum()) / (self.ranks * total))


class Program:
    """Columns: whether a rollout goes in a step (a real number); whether a step is as high as a level (0 or 1); the
    time of each step; under equal counts, which of those that go lie beside the heaviest.

    A step lasts as long as its work / ranks and what its level cannot fill, and as its level. In mean steps.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        num, steps = stream.costs.size, stream.steps
        costs = stream.costs / (stream.costs.sum() / stream.ranks / steps)
        first = stream.arrived
        last = np.minimum(first + stream.skips, steps - 1)
        self.who = np.repeat(np.arange(num), last - first + 1)
        self.when = np.concatenate([np.arange(*ends) for ends in zip(first, last + 1, strict=True)])
        self.sizes = np.minimum(stream.batch, num - stream.batch * np.arange(steps))
        self.count = self.who.size
        work = costs[self.who] / stream.ranks
        levels = [np.unique(costs[(first <= t) & (t <= last) & (costs > LEAST_LEVEL)]) for t in range(steps)]
        self.begins = np.cumsum([0, *(one.size for one in levels)])
        self.num_levels = int(self.begins[-1])
        # [steps, levels] what a level adds to the next lower one of its step: height, and what cannot be filled
        height, waste = np.zeros((2, steps, self.num_levels))
        for t, (begin, end) in enumerate(itertools.pairwise(self.begins)):
            there = np.sort(costs[(first <= t) & (t <= last)])[::-1]
            most = [there[there <= level][: self.sizes[t]].sum() / stream.ranks for level in levels[t]]
            height[t, begin:end] = np.diff(levels[t], prepend=0.0)
            waste[t, begin:end] = np.diff(np.maximum(levels[t] - most, 0.0), prepend=0.0)
        self.tall = np.flatnonzero(costs[self.who] > LEAST_LEVEL)
        """Columns that need a level."""
        steps_of = zip(self.when[self.tall], costs[self.who[self.tall]], strict=True)
        self.level_of = np.array([self.begins[t] + np.searchsorted(levels[t], cost) for t, cost in steps_of], dtype=int)
        inner = np.setdiff1d(np.arange(1, self.num_levels), self.begins)
        self.goes, self.holds = _at(self.who, num), _at(self.when, steps)
        each, level, time_of = identity(self.count), identity(self.num_levels).tocsr(), identity(steps)
        blocks: list[list[Any]] = [
            [self.goes, None, None, None],
            [self.holds, None, None, None],
            [-self.holds.multiply(work), csr_matrix(-waste), time_of, None],
            [None, csr_matrix(-height), time_of, None],
            # a level only where the lower one of the step is
            [None, level[inner - 1] - level[inner], None, None],
            [-each.tocsr()[self.tall], level[self.level_of], None, None],
        ]
        low = [np.ones(num), self.sizes, *(np.zeros(size) for size in (steps, steps, inner.size, self.tall.size))]
        high = [*low[:2], *(np.full(one.size, np.inf) for one in low[2:])]
        self.columns: tuple[int, ...] = (self.count, self.num_levels, steps)
        if stream.equal_rollouts:
            beside = np.full(steps, float(stream.batch // stream.ranks - 1))
            blocks[3][3] = -self.holds.multiply(work * stream.ranks)
            blocks += [[None, None, None, self.holds], [each, None, None, -each]]
            low += [beside, np.zeros(self.count)]
            high += [beside, np.full(self.count, np.inf)]
            self.columns = (*self.columns, self.count)
        width = len(self.columns)
        self.constraint = LinearConstraint(
            bmat([block[:width] for block in blocks]).tocsr(), np.concatenate(low), np.concatenate(high)
        )

    def _of(self, kind: int) -> Floats:
        return np.repeat(np.arange(len(self.columns)) == kind, self.columns).astype(np.float64)

    def solved(self, seconds: float, x: Floats | None = None, part: range = range(0)) -> Any:
        """Of the whole stream; or of these steps, where all that x has elsewhere stays as it is."""
        lower, upper = np.zeros(sum(self.columns)), np.where(self._of(2), np.inf, 1.0)
        if x is not None:
            inside = np.bincount(self.who, x * np.isin(self.when, part)) > 1 - NEAR
            fixed = np.flatnonzero(~inside[self.who])
            lower[fixed] = upper[fixed] = np.clip(x[fixed], 0, 1)
            reached = self._reached(x)
            for step in set(range(self.stream.steps)) - set(part):
                rows = slice(*self.begins[step : step + 2])
                at = slice(self.count + rows.start, self.count + rows.stop)
                lower[at] = upper[at] = reached[rows]
        return milp(
            self._of(2),
            constraints=self.constraint,
            bounds=Bounds(lower, upper),
            integrality=self._of(1),
            options={"time_limit": seconds, "mip_rel_gap": 1e-3 if x is None else 1e-4},
        )

    def _reached(self, x: Floats) -> Floats:
        """[levels] 1.0 up to the highest that x needs in each step."""
        reached = np.bincount(self.level_of, x[self.tall] > NEAR, self.num_levels) > 0
        for begin, end in itertools.pairwise(self.begins):
            reached[begin:end] = np.maximum.accumulate(reached[begin:end][::-1])[::-1]
        return reached.astype(np.float64)

    def time(self, x: Floats) -> float:
        found = self.solved(10.0, x)
        return np.inf if found.x is None else float(found.fun)

    def improved(self, x: Floats, seconds: float) -> Floats:
        """x, with one part after the other sought anew."""
        best = self.time(x)
        for begin in PASSES * [*range(0, max(self.stream.steps - EVERY, 1), EVERY)]:
            found = self.solved(seconds, x, range(begin, min(begin + PART, self.stream.steps)))
            if found.x is not None and found.fun < best - NEAR:
                x, best = found.x[: self.count], found.fun
        return x

    def schedule(self, x: Floats) -> Ints:
        """[n] step of each: whole rollouts, as near to x as may be, and no step higher."""
        upper = np.ones(self.count)
        upper[self.tall] = self._reached(x)[self.level_of]
        found = linprog(
            -x,
            A_eq=vstack((self.goes, self.holds)),
            b_eq=np.concatenate((np.ones(self.stream.costs.size), self.sizes)),
            bounds=np.stack((np.zeros(self.count), upper), 1),
            method="highs-ds",
        )
        steps: Ints = self.when[found.x > 0.5]
        return steps


def _at(rows: Ints, count: int) -> Any:
    return csr_matrix((np.ones(rows.size), (rows, np.arange(rows.size))), (count, rows.size))


def beside_hindsight(stream: Stream, seconds: float) -> tuple[float, float, float]:
    """Idle time in %: the window's, the best found, and a proven bound of any schedule's."""
    program, planned = Program(stream), stream.planned()
    proven = certify(
        stream.costs,
        stream.arrived,
        batch_size=stream.batch,
        ranks=stream.ranks,
        max_skips=stream.skips,
        equal_counts=stream.equal_rollouts,
    )
    starts = [(planned[program.who] == program.when).astype(np.float64)]
    whole = program.solved(seconds)
    if whole.x is not None:
        starts.append(whole.x[: program.count])
    best = min(starts, key=program.time)
    found = [stream.idle(program.schedule(x)) for x in (best, program.improved(best, seconds / 6))]
    ours = stream.idle(planned)
    bound = max(proven.idle, 1 - stream.steps / max(whole.mip_dual_bound or 0.0, stream.steps))
    return ours, min(ours, *found), 100 * bound


def main() -> None:
    options = arguments(
        __doc__,
        steps=40,
        size="32/8/8",
        window=2.0,
        traces=None,
        only="rg,nemo,mooncake",
        seeds=2,
        first=31,
        counts="free",
        seconds=42.0,
    )
    rows = Rows(options.json, options.results)
    batch, ranks, skips = map(int, options.size.split("/"))
    kind = f"{options.size}, window={options.window:g}, counts={options.counts}, {options.steps} steps"
    found = []
    for trace in traces(trace_folder(options.traces)):
        if not trace.name.startswith(tuple(options.only.split(","))):
            continue
        for seed in range(options.first, options.first + options.seeds):
            drawn = alone(trace).resampled(batch * options.steps, seed)
            costs = np.asarray(sb.cost.QuadraticCost()(drawn.lengths), dtype=np.float64)
            window = round(options.window * batch)
            stream = Stream(drawn.lengths, costs, batch, ranks, skips, window, options.counts == "equal")
            ours, best, bound = beside_hindsight(stream, options.seconds)
            found.append((ours, best, bound))
            rows.add(f"{trace.name}, {kind}, seed {seed}", ours, "%", found=round(best, 2), bound=round(bound, 2))
    ours, best, bound = np.mean(found, axis=0).tolist()
    rows.add(f"mean, {kind}", ours, "%", found=round(best, 2), bound=round(bound, 2), ratio=round(ours / best, 3))


if __name__ == "__main__":
    main()
