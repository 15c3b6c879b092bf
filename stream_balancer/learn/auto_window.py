"""``window="auto"``: the smallest window from which waiting longer would save hardly any idle time, fitted all along.

Beside the live buffer there is a **shadow** for each window that may be chosen: a buffer of costs alone, from which the
planner's own choice sends batches as if that window were in force. Each chunk of new arrivals goes through
all shadows, one or two at each step: so they are compared on the same rollouts, and a step costs a tenth more,
since choosing is cheap beside the partition, which shadows do without. What a shadow's batches must idle at least
(their lower bounds) is averaged with a memory of some dozens of them, so lengths that drift are followed.

The window in force is then the smallest whose idle share is within ``TARGET`` of the best one's. It grows at once, but
shrinks only where the smaller one is within ``SHRINK``, several times in a row: or noise would move it. Pure: no clock,
no chance; the same stream gives the same windows.

The core knows none of this: :class:`WindowLearner` sees every plan, and sets the core's window.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.core.observer import Learner
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.planning import PlanKnobs, Waiting
from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.planning.selection import Units
from stream_balancer.planning.step_size import least_times, select_step, surplus_after
from stream_balancer.rollouts import Reason

TARGET = 0.001
"""Idle share that is not worth waiting for."""
SHRINK = 0.0005
"""... and below which a smaller window is trusted."""
MEMORY = 40.0
"""Steps of a shadow after which a batch counts a third. Fewer follow faster, and noise moves the window."""
LEAST = 8
"""Steps of every shadow before the first fit."""
AGREE = 8
"""Fits in a row that must find a smaller window sure before it is taken: a window that is too small idles far more
than one that is too large ages."""


def moves_per_dispatch(batch_size: int, dp_size: int) -> float:
    """Shadows that move at a step, so that they take about a tenth of the time of its plan (bench/tune.py).

    Choosing is a twentieth of a plan up to 64 rollouts, where the partition is searched for longest, and an eighth to a
    quarter of larger ones, and where a rank has fewer than 4.
    """
    if batch_size < 4 * dp_size or batch_size > 256:
        return 0.5
    return 2.0 if batch_size <= 64 else 1.0


_TOLD_BY = attrgetter(
    "auto_windows", "batch_size", "step_size", "max_skips", "cost", "speeds", "equal_rollouts", "groups"
)
"""Knobs that shadows depend on: what was learned holds for others with the same."""
_NOTHING: Floats = np.empty(0)
_NO_LABELS: Ints = np.empty(0, dtype=np.int64)


class WindowLearner(Learner):
    """Keeps a core's window fitted where its config says ``window="auto"``; idle, without shadows, where it does
    not."""

    def __init__(self, core: BalancerCore) -> None:
        self._core = core
        self._begin(core.config.window)

    def _begin(self, window: int) -> None:
        """Anew, near the window that is in force; there is nothing to learn for a fixed one."""
        windows = self._core.config.auto_windows
        self._shadows = [_Shadow(one) for one in windows]
        self._turn = 0  # whose shadow is next
        self._credit = 0.0  # moves
        self._agreed = 0  # fits in a row that found a smaller window sure
        self._next_label = 0
        self._chunk = _NOTHING, _NO_LABELS
        # rollouts to wait for
        self._window = min(windows, key=lambda one: (abs(one - window), one), default=window)
        self._put_in_force()

    def _put_in_force(self) -> None:
        if self._shadows and self._window != self._core.config.window:
            self._core.set_window(self._window)

    # -- events --------------------------------------------------------------------------------------------------------

    def planned(self, waiting: Waiting, knobs: PlanKnobs, reason: Reason) -> None:
        """A batch is about to leave: the next shadows see a chunk of arrivals, and after the last one the window is
        fitted anew, and in force for the next batch. O(window log window)."""
        # of a drain nothing comes any more: there is no window to wait for
        if not self._shadows or reason == "drain":
            return
        # Half a move for each step adds up, so a large batch moves a shadow every other time.
        self._credit += moves_per_dispatch(self._core.config.batch_size, knobs.dp_size)
        while self._credit >= 1.0:
            self._credit -= 1.0
            self._move(waiting, knobs)
        self._put_in_force()

    def repriced(self, factor: float) -> None:
        """The same rollouts cost so many times what they did: the shadows' costs follow."""
        self._chunk = self._chunk[0] * factor, self._chunk[1]
        for shadow in self._shadows:
            shadow.rescale(factor)

    def reconfigured(self, before: BalancerConfig) -> None:
        """Keep what was learned if it still says something, else learn anew from the window in force."""
        if self._shadows and _TOLD_BY(self._core.config) == _TOLD_BY(before):
            self._put_in_force()
        else:
            self._begin(before.window)

    def restored(self, snapshot: Snapshot) -> None:
        """Begin with the window that the other balancer had found: shadows fill within some dozens of steps."""
        if snapshot.auto_window is not None:
            self._begin(int(snapshot.auto_window["window"]))

    # -- record --------------------------------------------------------------------------------------------------------

    def figures(self, now: float) -> dict[str, Any]:
        return {"idle_by_window": self._idle_by_window()} if self._shadows else {}

    def learned(self) -> dict[str, Any]:
        return {"auto_window": {"window": self._window}} if self._shadows else {}

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _idle_by_window(self) -> dict[int, float]:
        """Idle share that each window would have, in the recent past; empty before the first fit."""
        if min(shadow.steps for shadow in self._shadows) < LEAST:
            return {}
        return {shadow.window: shadow.idle for shadow in self._shadows}

    def _move(self, waiting: Waiting, knobs: PlanKnobs) -> None:
        if self._turn == 0:
            # the same arrivals for all of them, or their idle shares could not be compared
            self._chunk = self._arrivals(waiting)
        self._shadows[self._turn].feed(*self._chunk, knobs)
        self._turn = (self._turn + 1) % len(self._shadows)
        if self._turn == 0:
            self._fit()

    def _arrivals(self, waiting: Waiting) -> tuple[Floats, Ints]:
        """Costs and groups of what came, or became complete, since the last step; of a batch of them at most."""
        # [W] nobody has passed over what came since the last step; what waits for siblings comes once it is
        # complete
        new = np.flatnonzero((waiting.skips == 0) & waiting.group_complete)[-self._core.config.batch_size :]
        labels = waiting.groups[new]
        # labels of the buffer are used again, and a shadow holds rollouts for longer: numbers of its own
        labels = np.where(labels < 0, -1, labels + self._next_label)
        self._next_label = max(self._next_label, int(labels.max(initial=-1)) + 1)
        return waiting.costs[new], labels

    def _fit(self) -> None:
        idle = self._idle_by_window()
        if not idle:
            return
        # idle times of one stream: their differences count, their sizes drift with the lengths
        best = min(idle.values())
        enough = min(window for window, share in idle.items() if share <= best + TARGET)
        sure = min(window for window, share in idle.items() if share <= best + SHRINK)
        self._agreed = self._agreed + 1 if sure < self._window else 0
        # Larger at once, smaller only when several fits agree: too small a window idles all ranks, too large a one
        # only makes rollouts wait.
        if enough > self._window:
            self._window = enough
        elif self._agreed >= AGREE:
            self._window, self._agreed = sure, 0


class _Shadow:
    """A window's shadow run: the costs that would wait, and the decayed sums of what its batches would take."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.steps = self.surplus = 0
        self.mean = self.bound = 0.0
        # [held and to come] those that have not entered the window yet are the last
        self.costs, self.groups, self.skips = _NOTHING, _NO_LABELS, _NO_LABELS

    @property
    def idle(self) -> float:
        """1 - sum(mean load) / sum(least step time), the older the less."""
        return 1.0 - self.mean / self.bound if self.bound > 0 else 0.0

    def feed(self, costs: Floats, groups: Ints, knobs: PlanKnobs) -> None:
        """New arrivals: a batch leaves whenever the window is full."""
        self.costs = np.concatenate((self.costs, costs))
        self.groups = np.concatenate((self.groups, groups))
        self.skips = np.concatenate((self.skips, np.zeros_like(groups)))
        while self.costs.size >= self.window:
            self._dispatch(knobs)

    def _dispatch(self, knobs: PlanKnobs) -> None:
        size, inside = self.window, slice(self.window)
        waiting = replace(
            Waiting.of(self.costs[inside]),
            lengths=np.ones(size, dtype=np.int64),  # only token caps and rows look at them
            skips=self.skips[inside],
            groups=self.groups[inside],
        )
        units = Units.of(waiting, knobs)
        _, go = select_step(waiting, units, knobs, size, self.surplus)
        goes, (mean, bound) = units.of_rollouts(go), least_times(waiting, units, knobs, go)
        self.surplus = surplus_after(knobs, self.surplus, int(np.count_nonzero(goes)))
        # Decayed sums, not means: the ratio of the two is the idle share over the recent past.
        keep = 1.0 - 1.0 / MEMORY
        self.mean = self.mean * keep + mean
        self.bound = self.bound * keep + bound
        self.steps += 1
        # what is beyond the window has not been looked at, and stays
        stays = np.ones(self.costs.size, dtype=np.bool_)
        stays[inside] = ~goes
        self.skips[inside] += 1
        self.costs, self.groups, self.skips = self.costs[stays], self.groups[stays], self.skips[stays]

    def rescale(self, factor: float) -> None:
        self.costs = self.costs * factor
        self.mean *= factor
        self.bound *= factor
