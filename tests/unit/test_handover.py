"""Rollouts that stay with their producer: descriptions and skeletons there and back, and hostile ones."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from scripted import rank_batch
from test_wire_hostile import _KINDS, _use

from stream_balancer.config import BalancerConfig
from stream_balancer.core.machine import BalancerCore
from stream_balancer.errors import RolloutError, WireError
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.types.shared import part_of
from stream_balancer.wire import rank_batch as wire
from stream_balancer.wire.messages import Batch, Owner, PartialBatch, RolloutHeader
from stream_balancer.wire.partial_batch import (
    Lease,
    RemoteRollout,
    encode_skeleton,
    is_remote,
    payload,
    read_skeleton,
)
from stream_balancer.wire.rollouts import check_header, decode_kept, decode_rollout, encode_rollout

A, B = Owner("127.0.0.1", 1, "secret", "a"), Owner("127.0.0.1", 2, "secret", "b")
MAX_BYTES = 2**20


def rollout(n: int, **fields: Any) -> Rollout:
    length = 3 + 2 * n
    tokens = {
        "input_ids": torch.arange(length) + 10 * n,
        "loss_mask": torch.arange(length) % 2 == 0,
        "hidden": torch.full((length, 3), float(n), dtype=torch.bfloat16),
    }
    return Rollout(
        tokens=dict(reversed(tokens.items())) if n % 2 else tokens,  # producers need not agree on an order
        scalars={"reward": 0.5 * n},
        tensors={"pixels": torch.full((n, 2), n), "grid": torch.tensor(n)},
        metadata={"n": n},
        rollout_id=f"r{n}",
        version=n,
        **fields,
    )


def described(local: Rollout, owner: Owner, key: int, lease: Lease | None = None) -> RemoteRollout:
    encoded = encode_rollout(local, kept=True)
    buffer = torch.cat(encoded.pieces())
    assert buffer.numel() == encoded.header.wire_bytes
    return decode_kept(msgspec.structs.replace(encoded.header, payload=key), buffer, owner, lease or Lease())


def test_versions_per_token_are_known_where_the_tokens_are_not() -> None:
    local = Rollout(tokens={"input_ids": [1, 2, 3], "versions": [-1, 4, 5]})
    remote = described(local, A, 1)
    assert remote.tokens["versions"].is_meta
    assert (remote.version, replace(remote, group_id="g").version) == ((4, 5), (4, 5))
    assert remote.padding_copy("padding-1").version == (4, 5)


def sent(one: RankBatch) -> tuple[PartialBatch, torch.Tensor]:
    encoded = encode_skeleton(one, max_bytes=MAX_BYTES)
    buffer = torch.zeros(encoded.message.wire_bytes, dtype=torch.uint8)
    assert list(encoded.fill(buffer))[-1] == encoded.message.wire_bytes
    return encoded.message, buffer


def completed(frame: PartialBatch, body: torch.Tensor, held: dict[tuple[str, int], Rollout]) -> RankBatch:
    """What a rank does, with producers at hand."""
    skeleton = read_skeleton(frame, body, max_bytes=MAX_BYTES)
    buffer = torch.full((skeleton.batch.total_bytes,), 255, dtype=torch.uint8)
    for one in skeleton.wanted(buffer):
        kept = held[one.owner.label, one.key]
        if one.part is not None:
            kept = part_of(kept, one.part.degree, one.part.place)
        for part, piece in zip(payload(kept), one.pieces, strict=True):
            piece.copy_(part)
    skeleton.finish(buffer)
    return wire.decode(skeleton.batch, buffer)


def test_a_description_is_the_rollout_without_a_byte_of_its_tokens() -> None:
    local = rollout(2, group_id="g", cost=7.5, prefix=3)
    remote = described(local, A, 5)
    assert all(tensor.is_meta for tensor in (*remote.tokens.values(), *remote.tensors.values()))
    for name in ("num_tokens", "num_loss_tokens", "nbytes", "rollout_id", "group_id", "version", "cost", "scalars",
                 "prefix"):  # fmt: skip
        assert getattr(remote, name) == getattr(local, name)
    assert (remote.owner, remote.key, remote.metadata) == (A, 5, {"n": 2})
    padding = remote.padding_copy("padding")
    assert isinstance(padding, RemoteRollout)
    assert (padding.num_loss_tokens, padding.key, padding.lease) == (0, 5, remote.lease)


def test_nobody_is_asked_for_a_padding_copy_of_one_token() -> None:
    bare = Rollout(tokens={"input_ids": torch.arange(1, 6), "hidden": torch.ones(5, 3, dtype=torch.bfloat16)})
    one = rank_batch([described(bare, A, 5).padding_copy("padding")])
    assert not is_remote(one)
    got = completed(*sent(one), {}).rollouts[0]
    assert {name: (c.dtype, c.tolist()) for name, c in got.tokens.items()} == {
        "input_ids": (torch.int64, [0]),
        "hidden": (torch.bfloat16, [[0.0, 0.0, 0.0]]),
    }


def with_late(rollouts: list[list[Any]]) -> list[list[Any]]:
    """With columns that were computed on the way; one sorts between those of the producers, one behind them."""

    def late(n: int) -> dict[str, torch.Tensor]:
        return {"values": torch.arange(n) * 2**40, "inputs_ref": torch.arange(n).double() / 3}

    return [[one.with_late_columns(late(one.num_tokens)) for one in micro_batch] for micro_batch in rollouts]


@pytest.mark.parametrize("late", [False, True])
def test_a_share_of_many_holders_is_completed_as_if_it_had_been_sent(late: bool) -> None:
    r = [rollout(n, group_id="g", prefix=n) for n in range(6)]
    held = {("a", 0): r[0], ("b", 0): r[1], ("a", 7): r[3], ("b", 9): r[4]}
    remote = {n: described(held[label, key], owner, key) for n, label, key, owner in
              ((0, "a", 0, A), (1, "b", 0, B), (3, "a", 7, A), (4, "b", 9, B))}  # fmt: skip
    plain = [[r[0], r[1], r[2]], [r[3], r[4].padding_copy("copy")], [r[5]]]
    mixed = [[remote[0], remote[1], r[2]], [remote[3], remote[4].padding_copy("copy")], [r[5]]]
    if late:
        plain, mixed = with_late(plain), with_late(mixed)
    assert is_remote(rank_batch(*mixed))
    assert not is_remote(rank_batch(*plain))
    got = completed(*sent(rank_batch(*mixed)), held)
    for mine, theirs in zip(got.micro_batches, plain, strict=True):
        there = MicroBatch.of(theirs).packed()
        here = mine.packed()
        assert here.columns.keys() == there.columns.keys()
        for name, column in there.columns.items():
            assert here.columns[name].equal(column), name
        for a, b in zip(mine.rollouts, theirs, strict=True):
            assert {k: v.tolist() for k, v in a.tensors.items()} == {k: v.tolist() for k, v in b.tensors.items()}
            assert (a.num_loss_tokens, a.is_padding, a.metadata) == (b.num_loss_tokens, b.is_padding, b.metadata)
            assert a.prefix == b.prefix


def test_a_lease_lives_exactly_as_long_as_the_balancer_needs_the_rollout() -> None:
    core = BalancerCore(BalancerConfig(dp_size=1, batch_size=2, window=2, max_staleness=0))
    gone: list[int] = []

    def put(n: int) -> None:
        lease = Lease()
        weakref.finalize(lease, gone.append, n)
        core.add(described(rollout(n), A, n, lease), 0.0)

    gc.disable()  # by counting alone, not whenever a collection comes
    try:
        put(1)
        put(2)
        assert core.poll(0.0) is not None
        assert gone == []
        core.acknowledge(0)
        assert sorted(gone) == [1, 2]
        put(3)
        core.set_version(4)  # stale
        assert gone[2:] == [3]
        put(5)
        assert core.evict_lost(lambda r: isinstance(r, RemoteRollout) and r.owner == B) == []
        assert core.evict_lost(lambda r: isinstance(r, RemoteRollout) and r.owner == A) == ["r5"]
        assert gone[3:] == [5]
    finally:
        gc.enable()
    core.verify()
    assert core.statistics(0.0).evicted == {"stale": 1, "lost": 1, "filtered": 0, "abandoned": 0}
    put(5)  # lost, so it may come again
    with pytest.raises(RolloutError, match="accepted before"):
        put(3)


def hostile_skeletons(cases: int, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    r = [rollout(n) for n in range(4)]
    held = {("a", 0): r[0], ("b", 1): r[1], ("a", 2): r[2]}
    there = [[described(r[0], A, 0), described(r[1], B, 1)], [described(r[2], A, 2), r[3]]]
    if seed % 2:
        there = with_late(there)
    shared = MicroBatch.shared(there[0], (0, 1), 0) if seed > 1 else there[0]
    frame, whole = sent(rank_batch(shared, there[1], dp_size=2))
    body = whole.numpy().tobytes()
    refused = 0
    for _ in range(cases):
        whole_frame = Batch(0, 0, 2, frame.meta_bytes, frame.meta_crc, frame.wire_bytes, frame.wire_bytes)
        odd, raw = chance.choice(_KINDS)(whole_frame, body, chance)
        mutated = PartialBatch(0, 0, 2, odd.meta_bytes, odd.meta_crc, odd.wire_bytes, 3)
        if chance.random() < 0.7 and mutated.meta_bytes <= len(raw):  # what does not fit is refused too soon to matter
            raw = raw[: mutated.meta_bytes] + body[frame.meta_bytes :]
            mutated = msgspec.structs.replace(mutated, wire_bytes=len(raw))
        try:
            if not 0 < mutated.meta_bytes <= mutated.wire_bytes == len(raw):
                raise WireError("a rank's port refuses it")
            received = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            skeleton = read_skeleton(mutated, received, max_bytes=MAX_BYTES)
            buffer = torch.zeros(skeleton.batch.total_bytes, dtype=torch.uint8)
            for one in skeleton.wanted(buffer):
                assert sum(piece.numel() for piece in one.pieces) <= buffer.numel()
            skeleton.finish(buffer)
            _use(wire.decode(skeleton.batch, buffer))
        except WireError:
            refused += 1
    assert completed(frame, whole, held).num_rollouts == 4
    return refused, cases


def test_hostile_skeletons_are_refused_or_harmless() -> None:
    for seed in range(4):  # with late columns, or shared, or both
        refused, cases = hostile_skeletons(1500, seed)
        assert 0.3 * cases < refused < cases


@pytest.mark.soak
def test_fifty_thousand_hostile_skeletons() -> None:
    for seed in range(5):
        hostile_skeletons(10_000, seed + 1)


def test_nobody_puts_a_part() -> None:
    encoded = wire.encode(rank_batch(MicroBatch.shared([rollout(2)], (0, 1), 0), dp_size=2), narrow=False)
    buffer = torch.zeros(encoded.message.wire_bytes, dtype=torch.uint8)
    assert list(encoded.fill(buffer))
    header = RolloutHeader(
        encoded.message.meta_bytes, encoded.message.meta_crc, encoded.message.wire_bytes, encoded.message.total_bytes
    )
    with pytest.raises(WireError, match="one whole rollout"):
        decode_rollout(header, buffer)


def test_hostile_descriptions_are_refused_or_harmless() -> None:
    chance = random.Random(0)
    encoded = encode_rollout(rollout(2), kept=True)
    meta_bytes, crc, wire_bytes, total_bytes, _ = msgspec.structs.astuple(encoded.header)
    frame = Batch(0, 0, 1, meta_bytes, crc, wire_bytes, total_bytes)
    body = torch.cat(encoded.pieces()).numpy().tobytes()
    refused = 0
    for _ in range(2000):
        mutated, raw = chance.choice(_KINDS)(frame, body, chance)
        raw += bytes(-len(raw) % 64)
        header = RolloutHeader(mutated.meta_bytes, mutated.meta_crc, len(raw), mutated.total_bytes, 1)
        try:
            check_header(header, len(raw))
            remote = decode_kept(header, torch.frombuffer(bytearray(raw), dtype=torch.uint8), A, Lease())
            assert 0 <= remote.num_loss_tokens <= remote.num_tokens
        except (WireError, RolloutError):
            refused += 1
    assert 1000 < refused < 2000


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [[0, 0, -1]],
        [[2, 0, -1], [0, 0, -1]],
        [[-2, 0, -1], [0, 0, -1]],
        [[0, -1, -1], [0, 0, -1]],
        [[0, 0, 0], [0, 0, -1]],  # no references came
    ],
)
def test_a_wrong_list_of_sources_is_refused(sources: list[list[int]]) -> None:
    frame, buffer = sent(rank_batch([described(rollout(0), A, 0), described(rollout(1), B, 1)]))
    tree = msgspec.msgpack.decode(buffer[: frame.meta_bytes].numpy().tobytes())
    tree[2] = sources
    packed = msgspec.msgpack.encode(tree)
    frame = msgspec.structs.replace(
        frame, meta_bytes=len(packed), wire_bytes=len(packed), meta_crc=wire.zlib.crc32(packed)
    )
    with pytest.raises(WireError, match="who holds what"):
        read_skeleton(frame, torch.frombuffer(bytearray(packed), dtype=torch.uint8), max_bytes=MAX_BYTES)


def test_what_is_gone_is_not_asked_for() -> None:
    r = [rollout(n) for n in range(3)]
    there = [described(r[0], A, 0), replace(described(r[1], B, 1), gone="no route to host"), r[2]]
    skeleton = read_skeleton(*sent(rank_batch(there)), max_bytes=MAX_BYTES)
    buffer = torch.zeros(skeleton.batch.total_bytes, dtype=torch.uint8)
    assert [one.place for one in skeleton.wanted(buffer)] == [0]
    assert (skeleton.gone, skeleton.owner(1)) == ({1: "no route to host"}, B)


@pytest.mark.parametrize(
    ("late", "gone"), [(["nothing"], []), ([], [[2, "why"]]), ([], [[-1, "why"]]), ([], [[1, "it came along"]])]
)
def test_a_wrong_list_of_what_came_along_or_is_gone_is_refused(late: list[str], gone: list[Any]) -> None:
    frame, buffer = sent(rank_batch([described(rollout(0), A, 0), rollout(1)]))
    tree = msgspec.msgpack.decode(buffer[: frame.meta_bytes].numpy().tobytes())
    assert tree[3:] == [[], []]
    packed = msgspec.msgpack.encode([*tree[:3], late, gone])
    frame = msgspec.structs.replace(
        frame, meta_bytes=len(packed), wire_bytes=len(packed), meta_crc=wire.zlib.crc32(packed)
    )
    with pytest.raises(WireError, match="came along or is gone"):
        read_skeleton(frame, torch.frombuffer(bytearray(packed), dtype=torch.uint8), max_bytes=MAX_BYTES)


def test_a_share_above_max_batch_bytes_is_refused_before_anything_is_allocated() -> None:
    frame, buffer = sent(rank_batch([described(rollout(3), A, 0)]))
    with pytest.raises(WireError, match="need more than"):
        read_skeleton(frame, buffer, max_bytes=64)
    with pytest.raises(ValueError, match="max_batch_bytes"):
        encode_skeleton(rank_batch([described(rollout(3), A, 0)]), max_bytes=64)
