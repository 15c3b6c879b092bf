"""Rollouts to bytes and back, also where they lie elsewhere: all there is of them, what is copied, what is gone."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from codec_help import A, B, carried, fill, received, remote, rollout
from helpers import polled
from hypothesis import given
from hypothesis import strategies as st
from scripted import awkward_micro_batches, same_rollout, same_tensors

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import RolloutError, WireError
from stream_balancer.rollouts import ExecutionSize, MicroBatch, Rollout
from stream_balancer.testing import make_rollout
from stream_balancer.wire import codec
from stream_balancer.wire.header import Header


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


def test_executions_have_their_sizes_in_the_step() -> None:
    whole = [rollout(0, execution_id="e", group_id="g"), rollout(1, execution_id="f")]
    sizes = (ExecutionSize(4, 30), ExecutionSize(1, 2))
    got = carried(MicroBatch.of(whole, sizes), MicroBatch.of([rollout(2)]))
    assert got.micro_batches[0].execution_sizes == sizes
    assert got.micro_batches[1].execution_sizes == (ExecutionSize(1, 3),)
    assert list(got.micro_batches[0].packed().executions) == [(4, 30), (1, 2)]


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
    wide.tokens["input_ids"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(RolloutError, match=r"'other' has torch\.int64"):
        codec.encode_rollouts([wide, other])


def test_what_is_too_large_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"136 tokens do not fit: more than 1000 bytes.*Raise max_batch_bytes"):
        codec.encode([MicroBatch.of(its) for its in some()], max_bytes=1000)


def same_layout(one: MicroBatch, other: MicroBatch) -> None:
    ours, theirs = one.packed(), other.packed()
    assert one.lengths == other.lengths
    assert same_tensors(ours.columns, theirs.columns)
    following = [{name: its.next(name) for name in its.columns} for its in (ours, theirs)]
    assert same_tensors(*following)
    assert torch.equal(ours.position_ids, theirs.position_ids)
    assert list(ours.executions) == list(theirs.executions)
    assert ours.rollout_weights.tolist() == theirs.rollout_weights.tolist()


# --- what a controller holds of it -----------------------------------------------------------------------------------


def test_a_rollout_that_lies_elsewhere_is_planned_like_any_other() -> None:
    local = rollout(4, group_id="g", execution_id="e", cost=2.5)
    one = remote(local, A, 7)
    assert (one.handle.owner, one.handle.key) == (A, 7)
    assert (one.num_tokens, one.num_loss_tokens, one.nbytes) == (local.num_tokens, local.num_loss_tokens, local.nbytes)
    for name in ("scalars", "metadata", "rollout_id", "group_id", "execution_id", "version", "cost"):
        assert getattr(one, name) == getattr(local, name)
    assert all(tensor.is_meta for tensor in (*one.tokens.values(), *one.tensors.values()))
    core = BalancerCore(BalancerConfig(dp_size=1, batch_size=1))
    core.add(one, 0.0)
    core.end()
    batch = polled(core)
    got = carried(*batch.ranks[0].micro_batches)
    fill(got, {("a", 7): local})
    assert same_rollout(got.rollouts[0], codec_order(local, got.rollouts[0]))


def codec_order(one: Rollout, other: Rollout) -> Rollout:
    """Columns in the order of the other's."""
    return replace(one, tokens={name: one.tokens[name] for name in other.tokens})


def test_a_kept_payload_needs_leave_and_a_key_of_its_own() -> None:
    encoded = codec.encode_rollouts([rollout(1), rollout(2)], handles=[codec.Handle(A, 1), codec.Handle(A, 1)])
    with pytest.raises(WireError, match="may not"):
        codec.decode_rollouts(encoded.header, None)
    with pytest.raises(WireError, match="named twice"):
        codec.decode_rollouts(encoded.header, None, lambda _: codec.Leases())


def test_the_owner_hears_of_what_is_needed_no_more() -> None:
    told: list[tuple[int, ...]] = []
    jobs: list[object] = []
    its = codec.Leases()
    its.attach(told.append, jobs.append)
    held = [remote(rollout(n), A, n, its) for n in range(5)]
    copies = [held[0].padding_copy("padding-1"), held[1]._changed(group_id="g"), held[2]._changed(group_id="h")]
    del held[:4]
    gc.collect()
    jobs.pop()()  # type: ignore[operator]
    assert told == [(3,)]
    copies.clear()
    gc.collect()
    assert len(jobs) == 1, "all at once"
    jobs.pop()()  # type: ignore[operator]
    assert [sorted(keys) for keys in told] == [[3], [0, 1, 2]]
    assert its.hold(4) is held[0].lease, "of a rollout that is put again"
    its.hold(3)


# --- on its way to a rank --------------------------------------------------------------------------------------------


@given(
    cut=st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_holes_anywhere_when_filled_equal_the_whole(cut: list[list[tuple[int, bool]]], seed: int) -> None:
    chance, kept = random.Random(seed), dict[tuple[str, int], Rollout]()
    whole: list[MicroBatch] = []
    sent: list[MicroBatch] = []
    for number, its in enumerate(cut):
        here: list[Rollout] = []
        there: list[Rollout] = []
        for place, (n, is_remote) in enumerate(its):
            one = rollout(n, rollout_id=f"{number}.{place}")
            other: Rollout = one
            if is_remote:
                owner = chance.choice([A, B])
                kept[owner.label, 100 * number + place] = one
                other = remote(one, owner, 100 * number + place)
            here.append(one)
            there.append(other)
        whole.append(MicroBatch.of(here))
        sent.append(MicroBatch.of(there))
    got = carried(*sent)
    assert len(got.holes()) == len(kept)
    fill(got, kept)
    for ours, theirs in zip(carried(*whole).micro_batches, got.micro_batches, strict=True):
        same_layout(ours, theirs)
        for a, b in zip(ours.rollouts, theirs.rollouts, strict=True):
            assert same_rollout(a, b)


def test_a_padding_copy_of_what_lies_elsewhere_has_its_tensors_and_no_loss() -> None:
    local = rollout(3)
    got = carried([remote(local, A, 3).padding_copy("padding-0")])
    fill(got, {("a", 3): local})
    (micro_batch,) = got.micro_batches
    assert micro_batch.rollouts[0].is_padding
    assert torch.equal(micro_batch.rollouts[0].tensors["pixels"], local.tensors["pixels"])
    assert not micro_batch.packed()["loss_mask"].any()
    assert micro_batch.packed().rollout_weights.tolist() == [0.0]
    plain = Rollout(tokens=local.tokens, rollout_id="plain")
    one = carried([remote(plain, A, 3).padding_copy("padding-0")])
    assert one.holes() == []
    assert not one.micro_batches[0].packed()["input_ids"].any()


# --- what is gone ----------------------------------------------------------------------------------------------------


def test_what_is_gone_is_masked() -> None:
    local = [rollout(n, group_id="g") for n in range(4)]
    got = carried(local[:2], [remote(local[2], A, 3), remote(local[3], A, 4)])
    got.mask(["r2", "r0", "nobody's"])
    assert [one.rollout_id for one in got.holes()] == ["r3"]
    fill(got, {("a", 4): local[3]})
    first, second = got.micro_batches
    assert first.packed().rollout_weights.tolist() == second.packed().rollout_weights.tolist() == [0.0, 1.0]
    assert first.packed()["loss_mask"].sum() == local[1].num_loss_tokens
    assert first.lengths == (3, 5)
    gone = second.rollouts[0]
    assert (gone.is_padding, gone.num_loss_tokens, gone.num_tokens) == (True, 0, local[2].num_tokens)
    assert not any(tensor.any() for tensor in (*gone.tokens.values(), *gone.tensors.values()))


def test_what_turns_out_to_be_gone_later_is_masked_in_new_micro_batches() -> None:
    local = [Rollout(tokens={"input_ids": torch.arange(1, 9)}, rollout_id=str(n)) for n in range(3)]
    got = carried(local)
    assert not any(one.is_padding for one in got.micro_batches[0].rollouts)
    got.mask(["1"])
    (after,) = got.micro_batches
    assert after.packed()["input_ids"].tolist() == [*range(1, 9), *[0] * 8, *range(1, 9)]
    assert after.packed()["loss_mask"].tolist() == [False, *[True] * 7, *[False] * 9, *[True] * 7]
    assert [one.is_padding for one in after.rollouts] == [False, True, False]


# --- what a put is ----------------------------------------------------------------------------------------------------


def test_a_put_is_one_block() -> None:
    encoded = codec.encode([MicroBatch.of([rollout(1)]), MicroBatch.of([rollout(2)])])
    with pytest.raises(WireError, match="a put holds rollouts"):
        codec.decode_rollouts(encoded.header, received(encoded))


@pytest.mark.parametrize(
    "change",
    [{"ids": ["r1", "padding-7"]}, {"ids": ["r1", ""]}, {"version": [1, (3, 2, 1)]}, {"version": [1, 2**62]},
     {"cost": [None, float("nan")]}, {"cost": [None, -1.0]}, {"group_id": ["", None]}],
    ids=str,
)  # fmt: skip
def test_a_rollout_that_may_be_none_is_refused(change: dict[str, Any]) -> None:
    encoded = codec.encode_rollouts([rollout(1), rollout(2)])
    header = msgspec.msgpack.decode(encoded.header, type=Header)
    raw = msgspec.msgpack.encode(msgspec.structs.replace(header, **change))
    with pytest.raises(WireError, match=r"header of rollouts|padding copies"):
        codec.decode_rollouts(raw, received(encoded))
