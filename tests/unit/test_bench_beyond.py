"""The benchmark beyond the window: its proof against every choice there is, and its own arithmetic."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stream_balancer.planning.arrays import Floats

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from any_choice import least_waste

BATCH, WINDOW = 2, 4


def best_of_all_choices(costs: Floats, max_skips: int, ranks: int, steps: range) -> float:
    """Least time that a rank loses in these steps, found by trying everything; ranks may share a step in any way."""
    best = np.inf

    def go(step: int, waiting: dict[int, int], waste: float) -> None:
        nonlocal best
        if step == steps.stop or waste >= best:
            best = min(best, waste)
            return
        waiting = {
            i: waiting.get(i, 0)
            for i in range(WINDOW + BATCH * step)
            if i in waiting or i >= WINDOW + BATCH * (step - 1)
        }
        for some in combinations(waiting, BATCH):
            stays = {i: skips + 1 for i, skips in waiting.items() if i not in some}
            if all(skips <= max_skips for skips in stays.values()):
                held = costs[list(some)]
                lost = max(float(held.max() - held.sum() / ranks), 0.0) if step >= steps.start else 0.0
                go(step + 1, stays, waste + lost)

    go(0, dict.fromkeys(range(WINDOW), 0), 0.0)
    return best


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 9.0, 20.0]), min_size=10, max_size=12),
    st.integers(1, 2),
    st.sampled_from([2, 4]),
    st.integers(0, 1),
)
def test_no_choice_at_all_wastes_less_than_the_proof_says(
    costs: list[float], max_skips: int, ranks: int, start: int
) -> None:
    work = np.array(costs)
    steps = range(start, (work.size - WINDOW) // BATCH + 1)
    least = least_waste(work, BATCH, WINDOW, max_skips, ranks, steps)
    assert least <= best_of_all_choices(work, max_skips, ranks, steps) + 1e-9
