"""Generation of rollouts in virtual time: which one finishes next, and when. Pure: seeded, no clock."""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np

from stream_balancer.errors import ConfigError
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.tools.trace import Trace, rows_by_group

__all__ = ["Generation", "check_generation", "finish_times", "issue_order"]


def issue_order(trace: Trace, seed: int) -> Ints:
    """[n] rows in the order generation gets them: groups shuffled, siblings together; as recorded where arrivals are
    known."""
    if trace.arrival_s is not None:
        return np.arange(len(trace))
    order, starts, sizes = rows_by_group(trace.group_ids)
    shuffled = np.random.default_rng(seed).permutation(sizes.size)
    return np.concatenate([order[starts[g] : starts[g] + sizes[g]] for g in shuffled.tolist()])


def finish_times(trace: Trace, slots: int = 128, tokens_per_second: float = 30.0, seed: int = 0) -> Floats:
    """[n] seconds at which each row's rollout is finished, from 0; the recorded arrivals where there are any.

    Otherwise ``slots`` rollouts are generated at a time, groups in shuffled order with siblings together, each taking
    output_tokens / tokens_per_second once it got a slot. The finish order is then length-biased, as it is in life:
    short rollouts come first, and the last tenth to come may be three times as long as the mean.
    """
    check_generation(slots, tokens_per_second)
    if trace.arrival_s is not None:
        since_first: Floats = trace.arrival_s - trace.arrival_s[0]
        return since_first
    duration = (trace.output_tokens / tokens_per_second).tolist()
    free_at = [0.0] * min(slots, len(trace))
    finish = np.empty(len(trace))
    for row in issue_order(trace, seed).tolist():
        done = free_at[0] + duration[row]
        heapq.heapreplace(free_at, done)
        finish[row] = done
    return finish


def check_generation(slots: int, tokens_per_second: float) -> None:
    """Raise ConfigError where no rollout would ever finish."""
    if slots < 1:
        raise ConfigError(f"slots must be >= 1, not {slots!r}: without a generation slot no rollout would ever finish")
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        raise ConfigError(
            f"tokens_per_second must be a finite number > 0, not {tokens_per_second!r}: no rollout would ever finish"
        )


class Generation:
    """Generation slots: which row's rollout finishes next, and when. A slot is taken until ``release``."""

    def __init__(self, trace: Trace, slots: int, tokens_per_second: float, seed: int) -> None:
        self._todo: deque[int] = deque(issue_order(trace, seed).tolist())
        self._running: list[tuple[float, int, int]] = []  # (finish, issued as the n-th, row), a heap
        self._issued = 0
        self.dry_step: int | None = None
        """Dispatches made when a slot first found no prompt; None before, and with recorded arrivals."""
        self.started_step = np.zeros(len(trace), dtype=np.int64)
        self._recorded = trace.arrival_s is not None
        if self._recorded:
            times = finish_times(trace)
            self._running = [(float(t), row, row) for row, t in enumerate(times.tolist())]  # sorted: a heap as it is
            self._todo.clear()
        else:
            self._duration: list[float] = (trace.output_tokens / tokens_per_second).tolist()
            for _ in range(min(slots, len(trace))):
                self.release(0.0, 0)

    @property
    def next_finish(self) -> float:
        """Seconds; inf if nothing runs."""
        return self._running[0][0] if self._running else math.inf

    def pop(self, step: int) -> int:
        """The row that finishes next. Its slot stays taken."""
        row = heapq.heappop(self._running)[2]
        if self._recorded:
            self.started_step[row] = step
        return row

    def release(self, now: float, step: int) -> None:
        """A slot is free: it takes the next prompt."""
        if self._todo:
            row = self._todo.popleft()
            self.started_step[row] = step
            heapq.heappush(self._running, (now + self._duration[row], self._issued, row))
            self._issued += 1
        elif self.dry_step is None and not self._recorded:
            self.dry_step = step
