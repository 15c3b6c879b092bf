"""Random constructions of the planner: 200 here, 20,000 under ``make soak``."""

from __future__ import annotations

import numpy as np
import pytest
from planning_cases import any_case, check_plan, check_skips, check_split, idle_beside_first_come, layout_of

SOAK = [pytest.param(first, 1000, marks=pytest.mark.soak) for first in range(1000, 21_000, 1000)]


@pytest.mark.parametrize(("first", "number"), [(0, 50), (50, 50), (100, 50), (150, 50), *SOAK])
def test_every_plan_keeps_its_promises(first: int, number: int) -> None:
    for seed in range(first, first + number):
        rng = np.random.default_rng(seed)
        case = any_case(rng)
        step = int(rng.integers(0, 9))
        plan = case.plan(step)
        assert layout_of(plan) == layout_of(case.plan(step)), seed
        check_plan(case, plan)
        check_split(rng)
        if seed % 20 == 0:
            check_skips(rng)
        if seed % 50 == 0:
            mine, first_come = idle_beside_first_come(rng)
            assert mine <= first_come + 1e-3, seed
