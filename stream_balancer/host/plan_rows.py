"""A batch in flight as a row: which rollouts are in which micro-batch of which rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

from stream_balancer.core.batching import micro_batch_of, rank_batches
from stream_balancer.core.executions import sizes_in, sizes_of
from stream_balancer.types import Batch, MicroBatch, RankBatch, Reason, Rollout, cheapest_to_copy


class PlanRow(msgspec.Struct, array_like=True, tag="plan"):
    """A batch in flight: the rollouts of each micro-batch of each rank."""

    step: int
    reason: Reason
    ranks: list[list[tuple[float, list[tuple[int, list[str]]]]]]
    """``[rank][mini_batch]`` load, and of each micro-batch by how many ranks its rollouts are shared, and their ids."""
    padding: list[str]
    """Ids that are padding copies."""
    loads: list[float]
    finish: float
    lower_bound: float
    incomplete_groups: list[str]

    @property
    def key(self) -> str:
        return f"plan {self.step}"


def plan_of(batch: Batch) -> PlanRow:
    """A batch without its rollouts' contents."""
    return PlanRow(
        step=batch.step,
        reason=batch.reason,
        ranks=[mini_batches_of(rank_batch) for rank_batch in batch.ranks],
        padding=[r.rollout_id for r in batch.rollouts if r.is_padding],
        loads=list(batch.loads),
        finish=batch.finish,
        lower_bound=batch.lower_bound,
        incomplete_groups=list(batch.incomplete_groups),
    )


def mini_batches_of(rank_batch: RankBatch) -> list[tuple[float, list[tuple[int, list[str]]]]]:
    """A rank's part of a :attr:`PlanRow.ranks`."""
    micro_batches = iter(rank_batch.micro_batches)
    # one mini-batch is written like several: what is read is one format
    sizes = [size[:2] for size in rank_batch.mini_batch_sizes] or [(len(rank_batch.micro_batches), rank_batch.load)]
    return [
        (
            load,
            [(max(len(mb.cp_group), 1), [r.rollout_id for r in mb.rollouts]) for mb in islice(micro_batches, number)],
        )
        for number, load in sizes
    ]


def batch_of(plan: PlanRow, rollouts: Mapping[str, Rollout]) -> Batch:
    """The batch again, from its rollouts. Raises KeyError for one that is missing."""
    names = [name for rank in plan.ranks for _, its in rank for _, names in its for name in names]
    # in the order of the plan, each once: which is copied for padding depends on it
    real = [rollouts[name] for name in dict.fromkeys(names) if name not in plan.padding]
    found = {rollout.rollout_id: rollout for rollout in real}
    for name in plan.padding:
        found[name] = cheapest_to_copy(real).padding_copy(name)  # as the core chose it
    executions = sizes_of(real)

    def micro_batch(rank: int, degree: int, names: list[str]) -> MicroBatch:
        its = [found[name] for name in names]
        return micro_batch_of(its, rank, degree, sizes_in(executions, its))

    # denominators are those of a mini-batch over all ranks, so they are made from its columns
    mini_batches = list(zip(*plan.ranks, strict=True))
    ranks = rank_batches(
        plan.step,
        [[[micro_batch(rank, *one) for one in its] for rank, (_, its) in enumerate(of)] for of in mini_batches],
        [[load for load, _ in of] for of in mini_batches],
    )
    return Batch(
        step=plan.step,
        reason=plan.reason,
        ranks=ranks,
        num_rollouts=ranks[0].global_num_rollouts,
        num_tokens=ranks[0].global_num_tokens,
        loads=tuple(plan.loads),
        finish=plan.finish,
        lower_bound=plan.lower_bound,
        num_padding=len(plan.padding),
        incomplete_groups=tuple(plan.incomplete_groups),
    )
