"""The choice of a step's rollouts from your own pool: numpy only, without a balancer.

Example: a pool of 900, 100, 120, 80, 4000, 110, 950 and 90 tokens, four rollouts per step, two ranks. The first step
takes 120, 80, 110 and 90; the 4000 waits for the 900 and the 950.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Ints, checked_costs, positions_in
from .plan import PlanKnobs, Waiting
from .planner import plan_batch


def choose(
    lengths: ArrayLike,
    costs: ArrayLike | None = None,
    *,
    dp_size: int,
    batch_size: int,
    max_skips: int | None = 16,
    skips: ArrayLike | None = None,
    due: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    group_size: int | None = None,
    equal_rollouts: bool = False,
    step: int = 0,
) -> Ints:
    """Choose the rollouts that go now, so that ``dp_size`` ranks finish together.

    Returns ascending positions: ``batch_size``, or the whole pool if the pool is smaller. Fewer where whole groups do
    not add up to that number. `split` and `form_micro_batches` lay the chosen rollouts out. O(n log n), plus a search
    within a fixed work budget.

    Args:
        lengths: [n] tokens of each rollout, oldest first.
        costs: [n] work of each rollout. None = its tokens.
        dp_size: number of ranks.
        batch_size: rollouts of a step.
        max_skips: most steps that leave a rollout behind, as far as the step has room. None = no limit.
        skips: [n] steps that left each rollout behind so far. Your pool counts them.
        due: [n] bool, the rollout must go now as far as the step has room.
        groups: [n] group label of each rollout, negative = no group. A group leaves in one step.
        group_size: rollouts of a whole group. A smaller group waits unless it is due. None = all groups are whole.
        equal_rollouts: the rollout counts of two ranks will differ by at most 1.
        step: number of the step.

    Raises:
        ValueError: columns that do not fit together, or a group that is larger than a step.

    Examples:
        >>> pool = [900, 100, 120, 80, 4000, 110, 950, 90]
        >>> [pool[position] for position in choose(pool, dp_size=2, batch_size=4)]
        [120, 80, 110, 90]
    """
    tokens = _whole_numbers("lengths", lengths)
    n, work = tokens.size, checked_costs(tokens if costs is None else costs, dp_size)
    passed = np.zeros(n, dtype=np.int64) if skips is None else _whole_numbers("skips", skips)
    must = np.zeros(n, dtype=np.bool_) if due is None else np.asarray(due)
    labels = np.full(n, -1) if groups is None else np.maximum(_whole_numbers("groups", groups), -1)
    complete = np.ones(n, dtype=np.bool_)
    columns = work, tokens, passed, must, labels, complete
    if {column.shape for column in columns} != {(n,)} or must.dtype != np.bool_:
        raise ValueError(f"costs, skips, due (booleans) and groups must have one entry for each of the {n} lengths.")
    if not n or tokens.min() < 1 or passed.min() < 0 or (max_skips or 0) < 0 or dp_size > batch_size:
        raise ValueError(
            "choose() needs a rollout, lengths >= 1, skips >= 0, max_skips >= 0 and dp_size <= batch_size, not "
            f"{n} rollouts, max_skips={max_skips}, dp_size={dp_size} and batch_size={batch_size}."
        )
    if group_size is not None:
        if groups is None or not 1 <= group_size <= batch_size:
            raise ValueError(f"group_size ({group_size}) needs groups=, and must be in 1..batch_size ({batch_size}).")
        _, of, members = np.unique(labels, return_inverse=True, return_counts=True)
        complete &= (labels < 0) | (members[of] >= group_size)
    knobs = PlanKnobs(
        dp_size,
        batch_size,
        max_skips,
        equal_rollouts=equal_rollouts,
        whole_groups=groups is not None,
        group_size=group_size,
    )
    # The layout is thrown away, but the swaps with the pool depend on it.
    plan = plan_batch(Waiting(*columns), knobs, num_rollouts=min(batch_size, n), step=step)
    return np.sort(positions_in(plan.ranks))


def _whole_numbers(name: str, given: ArrayLike) -> Ints:
    column = np.asarray(given)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be [n] whole numbers, one per rollout, not {column.shape} of {column.dtype}.")
    return column.astype(np.int64)
