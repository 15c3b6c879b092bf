"""Statistics of a balancer. Pure; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_balancer.core.counters import idle, token_variation, unavoidable
from stream_balancer.core.state import BalancerState
from stream_balancer.statistics import Statistics


def statistics(state: BalancerState, now: float, others: Mapping[str, Any]) -> Statistics:
    """The figures of this moment; ``others`` as who knows them gives them. O(batches in flight)."""
    counts, buffer, in_flight = state.counts, state.buffer, state.in_flight
    return Statistics(
        waiting=len(buffer),
        waiting_tokens=buffer.num_tokens,
        waiting_bytes=buffer.num_bytes,
        waiting_lengths=buffer.length_quantiles((0.0, 0.5, 0.9, 1.0)),
        in_flight=sum(batch.num_rollouts for batch in in_flight.batches()),
        redelivering=in_flight.num_redelivering,
        accepted=counts.accepted,
        acknowledged=counts.acknowledged,
        evicted=dict(counts.evicted),
        batches=dict(counts.batches),
        dispatched_tokens=counts.dispatched_tokens,
        token_variation=token_variation(counts.batches.total(), counts.dispatched_tokens, counts.squared_tokens),
        surplus_rollouts=counts.surplus,
        padding_copies=counts.padding_copies,
        nacked=counts.nacked,
        open_groups=len(buffer.groups.incomplete()),
        oldest_open_group_s=_oldest_open_group_s(state, now),
        short_groups=counts.short_groups,
        peak_waiting=counts.peak_waiting,
        oldest_wait_s=max(now - buffer.oldest_arrival, 0.0) if len(buffer) else 0.0,
        length_bias=state.length_bias.summary(),
        idle_fraction=idle(counts.mean_loads, counts.max_loads),
        unavoidable_idle_fraction=unavoidable(counts.mean_loads, counts.lower_bounds, counts.max_loads),
        measured_idle_fraction=idle(counts.mean_seconds, counts.max_seconds),
        version=state.staleness.version,
        training_age=in_flight.training_ages.summary(),
        window=state.config.window,
        window_tokens=state.config.step_size.window_tokens,
        strata=buffer.strata.figures(buffer.stratum_numbers, buffer.arrived_at, now),
        **others,
    )


def _oldest_open_group_s(state: BalancerState, now: float) -> float:
    if not state.buffer.groups.num_awaited:
        return 0.0
    return max(now - float(state.buffer.arrived_at[~state.buffer.complete].min()), 0.0)
