"""Strata of rollouts (environments, data sets): which there are, who of them waits, and who goes. Pure; who must go is
decided in ``planning.selection``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from stream_balancer.planning.arrays import Floats, Ints
from stream_balancer.statistics import StratumStatistics

MEMORY = 50
"""Dispatches after which one counts a third in the shares."""
MOST_STRATA = 1_000
"""Strata of a balancer. More are no environments but prompts, and would be figures and metrics without end."""


class Strata:
    """The strata that have come, by number, and their shares of the last steps."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # [1 + strata] rollouts dispatched, the older the less; first those without a stratum
        self._went = np.zeros(1)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, stratum: str) -> bool:
        return stratum in self._numbers

    def number_of(self, stratum: str) -> int:
        """Number of the stratum; a new one for a stratum that has not come before. O(1)."""
        return self._numbers.setdefault(stratum, len(self._numbers))

    def least_shares(self, shares: Mapping[str, float]) -> tuple[float, ...]:
        """[strata] these shares by number; 0.0 for those without. O(strata)."""
        return tuple(shares.get(stratum, 0.0) for stratum in self._numbers)

    def dispatched(self, numbers: Ints) -> None:
        """Rollouts of these strata ([n], -1 for none) have left in one batch. O(n)."""
        if not self._numbers:
            return
        went = np.bincount(numbers + 1, minlength=1 + len(self)).astype(np.float64)
        went[: self._went.size] += (1.0 - 1.0 / MEMORY) * self._went
        self._went = went

    def figures(self, numbers: Ints, arrived_at: Floats, now: float) -> dict[str, StratumStatistics]:
        """Figures of each stratum, given those that wait ([n]). O(n), and O(1) where there are none."""
        if not self._numbers:
            return {}
        count = partial(np.bincount, numbers + 1, minlength=1 + len(self))
        waiting, waited_s, went = count(), count(weights=now - arrived_at), np.zeros(1 + len(self))
        went[: self._went.size] = self._went
        return {
            stratum: StratumStatistics(
                waiting=int(waiting[place]),
                mean_wait_s=float(waited_s[place] / max(waiting[place], 1)),
                share=float(went[place] / went.sum()) if went.any() else None,
            )
            for place, stratum in enumerate(self._numbers, 1)
        }
