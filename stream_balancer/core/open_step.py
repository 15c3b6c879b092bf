"""A step that begins before it is complete: which rollouts leave in its next row, the rows as batches, and the whole of
it once its last row leaves. Pure: reads the state, changes nothing.

A row is micro-batches for all ranks, at least one rollout for each. Example, 2 ranks, 6 rollouts a step::

    a b c d wait, lengths 9 1 5 2       row 0: a, c         (the heaviest: there is work for everybody)
    b d, and e f have come              row 1: b d e f      (the step is complete: all that is left of it)

Rollouts of a row go on waiting in the buffer until the last row leaves. Then all of them leave as one batch, which is
in flight, written to the journal, acknowledged and given again as any other. A step that is left in the middle, by a
crash or by another iterator, is forgotten here, and its rollouts are there to be given again from the first row on:
gradients of half a step are nowhere, either.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np

from stream_balancer.config import BalancerConfig, step_wide
from stream_balancer.core.batching import assembled, in_rows, make_batch, plan_of_all, rows_of
from stream_balancer.core.buffer import NO_ROWS
from stream_balancer.core.state import BalancerState, OpenStep
from stream_balancer.errors import ConfigError
from stream_balancer.planning import Plan
from stream_balancer.planning.arrays import Bools, Floats, Ints
from stream_balancer.planning.planner import earliest_finish
from stream_balancer.rollouts import Batch, Reason


def ready_rows(state: BalancerState, opened: OpenStep) -> Ints:
    """Rows of the buffer that leave before the step is complete; empty while too few wait. O(n log n), and O(1) where
    none has come that could make a row."""
    if state.triggers.sendable()[1] - opened.num_taken < _least_rollouts(state.config):
        return NO_ROWS
    may = state.triggers.available(np.zeros(state.buffer.num_waiting, dtype=np.bool_))
    return choose_rows(state, opened, may, complete=False)


def choose_rows(state: BalancerState, opened: OpenStep, may: Bools, *, complete: bool) -> Ints:
    """Rows of the buffer that leave next; ``may`` [n] could. Not ``complete``: the heaviest of those that the step has
    room for, enough for every rank; none if these are too few. ``complete``: all that the step has room for, oldest
    first. Groups are whole, but for those that no step has room for. O(n log n)."""
    # oldest first, whatever they cost: who waits longest must not be passed over by every step
    buffer, batch_size = state.buffer, state.config.batch_size
    room, going = batch_size - opened.num_taken, []
    for unit in _units(np.flatnonzero(may & ~buffer.taken), buffer.labels):
        # a group that can never leave whole
        if unit.size > batch_size:
            unit = unit[:room]
        if 0 < unit.size <= room:
            going.append(unit)
            room -= unit.size
    if not complete:
        # heavy ones first: what is left for the end of the step is light, and balances what came before
        going.sort(key=lambda unit: -float(buffer.costs[unit].sum()))
        enough = np.flatnonzero(np.cumsum([unit.size for unit in going]) >= _least_rollouts(state.config))
        going = going[: enough[0] + 1] if enough.size else []
    return np.concatenate([NO_ROWS, *going])


def make_row(state: BalancerState, opened: OpenStep, rows: Ints, reason: Reason, now: float) -> Batch:
    """The next row of the step that is under way; its rollouts are still in the buffer, and ``rows`` of it. Every rank
    has the same number of micro-batches as in a batch. As fast as a plan of so many."""
    dp_size = state.config.dp_size
    # of a last row for which nothing is left
    plan = Plan([[] for _ in range(dp_size)], np.zeros(dp_size), 0.0, 0.0, ())
    if rows.size:
        all_of_them = plan_of_all(state, state.buffer.rollouts(rows), state.in_flight.next_step, state.pricing.knobs)
        plan = _spread(in_rows(all_of_them, rows), _loads_of(opened, dp_size))
    row = make_batch(state, plan, rows_of(plan) if rows.size else rows, reason, now, opened.num_padding)
    # what to divide by is known with the last row
    return replace(row, ranks=tuple(replace(one, denominators=None) for one in row.ranks))


def make_whole(state: BalancerState, opened: OpenStep, last: Batch, now: float) -> tuple[Batch, Ints]:
    """The step whose last row leaves, as one batch, and its rows of the buffer. O(n)."""
    buffer, knobs = state.buffer, replace(state.pricing.knobs, counts="free")
    loads, rows = _loads_of(opened, len(last.ranks)).tolist(), np.flatnonzero(buffer.taken)
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
    )
    return whole, rows


def _spread(plan: Plan, loads: Floats) -> Plan:
    """The plan of a row, its heaviest share on the rank that has had the least work in the step ([ranks] ``loads``)."""
    share_of = np.empty(loads.size, dtype=np.int64)
    share_of[np.argsort(loads, kind="stable")] = np.argsort(-plan.loads, kind="stable")
    return replace(plan, ranks=[plan.ranks[share] for share in share_of], loads=plan.loads[share_of])


def _loads_of(opened: OpenStep, dp_size: int) -> Floats:
    """[ranks] work of the rows that have left."""
    return sum((np.array(row.loads) for row in opened.rows), np.zeros(dp_size))


def _least_rollouts(config: BalancerConfig) -> int:
    """Least rollouts of a row before the last: one for every micro-batch that every rank must have."""
    return config.dp_size * config.micro_batches.multiple_of


def _units(rows: Ints, labels: Ints) -> list[Ints]:
    """The siblings of a group together, others alone; oldest first."""
    names = np.where(labels[rows] >= 0, labels[rows], -1 - rows)
    _, first, sizes = np.unique(names, return_index=True, return_counts=True)
    together = np.split(rows[np.argsort(names, kind="stable")], np.cumsum(sizes)[:-1]) if rows.size else []
    return [together[number] for number in np.argsort(first)]


def check_open(config: BalancerConfig) -> BalancerConfig:
    """Config of steps in rows. Raises ConfigError for knobs that these cannot respect."""
    config = step_wide(config)
    nothing_waits, window = "nothing waits to be chosen from", f"Give window={config.batch_size}"
    batch_size = f"Give batch_size={config.batch_size // config.mini_batches}"
    refused = [
        ("window", config.window != config.batch_size, nothing_waits, window),
        # its denominators are known with its last row, and the policy moves then: nothing would be left of the step
        ("mini_batches", config.mini_batches > 1, "a mini-batch in rows is a step by itself", batch_size),
    ]
    for name, is_given, why, instead in refused:
        if is_given:
            raise ConfigError(
                f"batches(open=True) cannot have {name}: rows leave as they form, and {why}. {instead}, or iterate "
                "batches()"
            )
    return config
