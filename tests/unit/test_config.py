"""Knobs: what is derived, and what is refused with what, why and what to do."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import yaml

import stream_balancer as sb


def config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": 4, "batch_size": 16, **knobs})


def test_knobs_left_out_are_derived() -> None:
    c = config()
    assert (c.window, c.capacity, c.min_batch_size, c.max_skips) == (32, 64, 4, 16)
    assert config(window=64).capacity == 128
    assert config(window=128).max_skips == 21  # 3 * (128 / 16 - 1)
    assert config(capacity=1600).max_skips == 99  # 1600 / 16 - 1: a full buffer must be able to leave in time
    assert config(policy="fifo").window == 16


def test_a_budget_in_tokens_derives_the_rest() -> None:
    c = config(batch_size=None, batch_tokens=1000)
    assert (c.window_tokens, c.capacity_tokens, c.max_skips) == (2000, 4000, 16)
    assert (c.batch_size, c.window, c.min_batch_size) == (4, 4, 4), "every rank gets one"
    assert c.capacity >= c.capacity_tokens, "rollouts are not counted"
    assert config(batch_size=None, batch_tokens=1000, window_tokens=7000).max_skips == 18  # 3 * (7 - 1)
    assert config(batch_size=None, batch_tokens=1000, micro_batch_multiple=3, group_size=8).batch_size == 16
    assert config(batch_size=None, batch_tokens=1000, group_size=8, groups="same_rank").batch_size == 32
    assert config(batch_size=None, batch_tokens=1000, group_size=5, groups="free").batch_size == 5
    assert config(batch_size=None, batch_tokens=1000, mini_batches=3).batch_size == 12
    assert config(batch_size=None, batch_tokens=1000, mini_batches=3, group_size=8).batch_size == 16
    same_rank = config(batch_size=None, batch_tokens=1000, mini_batches=3, group_size=8, groups="same_rank")
    assert same_rank.batch_size == 96
    in_rollouts = config(batch_size=None, batch_tokens=1000, window=64)
    assert (in_rollouts.window, in_rollouts.window_tokens, in_rollouts.capacity) == (64, None, 128)
    assert in_rollouts.capacity_tokens == 16000  # as many as max_skips allows
    assert config(batch_size=None, batch_tokens=1000, window=64, max_skips=None).capacity_tokens is None
    assert config(batch_size=None, batch_tokens=1000, policy="fifo").window_tokens == 1000
    assert config().replace(batch_size=None, batch_tokens=500).window_tokens == 1000
    assert config().capacity_tokens is None


def test_replace_derives_anew_what_was_not_given() -> None:
    c = config(capacity=64).replace(batch_size=8)
    assert (c.batch_size, c.window, c.capacity) == (8, 16, 64)
    assert config().replace(window=48).capacity == 96


NUMBERS = [
    *[
        (name, 0)
        for name in ("dp_size", "batch_size", "window", "capacity", "min_batch_size", "max_skips", "mini_batches")
    ],
    *[(name, -3) for name in ("capacity_bytes", "max_tokens_per_micro_batch", "group_size", "micro_batch_multiple")],
    *[(name, math.nan) for name in ("batch_size", "window", "capacity", "max_skips", "max_staleness")],
    *[(name, 0) for name in ("batch_tokens", "window_tokens", "capacity_tokens")],
    *[(name, 2.0) for name in ("dp_size", "window")],
    ("window", True),
    ("max_staleness", -1),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_a_bad_number_names_the_knob(name: str, value: object) -> None:
    with pytest.raises(sb.ConfigError, match=f"{name} must be an int >= "):
        config(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "30"])
def test_bad_deadlines(value: object) -> None:
    with pytest.raises(sb.ConfigError, match="deadline_s must be a finite number of seconds > 0, or None"):
        config(deadline_s=value)


@pytest.mark.parametrize(
    "name", ["counts", "micro_batch_counts", "sync", "groups", "on_stale", "policy", "oversize", "micro_batch_order"]
)
def test_bad_choices_list_the_good_ones(name: str) -> None:
    with pytest.raises(sb.ConfigError, match=f"{name} must be one of '.*, not 'nope'"):
        config(**{name: "nope"})


TOKENS = {"batch_size": None, "batch_tokens": 1000}


CP = {"cp_sizes": (1, 2)}


class NanCost:
    padded = False

    def __call__(self, lengths: Any) -> Any:
        return np.full(len(lengths), np.nan)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"batch_size": 3}, r"batch_size \(3\) must be >= dp_size \(4\)"),
        ({"window": 8}, r"window \(8\) must be >= batch_size \(16\)"),
        ({"window": 64, "capacity": 32}, r"could never fill, and no batch would ever leave\. Raise capacity"),
        ({"window": 64, "capacity": 32, "deadline_s": 1.0}, "every batch would wait for deadline_s"),
        ({"min_batch_size": 17}, "min_batch_size"),
        ({"min_batch_size": 3}, "ranks would run padding only"),
        ({"window": 64, "max_skips": 8}, "Use max_skips >= 9"),
        ({"capacity": 1600, "max_skips": 8}, "Use max_skips >= 99"),
        ({"policy": "fifo", "window": 32}, "Leave window out"),
        ({"group_size": 17}, "group_size"),
        ({"group_size": 3}, "must be a multiple of group_size"),
        ({"group_size": 8, "groups": "same_rank"}, "needs a group for every rank"),
        ({"group_size": 8, "window": 60, "capacity": 63}, "whole groups of 8 that fit"),
        (
            {"batch_size": 24, "group_size": 4, "groups": "same_rank", "counts": "equal"},
            "multiple of dp_size",
        ),
        ({"micro_batch_multiple": 5}, "some micro-batches would be empty"),
        ({"mini_batches": 5}, r"mini_batches \(5\) x 4 rollouts.* more than batch_size \(16\)"),
        ({"mini_batches": 3, "micro_batch_multiple": 2}, r"mini_batches \(3\) x 8 rollouts"),
        ({"batch_size": 32, "mini_batches": 3, "group_size": 4, "groups": "same_rank"}, "x 16 rollouts"),
        ({"mini_batches": 2, "window": "auto"}, "window='auto' does not work with step_size.mini_batches=2"),
        (
            {"mini_batches": 2, "batch_size_range": (8, 24)},
            r"batch_size_range \(8, 24\) does not work with step_size.mini_batches=2",
        ),
        ({"micro_batch_counts": "free", "sync": "micro_batch"}, "needs sync='step'"),
        *[
            ({"micro_batch_overhead_cost": bad}, "must be a finite number >= 0")
            for bad in (-1.0, float("nan"), True, "1")
        ],
        ({"batch_size": None}, r"give batch_size \(rollouts per step\) or batch_tokens"),
        ({"batch_tokens": 1000}, r"batch_size \(16\) and step_size.tokens \(1000\) exclude one another"),
        ({"window_tokens": 1000}, r"window_tokens \(1000\) needs batch_tokens"),
        ({**TOKENS, "window": 32, "window_tokens": 1000}, r"window \(32\) and window_tokens \(1000\) exclude"),
        ({**TOKENS, "window_tokens": 999}, r"window_tokens \(999\) must be >= step_size.tokens \(1000\)"),
        ({**TOKENS, "capacity_tokens": 1999}, r"capacity_tokens \(1999\) must be >= window_tokens \(2000\)"),
        (
            {**TOKENS, "window": 32, "capacity_tokens": 999},
            r"capacity_tokens \(999\) must be >= step_size.tokens \(1000\)",
        ),
        (
            {**TOKENS, "max_skips": 3},
            r"window_tokens \(2000\) and limits.tokens \(4000\) at batch_tokens",
        ),
        ({**TOKENS, "window": "auto"}, "window='auto' does not work with batch_tokens"),
        ({**TOKENS, "policy": "fifo", "window_tokens": 2000}, "Leave window_tokens out"),
        ({**TOKENS, "min_batch_size": 3}, "must be between dp_size \\(4\\) and capacity"),
        *[
            ({"stratum_shares": bad}, "stratum_shares must be a dict from the name of a stratum to a share above 0")
            for bad in ({"math": 0.0}, {"math": 1.5}, {"math": True}, {1: 0.5}, [0.5], {"a": 0.6, "b": 0.5}, {"a": "1"})
        ],
        (
            {"stratum_shares": {f"{n}": 0.001 for n in range(17)}},
            "do not fit into a step of 16 rollouts.* 17 together",
        ),
        ({"stratum_shares": {"a": 0.1, "b": 0.1, "c": 0.1}, "group_size": 8}, "24 together"),
        ({"stratum_shares": {"a": 0.1, "b": 0.1, "c": 0.1}, "batch_size_range": (2, 24), "dp_size": 2}, "3 together"),
        ({"speeds": (1.0, 1.0)}, "speeds must be 4 finite numbers"),
        ({"speeds": (1.0, 1.0, 1.0, 0.0)}, "speeds must be 4 finite numbers"),
        ({"cost": "token"}, "cost 'token': no such cost model"),
        ({"cost": "quadratic:1:x"}, "cost 'quadratic:1:x': could not convert"),
        ({"cost": 3}, "cost must be a cost model"),
        *[({"groups": groups}, f"groups='{groups}' needs group_size") for groups in ("free", "same_rank")],
        (
            {"group_size": 4, "groups": "same_rank", "policy": "round_robin", "window": None},
            "groups.keep='same_rank' does not work with policy='round_robin'",
        ),
        ({"share_prefixes": 1}, "share_prefixes must be True or False"),
        *[
            ({"share_prefixes": True, **knobs}, f"share_prefixes does not work with {says}")
            for knobs, says in (
                ({"cost": sb.PaddedCost()}, "a padded cost"),
                ({"cost": sb.CalibratedCost()}, "CalibratedCost"),
                ({"sync": "micro_batch"}, "sync='micro_batch'"),
                ({"counts": "equal"}, "counts='equal'"),
                ({"speeds": (1.0, 1.0, 1.0, 0.5)}, "speeds"),
                ({"mini_batches": 2}, "step_size.mini_batches=2"),
                ({"micro_batch_multiple": 2, "counts": "equal"}, "counts='equal'.* and micro_batches.multiple_of=2"),
            )
        ],
        ({"share_prefixes": True, "window": "auto"}, "window='auto' does not work with share_prefixes"),
        *[
            ({"cp_sizes": bad}, "cp_sizes must be powers of two in ascending order, beginning with 1")
            for bad in ((), (2,), (1, 3), (1, 4, 2), (1, 1, 2), (0, 1), (1, 2.0), (True, 2), 4, "12")
        ],
        *[({"cp_overhead": bad}, "cp_overhead must be a finite number >= 0") for bad in (-0.1, math.nan, True, "0.1")],
        ({"cp_min_tokens": 0}, "cp_min_tokens must be an int >= 1"),
        ({**CP, "counts": "equal"}, r"cp_sizes=\(1, 2\) does not work with counts='equal'"),
        ({**CP, "group_size": 4, "groups": "same_rank"}, "does not work with groups.keep='same_rank'"),
        ({**CP, "cost": sb.PaddedCost()}, "does not work with a padded cost"),
        ({**CP, "share_prefixes": True}, "does not work with share_prefixes"),
        ({**CP, "speeds": (1.0, 1.0, 1.0, 0.5)}, "does not work with speeds"),
        ({**CP, "mini_batches": 2}, "does not work with step_size.mini_batches=2"),
        ({**CP, "window": "auto"}, r"window='auto' does not work with context_parallel.sizes=\(1, 2\)"),
        ({"cost": NanCost()}, "two finite numbers"),
    ],
)
def test_combinations_that_cannot_work(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.ConfigError, match=says):
        config(**knobs)


def test_sizes_of_shared_rollouts_may_be_above_the_number_of_ranks() -> None:
    assert config(cp_sizes=[1, 2, 16], cp_overhead=0).cp_sizes == (1, 2, 16)  # an elastic run may have more ranks
    assert config(group_size=4, groups="same_rank").cp_sizes == (1,)


def test_groups_may_be_any_size_when_free() -> None:
    assert config(group_size=3, groups="free").group_size == 3


@pytest.mark.parametrize(
    "make", [config, config().replace, lambda **knobs: sb.BalancerConfig.from_dict({"dp_size": 4, **knobs})]
)
def test_an_unknown_knob_says_which_one_was_meant(make: Any) -> None:
    with pytest.raises(sb.ConfigError, match=r"no such knob: windw\. Did you mean window\?"):
        make(windw=3)
    with pytest.raises(sb.ConfigError, match=r"no such knob: xyz\. The knobs are: .*window"):
        make(xyz=3)


def test_a_missing_knob_is_an_error_of_the_config() -> None:
    with pytest.raises(TypeError, match=r"BalancerConfig.__init__\(\) missing 1 required .*'dp_size'"):
        sb.BalancerConfig(batch_size=4)  # type: ignore[call-arg]
    assert list(inspect.signature(sb.BalancerConfig).parameters)[:2] == ["dp_size", "batch_size"]


def test_a_config_from_plain_data() -> None:
    text = "{dp_size: 2, batch_size: 8, max_skips: null, cost: quadratic:2:1, speeds: [1, 0.5], cp_sizes: [1]}"
    made = sb.BalancerConfig.from_dict(yaml.safe_load(text))
    assert made == sb.BalancerConfig(
        dp_size=2, batch_size=8, max_skips=None, cost=sb.QuadraticCost(2, 1), speeds=(1, 0.5)
    )
    assert sb.BalancerConfig(dp_size=2, batch_size=8, cost="padded").cost == sb.PaddedCost()
    with pytest.raises(sb.ConfigError, match="takes a mapping from knobs to values, not a list"):
        sb.BalancerConfig.from_dict([])  # type: ignore[arg-type]
