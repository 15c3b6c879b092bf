"""What holds for a core after every call, whatever was asked of it."""

from __future__ import annotations

import numpy as np

from stream_balancer.core.buffer import Buffer
from stream_balancer.core.machine import BalancerCore
from stream_balancer.rollouts import Rollout

__all__ = ["verify", "verify_buffer"]


def verify(core: BalancerCore) -> None:
    """Nothing is lost or doubled, and every count is what would be counted now."""
    verify_buffer(core.buffer)
    batches, again = core.in_flight.batches(), core.in_flight.num_redelivering
    assert [batch.step for batch in batches] == sorted(batch.step for batch in batches)
    assert all(batch.step < core.in_flight.next_step for batch in batches)
    assert again == sum(batch.num_rollouts for batch in batches if batch not in core.in_flight.delivered())
    flying = [r.rollout_id for batch in batches for r in batch.rollouts if not r.is_padding]
    flying += [one.rollout_id for batch in batches for one in core.in_flight.left_out(batch.step)]
    waiting = [r.rollout_id for r in core.buffer.rollouts()]
    counts = core.counts
    assert counts.accepted == len(waiting) + len(flying) + counts.acknowledged + counts.evicted.total()
    assert len({*waiting, *flying}) == len(waiting) + len(flying)
    assert core.ids.held == {*waiting, *flying}
    _verify_ages(core)


def verify_buffer(buffer: Buffer) -> None:
    """Columns, order, and groups are those of the rollouts that wait."""
    rollouts = buffer.rollouts()
    assert len(rollouts) == buffer.num_waiting == buffer.by_cost().size
    assert all(isinstance(r, Rollout) for r in rollouts)
    assert buffer.lengths.tolist() == [r.num_tokens for r in rollouts]
    assert buffer.num_tokens == sum(r.num_tokens for r in rollouts)
    assert buffer.num_bytes == sum(r.nbytes for r in rollouts)
    assert buffer.by_cost().tolist() == np.argsort(buffer.costs, kind="stable").tolist()
    assert np.all(np.diff(buffer.arrived_at) >= 0)
    assert buffer.num_ready == int(np.count_nonzero(buffer.complete))
    _verify_groups(buffer, rollouts)


def _verify_groups(buffer: Buffer, rollouts: list[Rollout]) -> None:
    groups = buffer.groups
    if groups.size is None:
        assert (groups.num_awaited, groups.num_incomplete) == (0, 0)
        return
    assert sum(one.closed for one in groups.declarations().values()) <= max(groups.remember, 1)
    waiting: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.group_id is not None:
            waiting.setdefault(rollout.group_id, []).append(rollout)
    labels = [groups.get(name).label for name in waiting]
    assert None not in labels
    assert len(set(labels)) == len(labels)
    lacking = 0
    for name, siblings in waiting.items():
        rows = [row for row, one in enumerate(rollouts) if one.group_id == name]
        assert set(buffer.labels[rows].tolist()) == {groups.get(name).label}
        lacks = max(groups.size_of(name) - groups.get(name).arrived, 0) if not groups.why_unwanted(name) else 0
        assert groups.get(name).waiting
        assert len({one.execution_id or one.rollout_id for one in siblings}) <= groups.get(name).arrived
        assert buffer.complete[rows].all() == (lacks == 0)
        assert (name in groups.incomplete()) == (lacks > 0)
        lacking += lacks
    assert groups.num_awaited == lacking
    # a group that has come, or of which all has left, is not kept
    for name, group in groups._groups.items():
        assert (group.waiting > 0) == (name in waiting)
        assert name in waiting or group.declared or 0 < group.arrived < group.size


def _verify_ages(core: BalancerCore) -> None:
    """What is due or held back for its age, counted anew."""
    config = core.config
    staleness, versions, labels = core.staleness, core.buffer.versions, core.buffer.labels
    held, due = staleness.held_back(), staleness.due()
    free = ~held
    assert core.triggers.sendable()[:2] == (int(free.sum()), int((core.buffer.complete & free).sum()))
    if config.staleness.max_versions is None or staleness.version is None:
        assert not held.any()
        assert not due.any()
        return
    oldest = staleness.version - config.staleness.max_versions + core.in_flight.steps_ahead
    assert staleness.num_due == int(due.sum()) == int((versions <= oldest).sum())
    alone = (versions < oldest) & (config.staleness.on_stale == "evict")
    assert staleness.num_held_back == int(alone.sum())
    assert (held == (alone | ((labels >= 0) & np.isin(labels, labels[alone])))).all()
