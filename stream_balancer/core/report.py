"""Statistics of a balancer. Pure; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_balancer.core.state import BalancerState
from stream_balancer.statistics import Statistics


def statistics(state: BalancerState, now: float, others: Mapping[str, Any]) -> Statistics:
    """The figures of this moment; ``others`` as who knows them gives them. O(batches in flight)."""
    buffer, in_flight = state.buffer, state.in_flight
    incomplete = buffer.arrived_at[~buffer.complete] if buffer.groups.num_awaited else buffer.arrived_at[:0]
    return Statistics(
        waiting=len(buffer),
        waiting_tokens=buffer.num_tokens,
        waiting_bytes=buffer.num_bytes,
        waiting_lengths=buffer.length_quantiles((0.0, 0.5, 0.9, 1.0)),
        in_flight=sum(batch.num_rollouts for batch in in_flight.batches()),
        redelivering=in_flight.num_redelivering,
        open_groups=len(buffer.groups.incomplete()),
        oldest_open_group_s=max(now - float(incomplete.min(initial=now)), 0.0),
        oldest_wait_s=max(now - buffer.oldest_arrival, 0.0),
        length_bias=state.length_bias.summary(),
        version=state.staleness.version,
        training_age=in_flight.training_ages.summary(),
        window=state.config.window,
        window_tokens=state.config.step_size.window_tokens,
        strata=buffer.strata.figures(buffer.stratum_numbers, buffer.arrived_at, now),
        **state.counts.figures(),
        **others,
    )
