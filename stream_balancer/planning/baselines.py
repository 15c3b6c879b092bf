"""Baselines, what is usual elsewhere: the oldest rollouts, in turn (round-robin) or partitioned as well as can be
(fifo).

Here so that a user can measure, in the same loop and with the same figures, what the window buys. Pure, like the
whole package.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .arrays import Ints
from .packing import Packer
from .plan import Plan, PlanKnobs, Waiting
from .planner import earliest_finish, finished, plan_batch


def plan_fifo(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan:
    """The oldest rollouts, partitioned as well as they can be: the window's planner, shown nothing else. O(n log n)."""
    oldest = _oldest(waiting, min(knobs.batch_size, num_rollouts))
    shown = np.zeros(waiting.costs.size, dtype=np.bool_)
    shown[oldest] = True
    # nobody else is in sight, so nothing can be exchanged: what is left is the partition
    visible = replace(waiting.among(shown), due=np.ones(len(oldest), dtype=np.bool_))
    plan = plan_batch(visible, knobs, num_rollouts=len(oldest), step=step)
    # the plan's positions are into what it was shown: back into the whole window
    ranks = [[oldest[positions] for positions in micro_batches] for micro_batches in plan.ranks]
    return replace(plan, ranks=ranks)


def plan_round_robin(waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan:
    """The oldest rollouts, to the ranks in turn; each rank packs its own into micro-batches. O(n log n).

    Ranks get as many micro-batches as the one that needs most, as trainers arrange by an all_reduce.
    """
    oldest = _oldest(waiting, min(knobs.batch_size, num_rollouts))
    # as most trainers deal out a batch that they have read in order
    shares = [oldest[rank :: knobs.dp_size] for rank in range(knobs.dp_size)]
    packer = Packer(waiting.lengths, waiting.costs, knobs.max_tokens_per_micro_batch, knobs.padded)
    each = [share.tolist() for share in shares]
    packed = packer.evened(each, knobs.micro_batch_multiple, "equal")
    ranks = [[np.sort(np.array(one, dtype=np.int64)) for one in bins] for bins in packed]
    return finished(waiting, knobs, ranks, earliest_finish(waiting, knobs, oldest))


def _oldest(waiting: Waiting, num_rollouts: int) -> Ints:
    # an incomplete group waits for its siblings here, too, or policies would not send the same batches
    ready = np.flatnonzero(waiting.group_complete | waiting.due)
    return ready[:num_rollouts].astype(np.int64)
