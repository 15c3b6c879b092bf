"""Running totals of a balancer, and what follows from them. Pure; nothing decides here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from stream_balancer.rollouts import Batch, EvictReason, Reason
from stream_balancer.statistics import Statistics, TrainingAge

_OLDEST = 1_000  # versions; what is older counts as this old


class Counts:
    """Running totals behind ``Statistics``."""

    def __init__(self) -> None:
        self.accepted = self.acknowledged = self.nacked = self.peak_waiting = self.dispatched_tokens = 0
        self.squared_tokens = self.padding_copies = self.short_groups = self.cut_siblings = 0
        self.evicted: Counter[EvictReason] = Counter(dict.fromkeys(get_args(EvictReason), 0))
        self.batches: Counter[Reason] = Counter(dict.fromkeys(get_args(Reason), 0))
        self.mean_loads = self.max_loads = self.lower_bounds = self.mean_seconds = self.max_seconds = 0.0

    def record(self, batch: Batch) -> None:
        self.batches[batch.reason] += 1
        self.dispatched_tokens += batch.num_tokens
        self.squared_tokens += batch.num_tokens**2
        self.padding_copies += batch.num_padding
        self.short_groups += len(batch.incomplete_groups)
        self.mean_loads += sum(batch.loads) / len(batch.loads)
        self.max_loads += batch.finish
        self.lower_bounds += batch.lower_bound

    def record_seconds(self, seconds: Sequence[float]) -> None:
        self.mean_seconds += sum(seconds) / len(seconds)
        self.max_seconds += max(seconds)

    def figures(self) -> dict[str, Any]:
        """Fields of ``Statistics`` that follow."""
        loads, bounds, slowest = self.mean_loads, self.lower_bounds, self.max_loads
        steps, tokens = self.batches.total(), self.dispatched_tokens
        return {
            **{name: total for name, total in self.totals().items() if name in Statistics.__dataclass_fields__},
            # None where nothing is known. Standard deviation over mean, exact but for the last rounding: sums of ints
            "token_variation": math.sqrt(steps * self.squared_tokens - tokens**2) / tokens if tokens else None,
            "idle_fraction": 1.0 - loads / slowest if slowest > 0 else None,
            "unavoidable_idle_fraction": max(bounds - loads, 0.0) / slowest if slowest > 0 else None,
            "measured_idle_fraction": 1.0 - self.mean_seconds / self.max_seconds if self.max_seconds > 0 else None,
        }

    def totals(self) -> dict[str, Any]:
        """Everything, as numbers and dicts of numbers."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def take_over(self, totals: Mapping[str, Any]) -> None:
        """Continue from the totals of another."""
        for name, value in totals.items():
            if name in vars(self):
                setattr(self, name, Counter(value) if isinstance(value, Mapping) else value)


class TrainingAges:
    """How old rollouts were when their training began, since this balancer was made."""

    def __init__(self) -> None:
        # by age
        self._rollouts: Counter[int] = Counter()

    def record(self, batch: Batch, version: int | None) -> None:
        """The training of a batch begins, with this version of the policy."""
        if version is None:
            return
        for rollout in batch.rollouts:
            if rollout.min_version is not None and not rollout.is_padding:
                self._rollouts[min(max(version - rollout.min_version, 0), _OLDEST)] += 1

    def summary(self) -> TrainingAge | None:
        """None before the first rollout of a known version. O(different ages)."""
        total = self._rollouts.total()
        if not total:
            return None
        below, p99 = 0, 0
        for p99 in sorted(self._rollouts):
            below += self._rollouts[p99]
            if below >= 0.99 * total:
                break
        mean = sum(age * number for age, number in self._rollouts.items()) / total
        return TrainingAge(rollouts=total, mean=mean, p99=p99, max=max(self._rollouts))
