"""Rollouts are checked where they are made; batches say what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stream_balancer as sb
from stream_balancer.types import SUPPORTED_DTYPES, cheapest_to_copy

IDS = torch.arange(5)


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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": {}}, "column 'input_ids'"),
        ({"tokens": {"input_ids": torch.empty(0, dtype=torch.int64)}}, "no tokens"),
        ({"tokens": {"input_ids": torch.zeros(3)}}, "must be integers"),
        ({"scalars": {"advantage": np.zeros(3)}}, "must be one number"),
        ({"tokens": {"input_ids": torch.zeros(3, 1, dtype=torch.int64)}}, "must be integers"),
        ({"tokens": {"input_ids": IDS, "x": torch.tensor(1)}}, "Per-token columns"),
        ({"tokens": {"input_ids": IDS, "x": ["a"] * 5}}, "cannot become a tensor"),
        ({"tokens": {"input_ids": IDS, "loss_mask": torch.ones(5, 2)}}, "loss_mask must be"),
        ({"scalars": {"advantage": "high"}}, "must be a number"),
        ({"tensors": {"pixels": object()}}, "cannot become a tensor"),
        ({"rollout_id": ""}, "non-empty str"),
        ({"group_id": ""}, "group_id must be"),
        ({"version": (3, 2)}, "version must be"),
        ({"cost": -1.0}, "cost must be"),
        ({"group_id": "g", "prefix": 5}, "prefix must be from 0 to 4, not 5: of 5 tokens"),
        ({"group_id": "g", "prefix": -1}, "prefix must be from 0"),
        ({"group_id": "g", "prefix": 2**70}, "prefix must be from 0"),
        ({"group_id": "g", "prefix": True}, "prefix must be an int, not True"),
        ({"prefix": 2}, "prefix is 2, but there is no group_id"),
    ],
)
def test_a_bad_rollout_says_what_and_why(fields: dict[str, object], says: str) -> None:
    with pytest.raises(sb.errors.RolloutError, match=says):
        sb.Rollout(**{"tokens": {"input_ids": IDS}, **fields})  # type: ignore[arg-type]


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
    tokens = {"input_ids": IDS, "versions": torch.tensor(versions, dtype=dtype)}
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
        sb.Rollout(tokens={"input_ids": IDS, "versions": column}, version=version, rollout_id="r1")


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_padding_copy_is_one_token_of_zeros(dtype: torch.dtype) -> None:
    columns = {"input_ids": IDS + 7, "of": torch.ones(5, 3, 2).to(dtype), "empty": torch.ones(5, 0).to(dtype)}
    real = sb.Rollout(tokens=columns, scalars={"advantage": 2.0}, metadata={"a": [1]}, version=(1, 2), cost=3.0)
    copy = real.padding_copy("padding-1")
    assert (copy.num_tokens, copy.cost, copy.tokens.keys()) == (1, None, real.tokens.keys())
    assert (copy.scalars, copy.metadata, copy.version) == (real.scalars, real.metadata, real.version)
    for name, column in copy.tokens.items():
        assert (column.dtype, column.shape) == (columns[name].dtype, (1, *columns[name].shape[1:]))
        assert not column.to(torch.float32).any()


def test_images_are_copied_with_the_tokens_that_stand_for_them() -> None:
    real = sb.Rollout(tokens={"input_ids": IDS, "loss_mask": torch.ones(5)}, tensors={"pixels": torch.ones(2)})
    copy = real.padding_copy("padding-1")
    assert copy.tokens["input_ids"].tolist() == IDS.tolist()
    assert copy.tensors.keys() == {"pixels"}
    assert (copy.tokens["loss_mask"].sum(), copy.num_loss_tokens) == (0, 0)


def test_the_rollout_without_images_is_copied_if_there_is_one() -> None:
    image = {"pixels": torch.ones(2)}
    short, long = (sb.Rollout(tokens={"input_ids": IDS[:n]}, tensors=image) for n in (1, 4))
    plain = sb.Rollout(tokens={"input_ids": IDS})
    assert cheapest_to_copy([long, short]) is short
    assert cheapest_to_copy([short, plain, sb.Rollout(tokens={"input_ids": IDS})]) is plain


def test_reprs_are_short_and_telling() -> None:
    rollout = sb.Rollout(tokens={"input_ids": IDS}, rollout_id="r1", group_id="g", version=3)
    assert repr(rollout) == "Rollout('r1', num_tokens=5, columns=['input_ids'], group_id='g', version=3)"
    assert repr(sb.types.MicroBatch.of([rollout])) == "MicroBatch(num_rollouts=1, num_tokens=5)"
