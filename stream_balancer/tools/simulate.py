"""Simulation of a balancer over a trace: the same ``core``, driven by a virtual clock. No event loop, no processes.

    generation --finish--> (put waits for room) --add--> core --poll, when the trainer is free--> trainer
        ^-------- the slot is free again once put returned --'      ^---------- acknowledge -------'

Three clocks move it: a generation slot finishes a rollout, the trainer finishes a step, the core's deadline passes. The
next of them is the next moment simulated, so a run of hours takes seconds, and the same seed gives the same run.

What is simulated is *predicted* work: a step takes as long as its most loaded rank, by the config's cost model. What is
not: transport, optimizer time, how generation slows down when many sequences run at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Literal, NoReturn, TypeAlias

import numpy as np
import torch

from stream_balancer.config import BalancerConfig, Policy
from stream_balancer.core.auto_window import AutoWindowObserver
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Observer
from stream_balancer.errors import ConfigError, WouldBlock
from stream_balancer.planning import LengthBias, LengthBiasSummary
from stream_balancer.planning.arrays import Bools, Ints
from stream_balancer.planning.bounds import lockstep_bound
from stream_balancer.planning.partition import TOLERANCE
from stream_balancer.tools.generation import Generation, check_generation, seconds_per_rollout
from stream_balancer.tools.simulation_report import LEAST_STEADY, Quantiles, SimulationReport, Steps, StratumReport
from stream_balancer.tools.trace import Trace
from stream_balancer.types import Batch, EvictReason, Rollout

__all__ = ["WINDOW_UNGIVEN", "SimulationReport", "as_policy", "rollouts_per_batch", "simulate"]

TrainerSpeed: TypeAlias = float | Literal["instant", "matched"]
"""How fast a rank trains: work per second in the cost model's unit; ``"instant"``: it takes every batch the moment one
is ready, so that exactly the window waits at each dispatch; ``"matched"``: perfectly balanced ranks would just keep up
with generation, so that all imbalance shows as time."""

WARM_UP_SKIPS = 3
"""Dispatches of warm-up, in ``max_skips``: until then the window holds fewer outliers than in the long run."""
UNBOUNDED_WARM_UP = 50
"""The same without ``max_skips``."""
WARM_UP_PART = 4
"""But never more than a quarter of a short run."""
WINDOW_UNGIVEN = {
    "window": None,
    "window_tokens": None,
    "max_skips": "auto",
    "capacity": None,
    "capacity_tokens": None,
}
"""The window and what follows from it, to be derived anew: changes for ``replace``."""


def rollouts_per_batch(trace: Trace, config: BalancerConfig) -> float:
    """Rollouts that a full batch has in the mean."""
    if config.batch_tokens is None:
        return config.batch_size
    return max(config.batch_tokens * len(trace) / trace.num_tokens, config.batch_size)


def as_policy(config: BalancerConfig, policy: Policy) -> BalancerConfig:
    """The same knobs under another policy, window and ``max_skips`` derived anew where the policy fixes the window, and
    the number of rollouts of a step."""
    if policy == config.policy:
        return config
    return config.replace(policy=policy, batch_size_range=None, **WINDOW_UNGIVEN)


def simulate(
    trace: Trace,
    config: BalancerConfig,
    *,
    slots: int = 128,
    tokens_per_second: float = 30.0,
    trainer: TrainerSpeed = "instant",
    warm_up: int | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    progress: Callable[[int], None] | None = None,
) -> SimulationReport:
    """Run a trace through a balancer in virtual time. Deterministic; about 20 us a rollout plus the planning.

    :param trace: lengths, and arrivals where they were recorded; without, generation is simulated as in
        :func:`~stream_balancer.tools.generation.finish_times`, and a slot stays taken while its rollout waits for room.
    :param config: the knobs; ``policy`` says whether the window or one of the usual ways is run.
    :param slots: rollouts generated at a time. Ignored where arrivals are recorded.
    :param tokens_per_second: of one slot. Ignored where arrivals are recorded.
    :param trainer: ``"instant"``, ``"matched"``, or work per second and rank: see :data:`TrainerSpeed`.
    :param warm_up: dispatches left out of the figures; None = 3 x ``max_skips``, but at most a quarter of those before
        the tail.
    :param seed: for the order in which groups are generated.
    :param tolerance: how near to the lower bound partitions are sought; 0.003 takes three fifths of the time, and shows
        up to 0.1 points more idle time.
    :param progress: called with the number of rollouts dispatched or evicted so far, after every dispatch.

    Raises ConfigError for slots, speeds or a warm-up that make no sense, and RolloutError for a rollout the config
    refuses (above the token cap).
    """
    check_generation(slots, tokens_per_second)
    if warm_up is not None and warm_up < 0:
        raise ConfigError(f"warm_up must be >= 0 dispatches, not {warm_up!r}")
    rollout_s = seconds_per_rollout(trace, slots, tokens_per_second)
    rate = _work_per_second(trainer, trace, config, rollout_s)
    core = BalancerCore(config, tolerance=tolerance)
    core.observers.append(AutoWindowObserver(core))
    grouped = config.tracked_group_size is not None
    generation = Generation(
        trace,
        slots,
        tokens_per_second,
        seed,
        whole_groups=grouped,
        step_s=rollouts_per_batch(trace, config) * rollout_s,
    )
    run = _Run(trace, core, generation, rate)
    run.to_the_end(progress)
    return run.report(warm_up)


def _work_per_second(trainer: TrainerSpeed, trace: Trace, config: BalancerConfig, rollout_s: float) -> float:
    """Work per second of a rank of speed 1; inf = instant."""
    if trainer == "instant":
        return math.inf
    if trainer == "matched":
        speeds = config.speeds or (1.0,) * config.dp_size
        work = float(np.asarray(config.cost(trace.lengths)).mean())
        return work / sum(speeds) / rollout_s if rollout_s > 0 and work > 0 else math.inf
    if not isinstance(trainer, (int, float)) or not trainer > 0:
        raise ConfigError(
            f"trainer must be 'instant', 'matched' or work units per second (a number > 0), not {trainer!r}"
        )
    return trainer


class _Blocked:
    """Finished rollouts whose put waits for room: first come, first served, but siblings of a waiting group may
    pass."""

    def __init__(self, group_ids: Ints) -> None:
        self._group_ids: list[int] = group_ids.tolist()
        self._rows: dict[int, None] = {}
        self._by_group: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def push(self, row: int) -> None:
        """As the last, unless it is here."""
        self._rows[row] = None
        self._by_group.setdefault(self._group_ids[row], {})[row] = None

    def discard(self, row: int) -> None:
        """Forget it, if it is here."""
        if row not in self._rows:
            return
        del self._rows[row]
        siblings = self._by_group[self._group_ids[row]]
        del siblings[row]
        if not siblings:
            del self._by_group[self._group_ids[row]]

    def first(self) -> int:
        return next(iter(self._rows))

    def siblings(self, row: int) -> list[int]:
        return list(self._by_group.get(self._group_ids[row], ()))


class _Run(Observer):
    """One simulation: state, and the moves between two moments."""

    def __init__(self, trace: Trace, core: BalancerCore, generation: Generation, work_per_second: float) -> None:
        config = core.config
        self.trace, self.config, self.generation = trace, config, generation
        self.core = core
        core.observers.append(self)
        self.rate = work_per_second
        self.lengths: list[int] = trace.lengths.tolist()
        self.costs = np.asarray(config.cost(trace.lengths), dtype=np.float64)
        self.cost_list: list[float] = self.costs.tolist()
        self.strata: list[str] = [""] * len(trace) if trace.strata is None else trace.strata.tolist()
        self.group_names = [str(g) for g in trace.group_ids.tolist()]
        self.groups_count = config.tracked_group_size is not None
        self.versioned = config.max_staleness is not None
        self.first_version = -int(generation.started_step.min())  # the oldest in flight began with version 0
        if self.versioned:
            core.set_version(self.first_version)
        self.ids = torch.zeros(max(self.lengths), dtype=torch.int64)  # one buffer: every rollout is a view of it
        self.blocked = _Blocked(trace.group_ids)
        self.now = 0.0
        self.step = 0
        self.busy_until: float | None = None
        self.busy_s = 0.0
        self.ended = False
        num = len(trace)
        self.finished_s, self.accepted_s, self.dispatched_s = np.zeros(num), np.zeros(num), np.zeros(num)
        self.accepted_step = np.zeros(num, dtype=np.int64)
        self.step_of = np.full(num, -1, dtype=np.int64)
        self.num_gone = 0
        self.num_evicted = 0
        self.num_padding = 0
        self.last_arrival_step = 0
        self.records: list[tuple[float, str, int, int, float, float, float, list[float]]] = []

    # -- moving ------------------------------------------------------------------------------------------------------

    def to_the_end(self, progress: Callable[[int], None] | None) -> None:
        while True:
            self._train(progress)
            if self.num_gone == len(self.trace) and self.busy_until is None:
                return
            if not self.ended and self.generation.next_finish == math.inf and not self.blocked:
                self.core.end()  # the trace is over: what still waits leaves as the drain
                self.ended = True
                continue
            # while a step runs the trainer asks for nothing, so the core's own wake-up does not count
            moment = min(
                self.generation.next_finish,
                self.core.next_wakeup() if self.busy_until is None else self.busy_until,
            )
            if moment == math.inf:
                self._stand_still()
            self.now = max(self.now, moment)
            if self.generation.next_finish <= self.now:
                row = self.generation.pop(self.step)
                if row is not None:
                    self.finished_s[row] = self.now
                    self._offer(row)

    def _train(self, progress: Callable[[int], None] | None) -> None:
        """Finish the step that is over, and begin the next if the core gives one; as often as possible now."""
        while True:
            if self.busy_until is not None:
                if self.busy_until > self.now:
                    return
                if self.versioned:  # before the acknowledgement, as a trainer should
                    self.core.set_version(self.first_version + self.step)
                self.core.acknowledge(self.step - 1)
                self.busy_until = None
                if self.versioned:
                    self._let_in()
            batch = self.core.poll(self.now)
            if batch is None:
                return
            self._dispatch(batch)
            self._let_in()
            if progress is not None:
                progress(self.num_gone)

    def _dispatch(self, batch: Batch) -> None:
        rows = np.array([int(r.rollout_id) for r in batch.rollouts if not r.is_padding], dtype=np.int64)
        self.step_of[rows] = batch.step
        self.dispatched_s[rows] = self.now
        self.num_gone += rows.size
        self.num_padding += batch.num_padding
        mean, bound, slowest, ranks = self._loads(batch, rows)
        self.records.append(
            (
                self.now,
                batch.reason,
                batch.num_rollouts,
                batch.num_tokens,
                mean,
                min(max(bound, mean), slowest),  # padding can put the bound outside: keep the parts >= 0
                slowest,
                ranks,
            )
        )
        duration = slowest / self.rate  # 0.0 for an instant trainer, whose rate is inf
        self.busy_s += duration
        self.busy_until = self.now + duration
        self.step += 1

    def _loads(self, batch: Batch, rows: Ints) -> tuple[float, float, float, list[float]]:
        """Mean load, lower bound, step time and each rank's own time of a batch, in work of a rank of speed 1."""
        if self.config.sync == "step" and not self.config.cost.padded:
            return sum(batch.loads) / len(batch.loads), batch.lower_bound, max(batch.loads), list(batch.loads)
        speeds = np.ones(self.config.dp_size) if self.config.speeds is None else np.array(self.config.speeds)
        costs = [[[self._cost(r) for r in mb.rollouts] for mb in one.micro_batches] for one in batch.ranks]
        useful = np.array([sum(sum(mb) for mb in one) for one in costs]) / speeds
        pay = _padded_work if self.config.cost.padded else sum
        work = np.array([[pay(mb) for mb in one] for one in costs]) / speeds[:, None]
        slowest = work.max(axis=0).sum() if self.config.sync == "micro_batch" else work.sum(axis=1).max()
        bound, cap = batch.lower_bound, self.config.max_tokens_per_micro_batch
        if self.config.sync == "micro_batch" and cap is not None and not self.config.cost.padded:
            lengths = self.trace.lengths[rows]
            bound = lockstep_bound(self.costs[rows], lengths, self.config.dp_size, cap, self.config.speeds)
        return float(useful.mean()), bound, float(slowest), work.sum(axis=1).tolist()

    def _cost(self, rollout: Rollout) -> float:
        return 0.0 if rollout.is_padding else self.cost_list[int(rollout.rollout_id)]

    def _offer(self, row: int) -> bool:
        """A rollout is finished, or may find room again: put it. False if its put waits for room."""
        try:
            self.core.add(self._rollout(row), self.now)
        except WouldBlock:
            self.blocked.push(row)
            return False
        self.blocked.discard(row)
        self.accepted_s[row] = self.now
        self.accepted_step[row] = self.step
        self.generation.release(self.now, self.step)
        if self.groups_count and self.blocked:  # siblings of a waiting group are let in beyond the capacity
            for sibling in self.blocked.siblings(row):
                if sibling in self.blocked:  # not let in by one before it
                    self._offer(sibling)
        return True

    def _let_in(self) -> None:
        """There may be room again."""
        while self.blocked:
            if not self._offer(self.blocked.first()):
                return

    def _rollout(self, row: int) -> Rollout:
        """A rollout as light as a valid one can be: its ids are a view of one buffer. Its ``nbytes`` are 8 a token."""
        return Rollout(
            tokens={"input_ids": self.ids[: self.lengths[row]]},
            rollout_id=str(row),
            group_id=self.group_names[row] if self.groups_count else None,
            version=self.first_version + int(self.generation.started_step[row]) if self.versioned else None,
            cost=self.cost_list[row],
            metadata={"stratum": self.strata[row]} if self.strata[row] else {},
        )

    def evicted(self, rollout: Rollout, reason: EvictReason) -> None:
        self.num_evicted += 1
        self.num_gone += 1

    def _stand_still(self) -> NoReturn:
        """Nothing can ever happen again, and rollouts are left: the core promises that this cannot be."""
        stats = self.core.statistics(self.now)
        raise RuntimeError(
            f"the run came to a standstill after {self.step} dispatches: {stats.waiting} rollouts wait, "
            f"{len(self.blocked)} more wait for room, and nothing can leave. This is a bug of stream_balancer: please "
            f"report it with {self.config!r}"
        )

    # -- the report --------------------------------------------------------------------------------------------------

    def report(self, warm_up: int | None) -> SimulationReport:
        columns = list(zip(*self.records, strict=True)) or [()] * 8
        at_s, reason, rollouts, tokens, mean, bound, slowest, ranks = columns
        steps = Steps(
            at_s=np.array(at_s, dtype=np.float64),
            reason=reason,
            rollouts=np.array(rollouts, dtype=np.int64),
            tokens=np.array(tokens, dtype=np.int64),
            mean_load=np.array(mean, dtype=np.float64),
            lower_bound=np.array(bound, dtype=np.float64),
            step_work=np.array(slowest, dtype=np.float64),
            rank_work=np.array(ranks, dtype=np.float64).reshape(len(ranks), self.config.dp_size),
        )
        number = np.arange(self.step)
        # The steady state ends with the drain, or before, when a slot finds no prompt any more: then fewer are
        # generated at a time.
        last = sum(r != "drain" for r in reason)
        if self.generation.dry_step is not None:
            last = min(last, self.generation.dry_step)
        first = min(self._warm_up(), last // WARM_UP_PART) if warm_up is None else min(warm_up, last)
        warming, steady, tail = number < first, (number >= first) & (number < last), number >= last
        enough = np.count_nonzero(steady) >= LEAST_STEADY
        shown = steady if enough else np.ones(self.step, dtype=bool)
        went = self.step_of >= 0
        chosen = went & shown[np.maximum(self.step_of, 0)] if self.step else went
        # what came in the same stretch, dispatched or not: else long rollouts that are held back would not be seen
        came = (self.accepted_step >= first) & (self.accepted_step < last) if enough else went
        skips = self.step_of - self.accepted_step
        delay_s = self.dispatched_s - self.accepted_s
        lengths = self.trace.lengths
        return SimulationReport(
            trace_name=self.trace.name,
            policy=self.config.policy,
            config=self.config,
            num_rollouts=len(self.trace),
            num_tokens=self.trace.num_tokens,
            evicted=self.num_evicted,
            padding_copies=self.num_padding,
            reasons=dict(Counter(reason)),
            warm_up=steps.segment(warming),
            steady=steps.segment(steady),
            tail=steps.segment(tail),
            overall=steps.segment(np.ones(self.step, dtype=bool)),
            delay_s=Quantiles.of(delay_s[chosen]),
            delay_dispatches=Quantiles.of(skips[chosen]),
            max_skips_seen=int((self.step_of - self._ready_step())[went].max(initial=0)),
            staleness=Quantiles.of((self.step_of - self.generation.started_step)[chosen]),
            length_bias=_length_bias(lengths[came], lengths[chosen], skips[chosen], self.step_of[chosen]),
            arrived_lengths=Quantiles.of(lengths[came]),
            dispatched_lengths=Quantiles.of(lengths[chosen]),
            strata=self._by_stratum(chosen, skips),
            elapsed_s=self.now,
            trainer_busy=self.busy_s / self.now if self.now > 0 else 0.0,
            blocked_s=float((self.accepted_s - self.finished_s).mean()),
            steps=steps,
            step_of=self.step_of,
        )

    def _warm_up(self) -> int:
        """Dispatches until the window is in its steady state; generation is from the first."""
        skips = self.config.max_skips
        return UNBOUNDED_WARM_UP if skips is None else WARM_UP_SKIPS * skips

    def _by_stratum(self, chosen: Bools, delays: Ints) -> dict[str, StratumReport]:
        """Of the rollouts chosen ([n] bool)."""
        if self.trace.strata is None:
            return {}
        num_rollouts = max(int(np.count_nonzero(chosen)), 1)
        num_steps = max(int(np.unique(self.step_of[chosen]).size), 1)
        found = {}
        for name in sorted(set(self.strata) - {""}):
            of_it = chosen & (self.trace.strata == name)
            found[name] = StratumReport(
                share=int(np.count_nonzero(of_it)) / num_rollouts,
                steps_without=1.0 - int(np.unique(self.step_of[of_it]).size) / num_steps,
                delay_dispatches=Quantiles.of(delays[of_it]),
            )
        return found

    def _ready_step(self) -> Ints:
        """[n] dispatches made when a rollout could go: when it was accepted, or the last of its siblings was. For one
        whose group stayed short, the dispatch that took it."""
        size = self.config.tracked_group_size
        if size is None:
            return self.accepted_step
        groups = self.trace.group_ids
        last = np.zeros(int(groups.max()) + 1, dtype=np.int64)
        np.maximum.at(last, groups, self.accepted_step)
        return np.where(np.bincount(groups)[groups] < size, self.step_of, last[groups])


def _padded_work(costs: list[float]) -> float:
    """Of a micro-batch whose rows are padded to the longest."""
    return len(costs) * max(costs)


def _length_bias(came: Ints, went: Ints, skips: Ints, step_of: Ints) -> LengthBiasSummary:
    """The running figures of ``planning``, over the lengths that came, and those that went ([m] each) step by step."""
    bias = LengthBias()
    bias.arrived(came)
    order = np.argsort(step_of, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(step_of[order])) + 1):
        bias.record(went[rows], skips[rows])
    return bias.summary()
