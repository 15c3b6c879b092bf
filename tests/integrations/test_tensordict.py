"""Every field and dtype of a rollout survives a TensorDict, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from any_rollouts import rollouts
from hypothesis import given
from hypothesis import strategies as st
from scripted import same_rollout

import stream_balancer as sb
from stream_balancer.integrations.tensordict import rollouts_from, tensordict_from
from stream_balancer.testing import make_rollout, make_rollouts

tensordict = pytest.importorskip("tensordict")
TensorDict = tensordict.TensorDict


@given(rollouts(), st.sampled_from([None, "left", "right"]))
def test_every_field_survives(given_rollouts: list[sb.Rollout], side: Any) -> None:
    width = max(r.num_tokens for r in given_rollouts)
    td = tensordict_from(given_rollouts, padding_side=side, pad_values={"input_ids": 3, "logprobs": 1})
    assert td.batch_size == torch.Size([len(given_rollouts)])
    assert td["input_ids"].is_nested == (side is None)
    if side is not None:
        assert td["input_ids"].shape[1] == width
        assert (td["input_ids"][~td["attention_mask"]] == 3).all()
        assert all("logprobs" not in td or (td["logprobs"][~td["attention_mask"]] == 1).all() for _ in "1")
        beyond = td["attention_mask"][:, 0 if side == "left" else -1]
        assert beyond.tolist() == [r.num_tokens == width for r in given_rollouts]
    first = given_rollouts[0]
    back = rollouts_from(td, scalars=first.scalars.keys(), tensors=first.tensors.keys())
    assert len(back) == len(given_rollouts)
    for mine, theirs in zip(given_rollouts, back, strict=True):
        assert same_rollout(mine, theirs), (mine, theirs)
        assert mine.version == theirs.version


@given(rollouts(tensors=False))
def test_what_a_micro_batch_lays_out_is_what_comes_back(given_rollouts: list[sb.Rollout]) -> None:
    """The fast way out (``MicroBatch.tensordict()``) into here."""
    if any("loss_mask" in r.tokens and r.tokens["loss_mask"].ndim != 1 for r in given_rollouts):
        return
    td = sb.rollouts.MicroBatch.of(given_rollouts).tensordict(scalar_dtype=torch.float64)
    back = rollouts_from(td, scalars=given_rollouts[0].scalars.keys())
    for mine, theirs in zip(given_rollouts, back, strict=True):
        for name, tokens in mine.tokens.items():
            first = int(name == "loss_mask")  # nothing predicts the first token
            assert torch.equal(tokens[first:], theirs.tokens[name][first:])
            assert tokens.dtype == theirs.tokens[name].dtype
        assert dict(mine.scalars) == dict(theirs.scalars)
        assert not theirs.is_padding


def test_a_tensordict_survives() -> None:
    offsets = torch.tensor([0, 3, 5])
    td = TensorDict(
        {
            "input_ids": torch.nested.nested_tensor_from_jagged(torch.arange(5, dtype=torch.int32), offsets),
            "hidden": torch.nested.nested_tensor_from_jagged(torch.rand(5, 4).bfloat16(), offsets),
            "advantage": torch.tensor([0.5, -1.5], dtype=torch.float32),
            "image": torch.rand(2, 3, 3).half(),
            "uid": tensordict.NonTensorStack("a", "b"),
            "same": tensordict.NonTensorData("all", batch_size=[2]),
        },
        batch_size=[2],
    )
    made = rollouts_from(td, scalars=["advantage"])
    assert [r.metadata for r in made] == [{"uid": "a", "same": "all"}, {"uid": "b", "same": "all"}]
    assert [r.scalars["advantage"] for r in made] == [0.5, -1.5]
    back = tensordict_from(made, dtypes={"advantage": torch.float32})
    assert set(back.keys()) == {*td.keys(), "rollout_id"}
    assert torch.equal(back["input_ids"].offsets(), offsets)
    assert back["input_ids"].offsets() is back["hidden"].offsets()
    for name in ("input_ids", "hidden"):
        assert back[name].dtype == td[name].dtype
        assert torch.equal(back[name].values(), td[name].values())
    for name in ("advantage", "image"):
        assert back[name].dtype == td[name].dtype
        assert torch.equal(back[name], td[name])
    assert back.get("uid").tolist() == ["a", "b"]
    assert back.get("same").tolist() == ["all", "all"]


def test_padding_copies_keep_their_zero_weight() -> None:
    one = make_rollout(3, "r")
    td = tensordict_from([one, one.padding_copy("p")])
    assert td["rollout_weights"].tolist() == [1.0, 0.0]
    assert [r.is_padding for r in rollouts_from(td, scalars=["advantage"])] == [False, True]


def test_what_is_given_out_holds_no_more_memory_than_its_own() -> None:
    td = tensordict_from(list(make_rollouts([4, 2])), padding_side="right")
    for rollout in rollouts_from(td):
        for tokens in rollout.tokens.values():
            assert tokens.untyped_storage().nbytes() == tokens.nbytes


def test_tensors_of_different_shapes_become_jagged() -> None:
    made = [sb.Rollout(tokens={"input_ids": [1, 2]}, tensors={"patches": torch.rand(n, 2)}) for n in (1, 4)]
    back = rollouts_from(tensordict_from(made))
    assert all(torch.equal(a.tensors["patches"], b.tensors["patches"]) for a, b in zip(made, back, strict=True))


def padded_td(**entries: Any) -> Any:
    return TensorDict({"input_ids": torch.ones(2, 3, dtype=torch.int64), **entries}, batch_size=[2])


@pytest.mark.parametrize(
    ("td", "says"),
    [
        (lambda: padded_td(), "input_ids is padded"),
        (lambda: padded_td().expand(4, 2), "batch size must be"),
        (lambda: TensorDict({"a": torch.zeros(2)}, batch_size=[2]), "no 'input_ids' in the TensorDict"),
        (lambda: padded_td(attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])), "row 0 has a hole"),
        (lambda: padded_td(attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]])), "row 1 has no tokens"),
        (lambda: padded_td(attention_mask=torch.ones(2, 3, 1)), "an attention mask is"),
        (
            lambda: padded_td(attention_mask=torch.ones(2, 3), inner=TensorDict({}, batch_size=[2])),
            "'inner' is a TensorDict of its own",
        ),
    ],
)
def test_what_cannot_be_rollouts_is_refused(td: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rollouts_from(td())


def test_what_cannot_be_one_tensordict_is_refused() -> None:
    with pytest.raises(ValueError, match="no rollout"):
        tensordict_from([])
    short = sb.Rollout(tokens={"input_ids": [1]}, rollout_id="a")
    with pytest.raises(ValueError, match="'a' and 'b' differ in their tokens"):
        tensordict_from([short, make_rollout(2, "b")])
    small = sb.Rollout(tokens={"input_ids": torch.ones(2, dtype=torch.int32)})
    for side in (None, "left"):
        with pytest.raises(ValueError, match=r"'a' and '.*' differ in their tokens: .*int64.* and .*int32"):
            tensordict_from([short, small], padding_side=side)  # type: ignore[arg-type]
    images = [sb.Rollout(tokens={"input_ids": [1]}, tensors={"image": torch.ones(*size)}) for size in ((1, 2), (1, 3))]
    with pytest.raises(ValueError, match=r"differ in the shape of a tensor: \[\(1, 2\), \(1, 3\)\]"):
        tensordict_from(images)
