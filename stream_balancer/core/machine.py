"""When a batch leaves, and what becomes of it. Everything that changes a balancer's state is in this file.

Pure: time is an argument, nothing waits, nothing is sent. The shell (``balancer``) and the simulator drive the same
object::

    add(rollout, now) --> waiting --poll(now)--> in flight --acknowledge(step)--> done
                             `--set_version(v)--> evicted (stale)

A batch leaves when someone asks (``poll``) and one of these holds, in this order:

    drain     end() was called: whatever is left
    window    ``window`` rollouts wait, or a put found no room: it cannot get better by waiting
    deadline  the oldest rollout has waited ``deadline_s``, and ``min_batch_size`` wait
    age       rollouts would be too old with one more step before them, and a full batch waits

Under ``max_staleness`` a rollout leaves only if it is young enough *when it is trained*: every batch before it that the
trainer is not through with may make a version.

``next_wakeup()`` says when ``poll`` will succeed if nothing else happens, so that nobody has to ask twice. A poll
that fails leaves everything as it was: the plan is made first, and taken apart from nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.core.admission import (
    Schema,
    check_fits,
    check_schema,
    cost_of,
    costs_of,
    schema_of,
    with_loss_mask,
)
from stream_balancer.core.batching import make_batch, rows_of
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.counters import Counts, TrainingAges, idle, unavoidable
from stream_balancer.core.derived import (
    calibration_of,
    describe_knobs,
    plan_knobs,
    tracked_group_size,
)
from stream_balancer.core.idle_time import IdleTimes
from stream_balancer.core.observer import Event, Observers
from stream_balancer.core.snapshot import Snapshot
from stream_balancer.core.staleness import Pacer
from stream_balancer.errors import ClosedResourceError, ConfigError, DuplicateRolloutError, RolloutError, WouldBlock
from stream_balancer.planning import Plan, PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.baselines import plan_fifo, plan_round_robin
from stream_balancer.planning.length_bias import LengthBias
from stream_balancer.planning.partition import TOLERANCE
from stream_balancer.statistics import Statistics, Straggler
from stream_balancer.types import Batch, EvictReason, Reason, Rollout
from stream_balancer.values import plain_policy_version

__all__ = ["BalancerCore"]


_MOST_UNTIMED = 256
"""Steps of which only some ranks have told their seconds."""


class Planner(Protocol):
    """Chooses ``num_rollouts`` of the waiting ones and lays them out on ranks and micro-batches."""

    def __call__(self, waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan: ...


_PLANNERS: dict[str, Planner] = {"window": plan_batch, "fifo": plan_fifo, "round_robin": plan_round_robin}


class _Sendable(NamedTuple):
    """Of the waiting rollouts, those young enough to leave now."""

    waiting: int
    ready: int
    """Of these, not held back by an incomplete group."""
    oldest_arrival: float


class _StepSeconds(NamedTuple):
    """What one rank said of one step; see :meth:`BalancerCore.record_step_seconds`."""

    seconds: float
    own: bool
    waited_s: float | None
    ready_s: float


class BalancerCore:
    """The state of a balancer. Not thread-safe; times are seconds on any monotonic clock."""

    def __init__(self, config: BalancerConfig, *, tolerance: float = TOLERANCE) -> None:
        """``tolerance``: how near to the lower bound partitions are sought; simulations may do with less."""
        self.config = config
        self.observers = Observers()
        """Who is notified of every event, in this order; see :mod:`stream_balancer.core.observer`."""
        self._tolerance = tolerance
        self._knobs = plan_knobs(config, tolerance)
        self._calibration = calibration_of(config)
        self._buffer = Buffer(tracked_group_size(config))
        self._held_ids: set[str] = set()
        self._past_ids: OrderedDict[str, None] = OrderedDict()
        self._schema: Schema | None = None
        self._in_flight: dict[int, Batch] = {}
        self._worked: set[int] = set()  # steps in flight that the trainer is through with, not acknowledged yet
        self._begun: set[int] = set()  # steps in flight that are being trained on, or were
        self._training_ages = TrainingAges()
        self._to_redeliver: deque[Batch] = deque()  # a restored balancer's batches in flight, before anything new
        self._unpublished: list[tuple[Rollout, EvictReason]] = []  # evicted by the call that is running
        self._step_seconds: dict[int, dict[int, _StepSeconds]] = {}  # step, rank
        self._idle = IdleTimes(config.dp_size)
        self._has_own_costs = False  # some rollout brought its own
        self._version: int | None = None
        self._ended = False
        self._squeezed = False  # a put found no room since the last dispatch
        self._num_aging = 0  # waiting rollouts that would be too old with one more step before them
        self._num_held_back = 0  # ... and those that already are, and may be evicted soon
        self._sendable: _Sendable | None = None  # computed when it is asked for
        self._not_before = -math.inf  # no deadline batch before then: too few are ready
        self._next_step = 0
        self._counts = Counts()
        self._abandoned: OrderedDict[str, None] = OrderedDict()  # groups: what still comes of them is evicted
        self._lost: dict[int, set[str]] = {}  # by step in flight: rollouts that a rank trains it without
        self._length_bias = LengthBias()
        self._arrivals_seen = 0  # of the buffer's sequence numbers, how many the length figures have

    # -- in ------------------------------------------------------------------------------------------------------------

    def check(self, rollout: Rollout) -> float:
        """Raise what ``add`` would raise for this rollout, except WouldBlock; else its cost. Changes nothing.
        O(columns)."""
        self._check_alone(rollout)
        if self._schema is not None:
            check_schema(rollout, self._schema)
        return cost_of(rollout, self._cost_model)

    def _check_alone(self, rollout: Rollout) -> None:
        """Its kind, its id and its size."""
        if self._ended:
            raise ClosedResourceError(
                "put() after end(): the balancer takes no more rollouts. Put before calling end()"
            )
        if not isinstance(rollout, Rollout):
            raise TypeError(f"put() takes a Rollout, not {type(rollout).__name__}")
        if rollout.is_padding:
            raise RolloutError(f"rollout {rollout.rollout_id!r} is a padding copy; only the balancer makes those")
        if rollout.rollout_id in self._held_ids:
            raise DuplicateRolloutError(
                f"a rollout with rollout_id {rollout.rollout_id!r} is already held: it waits or is in flight. If "
                "this is a "
                "retry, the first put was accepted; else give every rollout an id of its own"
            )
        if rollout.rollout_id in self._past_ids:
            raise DuplicateRolloutError(
                f"a rollout with rollout_id {rollout.rollout_id!r} was accepted before and is done (trained on or "
                "evicted). If this is a retry, all is well; else give every rollout an id of its own"
            )
        check_fits(rollout, self.config)

    def has_room(self, rollout: Rollout) -> bool:
        """Whether there is room for it now. O(1)."""
        return self._has_room([rollout])

    def is_sibling(self, rollout: Rollout) -> bool:
        """Whether it belongs to a group that waits for it here, or was abandoned; such a rollout always has room.
        O(1)."""
        return isinstance(rollout, Rollout) and (
            self._buffer.has_group(rollout.group_id) or rollout.group_id in self._abandoned
        )

    def add(self, rollout: Rollout, now: float) -> None:
        """Take a finished rollout. O(log n).

        Raises WouldBlock when full, ClosedResourceError after ``end()``, RolloutError (DuplicateRolloutError) for one
        that cannot be dispatched. Whatever is raised, the buffer is as it was.
        """
        cost = self.check(rollout)
        self._check_room([rollout])
        self._take(rollout, cost, now)
        self._publish("accepted", [rollout], now)

    def add_all(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Take all of several rollouts, or none. Raises like ``add``; RolloutError if they could never fit. O(k log
        n)."""
        costs = self.check_all(rollouts)
        self._check_room(rollouts)
        for rollout, cost in zip(rollouts, costs, strict=True):
            self._take(rollout, cost, now)
        self._publish("accepted", rollouts, now)

    def with_loss_masks(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts as they may be added: their masks called ``loss_mask``. Raises RolloutError."""
        column = self.config.loss_mask_column
        return [with_loss_mask(r, column) if isinstance(r, Rollout) else r for r in rollouts]

    def check_all(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Raise what ``add_all`` would raise, except WouldBlock; else the costs. Changes nothing. O(k columns)."""
        if len(rollouts) == 1:
            return [self.check(rollouts[0])]
        for rollout in rollouts:
            self._check_alone(rollout)
        if len({r.rollout_id for r in rollouts}) < len(rollouts):
            raise DuplicateRolloutError(
                "two rollouts of one put_group() have the same rollout_id; give each an id of its own"
            )
        if len(rollouts) > self.config.capacity:
            raise RolloutError(
                f"put_group() got {len(rollouts)} rollouts, above capacity ({self.config.capacity}): they could "
                "never be let in "
                "together. Raise capacity"
            )
        schema = self._schema or schema_of(rollouts[0])
        for rollout in rollouts:
            check_schema(rollout, schema)
        return costs_of(rollouts, self._cost_model)

    def _check_room(self, rollouts: Sequence[Rollout]) -> None:
        if not self._has_room(rollouts):
            self.squeeze()  # the window cannot fill any further
            raise WouldBlock

    def _has_room(self, rollouts: Sequence[Rollout]) -> bool:
        """Room for all, counting the places kept for siblings of waiting groups. O(len(rollouts)).

        A put is held back only while a batch could leave and make room: with fewer than ``min_batch_size`` ready (the
        rest wait for siblings) even a full buffer lets it in, since waiting might be for ever.
        """
        buffer, config = self._buffer, self.config
        if buffer.num_ready < config.min_batch_size or self.is_sibling(rollouts[0]):
            return True
        places = max(len(rollouts), tracked_group_size(config) or 1 if rollouts[0].group_id is not None else 1)
        if len(buffer) + buffer.num_awaited + places > config.capacity:
            return False
        limit = config.capacity_bytes
        return limit is None or buffer.num_bytes + sum(r.nbytes for r in rollouts) <= limit

    def squeeze(self) -> None:
        """A put is held back for want of room: let a batch go."""
        self._squeezed = True

    def _take(self, rollout: Rollout, cost: float, now: float) -> None:
        self._counts.accepted += 1
        self._hold(rollout, cost, now)

    def _hold(self, rollout: Rollout, cost: float, now: float, skips: int = 0) -> None:
        if self._schema is None:
            self._schema = schema_of(rollout)
        if rollout.group_id in self._abandoned:
            self._evict(rollout, "abandoned")
            return
        if self._is_stale(rollout):
            self._evict(rollout)
            return
        self._held_ids.add(rollout.rollout_id)
        self._has_own_costs |= rollout.cost is not None
        self._buffer.add(rollout, cost, now, skips)
        self._note_ages(rollout)
        self._not_before = -math.inf
        self._counts.peak_waiting = max(self._counts.peak_waiting, len(self._buffer))

    def completed_by(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
        """What ``accept`` is asked about: these rollouts and the waiting siblings whose group they complete; None
        while others of the group must still come. O(n) for the last of a group, else O(1)."""
        group_id, size = rollouts[0].group_id, tracked_group_size(self.config)
        if group_id is None or size is None:
            return list(rollouts)
        if self._buffer.num_arrived(group_id) + len(rollouts) < size:
            return None
        return [*self._buffer.rollouts(self._buffer.siblings(group_id)), *rollouts]

    def filter_out(self, rollouts: Sequence[Rollout], now: float) -> None:
        """Accepted and evicted at once, with the waiting siblings of their group. Raises like ``add_all``, but never
        for want of room. O(n)."""
        costs = self.check_all(rollouts)
        self._counts.accepted += len(rollouts)
        group_id = rollouts[0].group_id
        if group_id is None or tracked_group_size(self.config) is None:
            gone = list(rollouts)
        else:  # through the buffer, which knows then that nobody else will come
            for rollout, cost in zip(rollouts, costs, strict=True):
                self._hold(rollout, cost, now)
            self._note_arrivals()
            gone = self._buffer.remove(self._buffer.siblings(group_id))
            self._count_ages()
        for rollout in gone:
            self._evict(rollout, "filtered")
        self._publish()

    def room_to_begin(self, pacer: Pacer) -> int:
        """How many more rollouts may be begun elsewhere, so that none will be too old. O(n) under ``max_staleness``."""
        oldest: int | None = None
        if self.config.max_staleness is not None and self._version is not None and len(self._buffer):
            versions = self._buffer.versions
            fresh = versions[versions >= self._oldest_fresh()]
            oldest = int(fresh.min()) if fresh.size else None
        return pacer.room(
            self.config,
            version=self._version or 0,
            oldest=oldest,
            waiting=len(self._buffer),
            steps_ahead=self.steps_ahead,
        )

    def squeeze_if_stuck(self, running: int) -> None:
        """Nothing more may be begun, and so many are running: if they cannot fill the window, let a full batch go; if
        none is running, whatever is there. O(1)."""
        ready = self._now_sendable().ready
        if running == 0 or (ready >= self.config.batch_size and running + len(self._buffer) < self.config.window):
            self._squeezed = self._squeezed or ready > 0

    @property
    def version(self) -> int | None:
        """Policy version last set."""
        return self._version

    def end(self) -> None:
        """No more rollouts will come: drain what is left, also if it is fewer than the ranks. May be called twice."""
        self._ended = True

    # -- when ----------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """No more rollouts will come."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Ended, and nothing waits any more. Batches may still be in flight."""
        return self._ended and not len(self._buffer) and not self._to_redeliver

    def next_wakeup(self) -> float:
        """When ``poll`` will give a batch if nothing else happens: ``-inf`` = now, ``inf`` = never. O(1).

        Never a time at which ``poll`` has just failed, so waiting until then does not spin.
        """
        if self._to_redeliver:
            return -math.inf
        sendable = self._now_sendable()
        if not sendable.waiting:
            return math.inf
        if self._ended or self._window_full() or self._full_batch_is_aging():
            return -math.inf
        if self.config.deadline_s is None or sendable.waiting < self.config.min_batch_size:
            return math.inf
        return max(sendable.oldest_arrival + self.config.deadline_s, self._not_before)

    def poll(self, now: float, asked_at: float | None = None) -> Batch | None:
        """A batch, if one leaves now; then it is in flight until ``acknowledge(batch.step)``. ``asked_at``: since when
        somebody waits for it.

        O(n) in waiting rollouts for the columns, plus the plan. If the planner raises, nothing has changed.
        """
        if self._to_redeliver:
            batch = self._to_redeliver.popleft()
            self._note_begun()
            self._publish("dispatched", batch)
            return batch
        if now < self.next_wakeup() or not len(self._buffer):
            return None
        due = self._due(now)
        reason, num_rollouts = self._reason(now, due)
        if reason is None:
            return None
        waiting, plan = self._plan(due, num_rollouts)
        batch = make_batch(
            plan, self._buffer, dp_size=self.config.dp_size, step=self._next_step, reason=reason, now=now
        )
        enough = min(self.config.min_batch_size, len(self._buffer)) - 1  # of all that came, held back or not
        enough_at = float(self._buffer.arrived_at[enough])
        asked_at = now if asked_at is None else asked_at
        self._idle.dispatched(batch.step, reason, asked_at=asked_at, enough_at=enough_at, now=now)
        self.observers.emit("planned", waiting, self._knobs, reason)
        self._commit(batch, plan)
        self._publish("dispatched", batch)
        return batch

    def preview(self, now: float) -> tuple[Plan, int] | None:
        """The plan of a batch that would leave now, and its tokens; None if none could. Changes nothing."""
        if not len(self._buffer):
            return None
        due = self._due(now)
        num_rollouts = min(self.config.batch_size, self._num_available(due))
        if not num_rollouts:
            return None
        _, plan = self._plan(due, num_rollouts)
        return plan, int(self._buffer.lengths[rows_of(plan)].sum())

    def _plan(self, due: NDArray[np.bool_], num_rollouts: int) -> tuple[Waiting, Plan]:
        """What the planner was shown, and its plan, in rows of the buffer."""
        planner, waiting = _PLANNERS[self.config.policy], self._buffer.waiting(due)
        if not self._num_held_back:
            return waiting, planner(waiting, self._knobs, num_rollouts=num_rollouts, step=self._next_step)
        rows = np.flatnonzero(~self._held_back())
        waiting = Waiting(**{column.name: getattr(waiting, column.name)[rows] for column in fields(waiting)})
        plan = planner(waiting, self._knobs, num_rollouts=num_rollouts, step=self._next_step)
        return waiting, replace(plan, ranks=[[rows[one] for one in share] for share in plan.ranks])

    def lengths_and_ages(self, now: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[n] tokens of the waiting rollouts, [n] seconds they have waited; oldest first. O(n)."""
        return self._buffer.lengths.copy(), now - self._buffer.arrived_at

    def _reason(self, now: float, due: NDArray[np.bool_]) -> tuple[Reason | None, int]:
        size, sendable = self.config.batch_size, self._now_sendable()
        available = self._num_available(due)
        if self._ended:
            return ("drain", min(size, available)) if available else (None, 0)
        if self._window_full() and available:
            return "window", min(size, available)
        deadline = self.config.deadline_s
        if deadline is not None and now >= sendable.oldest_arrival + deadline:
            if available >= self.config.min_batch_size:
                return "deadline", min(size, available)
            self._not_before = self._next_group_deadline(due, deadline)
        if self._full_batch_is_aging():
            return "age", min(size, sendable.ready)
        return None, 0

    def _window_full(self) -> bool:
        ready = self._now_sendable().ready
        if ready >= self.config.window:
            return True
        # a short batch makes room only where nothing is held back: those leave, or are evicted, as the trainer goes on
        return self._squeezed and ready >= max(min(self.config.batch_size, self._buffer.num_ready), 1)

    def _full_batch_is_aging(self) -> bool:
        return self._num_aging > self._num_held_back and self._now_sendable().ready >= self.config.batch_size

    def _due(self, now: float) -> NDArray[np.bool_]:
        """[n] rollouts that must go with the next batch: past the deadline, too old after it, or waiting for
        siblings that will not come any more. The rest of a drain may still be chosen for balance: all of it leaves in
        the end."""
        if self._ended:
            return ~self._buffer.complete
        due = np.zeros(len(self._buffer), dtype=bool)
        if self.config.deadline_s is not None:
            due |= self._buffer.arrived_at + self.config.deadline_s <= now
        if self._num_aging:
            due |= self._buffer.versions <= self._oldest_trainable()
        return due

    def _num_available(self, due: NDArray[np.bool_]) -> int:
        """Rollouts that may go: complete groups, and incomplete ones that have a due sibling; none held back for
        age."""
        may = self._buffer.complete
        if not may.all():
            labels = self._buffer.labels
            may = may | np.isin(labels, np.unique(labels[due & ~may]))
        return int(np.count_nonzero(may & ~self._held_back() if self._num_held_back else may))

    def _next_group_deadline(self, due: NDArray[np.bool_], deadline_s: float) -> float:
        """When the next incomplete group will have waited long enough; inf if only a put can help."""
        arrivals = self._buffer.arrived_at[~self._buffer.complete & ~due]
        return float(arrivals.min()) + deadline_s if arrivals.size else math.inf

    @property
    def next_step(self) -> int:
        """Number of the next new batch."""
        return self._next_step

    # -- out -----------------------------------------------------------------------------------------------------------

    def _commit(self, batch: Batch, plan: Plan) -> None:
        rows = rows_of(plan)
        if self._calibration is not None and not batch.num_padding and not self._has_own_costs:
            self._calibration.expect(batch.step, [[self._buffer.lengths[one] for one in share] for share in plan.ranks])
        self._note_arrivals()
        self._length_bias.record(self._buffer.lengths[rows], self._buffer.skips[rows])
        self._buffer.pass_over(~self._held_back())
        self._buffer.remove(rows)
        self._in_flight[batch.step] = batch
        self._next_step += 1
        self._squeezed = False
        self._not_before = -math.inf
        self._count_ages()
        self._counts.record(batch)
        self._note_begun()

    def _note_arrivals(self) -> None:
        self._length_bias.arrived(self._buffer.lengths_since(self._arrivals_seen))
        self._arrivals_seen = self._buffer.next_seq

    def acknowledge(self, step: int) -> Batch:
        """A batch has been trained on: its rollouts need not be kept. Raises ValueError for a step that is not in
        flight."""
        batch = self._in_flight.pop(step, None)
        if batch is None:
            raise ValueError(
                f"step {step} is not in flight: it was never dispatched, or is already acknowledged. "
                f"In flight: {sorted(self._in_flight) or 'nothing'}"
            )
        lost = self._lost.pop(step, set())
        self._forget(r.rollout_id for r in batch.rollouts if not r.is_padding and r.rollout_id not in lost)
        self._counts.acknowledged += batch.num_rollouts - len(lost)
        for rollout in batch.rollouts if lost else ():
            if rollout.rollout_id in lost:
                self._drop_lost(rollout)
                self._buffer.expect_again(rollout.group_id)
        if batch in self._to_redeliver:
            self._to_redeliver.remove(batch)
        self._begun.discard(step)
        self._worked.discard(step)
        self._step_is_behind()
        self._publish("acknowledged", batch)
        return batch

    def worked_through(self, step: int) -> None:
        """The trainer asks for more: it is through with this step, and may acknowledge it later. Not before its
        version, if it makes one. O(n) under ``max_staleness``."""
        if step in self._in_flight:
            self._worked.add(step)
            self._step_is_behind()

    def _step_is_behind(self) -> None:
        """The trainer is through with a batch: what waits may be young enough now, and the next one is trained on."""
        self._not_before = -math.inf
        self._count_ages()
        self._note_begun()

    @property
    def num_held_back(self) -> int:
        """Waiting rollouts that are too old to leave while so many batches are before them."""
        return self._num_held_back

    @property
    def steps_ahead(self) -> int:
        """Batches that the trainer is not through with: each may make a version before another one is trained."""
        return len(self._in_flight) - len(self._worked)

    def _note_begun(self) -> None:
        """The oldest batch that the trainer has not been through is being trained on: how old is it?"""
        again = {batch.step for batch in self._to_redeliver}
        step = min((step for step in self._in_flight if step not in self._worked and step not in again), default=None)
        if step is not None and step not in self._begun:
            self._begun.add(step)
            self._training_ages.record(self._in_flight[step], self._version)

    def acknowledge_through(self, step: int) -> list[Batch]:
        """All steps up to and including this one. May be repeated."""
        return [self.acknowledge(number) for number in sorted(self._in_flight) if number <= step]

    def give_again(self, batch: Batch) -> None:
        """A batch in flight that nobody got after all: the next ``poll`` gives it."""
        self._to_redeliver.appendleft(batch)
        self._forget_training(batch.step)

    def nack(self, step: int) -> None:
        """A batch in flight was not trained on after all: ``poll`` gives it again, same plan, older steps first. Raises
        ValueError for a step that is not in flight. O(batches in flight)."""
        batch = self._in_flight.get(step)
        if batch is None:
            raise ValueError(
                f"step {step} cannot be given again: it was never dispatched, or is already acknowledged. "
                f"In flight: {sorted(self._in_flight) or 'nothing'}"
            )
        if batch not in self._to_redeliver:
            self._counts.nacked += batch.num_rollouts
            self._to_redeliver = deque(sorted([*self._to_redeliver, batch], key=lambda one: one.step))
            self._forget_training(step)

    def _forget_training(self, step: int) -> None:
        """It will be trained on anew."""
        self._begun.discard(step)
        self._worked.discard(step)
        self._count_ages()

    def _forget(self, rollout_ids: Iterable[str]) -> None:
        """These are done: no longer held, remembered for a while. O(1) each."""
        for rollout_id in rollout_ids:
            self._held_ids.discard(rollout_id)
            self._past_ids[rollout_id] = None
        while len(self._past_ids) > self.config.remember_ids:
            self._past_ids.popitem(last=False)

    def in_flight(self) -> tuple[Batch, ...]:
        """Batches given out and not yet acknowledged, oldest first; not those that ``poll`` will give again."""
        again = {batch.step for batch in self._to_redeliver}
        return tuple(batch for batch in self._in_flight.values() if batch.step not in again)

    def record_step_seconds(
        self,
        step: int,
        rank: int,
        seconds: float,
        *,
        own: bool = True,
        waited_s: float | None = None,
        ready_s: float = 0.0,
        now: float = 0.0,
    ) -> None:
        """How long a rank computed in a step. When all ranks of a step are in, the measured idle times move, and a
        calibrated cost learns; unless the rank may have waited for others in them (``own`` False).

        ``waited_s``: from asking for its share to taking it; None = as long as the balancer waited. ``ready_s``: how
        long it had been ready for more when the last rank was.
        """
        of_step = self._step_seconds.setdefault(step, {})
        of_step[rank] = _StepSeconds(seconds, own, waited_s, ready_s)
        if len(self._step_seconds) > _MOST_UNTIMED:
            del self._step_seconds[min(self._step_seconds)]  # some rank never told
        if len(of_step) < self.config.dp_size:
            return
        del self._step_seconds[step]
        of_all = [of_step[rank] for rank in range(self.config.dp_size)]
        busy = [one.seconds for one in of_all]
        self._counts.record_seconds(busy)
        slowness, factor = None, 1.0
        if self._calibration is not None and all(one.own for one in of_all):
            if self._calibration.observe(step, busy):
                factor = self._reprice()
            slowness = self._calibration.slowness()
        batch = self._in_flight.get(step)
        if batch is not None:
            waited = [one.waited_s for one in of_all]
            self._idle.record(batch, busy, waited, [one.ready_s for one in of_all], now, slowness)
        if factor != 1.0:
            self._publish("repriced", factor)

    @property
    def last_step_seconds(self) -> tuple[float, ...]:
        """Seconds each rank computed in the last step that all have reported; empty before."""
        return self._idle.last_s

    def straggler(self, now: float) -> Straggler | None:
        """A rank that is slow step after step. O(ranks)."""
        return self._idle.straggler(now)

    # -- cost ----------------------------------------------------------------------------------------------------------

    @property
    def _cost_model(self) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        return self.config.cost if self._calibration is None else self._calibration.cost

    def _reprice(self) -> float:
        """Plan with what the cost model says now. -> the waiting rollouts' cost over what it was. O(n); O(n) calls of
        the model where rollouts bring their own cost."""
        rollouts = self._buffer.rollouts() if self._has_own_costs else []
        if rollouts:
            costs = np.array([cost_of(r, self._cost_model) for r in rollouts], dtype=np.float64)
        else:
            costs = np.asarray(self._cost_model(self._buffer.lengths), dtype=np.float64)
        before = float(self._buffer.costs.sum())
        factor = float(costs.sum()) / before if before > 0 else 1.0
        self._buffer.reprice(costs)
        if self._calibration is not None:
            speeds = self._calibration.speeds
            self._knobs = replace(
                self._knobs,
                speeds=None if speeds is None else np.array(speeds, dtype=np.float64),
                fixed_costs=self._calibration.fixed_costs,
            )
        return factor

    # -- versions ------------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """The policy moved on. Evicts what is now too stale (``on_stale="evict"``). Raises ValueError if it goes
        backwards. O(n)."""
        try:
            version = plain_policy_version(version)
        except RolloutError as error:
            raise ValueError(f"set_version(): version {error}") from None
        if self._version is not None and version < self._version:
            raise ValueError(
                f"version must not go backwards: it is {self._version}, and set_version({version}) was called"
            )
        self._version = version
        self._evict_stale()
        self._count_ages()
        self._publish("version_set", version)

    def _evict_stale(self) -> None:
        """What cannot be trained on in time any more, whatever the trainer does."""
        if self._version is None or self.config.max_staleness is None or self.config.on_stale == "send":
            return
        rows = np.flatnonzero(self._buffer.versions < self._oldest_fresh())
        if rows.size:
            self._note_arrivals()
            for rollout in self._buffer.remove(rows):
                self._evict(rollout)

    def give_up(self, lost: Callable[[Rollout], bool]) -> list[str]:
        """Evict the waiting rollouts that are lost; their ids, which may be put again. Those in flight stay. O(n)."""
        rows = np.flatnonzero([lost(rollout) for rollout in self._buffer.rollouts()])
        if not rows.size:
            return []
        self._note_arrivals()
        rollouts = self._buffer.remove(rows, never_came=True)
        for rollout in rollouts:
            self._drop_lost(rollout)
        self._count_ages()
        self._publish()
        return [rollout.rollout_id for rollout in rollouts]

    def abandon_group(self, group_id: str) -> int:
        """Evict what waits of a group, and from now on what still comes of it. -> rollouts evicted now. Raises
        ValueError where groups play no part. O(n)."""
        if tracked_group_size(self.config) is None:
            raise ValueError(
                f"abandon_group({group_id!r}): this balancer keeps no groups (group_size is {self.config.group_size}, "
                f"groups {self.config.groups!r}), so no rollout waits for a sibling"
            )
        self._abandoned[group_id] = None
        while len(self._abandoned) > max(self.config.remember_ids, 1):
            self._abandoned.popitem(last=False)
        self._note_arrivals()
        gone = self._buffer.remove(self._buffer.siblings(group_id))
        self._buffer.forget_group(group_id)
        for rollout in gone:
            self._evict(rollout, "abandoned")
        self._count_ages()
        self._publish()
        return len(gone)

    def incomplete_groups(self) -> dict[str, int]:
        """Siblings that have come, of each group that waits for others. O(groups)."""
        return self._buffer.incomplete_groups()

    def lost_in_flight(self, step: int, rollout_ids: Iterable[str]) -> None:
        """A rank could not get the tokens of these rollouts, and trains the step without them: once it is acknowledged
        they count as evicted ("lost"), not as acknowledged. May be repeated."""
        batch = self._in_flight.get(step)
        if batch is not None:
            there = {rollout.rollout_id for rollout in batch.rollouts if not rollout.is_padding}
            self._lost.setdefault(step, set()).update(there.intersection(rollout_ids))

    def _drop_lost(self, rollout: Rollout) -> None:
        self._counts.evicted["lost"] += 1
        self._held_ids.discard(rollout.rollout_id)
        self._unpublished.append((rollout, "lost"))

    def _evict(self, rollout: Rollout, reason: EvictReason = "stale") -> None:
        self._counts.evicted[reason] += 1
        self._forget([rollout.rollout_id])
        self._unpublished.append((rollout, reason))

    def _publish(self, event: Event | None = None, *values: object) -> None:
        """Emit an event, and what the call that ends here has evicted."""
        evicted, self._unpublished = self._unpublished, []
        if event is not None:
            self.observers.emit(event, *values)
        for rollout, reason in evicted:
            self.observers.emit("evicted", rollout, reason)

    def _oldest_fresh(self) -> int:
        """The oldest version that may be trained on now."""
        assert self._version is not None
        assert self.config.max_staleness is not None
        return self._version - self.config.max_staleness

    def _oldest_trainable(self) -> int:
        """The oldest version that may leave now: in time though every step ahead makes a version. One that has it would
        be late with one more step ahead."""
        return self._oldest_fresh() + self.steps_ahead

    def _is_stale(self, rollout: Rollout) -> bool:
        if self._version is None or self.config.max_staleness is None or self.config.on_stale == "send":
            return False
        return rollout.min_version is not None and rollout.min_version < self._oldest_fresh()

    def _note_ages(self, rollout: Rollout) -> None:
        """It waits now."""
        self._sendable = None
        version = rollout.min_version
        if version is not None and self._version is not None and self.config.max_staleness is not None:
            self._num_aging += version <= self._oldest_trainable()
            self._num_held_back += self.config.on_stale == "evict" and version < self._oldest_trainable()

    def _count_ages(self) -> None:
        """What waits, the version or the steps ahead are others now. O(n) under ``max_staleness``."""
        self._sendable = None
        self._num_aging = self._num_held_back = 0
        if self._version is not None and self.config.max_staleness is not None:
            versions, oldest = self._buffer.versions, self._oldest_trainable()
            self._num_aging = int(np.count_nonzero(versions <= oldest))
            if self.config.on_stale == "evict":
                self._num_held_back = int(np.count_nonzero(versions < oldest))

    def _held_back(self) -> NDArray[np.bool_]:
        """[n] rollouts that would be too old when trained if they left now, and their siblings. O(n)."""
        if not self._num_held_back:
            return np.zeros(len(self._buffer), dtype=bool)
        held = self._buffer.versions < self._oldest_trainable()
        labels = self._buffer.labels
        grouped = labels[held & (labels >= 0)]
        return held | np.isin(labels, grouped) if grouped.size else held

    def _now_sendable(self) -> _Sendable:
        """O(1) where nothing is held back for its age; else O(n) once after every change."""
        buffer = self._buffer
        if not self._num_held_back:
            return _Sendable(len(buffer), buffer.num_ready, buffer.oldest_arrival)
        if self._sendable is None:
            rows = np.flatnonzero(~self._held_back())
            self._sendable = _Sendable(
                waiting=rows.size,
                ready=int(np.count_nonzero(buffer.complete[rows])),
                oldest_arrival=float(buffer.arrived_at[rows[0]]) if rows.size else math.inf,
            )
        return self._sendable

    # -- knobs ---------------------------------------------------------------------------------------------------------

    def reconfigure(self, config: BalancerConfig) -> None:
        """Take new knobs. Raises ConfigError, changing nothing, for one that cannot change while rollouts are held."""
        if config.dp_size != self.config.dp_size:
            raise ConfigError(
                f"dp_size cannot change live (it is {self.config.dp_size}): ranks are connected. Start a new balancer"
            )
        if tracked_group_size(config) != tracked_group_size(self.config) and len(self._buffer):
            raise ConfigError(
                f"group_size cannot change while {len(self._buffer)} rollouts wait: their groups are being counted. "
                "Change it before the first put"
            )
        self._check_waiting_fit(config)
        if tracked_group_size(config) != tracked_group_size(self.config):
            self._buffer = Buffer(tracked_group_size(config))
            self._arrivals_seen = 0
        if (config.cost, config.speeds) != (self.config.cost, self.config.speeds):
            self._calibration = calibration_of(config)
        before, self.config = self.config, config
        self._knobs = plan_knobs(config, self._tolerance)
        factor = self._reprice()
        self._not_before = -math.inf
        self._evict_stale()
        self._count_ages()
        self._publish("reconfigured", before)
        if factor != 1.0:
            self._publish("repriced", factor)

    def set_window(self, window: int) -> None:
        """Wait for so many rollouts from the next batch on; one of ``config.auto_windows``. O(1)."""
        self.config = self.config.at_window(window)

    def _check_waiting_fit(self, config: BalancerConfig) -> None:
        """Raise ConfigError if a rollout that waits could not leave under these knobs. O(n)."""
        cap, lengths = config.max_tokens_per_micro_batch, self._buffer.lengths
        if cap is not None and config.oversize == "refuse" and int(lengths.max(initial=0)) > cap:
            longest = self._buffer.rollouts(lengths.argmax(0, keepdims=True))[0]
            raise ConfigError(
                f"max_tokens_per_micro_batch ({cap}) with oversize='refuse' is below rollout {longest.rollout_id!r}, "
                f"which waits and has {longest.num_tokens} tokens: no batch could take it. Use a cap >= "
                f"{longest.num_tokens} until it has left, or set oversize='alone'"
            )
        for rollout in self._buffer.rollouts():
            try:
                cost_of(rollout, config.cost)
            except RolloutError as error:
                raise ConfigError(f"this cost does not fit a rollout that waits: {error}") from None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def snapshot(self, now: float, *, auto_window: Mapping[str, Any] | None = None) -> Snapshot:
        """All that is held now, and the state of ``window="auto"`` as its observer gives it. Rollouts are shared, not
        copied. O(n) pointers."""
        buffer = self._buffer
        return Snapshot(
            waiting=tuple(buffer.rollouts()),
            waited_s=now - buffer.arrived_at,
            skips=buffer.skips.copy(),
            in_flight=tuple(self._in_flight.values()),
            group_arrivals=buffer.group_arrivals(),
            past_ids=tuple(self._past_ids),
            version=self._version,
            next_step=self._next_step,
            counts=self._counts.totals(),
            knobs=describe_knobs(self.config),
            calibration=None if self._calibration is None else self._calibration.state(),
            auto_window=auto_window,
        )

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Take over a snapshot's state, under this balancer's own knobs. Batches in flight will be given again, same
        plan.

        If their plan is for another ``dp_size``, their rollouts wait again instead, as the oldest. Raises ValueError if
        this balancer already took rollouts, RolloutError if a rollout does not fit the knobs; then nothing has changed.
        """
        if self._counts.accepted or self._next_step:
            raise ValueError(
                "load_state_dict() needs a fresh balancer: this one has taken rollouts. Load before the first put"
            )
        fresh = BalancerCore(self.config, tolerance=self._tolerance)
        fresh._restore(snapshot, now)
        fresh.observers = self.observers
        self.__dict__.update(fresh.__dict__)
        self._publish("restored", snapshot)

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        again = [b for b in snapshot.in_flight if len(b.ranks) == self.config.dp_size]
        replan = [r for b in snapshot.in_flight if b not in again for r in b.rollouts if not r.is_padding]
        oldest = now - (float(snapshot.waited_s.max()) if len(snapshot.waited_s) else 0.0)
        self._version = snapshot.version
        self._counts.take_over(snapshot.counts)
        if self._calibration is not None and snapshot.calibration is not None:
            self._calibration.take_over(snapshot.calibration)
            self._reprice()
        for rollout in replan:
            self._hold(rollout, self.check(rollout), oldest)
        for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
            most = int(skips) if self.config.max_skips is None else self.config.max_skips
            self._hold(rollout, self.check(rollout), now - float(waited_s), min(int(skips), most))
        self._buffer.restore_groups(snapshot.group_arrivals)
        for batch in again:
            self._in_flight[batch.step] = batch
            self._held_ids.update(r.rollout_id for r in batch.rollouts if not r.is_padding)
        self._to_redeliver = deque(again)
        self._past_ids = OrderedDict.fromkeys(snapshot.past_ids)
        self._next_step = snapshot.next_step
        self._arrivals_seen = self._buffer.next_seq
        self._count_ages()

    def standing(self) -> tuple[dict[str, Any], dict[str, int]]:
        """For the journal: running totals, and siblings that have left, of groups that are not done. O(groups)."""
        return self._counts.totals(), self._buffer.departed()

    # -- record --------------------------------------------------------------------------------------------------------

    def statistics(
        self,
        now: float,
        *,
        blocked_puts: int = 0,
        reserved: int = 0,
        blocked_reserves: int = 0,
        idle_by_window: Mapping[int, float] = MappingProxyType({}),
    ) -> Statistics:
        """The figures of this moment; those of the shell and of ``window="auto"``, which the core does not know, are
        arguments. O(batches in flight)."""
        counts, buffer = self._counts, self._buffer
        return Statistics(
            waiting=len(buffer),
            waiting_tokens=buffer.num_tokens,
            waiting_bytes=buffer.num_bytes,
            waiting_lengths=buffer.length_quantiles((0.0, 0.5, 0.9, 1.0)),
            in_flight=sum(b.num_rollouts for b in self._in_flight.values()),
            redelivering=sum(b.num_rollouts for b in self._to_redeliver),
            accepted=counts.accepted,
            acknowledged=counts.acknowledged,
            evicted=dict(counts.evicted),
            batches=dict(counts.batches),
            dispatched_tokens=counts.dispatched_tokens,
            padding_copies=counts.padding_copies,
            nacked=counts.nacked,
            blocked_puts=blocked_puts,
            reserved=reserved,
            blocked_reserves=blocked_reserves,
            peak_waiting=counts.peak_waiting,
            oldest_wait_s=max(now - buffer.oldest_arrival, 0.0) if len(buffer) else 0.0,
            length_bias=self._length_bias.summary(),
            idle_fraction=idle(counts.mean_loads, counts.max_loads),
            unavoidable_idle_fraction=unavoidable(counts.mean_loads, counts.lower_bounds, counts.max_loads),
            measured_idle_fraction=idle(counts.mean_seconds, counts.max_seconds),
            idle_seconds=self._idle.total(),
            rank_idle_seconds=self._idle.by_rank(),
            rank_busy_seconds=self._idle.busy(),
            straggler=self._idle.straggler(now),
            cost_fit=None if self._calibration is None else self._calibration.fit(),
            version=self._version,
            training_age=self._training_ages.summary(),
            window=self.config.window,
            idle_by_window=dict(idle_by_window),
        )

    def verify(self) -> None:
        """Check every invariant; for tests. O(n log n)."""
        self._buffer.check()
        stats = self.statistics(math.inf)
        assert stats.accepted == stats.waiting + stats.in_flight + stats.acknowledged + sum(stats.evicted.values())
        waiting = {r.rollout_id for r in self._buffer.rollouts()}
        flying = {r.rollout_id for b in self._in_flight.values() for r in b.rollouts if not r.is_padding}
        assert not waiting & flying
        assert self._held_ids == waiting | flying
        counted = self._num_aging, self._num_held_back
        self._count_ages()
        assert counted == (self._num_aging, self._num_held_back)
        assert self._worked <= self._in_flight.keys() >= self._begun
