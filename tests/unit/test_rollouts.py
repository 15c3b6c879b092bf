"""Rollouts are checked where they are made; what is accepted comes out bit for bit of every way it can go."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from any_fields import (
    WAYS,
    Colour,
    Level,
    Number,
    Raw,
    Text,
    Whole,
    all_of,
    bits,
    deep,
    fake_tensor,
    fields,
    freed_tensor,
    looped,
)
from hypothesis import HealthCheck, given, settings

import stream_balancer as sb
from stream_balancer.errors import RolloutError
from stream_balancer.rollouts import SUPPORTED_DTYPES, Rollout, cheapest_to_copy

FIVE = torch.arange(5)


def test_columns_may_be_tensors_arrays_or_lists() -> None:
    rollout = sb.Rollout(
        tokens={
            "input_ids": [1, 2, 3],
            "logprobs": np.zeros(3, dtype=np.float32),
            "loss_mask": torch.tensor([0, 1, 1]),
        },
        scalars={"advantage": np.float64(0.5), "reward": torch.tensor(2)},
    )
    assert rollout.num_tokens == 3
    assert rollout.num_loss_tokens == 2
    assert rollout.tokens["input_ids"].dtype == torch.int64
    assert rollout.tokens["logprobs"].dtype == torch.float32
    assert dict(rollout.scalars) == {"advantage": 0.5, "reward": 2}
    assert rollout.nbytes == 3 * 8 + 3 * 4 + 3 * 8


def test_a_forked_process_names_its_rollouts_as_nobody_else() -> None:
    reading, writing = os.pipe()
    sb.Rollout(tokens={"input_ids": FIVE})
    if (child := os.fork()) == 0:
        os.write(writing, sb.Rollout(tokens={"input_ids": FIVE}).rollout_id.encode())
        os._exit(0)
    os.waitpid(child, 0)
    mine = {sb.Rollout(tokens={"input_ids": FIVE}).rollout_id for _ in range(100)}
    assert len({*mine, os.read(reading, 100).decode()}) == 101
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("versions", "version"),
    [
        ([-1, -1, 3, 3, 4], (3, 4)),
        ([-1, 7, 7, -1, 7], 7),
        ([5, 2, 4, 2, 3], (2, 5)),
        ([-1] * 5, None),
        ([0, 1, 0, 1, 0], (0, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_versions_per_token_say_how_old_a_rollout_is(versions: list[int], version: object, dtype: torch.dtype) -> None:
    tokens = {"input_ids": FIVE, "versions": torch.tensor(versions, dtype=dtype)}
    rollout = sb.Rollout(tokens=tokens)
    assert rollout.version == version
    assert rollout.min_version == min((v for v in versions if v >= 0), default=None)
    again = replace(rollout, group_id="g")
    assert (again.version, again.tokens["versions"].tolist()) == (version, versions)
    copy = rollout.padding_copy("padding-1")
    assert (copy.version, copy.tokens["versions"].dtype) == (version, dtype)


@pytest.mark.parametrize(
    ("column", "version", "says"),
    [
        (torch.ones(5), None, r"versions must be integers \[L\], not torch.float32 \[5\]"),
        (torch.ones(5, dtype=torch.bool), None, r"versions must be integers \[L\]"),
        (torch.ones(5, 1, dtype=torch.int64), None, r"versions must be integers \[L\]"),
        (torch.full((5,), 2**62), None, "versions must be an int from"),
        (torch.full((5,), 3), 4, r"versions: the column says 3, but version is 4. Leave version out where"),
        (torch.tensor([1, 2, 3, 4, 5]), (2, 5), r"versions: the column says \(1, 5\), but version is \(2, 5\)"),
    ],
)
def test_versions_per_token_that_contradict_are_refused(column: torch.Tensor, version: Any, says: str) -> None:
    with pytest.raises(sb.errors.RolloutError, match=f"rollout 'r1': {says}"):
        sb.Rollout(tokens={"input_ids": FIVE, "versions": column}, version=version, rollout_id="r1")


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_padding_copy_is_one_token_of_zeros(dtype: torch.dtype) -> None:
    columns = {"input_ids": FIVE + 7, "of": torch.ones(5, 3, 2).to(dtype), "empty": torch.ones(5, 0).to(dtype)}
    real = sb.Rollout(tokens=columns, scalars={"advantage": 2.0}, metadata={"a": [1]}, version=(1, 2), cost=3.0)
    copy = real.padding_copy("padding-1")
    assert (copy.num_tokens, copy.cost, copy.tokens.keys()) == (1, None, real.tokens.keys())
    assert (copy.scalars, copy.metadata, copy.version) == (real.scalars, real.metadata, real.version)
    for name, column in copy.tokens.items():
        assert (column.dtype, column.shape) == (columns[name].dtype, (1, *columns[name].shape[1:]))
        assert not column.to(torch.float32).any()


def test_images_are_copied_with_the_tokens_that_stand_for_them() -> None:
    real = sb.Rollout(tokens={"input_ids": FIVE, "loss_mask": torch.ones(5)}, tensors={"pixels": torch.ones(2)})
    copy = real.padding_copy("padding-1")
    assert copy.tokens["input_ids"].tolist() == FIVE.tolist()
    assert copy.tensors.keys() == {"pixels"}
    assert (copy.tokens["loss_mask"].sum(), copy.num_loss_tokens) == (0, 0)


def test_the_rollout_without_images_is_copied_if_there_is_one() -> None:
    image = {"pixels": torch.ones(2)}
    short, long = (sb.Rollout(tokens={"input_ids": FIVE[:n]}, tensors=image) for n in (1, 4))
    plain = sb.Rollout(tokens={"input_ids": FIVE})
    assert cheapest_to_copy([long, short]) is short
    assert cheapest_to_copy([short, plain, sb.Rollout(tokens={"input_ids": FIVE})]) is plain


def test_reprs_are_short_and_telling() -> None:
    rollout = sb.Rollout(tokens={"input_ids": FIVE}, rollout_id="r1", group_id="g", version=3)
    assert repr(rollout) == "Rollout('r1', num_tokens=5, columns=['input_ids'], group_id='g', version=3)"
    assert repr(sb.rollouts.MicroBatch.of([rollout])) == "MicroBatch(num_rollouts=1, num_tokens=5)"


IDS = torch.arange(3)


def made(**given: Any) -> Rollout:
    return Rollout(**{"tokens": {"input_ids": IDS}, **given})


@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        ("metadata", {"a": np.float64(0.5), "b": np.float32(0.25)}, {"a": 0.5, "b": 0.25}),
        ("metadata", {"a": np.float16(0.5), "b": np.int8(3)}, {"a": 0.5, "b": 3}),
        ("metadata", {"a": np.bool_(True), "b": np.str_("n")}, {"a": True, "b": "n"}),
        ("metadata", {"a": np.bytes_(b"n"), "b": Raw(b"r")}, {"a": b"n", "b": b"r"}),
        ("metadata", {np.str_("a"): 1, Text("b"): Text("t")}, {"a": 1, "b": "t"}),
        ("metadata", {"a": Number(1.5), "b": Whole(3)}, {"a": 1.5, "b": 3}),
        ("metadata", {"a": Colour.RED, "b": Level.LOW}, {"a": "red", "b": 1}),
        ("metadata", {"a": (1, (2,)), "b": OrderedDict(c=1)}, {"a": [1, [2]], "b": {"c": 1}}),
        ("metadata", MappingProxyType({"a": 1}), {"a": 1}),
        ("scalars", {np.str_("a"): np.float32(0.5)}, {"a": 0.5}),
        ("scalars", {"a": Number(0.5), "b": np.int64(3), "c": True}, {"a": 0.5, "b": 3, "c": True}),
        ("scalars", {"a": torch.tensor([2.0]), "b": np.uint8(2)}, {"a": 2.0, "b": 2}),
        ("cost", 2**70, 2.0**70),
        ("rollout_id", np.str_("r"), "r"),
        ("rollout_id", Text("r"), "r"),
        ("rollout_id", "nul\0", "nul\0"),
        ("group_id", Colour.RED, "red"),
        ("version", np.int64(3), 3),
        ("version", (Level.LOW, np.int32(2)), (1, 2)),
        ("cost", np.float32(0.5), 0.5),
        ("cost", 3, 3.0),
        ("cost", 1e100, 1e100),
        ("is_padding", np.bool_(False), False),
    ],
)
def test_what_has_an_obvious_meaning_becomes_the_plain_value(field: str, value: object, plain: object) -> None:
    rollout = made(**{field: value})
    assert bits(getattr(rollout, field)) == bits(plain)
    for way in WAYS:
        assert all_of(way(rollout)) == all_of(rollout), way


def test_tensors_of_every_kind_become_plain_ones() -> None:
    tensors = {
        "negative": torch.imag(torch.ones(3, dtype=torch.complex64).conj()),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "result": torch.ones(3, requires_grad=True) * 2,
        "expanded": torch.ones(1).expand(3),
        "strided": torch.arange(6)[::2],
        "number": torch.tensor(2.0),
        "empty": torch.empty(0, 5),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    rollout = made(tokens={"input_ids": IDS, np.str_("a"): torch.ones(3)}, tensors=tensors)
    assert list(map(type, rollout.tokens)) == [str, str]
    assert {type(tensor) for tensor in rollout.tensors.values()} == {torch.Tensor}
    assert rollout.tensors["negative"].tolist() == [-0.0] * 3
    for way in WAYS:
        assert all_of(way(rollout)) == all_of(rollout), way


def columns(count: int) -> dict[str, Any]:
    return {"input_ids": IDS} | {f"c{n}": IDS for n in range(count - 1)}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tokens": {}}, "column 'input_ids'"),
        ({"tokens": {"input_ids": torch.empty(0, dtype=torch.int64)}}, "no tokens"),
        ({"tokens": {"input_ids": []}}, "no tokens"),
        ({"tokens": {"input_ids": torch.zeros(3)}}, "must be integers"),
        ({"scalars": {"advantage": np.zeros(3)}}, "must be one number"),
        ({"tokens": {"input_ids": IDS, "x": torch.tensor(1)}}, "Per-token columns"),
        ({"tokens": {"input_ids": IDS, "x": ["a"] * 3}}, "cannot become a tensor"),
        ({"tokens": {"input_ids": IDS, "loss_mask": torch.ones(3, 2)}}, "loss_mask must be"),
        ({"scalars": {"advantage": "high"}}, "must be a number"),
        ({"tensors": {"pixels": object()}}, "cannot become a tensor"),
        ({"group_id": ""}, "group_id must be"),
        ({"version": (3, 2)}, "version must be"),
        ({"metadata": [("a", 1)]}, "metadata must be a mapping"),
        ({"metadata": None}, "metadata must be a mapping"),
        ({"metadata": {"a": {"b": ["\ud800"]}}}, r"metadata\['a'\]\['b'\]\[0\] .* UTF-8"),
        ({"metadata": {"a": {b"b": 1}}}, r"metadata\['a'\]\[b'b'\] is a bytes; keys must be str"),
        ({"metadata": {"a": np.complex64(1)}}, r"metadata\['a'\] is a complex64"),
        ({"metadata": {"a": np.datetime64(1, "ns")}}, r"metadata\['a'\] is a datetime64"),
        ({"metadata": {"a": np.timedelta64(1, "ns")}}, r"metadata\['a'\] is a timedelta64"),
        ({"metadata": {"a": np.uint64(2**63)}}, r"metadata\['a'\] .* 64 bits"),
        ({"metadata": {"a": 10**5000}}, r"metadata\['a'\] .* 64 bits"),
        ({"metadata": deep(65)}, "nested more than 64 deep"),
        ({"metadata": looped()}, "contains itself"),
        ({"metadata": {"a": np.zeros(2)}}, r"metadata\['a'\] is a ndarray"),
        ({"scalars": {"a": 10**400}}, r"scalars\['a'\] .* 64 bits"),
        ({"scalars": {"a": None}}, r"scalars\['a'\] must be a number, not NoneType"),
        ({"scalars": {"a": torch.zeros(1, device="meta")}}, r"scalars\['a'\] must be one number"),
        ({"scalars": {"advantage": math.nan}}, r"scalars\['advantage'\] is NaN, .* Drop the rollout"),
        ({"scalars": {"advantage": torch.tensor(math.nan)}}, r"scalars\['advantage'\] is NaN"),
        ({"tokens": {"input_ids": IDS[None]}}, r"input_ids must be integers \[L\].* Use ids\[0\]"),
        ({"tokens": {"input_ids": IDS, "attention_mask": IDS}}, r"attention_mask has zeros.* column\[attention_mask"),
        ({"tokens": {"input_ids": IDS}, "scalars": {"input_ids": 1}}, "are both token columns and scalars"),
        ({"scalars": {7: 1.0}}, r"scalars\[7\] must be a non-empty str, not 7"),
        ({"scalars": None}, "scalars must be a mapping"),
        ({"tensors": {"": IDS}}, r"tensors\[''\] must be a non-empty str"),
        ({"tensors": {"x" * 513: IDS}}, r"tensors\['xxx.* at most 512"),
        ({"tensors": {"a": torch.zeros(2, device="meta")}}, r"tensors\['a'\] has no memory"),
        ({"tensors": {"a": torch.zeros(0, device="meta")}}, r"tensors\['a'\] has no memory"),
        ({"tensors": {"a": fake_tensor()}}, r"tensors\['a'\] is a FakeTensor"),
        ({"tensors": {"a": freed_tensor()}}, r"tensors\['a'\] has no memory"),
        ({"tensors": {"a": torch.zeros((1,) * 33)}}, r"tensors\['a'\] has 33 dimensions"),
        ({"tensors": {"a": torch.zeros(1).expand(2**49)}}, r"tensors\['a'\] has shape .* 2\*\*48"),
        ({"tensors": {"a": torch.empty(2**60, 0)}}, r"tensors\['a'\] has shape .* 2\*\*48"),
        ({"tensors": {"a": torch.zeros(2, dtype=torch.uint16)}}, r"tensors\['a'\] has dtype torch.uint16"),
        ({"tensors": {"a": torch.zeros(2).to_sparse()}}, r"tensors\['a'\] .*to_dense"),
        ({"tokens": [("input_ids", IDS)]}, "tokens must be a mapping"),
        ({"tokens": {"input_ids": IDS, "\ud800": IDS}}, r"tokens\['.*'\] .* UTF-8"),
        ({"tokens": {"input_ids": IDS, 7: IDS}}, r"tokens\[7\] must be a non-empty str, not 7"),
        ({"tokens": columns(1025)}, "1025 token columns; at most 1024"),
        ({"rollout_id": "padding-0-1-0"}, "rollout_id must not begin with 'padding-'"),
        ({"rollout_id": b"r"}, "rollout_id must be a non-empty str"),
        ({"version": True}, "version must be an int"),
        ({"version": 2**63}, r"version must be an int from -2\*\*62 to 2\*\*62"),
        ({"version": (False, True)}, "version must be an int"),
        ({"version": (1, 2, 3)}, "version must be an int or"),
        ({"version": 1.0}, "version must be an int"),
        ({"cost": math.nan}, "cost must be a finite number"),
        ({"cost": 10**400}, "cost must be a finite number"),
        ({"cost": 1e101}, "cost must be a finite number"),
        ({"cost": "1"}, "cost must be a number"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_could_not_travel_is_refused_where_it_is_made(given: dict[str, Any], names: str) -> None:
    with pytest.raises(RolloutError, match=names):
        made(**given)


def test_limits_are_inclusive() -> None:
    rollout = made(
        tokens=columns(1024),
        tensors={"x" * 512: torch.zeros((1,) * 32)},
        metadata=deep(64) | {"n": [2**63 - 1, -(2**63)]},
        version=(-(2**62), 2**62 - 1),
    )
    for way in WAYS:
        assert all_of(way(rollout)) == all_of(rollout), way


@pytest.mark.parametrize("costs", [[1e100] * 8, [1e100, 5e-324, 0.0, 1.0] * 2, [5e-324] * 8, [0.0] * 8])
@pytest.mark.parametrize("policy", ["window", "fifo", "round_robin"])
def test_costs_of_any_size_are_planned_with(costs: list[float], policy: Any) -> None:
    window = 8 if policy == "window" else 4
    with sb.blocking(
        sb.BalancerConfig(
            dp_size=2,
            batch_size=4,
            window=window,
            policy=policy,
            micro_batches=sb.MicroBatches(max_tokens=6),
            sync="step",
        )
    ) as balancer:
        for cost in costs:
            balancer.put(made(cost=cost))
        balancer.end()
        for batch in balancer.batches():
            assert np.isfinite([*batch.loads, batch.lower_bound, batch.imbalance]).all()
        idle_fraction = balancer.statistics().idle_fraction
        assert idle_fraction is None if not any(costs) else np.isfinite(idle_fraction)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(fields())
def test_whatever_is_accepted_survives_every_way_it_can_go(given: dict[str, Any]) -> None:
    survives(given)


def survives(given: dict[str, Any]) -> Rollout | None:
    """The rollout, after all ways; None if it was refused."""
    try:
        rollout = Rollout(**given)
    except RolloutError:
        return None
    before = all_of(rollout)
    for way in WAYS:
        assert all_of(way(rollout)) == before, way
    return rollout
