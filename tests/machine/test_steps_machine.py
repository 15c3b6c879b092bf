"""Random schedules of all features and faults at once. `steps_run.py` runs one seed, or many."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps_config import Config, random_config
from steps_world import World

configs = st.builds(
    Config,
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 4),
    seats=st.integers(1, 2),
    steps=st.integers(1, 3),
    depth=st.integers(1, 2),
    moves=st.booleans(),
    is_open=st.booleans(),
    roles=st.sampled_from([(), ("ref",), ("ref", "value")]),
    role_ranks=st.integers(1, 2),
    role_seats=st.integers(1, 2),
    remote=st.booleans(),
    shared=st.booleans(),
    auto_ack=st.booleans(),
    commits=st.booleans(),
    faults=st.lists(
        st.sampled_from(["flap", "kill", "give_up", "lose", "resize", "restart", "user_ack"]), unique=True
    ).map(tuple),
    num_faults=st.integers(0, 5),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs)
def test_every_invariant_holds_and_what_breaks_one_is_made_small(config: Config) -> None:
    World(config).run()


@pytest.mark.parametrize("first", range(0, 1500, 150))
def test_every_invariant_holds(first: int) -> None:
    for seed in range(first, first + 150):
        World(random_config(seed)).run()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 110_000, 10_000))
def test_every_invariant_holds_in_100_000_schedules(first: int) -> None:
    for seed in range(first, first + 10_000):
        World(random_config(seed)).run()
