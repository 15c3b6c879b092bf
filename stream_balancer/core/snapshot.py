"""State of a balancer at one instant, as checkpoints and the journal write it. Pure.

A value, made from a :class:`~stream_balancer.core.state.BalancerState` and turned back into one. ``host.records`` makes
rows of it; no format is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.core.groups import Declared
from stream_balancer.core.state import BalancerState
from stream_balancer.errors import RolloutError
from stream_balancer.field_docs import documented
from stream_balancer.rollouts import Batch, Rollout


@documented
@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Snapshot:
    """State of a balancer at one instant: cheap to take, since rollouts are shared and not copied."""

    waiting: tuple[Rollout, ...]
    """Waiting rollouts, oldest first."""
    waited_s: NDArray[np.float64]
    """[n] seconds each has waited."""
    skips: NDArray[np.int64]
    """[n] steps that passed each over."""
    in_flight: tuple[Batch, ...]
    """Dispatched and unacknowledged batches, oldest first."""
    left_out: Mapping[int, tuple[Rollout, ...]] = field(default_factory=dict)
    """Rollouts without a payload that the new plan of a step left out, by step in flight."""
    group_departures: Mapping[str, int]
    """Number of siblings that have left, by unfinished group."""
    groups: Mapping[str, Declared] = field(default_factory=dict)
    """Declarations of groups; closed groups are ordered, oldest first."""
    past_ids: tuple[str, ...]
    """Ids of rollouts that are done, oldest first."""
    version: int | None
    """Policy version last set."""
    next_step: int
    """Step number of the next new batch."""
    counts: Mapping[str, Any]
    """Running totals behind ``Statistics``: numbers, and dicts of numbers."""
    calibration: Mapping[str, Any] | None = None
    """Figures that a ``CalibratedCost`` has learned: numbers, and lists of numbers."""
    set_aside: tuple[str, ...] = ()
    """Unreadable parts, one sentence each; their rollouts are missing here."""


def take_snapshot(state: BalancerState, now: float, learned: Mapping[str, Any]) -> Snapshot:
    """Take a snapshot. ``learned``: figures of learners. O(n) pointers."""
    buffer, in_flight = state.buffer, state.in_flight
    return Snapshot(
        waiting=tuple(buffer.rollouts()),
        waited_s=now - buffer.arrived_at,
        skips=buffer.skips.copy(),
        in_flight=in_flight.batches(),
        left_out={batch.step: gone for batch in in_flight.batches() if (gone := in_flight.left_out(batch.step))},
        group_departures=buffer.groups.departed(),
        groups=buffer.groups.declarations(),
        past_ids=tuple(state.ids.past),
        version=state.staleness.version,
        next_step=in_flight.next_step,
        counts=state.counts.totals(),
        **learned,
    )


def restored_state(config: BalancerConfig, tolerance: float, snapshot: Snapshot, now: float) -> BalancerState:
    """A snapshot's state under these knobs. Batches in flight are to be delivered again, and waiting rollouts that are
    too old now are evicted. Raises RolloutError if a waiting rollout does not fit the knobs. O(n)."""
    state = BalancerState(config, tolerance)
    state.staleness.version = snapshot.version
    state.ids.finish(snapshot.past_ids)  # first: evictions below add to them
    state.counts.take_over(snapshot.counts)
    # before the rollouts: rollouts of an abandoned group are then evicted
    groups = state.buffer.groups
    groups.restore(snapshot.groups, snapshot.group_departures)
    for rollout, waited_s, skips in zip(snapshot.waiting, snapshot.waited_s, snapshot.skips, strict=True):
        # under a lower max_skips, a rollout is due now, not overdue
        most = int(skips) if config.max_skips is None else config.max_skips
        state.hold(*state.admission.check([rollout])[0], now - float(waited_s), min(int(skips), most))
    groups.restart(now)
    size, name = groups.largest()
    if size > config.batch_size:
        raise RolloutError(
            f"group {name!r} waits and has {size} rollouts, more than batch_size ({config.batch_size}): no batch "
            f"could take it. Load with batch_size >= {size}"
        )
    for group_id, declared in snapshot.groups.items():
        # after hold(): waiting siblings came in time
        if declared.late and groups.size is not None:
            groups.cut(group_id)
    # the snapshot contains the declarations, so announce only groups that are no longer tracked
    groups.changed = [name for name in groups.changed if groups.declared(name) is None]
    state.in_flight.restore(snapshot.in_flight, snapshot.next_step, snapshot.left_out)
    for batch in snapshot.in_flight:
        flying = (*batch.rollouts, *snapshot.left_out.get(batch.step, ()))
        state.ids.held.update(one.rollout_id for one in flying if not one.is_padding)
    state.changed()
    return state
