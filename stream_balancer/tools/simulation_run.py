"""A simulated run: the moves between two moments.

Three clocks move it: a generation slot finishes a rollout, the trainer finishes a step, the core's deadline passes. The
next of them is the next moment simulated, so a run of hours takes seconds, and the same seed gives the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import WouldBlock
from stream_balancer.rollouts import Batch, Rollout
from stream_balancer.tools.generation import Generation
from stream_balancer.tools.trace import Trace


class Run:
    """A run over a trace, and what is recorded of it, by rollout and by step."""

    def __init__(self, trace: Trace, core: BalancerCore, generation: Generation, work_per_second: float) -> None:
        config = core.config
        self.trace, self.config, self.generation = trace, config, generation
        self.core = core
        self.rate = work_per_second
        self.lengths: list[int] = trace.lengths.tolist()
        # of all at once: a cost model is numpy, and a call for one length takes as long as for thousands
        self.cost_list: list[float] = np.asarray(config.cost(trace.lengths), dtype=np.float64).tolist()
        self.group_names = [str(g) for g in trace.group_ids.tolist()]
        self.groups_count = config.groups.size is not None
        self.versioned = config.staleness.max_versions is not None
        self.first_version = -int(generation.started_step.min())  # the oldest in flight began with version 0
        if self.versioned:
            core.set_version(self.first_version)
        self.ids = torch.zeros(max(self.lengths), dtype=torch.int64)  # one buffer: every rollout is a view of it
        self.blocked: dict[int, None] = {}
        """Finished rollouts whose put waits for room: first come, first served, but siblings of a waiting group may
        pass."""
        self.now = 0.0
        self.step = 0
        self.busy_until: float | None = None
        num = len(trace)
        self.finished_s, self.accepted_s, self.dispatched_s = np.zeros(num), np.zeros(num), np.zeros(num)
        self.accepted_step = np.zeros(num, dtype=np.int64)
        self.step_of = np.full(num, -1, dtype=np.int64)
        self.num_dispatched = 0
        self.records: list[tuple[Any, ...]] = []
        """Columns of ``Steps``, for each step."""

    @property
    def num_gone(self) -> int:
        """Rollouts dispatched or evicted."""
        return self.num_dispatched + self.core.counts.evicted.total()

    def to_the_end(self, progress: Callable[[int], None] | None) -> None:
        while True:
            self._train(progress)
            if self.core.finished and self.busy_until is None:
                return
            if not self.core.ended and self.generation.next_finish == math.inf and not self.blocked:
                self.core.end()  # the trace is over: what still waits leaves as the drain
                continue
            # while a step runs the trainer asks for nothing, so the core's own wake-up does not count
            wakeup = self.core.next_wakeup() if self.busy_until is None else self.busy_until
            moment = min(self.generation.next_finish, wakeup)
            # rollouts are left, and the core promises that these leave some day
            assert moment < math.inf, f"nothing can leave after {self.step} steps: {self.core.config!r}"
            self.now = max(self.now, moment)
            # One rollout at a time, then the trainer again: a window that fills in the middle of a burst leaves there,
            # as it would live.
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
            # after all that comes at this moment, as a loop's timer
            if self.generation.next_finish > self.now:
                self.core.cut_stragglers(self.now)
            batch = self.core.poll(self.now)
            if batch is None:
                return
            self._dispatch(batch)
            self._let_in()
            if progress is not None:
                progress(self.num_gone)

    def _dispatch(self, batch: Batch) -> None:
        # a rollout is called by the number of its row in the trace
        rows = np.array([int(r.rollout_id) for r in batch.rollouts if not r.is_padding], dtype=np.int64)
        self.step_of[rows] = batch.step
        self.dispatched_s[rows] = self.now
        self.num_dispatched += rows.size
        mean, slowest = sum(batch.loads) / len(batch.loads), batch.finish
        bound = min(max(batch.lower_bound, mean), slowest)  # padding can put it outside: keep the parts >= 0
        self.records.append(
            (self.now, batch.reason, batch.num_rollouts, batch.num_tokens, mean, bound, slowest, batch.loads)
        )
        self.busy_until = self.now + slowest / self.rate  # at once with an instant trainer, whose rate is inf
        self.step += 1

    def _offer(self, row: int) -> bool:
        """A rollout is finished, or may find room again: put it. False if its put waits for room."""
        try:
            self.core.add(self._rollout(row), self.now)
        except WouldBlock:
            self.blocked[row] = None
            return False
        # before siblings are let in, which may call this again
        self.blocked.pop(row, None)
        self.accepted_s[row] = self.now
        self.accepted_step[row] = self.step
        self.generation.release(self.now, self.step)
        if self.groups_count:  # siblings of a waiting group are let in beyond the capacity
            for sibling in [one for one in self.blocked if self.group_names[one] == self.group_names[row]]:
                if sibling in self.blocked:  # else one of them has let it in
                    self._offer(sibling)
        return True

    def _let_in(self) -> None:
        """Put what is blocked, as long as there is room."""
        while self.blocked:
            if not self._offer(next(iter(self.blocked))):
                return

    def _rollout(self, row: int) -> Rollout:
        """A rollout as light as a valid one can be: its ids are a view of one buffer. Its ``nbytes`` are 8 a token."""
        return Rollout(
            tokens={"input_ids": self.ids[: self.lengths[row]]},
            rollout_id=str(row),
            group_id=self.group_names[row] if self.groups_count else None,
            version=self.first_version + int(self.generation.started_step[row]) if self.versioned else None,
            cost=self.cost_list[row],
        )
