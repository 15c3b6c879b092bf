"""The plan of a step: which rollouts go, on which rank, in which micro-batch.

    Waiting, PlanKnobs --> choice.py         which rollouts or groups go, or
                           lockstep.py       the same where ranks meet at every micro-batch, or
                           padded.py         the same for padded micro-batches
                       --> partition.py      on which rank, or
                           micro_batches.py  on which rank and in which micro-batch
                       --> swaps.py          the last percent, with the rollouts that wait
                       --> mini_batches.py   the same step in several optimizer steps
                       --> Plan

The planner is pure and deterministic: numpy in, positions out, fixed work budgets instead of clocks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Bools, Ints, Layout, checked_costs, kept, positions_in, rounded_up
from .bounds import planned, times
from .choice import Candidates, Units, choose_units, in_pieces, must_go
from .lockstep import choose_lockstep
from .micro_batches import laid_out
from .mini_batches import in_mini_batches
from .padded import choose_neighbours
from .plan import Plan, PlanKnobs, Together, Waiting
from .swaps import EVEN, swap_groups, swap_rollouts

# Tokens of a micro-batch without ``max_tokens``.
_NO_CAP = 2**62


def plan_batch(
    waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int = 0, together: Together | None = None
) -> Plan:
    """Choose ``num_rollouts`` of the waiting rollouts, at most a step, and lay them out on ranks and micro-batches.

    Fewer rollouts go where whole groups do not add up to that number, or the rest waits for siblings. Some ranks stay
    empty if there are fewer rollouts than ranks. ``step`` rotates the rank of the heaviest share; ``together`` labels
    the chosen rollouts that stay in one mini-batch. O(W log W), plus searches within a fixed work budget.

    Raises:
        ValueError: a whole group is larger than a step.

    Examples:
        >>> costs = np.array([500.0, 400.0, 2400.0, 300.0, 450.0, 350.0, 420.0, 380.0])  # oldest first
        >>> waiting, knobs = Waiting.of(costs), PlanKnobs(dp_size=2, batch_size=4, max_skips=8)
        >>> plan_batch(waiting, knobs, num_rollouts=4).finish < 900  # the 2400 waits
        True
        >>> waiting.skips[2] = 8  # now the 2400 must go, and others fill the second rank
        >>> plan_batch(waiting, knobs, num_rollouts=4).ranks[0]
        [array([2])]
    """
    units, num_rollouts = Units.of(waiting, knobs), min(num_rollouts, knobs.batch_size)
    must = must_go(units, knobs, num_rollouts)
    go = _with_others(waiting, units, knobs, num_rollouts, must)
    plan = planned(waiting, knobs, _swapped(waiting, knobs, units, must, go, step))
    return in_mini_batches(waiting, knobs, plan, step, together)


def _with_others(waiting: Waiting, units: Units, knobs: PlanKnobs, num_rollouts: int, must: Bools) -> Bools:
    """[U] ``must``, and the units that make the best step with it."""
    room = num_rollouts - units.sizes[must].sum()
    others = units.ready & ~must
    if room <= 0 or not others.any():
        return must
    # The choice counts units of one size: the size that most rollouts belong to. Units of other sizes fill up.
    size = int(np.bincount(units.sizes[others], weights=units.sizes[others]).argmax())
    shown = must | (others & (units.sizes == size))
    among = np.flatnonzero(shown)
    number = min(must.sum() + room // size, among.size)
    pieces = max(min(knobs.mini_batches, num_rollouts // knobs.dp_size, number), 1)
    cap, ranks, tokens, rows = knobs.max_tokens, knobs.dp_size, None, 1.0
    single = units.sizes.size == waiting.costs.size and among.size > number
    if single and cap is not None:
        tokens = np.minimum(waiting.lengths[among], cap)
        rows = tokens.mean() * number / (pieces * ranks * cap)  # micro-batches per rank, roughly
    if knobs.sync == "step" or knobs.padded:
        tokens = None
    beside = max(num_rollouts // (pieces * ranks) - 1, 0) / size if knobs.equal_rollouts else 0.0
    columns = units.costs[among], units.peaks[among], must[among], units.remaining[among]
    by_peak = None
    if waiting.by_cost is not None and single:
        by_peak = kept(waiting.by_cost, shown)  # the peak of a single rollout is its cost
    candidates = Candidates(*columns, number, ranks, beside, tokens, cap or 0, by_peak)
    row_number = rounded_up(math.ceil(rows), knobs.multiple_of)
    go = np.zeros_like(must)
    if single and knobs.padded and number > row_number > 1:
        go[among] = choose_neighbours(candidates, row_number)
    else:
        choose_from = choose_lockstep if tokens is not None and rows > 1.0 else choose_units
        go[among] = in_pieces(candidates, pieces, choose_from)
    units.take(go, np.flatnonzero(others & ~go), num_rollouts - units.sizes[go].sum())
    return go


def _swapped(waiting: Waiting, knobs: PlanKnobs, units: Units, must: Bools, go: Bools, step: int) -> Layout:
    """The layout of the units that go, after swaps with waiting units."""
    rows = units.rows(go)
    ranks = laid_out(waiting, knobs, rows, step)
    numbers = [len(share) for share in ranks]
    if knobs.padded or not all(numbers) or rows.size == waiting.costs.size:
        return ranks
    in_rows = knobs.sync == "micro_batch" and max(numbers) > 1
    if units.sizes.size < waiting.costs.size:
        return ranks if in_rows else _groups_swapped(waiting, knobs, units, must, go, step, ranks)
    cap = waiting.lengths, knobs.max_tokens or _NO_CAP
    if not in_rows:
        return swap_rollouts(waiting.costs, ranks, must, units.ready & ~go, cap)
    # Lockstep by lockstep, where every rank has a micro-batch in it: no lockstep takes longer than before.
    for index in range(min(numbers)):
        may_come = units.ready.copy()
        may_come[positions_in(ranks)] = False
        row = swap_rollouts(waiting.costs, [[share[index]] for share in ranks], must, may_come, cap)
        for share, (one,) in zip(ranks, row, strict=True):
            share[index] = one
    return ranks


def _groups_swapped(
    waiting: Waiting, knobs: PlanKnobs, units: Units, must: Bools, go: Bools, step: int, ranks: Layout
) -> Layout:
    """The layout, or the layout of another choice of groups that wastes less time, now and in the next step."""

    def waste(layout: Layout) -> float:
        loads, finish = times(waiting, knobs, layout)
        return finish - float(loads.mean())

    best, least, number = ranks, waste(ranks), units.rows(go).size
    most = -(-number // knobs.dp_size) if knobs.equal_rollouts else number
    if least > (EVEN - 1.0) * units.costs[go].sum() / knobs.dp_size:
        for choice, later in swap_groups(units, waiting.costs, must, go, knobs.dp_size, most):
            other = laid_out(waiting, knobs, units.rows(choice), step)
            if (now := waste(other) + later) < least:
                best, least = other, now
    return best


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
    not add up to that number. `split` and `form_micro_batches` lay the rollouts out. O(n log n), plus a bounded search.

    Args:
        lengths: [n] tokens of each rollout, oldest first.
        costs: [n] work of each rollout; None = its tokens.
        max_skips: most steps that leave a rollout behind, as far as the step has room; None = no limit.
        skips: [n] steps that left each rollout behind so far. Your pool counts them.
        due: [n] bool, the rollout must go now as far as the step has room.
        groups: [n] group label of each rollout, negative = no group. A group leaves in one step.
        group_size: rollouts of a whole group. A smaller group waits unless it is due; None = all groups are whole.
        equal_rollouts: the rollout counts of two ranks will differ by at most 1.

    Raises:
        ValueError: columns that do not fit together, or a group that is larger than a step.

    Examples:
        >>> pool = [900, 100, 120, 80, 4000, 110, 950, 90]
        >>> [pool[position] for position in choose(pool, dp_size=2, batch_size=4)]
        [120, 80, 110, 90]
    """
    tokens = _whole_numbers("lengths", lengths)
    n, work = tokens.size, checked_costs(tokens if costs is None else costs, dp_size)
    passed = np.zeros(n, np.int64) if skips is None else _whole_numbers("skips", skips)
    must = np.zeros(n, bool) if due is None else np.asarray(due)
    labels = np.full(n, -1) if groups is None else np.maximum(_whole_numbers("groups", groups), -1)
    complete = np.ones(n, bool)
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
    knobs = PlanKnobs(dp_size, batch_size, max_skips, "step", equal_rollouts, groups is not None, group_size)
    # The layout is thrown away, but the swaps with the pool depend on it.
    plan = plan_batch(Waiting(*columns), knobs, num_rollouts=min(batch_size, n), step=step)
    return np.sort(positions_in(plan.ranks))


def _whole_numbers(name: str, given: ArrayLike) -> Ints:
    column = np.asarray(given)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be [n] whole numbers, one per rollout, not {column.shape} of {column.dtype}.")
    return column.astype(np.int64)
