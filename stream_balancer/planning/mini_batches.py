"""A step in several mini-batches, each followed by an optimizer step (PPO).

Ranks meet at the end of every mini-batch. Outliers that spread over the mini-batches make ranks wait in every one.
Therefore the heaviest rollouts go together, as few as fill a mini-batch, and lighter rollouts are spread evenly: a user
did not ask for an optimizer step on long rollouts alone.

Example: costs 9 9 3 3 3 3 2 2 on two ranks in two mini-batches. Spread, 9 3 3 2 twice takes 9 + 9 = 18. Together,
9 9 3 3 and 3 3 2 2 take 12 + 5 = 17.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from .arrays import Ints, Layout, order_of, positions_in
from .bounds import earliest, planned
from .choice import Units
from .micro_batches import laid_out
from .plan import Plan, PlanKnobs, Together, Waiting

LayOut: TypeAlias = Callable[[Waiting, PlanKnobs, Ints, int], Layout]
"""Lays rows out on ranks and micro-batches; the last argument rotates the ranks."""

# A mini-batch that idles no more than this needs no more outliers.
_EVEN = 0.01
# Numbers of outliers that are tried for a mini-batch.
_TRIED = 16


def in_mini_batches(
    waiting: Waiting,
    knobs: PlanKnobs,
    plan: Plan,
    step: int,
    together: Together | None = None,
    *,
    lay_out: LayOut = laid_out,
    in_order: bool = False,
) -> Plan:
    """The plan in ``knobs.mini_batches`` pieces with the same number of rollouts, within one unit.

    A piece has at least one rollout per rank, so a small step has fewer pieces. ``together`` labels the rollouts that
    stay in one piece (samples of an execution). ``lay_out`` lays out the rows of a piece. With ``in_order`` the oldest
    rollouts are in the first piece (baselines); otherwise ``step`` rotates the place of the outliers' piece.
    """
    rows = np.sort(positions_in(plan.ranks))
    if knobs.mini_batches == 1 or not rows.size:
        return plan
    own = replace(knobs, batch_size=rows.size, max_skips=None, mini_batches=1, whole_groups=True, group_size=None)
    labels = np.full(rows.size, -1) if together is None else together(rows)
    step_of = replace(waiting.among(rows), groups=labels)
    units = Units.of(step_of, own)
    number = max(min(knobs.mini_batches, rows.size // knobs.dp_size, units.sizes.size), 1)
    parts = np.array_split(np.arange(units.sizes.size), number)
    if not in_order:
        parts = _gathered(step_of, units, own, number)
    pieces = []
    for place, part in enumerate(parts):
        layout = lay_out(step_of, own, units.rows(part), step + place)
        pieces.append(planned(waiting, own, [[rows[one] for one in share] for share in layout]))
    first = 0 if in_order else step % number  # the outliers do not come first in every step
    return joined(plan, pieces[first:] + pieces[:first])


def joined(plan: Plan, pieces: Sequence[Plan]) -> Plan:
    """The plan with these mini-batches, one after another."""
    ranks = [[one for piece in pieces for one in piece.ranks[rank]] for rank in range(len(plan.ranks))]
    loads, finish = np.sum([piece.loads for piece in pieces], axis=0), sum(piece.finish for piece in pieces)
    return replace(plan, ranks=ranks, loads=loads, finish=finish, mini_batches=tuple(pieces))


def _gathered(step_of: Waiting, units: Units, knobs: PlanKnobs, number: int) -> list[Ints]:
    """[mini_batch] -> its units. The heaviest units go together, as few as make a piece in which no rank waits."""
    knobs = replace(knobs, overhead_cost=0.0)  # the overhead of all pieces is alike, and hides which piece waits
    rest, pieces = order_of(-units.peaks), []
    for left in range(number, 1, -1):
        # Pieces count rollouts, so a piece of large units has fewer units.
        goal, least, best = units.sizes[rest].sum() / left, np.inf, rest[:1]
        size = max(int(np.searchsorted(np.cumsum(units.sizes[rest]), goal - 0.5)) + 1, 1)
        for heaviest in np.unique(np.linspace(1, size, min(size, _TRIED)).astype(np.int64)).tolist():
            piece = _piece(units, rest, heaviest, goal, left)
            mean = units.costs[piece].sum() / knobs.dp_size
            waits = earliest(step_of, knobs, units.rows(piece)) - mean
            if waits < least:
                least, best = waits, piece
            if least <= _EVEN * mean:
                break
        pieces.append(best)
        rest = rest[~np.isin(rest, best)]
    return [*pieces, rest]


def _piece(units: Units, rest: Ints, heaviest: int, goal: float, left: int) -> Ints:
    """The heaviest units and evenly spread lighter units, up to the goal. One unit stays for each later piece."""
    others = rest[heaviest:]
    missing = goal - units.sizes[rest[:heaviest]].sum()
    count = min(max(round(missing / units.sizes[others].mean()), 0), others.size) if others.size else 0
    spread = ((np.arange(count) + 0.5) * others.size / max(count, 1)).astype(np.int64)
    return np.concatenate((rest[:heaviest], others[spread]))[: max(rest.size - left + 1, 1)]
