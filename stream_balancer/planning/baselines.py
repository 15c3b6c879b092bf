"""Baselines, what is usual elsewhere: the oldest rollouts, in turn (round-robin) or partitioned as well as can be
(fifo).

Here so that a user can measure, in the same loop and with the same figures, what the window buys. Pure, like the
whole package.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .plan import Plan, PlanKnobs, Waiting, finish_of, micro_batch_overheads, work_of
from .planner import earliest_finish, plan_batch
from .step_size import usual_size

__all__ = ["plan_fifo", "plan_round_robin"]


def plan_fifo(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int, surplus: int = 0) -> Plan:
    """The oldest rollouts, partitioned as well as they can be: the window's planner, shown nothing else. O(n log n)."""
    oldest = _oldest(waiting, usual_size(waiting, knobs, num_rollouts, surplus))
    shown = np.zeros(waiting.costs.size, dtype=np.bool_)
    shown[oldest] = True
    visible = replace(waiting.among(shown), due=np.ones(len(oldest), dtype=np.bool_), strata=None)
    plan = plan_batch(visible, knobs, num_rollouts=len(oldest), step=step)
    # the plan's positions are into what it was shown: back into the whole window
    ranks = [[oldest[positions] for positions in micro_batches] for micro_batches in plan.ranks]
    return replace(plan, ranks=ranks)


def plan_round_robin(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int, surplus: int = 0) -> Plan:
    """The oldest rollouts, to the ranks in turn; each rank cuts its own into micro-batches in arrival order. O(n).

    Ranks get as many micro-batches as the one that needs most, as trainers arrange by an all_reduce.
    """
    oldest = _oldest(waiting, usual_size(waiting, knobs, num_rollouts, surplus))
    shares = [oldest[rank :: knobs.num_ranks] for rank in range(knobs.num_ranks)]
    most = max(_num_needed(waiting.lengths[share], knobs) for share in shares)
    multiple = knobs.micro_batch_multiple
    most = -(-most // multiple) * multiple
    ranks = [_cut(share, waiting.lengths[share], most, knobs) for share in shares]
    speeds = np.ones(knobs.num_ranks) if knobs.speeds is None else np.asarray(knobs.speeds, dtype=np.float64)
    loads = work_of(waiting, knobs, ranks, ()) + micro_batch_overheads(knobs, ranks)
    finish = finish_of(waiting, knobs, ranks)
    bound = earliest_finish(waiting, knobs, oldest)
    mean = float(loads.sum() / speeds.sum()) or 1.0
    return Plan(
        ranks=ranks,
        loads=loads,
        rates=knobs.speeds,
        finish=finish,
        lower_bound=bound,
        incomplete_groups=(),
        avoidable_imbalance=(finish - bound) / mean,
        unavoidable_imbalance=(bound - mean) / mean,
    )


def _oldest(waiting: Waiting, num_rollouts: int) -> NDArray[np.int64]:
    ready = np.flatnonzero(waiting.group_complete | waiting.due)
    return ready[:num_rollouts].astype(np.int64)


def _num_needed(lengths: NDArray[np.int64], knobs: PlanKnobs) -> int:
    return len(_next_fit(lengths, knobs))


def _next_fit(lengths: NDArray[np.int64], knobs: PlanKnobs) -> list[list[int]]:
    """Micro-batches in the order given, a new one whenever the cap would be passed. Positions in each. O(n)."""
    cap = knobs.max_tokens_per_micro_batch
    bins: list[list[int]] = []
    tokens = longest = 0
    for position, length in enumerate(lengths.tolist()):
        longest_then = max(longest, length)
        size = longest_then * (len(bins[-1]) + 1) if knobs.padded and bins else tokens + length
        if not bins or (cap is not None and size > cap):
            bins.append([])
            tokens, longest_then = 0, length
        bins[-1].append(position)
        tokens, longest = tokens + length, longest_then
    return bins


def _cut(
    share: NDArray[np.int64], lengths: NDArray[np.int64], num_micro_batches: int, knobs: PlanKnobs
) -> list[NDArray[np.int64]]:
    """A rank's rollouts in exactly so many micro-batches: the one with most rollouts is halved until there are enough.
    O(n)."""
    bins = _next_fit(lengths, knobs)
    while len(bins) < num_micro_batches:
        widest = max(range(len(bins)), key=lambda b: len(bins[b]), default=None)
        if widest is None or len(bins[widest]) < 2:
            break  # fewer rollouts than micro-batches: the caller fills up with padding copies
        half = len(bins[widest]) // 2
        bins[widest : widest + 1] = [bins[widest][:half], bins[widest][half:]]
    return [share[np.array(one, dtype=np.int64)] for one in bins]
