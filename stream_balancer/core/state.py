"""The state of a balancer: its parts, and the few changes that keep them consistent with each other. Pure.

::

    admission  which rollouts may be taken in        triggers   when a batch leaves, and why
    buffer     what waits, with its groups           staleness  how old that is, in policy versions
    in_flight  the batches in flight                 pricing    what rollouts cost
    ids        what is held, or done                 counts, length_bias   for the statistics

Each part owns its data, and may be read by anybody. Only :mod:`stream_balancer.core.machine` changes them, by these
methods, each of which leaves every invariant intact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.admission import Admission
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.counters import Counts
from stream_balancer.core.groups import GroupSize
from stream_balancer.core.in_flight import BatchesInFlight, RolloutIds
from stream_balancer.core.pricing import Pricing
from stream_balancer.core.staleness import RolloutAges
from stream_balancer.core.triggers import Triggers
from stream_balancer.planning.arrays import Ints
from stream_balancer.planning.length_bias import LengthBias
from stream_balancer.rollouts import Batch, EvictReason, Rollout
from stream_balancer.statistics import Statistics

_SHARES = (0.0, 0.5, 0.9, 1.0)
"""Quantiles of the lengths that are told."""


class BalancerState:
    """All that a balancer knows, without its observers."""

    def __init__(self, config: BalancerConfig, tolerance: float) -> None:
        self.config = config
        self.buffer = Buffer(config.groups.size)
        self.ids = RolloutIds()
        self.in_flight = BatchesInFlight()
        self.pricing = Pricing(config, tolerance)
        self.staleness = RolloutAges(config, self.buffer, self.in_flight)
        self.triggers = Triggers(config, self.buffer, self.staleness)
        self.admission = Admission(config, self.buffer, self.ids, self.pricing)
        self.counts = Counts()
        self.length_bias = LengthBias()
        self.evicted: list[tuple[Rollout, EvictReason]] = []
        """Rollouts evicted by the call that is running, which no observer was notified of yet."""
        self.use(config)

    def use(self, config: BalancerConfig) -> None:
        """Other knobs are in force for every part but :attr:`pricing`; see :meth:`reprice`."""
        self.config = self.staleness.config = self.triggers.config = config
        self.admission.use(config)
        groups = self.buffer.groups
        timing = None if groups.size is None else config.groups.min_size, config.groups.patience
        if timing != (groups.min_size, groups.patience):
            groups.min_size, groups.patience = timing
            groups.reschedule()

    def reprice(self, pricing: Pricing) -> float:
        """Other prices are in force. -> the cost of what waits over what it was. Raises RolloutError, and changes
        nothing, for one whose cost is none by them. O(n log n)."""
        costs, before = pricing.costs_of(self.buffer), float(self.buffer.costs.sum())
        self.pricing = self.admission.pricing = pricing
        self.buffer.reprice(costs)
        # observers keep costs of their own, and scale them by this; 0 where nothing waits, or all of it is free
        return float(costs.sum()) / before if before > 0 else 1.0

    def hold(self, rollout: Rollout, cost: float, now: float, skips: int = 0) -> None:
        """A rollout waits from now on; or it is evicted at once, as too old or as one of an abandoned group. O(1),
        amortised."""
        # every put comes here: what cannot apply is not called
        buffer = self.buffer
        if self.admission.schema is None:
            self.admission.know(rollout)
        if rollout.group_id is not None and (unwanted := buffer.groups.why_unwanted(rollout.group_id)) is not None:
            self.evict([rollout], unwanted)
            return
        if rollout.version is not None and self.staleness.is_too_old(rollout.min_version):
            if rollout.group_id is not None and buffer.groups.size is not None:
                # else its siblings wait for ever
                buffer.groups.join(rollout.group_id, rollout.execution_id, now)
                buffer.groups.leave(rollout.group_id, rollout.execution_id)
                self.triggers.changed()
            self.evict([rollout], "stale")
            return
        if rollout.cost is not None:
            self.pricing.has_own_costs = True
        # From here on a second put of this id is refused.
        self.ids.held.add(rollout.rollout_id)
        buffer.add(rollout, cost, now, skips)
        if rollout.version is not None:
            self.staleness.add(rollout)
        self.triggers.changed()
        if buffer.num_waiting > self.counts.peak_waiting:
            self.counts.peak_waiting = buffer.num_waiting

    def set_group_size(self, wanted: GroupSize, now: float) -> None:
        """How many siblings a group has is declared: it may be complete now. O(n)."""
        groups, before = self.buffer.groups, self.buffer.groups.declared(wanted.group_id)
        groups.set_size(wanted, now)
        closes = wanted.size is None and not (before is not None and before.closed)
        if groups.size is not None and closes and groups.size_of(wanted.group_id) < groups.size:
            self.counts.short_groups += 1
        self.changed()

    def dispatch(self, batch: Batch, rows: Ints) -> None:
        """A batch leaves: these rows of the buffer, in the plan's order. O(n)."""
        buffer = self.buffer
        self.length_bias.record(buffer.lengths[rows], buffer.skips[rows])
        # those held back for their age could not have gone, so they were not passed over
        buffer.pass_over(~self.staleness.held_back())
        # last of what needs the plan's rows: they are others now
        buffer.remove(rows)
        self.in_flight.dispatch(batch)
        self.counts.record(batch)
        # The buffer has room again, so a put that forced a flush is answered by this batch.
        self.triggers.dispatched()
        self.changed()

    def evict(self, rollouts: Sequence[Rollout], reason: EvictReason) -> None:
        """Rollouts that wait no longer, and will not be trained on. Lost ones may be put again. O(1) each."""
        self.counts.evicted[reason] += len(rollouts)
        # both take the long ones
        if reason in ("late", "stale"):
            self.length_bias.cut([rollout.num_tokens for rollout in rollouts])
        # Collected, not notified: an observer must not see the state in the middle of a change. The call that is
        # running publishes them at its end.
        self.evicted += [(rollout, reason) for rollout in rollouts]
        # not remembered: its producer, or another one, may generate and put it again
        if reason == "lost":
            self.ids.held.difference_update(rollout.rollout_id for rollout in rollouts)
        else:
            self.ids.finish(rollout.rollout_id for rollout in rollouts)

    def evict_rows(self, rows: Ints, reason: EvictReason) -> list[Rollout]:
        """The same of rows of the buffer. -> their rollouts. O(n)."""
        rollouts = self.buffer.remove(rows, never_came=reason == "lost")
        if rollouts:
            self.evict(rollouts, reason)
            self.changed()
        return rollouts

    def changed(self) -> None:
        """The waiting rollouts, the version, the steps ahead or the knobs have changed: what cannot be trained on in
        time any more is evicted. O(n) under ``staleness.max_versions``."""
        too_old = self.staleness.recount()
        self.triggers.changed()
        self.evict_rows(too_old, "stale")

    def advance(self) -> None:
        """The trainer is through with a batch: what waits may be young enough now, and the next one is trained on."""
        self.changed()
        self.in_flight.begin_training(self.staleness.version)

    def report(self, now: float, others: Mapping[str, Any]) -> Statistics:
        """The figures of this moment; ``others`` as who knows them gives them. O(batches in flight)."""
        buffer, in_flight = self.buffer, self.in_flight
        incomplete = buffer.arrived_at[~buffer.complete]
        return Statistics(
            waiting=buffer.num_waiting,
            waiting_tokens=buffer.num_tokens,
            waiting_bytes=buffer.num_bytes,
            waiting_lengths=tuple(np.quantile(buffer.lengths, _SHARES, method="nearest").tolist())
            if buffer.num_waiting
            else (),
            in_flight=in_flight.num_rollouts,
            redelivering=in_flight.num_redelivering,
            open_groups=len(buffer.groups.incomplete()),
            oldest_open_group_s=max(now - float(incomplete.min(initial=now)), 0.0),
            oldest_wait_s=max(now - float(buffer.arrived_at.min(initial=now)), 0.0),
            length_bias=self.length_bias.summary(),
            version=self.staleness.version,
            training_age=in_flight.training_ages.summary(),
            window=self.config.window,
            **self.counts.figures(),
            **others,
        )
