"""What a run measured, on both sides, and whether every rollout was trained on exactly once. A run in figures is a
dict, which ``--json`` prints; :mod:`stream_balancer.demo.view` says what they mean."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, pvariance
from typing import Any, TypeAlias

import anyio

from stream_balancer.core.observer import Observer
from stream_balancer.demo.rank import RankRun
from stream_balancer.demo.rollouts import checksum
from stream_balancer.types import Batch, Rollout

__all__ = ["ControllerRun", "Figures", "percentile", "summarize"]

Figures: TypeAlias = dict[str, Any]
"""JSON-like; None where there is nothing to measure."""


class ControllerRun(Observer):
    """What the controller did in a run, from the balancer's events."""

    def __init__(self) -> None:
        self.puts: list[tuple[str, int]] = []  # (rollout_id, checksum)
        self.num_tokens = 0
        self.delays_s: list[float] = []  # from acceptance to dispatch, of each rollout
        self.loads: list[tuple[float, ...]] = []  # predicted work per rank, of each batch
        self.reasons: Counter[str] = Counter()
        self.wall_s = 0.0  # from the first put to the last acknowledgement
        self._began_s: float | None = None
        self._accepted_at: dict[str, float] = {}

    def accepted(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Note when, and which tokens."""
        self._began_s = self._began_s or time.monotonic()
        for rollout in rollouts:
            self.puts.append((rollout.rollout_id, checksum(rollout)))
            self.num_tokens += rollout.num_tokens
            self._accepted_at[rollout.rollout_id] = now

    def dispatched(self, batch: Batch) -> None:
        """Note how long its rollouts waited."""
        now = anyio.current_time()
        self.delays_s += [now - self._accepted_at[r.rollout_id] for r in batch.rollouts if not r.is_padding]
        self.loads.append(batch.loads)
        self.reasons[batch.reason] += 1

    def acknowledged(self, batch: Batch) -> None:
        """Note the end."""
        self.wall_s = time.monotonic() - (self._began_s or 0.0)


def summarize(policy: str, controller: ControllerRun, ranks: Sequence[RankRun], expected: Iterable[str]) -> Figures:
    """The figures of a run that was to train on the rollouts ``expected`` (their ids). ``problems``: what speaks
    against "every rollout exactly once, with the tokens that were put". Compute is CPU seconds."""
    compute: dict[int, list[float]] = {}  # step -> seconds of every rank
    loss = Counter[int]()
    for rank in ranks:
        for done in rank.steps:
            compute.setdefault(done.step, []).append(done.compute_s)
            loss[done.step] += done.loss  # type: ignore[assignment]  # a Counter of floats adds up just as well
    slowest = sum(map(max, compute.values()))
    problems = _problems(controller.puts, ranks, expected)
    return {
        "policy": policy,
        "num_steps": len(compute),
        "num_rollouts": len(controller.puts),
        "num_tokens": controller.num_tokens,
        "wall_s": controller.wall_s,
        "compute_s": [sum(done.compute_s for done in rank.steps) for rank in ranks],
        "slowest_s": slowest,
        "idle_fraction": _idle(sum(map(sum, compute.values())) / len(ranks), slowest),
        "predicted_idle_fraction": _idle(sum(map(fmean, controller.loads)), sum(map(max, controller.loads))),
        "tokens_per_second": controller.num_tokens / slowest if slowest else None,
        "step_variance_s2": fmean(map(pvariance, compute.values())) if compute else None,
        "delay_p50_s": percentile(controller.delays_s, 0.50),
        "delay_p99_s": percentile(controller.delays_s, 0.99),
        "reasons": dict(controller.reasons),
        "problems": problems,
        "final_loss": loss[max(compute)] if compute else None,
        "exactly_once": not problems,
    }


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Smallest value with at least ``fraction`` of the values at or below it; None of none. O(n log(n))."""
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)] if ordered else None


def _idle(mean: float, slowest: float) -> float | None:
    return 1.0 - mean / slowest if slowest > 0 else None


def _problems(puts: Sequence[tuple[str, int]], ranks: Sequence[RankRun], expected: Iterable[str]) -> list[str]:
    """Everything that is not "exactly once, unchanged, on ranks that agree", in words."""
    put = dict(puts)
    times_put = Counter(rollout_id for rollout_id, _ in puts)
    trained = [pair for rank in ranks for done in rank.steps for pair in done.trained]
    times_trained = Counter(rollout_id for rollout_id, _ in trained)
    checks = {
        "never put": [r for r in expected if r not in put],
        "put more than once": [r for r, n in times_put.items() if n > 1],
        "put but never trained on": [r for r in put if r not in times_trained],
        "trained on more than once": [r for r, n in times_trained.items() if n > 1],
        "trained on but never put": [r for r in times_trained if r not in put],
        "trained on with other tokens than were put": [r for r, c in trained if put.get(r, c) != c],
    }
    problems = [f"{len(ids)} rollouts {what}: {_some(ids)}" for what, ids in checks.items() if ids]
    steps = Counter(done.step for rank in ranks for done in rank.steps)
    if uneven := [str(step) for step, n in steps.items() if n != len(ranks)]:
        problems.append(f"{len(uneven)} steps were not trained by all {len(ranks)} ranks: {_some(uneven)}")
    if len({(done.step, done.micro_batches) for rank in ranks for done in rank.steps}) != len(steps):
        problems.append("ranks ran different numbers of micro-batches in one step")
    if len({rank.parameters_checksum for rank in ranks}) > 1:
        problems.append("the ranks ended with different parameters")
    return problems


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
