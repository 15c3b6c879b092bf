"""Fixed costs on ranks of unlike speed.

A step costs something whatever is in it: launching, gradients, one pass over the weights per micro-batch. On ranks of
one speed that is the same for all and changes nothing. A slow rank is slow at that too, so it must get less than its
speed's share of the work: done at ``(work + fixed) / speed``, all ranks are done together at T if ``work`` is
``speed * T - fixed``. Those works are the rates to plan with. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import Floats

_LEAST_RATE = 0.05  # of the mean; a rank gets some work, however slow it is

_MOST_FIXED = 1e6
"""As many times the work as fixed costs count: from there on more of them split it the same way, and rates so unlike
that some would be rounded to 0 cannot be planned with."""


class FixedCosts(NamedTuple):
    """Fixed costs of a rank, whatever its rollouts are, in the unit of their costs."""

    step: float = 0.0
    """Per step."""
    micro_batch: float = 0.0
    """Per micro-batch."""


NO_FIXED_COSTS = FixedCosts()


def work_rates(speeds: Floats, fixed_costs: FixedCosts, work: float, num_micro_batches: int) -> Floats:
    """[dp_size] how ``work`` should be split, in all as much as ``speeds``. O(dp_size).

    Examples:
        >>> speeds = np.array([1.0, 0.5])
        >>> work_rates(speeds, NO_FIXED_COSTS, work=3000.0, num_micro_batches=1)  # 2000 and 1000
        array([1. , 0.5])
        >>> work_rates(speeds, FixedCosts(step=300.0), work=3000.0, num_micro_batches=1)  # both done after 2400
        array([1.05, 0.45])
    """
    fixed = fixed_costs.step + fixed_costs.micro_batch * num_micro_batches
    # nothing to correct, and nothing to divide by
    if fixed == 0.0 or work <= 0.0:
        return speeds
    fixed = min(fixed / work, _MOST_FIXED)  # in units of the work from here on: neither overflows beside the other
    finish = (1.0 + speeds.size * fixed) / float(speeds.sum())
    # scaled back to the sum of the speeds: only the ratios may change, or finishes would be in another unit
    rates: Floats = np.maximum(speeds * finish - fixed, _LEAST_RATE / speeds.size)
    return rates * (float(speeds.sum()) / float(rates.sum()))
