"""From waiting rollouts to a batch: ask the planner, and make rank batches, micro-batches and padding copies of its
plan. Pure: reads the state, changes nothing. :mod:`.triggers` decides when a batch leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any

import numpy as np

from stream_balancer.config import BalancerConfig
from stream_balancer.core.executions import ExecutionKey, denominators_of, execution_of, labels_of, sizes_in, sizes_of
from stream_balancer.core.state import BalancerState
from stream_balancer.planning import Plan, PlanKnobs, plan_batch
from stream_balancer.planning.arrays import Bools, Ints
from stream_balancer.planning.baselines import plan_fifo, plan_round_robin
from stream_balancer.planning.mini_batches import joined
from stream_balancer.rollouts import (
    Batch,
    ExecutionSize,
    MicroBatch,
    MiniBatchSize,
    RankBatch,
    Reason,
    Rollout,
    cheapest_to_copy,
)
from stream_balancer.values import PADDING_PREFIX

_PLANNERS: dict[str, Callable[..., Plan]] = {"window": plan_batch, "fifo": plan_fifo, "round_robin": plan_round_robin}


def make_plan(state: BalancerState, due: Bools, num_rollouts: int) -> Plan:
    """The planner's plan, in rows of the buffer: ``num_rollouts`` leave, with all that are ``due`` [n]. The planner
    does not see rollouts that are held back for their age. O(n), plus the planner's time."""
    waiting, rows = state.buffer.waiting(due), None
    if state.staleness.num_held_back:
        rows = np.flatnonzero(~state.staleness.held_back())
        waiting = waiting.among(rows)

    def together(chosen: Ints) -> Ints:
        # all samples of an execution stay in one mini-batch, since its denominator counts them there
        rollouts = state.buffer.rollouts(chosen if rows is None else rows[chosen])
        return labels_of(None if one.execution_id is None else execution_of(one) for one in rollouts)

    plan = _PLANNERS[state.config.policy](
        waiting, state.pricing.knobs, num_rollouts=num_rollouts, step=state.in_flight.next_step, together=together
    )
    return plan if rows is None else in_rows(plan, rows)


def in_rows(plan: Plan, rows: Ints) -> Plan:
    """A plan in row numbers of a selection, in row numbers of the buffer."""
    return replace(
        plan,
        ranks=[[rows[one] for one in micro_batches] for micro_batches in plan.ranks],
        mini_batches=tuple(in_rows(one, rows) for one in plan.mini_batches),
    )


def make_batch(state: BalancerState, plan: Plan, rows: Ints, reason: Reason, now: float) -> Batch:
    """The batch of the next step, from a plan and its rows; its rollouts are still in the buffer. O(rollouts in it)."""
    buffer = state.buffer
    rollouts = buffer.rollouts(rows)
    torn = ~buffer.complete[rows] | np.isin(buffer.labels[rows], plan.incomplete_groups)
    return batch_of_plan(
        state.config,
        plan,
        dict(zip(rows.tolist(), rollouts, strict=True)),
        state.in_flight.next_step,
        reason=reason,
        oldest_wait_s=max(now - float(buffer.arrived_at[rows].min()), 0.0),
        incomplete_groups=tuple(sorted({r.group_id or "" for r in compress(rollouts, torn.tolist())})),
    )


def plan_again(state: BalancerState, batch: Batch, missing: Collection[str], dp_size: int) -> Batch:
    """A new batch of the same step for ``dp_size`` ranks, without ``missing`` rollouts. Each mini-batch keeps its
    rollouts; an empty mini-batch is dropped. As fast as a plan of its rollouts."""
    pieces = [
        [one for part in of_ranks for one in _real(part.rollouts) if one.rollout_id not in missing]
        for of_ranks in zip(*(one.mini_batches for one in batch.ranks), strict=True)
    ]
    pieces = [rollouts for rollouts in pieces if rollouts]
    rollouts = list(chain.from_iterable(pieces))
    knobs = replace(state.pricing.knobs, dp_size=dp_size)
    plan = plan_of_all(state, rollouts, batch.step, knobs)
    # each mini-batch keeps its rollouts, so that its optimizer step has the same data
    if len(pieces) > 1:
        rows = np.split(np.arange(len(rollouts)), np.cumsum([len(its) for its in pieces])[:-1])
        plans = [plan_of_all(state, its, batch.step, knobs) for its in pieces]
        plan = joined(plan, [in_rows(one, its) for one, its in zip(plans, rows, strict=True)])
    return batch_of_plan(
        state.config,
        plan,
        {row: rollouts[row] for row in rows_of(plan).tolist()},
        batch.step,
        reason=batch.reason,
        oldest_wait_s=batch.oldest_wait_s,
        incomplete_groups=batch.incomplete_groups,
    )


def plan_of_all(state: BalancerState, rollouts: Sequence[Rollout], step: int, knobs: PlanKnobs) -> Plan:
    """A plan of all the rollouts, without a choice, in one mini-batch."""
    number = len(rollouts)
    knobs = replace(knobs, batch_size=number, max_skips=None, mini_batches=1)
    planner = _PLANNERS[state.config.policy]
    return planner(state.pricing.waiting_of(rollouts), knobs, num_rollouts=number, step=step)


def batch_of_plan(config: BalancerConfig, plan: Plan, chosen: Mapping[int, Rollout], step: int, **fields: Any) -> Batch:
    """A plan as a batch. ``chosen``: its rollouts by row, in the plan's order; ``fields``: the batch's fields that are
    not in the plan. O(rollouts)."""
    rollouts = list(chosen.values())
    executions = sizes_of(rollouts)
    mini_batches = [_micro_batches(one, chosen, executions) for one in plan.pieces]
    same = config.micro_batches.equal_number
    num_padding = _fill_up(mini_batches, config, rollouts, step, same=same)
    return assembled(
        step,
        mini_batches,
        # the planner's sums, not new ones: the choice was made by these loads
        [one.loads.tolist() for one in plan.pieces],
        finish=plan.finish,
        lower_bound=plan.lower_bound,
        num_padding=num_padding,
        **fields,
    )


def assembled(
    step: int,
    mini_batches: Sequence[Sequence[Sequence[MicroBatch]]],
    loads: Sequence[Sequence[float]],
    **fields: Any,
) -> Batch:
    """The batch of a step, from micro-batches ``[mini_batch][rank]``, loads ``[mini_batch][rank]``, and ``fields`` that
    do not follow from them. O(rollouts)."""
    # a mini-batch divides by its own totals, the step by the totals of all mini-batches
    real = [_real(r for of_rank in one for mb in of_rank for r in mb.rollouts) for one in mini_batches]
    each = [denominators_of(rollouts) for rollouts in real]
    whole = each[0] if len(each) == 1 else denominators_of(list(chain.from_iterable(real)))
    ranks = tuple(
        RankBatch(
            step=step,
            rank=rank,
            dp_size=len(mini_batches[0]),
            micro_batches=tuple(chain.from_iterable(one[rank] for one in mini_batches)),
            load=sum(of_ranks[rank] for of_ranks in loads),
            denominators=whole,
            mini_batch_sizes=()
            if len(mini_batches) == 1
            else tuple(
                MiniBatchSize(len(one[rank]), of_ranks[rank], *sizes)
                for one, of_ranks, sizes in zip(mini_batches, loads, each, strict=True)
            ),
        )
        for rank in range(len(mini_batches[0]))
    )
    return Batch(step=step, ranks=ranks, num_rollouts=whole.rollouts, num_tokens=whole.tokens, **fields)


def rows_of(plan: Plan) -> Ints:
    """Rows of the plan's rollouts, mini-batch by mini-batch, rank by rank, micro-batch by micro-batch."""
    return np.concatenate([rows for one in plan.pieces for micro_batches in one.ranks for rows in micro_batches])


def _real(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts without padding copies."""
    return [rollout for rollout in rollouts if not rollout.is_padding]


def _micro_batches(
    plan: Plan, chosen: Mapping[int, Rollout], executions: Mapping[ExecutionKey, ExecutionSize]
) -> list[list[MicroBatch]]:
    """[rank][micro_batch] of the rollouts, by their rows. O(n)."""
    return [
        [micro_batch_of([chosen[row] for row in rows.tolist()], executions) for rows in of_rank]
        for of_rank in plan.ranks
    ]


def micro_batch_of(rollouts: Sequence[Rollout], executions: Mapping[ExecutionKey, ExecutionSize]) -> MicroBatch:
    """Micro-batch of a rank. ``executions``: sizes in the whole step."""
    return MicroBatch.of(rollouts, sizes_in(executions, rollouts))


def _fill_up(
    mini_batches: Sequence[list[list[MicroBatch]]],
    config: BalancerConfig,
    real: Sequence[Rollout],
    step: int,
    *,
    same: bool,
) -> int:
    """Give every rank in every mini-batch a positive multiple of micro-batches, in place, and with ``same`` an equal
    number. Each added micro-batch is one padding copy. -> number of padding copies."""
    multiple, original, number = config.micro_batches.multiple_of, None, 0
    for ranks in mini_batches:
        # with fewer micro-batches, a rank would leave other ranks waiting in a collective for ever
        most = max(map(len, ranks)) if same else 0
        for rank, of_rank in enumerate(ranks):
            wanted = max(-(-max(len(of_rank), most) // multiple), 1) * multiple
            for _ in range(len(of_rank), wanted):
                original = original or cheapest_to_copy(real)
                of_rank.append(MicroBatch.of([original.padding_copy(f"{PADDING_PREFIX}{step}-{rank}-{number}")]))
                number += 1
    return number
