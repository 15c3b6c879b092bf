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
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from stream_balancer.config import BalancerConfig, Policy
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import ConfigError
from stream_balancer.learn.auto_window import WindowLearner
from stream_balancer.planning import LengthBias, LengthBiasSummary
from stream_balancer.planning.arrays import Bools, Ints
from stream_balancer.planning.partition import TOLERANCE
from stream_balancer.tools.certify import Certificate
from stream_balancer.tools.certify import certify as certify_stream
from stream_balancer.tools.generation import Generation, check_generation, seconds_per_rollout
from stream_balancer.tools.simulation_report import Quantiles, Segment, SimulationReport, StratumReport, steps_of
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
    "step_size": {"window_tokens": None},
    "max_skips": "auto",
    "capacity": None,
    "limits": {"tokens": None},
}
"""The window and what follows from it, to be derived anew: changes for ``replace``."""


def rollouts_per_batch(trace: Trace, config: BalancerConfig) -> float:
    """Rollouts that a full batch has in the mean."""
    if config.step_size.tokens is None:
        return config.batch_size
    return max(config.step_size.tokens * len(trace) / trace.num_tokens, config.batch_size)


def as_policy(config: BalancerConfig, policy: Policy) -> BalancerConfig:
    """Knobs under another policy, window and ``max_skips`` derived anew where the policy fixes the window, and
    the number of rollouts of a step. Round-robin tears groups."""
    # the user's own window, as it is: only another policy needs one derived
    if policy == config.policy:
        return config
    groups = "same_batch" if policy == "round_robin" and config.groups.keep == "same_rank" else config.groups.keep
    step_size = {"rollouts": None, "window_tokens": None}
    return config.replace(**WINDOW_UNGIVEN | {"policy": policy, "groups": {"keep": groups}, "step_size": step_size})


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
    certify: bool = False,
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
    :param certify: prove a bound, too: ``report.certificate``. Ten seconds per 1,000 steps of 32 on 8 ranks.
    :param progress: called with the number of rollouts dispatched or evicted so far, after every step; with
        ``certify`` once more from 0 while the proof is sought.

    Raises ConfigError for slots, speeds or a warm-up that make no sense, and for knobs under which nothing is proven;
    RolloutError for a rollout the config refuses (above the token cap).
    """
    if certify:
        check_certifiable(config)
    check_generation(slots, tokens_per_second)
    if warm_up is not None and warm_up < 0:
        raise ConfigError(f"warm_up must be >= 0 steps, not {warm_up!r}")
    rollout_s = seconds_per_rollout(trace, slots, tokens_per_second)
    # generation's pace first: a matched trainer is as fast as that
    rate = _work_per_second(trainer, trace, config, rollout_s)
    core = BalancerCore(config, tolerance=tolerance)
    # window="auto" learns here as it does live
    core.observers.append(WindowLearner(core))
    grouped = config.groups.kept is not None
    generation = Generation(
        trace,
        slots,
        tokens_per_second,
        seed,
        whole_groups=grouped,
        step_s=rollouts_per_batch(trace, config) * rollout_s,
    )
    run = Run(trace, core, generation, rate)
    run.to_the_end(progress)
    report = report_of(run, warm_up)
    return replace(report, certificate=_certificate(run, progress)) if certify else report


def check_certifiable(config: BalancerConfig) -> None:
    """Raise ConfigError, before a run, where a certificate would not hold."""
    for knob, holds in {
        "deadline_s=None": config.deadline_s is None,
        "step_size.tokens=None": config.step_size.tokens is None,
        "step_size.rollouts=None": config.step_size.rollouts is None,
        "groups.size=None": config.groups.kept is None,
        "staleness.max_versions=None": config.staleness.max_versions is None,
        "speeds=None": len(set(config.speeds or (1.0,))) == 1,
    }.items():
        if not holds:
            raise ConfigError(
                f"certify needs {knob}: the proof is of steps of batch_size rollouts that wait one by one and "
                "run on one rank each, all ranks being equally fast. Set it, or leave certify out"
            )


def _certificate(run: Run, progress: Callable[[int], None] | None) -> Certificate:
    config, speed = run.config, (run.config.speeds or (1.0,))[0]
    cap = config.micro_batches.max_tokens
    steps = np.bincount(run.step_of)
    if (steps[:-1] != config.batch_size).any():
        raise ConfigError("certify needs steps of batch_size rollouts, and limits made one smaller. Raise limits")
    order = np.argsort(run.accepted_step, kind="stable")
    return certify_stream(
        np.array(run.cost_list)[order] / speed,
        run.accepted_step[order],
        batch_size=config.batch_size,
        ranks=config.dp_size,
        max_skips=config.max_skips,
        equal_counts=config.counts == "equal",
        tokens=run.trace.lengths[order] if config.sync == "micro_batch" and cap is not None else None,
        max_tokens=cap or 1,
        progress=None if progress is None else lambda done, rounds: progress(done * len(run.trace) // rounds),
    )


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
        strata=_by_stratum(run, chosen, delays),
        elapsed_s=run.now,
        work_per_second=run.rate,
        blocked_s=float(blocked_s.mean()),
        generation_idle=float(blocked_s.sum()) / (run.generation.slots * run.now) if run.now else 0.0,
        steps=steps,
        step_of=run.step_of,
    )


def _by_stratum(run: Run, chosen: Bools, delays: Ints) -> dict[str, StratumReport]:
    """Figures of the chosen rollouts ([n] bool), by stratum."""
    if run.trace.strata is None:
        return {}
    num_rollouts, num_steps = int(chosen.sum()), np.unique(run.step_of[chosen]).size
    found = {}
    for name in sorted(set(run.strata) - {""}):
        of_it = chosen & (run.trace.strata == name)
        found[name] = StratumReport(
            share=int(of_it.sum()) / max(num_rollouts, 1),
            steps_without=1.0 - np.unique(run.step_of[of_it]).size / max(num_steps, 1),
            delay_steps=Quantiles.of(delays[of_it]),
        )
    return found


def _ready_step(run: Run) -> Ints:
    """[n] steps made when a rollout could go: when it was accepted, or the last of its siblings was. For one
    whose group stayed short, the step that took it."""
    size = run.config.groups.kept
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
