"""What fixed costs do to ranks of unlike speed.

A step costs something whatever is in it: launching, gradients, one pass over the weights per micro-batch. On ranks of
one speed that is the same for all and changes nothing. A slow rank is slow at that too, so it must get less than its
speed's share of the work: done at ``(work + overhead) / speed``, all ranks are done together at T if ``work`` is
``speed * T - overhead``. Those works are the rates to plan with. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .partition import Floats

__all__ = ["NO_OVERHEAD", "Overhead", "work_rates"]

_LEAST_RATE = 0.05  # of the mean; a rank gets some work, however slow it is


class Overhead(NamedTuple):
    """Fixed costs of a rank, in the unit of the rollouts' costs."""

    step: float = 0.0
    micro_batch: float = 0.0


NO_OVERHEAD = Overhead()


def work_rates(speeds: Floats, overhead: Overhead, work: float, num_micro_batches: int) -> Floats:
    """[num_ranks] how ``work`` should be split, in all as much as ``speeds``. O(num_ranks)."""
    fixed = overhead.step + overhead.micro_batch * num_micro_batches
    if fixed == 0.0 or work <= 0.0:
        return speeds
    finish = (work + speeds.size * fixed) / float(speeds.sum())
    rates: Floats = np.maximum(speeds * finish - fixed, _LEAST_RATE * work / speeds.size)
    return rates * (float(speeds.sum()) / float(rates.sum()))
