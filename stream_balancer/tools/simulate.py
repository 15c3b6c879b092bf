"""Simulation of a balancer over a trace: the same ``core``, driven by a virtual clock. No event loop, no processes.

    generation --finish--> (put waits for room) --add--> core --poll, when the trainer is free--> trainer
        ^-------- the slot is free again once put returned --'      ^---------- acknowledge -------'

What is simulated is *predicted* work: a step takes as long as its most loaded rank, by the config's cost model. What is
not: transport, optimizer time, how generation slows down when many sequences run at once.

Here: what is run, and what it comes to; ``simulation_run`` moves the clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from stream_balancer.config import BalancerConfig, Policy
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import ConfigError
from stream_balancer.planning import LengthBias, LengthBiasSummary
from stream_balancer.planning.arrays import Ints
from stream_balancer.planning.plan import TOLERANCE
from stream_balancer.tools.generation import Generation, check_generation, seconds_per_rollout
from stream_balancer.tools.simulation_report import Quantiles, Segment, SimulationReport, steps_of
from stream_balancer.tools.simulation_run import Run
from stream_balancer.tools.trace import Trace

TrainerSpeed: TypeAlias = float | Literal["instant", "matched"]
"""How fast a rank trains: work per second in the cost model's unit; ``"instant"``: it takes every batch the moment one
is ready, so that exactly the window waits at each step; ``"matched"``: perfectly balanced ranks would just keep up
with generation, so that all imbalance shows as time."""

WARM_UP_SKIPS = 3
"""Steps of warm-up, in ``max_skips``: until then the window holds fewer outliers than in the long run."""
UNBOUNDED_WARM_UP = 50
"""Steps of warm-up without ``max_skips``."""
WARM_UP_PART = 4
"""But never more than a quarter of a short run."""
LEAST_STEADY = 8
"""Steps; fewer are no steady state."""
WINDOW_UNGIVEN: dict[str, Any] = {
    "window": None,
    "max_skips": "auto",
    "capacity": None,
}
"""The window and what follows from it, to be derived anew: changes for ``replace``."""


def as_policy(config: BalancerConfig, policy: Policy) -> BalancerConfig:
    """Knobs under another policy, window and ``max_skips`` derived anew where the policy fixes the window."""
    # the user's own window, as it is: only another policy needs one derived
    if policy == config.policy:
        return config
    return config.replace(**WINDOW_UNGIVEN | {"policy": policy})


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

    :param trace: lengths, and arrivals where they were recorded; without, generation is simulated: ``slots`` rollouts
        at a time, groups in shuffled order with siblings together. A slot stays taken while its rollout waits for room.
    :param config: the knobs; ``policy`` says whether the window or one of the usual ways is run.
    :param slots: rollouts generated at a time. Ignored where arrivals are recorded.
    :param tokens_per_second: of one slot. Ignored where arrivals are recorded.
    :param trainer: ``"instant"``, ``"matched"``, or work per second and rank: see :data:`TrainerSpeed`.
    :param warm_up: steps left out of the figures; None = 3 x ``max_skips``, but at most a quarter of those before
        the tail.
    :param seed: for the order in which groups are generated.
    :param tolerance: how near to the lower bound partitions are sought; 0.003 takes three fifths of the time, and shows
        up to 0.1 points more idle time.
    :param progress: called with the number of rollouts dispatched or evicted so far, after every step.

    Raises ConfigError for slots, a trainer or a warm-up that make no sense, RolloutError for a rollout the config
    refuses (above the token cap).
    """
    check_generation(slots, tokens_per_second)
    if warm_up is not None and warm_up < 0:
        raise ConfigError(f"warm_up must be >= 0 steps, not {warm_up!r}")
    rollout_s = seconds_per_rollout(trace, slots, tokens_per_second)
    # generation's pace first: a matched trainer is as fast as that
    rate = _work_per_second(trainer, trace, config, rollout_s)
    core = BalancerCore(config, tolerance=tolerance)
    grouped = config.groups.size is not None
    generation = Generation(
        trace,
        slots,
        tokens_per_second,
        seed,
        whole_groups=grouped,
        step_s=config.batch_size * rollout_s,
    )
    run = Run(trace, core, generation, rate)
    run.to_the_end(progress)
    return report_of(run, warm_up)


def _work_per_second(trainer: TrainerSpeed, trace: Trace, config: BalancerConfig, rollout_s: float) -> float:
    """Work per second of a rank; inf = instant."""
    if trainer == "instant":
        return math.inf
    if trainer == "matched":
        work = float(np.asarray(config.cost(trace.lengths)).mean())
        return work / config.dp_size / rollout_s if rollout_s > 0 and work > 0 else math.inf
    if not isinstance(trainer, (int, float)) or not trainer > 0:
        raise ConfigError(
            f"trainer must be 'instant', 'matched' or work units per second (a number > 0), not {trainer!r}"
        )
    return trainer


def report_of(run: Run, warm_up: int | None) -> SimulationReport:
    """Report of a run that has ended."""
    steps = steps_of(run.records, run.config.dp_size)
    # The steady state ends with the drain, or before, when a slot finds no prompt any more: then fewer are
    # generated at a time.
    last = int((steps.reason != "drain").sum())
    if run.generation.dry_step is not None:
        last = min(last, run.generation.dry_step)
    skips = run.config.max_skips
    usual = UNBOUNDED_WARM_UP if skips is None else WARM_UP_SKIPS * skips
    first = min(usual, last // WARM_UP_PART) if warm_up is None else min(warm_up, last)
    is_steady = last - first >= LEAST_STEADY
    begin, end = (first, last) if is_steady else (0, run.step)
    # steps are numbered from 0, so a step's number is its row
    shown = slice(begin, end)
    chosen = (run.step_of >= begin) & (run.step_of < end)
    # what came in the same stretch, dispatched or not: else long rollouts that are held back would not be seen
    came = (run.accepted_step >= begin) & (run.accepted_step < end)
    missed = (run.step_of < 0) & (run.accepted_step >= begin) & (run.accepted_step <= end)
    delays = run.step_of - run.accepted_step
    delay_s, blocked_s = run.dispatched_s - run.accepted_s, run.accepted_s - run.finished_s
    lengths, counts = run.trace.lengths, run.core.counts
    return SimulationReport(
        trace_name=run.trace.name,
        config=run.config,
        num_rollouts=len(run.trace),
        num_tokens=run.trace.num_tokens,
        evicted=counts.evicted.total(),
        padding_copies=counts.padding_copies,
        reasons=dict(Counter(steps.reason.tolist())),
        is_steady=is_steady,
        shown_steps=shown,
        figures=Segment.of(steps[shown]),
        overall=Segment.of(steps),
        delay_s=Quantiles.of(delay_s[chosen]),
        delay_steps=Quantiles.of(delays[chosen]),
        max_skips_seen=int((run.step_of - _ready_step(run))[run.step_of >= 0].max(initial=0)),
        staleness=Quantiles.of((run.step_of - run.generation.started_step)[chosen]),
        length_bias=_length_bias(lengths[chosen], delays[chosen], lengths[missed]),
        arrived_lengths=Quantiles.of(lengths[came]),
        dispatched_lengths=Quantiles.of(lengths[chosen]),
        elapsed_s=run.now,
        work_per_second=run.rate,
        blocked_s=float(blocked_s.mean()),
        generation_idle=float(blocked_s.sum()) / (run.generation.slots * run.now) if run.now else 0.0,
        steps=steps,
        step_of=run.step_of,
    )


def _ready_step(run: Run) -> Ints:
    """[n] steps made when a rollout could go: when it was accepted, or the last of its siblings was. For one
    whose group stayed short, the step that took it."""
    size = run.config.groups.size
    if size is None:
        return run.accepted_step
    groups, went = run.trace.group_ids, run.step_of >= 0
    last = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    # a sibling that came too late was not waited for
    np.maximum.at(last, groups[went], run.accepted_step[went])
    return np.where(np.bincount(groups)[groups] < size, run.step_of, last[groups])


def _length_bias(went: Ints, skips: Ints, cut: Ints) -> LengthBiasSummary:
    """The running figures of ``planning``, over the lengths that went, and those that were evicted."""
    bias = LengthBias()
    bias.record(went, skips)
    bias.cut(cut.tolist())
    return bias.summary()
