"""Rollouts in an object store and calls to an actor, without Ray: the formats, the order of messages, what is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, permutations
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import stream_balancer as sb
from stream_balancer.testing import make_rollout
from stream_balancer.testing.transports import same_rollout
from stream_balancer.transport.ray.channel import Inbox, Peer
from stream_balancer.transport.ray.object_store import (
    Stored,
    complete,
    read_bundle,
    read_whole,
    write_bundle,
    write_share,
)
from stream_balancer.types import MicroBatch, RankBatch, Rollout
from stream_balancer.wire.messages import Owner
from stream_balancer.wire.partial_share import RemoteRollout
from stream_balancer.wire.share import decode

HOLDER = Owner("node", 0, "secret", "worker 7 on node abc")
Store = dict[str, NDArray[np.uint8]]


def rollouts(lengths: Sequence[int], name: str) -> list[Rollout]:
    made = [make_rollout(length, f"{name}{n}", group_id="g" if n % 2 else None) for n, length in enumerate(lengths)]
    return [
        Rollout(
            tokens=dict(r.tokens) | {"pairs": torch.randn(r.num_tokens, 2)},
            tensors={"image": torch.randn(3, n), "none": torch.empty(0)},
            scalars=r.scalars,
            rollout_id=r.rollout_id,
            group_id=r.group_id,
            metadata={"n": n},
        )
        for n, r in enumerate(made)
    ]


def put(store: Store, made: list[Rollout], name: str) -> list[Rollout]:
    described, slab = write_bundle(made, lambda size: torch.empty(size, dtype=torch.uint8))
    store[name] = slab.numpy()
    return read_bundle(described, Stored(name), HOLDER)


def fetch_from(store: Store) -> Callable[[Sequence[Any]], list[NDArray[np.uint8] | Exception]]:
    return lambda names: [store[name] if name in store else KeyError(name) for name in names]


def share_of(parts: list[list[Rollout]]) -> RankBatch:
    return RankBatch(
        step=3,
        rank=0,
        dp_size=1,
        micro_batches=tuple(MicroBatch.of(part) for part in parts),
        load=1.0,
        global_num_rollouts=1,
        global_num_tokens=1,
        global_num_loss_tokens=1,
    )


def delivered(share: RankBatch, store: Store) -> tuple[RankBatch, list[Any]]:
    written = write_share(share, max_bytes=2**30)()
    slabs: list[torch.Tensor] = []
    frame, slab, lost = complete(
        written,
        fetch=fetch_from(store),
        lend=lambda size: slabs.append(torch.full((size,), 255, dtype=torch.uint8)) or slabs[-1],  # type: ignore[func-returns-value]
    )
    return decode(frame, slab), lost


def test_a_bundle_whose_slab_is_at_hand_is_read_whole() -> None:
    made = rollouts([3, 1, 70], "w")
    described, slab = write_bundle(made, lambda size: torch.empty(size, dtype=torch.uint8))
    assert all(same_rollout(a, b) for a, b in zip(made, read_whole(described, slab), strict=True))


def test_what_is_described_is_all_that_the_balancer_asks_about() -> None:
    made = rollouts([3, 1, 70], "d")
    for real, stored in zip(made, put({}, made, "o"), strict=True):
        assert isinstance(stored, RemoteRollout)
        assert (stored.nbytes, stored.num_tokens, stored.num_loss_tokens) == (
            real.nbytes,
            real.num_tokens,
            real.num_loss_tokens,
        )
        assert {k: (v.dtype, v.shape) for k, v in stored.tokens.items()} == {
            k: (v.dtype, v.shape) for k, v in real.tokens.items()
        }
        assert (stored.rollout_id, stored.group_id, stored.scalars, stored.metadata) == (
            real.rollout_id,
            real.group_id,
            real.scalars,
            real.metadata,
        )


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_a_share_of_pieces_from_many_objects_is_put_together(lengths: list[list[int]], choose: Any, cuts: int) -> None:
    store: Store = {}
    real: dict[str, Rollout] = {}
    pool: list[Rollout] = []
    for number, bundle in enumerate(lengths):
        made = rollouts(bundle, f"{number}.")
        real |= {r.rollout_id: r for r in made}
        pool += made if choose.random() < 0.3 else put(store, made, f"o{number}")
    choose.shuffle(pool)
    parts = [part for part in (pool[i::cuts] for i in range(cuts)) if part]
    share, lost = delivered(share_of(parts), store)
    assert not lost
    assert [[r.rollout_id for r in mb.rollouts] for mb in share.micro_batches] == [
        [r.rollout_id for r in p] for p in parts
    ]
    assert all(same_rollout(r, real[r.rollout_id]) for r in share.rollouts)


def test_a_lost_rollout_keeps_its_place_and_weighs_nothing() -> None:
    store: Store = {}
    kept, gone = rollouts([5, 6], "k"), rollouts([7, 8], "g")
    stored = put(store, kept, "here") + put(store, gone, "gone")
    del store["gone"]
    order = [stored[2], stored[0], stored[1], stored[3]]
    share, lost = delivered(share_of([order[:2], order[2:]]), store)
    assert [(one.place, one.rollout_id, one.holder) for one in lost] == [
        (0, "g0", HOLDER.label),
        (3, "g1", HOLDER.label),
    ]
    assert [r.is_padding for r in share.rollouts] == [True, False, False, True]
    assert [r.num_tokens for r in share.rollouts] == [7, 5, 6, 8]
    assert share.micro_batches[0].packed().rollout_weights.tolist() == [0.0, 1.0]
    assert share.micro_batches[0].packed()["loss_mask"].sum() == kept[0].num_loss_tokens
    assert same_rollout(share.rollouts[1], kept[0])
    assert same_rollout(share.rollouts[2], kept[1])
    assert not any(r.num_loss_tokens for r in share.rollouts if r.is_padding)
    assert not share.rollouts[0].tokens["input_ids"].any(), "what lay in the slab before is not shown"


def test_padding_copies_of_a_stored_rollout() -> None:
    store: Store = {}
    [stored] = put(store, rollouts([9], "p"), "o")
    share, lost = delivered(share_of([[stored], [stored.padding_copy("copy")]]), store)
    assert not lost
    assert [r.is_padding for r in share.rollouts] == [False, True]
    assert torch.equal(share.rollouts[0].tokens["input_ids"], share.rollouts[1].tokens["input_ids"])
    assert not share.rollouts[1].tokens["loss_mask"].any()


def test_an_object_lives_as_long_as_one_of_its_rollouts() -> None:
    import weakref

    stored = Stored("o")
    described, _ = write_bundle(rollouts([1, 2], "l"), lambda size: torch.empty(size, dtype=torch.uint8))
    first, second = read_bundle(described, stored, HOLDER)
    watch = weakref.ref(stored)
    del stored, first
    assert watch() is not None
    del second
    assert watch() is None


def test_rollouts_of_two_kinds_do_not_share_a_bundle() -> None:
    other = sb.Rollout(tokens={"input_ids": [1, 2]}, rollout_id="other")
    with pytest.raises(sb.RolloutError, match="columns"):
        write_bundle([*rollouts([1], "a"), other], lambda size: torch.empty(size, dtype=torch.uint8))


# --- messages --------------------------------------------------------------------------------------------------------


def test_an_inbox_puts_in_order() -> None:
    for order in permutations(range(4)):
        inbox: Inbox[int] = Inbox()
        assert list(chain.from_iterable(inbox.add(number, number) for number in order)) == [0, 1, 2, 3]


async def test_messages_are_handled_in_order_and_answered_in_the_same_call() -> None:
    peer = Peer()
    peer.handle = lambda message: peer.put(("echo", *message))
    got: list[tuple[int, list[Any]]] = []

    async def call(number: int) -> None:
        got.append(await peer.exchange(number, [("m", number)]))

    async with anyio.create_task_group() as tasks:
        for number in (1, 0, 2):
            tasks.start_soon(call, number)
    said = [message for _, messages in sorted(got, key=lambda reply: reply[0]) for message in messages]
    assert said == [("echo", "m", number) for number in range(3)]


async def test_a_poll_waits_for_news_and_a_later_poll_ends_an_earlier_one() -> None:
    peer = Peer()
    replies: list[tuple[str, Any]] = []

    async def poll(name: str) -> None:
        replies.append((name, await peer.poll()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll, "first")
        await anyio.sleep(1)
        assert not replies
        tasks.start_soon(poll, "second")
        await anyio.sleep(1)
        assert replies == [("first", (0, []))]
        peer.put(("news",))
        await anyio.sleep(1)
        assert replies[1:] == [("second", (0, [("news",)]))]
        tasks.start_soon(poll, "third")
        await anyio.sleep(1)
        peer.finish()
        peer.finish()
    assert replies[2:] == [("third", (1, [("over",)]))]


async def test_an_exchange_that_takes_the_last_word_does_not_leave_a_poll_behind() -> None:
    peer = Peer()
    peer.handle = lambda message: peer.finish()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.poll)
            await anyio.sleep(1)
            assert await peer.exchange(0, [("bye",)]) == (0, [("over",)])


# --- losses in flight ------------------------------------------------------------------------------------------------


async def test_what_is_lost_in_flight_counts_as_evicted_once_its_step_is_done() -> None:
    evicted: list[tuple[str, str]] = []
    config = sb.BalancerConfig(dp_size=2, batch_size=4, window=4)
    async with sb.StreamBalancer(config, on_evict=lambda r, reason: evicted.append((r.rollout_id, reason))) as balancer:
        for n in range(4):
            await balancer.put(make_rollout(n + 1, f"r{n}"))
        batch = await anext(balancer.batches(auto_ack=False))
        balancer.parts.core.mark_missing(batch.step, ["r1", "stranger"])
        balancer.parts.core.mark_missing(batch.step, ["r1"])
        balancer.parts.core.mark_missing(99, ["r2"])
        balancer.parts.core.verify()
        assert not evicted
        balancer.acknowledge(batch.step)
        balancer.parts.core.verify()
        stats = balancer.statistics()
        assert (stats.acknowledged, stats.evicted["lost"]) == (3, 1)
        assert evicted == [("r1", "lost")]
        await balancer.put(make_rollout(2, "r1"))  # it may be made again
        with pytest.raises(sb.DuplicateRolloutError):
            await balancer.put(make_rollout(2, "r2"))
