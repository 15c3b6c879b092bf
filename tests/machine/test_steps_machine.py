"""Random schedules of all features and faults at once. A seed replays one: ``World(random_config(seed)).run()``."""

from __future__ import annotations

import pytest
from steps_config import random_config
from steps_world import World

SOAK = [pytest.param(first, 10_000, marks=pytest.mark.soak) for first in range(10_000, 110_000, 10_000)]


@pytest.mark.parametrize(("first", "count"), [*((first, 150) for first in range(0, 1500, 150)), *SOAK])
def test_every_invariant_holds(first: int, count: int) -> None:
    for seed in range(first, first + count):
        World(random_config(seed)).run()
