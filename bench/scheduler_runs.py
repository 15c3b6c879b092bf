"""A run of a scheduler: rollouts as they finish, step after step, and what the steps come to.

Deterministic but for the time that planning takes. Which schedulers there are: scheduler_list; which runs: schedulers.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from micro_batches import CostsOf, Layout
from peers import Floats, Ints, alone, finish_times
from scheduler_list import Plan, Scheduler, Step

import stream_balancer as sb
from stream_balancer.planning import lower_bound
from stream_balancer.planning.arrays import Sync
from stream_balancer.planning.bounds import lockstep_bound

FIRST_SEED = 7_000
"""Nothing was tuned on it."""
WARM_UP = 48
"""Steps, three times the most that ours passes a rollout over."""

MOST_PLAN_S = 20.0
"""Of CPU time: a plan that takes longer is given up."""

SYNCS: tuple[Sync, ...] = ("step", "micro_batch")


@dataclass(frozen=True)
class Stream:
    """Where lengths come from."""

    name: str
    trace: sb.Trace
    costs_of: CostsOf
    whole_groups: bool = False
    """A group's rollouts arrive together, when the last of them is finished."""

    def arrivals(self, count: int, slots: int, seed: int) -> tuple[Ints, Ints]:
        """[count] lengths and groups in the order in which rollouts finish, in mid-run."""
        drawn = (self.trace if self.whole_groups else alone(self.trace)).resampled(count, seed)
        finish = finish_times(drawn, slots, seed=seed, whole_groups=self.whole_groups)
        if self.whole_groups:
            last = np.zeros(int(drawn.group_ids.max()) + 1)
            np.maximum.at(last, drawn.group_ids, finish)
            order = np.lexsort((drawn.group_ids, last[drawn.group_ids]))
        else:
            order = np.argsort(finish, kind="stable")
        groups = drawn.group_ids if self.whole_groups else np.full(count, -1)
        return drawn.lengths[order], groups[order]


@dataclass(frozen=True, eq=False)
class Run:
    """A stream at a size of step."""

    stream: str
    lengths: Ints
    """[n] in order of arrival."""
    groups: Ints
    costs_of: CostsOf
    batch_size: int
    ranks: int
    max_tokens: int
    steps: int
    """That are measured, after the warm-up."""

    @classmethod
    def of(cls, stream: Stream, batch_size: int, ranks: int, steps: int, seed: int = FIRST_SEED) -> Run:
        lengths, groups = stream.arrivals(batch_size * (WARM_UP + steps + 3), 4 * batch_size, seed)
        cap = int(stream.trace.lengths.max())
        return cls(stream.name, lengths, groups, stream.costs_of, batch_size, ranks, cap, steps)

    def step(self, waiting: Ints, skips: Ints, number: int, sync: Sync) -> Step:
        lengths = self.lengths[waiting]
        return Step(
            lengths=lengths,
            costs=self.costs_of(lengths),
            groups=self.groups[waiting],
            skips=skips,
            number=number,
            ranks=self.ranks,
            batch_size=self.batch_size,
            max_tokens=self.max_tokens,
            sync=sync,
            costs_of=self.costs_of,
        )

    @cache  # noqa: B019 - a run is as long as the benchmark
    def bound(self, sync: Sync, steps: int) -> float:
        """Least time for a unit of work of any layout of so many first-in-first-out steps."""
        least = work = 0.0
        for step in range(WARM_UP, WARM_UP + steps):
            lengths = self.lengths[step * self.batch_size : (step + 1) * self.batch_size]
            costs = self.costs_of(lengths)
            if sync == "step":
                least += lower_bound(costs, self.ranks)
            else:
                least += lockstep_bound(costs, lengths, self.ranks, self.max_tokens)
            work += float(costs.sum())
        return least / work


@dataclass
class Figures:
    """Of a scheduler in a run."""

    scheduler: str
    stream: str
    batch_size: int
    ranks: int
    sync: Sync
    idle: float
    """Percent of rank time."""
    proven: float | None
    """Percent that no assignment of the same rollouts, whole, to the ranks of the same steps gets below; None where
    ranks share rollouts."""
    time: float
    """Over the least that a first-in-first-out step of as much work can take."""
    delay: float
    """Mean, steps."""
    longest_delay: int
    token_variation: float
    """Of the steps: standard deviation / mean."""
    plan_ms: float | None
    """Median of the steps."""
    over_cap: int
    """Micro-batches with more tokens than the cap."""
    steps: int
    """That were measured: fewer where planning took too long."""


def measure(run: Run, scheduler: Scheduler, plan: Plan, seconds: float) -> Iterator[Figures]:
    """Its figures for each way in which ranks may meet; a scheduler to which that is the same plans once."""
    record = None
    for sync in SYNCS:
        if record is None or scheduler.by_sync:
            record = planned(run, scheduler, plan, sync, seconds)
        yield figures_of(run, scheduler, record, sync)


@dataclass
class Record:
    """What a scheduler did in the steps that are measured."""

    layouts: list[tuple[Ints, Layout]] = field(default_factory=list)
    """Of each step: what it was shown, as positions in the run; and its plan, as positions among those."""
    delays: list[int] = field(default_factory=list)
    """Of each rollout that went, steps."""
    ms: list[float] = field(default_factory=list)


def planned(run: Run, scheduler: Scheduler, plan: Plan, sync: Sync, seconds: float) -> Record:
    """Step after step, until the run is over or so many seconds of planning are.

    Raises:
        TimeoutError: one plan took more than MOST_PLAN_S.
    """
    shown = round(scheduler.shown * run.batch_size)
    first = WARM_UP if scheduler.in_order else 0  # what keeps nothing back needs no warm-up
    taken = first * run.batch_size
    waiting: Ints = np.empty(0, dtype=np.int64)
    skips: Ints = np.empty(0, dtype=np.int64)
    record = Record()
    for number in range(first, WARM_UP + run.steps):
        new = np.arange(taken, min(taken + shown - waiting.size, run.lengths.size))
        taken += new.size
        waiting, skips = np.concatenate((waiting, new)), np.concatenate((skips, np.zeros_like(new)))
        if waiting.size < shown:
            break  # it took more a step than others do
        step = run.step(waiting, skips, number, sync)
        begin = time.thread_time()
        with _at_most(MOST_PLAN_S):
            layout = plan(step)
        ms = 1e3 * (time.thread_time() - begin)
        gone = checked(scheduler, layout, step)
        if number >= WARM_UP:
            record.layouts.append((waiting, layout))
            record.delays += [0] * gone.size if scheduler.in_order else skips[gone].tolist()
            record.ms.append(ms)
        waiting, skips = np.delete(waiting, gone), np.delete(skips, gone) + 1
        if sum(record.ms) > 1e3 * seconds:
            break
    return record


@contextmanager
def _at_most(cpu_s: float) -> Iterator[None]:
    """Raises TimeoutError in what takes more of this process's time, before its next line of Python.

    While the timer is set the process's clock goes by the system's ticks (4 ms), so plans are timed by the thread's.
    """

    def give_up(*_: object) -> None:
        raise TimeoutError(f"a plan took more than {cpu_s:g} s")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def checked(scheduler: Scheduler, layout: Layout, step: Step) -> Ints:
    """Positions that go, each once."""
    by_rank = [np.concatenate([np.asarray(one, dtype=np.int64) for one in (*rank, [])]) for rank in layout]
    gone, times = np.unique(np.concatenate(by_rank), return_counts=True)
    ranks = sum(np.unique(one).size for one in by_rank)
    if len(layout) != step.ranks or ranks != times.sum() or (times.max() > 1 and not scheduler.splits):
        raise ValueError(f"{scheduler.name} gave no plan for {step.ranks} ranks that has every rollout once")
    if scheduler.shown == 1.0 and gone.size != step.lengths.size:
        raise ValueError(f"{scheduler.name} planned {gone.size} of {step.lengths.size} rollouts")
    return gone


def figures_of(run: Run, scheduler: Scheduler, record: Record, sync: Sync) -> Figures:
    elapsed = work = least = 0.0
    tokens, over_cap = [], 0
    for places, layout in record.layouts:
        lengths = run.lengths[places]
        costs = run.costs_of(lengths)
        gone = np.unique([place for rank in layout for one in rank for place in one])
        elapsed += finish(layout, costs, sync)
        work += float(costs[gone].sum())
        least += lower_bound(costs[gone], run.ranks)
        tokens.append(int(lengths[gone].sum()))
        parts = lengths / np.maximum(sharers(layout, lengths.size), 1)
        held = [parts[one].max() if scheduler.alone else parts[one].sum() for rank in layout for one in rank if one]
        over_cap += int((np.array(held) > run.max_tokens * (1.0 + 1e-9)).sum())  # thirds do not sum up exactly
    return Figures(
        scheduler=scheduler.name,
        stream=run.stream,
        batch_size=run.batch_size,
        ranks=run.ranks,
        sync=sync,
        idle=round(100.0 * (1.0 - work / run.ranks / elapsed), 2),
        proven=None if scheduler.splits else round(100.0 * (1.0 - work / run.ranks / least), 2),
        time=round(elapsed / work / run.bound(sync, len(record.layouts)), 4),
        delay=round(float(np.mean(record.delays)), 2),
        longest_delay=max(record.delays),
        token_variation=round(float(np.std(tokens) / np.mean(tokens)), 3),
        plan_ms=round(float(np.median(record.ms)), 2) if scheduler.timed else None,
        over_cap=over_cap,
        steps=len(record.layouts),
    )


def sharers(layout: Layout, num_rollouts: int) -> Ints:
    """[num_rollouts] ranks that have each one."""
    places = np.array([place for rank in layout for one in rank for place in one], dtype=np.int64)
    return np.bincount(places, minlength=num_rollouts)


def finish(layout: Layout, costs: Floats, sync: Sync) -> float:
    """When the last rank is done. Ranks that share a rollout wait for each other, and for nobody else where ranks meet
    once a step."""
    ranks = np.maximum(sharers(layout, costs.size), 1)
    each = costs / ranks
    loads = np.zeros((len(layout), max(map(len, layout))))
    for rank, of_rank in enumerate(layout):
        loads[rank, : len(of_rank)] = [float(each[one].sum()) if one else 0.0 for one in of_rank]
    if sync == "micro_batch":
        return float(loads.max(axis=0).sum())
    if ranks.max() == 1:
        return float(loads.sum(axis=1).max())
    free = np.zeros(len(layout))
    for index in range(loads.shape[1]):
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, of_rank in enumerate(layout):
            if index < len(of_rank) and of_rank[index]:
                together.setdefault(tuple(of_rank[index]), []).append(rank)
        for rollouts, members in together.items():
            if len(members) != ranks[rollouts[0]]:
                raise ValueError(f"rollouts {rollouts} are not the same micro-batch of all ranks that share them")
            free[members] = free[members].max() + loads[members, index]
    return float(free.max())
