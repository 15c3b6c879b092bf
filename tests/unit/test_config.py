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


def in_tokens(tokens: int = 1000, **knobs: Any) -> sb.BalancerConfig:
    step_size = {"tokens": tokens, **knobs.pop("step_size", {})}
    return config(batch_size=None, step_size=step_size, **knobs)


def test_knobs_left_out_are_derived() -> None:
    c = config()
    assert (c.window, c.capacity, c.min_batch_size, c.max_skips) == (24, 64, 4, 16)
    assert config(window=64).capacity == 128
    assert config(window=128).max_skips == 21  # 3 * (128 / 16 - 1)
    assert config(capacity=1600).max_skips == 99  # 1600 / 16 - 1: a full buffer must be able to leave in time
    assert config(policy="fifo").window == 16


def test_a_budget_in_tokens_derives_the_rest() -> None:
    c = in_tokens()
    assert (c.step_size.window_tokens, c.limits.tokens, c.max_skips) == (2000, 4000, 16)
    assert (c.batch_size, c.window, c.min_batch_size) == (4, 4, 4), "every rank gets one"
    assert c.capacity >= (c.limits.tokens or 0), "rollouts are not counted"
    assert in_tokens(step_size={"window_tokens": 7000}).max_skips == 18  # 3 * (7 - 1)
    in_rollouts = in_tokens(window=64)
    assert (in_rollouts.window, in_rollouts.step_size.window_tokens, in_rollouts.capacity) == (64, None, 128)
    assert in_rollouts.limits.tokens == 16000  # as many as max_skips allows
    assert in_tokens(window=64, max_skips=None).limits.tokens is None
    assert in_tokens(policy="fifo").step_size.window_tokens == 1000
    assert config().replace(batch_size=None, step_size={"tokens": 500}).step_size.window_tokens == 1000
    assert config().limits.tokens is None


@pytest.mark.parametrize(
    ("knobs", "batch_size"),
    [
        ({"micro_batches": {"multiple_of": 3}, "groups": {"size": 8}}, 16),
        ({"groups": {"size": 8, "keep": "same_rank"}}, 32),
        ({"groups": {"size": 5, "keep": "free"}}, 5),
        ({"step_size": {"mini_batches": 3}}, 12),
        ({"step_size": {"mini_batches": 3}, "groups": {"size": 8}}, 16),
        ({"step_size": {"mini_batches": 3}, "groups": {"size": 8, "keep": "same_rank"}}, 96),
    ],
    ids=str,
)
def test_a_step_in_tokens_has_at_least_so_many_rollouts(knobs: dict[str, Any], batch_size: int) -> None:
    assert in_tokens(**knobs).batch_size == batch_size


def test_replace_derives_anew_what_was_not_given() -> None:
    c = config(capacity=64).replace(batch_size=8)
    assert (c.batch_size, c.window, c.capacity) == (8, 12, 64)
    assert config().replace(window=48).capacity == 96
    grouped = config(groups=sb.Groups(size=4, keep="same_rank"))
    assert grouped.replace(groups={"size": 2}).groups == sb.Groups(size=2, keep="same_rank"), "what a mapping names"
    assert grouped.replace(groups=sb.Groups(size=2)).groups == sb.Groups(size=2), "the whole group"
    assert grouped.replace(groups=None).groups == sb.Groups()


def test_configs_are_values() -> None:
    c = config(groups={"size": 4}, stratum_shares=MappingProxyType({"math": 0.5}))
    assert c == config(groups=sb.Groups(size=4), stratum_shares={"math": 0.5}) != config()
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
    for group in (sb.MicroBatches, sb.Groups, sb.Staleness, sb.Limits, sb.StepSize):
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
    ("dp_size", "must be an int >= 1, not", [0, 2.0, True, None]),
    *[(name, COUNT, [0, -3, math.nan, 2.0, True, "8"]) for name in ("batch_size", "capacity", "min_batch_size")],
    *[(name, "must be an int >= 1 or 'auto' or None, not", [0, 2.0, "automatic"]) for name in ("window", "max_skips")],
    ("deadline_s", "must be a finite number of seconds > 0 or None, not", [0, -1.0, math.nan, math.inf, "30"]),
    *[(name, "must be one of '.*', not 'nope'", ["nope"]) for name in ("sync", "policy")],
    ("speeds", "must be finite numbers > 0, one for each rank or None, not", [3, "ab", (1.0, "x", 1.0, 1.0), {1: 2}]),
    ("speeds", "must be finite numbers > 0, one for each rank or None, not", [(1.0, 1.0, 1.0, 0.0)]),
    ("speeds", r"must be 4 finite numbers > 0 \(one per rank\), not", [(1.0, 1.0)]),
    ("stratum_shares", "must be a dict from the name of a stratum", [{"a": 0.0}, {"a": 1.5}, {"a": True}, {1: 0.5}]),
    ("stratum_shares", "must be a dict from the name of a stratum", [[0.5], {"a": "1"}]),
    ("stratum_shares", "must be a mapping .* at most 1 all together", [{"a": 0.6, "b": 0.5}]),
    ("loss_mask_column", "must be the name of a column of masks", ["", "labels", "input_ids", 3]),
    ("cost", "'token': no such cost model", ["token"]),
    ("cost", "'quadratic:1:x': could not convert", ["quadratic:1:x"]),
    ("cost", "must be a cost model", [3, sb.cost.QuadraticCost]),
    ("cost", "two finite numbers", [ConstantCost(math.nan), ConstantCost(-1.0)]),
    *[(name, COUNT, [0, -3, 2.0]) for name in ("micro_batches.max_tokens", "groups.size", "limits.tokens")],
    *[(name, COUNT, [0]) for name in ("limits.bytes", "step_size.tokens", "step_size.window_tokens")],
    *[(name, "must be an int >= 1, not", [0]) for name in ("micro_batches.multiple_of", "step_size.mini_batches")],
    ("staleness.max_versions", "must be an int >= 0 or None, not", [-1, math.nan, True]),
    *[(name, "must be one of '.*', not 'nope'", ["nope"]) for name in ("micro_batches.oversize", "groups.keep")],
    ("micro_batches.oversize", "not 'refused'. Did you mean 'refuse'", ["refused"]),
    ("staleness.on_stale", "must be one of 'evict', 'send', not 'nope'", ["nope"]),
    ("micro_batches.overhead_cost", "must be a finite number >= 0 or None, not", [-1.0, math.nan, True, "1"]),
    ("groups.patience", "must be a finite number >= 0, not", [-0.1, math.nan, True, "0.1"]),
    ("step_size.rollouts", "must be two ints >= 1", [16, (16,), (4, 8.5)]),
    (
        "groups",
        r"must be Groups\(...\), or a mapping with some of size, min_size, patience, keep, not",
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


TOKENS: dict[str, Any] = {"batch_size": None, "step_size": {"tokens": 1000}}


def of_window(tokens: int) -> dict[str, Any]:
    return {"batch_size": None, "step_size": {"tokens": 1000, "window_tokens": tokens}}


SAME_RANK: dict[str, Any] = {"size": 4, "keep": "same_rank"}
MINI: dict[str, Any] = {"step_size": {"mini_batches": 2}}
SLOW: dict[str, Any] = {"speeds": (1.0, 1.0, 1.0, 0.5)}


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"batch_size": 3}, r"batch_size \(3\), .*, must be >= dp_size \(4\)"),
        ({"window": 8}, r"window \(8\) must be >= batch_size \(16\)"),
        ({"window": 64, "capacity": 32}, r"could never fill, and no batch would ever leave\. Raise capacity"),
        ({"window": 64, "capacity": 32, "deadline_s": 1.0}, "every batch would wait for deadline_s"),
        ({"min_batch_size": 17}, r"min_batch_size \(17\) must be <= 16: batch_size"),
        ({"min_batch_size": 3}, "ranks would run padding only"),
        ({"window": 64, "max_skips": 8}, "Use max_skips >= 9"),
        ({"capacity": 1600, "max_skips": 8}, "Use max_skips >= 99"),
        ({"policy": "fifo", "window": 32}, "Leave window and window_tokens out"),
        ({"groups": {"size": 17}}, r"must be a multiple of groups.size \(17\)"),
        ({"groups": {"size": 3}}, "must be a multiple of groups.size"),
        ({"groups": {"size": 8, "keep": "same_rank"}}, "needs a group for every rank"),
        ({"groups": {"size": 8}, "window": 60, "capacity": 63}, "must be <= 56, the whole groups that fit"),
        ({"batch_size": 24, "groups": SAME_RANK, "equal_rollouts": True}, "multiple of dp_size"),
        ({"groups": SAME_RANK, "policy": "round_robin"}, "does not work with policy='round_robin'"),
        *[({"groups": {"keep": keep}}, f"groups.keep='{keep}' needs groups.size") for keep in ("free", "same_rank")],
        ({"groups": {"size": 4, "patience": 3}}, r"groups.patience \(3.0\) needs groups.min_size"),
        ({"micro_batches": {"multiple_of": 5}}, "some micro-batches would be empty"),
        ({"micro_batches": {"equal_number": False}, "sync": "micro_batch"}, "needs sync='step'"),
        ({"step_size": {"mini_batches": 5}}, r"mini_batches \(5\) x 4 rollouts.* more than batch_size \(16\)"),
        ({"step_size": {"mini_batches": 3}, "micro_batches": {"multiple_of": 2}}, r"mini_batches \(3\) x 8 rollouts"),
        ({"batch_size": 32, "step_size": {"mini_batches": 3}, "groups": SAME_RANK}, "x 16 rollouts"),
        ({"step_size": {"mini_batches": 2, "rollouts": (8, 24)}}, r"\(8, 24\) does not work with .*mini_batches > 1"),
        ({"batch_size": None}, r"give batch_size \(rollouts per step\) or step_size\.tokens"),
        ({"step_size": {"tokens": 1000}}, r"batch_size \(16\) and step_size.tokens \(1000\) exclude one another"),
        ({"step_size": {"window_tokens": 1000}}, r"window_tokens \(1000\) needs step_size.tokens"),
        ({**of_window(1000), "window": 32}, r"window \(32\) and step_size.window_tokens \(1000\) exclude"),
        (of_window(999), r"window_tokens \(999\) must be >= step_size.tokens \(1000\)"),
        ({**TOKENS, "limits": {"tokens": 1999}}, r"limits.tokens \(1999\) must be >= .*window_tokens \(2000\)"),
        ({**TOKENS, "window": 32, "limits": {"tokens": 999}}, r"limits.tokens \(999\) must be >= .*tokens \(1000\)"),
        ({**TOKENS, "max_skips": 3}, "max_skips .3. is too small .* limits.tokens"),
        ({**of_window(2000), "policy": "fifo"}, r"window_tokens \(2000\) step_size.tokens \(1000\)"),
        ({**TOKENS, "min_batch_size": 3}, "ranks would run padding only"),
        ({"stratum_shares": {f"{n}": 0.001 for n in range(17)}}, r"do not fit into a step .* \(16\) .* 17 together"),
        ({"stratum_shares": dict.fromkeys("abc", 0.1), "groups": {"size": 8}}, "24 together"),
        ({"stratum_shares": dict.fromkeys("abc", 0.1), "step_size": {"rollouts": (2, 24)}, "dp_size": 2}, "3 together"),
        *[
            ({"dp_size": 2, "batch_size": 8, "window": 16, "step_size": {"rollouts": steps}, **knobs}, says)
            for steps, knobs, says in (
                ((9, 16), {}, r"batch_size \(8\) is the mean of step_size.rollouts \(9, 16\)"),
                ((4, 7), {}, "it must lie in it"),
                ((8, 8), {}, "or leave it out for batch_size rollouts every time"),
                ((4, 33), {}, r"reaches above capacity \(32\)"),
                ((1, 16), {}, r"rollouts \(1, 16\), must be >= dp_size \(2\) x micro_batches.multiple_of \(1\)"),
                ((4, 16), {"micro_batches": {"multiple_of": 4}}, "some micro-batches would be empty"),
                (
                    (4, 16),
                    {"min_batch_size": 5},
                    r"min_batch_size \(5\) must be <= 4: .* the least of step_size.rollouts",
                ),
                ((4, 15), {"equal_rollouts": True}, "must be multiples of 2.* Change 15"),
                ((3, 15), {"groups": {"size": 2}}, "must be multiples of 2.* Change 3 and 15"),
                ((2, 16), {"groups": {"size": 2, "keep": "same_rank"}}, "holds fewer than 2 groups of 2"),
                ((4, 16), {"sync": "micro_batch"}, "does not work with sync='micro_batch'"),
                ((4, 16), {"cost": sb.cost.PaddedCost()}, "does not work with a padded cost"),
                ((4, 16), {"policy": "fifo", "window": None}, "needs policy='window'"),
                ((4, 16), {"max_skips": 6, "capacity": 32}, "Use max_skips >= 7"),
            )
        ],
        ({**TOKENS, "window": None, "step_size": {"tokens": 90, "rollouts": (4, 16)}}, "exclude one another"),
        *[
            ({"window": "auto", **knobs}, f"window='auto' {says}")
            for knobs, says in (
                (TOKENS, "does not work with step_size.tokens"),
                (MINI, "does not work with step_size.mini_batches > 1"),
                ({"policy": "fifo"}, "needs policy='window'"),
            )
        ],
    ],
)
def test_combinations_that_cannot_work(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        config(**knobs)


def test_what_may_seem_odd_and_works() -> None:
    config(cost=ConstantCost(0.0))
    assert config(groups=SAME_RANK).groups.kept == 4
    assert config(groups={"size": 3, "keep": "free"}).groups.kept is None


@pytest.mark.parametrize(
    "make", [config, config().replace, lambda **knobs: sb.BalancerConfig.from_dict({"dp_size": 4, **knobs})]
)
@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"windw": 3}, r"no such knob: windw\. Did you mean window\?"),
        ({"xyz": 3}, r"no such knob: xyz\. The knobs are: .*window"),
        ({"groups": {"siz": 3}}, r"no such knob: groups\.siz\. Did you mean size\?"),
        ({"groups": {"xyz": 3}}, r"no such knob: groups\.xyz\. The knobs are: keep, min_size, .*, size"),
        ({"patient": 2.0}, r"Did you mean groups=Groups\(patience=\.\.\.\)\?"),
        ({"limits.bytes": 3}, r"Did you mean limits=Limits\(bytes=\.\.\.\)\?"),
        ({"self": 3}, "no such knob: self"),
    ],
)
def test_an_unknown_knob_says_which_one_was_meant(make: Any, knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        make(**knobs)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({}, "dp_size is missing"),
        ({1: 2, "dp_size": 3}, "no such knob: 1"),
        ({"dp_size": 4, "groups": {1: 2}}, r"no such knob: groups\.1"),
        ([], "takes a mapping from knobs to values, not a list"),
    ],
)
def test_plain_data_that_is_none(knobs: Any, says: str) -> None:
    with pytest.raises(sb.errors.ConfigError, match=says):
        sb.BalancerConfig.from_dict(knobs)


def test_a_config_from_plain_data() -> None:
    text = """
        {dp_size: 2, batch_size: 8, max_skips: null, cost: quadratic:2:1, speeds: [1, 0.5],
         micro_batches: {max_tokens: 64, counts: free}, groups: null}
    """
    made = sb.BalancerConfig.from_dict(yaml.safe_load(text))
    assert made == sb.BalancerConfig(
        dp_size=2, batch_size=8, max_skips=None, cost=sb.cost.QuadraticCost(2, 1), speeds=(1, 0.5),
        micro_batches=sb.MicroBatches(max_tokens=64, equal_number=False),
    )  # fmt: skip
    assert sb.BalancerConfig(dp_size=2, batch_size=8, cost="padded").cost == sb.cost.PaddedCost()
