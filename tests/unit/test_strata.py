"""Strata (environments, data sets): who waits, who goes, and what each is promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cores import saved
from helpers import polled

import stream_balancer as sb
from stream_balancer.core.machine import BalancerCore
from stream_balancer.metrics import figures


def rollout(num_tokens: int, stratum: Any = None, **more: Any) -> sb.Rollout:
    metadata = {} if stratum is None else {"stratum": stratum}
    return sb.Rollout(tokens={"input_ids": torch.arange(num_tokens)}, metadata=metadata, **more)


def core_of(**knobs: Any) -> BalancerCore:
    return BalancerCore(sb.BalancerConfig(**{"dp_size": 2, "batch_size": 4, "cost": sb.cost.QuadraticCost(), **knobs}))


def strata_of_steps(core: BalancerCore, steps: int) -> list[int]:
    """Long rollouts of "agent" in each step; they are an eighth of what comes."""
    found, now = [], 0.0
    for _ in range(steps):
        while (batch := core.poll(now)) is None:
            now += 1.0
            number = core.state.counts.accepted
            core.add(rollout(900 if number % 8 == 0 else 50, "agent" if number % 8 == 0 else "math"), now)
        found.append(sum(one.stratum == "agent" for one in batch.rollouts))
    return found


def test_a_stratum_of_long_rollouts_is_in_every_step_while_it_waits() -> None:
    assert 0 in strata_of_steps(core_of(max_skips=None), 20), "outliers wait for each other"
    core = core_of(max_skips=None, stratum_shares={"agent": 0.1})
    found = strata_of_steps(core, 40)
    waits = core.statistics(0.0).strata["agent"].waiting
    assert waits <= 1, "one goes with every step in which one waits"
    assert sum(found) >= 20, "an eighth of 160"


def test_statistics_say_who_waits_and_who_went() -> None:
    core = core_of()
    assert core.statistics(0.0).strata == {}
    core.add(rollout(5), 0.0)
    assert core.statistics(0.0).strata == {}
    for number, stratum in enumerate(["math", "code", "math", "math", None, "code"]):
        core.add(rollout(5, stratum), float(number))
    told = core.statistics(10.0).strata
    assert (told["math"].waiting, told["math"].mean_wait_s, told["math"].share) == (3, (10 + 8 + 7) / 3, None)
    assert (told["code"].waiting, told["code"].mean_wait_s) == (2, (9 + 5) / 2)
    core.add(rollout(5), 10.0)
    batch = polled(core, 10.0)
    went = [one.stratum for one in batch.rollouts]
    told = core.statistics(10.0).strata
    assert {name: one.share for name, one in told.items()} == {name: went.count(name) / 4 for name in told}
    said = figures(core.statistics(10.0), prefix="")
    assert said["stratum_waiting_rollouts/math"] == told["math"].waiting
    assert said["stratum_share/code"] == told["code"].share
    assert "stratum_mean_wait_seconds/code" in said


def test_a_checkpoint_and_a_redelivery_know_the_stratum() -> None:
    core = core_of(stratum_shares={"agent": 0.25})
    for number in range(8):
        core.add(rollout(900 if number == 7 else 50, "agent" if number > 5 else "math"), 0.0)
    assert core.poll(0.0) is not None
    again = core_of(stratum_shares={"agent": 0.25})
    again.restore(saved(core, 1.0), 5.0)
    before, after = (one.statistics(5.0).strata for one in (core, again))
    assert {name: one.waiting for name, one in after.items()} == {name: one.waiting for name, one in before.items()}
    batch = polled(again, 5.0)
    assert "agent" in {one.stratum for one in batch.rollouts}


def test_what_is_held_back_for_its_age_lacks_in_no_share() -> None:
    core = core_of(staleness=sb.Staleness(max_versions=0), stratum_shares={"agent": 0.25})
    core.set_version(0)
    for _ in range(8):
        core.add(rollout(50, "math", version=0), 0.0)
    assert core.poll(0.0) is not None
    for number in range(8):
        core.add(rollout(900 if number == 6 else 50, "agent" if number == 6 else "math", version=2), 0.0)
    batch = polled(core)
    assert {one.version for one in batch.rollouts} == {2}
    assert "agent" in {one.stratum for one in batch.rollouts}


@pytest.mark.parametrize("stratum", [7, ["math"], {"name": "math"}])
def test_a_stratum_that_is_no_str_is_refused(stratum: Any) -> None:
    with pytest.raises(sb.errors.RolloutError, match="that must be a str"):
        core_of().add(rollout(5, stratum), 0.0)


def test_prompts_are_no_strata() -> None:
    core = core_of(window=4)
    for number in range(1_000):
        core.add(rollout(1, f"{number}"), 0.0)
        core.poll(0.0)
    with pytest.raises(sb.errors.RolloutError, match="at most 1000 environments"):
        core.add(rollout(1, "one more"), 0.0)
    core.add(rollout(1, "7"), 0.0)
