"""The plan of a step: which rollouts go, on which rank, in which micro-batch.

    Waiting, PlanKnobs --> units.py          single rollouts or whole groups
                       --> choice.py         which must go (skip bound, due), and which others: the least wasteful level
                           lockstep.py       the same where ranks meet at every micro-batch
                           padded.py         the same for padded micro-batches
                       --> partition.py      on which rank, or
                           micro_batches.py  on which rank and in which micro-batch
                       --> swaps.py          the last percent, with the rollouts that wait
                       --> mini_batches.py   the same step in several optimizer steps
                       --> Plan

The planner is pure and deterministic: numpy in, positions out, fixed work budgets instead of clocks.

Example: 500, 400, 2400, 300, 450, 350, 420 and 380 wait, and four go to two ranks. The 2400 waits for company; the
ranks finish below 900. Without skips left the 2400 runs alone on rank 0, and the best three run on rank 1.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from .arrays import Bools, Layout, positions_in, rounded_up
from .choice import Candidates, choose_units, must_go
from .figures import idle_part, planned, times
from .lockstep import choose_lockstep
from .micro_batches import laid_out
from .mini_batches import in_mini_batches
from .padded import choose_neighbours
from .plan import Plan, PlanKnobs, Together, Waiting
from .swaps import EVEN, swap_groups, swap_rollouts
from .units import Units

_TRIED = 2
"""Other choices of groups that are laid out on ranks."""


def plan_batch(
    waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int = 0, together: Together | None = None
) -> Plan:
    """Choose ``num_rollouts`` of the waiting rollouts, and lay them out on ranks and micro-batches.

    Fewer rollouts go where whole groups do not add up to that number, or the rest waits for siblings. Some ranks stay
    empty if there are fewer rollouts than ranks. O(W log W), plus searches within a fixed work budget.

    Args:
        waiting: rollouts to choose from.
        knobs: limits of the plan.
        num_rollouts: rollouts that go, at most the number that wait.
        step: rotates which rank gets the heaviest share.
        together: labels the chosen rollouts that stay in one mini-batch.

    Raises:
        ValueError: a whole group is larger than a step.

    Examples:
        >>> costs = np.array([500.0, 400.0, 2400.0, 300.0, 450.0, 350.0, 420.0, 380.0])  # oldest first
        >>> waiting, knobs = Waiting.of(costs), PlanKnobs(dp_size=2, batch_size=4, max_skips=8)
        >>> plan = plan_batch(waiting, knobs, num_rollouts=4)
        >>> bool((positions_in(plan.ranks) == 2).any()), plan.finish < 900  # the 2400 waits
        (False, True)
        >>> waiting.skips[2] = 8  # now the 2400 must go, and others fill the second rank
        >>> plan = plan_batch(waiting, knobs, num_rollouts=4)
        >>> plan.ranks[0], plan.finish
        ([array([2])], 2400.0)
    """
    units = Units.of(waiting, knobs)
    must = must_go(units, knobs, num_rollouts)
    go = _with_others(waiting, units, knobs, num_rollouts, must)
    plan = planned(waiting, knobs, _swapped(waiting, knobs, units, must, go, step))
    return in_mini_batches(waiting, knobs, plan, step, together)


def _with_others(waiting: Waiting, units: Units, knobs: PlanKnobs, num_rollouts: int, must: Bools) -> Bools:
    """[U] ``must``, and the units that make the best step with it."""
    room = num_rollouts - int(units.sizes[must].sum())
    others = units.ready & ~must
    if room <= 0 or not others.any():
        return must
    # The choice counts units of one size: the size that most rollouts belong to. Units of other sizes fill up.
    size = int(np.bincount(units.sizes[others], weights=units.sizes[others]).argmax())
    among = np.flatnonzero(must | (others & (units.sizes == size)))
    number = min(int(must.sum()) + room // size, among.size)
    cap, ranks, tokens, rows = knobs.max_tokens, knobs.dp_size, None, 1.0
    single = units.unit_of is None and among.size > number
    if single and cap is not None:
        tokens = np.minimum(waiting.lengths[among], cap)
        rows = float(tokens.mean()) * number / (ranks * cap)  # micro-batches per rank, roughly
    candidates = Candidates(
        units.costs[among],
        units.peaks[among],
        must[among],
        units.remaining[among],
        number,
        ranks,
        beside=max(num_rollouts // ranks - 1, 0) / size if knobs.equal_rollouts else 0.0,
        tokens=tokens if knobs.sync == "micro_batch" and not knobs.padded else None,
        max_tokens=cap or 0,
    )
    row_number = rounded_up(math.ceil(rows), knobs.multiple_of)
    go = np.zeros_like(must)
    if single and knobs.padded and number > row_number > 1:
        go[among] = choose_neighbours(candidates, row_number)
    else:
        go[among] = (choose_lockstep if candidates.tokens is not None and rows > 1.0 else choose_units)(candidates)
    units.take(go, np.flatnonzero(others & ~go), num_rollouts - int(units.sizes[go].sum()))
    return go


def _swapped(waiting: Waiting, knobs: PlanKnobs, units: Units, must: Bools, go: Bools, step: int) -> Layout:
    """The layout of the units that go, after swaps with waiting units."""
    rows = units.rows(go)
    ranks = laid_out(waiting, knobs, rows, step)
    numbers = [len(share) for share in ranks]
    if knobs.padded or not all(numbers) or rows.size == waiting.costs.size:
        return ranks
    in_rows = knobs.sync == "micro_batch" and max(numbers) > 1
    if units.unit_of is not None:
        return ranks if in_rows else _groups_swapped(waiting, knobs, units, must, go, step, ranks)
    cap = None if knobs.max_tokens is None else (waiting.lengths, knobs.max_tokens)
    if not in_rows:
        rank_of = np.repeat(np.arange(len(ranks)), numbers)
        bins = [one for share in ranks for one in share]
        found = iter(swap_rollouts(waiting.costs, bins, must, units.ready & ~go, cap, rank_of))
        return [[next(found) for _ in range(number)] for number in numbers]
    # Lockstep by lockstep, where every rank has a micro-batch in it: no lockstep takes longer than before.
    for index in range(min(numbers)):
        may_come = units.ready.copy()
        may_come[positions_in(ranks)] = False
        row = swap_rollouts(waiting.costs, [share[index] for share in ranks], must, may_come, cap)
        for share, one in zip(ranks, row, strict=True):
            share[index] = one
    return ranks


def _groups_swapped(
    waiting: Waiting, knobs: PlanKnobs, units: Units, must: Bools, go: Bools, step: int, ranks: Layout
) -> Layout:
    """The layout, or the layout of another choice of groups that idles less."""
    best, least = ranks, idle_part(waiting, knobs, ranks)
    number = int(units.sizes[go].sum())
    most = -(-number // knobs.dp_size) if knobs.equal_rollouts else number
    if least > EVEN - 1.0:
        for choice, later in islice(swap_groups(units, waiting.costs, must, go, knobs.dp_size, most), _TRIED):
            other = laid_out(waiting, knobs, units.rows(choice), step)
            finish = times(waiting, knobs, other)[1]
            waits = idle_part(waiting, knobs, other) + (later / finish if finish else 0.0)
            if waits < least:
                best, least = other, waits
            if least <= EVEN - 1.0:
                break
    return best
