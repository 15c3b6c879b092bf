"""When a batch leaves, for which reason, and which rollouts must be in it. Pure, time is an argument.

A batch leaves when it is asked for and one of these holds, in this order:

    drain     no more rollouts will come: whatever is left
    window    ``window`` rollouts are ready, or a put found no room (force flush)
    deadline  the oldest has waited ``deadline_s``, and ``min_batch_size`` are ready
    age       rollouts would be too old with one more step before them, and a full batch is ready

:meth:`Triggers.next_wakeup` says when that is next so if nothing else happens, so that nobody has to ask twice. Which
rollouts make the best batch is planned elsewhere (``planning``); how old they are is counted in ``staleness``.
"""

from __future__ import annotations

import math

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.staleness import RolloutAges
from stream_balancer.planning.arrays import Bools
from stream_balancer.rollouts import Reason


class Triggers:
    """The four reasons for a batch to leave, over what waits now."""

    def __init__(self, config: BalancerConfig, buffer: Buffer, staleness: RolloutAges) -> None:
        self.config = config
        self.ended = False
        """No more rollouts will come: drain."""
        self.stuck = False
        """The window counts as full for as long as this is so."""
        self._buffer = buffer
        self._staleness = staleness
        # a put found no room since the last step
        self._force_flush = False
        # no deadline batch before then: too few are ready
        self._not_before = -math.inf

    def force_flush(self) -> None:
        """The window counts as full until the next step."""
        self._force_flush = True

    def changed(self) -> None:
        """The waiting rollouts, their ages or the knobs have changed: earlier findings are void."""
        self._not_before = -math.inf

    def dispatched(self) -> None:
        """A batch has left: there is room."""
        self._force_flush = self.stuck = False

    # -- when ----------------------------------------------------------------------------------------------------------

    def next_wakeup(self) -> float:
        """When a batch will leave if nothing else happens: ``-inf`` = now, ``inf`` = never. O(1), and O(n) while
        rollouts are held back for their age.

        Never a time at which there has just been no reason, so waiting until then does not spin.
        """
        waiting, ready = self.sendable()
        if not waiting:
            return math.inf
        # without a clock: these hold until something comes or leaves
        if self.ended or self._window_is_full(ready) or self._full_batch_is_due(ready):
            return -math.inf
        # Only a put can help then, and a put wakes whoever waits.
        if self.config.deadline_s is None or waiting < self.config.min_batch_size:
            return math.inf
        return max(self._oldest_arrival() + self.config.deadline_s, self._not_before)

    def reason(self, now: float, due: Bools) -> tuple[Reason | None, int]:
        """Why a batch leaves now, and how many rollouts could go with it; None if none does. O(n)."""
        (_, ready), available = self.sendable(), int(np.count_nonzero(self.available(due)))
        if self.ended:
            return ("drain", available) if available else (None, 0)
        if self._window_is_full(ready) and available:
            return "window", available
        deadline = self.config.deadline_s
        if (
            deadline is not None and now >= self._oldest_arrival() + deadline
        ):  # =, not >: who was woken exactly then would be sent to sleep until then, again and again
            if available >= self.config.min_batch_size:
                return "deadline", available
            # past the deadline, and yet too few: without this next_wakeup() would have the caller poll again at once
            self._not_before = self._next_group_deadline(due, deadline)
        if self._full_batch_is_due(ready):
            return "age", available
        return None, 0

    def _window_is_full(self, ready: int) -> bool:
        config = self.config
        if ready >= config.window:
            return True
        # a short batch makes room only where nothing is held back: those leave, or are evicted, as the trainer goes on
        flush = self._force_flush or self.stuck
        return flush and ready > 0 and (ready >= self._buffer.num_ready or ready >= config.batch_size)

    def _full_batch_is_due(self, ready: int) -> bool:
        return self._staleness.num_due > self._staleness.num_held_back and ready >= self.config.batch_size

    def _next_group_deadline(self, due: Bools, deadline_s: float) -> float:
        """When the next incomplete group will have waited long enough; inf if only a put can help."""
        arrivals = self._buffer.arrived_at[~self._buffer.complete & ~due]
        return float(arrivals.min()) + deadline_s if arrivals.size else math.inf

    # -- which ---------------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Bools:
        """[n] rollouts that must go with the next batch: past the deadline, too old after it, or waiting for siblings
        that will not come any more. The rest of a drain may still be chosen for balance: all of it leaves in the end.
        O(n)."""
        # siblings that have not come will not: these would wait for ever
        if self.ended:
            return ~self._buffer.complete
        due = self._staleness.due()
        if self.config.deadline_s is not None:
            due |= self._buffer.arrived_at + self.config.deadline_s <= now
        return due

    def available(self, due: Bools) -> Bools:
        """[n] which rollouts may go: complete groups, and incomplete ones that have a due sibling; none held back for
        age. O(n)."""
        may = self._buffer.complete
        if not may.all():
            labels = self._buffer.labels  # [n]; a group goes as a whole if one of it is due
            may = may | np.isin(labels, labels[due & ~may])
        return may & ~self._staleness.held_back()

    def sendable(self) -> tuple[int, int]:
        """Waiting rollouts that are not held back for their age; and how many of these no incomplete group holds back
        either. O(1) where none is held back, else O(n)."""
        buffer = self._buffer
        if not self._staleness.num_held_back:
            return buffer.num_waiting, buffer.num_ready
        free = ~self._staleness.held_back()
        return int(np.count_nonzero(free)), int(np.count_nonzero(buffer.complete & free))

    def _oldest_arrival(self) -> float:
        """Arrival of the oldest of these, in seconds; inf if there is none. O(1), and O(n) while some are held back."""
        arrivals = self._buffer.arrived_at
        if self._staleness.num_held_back:
            arrivals = arrivals[~self._staleness.held_back()]
        return float(arrivals[0]) if arrivals.size else math.inf
