"""Numbers that every rank divides by: the plan's denominators, less what is gone with its owner.

A rollout whose payload is gone takes part as a padding copy of weight 0, so the plan stays; what is subtracted here is
what it would have contributed. Of a shared rollout no rank trains on its part when another has none. Pure: the same for
the same plan and the same masks, on whichever controller.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stream_balancer.core.executions import ExecutionKey, sizes_of
from stream_balancer.host.plans import StepPlan
from stream_balancer.net.messages import ResizedExecution, Seal, Sizes
from stream_balancer.types import Rollout


def sizes_of_plan(plan: StepPlan) -> Sizes:
    """Denominators of a complete step if nothing is gone."""
    denominators = plan.batch.ranks[0].denominators
    assert denominators is not None
    return Sizes(*denominators)


def seal_of(plan: StepPlan, number: int, ranks: Sequence[int], gone: Collection[str]) -> Seal:
    """The seal of a complete step, less the rollouts that are ``gone``. O(1) where none is, else O(rollouts)."""
    sizes, step = sizes_of_plan(plan), plan.batch.step
    parts = [one.mini_batches for one in plan.batch.ranks] if plan.batch.ranks[0].mini_batch_sizes else []
    pieces = [
        (Sizes(*(of_ranks[0].denominators or ())), frozenset(r.rollout_id for part in of_ranks for r in part.rollouts))
        for of_ranks in zip(*parts, strict=True)
    ]
    # nearly always: only then does every denominator follow from the plan
    if not gone:
        return Seal(step, number, tuple(ranks), sizes, tuple(planned for planned, _ in pieces))
    everything = list(plan.rollouts)
    lost = [rollout for rollout in everything if rollout.rollout_id in gone]
    # an execution may be lost in part: what is left of it is divided by what is left
    was, left = sizes_of(lost), sizes_of(one for one in everything if one.rollout_id not in gone) if lost else {}
    return Seal(
        step=step,
        number=number,
        ranks=tuple(ranks),
        sizes=_less(sizes, lost, left),
        mini_batches=tuple(_less(planned, [r for r in lost if r.rollout_id in ids], left) for planned, ids in pieces),
        resized=tuple(ResizedExecution(*key, *left[key]) for key in was if key in left and not isinstance(key, str)),
        gone=tuple(sorted(gone)),
    )


def _less(planned: Sizes, gone: Sequence[Rollout], left: Collection[ExecutionKey]) -> Sizes:
    """Sizes without what is gone. ``left``: executions of which something is left."""
    alone = sum(rollout.execution_id is None for rollout in gone)
    # at least 1: where everything is gone the sums are 0, and 0 / 0 would put NaN into every weight
    return Sizes(
        rollouts=max(planned.rollouts - len(gone), 1),
        tokens=max(planned.tokens - sum(rollout.num_tokens for rollout in gone), 1),
        loss_tokens=max(
            planned.loss_tokens - sum(rollout.num_loss_tokens for rollout in gone), min(planned.loss_tokens, 1)
        ),
        executions=max(planned.executions - alone - len(sizes_of(gone).keys() - left), 1),
    )
