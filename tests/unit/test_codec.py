"""Rollouts to bytes and back: all that there is of them, what a rank makes of it, and what is copied."""

from __future__ import annotations

import pytest
import torch
from codec_help import carried, received, rollout
from scripted import awkward_micro_batches, same_rollout

from stream_balancer.errors import RolloutError, WireError
from stream_balancer.testing import make_rollout
from stream_balancer.types import SUPPORTED_DTYPES, ExecutionSize, MicroBatch, Rollout
from stream_balancer.wire import codec


def some() -> list[list[Rollout]]:
    return [
        [make_rollout(5, "a", seed=1, group_id="g", version=(3, 4)), make_rollout(1, "b", seed=2)],
        [make_rollout(130, "c", seed=3, prompt_tokens=7, cost=2.5)],
    ]


@pytest.mark.parametrize("cut", [some(), awkward_micro_batches()], ids=["some", "awkward"])
def test_everything_comes_back(cut: list[list[Rollout]]) -> None:
    got = carried(*cut)
    assert got.num_rollouts == tuple(map(len, cut))
    for ours, theirs in zip(cut, got.micro_batches, strict=True):
        assert theirs.lengths == tuple(one.num_tokens for one in ours)
        assert all(same_rollout(a, b) for a, b in zip(ours, theirs.rollouts, strict=True))
        a, b = MicroBatch.of(ours).packed(), theirs.packed()
        assert [(name, a[name].dtype, a[name].shape) for name in a] == [
            (name, b[name].dtype, b[name].shape) for name in b
        ]
        assert a.rollout_weights.tolist() == b.rollout_weights.tolist()
        assert list(a.executions) == list(b.executions)
    assert [one.rollout_id for one in got.rollouts] == [one.rollout_id for its in cut for one in its]


def test_packed_copies_no_token_and_is_aligned() -> None:
    encoded = codec.encode([MicroBatch.of(its) for its in some()])
    memory = received(encoded)
    assert memory is not None
    start = memory.ctypes.data
    for micro_batch in codec.decode(encoded.header, memory).micro_batches:
        for name, column in micro_batch.packed().columns.items():
            if name == "loss_mask":
                continue  # a copy: no first token is trained on
            assert column.untyped_storage().data_ptr() == start, name
            assert (column.data_ptr() - start) % 64 == 0, name
        (*_, last) = micro_batch.rollouts
        assert last.tokens["input_ids"].untyped_storage().data_ptr() == start


def test_small_columns_are_sent_together() -> None:
    pieces = codec.encode([MicroBatch.of([make_rollout(50, str(i)) for i in range(64)])]).payload.views()
    assert len(pieces) < 2 * 4


def test_executions_have_their_sizes_in_the_step() -> None:
    whole = [rollout(0, execution_id="e", group_id="g"), rollout(1, execution_id="f")]
    sizes = (ExecutionSize(4, 30), ExecutionSize(1, 2))
    got = carried(MicroBatch.of(whole, None, sizes), MicroBatch.of([rollout(2)]))
    assert got.micro_batches[0].execution_sizes == sizes
    assert got.micro_batches[1].execution_sizes == (ExecutionSize(1, 3),)
    got.resize({("g", "e"): (3, 20), (None, "e"): (9, 9)})
    assert got.micro_batches[0].execution_sizes == (ExecutionSize(3, 20), ExecutionSize(1, 2))
    assert list(got.micro_batches[0].packed().executions) == [(3, 20), (1, 2)]


def test_rollouts_with_different_columns_are_named() -> None:
    plain, other = make_rollout(3, "plain"), Rollout(tokens={"input_ids": torch.arange(2)}, rollout_id="other")
    with pytest.raises(RolloutError, match="'other' has nothing as 'logprobs'"):
        codec.encode_rollouts([plain, other])
    renamed = Rollout(tokens={**other.tokens, "a": torch.ones(2), "b": torch.ones(2)}, rollout_id="renamed")
    with pytest.raises(RolloutError, match="'renamed' has nothing as 'logprobs'"):
        codec.encode_rollouts([plain, renamed])
    wide = Rollout(tokens={"input_ids": torch.arange(2, dtype=torch.int32)}, rollout_id="wide")
    with pytest.raises(RolloutError, match=r"'wide' has torch\.int32 \[2\] as 'input_ids', but .* torch\.int64"):
        codec.encode_rollouts([other, wide])


def test_what_is_too_large_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"136 tokens do not fit: more than 1000 bytes.*Raise max_batch_bytes"):
        codec.encode([MicroBatch.of(its) for its in some()], max_bytes=1000)


# --- columns of roles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 40_000])
def test_columns_of_roles_come_as_they_were_given(num_tokens: int) -> None:
    for dtype in SUPPORTED_DTYPES:
        given = {"a": torch.arange(num_tokens).to(dtype), "b": torch.rand(num_tokens, dtype=torch.float64)}
        encoded = codec.encode_columns(given, num_tokens)
        got = codec.decode_columns(encoded.header, received(encoded), num_tokens)
        assert list(given) == list(got)
        assert all(bytes(codec.bytes_of(given[name])) == bytes(codec.bytes_of(got[name])) for name in given)


@pytest.mark.parametrize(
    "given",
    [
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(3), "b": torch.zeros(2)},
        {"a": torch.zeros(3, dtype=torch.complex64)},
    ],
)
def test_columns_that_fit_no_token_are_refused(given: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"'[ab]'"):
        codec.encode_columns(given, 3)


def test_columns_of_other_sizes_than_the_work_are_refused() -> None:
    encoded = codec.encode_columns({"a": torch.zeros(30)}, 30)
    memory = received(encoded)
    assert memory is not None
    with pytest.raises(WireError, match="columns of 30 tokens came"):
        codec.decode_columns(encoded.header, memory, 29)
    for other in (None, memory[:64]):
        with pytest.raises(WireError, match="bytes"):
            codec.decode_columns(encoded.header, other, 30)
