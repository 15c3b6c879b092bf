"""Measurements of a run, from its messages; and how two runs compare."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any

from stream_balancer.demo.messages import Dispatched, Message, Put, StepDone, Trained

__all__ = ["RunRecord", "RunReport", "percentile", "summarize"]


@dataclass(slots=True)
class RunRecord:
    """Everything the processes of one run said. Fill it with :meth:`add`."""

    puts: list[Put] = field(default_factory=list)
    dispatches: list[Dispatched] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)
    finished: list[Trained] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Note one message."""
        match message:
            case Put():
                self.puts.append(message)
            case Dispatched():
                self.dispatches.append(message)
            case StepDone():
                self.steps.append(message)
            case Trained():
                self.finished.append(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run in figures. Compute is CPU seconds of forward and backward on each rank's training thread."""

    policy: str
    """``BalancerConfig.policy``."""
    num_steps: int
    """Optimizer steps. All are counted; a rank warms up on made-up tokens before the first."""
    num_rollouts: int
    """Rollouts put."""
    num_tokens: int
    """Their tokens."""
    wall_s: float
    """Seconds from the first put to the last gradient, with all ranks sharing this machine's cores."""
    compute_s: tuple[float, ...]
    """Per rank, all steps together."""
    slowest_s: float
    """Sum over steps of the slowest rank: how long ranks with a device each would train."""
    idle_fraction: float
    """1 - sum over steps of the ranks' mean / sum over steps of the slowest."""
    predicted_idle_fraction: float
    """The same of the cost model's predictions, without the noise of measuring."""
    tokens_per_second: float
    """``num_tokens / slowest_s``: as if every rank had a device of its own."""
    step_variance_s2: float
    """Variance over ranks of compute within a step (s^2), averaged over steps."""
    delay_p50_s: float
    """Median seconds from a rollout's acceptance to its dispatch."""
    delay_p99_s: float
    """99th percentile of them."""
    reasons: Mapping[str, int]
    """Batches by the reason they left."""
    problems: tuple[str, ...]
    """What speaks against "every rollout was trained on exactly once, with the tokens that were put". Empty = it
    holds."""
    final_loss: float
    """Loss per trained token at the last step."""

    @property
    def exactly_once(self) -> bool:
        """Every rollout put was trained on exactly once, unchanged."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """JSON-like, NaN as None."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["exactly_once"] = self.exactly_once
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def summarize(record: RunRecord, *, policy: str, ranks: int, expected: Sequence[str], wall_s: float) -> RunReport:
    """The figures of a run that was to train on the rollouts ``expected`` (their ids)."""
    compute = _by_step(record.steps)
    slowest = sum(max(times) for times in compute)
    mean = sum(sum(times) / ranks for times in compute)
    tokens = sum(put.num_tokens for put in record.puts)
    delays = [delay for dispatch in record.dispatches for delay in dispatch.delays_s]
    last = max((done.step for done in record.steps), default=-1)
    return RunReport(
        policy=policy,
        num_steps=len(compute),
        num_rollouts=len(record.puts),
        num_tokens=tokens,
        wall_s=wall_s,
        compute_s=tuple(sum(d.compute_s for d in record.steps if d.rank == rank) for rank in range(ranks)),
        slowest_s=slowest,
        idle_fraction=_idle(mean, slowest),
        predicted_idle_fraction=_idle(
            sum(fmean(d.loads) for d in record.dispatches), sum(max(d.loads) for d in record.dispatches)
        ),
        tokens_per_second=tokens / slowest if slowest else math.nan,
        step_variance_s2=fmean(pvariance(times) for times in compute) if compute else math.nan,
        delay_p50_s=percentile(delays, 0.50),
        delay_p99_s=percentile(delays, 0.99),
        reasons=dict(Counter(d.reason for d in record.dispatches)),
        problems=tuple(_problems(record, ranks, expected)),
        final_loss=sum(d.loss for d in record.steps if d.step == last),
    )


def percentile(values: Sequence[float], fraction: float) -> float:
    """Smallest value with at least ``fraction`` of the values at or below it; NaN for none. O(n log(n))."""
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)] if ordered else math.nan


def _by_step(steps: Sequence[StepDone]) -> list[list[float]]:
    """Compute seconds of every rank, step by step."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    for done in steps:
        times[done.step].append(done.compute_s)
    return [times[step] for step in sorted(times)]


def _idle(mean: float, slowest: float) -> float:
    return 1.0 - mean / slowest if slowest > 0 else math.nan


def _problems(record: RunRecord, ranks: int, expected: Sequence[str]) -> list[str]:
    """Everything that is not "exactly once, unchanged, on ranks that agree", in words."""
    put = {p.rollout_id: p.checksum for p in record.puts}
    times_put = Counter(p.rollout_id for p in record.puts)
    trained = [pair for done in record.steps for pair in done.trained]
    times_trained = Counter(rollout_id for rollout_id, _ in trained)
    checks = {
        "never put": [r for r in expected if r not in times_put],
        "put more than once": [r for r, n in times_put.items() if n > 1],
        "put but never trained on": [r for r in put if r not in times_trained],
        "trained on more than once": [r for r, n in times_trained.items() if n > 1],
        "trained on but never put": [r for r in times_trained if r not in put],
        "trained on with other tokens than were put": [r for r, c in trained if put.get(r, c) != c],
    }
    problems = [f"{len(ids)} rollouts {what}: {_some(ids)}" for what, ids in checks.items() if ids]
    if uneven := [step for step, n in Counter(d.step for d in record.steps).items() if n != ranks]:
        problems.append(f"{len(uneven)} steps were not trained by all {ranks} ranks: {_some(list(map(str, uneven)))}")
    numbers = {(done.step, done.micro_batches) for done in record.steps}
    if len(numbers) != len({step for step, _ in numbers}):
        problems.append("ranks ran different numbers of micro-batches in one step")
    if len({t.parameters_checksum for t in record.finished}) > 1:
        problems.append("the ranks ended with different parameters")
    return problems


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
