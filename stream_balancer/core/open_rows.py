"""The rows of a step that begins before it is complete, as batches, and the whole of it once its last row leaves. Pure:
reads the state, changes nothing. Which rollouts leave is chosen in :mod:`.open_step`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from stream_balancer.core.batching import assembled, in_rows, make_batch, plan_of_all, rows_of
from stream_balancer.core.buffer import NO_ROWS
from stream_balancer.core.open_step import OpenStep, least_rollouts
from stream_balancer.core.state import BalancerState
from stream_balancer.planning import Plan
from stream_balancer.planning.arrays import Ints
from stream_balancer.planning.planner import earliest_finish
from stream_balancer.types import Batch, Reason


def ready_rows(state: BalancerState, opened: OpenStep) -> Ints:
    """Rows of the buffer that leave before the step is complete; empty while too few wait. O(n log n), and O(1) where
    none has come that could make a row."""
    if state.triggers.sendable()[1] - opened.num_taken < least_rollouts(state.config):
        return NO_ROWS
    may = state.triggers.available(np.zeros(state.buffer.num_waiting, dtype=np.bool_))
    return opened.choose(state.config, state.buffer, may, complete=False)


def make_row(state: BalancerState, opened: OpenStep, rows: Ints, reason: Reason, now: float) -> Batch:
    """The next row of the step that is under way; its rollouts are still in the buffer, and ``rows`` of it. Every rank
    has the same number of micro-batches as in a batch. As fast as a plan of so many."""
    # of a last row for which nothing is left
    plan = Plan([[] for _ in opened.loads], np.zeros_like(opened.loads), None, 0.0, 0.0, ())
    if rows.size:
        all_of_them = plan_of_all(state, state.buffer.rollouts(rows), state.in_flight.next_step, state.pricing.knobs)
        plan = opened.spread(in_rows(all_of_them, rows))
    row = make_batch(state, plan, rows_of(plan) if rows.size else rows, reason, now, opened.num_padding)
    # what to divide by is known with the last row
    return replace(row, ranks=tuple(replace(one, denominators=None) for one in row.ranks))


def make_whole(state: BalancerState, opened: OpenStep, last: Batch, now: float) -> tuple[Batch, Ints]:
    """The step whose last row leaves, as one batch, and its rows of the buffer. O(n)."""
    buffer, loads, knobs = state.buffer, opened.loads.tolist(), replace(state.pricing.knobs, counts="free")
    rows = np.flatnonzero(buffer.taken)
    # [rank][micro_batch]: the rows one behind the other
    of_ranks = zip(*([one.micro_batches for one in row.ranks] for row in opened.rows), strict=True)
    whole = assembled(
        last.step,
        [[list(chain.from_iterable(its)) for its in of_ranks]],
        [loads],
        reason=last.reason,
        # in lockstep no rank begins a row before all are through with the one before
        finish=sum(row.finish for row in opened.rows) if state.config.sync == "micro_batch" else max(loads),
        lower_bound=earliest_finish(state.pricing.waiting_of(buffer.rollouts(rows)), knobs, np.arange(rows.size)),
        oldest_wait_s=max(now - float(buffer.arrived_at[rows].min()), 0.0),
        num_padding=opened.num_padding,
        incomplete_groups=last.incomplete_groups,
        sharing_cost=sum(row.sharing_cost for row in opened.rows),
    )
    return whole, rows
