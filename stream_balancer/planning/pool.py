"""The choice of a step's rollouts from a pool of your own: only the planner, without a balancer."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Bools, Counts, Ints, check_ranks, checked_costs, positions_in
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
    counts: Counts = "free",
    step: int = 0,
) -> Ints:
    """Positions ([k] int64, ascending) of the rollouts that go now: those that ``dp_size`` ranks finish together. As
    many as ``batch_size``, or all if there are no more; fewer where whole groups do not add up to it. The names are
    those of ``BalancerConfig``; :func:`split` and :func:`form_micro_batches` give them to ranks.

    :param lengths: [n] tokens of each, oldest first.
    :param costs: [n] work of each; None = its tokens.
    :param max_skips: no rollout is passed over more often, as far as there is room; None = no bound.
    :param skips: [n] how often each was passed over so far; None = never. Count it in your pool.
    :param due: [n] bool: it must go now, as far as there is room.
    :param groups: [n] label of each one's siblings (integers; negative = it has none): they go together.
    :param group_size: rollouts of a whole group; one with fewer waits, unless it is due. None = all are whole.
    :param step: number of the step, so that no rank is always the first.

    Raises ValueError for columns that do not fit together, and a group that no step could take. O(n log n), and the
    search for a balanced choice.

    Examples:
        >>> pool = [900, 100, 120, 80, 4000, 110, 950, 90]
        >>> positions = choose(pool, dp_size=2, batch_size=4)
        >>> [pool[position] for position in positions]
        [120, 80, 110, 90]
    """
    tokens = _whole_numbers("lengths", lengths)
    work = checked_costs(tokens if costs is None else costs)
    if tokens.ndim != 1 or tokens.shape != work.shape or not tokens.size or tokens.min() < 1:
        raise ValueError(f"lengths must be [n] tokens >= 1, and costs as many, not {tokens.shape} and {work.shape}")
    if not 1 <= dp_size <= batch_size:
        raise ValueError(f"1 <= dp_size ({dp_size}) <= batch_size ({batch_size}) must hold: every rank gets a rollout")
    if max_skips is not None and max_skips < 0:
        raise ValueError(f"max_skips ({max_skips}) must be >= 0, or None for no bound")
    check_ranks(dp_size, counts)
    size = tokens.size
    passed = np.zeros(size, dtype=np.int64) if skips is None else _whole_numbers("skips", skips, size)
    if passed.min() < 0:
        raise ValueError("skips must be whole numbers >= 0: how often each was passed over")
    must = np.zeros(size, dtype=np.bool_) if due is None else np.asarray(due)
    if must.shape != (size,) or must.dtype != np.bool_:
        raise ValueError(f"due must be [{size}] booleans, as lengths, not {must.shape} of {must.dtype}")
    labels, complete, largest = _groups(groups, group_size, size, batch_size)
    waiting = Waiting(work, tokens, passed, must, labels, complete)
    knobs = PlanKnobs(
        dp_size, batch_size, max_skips, counts=counts, whole_groups=groups is not None, group_size=largest
    )
    # the layout on ranks is thrown away: swaps with the pool depend on it, so it is made all the same
    plan = plan_batch(waiting, knobs, num_rollouts=min(batch_size, size), step=step)
    return np.sort(positions_in(plan.ranks))


def _groups(groups: ArrayLike | None, group_size: int | None, size: int, batch_size: int) -> tuple[Ints, Bools, int]:
    """-> ([n] labels, -1 for none; [n] its group is whole; rollouts of the largest group)."""
    whole = np.ones(size, dtype=np.bool_)
    if groups is None:
        if group_size is not None:
            raise ValueError("group_size is given without groups: nobody has siblings. Pass groups=")
        return np.full(size, -1), whole, 1
    labels = _whole_numbers("groups", groups, size)
    labels = np.where(labels < 0, -1, labels)
    if group_size is not None and not 1 <= group_size <= batch_size:
        raise ValueError(
            f"group_size ({group_size}) must be >= 1 and <= batch_size ({batch_size}): a group leaves in one step"
        )
    # the planner would cut a larger group in pieces, and siblings that were to go together would not
    most, named = (batch_size, "batch_size") if group_size is None else (group_size, "group_size")
    there, of, members = np.unique(labels, return_inverse=True, return_counts=True)
    too_many = np.flatnonzero((members > most) & (there >= 0))
    if too_many.size:
        label, number = there[too_many[0]], members[too_many[0]]
        raise ValueError(
            f"group {label} has {number} rollouts, more than {named} ({most}): no step could take it whole"
        )
    if group_size is not None:
        whole = (labels < 0) | (members[of] == group_size)
    return labels, whole, int(members[there >= 0].max(initial=1)) if group_size is None else group_size


def _whole_numbers(name: str, given: ArrayLike, size: int | None = None) -> Ints:
    column = np.asarray(given)
    if size is None and column.ndim != 1:
        raise ValueError(f"{name} must be [n], one number for each rollout, not of shape {column.shape}")
    if size is not None and column.shape != (size,):
        raise ValueError(f"{name} must be [{size}], as lengths, not of shape {column.shape}")
    if column.size and column.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, not {column.dtype}")
    return column.astype(np.int64)
