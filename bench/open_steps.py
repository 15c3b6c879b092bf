"""Steps that begin before they are complete, on policy: how much of the step time do they save? In virtual time.

python bench/open_steps.py [--json] [--traces DIR] [--steps 30] [--seeds 2] [--staleness 0] [--groups] [--by-slots]
                           [--depth 8] [--only TEXT]

The rollouts of a step are generated once the update is made that their weights come from, 128 at a time at most, and
the trainer needs all of them. Closed: it begins when the last has come. Open: the balancer's core gives rows, as
``serve(open=True)`` asks for them, when every rank has room in its queue of ``--depth``; "in lockstep": ranks meet at
every micro-batch, and a row is asked for when all are done with the last one. The bound is proven: from the moment that
a rollout comes, it and all that come later are still to do, whatever the rows.

speed = ideal seconds of training / seconds that generation takes, in the mean; with ``--by-slots`` instead rollouts
that 128 busy slots make / rollouts that balanced ranks train on. ``--staleness 1``: weights may be an update old, so
the next step is generated while this one is trained on. ``--groups``: a rollout comes with the last of its siblings.
Quadratic cost, 8 ranks; nothing for launching a micro-batch, for the optimizer, or for new weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from _common import Rows, arguments
from peers import Floats, trace_folder, traces

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.planning.arrays import Sync
from stream_balancer.planning.partition import split
from stream_balancer.tools.generation import issue_order

RANKS, SLOTS = 8, 128
TRACES = ("rg", "mooncake", "misguided", "lrm", "tau")
SIZES = (32, 64, 128, 256)
SPEEDS = (0.5, 1.0, 2.0)
TOKENS_PER_SECOND = 30.0
ENOUGH = 15.0
"""Percent of the step time that open steps must save to be worth their trouble."""

Train = Callable[[Floats, Floats, float], float]
"""(seconds at which each rollout has come, seconds of work of each, when the ranks are free) -> when all are done."""


def closed(comes: Floats, work: Floats, free_s: float) -> float:
    """The best partition of all, once the last has come."""
    ranks = split(work, RANKS, tolerance=1e-3)
    return max(float(comes.max()), free_s) + max(float(work[its].sum()) for its in ranks)


def bound(comes: Floats, work: Floats, free_s: float) -> float:
    """Nobody is done before."""
    order = np.argsort(-comes, kind="stable")
    left = np.maximum(np.cumsum(work[order]) / RANKS, np.maximum.accumulate(work[order]))
    return float(np.max(np.maximum(comes[order], free_s) + left))


@dataclass(frozen=True)
class Open:
    """The core's rows."""

    sync: Sync
    depth: int = 1
    """Rows that a rank may have waiting."""

    def __call__(self, comes: Floats, work: Floats, free_s: float) -> float:
        size = len(comes)
        config = sb.BalancerConfig(
            dp_size=RANKS, batch_size=size, window=size, sync=self.sync, cost=sb.cost.TokenCost()
        )
        core = BalancerCore(config, tolerance=1e-3)
        core.open_steps(True)
        order, came = np.argsort(comes, kind="stable").tolist(), 0
        free = np.full(RANKS, free_s)
        now, all_began = free_s, [free_s] * self.depth
        while True:
            while came < size and comes[order[came]] <= now:
                rollout = sb.Rollout(tokens=ONE_TOKEN, rollout_id=str(came), cost=float(work[order[came]]))
                core.add(rollout, now)
                came += 1
            row = core.poll(now)
            if row is None:
                now = float(comes[order[came]])
                continue
            begun = np.maximum(free, now)
            if self.sync == "micro_batch":
                free = np.full(RANKS, now + row.finish)
                now = float(free[0])
            else:
                free = begun + row.loads
                all_began.append(float(begun.max()))
                now = max(now, all_began[-self.depth])  # every rank has taken that one, so another may be asked for
            if row.is_last:
                return float(free.max())


ONE_TOKEN = {"input_ids": torch.zeros(1, dtype=torch.int64)}


@dataclass(frozen=True)
class Stream:
    """What a run generates, in order."""

    seconds: Floats
    work: Floats
    groups: np.ndarray
    batch_size: int

    @classmethod
    def of(cls, trace: sb.Trace, batch_size: int, steps: int, seed: int) -> Stream:
        needed = batch_size * steps
        if trace.arrival_s is None:
            times = -(-needed // len(trace))
            order = np.concatenate([issue_order(trace, 100 * seed + time) for time in range(times)])[:needed]
        else:
            order = np.roll(np.arange(len(trace)), -3000 * seed)[: min(needed, len(trace)) // batch_size * batch_size]
        work = np.asarray(sb.cost.QuadraticCost()(trace.lengths[order]), dtype=np.float64)
        return cls(trace.output_tokens[order] / TOKENS_PER_SECOND, work, trace.group_ids[order], batch_size)

    @property
    def steps(self) -> int:
        return len(self.work) // self.batch_size

    def run(self, train: Train, rate: float, staleness: int, *, groups: bool) -> float:
        """Seconds of a step in the mean; ``rate``: work a second of a rank."""
        slots = [0.0] * min(self.batch_size, SLOTS)
        done = [0.0] * (staleness + 1)  # when each update was made
        for step in range(self.steps):
            its = slice(step * self.batch_size, (step + 1) * self.batch_size)
            comes = self._generate(its, slots, may_begin_s=done[-1 - staleness])
            if groups:
                comes = _with_the_last_sibling(comes, self.groups[its])
            done.append(train(comes, self.work[its] / rate, done[-1]))
        return done[-1] / self.steps

    def _generate(self, its: slice, slots: list[float], may_begin_s: float) -> Floats:
        comes = []
        for seconds in self.seconds[its].tolist():
            end = max(slots[0], may_begin_s) + seconds
            heapq.heapreplace(slots, end)
            comes.append(end)
        return np.array(comes)

    def rate(self, speed: float, *, by_slots: bool) -> float:
        """Work a second of a rank."""
        ideal = float(self.work.mean()) * self.batch_size / RANKS
        if by_slots:
            return ideal / (self.batch_size * float(self.seconds.mean()) / SLOTS * speed)
        return ideal / (
            speed * self.run(lambda comes, _, free_s: max(float(comes.max()), free_s), 1.0, 0, groups=False)
        )


def _nothing(comes: Floats, _: Floats, free_s: float) -> float:
    """Training that takes no time."""
    return max(float(comes.max()), free_s)


def _with_the_last_sibling(comes: Floats, groups: np.ndarray) -> Floats:
    _, label = np.unique(groups, return_inverse=True)
    last = np.zeros(label.max() + 1)
    np.maximum.at(last, label, comes)
    return np.asarray(last[label])


def main() -> None:
    options = arguments(
        __doc__, traces=None, steps=30, seeds=2, staleness=0, groups=False, by_slots=False, depth=8, only=""
    )
    rows = Rows(options.json, options.results)
    ways: dict[str, Train] = {
        "bound": bound,
        "open": Open("step", options.depth),
        "open in lockstep": Open("micro_batch"),
    }
    enough, cells = dict.fromkeys(ways, 0), 0
    recorded = [one for one in traces(trace_folder(options.traces)) if one.name.startswith(TRACES)]
    for trace in recorded:
        for size in SIZES:
            streams = [Stream.of(trace, size, options.steps, seed) for seed in range(options.seeds)]
            for speed in SPEEDS:
                cell = f"{trace.name.split('_')[0]} {size}/{RANKS}, speed {speed:g}"
                if options.only not in cell:
                    continue
                cells += 1
                rates = [one.rate(speed, by_slots=options.by_slots) for one in streams]

                def seconds(train: Train, streams: list[Stream] = streams, rates: list[float] = rates) -> float:
                    pairs = zip(streams, rates, strict=True)
                    return fmean(one.run(train, rate, options.staleness, groups=options.groups) for one, rate in pairs)

                of_closed = seconds(closed)
                for name, train in ways.items():
                    saved = 100.0 * (1.0 - seconds(train) / of_closed)
                    enough[name] += saved >= ENOUGH
                    rows.add(f"{cell}: {name}: step time saved", saved, "%")
    for name, number in enough.items():
        rows.add(f"all: {name}: cells of {cells} that save {ENOUGH:g} % or more", number, "")


if __name__ == "__main__":
    main()
