"""From the waiting rollouts to a batch: the planner is asked, and its plan made into rank batches, micro-batches and
padding copies. Pure: reads the state, changes nothing. When a batch leaves is decided in :mod:`.triggers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stream_balancer.config import BalancerConfig
from stream_balancer.core.buffer import Buffer
from stream_balancer.core.executions import ExecutionKey, num_executions, sizes_in, sizes_of
from stream_balancer.core.state import State
from stream_balancer.planning import Plan, PlanKnobs, Waiting, plan_batch
from stream_balancer.planning.baselines import plan_fifo, plan_round_robin
from stream_balancer.types import Batch, ExecutionSize, MicroBatch, RankBatch, Reason, Rollout, cheapest_to_copy
from stream_balancer.values import PADDING_PREFIX

__all__ = ["make_batch", "make_plan", "rows_of"]


class Planner(Protocol):
    """Chooses among the waiting rollouts, ``num_rollouts`` of which could go, and lays those chosen out on ranks and
    micro-batches."""

    def __call__(self, waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int, surplus: int) -> Plan: ...


_PLANNERS: dict[str, Planner] = {"window": plan_batch, "fifo": plan_fifo, "round_robin": plan_round_robin}


def make_plan(state: State, due: NDArray[np.bool_], num_rollouts: int) -> tuple[Waiting, Plan]:
    """What the planner is shown, and its plan, in rows of the buffer. ``due`` [n] must go; ``num_rollouts`` could; what
    is held back for its age is not shown. O(n), plus the planner's time."""
    planner = partial(
        _PLANNERS[state.config.policy],
        num_rollouts=num_rollouts,
        step=state.ledger.next_step,
        surplus=state.counts.surplus,
    )
    knobs = state.pricing.knobs
    waiting = state.buffer.waiting(due)
    if state.config.stratum_shares:
        knobs = replace(knobs, stratum_shares=state.buffer.strata.least_shares(state.config.stratum_shares))
    if not state.staleness.num_held_back:
        return waiting, planner(waiting, knobs)
    free = ~state.staleness.held_back()
    waiting, rows = waiting.among(free), np.flatnonzero(free)
    plan = planner(waiting, knobs)
    # the planner counts in the rows that it was shown: back to those of the buffer
    return waiting, replace(plan, ranks=[[rows[one] for one in micro_batches] for micro_batches in plan.ranks])


def make_batch(state: State, plan: Plan, rows: NDArray[np.int64], reason: Reason, now: float) -> Batch:
    """The batch of the next step, from a plan and its rows; its rollouts are still in the buffer. O(rollouts in it)."""
    buffer, dp_size, step = state.buffer, state.config.dp_size, state.ledger.next_step
    rollouts, lengths = buffer.rollouts(rows), buffer.lengths[rows]  # both in the plan's order
    executions = sizes_of(rollouts)
    micro_batches = _micro_batches(plan, rollouts, lengths.tolist(), executions)
    num_padding = _add_padding(micro_batches, _num_micro_batches(plan, state.config), rollouts, step)
    loads: list[float] = (plan.loads if plan.rates is None else plan.loads / plan.rates).tolist()
    # of real rollouts only: a padding copy must not count in any mean
    tokens, loss_tokens = int(lengths.sum()), sum(map(attrgetter("num_loss_tokens"), rollouts))
    executions_of_step = num_executions(rollouts)
    return Batch(
        step=step,
        reason=reason,
        ranks=tuple(
            RankBatch(
                step=step,
                rank=rank,
                dp_size=dp_size,
                micro_batches=tuple(of_rank),
                load=loads[rank],
                global_num_rollouts=len(rollouts),
                global_num_tokens=tokens,
                global_num_loss_tokens=loss_tokens,
                global_num_executions=executions_of_step,
            )
            for rank, of_rank in enumerate(micro_batches)
        ),
        num_rollouts=len(rollouts),
        num_tokens=tokens,
        loads=tuple(loads),
        lower_bound=plan.lower_bound,
        oldest_wait_s=max(now - float(buffer.arrived_at[rows].min()), 0.0),
        num_padding=num_padding,
        incomplete_groups=_group_ids(buffer, plan.incomplete_groups),
    )


def rows_of(plan: Plan) -> NDArray[np.int64]:
    """Rows of the plan's rollouts, rank by rank, micro-batch by micro-batch."""
    return np.concatenate([rows for micro_batches in plan.ranks for rows in micro_batches])


def _group_ids(buffer: Buffer, labels: Sequence[int]) -> tuple[str, ...]:
    if not labels:
        return ()
    rows = np.flatnonzero(np.isin(buffer.labels, labels))
    return tuple(sorted({r.group_id for r in buffer.rollouts(rows) if r.group_id is not None}))


def _micro_batches(
    plan: Plan, rollouts: list[Rollout], lengths: list[int], executions: Mapping[ExecutionKey, ExecutionSize]
) -> list[list[MicroBatch]]:
    """[rank][micro_batch] of the rollouts, which come in the plan's order. O(n)."""
    going, of = iter(rollouts), iter(lengths)

    def micro_batch(size: int) -> MicroBatch:
        its = list(islice(going, size))
        return MicroBatch.of(its, tuple(islice(of, size)), sizes_in(executions, its))

    return [[micro_batch(rows.size) for rows in micro_batches] for micro_batches in plan.ranks]


def _num_micro_batches(plan: Plan, config: BalancerConfig) -> list[int]:
    """[rank] how many it runs: the same on all ranks, or at least one where each may have its own number."""
    multiple = config.micro_batch_multiple
    # a rank that ran fewer where all meet would leave the others waiting in a collective for ever
    numbers = [max(-(-len(of_rank) // multiple), 1) * multiple for of_rank in plan.ranks]
    return numbers if config.micro_batch_counts == "free" else [max(numbers)] * len(numbers)


def _add_padding(
    micro_batches: list[list[MicroBatch]], numbers: Sequence[int], real: Sequence[Rollout], step: int
) -> int:
    """Every rank gets its number of micro-batches, in place: a padding copy each where it has fewer. -> how many."""
    missing = [
        (rank, index)
        for rank, (of_rank, number) in enumerate(zip(micro_batches, numbers, strict=True))
        for index in range(len(of_rank), number)
    ]
    if missing:
        original = cheapest_to_copy(real)
        for rank, index in missing:
            copy = original.padding_copy(f"{PADDING_PREFIX}{step}-{rank}-{index}")
            micro_batches[rank].append(MicroBatch.of([copy]))
    return len(missing)
