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
    tokens = _whole_numbers("lengths", lengths, None)
    n, work = tokens.size, checked_costs(tokens if costs is None else costs, dp_size)
    if work.shape != tokens.shape or not n or tokens.min() < 1:
        raise ValueError(f"lengths must be [n] tokens >= 1, and costs as many, not {tokens.shape} and {work.shape}.")
    if dp_size > batch_size or (max_skips is not None and max_skips < 0):
        raise ValueError(
            f"dp_size ({dp_size}) <= batch_size ({batch_size}) and max_skips ({max_skips}) >= 0 must hold."
        )
    passed = _whole_numbers("skips", np.zeros(n, dtype=np.int64) if skips is None else skips, n)
    must = np.zeros(n, dtype=np.bool_) if due is None else np.asarray(due)
    if must.shape != (n,) or must.dtype != np.bool_ or passed.min() < 0:
        raise ValueError(f"due must be [{n}] booleans, not {must.shape} of {must.dtype}, and skips >= 0.")
    labels, complete = np.full(n, -1), np.ones(n, dtype=np.bool_)
    if groups is not None:
        labels = np.maximum(_whole_numbers("groups", groups, n), -1)
    if group_size is not None:
        if groups is None or not 1 <= group_size <= batch_size:
            raise ValueError(f"group_size ({group_size}) needs groups=, and must be in 1..batch_size ({batch_size}).")
        _, of, members = np.unique(labels, return_inverse=True, return_counts=True)
        complete = (labels < 0) | (members[of] >= group_size)
    knobs = PlanKnobs(
        dp_size,
        batch_size,
        max_skips,
        equal_rollouts=equal_rollouts,
        whole_groups=groups is not None,
        group_size=group_size,
    )
    # The layout is thrown away, but the swaps with the pool depend on it.
    plan = plan_batch(
        Waiting(work, tokens, passed, must, labels, complete), knobs, num_rollouts=min(batch_size, n), step=step
    )
    return np.sort(positions_in(plan.ranks))


def _whole_numbers(name: str, given: ArrayLike, size: int | None) -> Ints:
    column = np.asarray(given)
    fits = column.ndim == 1 and size in (None, column.size)
    if not fits or (column.size and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be [n] whole numbers, one per rollout, not {column.shape} of {column.dtype}.")
    return column.astype(np.int64)
