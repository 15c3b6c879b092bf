"""Baselines: the oldest rollouts, partitioned as well as possible (fifo), or dealt to the ranks in turn (round-robin).

Users measure the gain of the window with them, in the same loop and with the same figures.
Example: 9, 1, 8 and 2 wait, two ranks. Round-robin gives 9 + 8 = 17 and 1 + 2 = 3; fifo gives 9 + 1 and 8 + 2.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .arrays import Ints, Layout
from .bounds import planned
from .choice import Units
from .micro_batches import Packer, laid_out
from .mini_batches import LayOut, in_mini_batches
from .plan import Plan, PlanKnobs, Together, Waiting


def _oldest(
    waiting: Waiting,
    knobs: PlanKnobs,
    *,
    num_rollouts: int,
    step: int = 0,
    together: Together | None = None,
    lay_out: LayOut,
) -> Plan:
    """The oldest rollouts or groups; arguments as of `plan_batch`. O(n log n)."""
    units = Units.of(waiting, knobs)
    go = np.zeros_like(units.ready)
    units.take(go, np.flatnonzero(units.ready), min(num_rollouts, knobs.batch_size))
    plan = planned(waiting, knobs, lay_out(waiting, knobs, units.rows(go), step))
    return in_mini_batches(waiting, knobs, plan, step, together, lay_out=lay_out, in_order=True)


def _in_turn(waiting: Waiting, knobs: PlanKnobs, rows: Ints, rotation: int) -> Layout:
    shares = [np.arange(rank, rows.size, knobs.dp_size) for rank in range(knobs.dp_size)]
    layout = Packer(waiting.lengths[rows], waiting.costs[rows], knobs).packed(shares)
    return [[rows[np.sort(one)] for one in share] for share in layout]


plan_fifo = partial(_oldest, lay_out=laid_out)
"""Plan the oldest rollouts, laid out as `plan_batch` lays them out."""

plan_round_robin = partial(_oldest, lay_out=_in_turn)
"""Plan the oldest rollouts, to the ranks in turn; each rank packs its rollouts into micro-batches.

Every rank gets the number of micro-batches that the fullest rank needs, as trainers arrange with an all_reduce.
"""
