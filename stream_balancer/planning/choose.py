"""The choice of a step's rollouts from a pool of your own: only the planner, without a balancer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import checked_costs
from .plan import PlanKnobs, Waiting
from .planner import plan_batch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .arrays import Counts, Ints
    from .plan import Keep

__all__ = ["choose"]


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
    counts: Counts = "free",
    step: int = 0,
) -> Ints:
    """Positions of the ``batch_size`` rollouts that go now, ascending: those that ``dp_size`` ranks finish together.
    All of them if there are no more. The names are those of ``BalancerConfig``; :func:`partition` and
    :func:`form_micro_batches` give them to ranks.

    :param lengths: [n] tokens of each, oldest first.
    :param costs: [n] work of each; None = its tokens.
    :param max_skips: no rollout is passed over more often, as far as there is room; None = no bound.
    :param skips: [n] how often each was passed over so far; None = never. Count it in your pool.
    :param due: [n] bool: it must go now, as far as there is room.
    :param groups: [n] label of each one's siblings (integers): they go together; incomplete groups wait.
    :param step: number of the step, so that no rank is always the first.

    Raises ValueError for columns that do not fit together. O(n log n), and the search for a balanced choice.

    Examples:
        >>> pool = [900, 100, 120, 80, 4000, 110, 950, 90]
        >>> positions = choose(pool, dp_size=2, batch_size=4)
        >>> [pool[position] for position in positions]
        [100, 80, 110, 90]
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    work = checked_costs(tokens if costs is None else costs)
    if tokens.shape != work.shape or not tokens.size or tokens.min() < 1:
        raise ValueError(f"lengths must be [n] tokens >= 1, and costs as many, not {tokens.shape} and {work.shape}")
    if not 1 <= dp_size <= batch_size:
        raise ValueError(f"1 <= dp_size ({dp_size}) <= batch_size ({batch_size}) must hold: every rank gets a rollout")
    labels, size, complete = np.full(tokens.size, -1), 1, np.ones(tokens.size, dtype=np.bool_)
    if groups is not None:
        _, labels = np.unique(_column("groups", groups, tokens.size, np.int64), return_inverse=True)
        members = np.bincount(labels)
        size, complete = int(members.max()), members[labels] == members.max()
    waiting = Waiting(
        costs=work,
        lengths=tokens,
        skips=_column("skips", 0 if skips is None else skips, tokens.size, np.int64),
        due=_column("due", False if due is None else due, tokens.size, np.bool_),
        groups=labels,
        group_complete=complete,
    )
    together: Keep = "free" if groups is None else "same_batch"
    knobs = PlanKnobs(dp_size, batch_size, max_skips, counts=counts, groups=together, group_size=size)
    plan = plan_batch(waiting, knobs, num_rollouts=min(batch_size, tokens.size), step=step)
    return np.sort(np.concatenate([micro_batch for of_rank in plan.ranks for micro_batch in of_rank]))


def _column(name: str, given: ArrayLike, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    column = np.asarray(given, dtype=dtype)
    if column.ndim and column.shape != (size,):
        raise ValueError(f"{name} must be [{size}], as lengths, not {list(column.shape)}")
    return np.broadcast_to(column, size).copy()
