"""Bundles of rollouts in an object store, without Ray: what is described, what is read, what is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scripted import same_rollout

import stream_balancer as sb
from stream_balancer.testing import make_rollout
from stream_balancer.transport.ray.bundles import (
    ObjectStore,
    Stored,
    description_of,
    encode_bundle,
    header_of,
    read_bundle,
    read_stored_bundle,
    write_object,
)
from stream_balancer.types import Rollout
from stream_balancer.types.shared import part_of
from stream_balancer.wire.messages import Owner
from stream_balancer.wire.partial_batch import RemoteRollout, WantedPayload, payload
from stream_balancer.wire.slices import Slice

OWNER = Owner("node", 0, "", "worker 7 on node abc")
Objects = dict[str, NDArray[np.uint8]]


def lend(size: int) -> torch.Tensor:
    return torch.full((size,), 255, dtype=torch.uint8)


def rollouts(lengths: Sequence[int], name: str) -> list[Rollout]:
    made = [make_rollout(length, f"{name}{n}", group_id="g" if n % 2 else None) for n, length in enumerate(lengths)]
    return [
        Rollout(
            tokens=dict(r.tokens)
            | {
                "large": torch.full((r.num_tokens,), 2**40 + n),  # not narrowed
                "pairs": torch.randn(r.num_tokens, 2),
                "nothing": torch.empty(r.num_tokens, 0),
            },
            tensors={"image": torch.randn(3, n), "none": torch.empty(0)},
            scalars=r.scalars,
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            metadata={"n": n},
            prefix=r.num_tokens // 2 if n % 2 else 0,
        )
        for n, r in enumerate(made)
    ]


def put(objects: Objects, made: list[Rollout], name: str) -> list[Rollout]:
    encoded = encode_bundle(made)
    objects[name] = write_object(encoded, lend)
    objects[name].flags.writeable = False  # as a store's memory is
    header = header_of(encoded, payload=0)
    source = description_of(encoded)
    description = torch.empty(source.size, dtype=torch.uint8)
    assert list(source.fill(description)) == [source.size]
    return read_stored_bundle(header, description, Stored(name), OWNER)


def fetch_from(objects: Objects) -> Any:
    return lambda names: [objects[name] if name in objects else KeyError(name) for name in names]


def test_a_bundle_that_travels_whole_is_read_as_it_was_put() -> None:
    made = rollouts([3, 1, 70], "w")
    encoded = encode_bundle(made)
    header = header_of(encoded, payload=None)
    buffer = torch.empty(header.total_bytes, dtype=torch.uint8)
    for _ in encoded.fill(buffer):
        pass
    assert all(same_rollout(a, b) for a, b in zip(made, read_bundle(header, buffer), strict=True))


def test_what_is_described_is_all_that_the_balancer_asks_about() -> None:
    made = rollouts([3, 1, 70], "d")
    for real, stored in zip(made, put({}, made, "o"), strict=True):
        assert isinstance(stored, RemoteRollout)
        assert (stored.nbytes, stored.num_tokens, stored.num_loss_tokens) == (
            real.nbytes,
            real.num_tokens,
            real.num_loss_tokens,
        )
        for mine, theirs in ((stored.tokens, real.tokens), (stored.tensors, real.tensors)):
            assert {k: (v.dtype, v.shape) for k, v in mine.items()} == {
                k: (v.dtype, v.shape) for k, v in theirs.items()
            }
        assert (stored.rollout_id, stored.group_id, stored.prefix, stored.scalars, stored.metadata) == (
            real.rollout_id,
            real.group_id,
            real.prefix,
            real.scalars,
            real.metadata,
        )


def wanted(stored: Sequence[RemoteRollout], targets: Sequence[Sequence[torch.Tensor]]) -> list[WantedPayload]:
    return [
        WantedPayload(place, one.owner, one.key, pieces, one.lease.reference)
        for place, (one, pieces) in enumerate(zip(stored, targets, strict=True))
    ]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_payloads_are_read_out_of_many_objects(lengths: list[list[int]], choose: Any) -> None:
    objects: Objects = {}
    pairs: list[tuple[Rollout, RemoteRollout]] = []
    for number, bundle in enumerate(lengths):
        made = rollouts(bundle, f"{number}.")
        pairs += zip(made, put(objects, made, f"o{number}"), strict=True)
    choose.shuffle(pairs)
    targets = [[torch.zeros_like(piece) for piece in payload(real)] for real, _ in pairs]
    store = ObjectStore(fetch_from(objects))
    assert not store.read(wanted([stored for _, stored in pairs], targets))
    for (real, _), pieces in zip(pairs, targets, strict=True):
        assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in payload(real)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_parts_are_read_out_of_an_object(lengths: list[int], degree: int) -> None:
    objects: Objects = {}
    made = rollouts(lengths, "r")
    stored = put(objects, made, "o")
    for place in range(degree):
        expected = [payload(part_of(one, degree, place)) for one in made]
        targets = [[torch.full_like(piece, 255) for piece in pieces] for pieces in expected]
        asked = [
            one._replace(part=Slice(degree, place, real.num_tokens))
            for one, real in zip(wanted(stored, targets), made, strict=True)
        ]
        assert not ObjectStore(fetch_from(objects)).read(asked)
        for pieces, theirs in zip(targets, expected, strict=True):
            assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in theirs]


def test_what_is_gone_is_named_and_the_rest_is_read() -> None:
    objects: Objects = {}
    kept, gone = rollouts([5, 6], "k"), rollouts([7, 8], "g")
    stored = [*put(objects, kept, "here"), *put(objects, gone, "gone")]
    del objects["gone"]
    order = [stored[2], stored[0], stored[3], stored[1]]
    real = {r.rollout_id: r for r in (*kept, *gone)}
    targets = [[torch.zeros_like(piece) for piece in payload(real[s.rollout_id])] for s in order]
    missing = ObjectStore(fetch_from(objects)).read(wanted(order, targets))
    assert missing == {0: "KeyError", 2: "KeyError"}
    assert all(torch.equal(a, b) for a, b in zip(targets[1], payload(kept[0]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(targets[3], payload(kept[1]), strict=True))


def test_token_ids_take_four_bytes_in_the_store() -> None:
    ids = Rollout(tokens={"input_ids": torch.arange(100_000)}, rollout_id="ids")
    assert write_object(encode_bundle([ids]), lend).nbytes < 401_000


def test_an_object_lives_as_long_as_one_of_its_rollouts() -> None:
    first, second = put({}, rollouts([1, 2], "l"), "o")
    watch = weakref.ref(first.lease)
    copy = second.padding_copy("copy")
    del first, second
    gc.collect()
    assert watch() is not None
    del copy
    gc.collect()
    assert watch() is None


def test_rollouts_of_two_kinds_do_not_share_a_bundle() -> None:
    other = sb.Rollout(tokens={"input_ids": [1, 2]}, rollout_id="other")
    with pytest.raises(sb.RolloutError, match="columns"):
        encode_bundle([*rollouts([1], "a"), other])
