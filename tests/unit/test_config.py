"""Knobs: derived values, and refusals that name the knobs, the reason and the remedy."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import pydoc
from typing import Any

import numpy as np
import pytest
import yaml

import stream_balancer as sb


def config(**knobs: Any) -> sb.BalancerConfig:
    return sb.BalancerConfig(**{"dp_size": 4, "batch_size": 16, **knobs})


def test_knobs_left_out_are_derived() -> None:
    c = config()
    assert (c.window, c.capacity, c.min_batch_size, c.max_skips, c.sync) == (24, 64, 4, 16, "step")
    assert config(window=64).capacity == 128
    assert config(window=128).max_skips == 21  # 3 * (128 / 16 - 1)
    assert config(capacity=1600).max_skips == 99  # 1600 / 16 - 1: a full buffer must be able to leave in time
    assert config(policy="fifo").window == 16


def test_the_default_cost_is_a_7b_models() -> None:
    assert config().cost == sb.cost.QuadraticCost(24576, 1) == config(cost="quadratic").cost
    assert config().cost([1000, 2000]).tolist() == [1000 * 24576 + 1000**2, 2000 * 24576 + 2000**2]
    assert config(cost="tokens").cost == sb.cost.TokenCost()


def test_replace_derives_again_what_was_not_given() -> None:
    c = config(capacity=64).replace(batch_size=8)
    assert (c.batch_size, c.window, c.capacity) == (8, 12, 64)
    assert config().replace(window=48).capacity == 96
    grouped = config(groups=sb.Groups(size=4, min_size=2))
    assert grouped.replace(groups={"size": 2, "min_size": 1}).groups == sb.Groups(size=2, min_size=1)
    assert grouped.replace(groups={"patience": 0}).groups == sb.Groups(size=4, min_size=2, patience=0), "what it names"
    assert grouped.replace(groups=sb.Groups(size=2)).groups == sb.Groups(size=2), "the whole group"
    assert grouped.replace(groups=None).groups == sb.Groups()


def test_configs_are_values() -> None:
    c = config(groups={"size": 4})
    assert c == config(groups=sb.Groups(size=4)) != config()
    assert pickle.loads(pickle.dumps(c)) == c  # noqa: S301 - our own
    assert repr(c.groups) == "Groups(size=4)"
    assert "groups=Groups(size=4)" in repr(c)
    assert "staleness" not in repr(c), "defaults are not shown"
    assert dataclasses.replace(c.groups, size=2) == sb.Groups(size=2)
    for value, name in ((c, "window"), (c.groups, "size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 3)


def test_help_has_every_knob_on_the_first_screen() -> None:
    shown = pydoc.plain(pydoc.render_doc(sb.BalancerConfig))
    rows = [line[at : at + 120] for line in shown.splitlines() for at in range(0, len(line) or 1, 120)]
    first_screen = "\n".join(rows[:45])
    parameters = list(inspect.signature(sb.BalancerConfig).parameters)
    assert parameters[:2] == ["dp_size", "batch_size"]
    for name in parameters:
        assert f"{name}: " in first_screen, name
    for group in (sb.MicroBatches, sb.Groups, sb.Staleness):
        for name in inspect.signature(group).parameters:
            assert f"     {name}:\n" in pydoc.plain(pydoc.render_doc(group))


def test_there_are_24_knobs() -> None:
    groups = [sb.MicroBatches, sb.Groups, sb.Staleness]
    names = [one.name for kind in (sb.BalancerConfig, *groups) for one in dataclasses.fields(kind)]
    assert len(names) - len(groups) <= 24


class ConstantCost:
    padded = False

    def __init__(self, work: float) -> None:
        self.work = work

    def __call__(self, lengths: Any) -> Any:
        return np.full(len(lengths), self.work)


COUNT = "must be an int >= 1 or None, not"
BAD_VALUES: list[tuple[str, str, list[object]]] = [
    *[(name, "must be an int >= 1, not", [0, -3, math.nan, 2.0, True, "8"]) for name in ("dp_size", "batch_size")],
    *[(name, COUNT, [0, -3, math.nan, 2.0, True, "8"]) for name in ("window", "capacity", "min_batch_size")],
    ("max_skips", "must be an int >= 1 or None or 'auto', not", [0, 2.0, "automatic"]),
    ("max_bytes", COUNT, [0, 2.5]),
    ("deadline_s", "must be a finite number of seconds > 0 or None, not", [0, -1.0, math.nan, math.inf, "30"]),
    ("policy", "must be one of 'window', 'fifo', 'round_robin', not 'nope'", ["nope"]),
    ("sync", "must be one of 'step', 'micro_batch' or None, not 'nope'", ["nope"]),
    ("sync", "not 'micro_batches'. Did you mean 'micro_batch'", ["micro_batches"]),
    ("equal_rollouts", "must be True or False, not", [1, "equal"]),
    ("loss_mask_column", "must be the name of a column of masks", ["", "labels", "input_ids", 3]),
    ("cost", "'token': no such cost model", ["token"]),
    ("cost", "'quadratic:1:x': could not convert", ["quadratic:1:x"]),
    ("cost", "must be a cost model", [3, sb.cost.QuadraticCost]),
    ("cost", "two finite numbers", [ConstantCost(math.nan), ConstantCost(-1.0)]),
    *[(name, COUNT, [0, -3, 2.0]) for name in ("micro_batches.max_tokens", "groups.size", "groups.min_size")],
    *[(name, "must be an int >= 1, not", [0, True]) for name in ("micro_batches.multiple_of", "mini_batches")],
    ("micro_batches.equal_number", "must be True or False, not", ["free", 0]),
    ("micro_batches.oversize", "must be one of 'refuse', 'alone', not 'nope'", ["nope"]),
    ("micro_batches.oversize", "not 'refused'. Did you mean 'refuse'", ["refused"]),
    ("micro_batches.overhead_cost", "must be a finite number >= 0 or None, not", [-1.0, math.nan, True, "1"]),
    ("groups.patience", "must be a finite number >= 0, not", [-0.1, math.nan, True, "0.1"]),
    ("groups", r"must be Groups\(...\), or a mapping with some of size, min_size, patience, not", [8, "same_rank"]),
    ("staleness.max_versions", "must be an int >= 0 or None, not", [-1, math.nan, True]),
    ("staleness.on_stale", "must be one of 'evict', 'send', not 'nope'", ["nope"]),
]


@pytest.mark.parametrize(
    ("name", "says", "value"), [(name, says, value) for name, says, values in BAD_VALUES for value in values]
)
def test_a_bad_value_names_the_knob(name: str, says: str, value: object) -> None:
    group, _, knob = name.rpartition(".")
    with pytest.raises(sb.errors.ConfigError, match=f"{name}.*{says}"):
        config(**{group: {knob: value}} if group else {knob: value})


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"batch_size": 3}, r"batch_size \(3\) must be >= 4, which is dp_size \(4\)"),
        ({"micro_batches": {"multiple_of": 5}}, "must be >= 20.* some micro-batches would be empty"),
        ({"mini_batches": 5}, r"batch_size \(16\) must be >= 20.* mini_batches \(5\)"),
        ({"mini_batches": 3, "micro_batches": {"multiple_of": 2}}, "must be >= 24"),
        ({"window": 8}, r"window \(8\) must be >= batch_size \(16\)"),
        ({"window": 64, "capacity": 32}, r"could never fill, and no batch would ever leave\. Raise capacity"),
        ({"window": 64, "capacity": 32, "deadline_s": 1.0}, "every batch would wait for deadline_s"),
        ({"groups": {"size": 8}, "window": 60, "capacity": 63}, "must be <= 56, the whole groups that fit"),
        ({"min_batch_size": 17}, r"min_batch_size \(17\) must be .* <= batch_size \(16\)"),
        ({"min_batch_size": 3}, "ranks would run padding only"),
        ({"window": 64, "max_skips": 8}, "Use max_skips >= 9"),
        ({"capacity": 1600, "max_skips": 8}, "Use max_skips >= 99"),
        ({"policy": "fifo", "window": 32}, "Leave window out"),
        *[({"groups": {"size": size}}, f"must be a multiple of groups.size .{size}.") for size in (3, 17)],
        ({"groups": {"size": 4, "min_size": 1}}, r"groups.min_size \(1\) must be at least half of groups.size \(4\)"),
        ({"groups": {"min_size": 1}}, r"groups.min_size \(1\) must be at least half of groups.size \(None\)"),
        ({"groups": {"size": 4, "patience": 3}}, r"groups.patience \(3.0\) needs groups.min_size"),
        ({"micro_batches": {"equal_number": False}, "sync": "micro_batch"}, "needs sync='step'"),
    ],
)
def test_combinations_that_cannot_work(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        config(**knobs)


def test_a_cap_asks_where_ranks_wait_for_each_other() -> None:
    with pytest.raises(sb.errors.ConfigError, match=r"micro_batches\.max_tokens needs sync") as error:
        config(micro_batches=sb.MicroBatches(max_tokens=1000))
    _, *choices = str(error.value).splitlines()
    assert [one.split()[0] for one in choices] == ['sync="micro_batch"', 'sync="step"']
    assert "FSDP" in choices[0]
    assert "DDP" in choices[1]
    for sync in ("step", "micro_batch"):
        assert config(micro_batches=sb.MicroBatches(max_tokens=1000), sync=sync).sync == sync
    assert config(micro_batches={"max_tokens": 1000}, sync="step").replace(window=32).sync == "step"


def test_what_may_seem_odd_and_works() -> None:
    config(cost=ConstantCost(0.0))
    assert config(deadline_s=3).deadline_s == 3.0
    assert config(micro_batches=None).micro_batches == sb.MicroBatches()


@pytest.mark.parametrize(
    "make",
    [config, config().replace, lambda **knobs: sb.BalancerConfig.from_dict({"dp_size": 4, "batch_size": 8, **knobs})],
)
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"windw": 3}, r"no such knob: windw\. Did you mean window\?"),
        ({"xyz": 3}, r"no such knob: xyz\. The knobs are: .*window"),
        ({"groups": {"siz": 3}}, r"no such knob: groups\.siz\. Did you mean size\?"),
        ({"groups": {"xyz": 3}}, r"no such knob: groups\.xyz\. The knobs are: min_size, patience, size"),
        ({"max_token": 3}, r"Did you mean micro_batches=MicroBatches\(max_tokens=\.\.\.\)\?"),
        ({"groups.size": 3}, r"Did you mean groups=Groups\(size=\.\.\.\)\?"),
    ],
)
def test_an_unknown_knob_says_which_one_was_meant(make: Any, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        make(**knobs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sb.BalancerConfig(4, 16), r"takes knobs by name, as in BalancerConfig\(dp_size=...\)"),
        (lambda: sb.Groups(8), r"takes knobs by name, as in Groups\(size=...\)"),
        (lambda: sb.BalancerConfig(), "dp_size, batch_size is missing"),
        (lambda: sb.BalancerConfig.from_dict({}), "dp_size, batch_size is missing"),
        (lambda: sb.BalancerConfig.from_dict({1: 2, "dp_size": 3, "batch_size": 4}), "no such knob: 1"),
        (lambda: config(groups={1: 2}), r"no such knob: groups\.1"),
        (lambda: sb.BalancerConfig.from_dict([]), "takes a mapping from knobs to values, not a list"),
    ],
)
def test_calls_that_are_none(make: Any, says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        make()


def test_a_config_from_plain_data() -> None:
    text = """
        {dp_size: 2, batch_size: 8, max_skips: null, cost: quadratic:2:1, deadline_s: 3, sync: step,
         micro_batches: {max_tokens: 64, equal_number: false}, groups: null}
    """
    made = sb.BalancerConfig.from_dict(yaml.safe_load(text))
    assert made == sb.BalancerConfig(
        dp_size=2, batch_size=8, max_skips=None, cost=sb.cost.QuadraticCost(2, 1), deadline_s=3.0, sync="step",
        micro_batches=sb.MicroBatches(max_tokens=64, equal_number=False),
    )  # fmt: skip
    assert sb.BalancerConfig(dp_size=2, batch_size=8, cost="padded").cost == sb.cost.PaddedCost()
