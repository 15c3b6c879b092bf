"""Shares to bytes and back; what the rank makes of them; what it copies."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given
from scripted import rank_batch, same_rollout

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.types import Denominators, RankBatch, Rollout
from stream_balancer.wire import rank_batch as wire
from stream_balancer.wire.messages import Batch
from stream_balancer.wire.rollouts import decode_rollout, encode_rollout


def carry(share: RankBatch, *, narrow: bool = True) -> tuple[RankBatch, torch.Tensor]:
    encoded = wire.encode(share, narrow=narrow)
    frame = wire.read_frame(wire.pack_frame(encoded.message))
    buffer = torch.empty(frame.total_bytes, dtype=torch.uint8)
    marks = list(encoded.fill(buffer))
    assert marks == sorted(marks)
    assert marks[-1] == frame.wire_bytes
    return wire.decode(frame, buffer), buffer


def a_share() -> RankBatch:
    return rank_batch(
        [make_rollout(5, "a", seed=1, group_id="g", version=(3, 4)), make_rollout(1, "b", seed=2)],
        [make_rollout(130, "c", seed=3, prompt_tokens=7, cost=2.5)],
        rank=1,
        dp_size=2,
        load=1.5,
        denominators=Denominators(7, 136, 136, 6),
    )


@pytest.mark.parametrize("narrow", [True, False])
def test_everything_comes_back(narrow: bool) -> None:
    sent = a_share()
    got, _ = carry(sent, narrow=narrow)
    scalar_fields = {f.name for f in dataclasses.fields(RankBatch)} - {"micro_batches"}
    assert all(getattr(got, name) == getattr(sent, name) for name in scalar_fields)
    assert [mb.lengths for mb in got.micro_batches] == [mb.lengths for mb in sent.micro_batches]
    assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, got.rollouts, strict=True))
    for ours, theirs in zip(sent.micro_batches, got.micro_batches, strict=True):
        assert torch.equal(ours.packed()["advantage"], theirs.packed()["advantage"])
        assert torch.equal(ours.padded()["input_ids"], theirs.padded()["input_ids"])


def test_every_field_of_a_rollout_is_filled() -> None:
    got, _ = carry(a_share())
    for field in dataclasses.fields(Rollout):  # a new field in types.py needs a place in wire.py
        getattr(got.rollouts[0], field.name)


def test_packed_copies_no_token_and_is_aligned() -> None:
    got, buffer = carry(a_share())
    for mb in got.micro_batches:
        for name, column in mb.packed().columns.items():
            assert column.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), name
            assert (column.data_ptr() - buffer.data_ptr()) % 64 == 0, name
    first = got.micro_batches[0].rollouts[1]
    assert first.tokens["input_ids"].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_int64_ids_travel_narrowed_where_they_fit() -> None:
    small = rank_batch([Rollout(tokens={"input_ids": torch.arange(1000)}, rollout_id="a")])
    large = rank_batch([Rollout(tokens={"input_ids": torch.arange(1000) + 2**31 - 500}, rollout_id="a")])
    lowest = rank_batch([Rollout(tokens={"input_ids": torch.tensor([-(2**31), 2**31 - 1])}, rollout_id="a")])
    assert wire.encode(small).message.wire_bytes < 4000 + 400 < 8000 < wire.encode(large).message.wire_bytes
    for share in (small, large, lowest):
        got, _ = carry(share)
        assert got.rollouts[0].tokens["input_ids"].dtype is torch.int64
        assert same_rollout(share.rollouts[0], got.rollouts[0])


def test_rollouts_are_made_once_and_lazily() -> None:
    got, _ = carry(a_share())
    rollouts = got.micro_batches[0].rollouts
    assert rollouts[0] is rollouts[-2]
    assert rollouts[0:2] == list(rollouts)
    with pytest.raises(IndexError):
        rollouts[2]


def test_padding_copies_keep_their_zero_weight() -> None:
    original = make_rollout(4, "a")
    got, _ = carry(rank_batch([original, original.padding_copy("p")]))
    packed = got.micro_batches[0].packed()
    assert packed.rollout_weights.tolist() == [1.0, 0.0]
    assert packed["loss_mask"].tolist() == [True] * 4 + [False]
    assert got.rollouts[1].is_padding


def test_rollouts_with_different_columns_are_named() -> None:
    plain, other = make_rollout(3, "plain"), Rollout(tokens={"input_ids": torch.arange(2)}, rollout_id="other")
    with pytest.raises(RolloutError, match="'other' has no column 'logprobs'"):
        wire.encode(rank_batch([plain, other]))
    with pytest.raises(RolloutError, match="'plain' has columns"):
        wire.encode(rank_batch([other, plain]))
    wide = Rollout(tokens={"input_ids": torch.arange(2, dtype=torch.int32)}, rollout_id="wide")
    with pytest.raises(RolloutError, match=r"'wide' has column 'input_ids' as torch\.int32"):
        wire.encode(rank_batch([other, wide]))


def test_a_share_that_is_too_large_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"rank 1, step 0: .*Raise max_batch_bytes"):
        wire.encode(a_share(), max_bytes=1000)


@pytest.mark.parametrize("field", ["wire_bytes", "total_bytes"])
@pytest.mark.parametrize("change", [-64, 64])
def test_the_size_that_came_must_be_the_size_described(field: str, change: int) -> None:
    encoded = wire.encode(a_share())
    buffer = torch.zeros(encoded.message.total_bytes + 64, dtype=torch.uint8)
    assert list(encoded.fill(buffer))
    odd: dict[str, Any] = {field: getattr(encoded.message, field) + change}
    with pytest.raises(WireError, match="bytes"):
        wire.decode(msgspec.structs.replace(encoded.message, **odd), buffer)


@pytest.mark.parametrize(("word", "problem"), [(0, "wrong magic"), (1, "format"), (5, "checksum")])
def test_a_damaged_frame_is_refused(word: int, problem: str) -> None:
    words = wire.pack_frame(Batch(3, 0, 1, 1, 0, 1, 1))
    words[word] += 1
    if problem == "format":  # written so, not damaged
        words[-1] = zlib.crc32(words[:-1].numpy().tobytes())
    with pytest.raises(WireError, match=problem):
        wire.read_frame(words)


def test_an_unknown_kind_and_negative_counters_are_refused() -> None:
    for position, value, problem in ((2, 99, "unknown kind"), (5, -1, "negative"), (10, -5, "negative")):
        words = wire.pack_frame(Batch(0, 0, 1, 1, 0, 1, 1))
        words[position] = value
        words[-1] = zlib.crc32(words[:-1].numpy().tobytes())
        with pytest.raises(WireError, match=problem):
            wire.read_frame(words)


@given(
    cut=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    tail=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_comes_back(cut: list[list[int]], dtype: torch.dtype, tail: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    micro_batches = [
        [
            Rollout(
                tokens={
                    "input_ids": torch.randint(0, 100, (length,), generator=generator).to(dtype),
                    "extra": torch.randn(length, *tail, generator=generator).to(torch.bfloat16),
                },
                rollout_id=f"{m}.{i}",
            )
            for i, length in enumerate(lengths)
        ]
        for m, lengths in enumerate(cut)
    ]
    sent = rank_batch(*micro_batches)
    got, _ = carry(sent)
    assert all(same_rollout(a, b) for a, b in zip(sent.rollouts, got.rollouts, strict=True))


def test_pieces_of_one_rollout_are_its_buffer_uncopied() -> None:
    rollout = Rollout(
        tokens={"input_ids": torch.arange(7), "hidden": torch.rand(3, 7).T, "none": torch.zeros(7, 0)},
        tensors={"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)},
        metadata={"a": "b" * 77},
    )
    encoded = encode_rollout(rollout)
    buffer = torch.zeros(encoded.header.wire_bytes, dtype=torch.uint8)
    assert list(encoded.fill(buffer))[-1] == buffer.numel()
    pieces = encoded.pieces()
    assert torch.cat(pieces).equal(buffer)
    received = decode_rollout(encoded.header, buffer)
    for name, column in rollout.tokens.items():
        assert received.tokens[name].equal(column)
    assert received.tensors["empty"].shape == (0, 3)
    assert rollout.tokens["input_ids"].data_ptr() in [piece.data_ptr() for piece in pieces]


def test_one_element_of_any_stride_has_its_own_bytes() -> None:
    rows = torch.arange(6, dtype=torch.int32).view(2, 3)
    for one in (rows[:1, 1], rows[1:, 2], rows[1, 1]):
        assert wire.bytes_of(one).tolist() == list(int(one).to_bytes(4, "little"))
    assert wire.bytes_of(torch.empty(3, 0)).tolist() == []
