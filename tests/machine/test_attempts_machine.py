"""Random schedules of all features and faults at once. A seed replays one schedule: ``World(seed).run()``."""

from __future__ import annotations

import pytest
from attempts_world import World

SOAK = [pytest.param(first, 5_000, marks=pytest.mark.soak) for first in range(0, 100_000, 5_000)]


@pytest.mark.parametrize(("first", "count"), [*((first, 200) for first in range(0, 2_000, 200)), *SOAK])
def test_every_promise_holds(first: int, count: int) -> None:
    for seed in range(first, first + count):
        World(seed).run()
