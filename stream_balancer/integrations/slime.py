"""slime and miles: their schedule of ranks and micro-batches.

::

    patch()                                             # slime.ray.rollout.build_dp_schedule is then ours
    patch("miles")                                      # or its fork's

Nothing of slime is imported but in :func:`patch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stream_balancer import planning
from stream_balancer.integrations._plans import UnplannableError
from stream_balancer.integrations.partitions import replace

__all__ = ["build_dp_schedule", "patch"]


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    cost: Callable[[ArrayLike], ArrayLike] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """slime's function of this name by our planning, for ``use_dynamic_batch_size``: rank totals are balanced first and
    each rank packs its own under ``max_tokens_per_gpu * cp_size``; a sample longer than that is alone in its
    micro-batch.

    ``cost``: work of lengths (``sb.cost.TransformerCost...``); tokens by default. Arguments and answer are otherwise
    slime's: ``(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)``, trailing rollouts that fill no
    step dropped, samples of one rollout in one step. With miles' ``allow_partial_train_step`` trailing rollouts are a
    smaller step of their own, if they have a sample for every rank.

    Raises UnplannableError, a ValueError, if the batches are not dynamic, for less than one step, or if a step has too
    few samples for its ranks and their virtual pipelines.
    """
    if not args.use_dynamic_batch_size:
        raise UnplannableError("there is nothing to plan with fixed micro-batches. Set --use-dynamic-batch-size")
    dp_size = train_parallel_config["dp_size"]
    partial = getattr(args, "allow_partial_train_step", False)  # miles only
    steps = _steps(rollout_indices, global_batch_size, partial_from=dp_size if partial else None)
    virtual = (train_parallel_config["vpp_size"] or 1) > 1
    # Megatron's interleaved schedule refuses any other number of micro-batches
    multiple_of = train_parallel_config["microbatch_group_size_per_vp_stage"] if virtual else 1
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(dp_size)]
    counts = []
    for step, positions in enumerate(steps):
        lengths = np.array([total_lengths[position] for position in positions])
        plan = planning.form_micro_batches(
            lengths,
            lengths if cost is None else cost(lengths),
            dp_size,
            # the GPUs of a context-parallel group hold a sample together, so their caps add up
            max_tokens=args.max_tokens_per_gpu * train_parallel_config["cp_size"],
            multiple_of=multiple_of,
            oversize="alone",  # as slime's own schedule: at this point a sample can no longer be refused
            rotation=step,
        )
        numbers = {len(of_rank) for of_rank in plan}
        # a rank that runs fewer would leave the others waiting in a collective
        if len(numbers) > 1 or 0 in numbers or max(numbers) % multiple_of:
            raise UnplannableError(
                f"step {step} has too few samples for {dp_size} ranks with a multiple of {multiple_of} micro-batches "
                "each. Raise global_batch_size"
            )
        counts.append(len(plan[0]))
        for rank, of_rank in enumerate(plan):
            for micro_batch in of_rank:
                start = len(partitions[rank])
                partitions[rank] += [positions[i] for i in micro_batch]
                micro_batches[rank].append(list(range(start, len(partitions[rank]))))
    sizes = [len({rollout_indices[position] for position in positions}) for positions in steps]
    return partitions, micro_batches, counts, sizes


def patch(package: str = "slime", *, cost: Callable[[ArrayLike], ArrayLike] | None = None) -> Callable[[], None]:
    """Put our schedule in place of slime's, or its fork's with ``"miles"``, in every module loaded so far that has it;
    fixed micro-batches remain theirs. In the process of the rollout manager, after it was imported. Returns a function
    that puts it back."""
    dp_schedule = importlib.import_module(f"{package}.utils.dp_schedule")
    original = dp_schedule.build_dp_schedule

    def ours(args: Any, *more: Any, **options: Any) -> Any:
        if not args.use_dynamic_batch_size:
            return original(args, *more, **options)
        return build_dp_schedule(args, *more, **options, cost=cost)

    return replace(dp_schedule, "build_dp_schedule", ours)


def _steps(
    rollout_indices: Sequence[int], global_batch_size: int, *, partial_from: int | None = None
) -> list[list[int]]:
    """Positions of each step's samples: ``global_batch_size`` rollouts, with all samples of each. A last step of fewer
    rollouts is one if it has ``partial_from`` samples."""
    samples_of: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(position)
    # in the order of their first samples
    rollouts = list(samples_of.values())
    if len(rollouts) < global_batch_size:
        raise UnplannableError(
            f"num_rollouts={len(rollouts)} do not fill one step of global_batch_size={global_batch_size}. "
            "Lower it, or give more rollouts"
        )
    starts = range(0, len(rollouts), global_batch_size)
    steps = [[i for samples in rollouts[at : at + global_batch_size] for i in samples] for at in starts]
    if len(rollouts) % global_batch_size and (partial_from is None or len(steps[-1]) < partial_from):
        steps.pop()
    return steps
