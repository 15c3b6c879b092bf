"""The core of a balancer: rollouts in, batches out, acknowledgements back. Every change of a balancer's state is a
method of :class:`BalancerCore`.

Pure: time is an argument, nothing waits, nothing is sent. ``host.balancer`` and the simulator drive the same object::

    add(rollout, now) --> waiting --poll(now)--> in flight --acknowledge(step)--> done
                             |                       `--nack(step)--> poll gives it again, same plan
                             `--set_version, abandon_group, evict_lost, filter_out--> evicted

The parts of :class:`~stream_balancer.core.state.BalancerState` hold the data, open to any reader (``core.buffer``).
Each method checks first and raises without a change, then changes the parts, and last notifies the observers. A poll
that gives no batch has no side effects.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.batching import make_batch, make_plan, plan_again, rows_of
from stream_balancer.core.executions import execution_of
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import StepTiming
from stream_balancer.core.observer import Learner, Observers
from stream_balancer.core.pricing import Learned
from stream_balancer.core.snapshot import Snapshot, restored_state, take_snapshot
from stream_balancer.core.staleness import newer_version
from stream_balancer.core.state import BalancerState
from stream_balancer.errors import ClosedResourceError, ConfigError, RolloutError, WouldBlock
from stream_balancer.planning.plan import TOLERANCE
from stream_balancer.rollouts import Batch, Rollout
from stream_balancer.statistics import Statistics


class BalancerCore(BalancerState):
    """The core of a balancer: its state, to be read only, and the methods that change it. Not thread-safe; times are
    seconds on any monotonic clock."""

    def __init__(self, config: BalancerConfig, *, tolerance: float = TOLERANCE) -> None:
        """``tolerance``: how near to the lower bound the planner partitions; simulations may use a coarser one."""
        if not isinstance(config, BalancerConfig):
            raise TypeError(
                f"config must be a BalancerConfig, not {type(config).__name__}: BalancerConfig.from_dict() takes plain "
                "data"
            )
        super().__init__(config, tolerance)
        self.observers = Observers()
        """Observers of every event, in this order; see :mod:`stream_balancer.core.observer`."""

    # -- in ------------------------------------------------------------------------------------------------------------

    def check(self, rollouts: Sequence[Rollout], size: GroupSize | None = None) -> list[tuple[Rollout, float]]:
        """The rollouts of one put, each with its cost. Raises like ``add_all``, except WouldBlock; changes nothing.
        O(columns)."""
        if self.triggers.ended:
            raise ClosedResourceError("put() after end(): the balancer takes no more rollouts. Put before end()")
        # before the group: a retry is a duplicate, whatever its group
        checked = self.admission.check(rollouts)
        if size is not None or (rollouts and rollouts[0].group_id is not None):
            self.admission.check_group(rollouts, size)
        return checked

    def add(self, rollout: Rollout, now: float) -> None:
        """:meth:`add_all` of one rollout. O(columns), amortised."""
        self.add_all([rollout], now)

    def add_all(self, rollouts: Sequence[Rollout], now: float, size: GroupSize | None = None) -> None:
        """Take in all of the finished rollouts, or none. ``size``: declaration of their group; without rollouts, only
        the declaration is taken. O(k columns), amortised; O(n) with a size.

        Raises WouldBlock when full, ClosedResourceError after ``end()``, RolloutError (DuplicateRolloutError) for a
        rollout that cannot be dispatched, ValueError for an impossible size. A call that raises changes nothing.
        """
        checked = self.check(rollouts, size)
        if not self.admission.has_room(rollouts, size):
            # the window cannot fill any further
            self.triggers.force_flush()
            raise WouldBlock
        # nothing may raise from here on: half a group must not be held
        self.counts.accepted += len(rollouts)
        for rollout, cost in checked:
            self.hold(rollout, cost, now)
        if size is not None:
            self.set_group_size(size, now)
        if rollouts:
            self.observers.emit("accepted", rollouts, now)
        if self.evicted or self.buffer.groups.changed:
            self._publish()

    def filter_out(self, rollouts: Sequence[Rollout], now: float, size: GroupSize | None = None) -> None:
        """Accept rollouts that ``accept=`` refused, and evict them with the waiting siblings of their group. Raises
        like ``add_all``, but never WouldBlock. O(n)."""
        checked = self.check(rollouts, size)
        group_id = rollouts[0].group_id if size is None else size.group_id
        self.counts.accepted += len(rollouts)
        if group_id is None or self.buffer.groups.size is None:
            self.evict(rollouts, "filtered")
        else:  # through the buffer, so that it counts all siblings as arrived
            for rollout, cost in checked:
                self.hold(rollout, cost, now)
            if size is not None:
                self.set_group_size(size, now)
            self.evict_rows(self.buffer.siblings(group_id), "filtered")
        self._publish()

    def set_stuck(self, stuck: bool) -> None:
        """True: the window counts as full, because throttled generation waits for a batch to leave."""
        self.triggers.stuck = stuck

    def end(self) -> None:
        """No more rollouts will come: drain the rest, even fewer rollouts than ranks. May be called twice."""
        self.triggers.ended = True
        self._publish("ended")

    @property
    def ended(self) -> bool:
        """``end()`` was called: no more rollouts will come."""
        return self.triggers.ended

    @property
    def finished(self) -> bool:
        """Ended, and no rollout waits. Batches may still be in flight."""
        return self.ended and not self.buffer.num_waiting and not self.in_flight.again

    # -- out -----------------------------------------------------------------------------------------------------------

    def next_wakeup(self) -> float:
        """Time at which ``poll`` gives a batch without further events: ``-inf`` = now, ``inf`` = never. See
        :meth:`Triggers.next_wakeup`."""
        if self.in_flight.again:
            return -math.inf
        return min(self.triggers.next_wakeup(), self.buffer.groups.next_cut())

    def cut_stragglers(self, now: float) -> bool:
        """Release groups that have enough siblings (``groups.min_size``) and have waited long enough for the late ones,
        unless a batch can leave now. Call before a ``poll``, at its ``now``. -> True if a group was released. O(n) if
        so."""
        if self.triggers.next_wakeup() == -math.inf:
            return False
        lacked = [self.buffer.groups.cut(group_id) for group_id in self.buffer.groups.overdue(now)]
        if lacked:
            self.counts.short_groups += len(lacked)
            self.counts.cut_siblings += sum(lacked)
            self.changed()
            self._publish()
        return bool(lacked)

    def poll(self, now: float, asked_at: float | None = None) -> Batch | None:
        """A batch, if one leaves now; it is in flight until ``acknowledge(batch.step)``. ``asked_at``: start of the
        wait for it. A few vector operations of O(n) in waiting rollouts, plus the plan. An error of the planner changes
        nothing.
        """
        asked_at, again = now if asked_at is None else asked_at, self.in_flight.next_redelivery()
        if again is not None:
            # a batch for another number of ranks gets a new plan
            dp_size = self.config.dp_size
            return self._give_again(again if len(again.ranks) == dp_size else plan_again(self, again, (), dp_size))
        # O(1), for the many polls between two batches
        if now < self.triggers.next_wakeup():
            return None
        # next_wakeup() is a lower bound from counts. The columns may show no reason: past the deadline, too few
        # rollouts may be in whole groups.
        due = self.triggers.due(now)
        reason, num_rollouts = self.triggers.reason(now, due)
        if reason is None:
            return None
        plan = make_plan(self, due, num_rollouts)
        rows = rows_of(plan)
        batch = make_batch(self, plan, rows, reason, now)
        # Arrival that completed ``min_batch_size`` rollouts, held back or not. Rank waits before it count as
        # "no_data", waits after it as the price of the window.
        enough = min(self.config.min_batch_size, self.buffer.num_waiting) - 1
        enough_at = float(self.buffer.arrived_at[enough])
        self.dispatch(batch, rows)
        self._publish("left", batch, asked_at, enough_at, now)
        return self._given(batch)

    def _given(self, batch: Batch) -> Batch:
        self.in_flight.begin_training(self.staleness.version)
        self._publish("dispatched", batch)
        return batch

    def give_as_planned(self) -> Batch | None:
        """The oldest batch to be given again, in its old plan, for any number of ranks: ranks that hold it may have
        trained on it."""
        batch = self.in_flight.next_redelivery()
        return None if batch is None else self._give_again(batch)

    def _give_again(self, batch: Batch) -> Batch:
        self.in_flight.redelivered(batch)
        return self._given(batch)

    def replan(self, step: int, dp_size: int) -> Batch:
        """Plan a step in flight again, for ``dp_size`` ranks and without its missing rollouts. -> the new batch of the
        same step. As fast as a plan of its rollouts. Raises ValueError for a step that is not in flight."""
        batch = plan_again(self, *self.in_flight.planned(step), dp_size)
        self.in_flight.replan(batch)
        return batch

    def acknowledge(self, step: int) -> Batch:
        """Drop a trained batch: its rollouts are no longer kept. Raises ValueError for a step that is not in flight."""
        batch, missing = self.in_flight.acknowledge(step)
        done = [r.rollout_id for r in batch.rollouts if not r.is_padding and r.rollout_id not in missing]
        self.ids.finish(done)
        self.counts.acknowledged += len(done)
        if missing:
            # not remembered as done: a producer that generates lost rollouts again may use the same ids
            lost = list(missing.values())
            self.evict(lost, "lost")
            for one in {execution_of(rollout): rollout for rollout in lost}.values():
                # a new execution completes its group
                self.buffer.groups.expect_again(one.group_id, one.execution_id)
        self.advance()
        self._publish("acknowledged", batch)
        return batch

    def finish_training(self, step: int) -> None:
        """The trainer has finished this step, and may acknowledge it later. Call it after the version that the step
        made, if any. O(n) under ``staleness.max_versions``."""
        if self.in_flight.finish_training(step):
            self.advance()

    def nack(self, step: int, *, was_given: bool = True) -> None:
        """Mark a batch in flight as not trained: ``poll`` gives it again, older steps first, in the same plan unless
        ``dp_size`` changed. ``was_given=False``: no rank received it, so it is not counted. Raises ValueError for a
        step that is not in flight. O(batches in flight)."""
        self.counts.nacked += self.in_flight.redeliver(step) * was_given
        self.changed()

    def record_step(self, timing: StepTiming, now: float) -> None:
        """Record a rank's seconds of a step. After the last rank's report, observers get the event "timed"."""
        timings, batch = self.in_flight.time(timing), self.in_flight.get(timing.step)
        if timings is None or batch is None:
            return
        self.counts.record_seconds([one.seconds for one in timings])
        self._publish("timed", batch, timings, now)

    def learn(self, learned: Learned) -> None:
        """Plan with learned costs from now on. O(n log n)."""
        factor = self.reprice(self.pricing.under(self.config, learned))
        if factor != 1.0:
            self._publish("repriced", factor)

    # -- versions and losses -------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Set the policy version. Evicts rollouts that are too stale now (``on_stale="evict"``). An older version
        changes nothing. O(n)."""
        newer = newer_version(self.staleness.version, version)
        if newer is not None:
            self.staleness.version = newer
            self.changed()
            self._publish("version_set", newer)

    def evict_lost(self, is_lost: Callable[[Rollout], bool]) -> list[str]:
        """Evict waiting rollouts whose payloads are lost. -> their ids, which may be put again. Rollouts in flight
        stay. O(n)."""
        rows = np.array([row for row, one in enumerate(self.buffer.rollouts()) if is_lost(one)], dtype=np.int64)
        if not rows.size:
            return []
        rollouts = self.evict_rows(rows, "lost")
        self._publish()
        return [rollout.rollout_id for rollout in rollouts]

    def mark_missing(self, step: int, rollout_ids: Iterable[str]) -> None:
        """A rank trains the step without these rollouts, whose payloads it could not get. The acknowledgement counts
        them as evicted ("lost"), not as acknowledged. May be repeated."""
        self.in_flight.mark_missing(step, rollout_ids)

    def abandon_group(self, group_id: str) -> int:
        """Evict the waiting siblings of a group, and from now on every later sibling. -> number of rollouts evicted
        now. Raises ValueError for a balancer without groups. O(n)."""
        self.admission.check_keeps_groups(group_id)
        rollouts = self.evict_rows(self.buffer.siblings(group_id), "abandoned")
        self.buffer.groups.abandon(group_id)
        self.changed()
        self._publish()
        return len(rollouts)

    def _publish(self, event: str | None = None, *values: object) -> None:
        """Notify observers of an event, and of the group declarations and evictions of the current call."""
        evicted, groups = self.evicted, self.buffer.groups
        # taken first: an observer may call the core, and that call publishes its evictions
        if evicted:
            self.evicted = []
        if event is not None:
            self.observers.emit(event, *values)
        if groups.changed:
            names, groups.changed = dict.fromkeys(groups.changed), []
            for name in names:
                self.observers.emit("group_declared", name, groups.declared(name))
        if evicted:
            self.observers.emit("gave_up", evicted)
        for rollout, reason in evicted:
            self.observers.emit("evicted", rollout, reason)

    # -- knobs and checkpoints -----------------------------------------------------------------------------------------

    def reconfigure(self, config: BalancerConfig) -> None:
        """Take new knobs. A new ``dp_size`` applies from the next plan on: given batches stay, and get a new plan only
        if they are given again. Raises ConfigError, changing nothing, for a knob that cannot change while rollouts are
        held."""
        before = self.config
        if config.groups.size != before.groups.size:
            raise ConfigError("groups.size cannot change: groups are counted by it. Make another balancer with it")
        self.admission.check_waiting(config)
        try:  # the last check, so nothing has changed before
            factor = self.reprice(self.pricing.under(config))
        except RolloutError as error:
            raise ConfigError(f"this cost does not fit a rollout that waits: {error}") from None
        self.use(config)
        self.changed()
        self._publish("reconfigured", before)
        if factor != 1.0:
            self._publish("repriced", factor)

    def snapshot(self, now: float) -> Snapshot:
        """The whole state, and what learners have learned. Rollouts are shared, not copied. O(n) pointers."""
        learned = ChainMap(*(one.learned() for one in self.observers if isinstance(one, Learner)))
        return take_snapshot(self, now, learned)

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Take over a snapshot's state, under this balancer's own knobs. Batches in flight will be given again, with
        their old plan or, for a new ``dp_size``, a new one.

        Raises ValueError if this balancer already took rollouts, RolloutError if a rollout does not fit the knobs. A
        call that raises changes nothing.
        """
        if self.counts.accepted or self.in_flight.next_step:
            raise ValueError(
                "load_state_dict() needs a fresh balancer: this one has taken rollouts. Load before the first put"
            )
        # built aside: a snapshot that does not fit must leave this state unchanged
        restored = restored_state(self.config, self.pricing.knobs.tolerance, snapshot, now)
        # of this balancer's triggers only `ended` can be set: nothing has left yet
        restored.triggers.ended = self.ended
        vars(self).update(vars(restored))
        self._publish("restored", snapshot)

    # -- record --------------------------------------------------------------------------------------------------------

    def statistics(self, now: float, **figures: Any) -> Statistics:
        """Statistics of this moment, with the figures of shell and learners. O(batches in flight)."""
        for one in self.observers:
            if isinstance(one, Learner):
                figures |= one.figures(now)
        return self.report(now, figures)
