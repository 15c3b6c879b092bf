"""Knobs: what is derived, and what is refused with what, why and what to do."""

from __future__ import annotations

import inspect
import math
import pickle
import pydoc
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import yaml

import stream_balancer as sb


def config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": 4, "batch_size": 16, **knobs})


def test_knobs_left_out_are_derived() -> None:
    c = config()
    assert (c.window, c.capacity, c.min_batch_size, c.max_skips) == (24, 64, 4, 16)
    assert config(window=64).capacity == 128
    assert config(window=128).max_skips == 21  # 3 * (128 / 16 - 1)
    assert config(capacity=1600).max_skips == 99  # 1600 / 16 - 1: a full buffer must be able to leave in time
    assert config(policy="fifo").window == 16


def test_replace_derives_anew_what_was_not_given() -> None:
    c = config(capacity=64).replace(batch_size=8)
    assert (c.batch_size, c.window, c.capacity) == (8, 12, 64)
    assert config().replace(window=48).capacity == 96
    grouped = config(groups=sb.Groups(size=4, share_prefixes=True))
    assert grouped.replace(groups={"size": 2}).groups == sb.Groups(size=2, share_prefixes=True), "what a mapping names"
    assert grouped.replace(groups=sb.Groups(size=2)).groups == sb.Groups(size=2), "the whole group"
    assert grouped.replace(groups=None).groups == sb.Groups()


def test_configs_are_values() -> None:
    c = config(groups=MappingProxyType({"size": 4}))
    assert c == config(groups=sb.Groups(size=4)) != config()
    assert pickle.loads(pickle.dumps(c)) == c  # noqa: S301 - our own
    assert repr(c.groups) == "Groups(size=4)"
    assert "groups=Groups(size=4)" in repr(c)
    assert "staleness" not in repr(c), "defaults are not shown"
    for value, name in ((c, "window"), (c.groups, "size")):
        with pytest.raises(AttributeError, match=f"{name} cannot be set: use replace"):
            setattr(value, name, 3)


def test_help_fits_on_a_screen() -> None:
    shown = pydoc.plain(pydoc.render_doc(sb.BalancerConfig))
    assert shown.count("\n") <= 50
    assert sum(max(-(-len(line) // 120), 1) for line in shown.splitlines()) <= 54, "rows of a terminal of 120 columns"
    parameters = list(inspect.signature(sb.BalancerConfig).parameters)
    assert parameters[:2] == ["dp_size", "batch_size"]
    for name in parameters:
        assert f"{name}: " in shown
    for group in (sb.MicroBatches, sb.Groups, sb.Staleness, sb.ContextParallel):
        for name in inspect.signature(group).parameters:
            assert f"     {name}:\n" in pydoc.plain(pydoc.render_doc(group))


class ConstantCost:
    padded = False

    def __init__(self, work: float) -> None:
        self.work = work

    def __call__(self, lengths: Any) -> Any:
        return np.full(len(lengths), self.work)


COUNT = "must be an int >= 1 or None, not"
BAD_VALUES: list[tuple[str, str, list[object]]] = [
    *[(name, "must be an int >= 1, not", [0, 2.0, True, None]) for name in ("dp_size", "batch_size", "mini_batches")],
    *[(name, COUNT, [0, -3, math.nan, 2.0, True, "8"]) for name in ("capacity", "min_batch_size", "max_bytes")],
    ("window", COUNT, [0, 2.0, "auto"]),
    ("max_skips", "must be an int >= 1 or 'auto' or None, not", [0, 2.0, "automatic"]),
    ("deadline_s", "must be a finite number of seconds > 0 or None, not", [0, -1.0, math.nan, math.inf, "30"]),
    ("remember_ids", "must be an int >= 0, not", [-1, 2.0, None]),
    *[(name, "must be one of '.*', not 'nope'", ["nope"]) for name in ("counts", "sync", "policy")],
    ("loss_mask_column", "must be the name of a column of masks", ["", "labels", "input_ids", 3]),
    ("cost", "'token': no such cost model", ["token"]),
    ("cost", "'quadratic:1:x': could not convert", ["quadratic:1:x"]),
    ("cost", "must be a cost model", [3, sb.cost.QuadraticCost]),
    ("cost", "two finite numbers", [ConstantCost(math.nan), ConstantCost(-1.0)]),
    *[(name, COUNT, [0, -3, 2.0]) for name in ("micro_batches.max_tokens", "groups.size")],
    ("micro_batches.multiple_of", "must be an int >= 1, not", [0]),
    ("context_parallel.min_tokens", "must be an int >= 1, not", [0]),
    ("staleness.max_versions", "must be an int >= 0 or None, not", [-1, math.nan, True]),
    *[
        (name, "must be one of '.*', not 'nope'", ["nope"])
        for name in ("micro_batches.counts", "micro_batches.oversize", "micro_batches.order")
    ],
    ("micro_batches.order", "not 'heavy_first'. Did you mean 'heaviest_first'", ["heavy_first"]),
    ("staleness.on_stale", "must be one of 'evict', 'send', not 'nope'", ["nope"]),
    ("micro_batches.overhead_cost", "must be a finite number >= 0 or None, not", [-1.0, math.nan, True, "1"]),
    ("groups.share_prefixes", "must be True or False, not", [1]),
    ("context_parallel.overhead", "must be a finite number >= 0, not", [-0.1, math.nan, True, "0.1"]),
    ("context_parallel.sizes", "must be powers of two in ascending order, beginning with 1", [(), (2,), (1, 3), 4]),
    ("context_parallel.sizes", "must be powers of two", [(1, 4, 2), (1, 1, 2), (0, 1), (1, 2.0), (True, 2), "12"]),
    (
        "groups",
        r"must be Groups\(...\), or a mapping with some of size, min_size, patience, share_prefixes, not",
        [8, "same_rank"],
    ),
]


@pytest.mark.parametrize(
    ("name", "says", "value"), [(name, says, value) for name, says, values in BAD_VALUES for value in values]
)
def test_a_bad_value_names_the_knob(name: str, says: str, value: object) -> None:
    group, _, knob = name.rpartition(".")
    with pytest.raises(sb.errors.ConfigError, match=f"{name}.*{says}"):
        config(**{group: {knob: value}} if group else {knob: value})


SHARED: dict[str, Any] = {"context_parallel": {"sizes": (1, 2)}}
PREFIXES: dict[str, Any] = {"groups": {"share_prefixes": True}}


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"batch_size": 3}, r"batch_size \(3\) must be >= dp_size \(4\)"),
        ({"window": 8}, r"window \(8\) must be >= batch_size \(16\)"),
        ({"window": 64, "capacity": 32}, r"could never fill, and no batch would ever leave\. Raise capacity"),
        ({"window": 64, "capacity": 32, "deadline_s": 1.0}, "every batch would wait for deadline_s"),
        ({"min_batch_size": 17}, r"min_batch_size \(17\) must be <= batch_size \(16\)"),
        ({"min_batch_size": 3}, "ranks would run padding only"),
        ({"window": 64, "max_skips": 8}, "Use max_skips >= 9"),
        ({"capacity": 1600, "max_skips": 8}, "Use max_skips >= 99"),
        ({"policy": "fifo", "window": 32}, "Leave window out"),
        ({"groups": {"size": 17}}, r"must be a multiple of groups.size \(17\)"),
        ({"groups": {"size": 3}}, "must be a multiple of groups.size"),
        ({"groups": {"size": 8}, "window": 60, "capacity": 63}, "must be <= 56, the whole groups that fit"),
        ({"groups": {"size": 4, "patience": 3}}, r"groups.patience \(3.0\) needs groups.min_size"),
        ({"micro_batches": {"multiple_of": 5}}, "some micro-batches would be empty"),
        ({"micro_batches": {"counts": "free"}, "sync": "micro_batch"}, "needs sync='step'"),
        ({"mini_batches": 5}, r"mini_batches \(5\) x 4 rollouts.* more than batch_size \(16\)"),
        ({"mini_batches": 3, "micro_batches": {"multiple_of": 2}}, r"mini_batches \(3\) x 8 rollouts"),
        *[
            ({**PREFIXES, **knobs}, f"share_prefixes does not work with {says}")
            for knobs, says in (
                ({"cost": sb.cost.PaddedCost()}, "a padded cost"),
                ({"cost": sb.cost.CalibratedCost()}, "CalibratedCost"),
                ({"sync": "micro_batch"}, "sync='micro_batch'"),
                ({"counts": "equal"}, "counts='equal'"),
                ({"sync": "micro_batch", "counts": "equal"}, "sync='micro_batch'.* and counts='equal'"),
            )
        ],
        *[
            ({**SHARED, **knobs}, rf"context_parallel.sizes=\(1, 2\) does not work with {says}")
            for knobs, says in (
                ({"counts": "equal"}, "counts='equal'"),
                ({"cost": sb.cost.PaddedCost()}, "a padded cost"),
            )
        ],
    ],
)
def test_combinations_that_cannot_work(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        config(**knobs)


def test_what_may_seem_odd_and_works() -> None:
    config(cost=ConstantCost(0.0))
    shared = config(context_parallel={"sizes": [1, 2, 16], "overhead": 0})  # an elastic run may have more ranks
    assert shared.context_parallel == sb.ContextParallel(sizes=(1, 2, 16), overhead=0.0)


@pytest.mark.parametrize(
    "make",
    [config, config().replace, lambda **knobs: sb.BalancerConfig.from_dict({"dp_size": 4, "batch_size": 16, **knobs})],
)
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"windw": 3}, r"no such knob: windw\. Did you mean window\?"),
        ({"xyz": 3}, r"no such knob: xyz\. The knobs are: .*window"),
        ({"groups": {"siz": 3}}, r"no such knob: groups\.siz\. Did you mean size\?"),
        ({"groups": {"xyz": 3}}, r"no such knob: groups\.xyz\. The knobs are: min_size, .*, size"),
        ({"share_prefix": True}, r"Did you mean groups=Groups\(share_prefixes=\.\.\.\)\?"),
        ({"self": 3}, "no such knob: self"),
    ],
)
def test_an_unknown_knob_says_which_one_was_meant(make: Any, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        make(**knobs)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"batch_size": 3}, "dp_size is missing"),
        ({1: 2, "dp_size": 3, "batch_size": 3}, "no such knob: 1"),
        ({"dp_size": 4, "batch_size": 4, "groups": {1: 2}}, r"no such knob: groups\.1"),
        ([], "takes a mapping from knobs to values, not a list"),
    ],
)
def test_plain_data_that_is_none(knobs: Any, says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        sb.BalancerConfig.from_dict(knobs)


def test_a_config_from_plain_data() -> None:
    text = """
        {dp_size: 2, batch_size: 8, max_skips: null, cost: quadratic:2:1,
         context_parallel: {sizes: [1]}, micro_batches: {max_tokens: 64, counts: free}, groups: null}
    """
    made = sb.BalancerConfig.from_dict(yaml.safe_load(text))
    assert made == sb.BalancerConfig(
        dp_size=2, batch_size=8, max_skips=None, cost=sb.cost.QuadraticCost(2, 1),
        micro_batches=sb.MicroBatches(max_tokens=64, counts="free"),
    )  # fmt: skip
    assert sb.BalancerConfig(dp_size=2, batch_size=8, cost="padded").cost == sb.cost.PaddedCost()
