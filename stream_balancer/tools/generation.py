"""Generation of rollouts in virtual time: which one finishes next, and when. Pure: seeded, no clock.

Every stream begins in mid-run. Slots that all begin at once finish their short rollouts first, and no outlier until it
is done: on heavy tails that takes more than 100 steps, and is no picture of a run of weeks.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from stream_balancer.errors import ConfigError
from stream_balancer.planning.arrays import Ints
from stream_balancer.tools.trace import Trace


def issue_order(trace: Trace, seed: int) -> Ints:
    """[n] rows in the order generation gets them: groups shuffled, siblings together; as recorded where arrivals are
    known."""
    if trace.arrival_s is not None:
        return np.arange(len(trace))
    groups, group_of = np.unique(trace.group_ids, return_inverse=True)
    # argsort of a permutation: at which place each group comes
    places = np.argsort(np.random.default_rng(seed).permutation(groups.size))
    return np.argsort(places[group_of], kind="stable")


def seconds_per_rollout(trace: Trace, slots: int, tokens_per_second: float) -> float:
    """Mean seconds between two finished rollouts, in the long run."""
    if trace.arrival_s is not None:
        return float(trace.arrival_s[-1] - trace.arrival_s[0]) / len(trace)
    return float(trace.output_tokens.mean()) / tokens_per_second / slots


def check_generation(slots: int, tokens_per_second: float) -> None:
    """Raise ConfigError where no rollout would ever finish."""
    if slots < 1 or not 0 < tokens_per_second < math.inf:
        raise ConfigError(
            f"slots ({slots!r}) must be >= 1 and tokens_per_second ({tokens_per_second!r}) a finite number > 0, or no "
            "rollout would ever finish"
        )


class Generation:
    """Generation slots: which row's rollout finishes next, and when. A slot is taken until ``release``.

    Second 0 is a moment of a run that generates the trace over and over, in the same order: slots hold what they hold
    there, mostly long rollouts, each partly done. From then on every row counts the first time it finishes. What was
    in flight at second 0 comes up in the order again, near its end: it is generated once more, as it would be there,
    and not counted. Without recorded arrivals, then, neither the first rollouts are short nor the last ones long.

    ``whole_groups``: siblings of what is in flight at second 0 that are finished by then come at second 0, since a
    balancer that sends groups whole holds them. ``step_s``: seconds between two steps before second 0.
    """

    def __init__(
        self,
        trace: Trace,
        slots: int,
        tokens_per_second: float,
        seed: int,
        *,
        whole_groups: bool = False,
        step_s: float = math.inf,
    ) -> None:
        self.dry_step: int | None = None
        """Steps made when a slot first found no prompt; None before, and with recorded arrivals."""
        self.started_step = np.zeros(len(trace), dtype=np.int64)
        """[n] steps made when each row's rollout began (when it arrived, where arrivals are recorded): below 0 for
        those that were in flight at second 0."""
        self.slots = slots if trace.arrival_s is None else math.nan
        """Rollouts generated at a time; NaN with recorded arrivals."""
        self._running: list[tuple[float, int, int]]  # (finish, issued as the n-th, row), a heap
        self._left = set(range(len(trace)))
        self._without_slot = 0
        self._recorded = trace.arrival_s is not None
        if trace.arrival_s is not None:
            since_first = trace.arrival_s - trace.arrival_s[0]
            # sorted: a heap as it is
            self._running = [(at_s, row, row) for row, at_s in enumerate(since_first.tolist())]
            return
        self._duration: list[float] = (trace.output_tokens / tokens_per_second).tolist()
        order = issue_order(trace, seed).tolist()
        self._running = _in_mid_run(self._duration, order, slots, seed)
        self._todo = enumerate(order, len(trace))
        for finish, _, row in reversed(self._running):  # of a row that several slots hold the first to finish counts
            begun_s = finish - self._duration[row]
            self.started_step[row] = math.floor(begun_s / step_s) if begun_s < 0 else 0
        in_flight = {row for _, _, row in self._running}
        self._unissued = self._left - in_flight
        if whole_groups:
            # these are done and wait in the balancer for their siblings in flight
            begun = np.flatnonzero(np.isin(trace.group_ids, trace.group_ids[[*in_flight]])).tolist()
            before = [row for row in begun if row not in in_flight]
            self._running = [*((0.0, -2, row) for row in before), *self._running]
            self._without_slot = len(before)
            self._unissued -= set(begun)

    @property
    def next_finish(self) -> float:
        """Seconds; inf when every row has finished, or every slot waits for ``release``."""
        return self._running[0][0] if self._left and self._running else math.inf

    def pop(self, step: int) -> int | None:
        """The row that finishes next, whose slot stays taken; None if it has finished before: its slot takes the next
        prompt."""
        now, _, row = heapq.heappop(self._running)
        # it was in flight at second 0, and its row has come up again in the order
        if row not in self._left:
            self.release(now, step)
            return None
        self._left.remove(row)
        if self._recorded:
            self.started_step[row] = step
        return row

    def release(self, now: float, step: int) -> None:
        """A slot is free: it takes the next prompt."""
        if self._recorded:
            return
        if self._without_slot:  # these come first
            self._without_slot -= 1
            return
        if not self._unissued:
            self.dry_step = step if self.dry_step is None else self.dry_step
            return
        number, row = next(self._todo)
        if row in self._unissued:
            self._unissued.remove(row)
            self.started_step[row] = step
        # the number breaks ties: what finishes together comes as it was issued, on every machine
        heapq.heappush(self._running, (now + self._duration[row], number, row))


def _in_mid_run(duration: list[float], order: list[int], slots: int, seed: int) -> list[tuple[float, int, int]]:
    """Content of the slots at a moment of a long run: (seconds to go, issued as the n-th, row), sorted.

    A slot is found with a rollout in proportion to how long that takes, and any part of it may be over. From there the
    trace is generated once, so that what is in flight is what the order has left there.
    """
    random = np.random.default_rng((seed, slots))
    # the inspection paradox: whoever looks at a moment finds long rollouts more often than they are issued
    weights = np.array(duration)
    total = weights.sum()
    rows = random.choice(weights.size, slots, p=weights / total if total > 0 else None)
    to_go = weights[rows] * random.random(slots)
    running = [(one, -1, row) for one, row in zip(to_go.tolist(), rows.tolist(), strict=True)]
    heapq.heapify(running)
    now = 0.0
    for number, row in enumerate(order):
        now = running[0][0]
        heapq.heapreplace(running, (now + duration[row], number, row))
    return sorted((finish - now, number, row) for finish, number, row in running)
