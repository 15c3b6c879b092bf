"""In which mini-batch: a step in pieces, each followed by an optimizer step of its own (PPO). Pure and deterministic.

Ranks meet at the end of every piece, so a piece takes as long as its heaviest rollout at least: outliers spread over
the pieces would make ranks wait in each of them. So they are gathered, but only as many as fill a piece; all others are
spread evenly, since an optimizer step on long rollouts alone is not what a user asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from .arrays import Ints
from .plan import Plan, PlanKnobs, Waiting
from .planner import earliest_finish
from .selection import Units

_EVEN = 0.01
"""A piece that idles no more than this needs no more outliers."""

_TRIED = 16
"""Numbers of outliers that are tried for a piece."""


class Planner(Protocol):
    """Chooses among the waiting rollouts, ``num_rollouts`` of which could go, and lays those chosen out on ranks and
    micro-batches."""

    def __call__(self, waiting: Waiting, knobs: PlanKnobs, *, num_rollouts: int, step: int) -> Plan: ...


def in_mini_batches(
    planner: Planner, step_of: Waiting, knobs: PlanKnobs, plan: Plan, *, step: int, in_order: bool
) -> Plan:
    """The plan of a step in ``knobs.mini_batches`` pieces, of as many rollouts each, to within one.

    What has one label in ``step_of.groups`` stays together; then it is groups that are counted. There are fewer pieces
    where one would have fewer rollouts than there are ranks.

    Args:
        planner: lays each of them out.
        step_of: the rollouts of the step, oldest first; all of them go.
        knobs: of the step.
        plan: of the step in one piece.
        step: its number; rotates ranks, and which piece comes first.
        in_order: the oldest are in the first piece, whatever they cost.

    Complexity: O(n log n) and that of the planner, for each piece.
    """
    # everybody here goes: what decides who goes must not decide anything again
    own = replace(
        knobs,
        batch_size=step_of.costs.size,
        max_skips=None,
        mini_batches=1,
        whole_groups=True,
        group_size=None,
    )
    units = Units.of(step_of, own)
    num_units = units.sizes.size
    # a rank without a rollout of the piece would run padding for a whole optimizer step
    number = max(min(knobs.mini_batches, step_of.costs.size // knobs.dp_size, num_units), 1)
    pieces = np.array_split(np.arange(num_units), number) if in_order else _gathered(step_of, units, own, number)
    plans = []
    for place, piece in enumerate(pieces):
        rows = _rows_of(units, piece)
        among = np.isin(np.arange(step_of.costs.size), rows)
        one = planner(
            step_of.among(among),
            replace(own, batch_size=rows.size),
            num_rollouts=rows.size,
            step=step + place,
        )
        plans.append(replace(one, ranks=[[rows[positions] for positions in of_rank] for of_rank in one.ranks]))
    first = 0 if in_order else step % number  # the outliers are not to come first in every step
    return joined(plan, plans[first:] + plans[:first])


def _gathered(step_of: Waiting, units: Units, knobs: PlanKnobs, number: int) -> list[Ints]:
    """[mini_batch] -> units of each. The heaviest go together, as few as make a piece in which no rank waits."""
    # what a micro-batch costs is alike for all pieces, and would hide which of them waits
    rough = replace(knobs, overhead_cost=0.0)
    rest = np.argsort(-units.peaks, kind="stable")  # heaviest first
    pieces = []
    # the last piece is what is left
    for left in range(number, 1, -1):
        size = -(-rest.size // left)
        least, best = np.inf, rest[:size]
        for heaviest in np.unique(np.linspace(1, size, min(size, _TRIED)).astype(np.int64)).tolist():
            others = rest[heaviest:]
            spread = (np.arange(size - heaviest) + 0.5) * others.size / max(size - heaviest, 1)
            piece = np.concatenate([rest[:heaviest], others[spread.astype(np.int64)]])
            rows = _rows_of(units, piece)
            mean = float(units.costs[piece].sum()) / knobs.dp_size
            waits = earliest_finish(step_of, rough, rows) - mean
            if waits < least:
                least, best = waits, piece
            # the fewest outliers that fill a piece: more would take them from the pieces to come
            if least <= _EVEN * mean:
                break
        pieces.append(best)
        rest = rest[~np.isin(rest, best)]
    return [*pieces, rest]


def _rows_of(units: Units, some: Ints) -> Ints:
    """Rows of the rollouts of these units, oldest first."""
    chosen = np.zeros(units.sizes.size, dtype=np.bool_)
    chosen[some] = True
    return np.flatnonzero(units.of_rollouts(chosen))


def joined(plan: Plan, pieces: list[Plan]) -> Plan:
    """The plan in these pieces: it is done when the last rank is, in every one of them."""
    return replace(
        plan,
        ranks=[[one for piece in pieces for one in piece.ranks[rank]] for rank in range(len(plan.ranks))],
        loads=np.sum([piece.loads for piece in pieces], axis=0),
        finish=sum(one.finish for one in pieces),
        mini_batches=tuple(pieces),
    )
