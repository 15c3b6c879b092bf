"""verl's batches in and out: a round trip changes nothing, whatever the shapes, dtypes and paddings."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("verl")

from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list
from verl.workers.utils.padding import left_right_2_no_padding

import stream_balancer as sb
from stream_balancer.integrations.verl import (
    dataproto_from_share,
    rollouts_from_dataproto,
    rollouts_from_tensordict,
    tensordict_from_share,
)
from stream_balancer.testing.scripted import rank_batch
from stream_balancer.types import SUPPORTED_DTYPES
from stream_balancer.wire import rank_batch as wire

slow = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
FLOATS = [dtype for dtype in SUPPORTED_DTYPES if dtype.is_floating_point]


def same(one: Any, other: Any) -> bool:
    """Equal in types, dtypes, shapes and values, all the way down."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.dtype != other.dtype or one.is_nested != other.is_nested:
            return False
        if one.is_nested:
            dims = [getattr(nested, "_ragged_idx", 1) for nested in (one, other)]
            return dims[0] == dims[1] and same(one.offsets(), other.offsets()) and same(one.values(), other.values())
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        if not isinstance(other, np.ndarray) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        pairs = zip(one.ravel(), other.ravel(), strict=True)
        return all(same(a, b) for a, b in pairs) if one.dtype == object else np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def same_proto(one: DataProto, other: DataProto) -> bool:
    return (
        same(dict(one.batch.items()), dict(other.batch.items()))
        and one.batch.batch_size == other.batch.batch_size
        and same(one.non_tensor_batch, other.non_tensor_batch)
        and same(one.meta_info, other.meta_info)
    )


def through_the_wire(rollouts: list[sb.Rollout]) -> list[sb.Rollout]:
    """As a rank gets them: one share, to bytes and back."""
    return list(sent(rank_batch(rollouts)).rollouts)


def sent(share: sb.RankBatch) -> sb.RankBatch:
    encoded = wire.encode(share)
    buffer = torch.empty(encoded.message.total_bytes, dtype=torch.uint8)
    for _ in encoded.fill(buffer):
        pass
    return wire.decode(encoded.message, buffer)


# ---------------------------------------------------------------------------------------------------------------------
# Batches of every kind
# ---------------------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text("ab$", max_size=2)
objects = st.recursive(
    scalars
    | st.binary(max_size=2)
    | st.sampled_from([np.int64(3), np.float32(0.1), np.bool_(True), np.str_("x")])
    | st.sampled_from([np.arange(3), np.ones((2, 2), np.float16), np.array(["a", "bb"]), np.zeros(2, np.uint16)])
    | st.sampled_from([torch.arange(4), torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor(1)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("xy$", max_size=2) | st.integers(0, 3), inner, max_size=2)
    ),
    max_leaves=5,
)


def array_of(items: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


@st.composite
def non_tensors(draw: Any, n: int) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {
        "uid": array_of([f"u{draw(st.integers(0, 2))}" for _ in range(n)]),
        "anything": array_of([draw(objects) for _ in range(n)]),
        "matrix": array_of([draw(scalars) for _ in range(2 * n)]).reshape(n, 2),
        "index": np.arange(n, dtype=draw(st.sampled_from([np.int32, np.int64, np.uint16, np.float32]))),
        "flags": np.arange(n) % 2 == 0,
        "names": np.array([f"{'x' * (i % 3)}" for i in range(n)]),
        "table": np.arange(3 * n, dtype=np.float64).reshape(n, 3),
    }
    return {name: arrays[name] for name in draw(st.sets(st.sampled_from(sorted(arrays))))}


meta_infos = st.dictionaries(st.sampled_from(["temperature", "eos", "timing"]), scalars | st.lists(scalars, max_size=2))


def random_column(draw: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def fill(rows: Tensor, keep: Tensor, value: float) -> Tensor:
    rows[~keep] = value
    return rows


@st.composite
def dataprotos(draw: Any) -> DataProto:
    """Prompts left-padded, responses right-padded, some rows odd; or input_ids alone, padded on any side."""
    n = draw(st.integers(1, 5))
    prompt, response = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    if prompt + response == 0:
        prompt = 1
    width = prompt + response
    starts, ends = [], []
    for _ in range(n):
        start = draw(st.integers(0, width - 1))
        starts.append(start)
        ends.append(draw(st.integers(start + 1, width)))
    place = torch.arange(width)
    mask = (place >= torch.tensor(starts)[:, None]) & (place < torch.tensor(ends)[:, None])
    pad = draw(st.integers(0, 3))

    def sequence(dtype: torch.dtype, *trailing: int, left: float = 0, right: float = 0) -> Tensor:
        column = random_column(draw, (n, width, *trailing), dtype)
        return fill(fill(column, mask | (place >= torch.tensor(starts)[:, None]), left), mask | ~mask_after(), right)

    def mask_after() -> Tensor:
        return place >= torch.tensor(ends)[:, None]

    ids = sequence(draw(st.sampled_from([torch.int64, torch.int32])), left=pad, right=draw(st.sampled_from([0, pad])))
    tensors = {
        "input_ids": ids,
        "attention_mask": mask.to(draw(st.sampled_from([torch.int64, torch.bool, torch.float32, torch.int8]))),
    }
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    kind = draw(st.sampled_from(["none", "repeat", "count", "constant", "multimodal"]))
    if kind == "repeat":
        tensors["position_ids"] = positions
    elif kind == "count":
        tensors["position_ids"] = torch.where(
            place >= torch.tensor(starts)[:, None], place - torch.tensor(starts)[:, None], 0
        )
    elif kind == "constant":
        tensors["position_ids"] = positions * mask
    elif kind == "multimodal":
        tensors["position_ids"] = sequence(torch.int64, 3, left=1, right=1).movedim(2, 1).contiguous()
    if draw(st.booleans()):
        tensors["experts"] = sequence(torch.uint8, 2)
    if response and draw(st.integers(0, 4)):
        tensors["responses"] = ids[:, prompt:].clone()
        tensors["prompts"] = ids[:, :prompt].clone()
        if draw(st.booleans()):  # of another dtype, so not a part of input_ids
            tensors["responses"] = tensors["responses"].to(torch.int16)
        keep = mask[:, prompt:]
        tensors["response_mask"] = random_column(draw, (n, response), torch.int64) % 2 * keep
        for name in draw(st.sets(st.sampled_from(["old_log_probs", "advantages", "rm_scores", "loss_mask"]))):
            dtype = torch.int64 if name == "loss_mask" else draw(st.sampled_from(FLOATS))
            tensors[name] = fill(random_column(draw, (n, response), dtype), keep, draw(st.sampled_from([0, 1.5, -1])))
    for name, shape in {"reward": (), "grid": (17, 3), "flag": (19,)}.items():
        if draw(st.booleans()):
            tensors[name] = random_column(draw, (n, *shape), draw(st.sampled_from(SUPPORTED_DTYPES)))
    return DataProto.from_dict(tensors, draw(non_tensors(n)), meta_info=draw(meta_infos))


# ---------------------------------------------------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------------------------------------------------


@slow
@given(dataprotos(), st.booleans())
def test_a_dataproto_comes_back_as_it_was(data: DataProto, over_the_wire: bool) -> None:
    rollouts = rollouts_from_dataproto(data)
    lengths = data.batch["attention_mask"].sum(1).long().tolist()
    assert [one.num_tokens for one in rollouts] == lengths
    if over_the_wire:
        rollouts = through_the_wire(rollouts)
    assert same_proto(dataproto_from_share(rollouts), data)


@slow
@given(dataprotos(), st.randoms(use_true_random=False))
def test_any_part_of_a_dataproto_in_any_order(data: DataProto, random: Any) -> None:
    some = random.choices(range(len(data)), k=random.randint(1, 6))
    some = sorted(set(some), key=some.index)
    rollouts = rollouts_from_dataproto(data)
    assert same_proto(dataproto_from_share([rollouts[i] for i in some]), data[some])


def tiny(prompts: list[int], responses: list[int], prompt: int = 4, response: int = 5, first: int = 100) -> DataProto:
    """Row i has the tokens first + 10 i, ...; log probabilities are the tokens negated."""
    n = len(prompts)
    ids, mask = (
        torch.zeros(n, prompt + response, dtype=torch.int64),
        torch.zeros(n, prompt + response, dtype=torch.int64),
    )
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, prompt - p : prompt + r] = first + 10 * row + torch.arange(p + r)
        mask[row, prompt - p : prompt + r] = 1
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, :prompt].clone(),
            "responses": ids[:, prompt:].clone(),
            "response_mask": mask[:, prompt:].clone(),
            "rollout_log_probs": -ids[:, prompt:].float(),
        },
        {"uid": np.array([f"u{first}"] * n, dtype=object)},
        meta_info={"temperature": 1.0, "timing": {"gen": float(first)}},
    )


def test_what_a_rollout_looks_like() -> None:
    first, second = rollouts_from_dataproto(tiny([2, 3], [3, 1]))
    assert first.tokens["input_ids"].tolist() == [100, 101, 102, 103, 104]
    assert first.tokens["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    assert first.tokens["rollout_log_probs"].tolist() == [0, 0, -102, -103, -104]
    assert sorted(first.tokens) == ["input_ids", "loss_mask", "position_ids", "rollout_log_probs"]
    assert (first.num_loss_tokens, second.num_loss_tokens) == (3, 1)
    assert (first.group_id, second.group_id) == ("u100", "u100")
    assert first.version is None


def test_versions_come_from_verls_steps() -> None:
    data = tiny([2, 3], [3, 1])
    data.non_tensor_batch["min_global_steps"] = np.array([3, None], dtype=object)
    data.non_tensor_batch["max_global_steps"] = np.array([5, None], dtype=object)
    assert [one.version for one in rollouts_from_dataproto(data)] == [(3, 5), None]


def test_rollouts_of_several_batches_meet_in_one() -> None:
    narrow, wide = tiny([1, 2], [2, 1], prompt=2, response=2), tiny([3], [4], prompt=6, response=4, first=500)
    merged = dataproto_from_share([*rollouts_from_dataproto(narrow), *rollouts_from_dataproto(wide)])
    assert merged.batch["prompts"].tolist() == [[0] * 5 + [100], [0] * 4 + [110, 111], [0, 0, 0, 500, 501, 502]]
    assert merged.batch["responses"].tolist() == [[101, 102, 0, 0], [112, 0, 0, 0], [503, 504, 505, 506]]
    assert merged.batch["attention_mask"].sum(1).tolist() == [3, 3, 7]
    assert merged.meta_info == {"temperature": 1.0}  # they did not agree on "timing"
    given = dataproto_from_share(
        rollouts_from_dataproto(narrow), prompt_length=5, response_length=7, meta_info={"a": 1}
    )
    assert given.batch["input_ids"].shape == (2, 12)
    assert given.batch["responses"].shape == (2, 7)
    assert given.meta_info == {"a": 1}
    with pytest.raises(ValueError, match=r"prompt_length \(1\) is smaller than the 2 tokens of a rollout"):
        dataproto_from_share(rollouts_from_dataproto(narrow), prompt_length=1)


def test_padding_copies_have_no_response() -> None:
    data = tiny([2], [3])
    data.batch["loss_mask"] = data.batch["response_mask"].clone()
    (rollout,) = rollouts_from_dataproto(data)
    back = dataproto_from_share([rollout, rollout.padding_copy("copy")])
    assert back.batch["response_mask"].tolist() == [[1, 1, 1, 0, 0], [0] * 5]
    assert back.batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0], [0] * 5]
    assert back.batch["attention_mask"].sum(1).tolist() == [5, 2]  # a prompt and a response of one token
    jagged = tensordict_from_share([rollout.padding_copy("copy")])
    assert [jagged[name].offsets().tolist() for name in ("prompts", "responses")] == [[0, 1], [0, 1]]


async def test_through_a_balancer_and_onto_ranks() -> None:
    batches = [tiny([1, 2, 3, 4], [5, 1, 4, 2], first=1000 * k) for k in range(1, 5)]
    config = sb.BalancerConfig(dp_size=2, batch_size=8, max_tokens_per_micro_batch=16)
    rows = {}
    async with sb.StreamBalancer(config) as balancer, anyio.create_task_group() as tasks:

        async def put() -> None:
            for data in batches:
                for rollout in rollouts_from_dataproto(data):
                    await balancer.put(rollout)
            balancer.end()

        tasks.start_soon(put)
        async for batch in balancer.batches():
            for share in batch.ranks:
                data = dataproto_from_share(sent(share))
                for index in range(len(data)):
                    first = int(data.batch["input_ids"][index].max())
                    rows[first] = data[[index]]
    expected = {int(one.batch["input_ids"].max()): one for data in batches for one in data.split(1)}
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert same(dict(row.batch.items()), dict(expected[key].batch.items()))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def test_what_cannot_become_rollouts_is_refused() -> None:
    data = tiny([2, 1], [3, 3])
    with pytest.raises(ValueError, match="needs 'input_ids' and 'attention_mask'"):
        rollouts_from_dataproto(data.select(batch_keys=["input_ids"]))
    hole = data[[0, 1]]
    hole.batch["attention_mask"][0, 4] = 0
    with pytest.raises(ValueError, match="row 0 has a hole"):
        rollouts_from_dataproto(hole)
    packed = data[[0, 1]]
    packed.batch["attention_mask"][0, 4] = 2
    with pytest.raises(ValueError, match="attention_mask must be 0 or 1"):
        rollouts_from_dataproto(packed)
    strange = data[[0, 1]]
    strange.non_tensor_batch["anything"] = np.array([object(), 1], dtype=object)
    with pytest.raises(sb.RolloutError, match="is a object, which cannot travel"):
        rollouts_from_dataproto(strange)
    with pytest.raises(ValueError, match="there is no rollout"):
        dataproto_from_share([])
    with pytest.raises(ValueError, match="was not made of a verl batch"):
        dataproto_from_share([sb.Rollout(tokens={"input_ids": [1]})])
    other = data.select(batch_keys=["input_ids", "attention_mask"])
    with pytest.raises(ValueError, match="batches with different fields"):
        dataproto_from_share([*rollouts_from_dataproto(data), *rollouts_from_dataproto(other)])


def test_values_under_padding_are_not_dropped_in_silence() -> None:
    data = tiny([2, 1], [3, 3])
    data.batch["values"] = torch.arange(10.0).reshape(2, 5)
    with pytest.raises(ValueError, match=r"pass whole=\['values'\]"):
        rollouts_from_dataproto(data)
    assert same_proto(dataproto_from_share(rollouts_from_dataproto(data, whole=["values"])), data)


def test_a_rollout_does_not_keep_its_batch_alive() -> None:
    (rollout, _) = rollouts_from_dataproto(tiny([2, 1], [3, 3]))
    for column in rollout.tokens.values():
        assert column.untyped_storage().nbytes() == column.nbytes


# ---------------------------------------------------------------------------------------------------------------------
# Jagged
# ---------------------------------------------------------------------------------------------------------------------


def jagged(parts: list[Tensor], ragged_idx: int = 1) -> Tensor:
    return nested_tensor_from_tensor_list(parts, ragged_idx=ragged_idx)


@st.composite
def tensordicts(draw: Any) -> TensorDict:
    n = draw(st.integers(1, 5))
    prompts = [draw(st.integers(0, 4)) for _ in range(n)]
    responses = [draw(st.integers(1 if p == 0 else 0, 4)) for p in prompts]
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]

    def columns(lengths: list[int], dtype: torch.dtype, *trailing: int) -> list[Tensor]:
        return [random_column(draw, (length, *trailing), dtype) for length in lengths]

    ids = columns(whole, draw(st.sampled_from([torch.int64, torch.int32])))
    fields: dict[str, Any] = {"input_ids": jagged(ids)}
    split = draw(st.sampled_from(["both", "both", "responses", "neither"]))
    if split != "neither":
        fields["responses"] = jagged([one[p:].clone() for one, p in zip(ids, prompts, strict=True)])
        fields["response_mask"] = jagged(columns(responses, torch.int64))
        for name in draw(st.sets(st.sampled_from(["rm_scores", "loss_mask", "old_log_probs"]))):
            fields[name] = jagged(
                columns(responses, torch.int64 if name == "loss_mask" else draw(st.sampled_from(FLOATS)))
            )
    if split == "both":
        fields["prompts"] = jagged([one[:p].clone() for one, p in zip(ids, prompts, strict=True)])
        if draw(st.booleans()):
            fields["prompts"] = jagged(columns(prompts, torch.int16))
    if draw(st.booleans()):
        multimodal = draw(st.booleans())
        positions = [
            torch.arange(length).expand(3, length).clone() if multimodal else torch.arange(length) for length in whole
        ]
        fields["position_ids"] = jagged(positions, 2 if multimodal else 1)
    if draw(st.booleans()):
        fields["other"] = jagged(columns([draw(st.integers(0, 3)) for _ in range(n)], torch.float32, 2))
    if draw(st.booleans()):
        fields["reward"] = random_column(draw, (n, 2), draw(st.sampled_from(SUPPORTED_DTYPES)))
    data = TensorDict(fields, batch_size=[n])
    if draw(st.booleans()):
        data["extra"] = NonTensorStack.from_list([NonTensorData(draw(objects)) for _ in range(n)])
    for name, value in draw(meta_infos).items():
        data[name] = NonTensorData(value)
    return data


def plain(data: TensorDict) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, NonTensorStack):
            return ["stack", *(item.data for item in value)]
        return ["data", value.data] if isinstance(value, NonTensorData) else value

    return {name: one(value) for name, value in data.items()}


@slow
@given(tensordicts(), st.booleans())
def test_a_jagged_tensordict_comes_back_as_it_was(data: TensorDict, over_the_wire: bool) -> None:
    rollouts = rollouts_from_tensordict(data)
    if over_the_wire:
        rollouts = through_the_wire(rollouts)
    back = tensordict_from_share(rollouts)
    assert back.batch_size == data.batch_size
    assert same(plain(back), plain(data))


def test_padded_in_jagged_out_is_what_verl_makes_of_it() -> None:
    data = tiny([2, 4, 1], [3, 0, 5])
    theirs = left_right_2_no_padding(data.to_tensordict())
    ours = tensordict_from_share(rollouts_from_dataproto(data))
    for name in ("input_ids", "position_ids"):
        assert same(ours[name].values(), theirs[name].values())
        assert ours[name].offsets().tolist() == theirs[name].offsets().tolist()
    assert ours["responses"].offsets().diff().tolist() == [3, 0, 5]
    assert list(ours["uid"]) == ["u100"] * 3


def test_jagged_in_padded_out() -> None:
    rows = [torch.arange(5), torch.arange(3)]
    data = TensorDict(
        {
            "input_ids": jagged(rows),
            "prompts": jagged([rows[0][:2].clone(), rows[1][:1].clone()]),
            "responses": jagged([rows[0][2:].clone(), rows[1][1:].clone()]),
        },
        batch_size=[2],
    )
    back = dataproto_from_share(rollouts_from_tensordict(data))
    assert back.batch["prompts"].tolist() == [[0, 1], [0, 0]]
    assert back.batch["responses"].tolist() == [[2, 3, 4], [1, 2, 0]]
    assert back.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]


def test_a_tensordict_without_jagged_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="needs jagged 'input_ids'"):
        rollouts_from_tensordict(TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=[2]))
    data = TensorDict({"input_ids": jagged([torch.arange(3)]), "prompts": jagged([torch.arange(1)])}, batch_size=[1])
    data["responses"] = jagged([torch.arange(1)])
    with pytest.raises(ValueError, match="are not as long as input_ids"):
        rollouts_from_tensordict(data)
