"""Rollouts that several ranks share, as bytes: each rank gets its part, and no more."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given
from scripted import awkward_micro_batches, rank_batch, same_rollout, same_tensors
from test_handover import A, B, completed, described, rollout, sent
from test_shared_rollouts import a_rollout, shifted
from test_wire import carry

from stream_balancer.controller.denominators import StepAgreement
from stream_balancer.errors import WireError
from stream_balancer.testing import make_rollout
from stream_balancer.transport.sockets.payloads import PayloadServer
from stream_balancer.types import Batch, Denominators, MicroBatch, RankBatch, Rollout, SharedRollout
from stream_balancer.types.shared import join_column, join_rollout, part_of
from stream_balancer.wire import rank_batch as wire
from stream_balancer.wire.description import _check_meta, unchecked_description
from stream_balancer.wire.messages import MissingRollout
from stream_balancer.wire.partial_batch import is_remote, payload, read_skeleton
from stream_balancer.wire.slices import Slice, sliced


def shares(wholes: list[Rollout], degree: int, alone: list[Rollout], first: int = 0) -> list[RankBatch]:
    """Rank batches of the members of a block: the shared rollouts, then one of their own each."""
    group = tuple(range(first, first + degree))
    return [
        rank_batch(MicroBatch.shared(wholes, group, place), [alone[place]], rank=first + place, dp_size=first + degree)
        for place in range(degree)
    ]


def same_layout(one: MicroBatch, other: MicroBatch) -> None:
    ours, theirs = one.packed(), other.packed()
    assert (one.lengths, one.cp_group, one.cp_rank) == (other.lengths, other.cp_group, other.cp_rank)
    assert same_tensors(ours.columns, theirs.columns)
    assert same_tensors(
        {name: ours.next(name) for name in ours.columns}, {name: theirs.next(name) for name in theirs.columns}
    )
    assert torch.equal(ours.position_ids, theirs.position_ids)
    assert ours.whole_lengths == theirs.whole_lengths
    assert list(ours.executions) == list(theirs.executions)
    assert ours.rollout_weights.tolist() == theirs.rollout_weights.tolist()


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("degree", [2, 4])
def test_parts_arrive_as_they_were_cut(degree: int, narrow: bool) -> None:
    wholes = [a_rollout(33), a_rollout(1, "s"), a_rollout(64, "t")]
    for share in shares(wholes, degree, [a_rollout(5 + i, f"own{i}") for i in range(degree)], first=degree):
        got, buffer = carry(share, narrow=narrow)
        for ours, theirs in zip(got.micro_batches, share.micro_batches, strict=True):
            same_layout(ours, theirs)
            assert all(same_rollout(a, b) for a, b in zip(ours.rollouts, theirs.rollouts, strict=True))
        for column in filter(torch.numel, got.micro_batches[0].packed().columns.values()):
            assert column.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "copied"
        part = got.rollouts[0]
        assert isinstance(part, SharedRollout)
        assert (part.whole, part.whole_tokens, part.whole_loss_tokens) == (None, 33, wholes[0].num_loss_tokens)
        again, _ = carry(got, narrow=narrow)  # from bytes alone, as from the controller's tensors
        same_layout(again.micro_batches[0], got.micro_batches[0])


def test_a_large_value_behind_a_chunk_is_not_narrowed() -> None:
    """Of the first member it is the only one, and what it has received has no whole."""
    ids = torch.arange(8)
    ids[2] = 2**40
    whole = Rollout(tokens={"input_ids": ids}, rollout_id="r")
    got, _ = carry(rank_batch(MicroBatch.shared([whole], (0, 1), 0), dp_size=2))
    again, _ = carry(got)
    for one in (got, again):
        packed = one.micro_batches[0].packed()
        assert packed["input_ids"].tolist() == [0, 1, 6, 7]
        assert packed.next("input_ids").tolist() == [1, 2**40, 7, 0]


def test_every_dtype_and_shape_is_cut() -> None:
    for whole in [one for micro_batch in awkward_micro_batches() for one in micro_batch if not one.is_padding]:
        parts = []
        for place in range(2):
            got, _ = carry(rank_batch(MicroBatch.shared([whole], (0, 1), place), rank=place, dp_size=2))
            parts += got.rollouts
        assert same_rollout(join_rollout(parts), whole)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3), degree=st.sampled_from([2, 3, 4, 8]))
def test_whatever_is_cut_joins_to_the_whole(lengths: list[int], degree: int) -> None:
    wholes = [a_rollout(length, f"r{i}") for i, length in enumerate(lengths)]
    got = [carry(share)[0] for share in shares(wholes, degree, [a_rollout(2, f"o{i}") for i in range(degree)])]
    layouts = [one.micro_batches[0].packed() for one in got]
    for number, whole in enumerate(wholes):
        rows = slice(*layouts[0].cu_seqlens[number : number + 2].tolist())
        for name, column in whole.tokens.items():
            assert torch.equal(join_column([one[name][rows] for one in layouts], whole.num_tokens), column)
            following = join_column([one.next(name)[rows] for one in layouts], whole.num_tokens)
            assert torch.equal(following, shifted(column))
        assert sum(one.rollouts[number].num_loss_tokens for one in got) == whole.num_loss_tokens


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_member_receives_its_part_and_two_rows_a_column(degree: int) -> None:
    whole = make_rollout(8192, "long", seed=1)
    alone = wire.encode(rank_batch([whole])).message.wire_bytes
    row = 4 + 4 + 1  # narrowed ids, log-probabilities, mask
    for place in range(degree):
        share = rank_batch(MicroBatch.shared([whole], tuple(range(degree)), place), rank=place, dp_size=8)
        received = wire.encode(share).message.wire_bytes
        assert 0 < received - row * (8192 // degree + 2) < 512, "more than the part and what describes it"
        assert received / alone < 1 / degree + 0.01


def _meta(share: RankBatch) -> Any:
    return unchecked_description(wire.encode(share)._meta)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cp_rank": 2}, "impossible"),
        ({"cp_rank": -1}, "impossible"),
        ({"cp_group": (1,)}, "impossible"),
        ({"cp_group": ()}, "impossible"),
        ({"cp_group": (1, 1)}, "impossible"),
        ({"cp_group": (0, 1), "cp_rank": 0}, "rank 1 of 2 is sent a part for place 0"),
        ({"cp_group": (-1, 1)}, "rank 1 of 2"),
        ({"cp_group": (2, 1)}, "rank 1 of 2"),
        ({"cp_group": (0, 2**62), "cp_rank": 0}, "rank 1 of 2"),
        ({"index": 2}, "list of shared micro-batches"),
        ({"index": -1}, "list of shared micro-batches"),
        ({"cp_group": (0, 1, 2, 3)}, "rank 1 of 2"),
        ({"index": 1}, "the columns need more"),
    ],
)
def test_impossible_members_are_refused(change: dict[str, Any], says: str) -> None:
    share = shares([a_rollout(33)], 2, [a_rollout(5, "a"), a_rollout(6, "b")])[1]
    encoded = wire.encode(share, narrow=False)
    meta = _meta(share)
    meta.shared[0] = msgspec.structs.replace(meta.shared[0], **change)
    packed = msgspec.msgpack.encode(meta)
    buffer = torch.zeros(encoded.message.total_bytes + 4096, dtype=torch.uint8)
    buffer[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    message = msgspec.structs.replace(encoded.message, meta_bytes=len(packed), meta_crc=zlib.crc32(packed))
    with pytest.raises(WireError, match=says):
        wire.decode(message, buffer)


def test_a_micro_batch_is_named_once() -> None:
    share = shares([a_rollout(33)], 2, [a_rollout(5, "a"), a_rollout(6, "b")])[1]
    meta = _meta(share)
    meta.shared.append(meta.shared[0])
    with pytest.raises(WireError, match="list of shared micro-batches"):
        _check_meta(meta)


# --- payloads that lie with producers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_parts_of_what_a_producer_holds_are_fetched(degree: int, late: bool) -> None:
    """Beside a whole one that is held elsewhere, and a shared one that is here."""
    r = [rollout(n) for n in (9, 1, 4)]
    held = {("a", 3): r[0], ("b", 9): r[1]}
    remote: list[Rollout] = [described(r[0], A, 3), described(r[1], B, 9), r[2]]
    if late:
        columns = [{"values": torch.arange(one.num_tokens) * 2.0} for one in r]
        r = [one.with_late_columns(its) for one, its in zip(r, columns, strict=True)]
        remote = [one.with_late_columns(its) for one, its in zip(remote, columns, strict=True)]
    group = tuple(range(degree))
    for place in range(degree):

        def cut(its: list[Rollout], place: int = place) -> RankBatch:
            long, short, here = its
            first = MicroBatch.shared([long, here], group, place)
            return rank_batch(first, [short], rank=place, dp_size=degree)

        assert is_remote(cut(remote))
        assert not is_remote(cut(r))
        got = completed(*sent(cut(remote)), held)
        for mine, theirs in zip(got.micro_batches, cut(r).micro_batches, strict=True):
            ours, there = mine.packed(), theirs.packed()
            for name, column in there.columns.items():
                assert torch.equal(ours[name], column), name
                assert torch.equal(ours.next(name), there.next(name)), name
            for a, b in zip(mine.rollouts, theirs.rollouts, strict=True):
                assert a.num_loss_tokens == b.num_loss_tokens
                assert {k: v.tolist() for k, v in a.tensors.items()} == {k: v.tolist() for k, v in b.tensors.items()}


def test_a_producer_cuts_what_it_keeps() -> None:
    whole = Rollout(
        tokens={"input_ids": torch.arange(11), "none": torch.empty(11, 0), "wide": torch.rand(11, 3)},
        tensors={"pixels": torch.rand(2, 2), "nothing": torch.empty(0)},
        rollout_id="r",
    )
    server = PayloadServer()
    server.keep(4, whole)
    for degree, place in ((2, 0), (2, 1), (8, 3)):
        kept = server.get(4, degree, place)
        assert kept is not None
        expected = payload(part_of(whole, degree, place))
        assert [one.tolist() for one in kept] == [one.tolist() for one in expected]
    assert [one.tolist() for one in server.get(4) or []] == [one.tolist() for one in payload(whole)]
    assert server.get(5, 2, 0) is None
    assert len(sliced(payload(whole), 2, Slice(2, 0, 11))) == 5


def test_a_part_that_one_rank_cannot_get_is_nobodys() -> None:
    """The others would train on keys and values that are not there. It is subtracted once, whole."""
    long, short = rollout(9), rollout(2)
    remote = described(long, A, 3)
    ranks = shares([remote], 2, [short, rollout(3)])
    ranks = [replace(one, denominators=Denominators(3, 21 + 7 + 9, 11 + 4 + 5, 3)) for one in ranks]
    batch = Batch(step=0, reason="window", ranks=tuple(ranks), num_rollouts=3, num_tokens=37, loads=(1.0, 1.0),
                  finish=1.0, lower_bound=1.0)  # fmt: skip
    assert [one.rollout_id for one in batch.rollouts] == ["r9", "r2", "r3"]
    agreement = StepAgreement(batch)
    missing = MissingRollout(0, "r9", "a", "gone")
    assert [one.rollout_id for one in agreement.fetched(0, [missing])] == ["r9"]
    agreement.fetched(1, [])
    final = agreement.final
    assert final is not None
    assert (final.rollouts, final.tokens, final.loss_tokens, final.executions) == (2, 16, 9, 2)
    assert final.gone == ("r9",)
    frame, body = sent(ranks[1])
    skeleton = read_skeleton(frame, body, max_bytes=2**20)
    buffer = torch.full((skeleton.batch.total_bytes,), 255, dtype=torch.uint8)
    for one in skeleton.wanted(buffer):
        assert one.part == Slice(2, 1, 21)
        for part, piece in zip(payload(part_of(long, 2, 1)), one.pieces, strict=True):
            piece.copy_(part)
    skeleton.finish(buffer)
    got = wire.decode(*skeleton.amend(buffer, [], final, lambda size: torch.empty(size, dtype=torch.uint8)))
    packed = got.micro_batches[0].packed()
    assert got.rollouts[0].is_padding
    assert packed.rollout_weights.tolist() == [0.0]
    assert not packed["loss_mask"].any()
    assert not packed.next("loss_mask").any()
    assert not packed["input_ids"].any()
    assert got.global_num_rollouts == 2
    both = StepAgreement(batch)
    for rank in range(2):
        both.fetched(rank, [missing])
    assert both.final == final, "subtracted once for each that misses it"
